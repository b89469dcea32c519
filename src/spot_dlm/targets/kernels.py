"""Which functions do the work besides products: `compiled` for float32 on a CPU, `plain` elsewhere. One description of both.

Example: `kernels_for(weights).rms_norm(x, weight, 1e-6)`.
"""

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from spot_dlm.targets import compiled, plain


@runtime_checkable
class Kernels(Protocol):
    """What `plain` and `compiled` define; the shapes stand there."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return the normalised input times weight."""

    def turn(self, heads: Tensor, norms: Tensor | None, eps: float, angles: tuple[Tensor, Tensor], queries: int, keys: int) -> None:
        """Normalise (if the family does) and rotate query and key heads in place, and scale queries."""

    def place_queries(self, heads: Tensor, start: int, count: int, into: Tensor) -> None:
        """Copy the queries of `count` segments from token `start` on into matrices by key head and segment."""

    def place_pairs(self, heads: Tensor, start: int, count: int, length: int, into: Tensor, column: int) -> None:
        """Copy keys and values of `count` segments likewise, their first token to row `column` of each matrix."""

    def gather(self, matrices: Tensor, start: int, count: int, tokens: Tensor) -> None:
        """Copy the first `count` matrices of every head to the tokens from `start` on."""

    def gated(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up of two halves side by side."""


def kernels_for(like: Tensor) -> Kernels:
    """Return the functions for a device and number format."""
    return compiled if like.device.type == "cpu" and like.dtype == torch.float32 else plain
