"""Training-data families of the tiny block-diffusion language model."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import replace

from zoo.families import arithmetic, json_text, python_code, rewrite, stdlib
from zoo.families.base import MAX_ANSWER, MAX_PROMPT, SPLITS, Family, Sample, Split

__all__ = [
    "FAMILIES",
    "MAX_ANSWER",
    "MAX_PROMPT",
    "SPLITS",
    "Family",
    "Sample",
    "Split",
    "heldout",
    "sample",
    "stream",
]

FAMILIES: dict[str, Family] = {
    "json": json_text.sample,
    "python": python_code.sample,
    "arithmetic": arithmetic.sample,
    "rewrite": rewrite.sample,
    "stdlib": stdlib.sample,
}

MAX_REPEATS = 5000


def sample(family: str, rng: random.Random, split: Split) -> Sample:
    """Draw one sample of a family, or of a training-only one: rows of arithmetic facts, `facts` with only results masked."""
    if family in ("drill", "facts") and split == "train":
        return replace(arithmetic.drill(rng), family=family)
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}, expected one of {SPLITS}")
    if family not in FAMILIES:
        raise ValueError(f"unknown family {family!r}, expected one of {list(FAMILIES)}")
    return FAMILIES[family](rng, split)


def stream(seed: int, split: Split, weights: Mapping[str, float]) -> Iterator[Sample]:
    """Yield an endless mixture of families that depends only on the arguments."""
    rng = random.Random(f"stream|{seed}|{split}")
    names = sorted(weights)
    shares = [weights[name] for name in names]
    while True:
        yield sample(rng.choices(names, shares)[0], rng, split)


def heldout(family: str, split: Split, n: int, seed: int) -> list[Sample]:
    """Draw a fixed list of samples with distinct prompts."""
    rng = random.Random(f"heldout|{family}|{split}|{seed}")
    found: dict[str, Sample] = {}
    repeats = 0
    while len(found) < n:
        drawn = sample(family, rng, split)
        if drawn.prompt in found:
            repeats += 1
            if repeats > MAX_REPEATS:
                raise ValueError(f"{family}/{split} has too few prompts for {n} samples")
            continue
        found[drawn.prompt] = drawn
    return list(found.values())
