"""Muon for matrices, in float32: torch's own version orthogonalises in bfloat16, half of a training step's time on a CPU without bfloat16.

Same update and the same names of its state as `torch.optim.Muon`. Source: Keller Jordan et al., "Muon: an optimizer for hidden layers
in neural networks" (2024). Knows nothing of the model.

Example: `Muon([weight], lr=0.02, weight_decay=0.05).step()`.
"""

from collections.abc import Iterable

import torch
from torch import Tensor


def orthogonalise(update: Tensor, steps: int = 5) -> Tensor:
    """Return a matrix of nearly equal singular values by the quintic Newton-Schulz iteration."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = update / (update.norm() + 1e-7)
    transposed = x.shape[0] > x.shape[1]
    x = x.T if transposed else x
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if transposed else x


class Muon(torch.optim.Optimizer):
    """Momentum, then orthogonalisation; the step is scaled by sqrt(max(1, rows / columns))."""

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every matrix once."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(param)
                momentum = state["momentum_buffer"]
                momentum.lerp_(param.grad, 1 - group["momentum"])
                update = orthogonalise(param.grad.lerp(momentum, group["momentum"]))
                param.mul_(1 - group["lr"] * group["weight_decay"])
                param.add_(
                    update,
                    alpha=-group["lr"] * max(1.0, param.shape[0] / param.shape[1]) ** 0.5,
                )
