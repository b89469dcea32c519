"""What is final of a sequence that is still being decoded: the run of committed tokens from the left, and the text of it.

Knows nothing of who drives the loop. Example: `"".join(map(text.push, run.take(event)))` for every event, and `text.end()` at the last.
"""

from collections.abc import Callable, Collection, Sequence

from spot_dlm.sequence import BlockStarted, Event, Finished, Pass

_PATIENCE = 32
"""Tokens to wait for the rest of a character; one has four bytes at most."""


class StableIds:
    """The tokens from the first generated one up to the first that is not committed yet, or the end token; they never change.

    Args:
        stop_ids: the target's end tokens.
        limit: tokens at most.
    """

    def __init__(self, stop_ids: Collection[int], limit: int) -> None:
        self._stop_ids, self._limit = frozenset(stop_ids), limit
        self._committed: dict[int, int] = {}
        self._following = -1
        self._count = 0

    def take(self, event: Event) -> list[int]:
        """Return the tokens that an event makes stable, the end token left out; the last event brings what is missing."""
        if isinstance(event, Finished):
            ids = event.result.token_ids
            new = ids[self._count : len(ids) - (ids[-1] in self._stop_ids)] if ids else []
            self._count += len(new)
            return new
        if isinstance(event, BlockStarted) and self._following < 0:
            self._following = max(event.num_prompt, event.start + int(event.state.masked[0]) - len(event.committed))
        new = []
        if isinstance(event, BlockStarted | Pass):
            self._committed.update((c.position, c.token) for c in event.committed)
            while self._count < self._limit and self._committed.get(self._following, -1) not in self._stop_ids | {-1}:
                new.append(self._committed.pop(self._following))
                self._following += 1
                self._count += 1
        return new


class TextStream:
    """The text of tokens that come one by one; what was returned never changes, and joined it is the text of them all.

    Only the last few tokens are decoded, so a token costs the same wherever it stands. A character whose bytes are not all there waits.

    Args:
        decode: text of ids (`Target.decode`).
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []  # tokens of the last piece, as context, and those after them
        self._read, self._shown = 0, ""  # of the window: tokens whose text was returned, and that text

    def push(self, token_id: int) -> str:
        """Return the text that one more token makes final."""
        self._window.append(token_id)
        text = self._decode(self._window)
        if len(self._window) - self._read >= _PATIENCE:
            return self.end()
        if len(text) <= len(self._shown) or text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        piece = text[len(self._shown) :]
        self._window = self._window[self._read :]
        self._read, self._shown = len(self._window), self._decode(self._window)
        return piece

    def end(self) -> str:
        """Return the text that still waits."""
        piece = self._decode(self._window)[len(self._shown) :] if self._window else ""
        self._window, self._read, self._shown = [], 0, ""
        return piece
