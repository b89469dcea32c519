"""What a layer does besides attention: products, norms, rotary positions, gates. On a CPU no row depends on the others, to the bit.

There (float32, MKL) that holds for products of at least MIN_ROWS rows and at most _INNER summands (docs/log.md), so callers pad and
longer sums are split; torch's own silu rounds the last elements of a buffer otherwise. Knows nothing of passes.
Example: `rms_norm(x, weight, 1e-6)`.
"""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import silu

from spot_dlm.targets.weights import Linear

MIN_ROWS = 16
_INNER = 512


def inner_spans(size: int, device: torch.device) -> list[slice]:
    """Return the stretches into which a sum of `size` products is split."""
    step = _INNER if device.type == "cpu" else max(1, size)
    return [slice(start, start + step) for start in range(0, size, step)]


def linear(x: Float[Tensor, "M K"], layer: Linear) -> Float[Tensor, "M N"]:
    """Return x @ matrix + bias of at least MIN_ROWS rows."""
    first, *others = inner_spans(x.shape[1], x.device)
    out = x[:, first] @ layer.matrix[first]
    for span in others:
        out.addmm_(x[:, span], layer.matrix[span])
    return out if layer.bias is None else out.add_(layer.bias)


def add_linear(x: Float[Tensor, "M K"], layer: Linear, onto: Float[Tensor, "M N"]) -> None:
    """Add x @ matrix + bias to `onto`."""
    for span in inner_spans(x.shape[1], x.device):
        onto.addmm_(x[:, span], layer.matrix[span])
    if layer.bias is not None:
        onto.add_(layer.bias)


def rms_norm(x: Float[Tensor, "... K"], weight: Float[Tensor, "..."], eps: float) -> Float[Tensor, "... K"]:
    """Return the normalised input times weight, statistics in float32, as Llama-like hosts do."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)


def rotate(x: Float[Tensor, "T H D"], cos: Float[Tensor, "T D"], sin: Float[Tensor, "T D"]) -> Float[Tensor, "T H D"]:
    """Rotate the halves of every head by its token's angle, in the number format of the angles."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return (x * cos[:, None] + turned * sin[:, None]).to(x.dtype)


def gated(gate_up: Float[Tensor, "M F"]) -> Float[Tensor, "M f"]:
    """Return silu(gate) * up of two halves side by side."""
    gate, up = gate_up.chunk(2, dim=-1)
    if gate.device.type != "cpu":
        return silu(gate) * up
    wide = gate.float()
    return (wide / (1 + torch.exp(-wide))).to(gate.dtype) * up
