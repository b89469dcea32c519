"""A streamer for transformers' `generate(streamer=...)`: text as it becomes stable, and on request the draft view.

With spot-dlm's decoder (`custom_generate`) the view shows what is drafted and what was accepted, as `spot generate --watch` does; with any
other one only the text comes.

Example: `model.generate(**inputs, streamer=SpotStreamer(tokenizer, skip_prompt=True, draft=True), custom_generate=...)`.
"""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from transformers.generation.streamers import BaseStreamer

from spot_dlm.canvas import Canvas
from spot_dlm.interfaces import Target
from spot_dlm.sequence import Event
from spot_dlm.stable import TextStream


class SpotStreamer(BaseStreamer):
    """Prints text to stdout as soon as it can no longer change; whole characters only.

    Args:
        tokenizer: decodes the tokens.
        skip_prompt: leave the prompt out.
        draft: show the canvas on stderr while it fills in; the text follows at the end.
        console: where the canvas is drawn; default: stderr.
        decode_kwargs: for the tokenizer's `decode`; special tokens are left out by default.
    """

    def __init__(
        self, tokenizer: Any, skip_prompt: bool = False, draft: bool = False, console: Console | None = None, **decode_kwargs: Any
    ) -> None:
        self._tokenizer, self._skip_prompt, self._draft = tokenizer, skip_prompt, draft
        self._console = console
        self._decode_kwargs = {"skip_special_tokens": True, **decode_kwargs}
        self._canvas: Canvas | None = None
        self._begin()

    def _begin(self) -> None:
        self._text, self._is_prompt, self._waiting = TextStream(self._decode), True, ""

    def _decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), **self._decode_kwargs))

    def watch(self, target: Target) -> None:
        """Begin the draft view; the decoder calls it before the first token."""
        if self._draft:
            self._canvas = Canvas(target, self._console or Console(stderr=True))
            self._canvas.__enter__()

    def observe(self, event: Event) -> None:
        """Draw what a pass drafted and committed."""
        if self._canvas is not None:
            self._canvas.show(event)

    def put(self, value: Any) -> None:
        """Take the prompt, then tokens.

        Raises:
            ValueError: for more than one sequence.
        """
        if value.ndim > 1 and len(value) > 1:
            raise ValueError(f"SpotStreamer shows one sequence, these are {len(value)}")
        prompt, self._is_prompt = self._is_prompt, False
        if prompt and self._skip_prompt:
            return
        piece = "".join(map(self._text.push, value.flatten().tolist()))
        if self._canvas is not None:
            self._waiting += piece
        elif piece:
            self.on_finalized_text(piece)

    def end(self) -> None:
        """Print what still waits, and get ready for the next sequence."""
        if self._canvas is not None:
            self._canvas.__exit__(None, None, None)
            self._canvas = None
        self.on_finalized_text(self._waiting + self._text.end(), stream_end=True)
        self._begin()

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Print text that will not change; override it to send the text elsewhere."""
        print(text, flush=True, end=None if stream_end else "")
