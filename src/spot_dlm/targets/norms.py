"""Normalisation of a token's hidden state: what stands before and after a layer's parts, as values.

Example: `RmsNorm(weight, 1e-6)(x, kernels)`.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from spot_dlm.targets.kernels import Kernels


class RmsNorm(NamedTuple):
    """The input over its root mean square, times weight (Llama-like hosts)."""

    weight: Float[Tensor, " E"]
    eps: float

    def __call__(self, x: Float[Tensor, "M E"], kernels: Kernels) -> Float[Tensor, "M E"]:
        """Return the normalised rows."""
        return kernels.rms_norm(x, self.weight, self.eps)


class LayerNorm(NamedTuple):
    """The input minus its mean over its standard deviation, times weight, plus bias (encoders)."""

    weight: Float[Tensor, " E"]
    bias: Float[Tensor, " E"] | None
    eps: float

    def __call__(self, x: Float[Tensor, "M E"], kernels: Kernels) -> Float[Tensor, "M E"]:
        """Return the normalised rows; torch's own works row by row."""
        return torch.nn.functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class Unchanged(NamedTuple):
    """No normalisation (ModernBERT's first layer)."""

    def __call__(self, x: Float[Tensor, "M E"], kernels: Kernels) -> Float[Tensor, "M E"]:
        """Return the rows."""
        return x


UNCHANGED = Unchanged()
Norm = RmsNorm | LayerNorm | Unchanged
