"""The functions of `plain` for float32 on a CPU, compiled: one pass over numbers for which torch needs several.

Every row is made by the same instructions, whatever else is there. Knows nothing of models.
"""

from typing import no_type_check

import numpy as np
import torch
from jaxtyping import Float
from numba import njit
from torch import Tensor

_ONE, _ZERO = np.float32(1), np.float32(0)
_NO_NORMS = np.empty((0, 2, 0), np.float32)


def rms_norm(x: Float[Tensor, "T K"], weight: Float[Tensor, " K"], eps: float) -> Float[Tensor, "T K"]:
    """Return the normalised rows times weight."""
    out = torch.empty_like(x)
    _rms_norm(x.numpy(), weight.numpy(), np.float32(eps), out.numpy())
    return out


def turn(
    heads: Float[Tensor, "T H D"],
    norms: Float[Tensor, "h D"] | None,
    eps: float,
    angles: tuple[Float[Tensor, "T D"], Float[Tensor, "T D"]],
    queries: int,
    keys: int,
) -> None:
    """Normalise (if the family does) and rotate query and key heads in place, and scale queries."""
    half = heads.shape[2] // 2
    factors = _NO_NORMS if norms is None else norms.numpy().reshape(-1, 2, half)
    cos, sin = (angle.numpy().reshape(-1, 2, half) for angle in angles)
    by_half = heads.numpy().reshape(len(heads), -1, 2, half)
    _turn(by_half, factors, np.float32(eps), cos, sin, np.float32(heads.shape[2] ** -0.5), queries, keys)


def place_queries(heads: Float[Tensor, "T H D"], start: int, count: int, into: Float[Tensor, "Hkv n L g D"]) -> None:
    """Copy the queries of `count` segments from token `start` on into matrices by key head and segment."""
    _place_queries(heads.numpy(), start, count, into.numpy())


def place_pairs(
    heads: Float[Tensor, "T H D"], start: int, count: int, length: int, into: Float[Tensor, "2 Hkv n w D"], column: int
) -> None:
    """Copy the keys and values of `count` segments from token `start` on, their first token to row `column` of each matrix."""
    _place_pairs(heads.numpy(), start, count, length, into.numpy(), column)


def gather(matrices: Float[Tensor, "Hkv n L g D"], start: int, count: int, tokens: Float[Tensor, "T O"]) -> None:
    """Copy the first `count` matrices of every head to the tokens from `start` on."""
    _gather(matrices.numpy(), start, count, tokens.numpy())


def gated(gate_up: Float[Tensor, "M F"]) -> Float[Tensor, "M f"]:
    """Return silu(gate) * up of two halves side by side."""
    out = torch.neg(gate_up[:, : gate_up.shape[1] // 2]).exp_()
    _gated(gate_up.numpy(), out.numpy())
    return out


@njit(cache=True, error_model="numpy")
@no_type_check
def _rms_norm(x, weight, eps, out):
    size = x.shape[1]
    for t in range(x.shape[0]):
        row, into = x[t], out[t]
        scale = _ONE / np.sqrt(_sum_of_squares(row) / np.float32(size) + eps)
        for k in range(size):
            into[k] = row[k] * scale * weight[k]


@njit(cache=True, error_model="numpy", fastmath=True)
@no_type_check
def _sum_of_squares(row):
    total = _ZERO
    for k in range(row.shape[0]):
        total += row[k] * row[k]
    return total


@njit(cache=True, error_model="numpy")
@no_type_check
def _turn(heads, norms, eps, cos, sin, scale, queries, keys):
    half = heads.shape[3]
    row = np.empty((2, half), np.float32)
    for t in range(heads.shape[0]):
        for h in range(queries + keys):
            factor = scale if h < queries else _ONE
            if len(norms):
                factor = factor / np.sqrt(_squares(heads, t, h) / np.float32(2 * half) + eps)
                for i in range(2):
                    for k in range(half):
                        row[i, k] = heads[t, h, i, k] * factor * norms[h, i, k]
            else:
                for i in range(2):
                    for k in range(half):
                        row[i, k] = heads[t, h, i, k] * factor
            for k in range(half):
                heads[t, h, 0, k] = row[0, k] * cos[t, 0, k] - row[1, k] * sin[t, 0, k]
            for k in range(half):
                heads[t, h, 1, k] = row[1, k] * cos[t, 1, k] + row[0, k] * sin[t, 1, k]


@njit(cache=True, error_model="numpy", fastmath=True)
@no_type_check
def _squares(heads, t, h):
    total = _ZERO
    for i in range(2):
        for k in range(heads.shape[3]):
            total += heads[t, h, i, k] * heads[t, h, i, k]
    return total


@njit(cache=True, error_model="numpy")
@no_type_check
def _place_queries(heads, start, count, into):
    kv_heads, _, length, grouped, size = into.shape
    for n in range(count):
        for i in range(length):
            row = heads[start + n * length + i]
            for h in range(kv_heads):
                for j in range(grouped):
                    for k in range(size):
                        into[h, n, i, j, k] = row[h * grouped + j, k]


@njit(cache=True, error_model="numpy")
@no_type_check
def _place_pairs(heads, start, count, length, into, column):
    _, kv_heads, _, _, size = into.shape
    first = heads.shape[1] - 2 * kv_heads
    for n in range(count):
        for i in range(length):
            row = heads[start + n * length + i]
            for h in range(kv_heads):
                for k in range(size):
                    into[0, h, n, column + i, k] = row[first + h, k]
                    into[1, h, n, column + i, k] = row[first + kv_heads + h, k]


@njit(cache=True, error_model="numpy")
@no_type_check
def _gather(matrices, start, count, tokens):
    kv_heads, _, length, grouped, size = matrices.shape
    for n in range(count):
        for i in range(length):
            row = tokens[start + n * length + i]
            for h in range(kv_heads):
                for j in range(grouped):
                    for k in range(size):
                        row[(h * grouped + j) * size + k] = matrices[h, n, i, j, k]


@njit(cache=True, error_model="numpy")
@no_type_check
def _gated(gate_up, exponentials):
    size = exponentials.shape[1]
    for t in range(gate_up.shape[0]):
        gate, up, into = gate_up[t, :size], gate_up[t, size:], exponentials[t]
        for k in range(size):
            into[k] = gate[k] * up[k] / (_ONE + into[k])
