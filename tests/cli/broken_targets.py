"""Toy targets that break the contract of `evaluate`: with more than one row their logits change by `shift`."""

from typing import Any

import numpy as np
import torch
from toy import ToyTargetAdapter

from spot_dlm.interfaces import MaskedLogits

V, L = 4, 8


def ladder(step: float) -> Any:
    """A toy whose position i wants token i % V, with a logit that falls by `step` per position."""

    def logits(prefix_ids: list, canvas: list) -> dict:
        rows = np.zeros((L, V), dtype=np.float32)
        rows[np.arange(L), np.arange(L) % V] = 3 - step * np.arange(L)
        return {i: rows[i] for i, token in enumerate(canvas) if token is None}

    return logits


class Uneven(ToyTargetAdapter):
    """Exact alone; in company every row's wanted token gains `later` per row, and token 0 gains `zero`."""

    def __init__(self, step: float, later: float = 0.0, zero: float = 0.0) -> None:
        super().__init__(ladder(step), V, L)
        self.later, self.zero = later, zero

    def evaluate(self, prefix: Any, canvases: np.ndarray) -> MaskedLogits:
        exact = super().evaluate(prefix, canvases)
        if len(canvases) == 1:
            return exact
        packed = exact.packed.clone()
        rank = torch.cat([torch.arange(b - a) for a, b in zip(exact.offsets, exact.offsets[1:], strict=False)])
        top = packed.argmax(dim=-1)
        packed[torch.arange(len(packed)), top] += self.later * rank
        packed[:, 0] += self.zero
        return MaskedLogits(packed, exact.offsets)
