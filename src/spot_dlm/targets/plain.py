"""What a layer does besides products, in torch operations for any device and number format.

No row depends on the others: torch's own silu and gelu, which round the last elements of a CPU's buffer otherwise, are avoided there. Knows
nothing of models. Example: `rms_norm(x, weight, 1e-6)`.
"""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import silu


def rms_norm(x: Float[Tensor, "... K"], weight: Float[Tensor, "..."], eps: float) -> Float[Tensor, "... K"]:
    """Return the normalised input times weight, statistics in float32, as Llama-like hosts do."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)


def turn(
    heads: Float[Tensor, "T H D"],
    norms: Float[Tensor, "h D"] | None,
    eps: float,
    angles: tuple[Float[Tensor, "T D"], Float[Tensor, "T D"]],
    queries: int,
    keys: int,
) -> None:
    """Normalise (if the family does) and rotate query and key heads in place, and scale queries.

    Angles (cosines, sines) in float32 make a rotation in float32.
    """
    turned = heads[:, : queries + keys]
    x = turned if norms is None else rms_norm(turned, norms, eps)
    half = x.shape[-1] // 2
    swapped = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    cos, sin = angles
    turned.copy_(x * cos[:, None] + swapped * sin[:, None])
    heads[:, :queries].mul_(heads.shape[2] ** -0.5)


def place_queries(heads: Float[Tensor, "T H D"], start: int, count: int, into: Float[Tensor, "Hkv n L g D"]) -> None:
    """Copy the queries of `count` segments from token `start` on into matrices by key head and segment."""
    kv_heads, _, length, grouped, size = into.shape
    rows = heads[start : start + count * length, : kv_heads * grouped].view(count, length, kv_heads, grouped, size)
    into[:, :count].copy_(rows.permute(2, 0, 1, 3, 4))


def place_pairs(
    heads: Float[Tensor, "T H D"], start: int, count: int, length: int, into: Float[Tensor, "2 Hkv n w D"], column: int
) -> None:
    """Copy the keys and values of `count` segments from token `start` on, their first token to row `column` of each matrix."""
    kv_heads, size = into.shape[1], into.shape[4]
    rows = heads[start : start + count * length, -2 * kv_heads :].view(count, length, 2, kv_heads, size)
    into[:, :, :count, column : column + length].copy_(rows.permute(2, 3, 0, 1, 4))


def gather(matrices: Float[Tensor, "Hkv n L g D"], start: int, count: int, tokens: Float[Tensor, "T O"]) -> None:
    """Copy the first `count` matrices of every head to the tokens from `start` on."""
    kv_heads, _, length, grouped, size = matrices.shape
    rows = tokens[start : start + count * length].view(count, length, kv_heads, grouped, size)
    rows.copy_(matrices[:, :count].permute(1, 2, 0, 3, 4))


def gated(gate_up: Float[Tensor, "M F"]) -> Float[Tensor, "M f"]:
    """Return silu(gate) * up of two halves side by side."""
    gate, up = gate_up.chunk(2, dim=-1)
    if gate.device.type != "cpu":
        return silu(gate) * up
    wide = gate.float()
    inverse = torch.neg(wide).exp_().add_(1)
    return torch.div(wide, inverse, out=inverse).to(gate.dtype).mul_(up)


def gelu(x: Float[Tensor, "M F"]) -> Float[Tensor, "M F"]:
    """Return x times the normal distribution's share below x, computed in float32."""
    wide = x.float()
    return torch.erf(wide * 0.5**0.5).add_(1).mul_(0.5).mul_(wide).to(x.dtype)
