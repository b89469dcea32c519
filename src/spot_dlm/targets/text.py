"""Text in and out: chat template and tokenizer files, so that user text never becomes a special id.

Knows nothing of weights. Example: `TextCodec.read(folder).encode("Write <|MASK|> twice")` has no mask id.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_MARKS = re.compile(r"<\|[^|]+\|>|</?think>")
_NO_TEMPLATE = (
    "the checkpoint has no chat template and none is known for it (a base model?): "
    "encode the bare prompt with --raw (use_template=False), or add chat_template.jinja"
)
_CONTENT = "\N{OBJECT REPLACEMENT CHARACTER}spot-content\N{OBJECT REPLACEMENT CHARACTER}"


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
        except Exception as error:  # jinja raises its own and whatever the template divides by
            raise ValueError(f"the chat template in {folder} cannot be used: {error}") from error
        return codec

    @property
    def defined_ids(self) -> set[int]:
        """Ids that have a text."""
        return set(self._tokenizer.get_vocab().values())

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

    def encode(self, text: str) -> list[int]:
        """Encode user text inside the chat template; special tokens typed in the text stay ordinary text.

        Raises:
            ValueError: if the text is empty, or there is no chat template to put it in.
        """
        if not text.strip():
            raise ValueError("the prompt is empty; give at least one character")
        if not self._use_template:
            return self._plain(text)
        if not self._tokenizer.chat_template:
            raise ValueError(_NO_TEMPLATE)
        if self._special is None or not self._special.search(text):
            return self._template_ids(self._render(text))
        head, _, tail = self._render(_CONTENT).partition(_CONTENT)
        return self._template_ids(head) + self._plain(text) + self._template_ids(tail)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens left out."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _render(self, text: str) -> str:
        messages = [{"role": "user", "content": text}]
        return str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    def _template_ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False)) if text else []

    def _plain(self, text: str) -> list[int]:
        """Encode piece by piece, the text of every added token cut after its first character, so that none is recognised."""
        cuts = [0, *(m.start() + 1 for m in self._special.finditer(text))] if self._special else [0]
        pieces = [text[a:b] for a, b in zip(cuts, [*cuts[1:], len(text)], strict=True)]
        return [i for p in pieces for i in self._tokenizer.encode(p, add_special_tokens=False, split_special_tokens=True)]
