"""The harness's prompts as token ids: bare texts, and conversations that it has the model put in its chat template.

The harness wants a conversation back as one text and hands that text to `generate_until`. Contents that hold the text of a special token
are marked in it, so that they stay ordinary text.

Example: `prompts.encode(prompts.render([{"role": "user", "content": "Add 1 and 2."}]))`.
"""

from collections.abc import Mapping, Sequence

from spot_dlm.interfaces import Target
from spot_dlm.targets.text import TextCodec

_MARK = "\N{NULL}"  # around contents


class Prompts:
    """Encodes the contexts of requests.

    Args:
        codec: tokenizer and chat template.
        chat: whether a bare text is a user's message.

    Raises:
        ValueError: if there is no tokenizer, or no chat template where one is needed.
    """

    def __init__(self, codec: TextCodec | None, chat: bool = False) -> None:
        if codec is None:
            raise ValueError("the model has no tokenizer; the harness needs one")
        self._codec, self._chat = codec, chat
        self._renders = False
        if chat and not self.template:
            raise ValueError("model_args: chat=true needs a chat template, and the model has none")

    @classmethod
    def of(cls, target: Target, chat: bool = False) -> "Prompts":
        """Return the prompts of a loaded target."""
        return cls(getattr(target, "codec", None), chat)

    @property
    def template(self) -> str:
        """The chat template; empty where there is none."""
        return self._codec.template

    @property
    def is_bare(self) -> bool:
        """Whether no template is used."""
        return not self._chat and not self._renders

    def begin_chat(self) -> str:
        """Take note that the harness puts prompts in the chat template; return it.

        Raises:
            ValueError: if there is none, or `chat` would do so a second time.
        """
        if self._chat:
            raise ValueError("--apply_chat_template does what model_args chat=true would: give one of them")
        if not self.template:
            raise ValueError("--apply_chat_template needs a chat template, and the model has none")
        self._renders = True
        return self.template

    def render(self, conversation: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        """Return a conversation in the chat template, with the beginning of the answer, or open at its last message.

        Raises:
            ValueError: if the template refuses it, or a message holds a NUL character.
        """
        self.begin_chat()
        turns = [dict(turn) for turn in conversation]
        if any(_MARK in turn["content"] for turn in turns):
            raise ValueError("a message holds a NUL character; the harness's prompts may not")
        if any(self._codec.has_special(turn["content"]) for turn in turns):
            turns = [turn | {"content": f"{_MARK}{turn['content']}{_MARK}"} for turn in turns]
        return self._codec.render(turns, add_generation_prompt)

    def encode(self, context: str) -> list[int]:
        """Return the ids of a request's context: what `render` gave, or bare text."""
        if self._chat:
            return self._codec.encode(context)
        if self.is_bare:
            return self._codec.encode_bare(context)
        pieces = context.split(_MARK)
        return [
            i for n, piece in enumerate(pieces) for i in (self._codec.encode_bare(piece) if n % 2 else self._codec.encode_template(piece))
        ]
