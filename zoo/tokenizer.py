"""Byte-level BPE tokenizer of the shipped model: single digits, capitalised words without their space.

Knows nothing of the model. Example: `build(texts, vocab_size=768).encode("Anna is 34").tokens`.
"""

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
MASK = "<|MASK|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END, MASK)

# One piece each: a digit; a capitalised word (never with its space, so that a copied name keeps its tokens);
# a lower-case word with its space; a run of spaces; a line break; one sign.
PIECES = r"\d|[A-Z]+[a-z]*| ?[a-z]+|\n| +|[^\sA-Za-z\d]|\s"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ message['content'] + '<|endoftext|>' }}"
    "{% else %}{{ '<|im_start|>' + message['content'] + '<|im_end|>' }}{% endif %}"
    "{% endfor %}"
)


def build(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train the tokenizer on `texts`; the special tokens take the first ids in the order of SPECIAL_TOKENS."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
