"""One sample while it is decoded: its events become text that never changes, cut at stop strings, and the end of it.

What it gives depends on the tokens alone, not on how many of them a pass committed. Example: `Track(target, sample).take(event)`.
"""

from dataclasses import dataclass

from spot_dlm.interfaces import Target
from spot_dlm.sequence import BlockStarted, Committed, Event, Finished, FinishReason, Pass
from spot_dlm.server.jobs import Sample
from spot_dlm.server.stops import StopFilter
from spot_dlm.stable import StableIds, TextStream


@dataclass(frozen=True)
class Ended:
    """How a sample ended: tokens up to the end token or the one that completed a stop string, both included.

    `token_ids` are these tokens and `commit_steps` the number of the transition that committed each (`Result.commit_steps`), where
    the order is wanted.
    """

    finish_reason: FinishReason
    num_tokens: int
    token_ids: list[int] | None = None
    commit_steps: list[int] | None = None


class Track:
    """The way from a sample's events to its text; `ended` is set at the end."""

    def __init__(self, target: Target, sample: Sample) -> None:
        self._run = StableIds(target.spec.stop_ids, sample.params.max_new_tokens)
        self._text, self._stops = TextStream(target.decode), StopFilter(sample.stops)
        self._num_prompt, self._wants_order = len(sample.prompt_ids), sample.wants_order
        self._order: list[Committed] = []
        self._ids: list[int] = []
        self.ended: Ended | None = None

    def take(self, event: Event) -> str:
        """Return the text that an event makes final."""
        if self._wants_order and isinstance(event, BlockStarted | Pass):
            self._order += event.committed
        pieces = []
        for token_id in self._run.take(event):
            self._ids.append(token_id)
            pieces.append(self._stops.feed(self._text.push(token_id)))
            if self._stops.is_stopped:
                self._end("stop")
                return "".join(pieces)
        if isinstance(event, Finished):
            pieces.append(self._stops.feed(self._text.end()))
            if not self._stops.is_stopped:
                pieces.append(self._stops.end())
                self._ids = event.result.token_ids
            self._end("stop" if self._stops.is_stopped else event.result.finish_reason)
        return "".join(pieces)

    def _end(self, reason: FinishReason) -> None:
        if not self._wants_order:
            self.ended = Ended(reason, len(self._ids))
            return
        number: dict[tuple[int, int], int] = {}
        at = {c.position: number.setdefault((c.block, c.step), len(number)) for c in self._order}
        self.ended = Ended(reason, len(self._ids), self._ids, [at[self._num_prompt + i] for i in range(len(self._ids))])
