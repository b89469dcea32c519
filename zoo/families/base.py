"""Shared types of the training-data families and the rule that splits values."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

Split = Literal["train", "heldout_values", "heldout_templates"]
SPLITS: tuple[Split, ...] = ("train", "heldout_values", "heldout_templates")

BUCKETS = 10
MAX_PROMPT = 220
MAX_ANSWER = 150

T = TypeVar("T")


@dataclass(frozen=True)
class Sample:
    """One prompt with its canonical answer and the data needed to check an answer."""

    family: str
    template: str
    prompt: str
    answer: str
    check: dict[str, Any]


Family = Callable[[random.Random, Split], Sample]


def in_bucket(key: str) -> bool:
    """Tell whether a canonical value string falls into the reserved tenth."""
    return zlib.crc32(key.encode("ascii")) % BUCKETS == 0


def allowed(key: str, split: Split) -> bool:
    """Tell whether values with this canonical string may occur in the split."""
    return in_bucket(key) == (split == "heldout_values")


def choose(rng: random.Random, split: Split, train: Sequence[T], heldout: Sequence[T]) -> T:
    """Pick a template that belongs to the split."""
    return rng.choice(heldout if split == "heldout_templates" else train)


def exact(text: str) -> dict[str, Any]:
    """Build the check for an answer that must match literally."""
    return {"kind": "exact", "text": text}
