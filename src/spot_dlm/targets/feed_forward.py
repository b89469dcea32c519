"""The feed-forward part of a layer: dense, or a mixture of experts with its router.

A row goes to the experts that its own scores choose; an expert works on its rows alone, padded to `least_rows`, and a row's terms are
added in the order of the experts, so that no row depends on the others. Source of the formulas: transformers' Qwen3Moe and Glm4Moe.
Example: `layer.feed_forward.add_to(x, normalised, kernels)`.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from spot_dlm.targets.kernels import Kernels
from spot_dlm.targets.plain import gelu
from spot_dlm.targets.products import Linear, add_linear, least_rows, linear

Routing = tuple[Float[Tensor, "M k"], Int64[Tensor, "M k"]]
"""For every row the weights (float32) and numbers of its experts."""


class Dense(NamedTuple):
    """down(silu(gate) * up)."""

    gate_up: Linear
    down: Linear

    def add_to(self, x: Float[Tensor, "M E"], hidden: Float[Tensor, "M E"], kernels: Kernels) -> None:
        """Add what the layer makes of `hidden` to x."""
        add_linear(kernels.gated(linear(hidden, self.gate_up)), self.down, onto=x)


class GeluDense(NamedTuple):
    """down(gelu(gate) * up), as in ModernBERT."""

    gate_up: Linear
    down: Linear

    def add_to(self, x: Float[Tensor, "M E"], hidden: Float[Tensor, "M E"], kernels: Kernels) -> None:
        """Add what the layer makes of `hidden` to x."""
        gate, up = linear(hidden, self.gate_up).chunk(2, dim=-1)
        add_linear(gelu(gate).mul_(up), self.down, onto=x)


@dataclass(frozen=True)
class SoftmaxRouter:
    """The k most probable experts, weighted by their probabilities (Qwen3Moe).

    Args:
        gate: scores of the experts; columns after them are padding (`least_columns`).
        count: number of experts.
        top: experts of a row (k).
        normalised: whether the weights of a row add up to 1.
    """

    gate: Linear
    count: int
    top: int
    normalised: bool

    def __call__(self, hidden: Float[Tensor, "M E"]) -> Routing:
        """Choose experts for every row."""
        scores = linear(hidden, self.gate)[:, : self.count].float()
        weights, chosen = torch.softmax(scores, dim=-1).topk(self.top, dim=-1)
        return weights / weights.sum(dim=-1, keepdim=True) if self.normalised else weights, chosen


@dataclass(frozen=True)
class SigmoidRouter:
    """Experts chosen by sigmoid + bias from the best groups, weighted by the sigmoid alone (Glm4Moe), all in float32.

    Args:
        gate: scores of the experts, float32; columns after them are padding (`least_columns`).
        bias: added for the choice.
        top: experts of a row (k).
        groups: equal parts into which the experts are cut; a part is as good as its two best experts together.
        kept_groups: parts from which a row's experts come.
        normalised: whether the weights of a row add up to `scale`, or are only multiplied by it.
        scale: factor of the weights.
    """

    gate: Linear
    bias: Float[Tensor, " n"]
    top: int
    groups: int
    kept_groups: int
    normalised: bool
    scale: float

    def __call__(self, hidden: Float[Tensor, "M E"]) -> Routing:
        """Choose experts for every row."""
        raw = linear(hidden.float(), self.gate)[:, : len(self.bias)]
        scores = torch.neg(raw).exp_().add_(1).reciprocal_()  # torch's sigmoid rounds a buffer's end otherwise
        grouped = (scores + self.bias).view(len(scores), self.groups, -1)
        best = grouped.topk(2, dim=-1).values.sum(dim=-1).topk(self.kept_groups, dim=-1).indices
        kept = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(1, best, True)
        chosen = grouped.masked_fill(~kept[..., None], -torch.inf).flatten(1).topk(self.top, dim=-1).indices
        weights = scores.gather(1, chosen)
        return (weights / (weights.sum(dim=-1, keepdim=True) + 1e-20) if self.normalised else weights) * self.scale, chosen


@dataclass(frozen=True)
class Experts:
    """A mixture of n experts and, in some families, one dense layer for every row; terms are summed in float32."""

    router: SoftmaxRouter | SigmoidRouter
    experts: list[Dense]
    shared: Dense | None = None

    def add_to(self, x: Float[Tensor, "M E"], hidden: Float[Tensor, "M E"], kernels: Kernels) -> None:
        """Add what the experts of every row make of `hidden` to x."""
        weights, chosen = self.router(hidden)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=len(self.experts)).tolist()
        rows, factors = order // chosen.shape[1], weights.flatten()[order, None]
        total = torch.zeros_like(x, dtype=torch.float32)
        for expert, own, factor in zip(self.experts, rows.split(counts), factors.split(counts), strict=True):
            if len(own):
                total.index_add_(0, own, _apply(expert, hidden, own, kernels).mul_(factor))
        x.add_(total.to(x.dtype))
        if self.shared is not None:
            self.shared.add_to(x, hidden, kernels)


FeedForward = Dense | GeluDense | Experts


def _apply(expert: Dense, hidden: Float[Tensor, "M E"], rows: Int64[Tensor, " m"], kernels: Kernels) -> Float[Tensor, "m E"]:
    """Return an expert's results for some rows in float32, made together with as many more as an exact product needs."""
    missing = max(0, least_rows(hidden.device) - len(rows))
    padded = torch.cat((rows, rows[:1].expand(missing))) if missing else rows
    made = linear(kernels.gated(linear(hidden.index_select(0, padded), expert.gate_up)), expert.down)
    return made[: len(rows)].float()
