"""Text in and out: chat template and tokenizer files, so that user text never becomes a special id.

Knows nothing of weights. Example: `TextCodec.read(folder).encode("Write <|MASK|> twice")` has no mask id.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_MARKS = re.compile(r"<\|[^|]+\|>|</?think>")
_NO_TEMPLATE = (
    "the checkpoint has no chat template and none is known for it (a base model?): "
    "encode the bare prompt with --raw (use_template=False), or add chat_template.jinja"
)
_CONTENT = "\N{OBJECT REPLACEMENT CHARACTER}spot-content-{}\N{OBJECT REPLACEMENT CHARACTER}"
_FIND = re.compile(_CONTENT.replace("{}", "([0-9]+)"))
_HALF = re.compile("[\ud800-\udfff]")


class TextCodec:
    """A fast tokenizer with its chat template; `use_template=False` encodes the bare text (base models).

    Without a template, text is refused unless it is to be bare: a prompt that a model was never trained on is not a thing to guess.
    """

    def __init__(self, tokenizer: Any, use_template: bool = True) -> None:
        self._tokenizer = tokenizer
        self._use_template = use_template
        added = sorted((t.content for t in tokenizer.added_tokens_decoder.values()), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, added))) if added else None

    @classmethod
    def read(cls, folder: Path, use_template: bool = True, templates: Sequence[str] = ()) -> "TextCodec | None":
        """Read tokenizer.json (or vocab.json and merges.txt) and the chat template; None where there is no tokenizer.

        Args:
            folder: the checkpoint.
            use_template: wrap text in the chat template.
            templates: where the checkpoint has none, the first of these whose special tokens the tokenizer has.

        Raises:
            ValueError: if a tokenizer file cannot be parsed or the chat template cannot be used.
        """
        from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer

        try:
            config_file = folder / "tokenizer_config.json"
            config = json.loads(config_file.read_text("utf-8")) if config_file.exists() else {}
            template_file = folder / "chat_template.jinja"
            template = template_file.read_text("utf-8") if template_file.exists() else config.get("chat_template")
            if (folder / "tokenizer.json").exists():
                tokenizer: Any = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
            elif (folder / "vocab.json").exists() and (folder / "merges.txt").exists():
                tokenizer = Qwen2Tokenizer(vocab=str(folder / "vocab.json"), merges=str(folder / "merges.txt"))
                added = config.get("added_tokens_decoder", {})
                for _, token in sorted(added.items(), key=lambda kv: int(kv[0])):
                    tokenizer.add_tokens([token["content"]], special_tokens=bool(token.get("special", True)))
            else:
                return None
        except Exception as error:  # the tokenizers library raises bare Exception
            raise ValueError(f"the tokenizer files in {folder} cannot be read: {error}") from error
        codec = cls(tokenizer, use_template)
        tokenizer.chat_template = template or codec.fitting(templates)
        try:
            if use_template and tokenizer.chat_template:
                codec.encode("a")
        except ValueError as error:
            raise ValueError(f"the chat template in {folder} cannot be used: {error}") from error
        return codec

    @property
    def defined_ids(self) -> set[int]:
        """Ids that have a text."""
        return set(self._tokenizer.get_vocab().values())

    @property
    def fingerprint(self) -> str:
        """Short hash of the texts of all ids: equal for tokenizers that agree on them, whatever files they came from."""
        vocabulary = sorted((i, text) for text, i in self._tokenizer.get_vocab().items())
        return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()[:16]

    def fitting(self, templates: Sequence[str]) -> str | None:
        """Return the first template whose special tokens are tokens here."""
        known = self._tokenizer.get_vocab()
        return next((t for t in templates if all(token in known for token in _MARKS.findall(t))), None)

    def id_of(self, token: str) -> int | None:
        """Return the id of a token's exact text, None if there is none."""
        found = self._tokenizer.get_vocab().get(token)
        return None if found is None else int(found)

    def token_text(self, token_id: int) -> str:
        """Return the literal text of one id, special or not; empty for an undefined id."""
        return str(self._tokenizer.decode([token_id], clean_up_tokenization_spaces=False))

    @property
    def has_template(self) -> bool:
        """Whether text goes into a chat template."""
        return self._use_template and bool(self.template)

    @property
    def template(self) -> str:
        """The chat template; empty where there is none."""
        return str(self._tokenizer.chat_template or "")

    def encode(self, text: str) -> list[int]:
        """Encode user text inside the chat template, bare where none is to be used; special tokens typed in the text stay ordinary text.

        Raises:
            ValueError: if the text is empty, or there is no chat template to put it in.
        """
        if not isinstance(text, str):
            raise ValueError(f"the prompt must be a text, not {type(text).__name__}")
        if not text.strip():
            raise ValueError("the prompt is empty; give at least one character")
        return self.encode_chat([{"role": "user", "content": text}]) if self._use_template else self.encode_bare(text)

    def encode_chat(self, conversation: Sequence[Mapping[str, str]]) -> list[int]:
        """Encode a conversation and the beginning of the answer; special tokens typed in a message stay ordinary text.

        Raises:
            ValueError: if there is no chat template, it refuses the conversation, or a message is none.
        """
        if not self.has_template:
            raise ValueError(_NO_TEMPLATE)
        self._check(conversation)
        texts = [turn["content"] for turn in conversation]
        if not any(self.has_special(text) for text in texts):
            return self.encode_template(self.render(conversation))
        marked = [{**turn, "content": _CONTENT.replace("{}", str(i))} for i, turn in enumerate(conversation)]
        ids: list[int] = []
        pieces = _FIND.split(self.render(marked))
        if any("\N{OBJECT REPLACEMENT CHARACTER}" in piece for piece in pieces[::2]):
            raise ValueError(
                "the chat template changes contents, so that special tokens typed in a message cannot be kept apart: leave them out"
            )
        for place, piece in enumerate(pieces):
            ids += self.encode_bare(texts[int(piece)]) if place % 2 else self.encode_template(piece)
        return ids

    def _check(self, conversation: Sequence[Mapping[str, str]]) -> None:
        """Refuse what is no conversation: roles stand in the template as they are, so that special tokens in them would count.

        Raises:
            ValueError: naming the message.
        """
        if isinstance(conversation, str | bytes | Mapping) or not isinstance(conversation, Sequence) or not conversation:
            raise ValueError("a conversation must be a list of messages, at least one, each with role and content")
        for number, turn in enumerate(conversation):
            said = [turn.get(name) for name in ("role", "content")] if isinstance(turn, Mapping) else [None]
            if not all(isinstance(text, str) for text in said):
                raise ValueError(f"message {number} must have texts for role and content")
            role = str(said[0])
            if self.has_special(role) or _FIND.search(role):
                raise ValueError(f"message {number}: role {role[:40]!r} holds a special token; give system, user or assistant")

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens left out."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def has_special(self, text: str) -> bool:
        """Whether the text of a special token stands in a text."""
        return self._special is not None and self._special.search(text) is not None

    def render(self, conversation: Sequence[Mapping[str, str]], answer_begins: bool = True) -> str:
        """Return a conversation in the chat template, with the beginning of the answer, or else open at its last message.

        Raises:
            ValueError: if the template refuses it.
        """
        turns, end = [dict(turn) for turn in conversation], {"continue_final_message": not answer_begins}
        try:
            return str(self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=answer_begins, **end))
        except Exception as error:  # jinja's own, raised by templates that want roles to alternate, and whatever a template divides by
            roles = ", ".join(turn["role"] for turn in turns)
            raise ValueError(f"the chat template refuses the roles {roles}: {' '.join(str(error).split())[:200]}") from error

    def encode_template(self, text: str) -> list[int]:
        """Encode a piece of a rendered template, in which special tokens are meant."""
        if _HALF.search(text):
            raise ValueError("the text holds half of a surrogate pair, which is no character")
        return list(self._tokenizer.encode(text, add_special_tokens=False)) if text else []

    def encode_bare(self, text: str) -> list[int]:
        """Encode text without a template: piece by piece, the text of every added token cut after its first character, so that none
        is recognised.
        """
        if _HALF.search(text):
            raise ValueError("the text holds half of a surrogate pair, which is no character")
        cuts = [0, *(m.start() + 1 for m in self._special.finditer(text))] if self._special else [0]
        pieces = [text[a:b] for a, b in zip(cuts, [*cuts[1:], len(text)], strict=True)]
        return [i for p in pieces for i in self._tokenizer.encode(p, add_special_tokens=False, split_special_tokens=True)]
