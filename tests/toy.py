"""Toy targets behind the package's Target protocol; both decoders see the same float32 logits.

A logits function maps (complete blocks before, canvas with None for masked) to {position in the block: float32 row}, as
`reference_decoder.ToyTarget` does; `ToyTargetAdapter` shows it to the package, `reference_decode` takes it as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any

import jaxtyping
import numpy as np
import torch
from reference_decoder import ReferenceResult, ReferenceRule, reference_decode

from spot_dlm.interfaces import DecodeParams, MaskedLogits, TargetSpec
from spot_dlm.sequence import Result
from spot_dlm.transition import Sampling, UnmaskRule

NEVER = 10**6  # a mask token id that no toy emits


class ToyPrefix:
    """The complete blocks so far, and the complete canvases of the last pass, which need no pass of their own to be committed."""

    def __init__(self, ids: Sequence[int], block_length: int) -> None:
        self.ids, self.block_length = tuple(int(i) for i in ids), block_length
        self.evaluated: list[tuple] = []

    @property
    def length(self) -> int:
        return len(self.ids)


class ToyTargetAdapter:
    """Target over a logits function. Everything it ever evaluated is remembered, so a repeated pass costs a dictionary look-up.

    One that `crosses` evaluates a complete canvas as the all-mask block after it.
    """

    def __init__(
        self,
        toy: Callable[[list, list], dict],
        vocab_size: int | None = None,
        block_length: int | None = None,
        stop_ids: Sequence[int] = (),
        mask_token_id: int = NEVER,
        max_length: int = 4096,
        crosses: bool = False,
    ) -> None:
        self.toy = toy
        vocab_size = vocab_size or toy.vocab_size
        block_length = block_length or toy.block_length
        ids, device = (mask_token_id, frozenset(stop_ids)), torch.device("cpu")
        self._spec = TargetSpec("toy", "toy", block_length, vocab_size, *ids, max_length, device, "float32", 1, crosses=crosses)
        self._rows: dict[tuple, np.ndarray] = {}
        self._passes: dict[tuple, MaskedLogits] = {}
        self.evaluated_rows = 0

    @property
    def spec(self) -> TargetSpec:
        return self._spec

    def prefill(self, token_ids: np.ndarray, block_length: int) -> ToyPrefix:
        assert block_length == self._spec.block_length and len(token_ids) % block_length == 0
        return ToyPrefix(token_ids, block_length)

    def evaluate(self, prefix: ToyPrefix, canvases: np.ndarray) -> MaskedLogits:
        prefix.evaluated = [tuple(canvas) for canvas in canvases.tolist() if min(canvas) >= 0]
        assert self._spec.crosses or not prefix.evaluated
        self.evaluated_rows += len(canvases) + len(prefix.evaluated)
        key = (prefix.ids, canvases.tobytes())
        if key not in self._passes:
            parts = [self._logits(prefix, canvas) for canvas in canvases]
            offsets = [0, *np.cumsum([len(p) for p in parts]).tolist()]
            self._passes[key] = MaskedLogits(torch.from_numpy(np.concatenate(parts)), offsets)
        return self._passes[key]

    def _logits(self, prefix: ToyPrefix, canvas: np.ndarray) -> np.ndarray:
        key = (prefix.ids, canvas.tobytes())
        if key not in self._rows:
            cells = [None if t < 0 else t for t in canvas.tolist()]
            complete = None not in cells
            answer = self.toy([*prefix.ids, *cells], [None] * len(cells)) if complete else self.toy(list(prefix.ids), cells)
            self._rows[key] = np.stack([answer[i] for i in sorted(answer)])
        return self._rows[key]

    def commit(self, prefix: ToyPrefix, token_ids: np.ndarray) -> int:
        assert len(token_ids) == prefix.block_length and token_ids.min() >= 0
        block = tuple(token_ids.tolist())
        passes = int(block not in prefix.evaluated)
        prefix.ids, prefix.evaluated = prefix.ids + block, []
        return passes

    def encode(self, text: str) -> list[int]:
        return [ord(c) % self._spec.vocab_size for c in text]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(97 + t) for t in token_ids if t not in self._spec.stop_ids)


class SameRows:
    """Every position has the same random row, so every confidence ties exactly (and with `levels`, logits tie as well)."""

    def __init__(self, vocab_size: int, block_length: int, seed: int = 0, levels: int = 0) -> None:
        self.vocab_size, self.block_length, self.seed, self.levels = vocab_size, block_length, seed, levels

    def __call__(self, prefix_ids: list, canvas: list) -> dict:
        cells = [self.vocab_size if t is None else t for t in canvas]
        rng = np.random.default_rng([self.seed, len(prefix_ids), *prefix_ids, *cells])
        row = rng.standard_normal(self.vocab_size)
        row = (rng.integers(0, self.levels, self.vocab_size) if self.levels else row).astype(np.float32)
        return {i: row for i, token in enumerate(canvas) if token is None}


class Excluding:
    """A toy whose `excluded` ids have logit minus infinity."""

    def __init__(self, toy: Any, excluded: Sequence[int]) -> None:
        self.toy, self.excluded = toy, list(excluded)
        self.vocab_size, self.block_length = toy.vocab_size, toy.block_length

    def __call__(self, prefix_ids: list, canvas: list) -> dict:
        rows = {i: row.copy() for i, row in self.toy(prefix_ids, canvas).items()}
        for row in rows.values():
            row[self.excluded] = -np.inf
        return rows


def split_rule(options: dict) -> tuple[UnmaskRule, Sampling, ReferenceRule]:
    """The same options for the package and for the reference."""
    drawn = {"temperature", "top_k", "top_p", "seed"}
    sampling = Sampling(**{k: v for k, v in options.items() if k in drawn})
    return UnmaskRule(**{k: v for k, v in options.items() if k not in drawn}), sampling, ReferenceRule(**options)


def reference_of(target: ToyTargetAdapter, options: dict, prompt: list, params: DecodeParams, **more: Any) -> ReferenceResult:
    """What the reference decodes from the same toy with the same parameters."""
    return reference_decode(
        target.toy,
        split_rule(options)[2],
        prompt,
        target.spec.block_length,
        params.max_new_tokens,
        target.spec.stop_ids,
        params.stop,
        params.sequence,
        **more,
    )


def trajectory(result: Result | ReferenceResult) -> tuple:
    """All that must never change: ids, finish reason and what was committed in which step (within a step by position)."""
    if isinstance(result, ReferenceResult):
        return result.ids, result.finish_reason, sorted(result.order, key=lambda c: (c[2], c[3], c[0]))
    order = [(c.position, c.token, c.block, c.step) for c in result.order]
    return result.token_ids, result.finish_reason, sorted(order, key=lambda c: (c[2], c[3], c[0]))


@contextmanager
def unchecked():
    """Skip the run-time shape checks, which cost three times the decoding; every path also runs with them elsewhere."""
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
