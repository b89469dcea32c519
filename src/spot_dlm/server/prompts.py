"""Prompts as token ids: conversations inside the chat template, and bare text; what clients write never yields special ids.

Has a tokenizer of its own, for one must not be shared between threads.

Example: `Prompts.of(target).chat([{"role": "user", "content": "Hi"}])`.
"""

from collections.abc import Sequence
from copy import deepcopy

from spot_dlm.interfaces import Target
from spot_dlm.server.errors import ApiError
from spot_dlm.targets.text import TextCodec


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
        return cls(deepcopy(getattr(target, "codec", None)), target.spec.max_length)

    def bare(self, text: str) -> list[int]:
        """Encode text as it is, without a template.

        Raises:
            ApiError: if there is no tokenizer, or the text is far too long.
        """
        codec = self._known("prompt")
        self._check_length(codec, [text], "prompt")
        return codec.encode_bare(text)

    def chat(self, conversation: Sequence[dict[str, str]]) -> list[int]:
        """Encode a conversation and the beginning of the answer.

        One user's message gives the ids of `Target.encode`.

        Raises:
            ApiError: if there is no tokenizer or chat template, the template refuses the conversation, or it is far too long.
        """
        codec = self._known("messages")
        if not codec.has_template:
            raise ApiError(400, "messages: this model has no chat template; use /v1/completions", "messages")
        self._check_length(codec, [turn["content"] for turn in conversation], "messages")
        try:
            return codec.encode_chat(conversation)
        except ValueError as error:
            message = "messages: the model's chat template refuses this conversation (roles or their order)"
            raise ApiError(400, message, "messages") from error

    def _check_length(self, codec: TextCodec, texts: Sequence[str], field: str) -> None:
        """Refuse what is far too long by the tokens of its beginning, so that it keeps others no longer than what fits."""
        text, size, most = "\n".join(texts), 4 * self._max_length, 2 * self._max_length
        too_long = len(texts) > self._max_length
        while not too_long and size < len(text):
            too_long = len(codec.encode_bare(text[:size])) > most
            size *= 2
        if too_long:
            message = f"{field}: far more tokens than the {self._max_length} that the target's context holds"
            raise ApiError(400, message, field, "context_length_exceeded")

    def _known(self, field: str) -> TextCodec:
        if self._codec is None:
            raise ApiError(400, f"{field}: this model has no tokenizer; send token ids to /v1/completions", field)
        return self._codec
