"""Prompts as token ids: conversations inside the chat template, and bare text; what clients write never yields special ids.

Has a tokenizer of its own, for one must not be shared between threads.

Example: `Prompts.of(target).chat([{"role": "user", "content": "Hi"}])`.
"""

import re
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from spot_dlm.interfaces import Target
from spot_dlm.server.errors import ApiError
from spot_dlm.targets.text import TextCodec

_CONTENT = "\N{OBJECT REPLACEMENT CHARACTER}spot-content-{}\N{OBJECT REPLACEMENT CHARACTER}"
_FIND = re.compile("\N{OBJECT REPLACEMENT CHARACTER}spot-content-([0-9]+)\N{OBJECT REPLACEMENT CHARACTER}")


class Prompts:
    """Encodes what clients send; not thread-safe.

    Args:
        codec: the tokenizer with its chat template; None where the checkpoint has none.
        max_length: tokens that the target's context holds.
    """

    def __init__(self, codec: TextCodec | None, max_length: int) -> None:
        self._codec, self._max_length = codec, max_length

    @classmethod
    def of(cls, target: Target) -> "Prompts":
        """Return the prompts of a loaded target, with a copy of its tokenizer."""
        return cls(deepcopy(getattr(target, "_codec", None)), target.spec.max_length)

    def bare(self, text: str) -> list[int]:
        """Encode text as it is, without a template.

        Raises:
            ApiError: if there is no tokenizer, or the text is far too long.
        """
        codec = self._known("prompt")
        self._check_length(codec, [text], "prompt")
        return codec._plain(text)

    def chat(self, conversation: Sequence[dict[str, str]]) -> list[int]:
        """Encode a conversation and the beginning of the answer.

        One user's message gives the ids of `Target.encode`.

        Raises:
            ApiError: if there is no tokenizer or chat template, the template refuses the conversation, or it is far too long.
        """
        codec = self._known("messages")
        if not codec._use_template or not codec._tokenizer.chat_template:
            raise ApiError(400, "messages: this model has no chat template; use /v1/completions", "messages")
        texts = [turn["content"] for turn in conversation]
        self._check_length(codec, texts, "messages")
        if codec._special is None or not any(codec._special.search(text) for text in texts):
            return codec._template_ids(_render(codec, conversation))
        marked = [turn | {"content": _CONTENT.replace("{}", str(i))} for i, turn in enumerate(conversation)]
        ids: list[int] = []
        for place, piece in enumerate(_FIND.split(_render(codec, marked))):
            ids += codec._plain(texts[int(piece)]) if place % 2 else codec._template_ids(piece)
        return ids

    def _check_length(self, codec: TextCodec, texts: Sequence[str], field: str) -> None:
        """Refuse what is far too long by the tokens of its beginning, so that it keeps others no longer than what fits."""
        text, size, most = "\n".join(texts), 4 * self._max_length, 2 * self._max_length
        too_long = len(texts) > self._max_length
        while not too_long and size < len(text):
            too_long = len(codec._plain(text[:size])) > most
            size *= 2
        if too_long:
            message = f"{field}: far more tokens than the {self._max_length} that the target's context holds"
            raise ApiError(400, message, field, "context_length_exceeded")

    def _known(self, field: str) -> TextCodec:
        if self._codec is None:
            raise ApiError(400, f"{field}: this model has no tokenizer; send token ids to /v1/completions", field)
        return self._codec


def _render(codec: TextCodec, conversation: Sequence[dict[str, str]]) -> str:
    tokenizer: Any = codec._tokenizer
    try:
        return str(tokenizer.apply_chat_template(list(conversation), tokenize=False, add_generation_prompt=True))
    except Exception as error:  # jinja's own, raised by templates that want roles to alternate, and whatever a template divides by
        raise ApiError(400, "messages: the model's chat template refuses this conversation (roles or their order)", "messages") from error
