"""The exponential race, compiled: which token wins it, without drawing what cannot win (docs/decoding-rules.md, "Noise").

A position's token is the first argmax of float32(score - log E). The integers behind E decide almost every token: E is at least 1 - u,
so a token whose 1 - u exceeds what it would need to beat the best so far needs no logarithm. The others get exactly the noise of
`noise.CoupledNoise.rows`, and their float32 scores decide. The same generator gives one number for every position, for rules that draw the
order. Knows nothing of states, rules and of where the keys come from.

Example: `race(keys, positions, scores, scores.argmax(1))` is one token for every key.
"""

import math
from typing import no_type_check

import numpy as np
import torch
from jaxtyping import Float, Float32, Float64, Int64, UInt64
from numba import njit
from torch import Tensor

G, C1, C2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""Constants of the generator."""

_CHUNK = 128
"""Tokens hashed at a time; only a chunk that holds a possible winner is looked at token by token."""

_FLOOR = np.float32(-80.0)
"""Scores further below the best are treated as this far, so that their odds stay normal numbers."""


def on_host(values: Tensor) -> bool:
    """Whether compiled code can read them; else torch computes the same on their device."""
    return values.device.type == "cpu"


def first_argmax(values: Float[Tensor, "m V"]) -> Int64[Tensor, " m"]:
    """Return the lowest index of the maximum of every row; an undecided row (NaN) gives V."""
    size = values.shape[-1]
    if on_host(values):
        host = values.to(torch.float32).contiguous().numpy()
        best = host.argmax(axis=-1)  # the first one, or the first NaN
        _mark_undecided(host, best)
        return torch.from_numpy(best)
    best = values.amax(dim=-1, keepdim=True)
    index = torch.arange(size, device=values.device)
    return torch.where(values == best, index, size).amin(dim=-1)


def descending(values: Float32[Tensor, "m V"]) -> Int64[Tensor, "m V"]:
    """Return the order of every row, the highest value first; ties keep the lower index."""
    if not on_host(values):
        return torch.sort(values, dim=-1, descending=True, stable=True)[1]
    codes = np.empty(values.shape, dtype=np.int64)
    _encode(values.contiguous().numpy(), codes)
    codes.sort(axis=-1)  # vector code, ten times as fast as a stable sort
    codes &= 2**32 - 1
    return torch.from_numpy(codes)


def race(
    keys: UInt64[np.ndarray, "D m"], positions: Int64[np.ndarray, " m"], scores: Float32[np.ndarray, "m V"], tops: Int64[np.ndarray, " m"]
) -> Int64[np.ndarray, "D m"]:
    """Return the first argmax over tokens of float32(score - log E), E of positions[i] under keys[d, i].

    `tops` is the first argmax of the scores, V in undecided rows; these stay undecided.
    """
    out = np.empty(keys.shape, dtype=np.int64)
    _find_winners(keys, positions, scores, tops, out)
    return out


def uniforms(keys: UInt64[np.ndarray, " D"], positions: Int64[np.ndarray, " m"]) -> Float64[np.ndarray, "D m"]:
    """Return a uniform number in (0, 1) for every position under every key: that of its token 0."""
    out = np.empty((len(keys), len(positions)), dtype=np.float64)
    _fill_uniforms(keys, positions, out)
    return out


def gumbels(keys: UInt64[np.ndarray, " D"], positions: Int64[np.ndarray, " m"]) -> Float32[np.ndarray, "D m"]:
    """Return Gumbel noise, minus log E of token 0, for every position under every key."""
    out = np.empty((len(keys), len(positions)), dtype=np.float32)
    _to_gumbels(uniforms(keys, positions).reshape(-1), out.reshape(-1))
    return out


@njit(cache=True)
@no_type_check
def _mark_undecided(values: np.ndarray, best: np.ndarray) -> None:
    """Write V where the best value is NaN."""
    for i in range(len(values)):
        if np.isnan(values[i, best[i]]):
            best[i] = values.shape[1]


@njit(cache=True)
@no_type_check
def _encode(values: np.ndarray, codes: np.ndarray) -> None:
    """Write whole numbers that ascend as the values descend, and among equals with the index; the index is in the low half.

    The bits of a float, less the sign's, count up with its size; adding 0 makes one of both zeros.
    """
    for i in range(len(values)):
        for v in range(values.shape[1]):
            bits = np.int64(np.float32(values[i, v] + np.float32(0)).view(np.int32))
            ascending = bits ^ ((bits >> np.int64(63)) & np.int64(0x7FFFFFFF))
            codes[i, v] = (~ascending << np.int64(32)) | np.int64(v)


@njit(cache=True)
@no_type_check
def log_scalar(x: float) -> float:
    """`noise._log` for one number: the same operations in the same order, so the same bits."""
    bits = np.float64(x).view(np.int64) + (0x3FF0000000000000 - 0x3FE6A09E00000000)
    exponent = np.float64((bits >> 52) - 1023)
    m = np.int64((bits & 0xFFFFFFFFFFFFF) + 0x3FE6A09E00000000).view(np.float64)
    s = (m - 1.0) / (m + 1.0)
    q = s * s
    series = 2 / 11
    series = series * q + 2 / 9
    series = series * q + 2 / 7
    series = series * q + 2 / 5
    series = series * q + 2 / 3
    series = series * q + 2.0
    return exponent * 0.6931471805599453 + series * s


@njit(cache=True)
@no_type_check
def _mix_word(z: np.uint64) -> np.uint64:
    """`noise._mix` for a 64-bit word."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(C1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(C2)
    return z ^ (z >> np.uint64(31))


@njit(cache=True)
@no_type_check
def _position_key(key: np.uint64, position: int) -> np.uint64:
    """`noise._absorb` for 64-bit words."""
    return _mix_word((key ^ _mix_word(np.uint64(position) + np.uint64(G))) + np.uint64(G))


@njit(cache=True)
@no_type_check
def _noise_of(h1: np.uint64, h2: np.uint64, token: int) -> np.float32:
    """Log E of a token, where h1 and h2 are the keys of its position."""
    return np.float32(log_scalar(-log_scalar(_uniform_of(h1, h2, token))))


@njit(cache=True)
@no_type_check
def _uniform_of(h1: np.uint64, h2: np.uint64, token: int) -> float:
    """The uniform number of a token, where h1 and h2 are the keys of its position."""
    x = (np.uint64(token) + np.uint64(1)) * np.uint64(G) + h1
    x = (x ^ (x >> np.uint64(30))) * np.uint64(C1) + h2
    x = (x ^ (x >> np.uint64(27))) * np.uint64(C2)
    x = x ^ (x >> np.uint64(31))
    return (np.float64(np.int64(x >> np.uint64(12))) + 0.5) * 2.0**-52


@njit(cache=True)
@no_type_check
def _fill_uniforms(keys: np.ndarray, positions: np.ndarray, out: np.ndarray) -> None:
    for d in range(len(keys)):
        for i in range(len(positions)):
            h1 = _position_key(keys[d], positions[i])
            out[d, i] = _uniform_of(h1, _mix_word(h1 + np.uint64(C1)), 0)


@njit(cache=True)
@no_type_check
def _to_gumbels(values: np.ndarray, out: np.ndarray) -> None:
    for i in range(len(values)):
        out[i] = -np.float32(log_scalar(-log_scalar(values[i])))


@njit(cache=True)
@no_type_check
def _bound_odds(scores: np.ndarray, top_score: np.float32, bits: np.ndarray) -> None:
    """Write the float32 bits of an upper bound of exp(score - top_score), at most 7 % above it.

    Between powers of two exp2 lies below its chord, and a float's bits are that chord; 1024 units (1e-4) cover the roundings.
    """
    for k in range(len(scores)):
        gap = max(scores[k] - top_score, _FLOOR)
        bits[k] = np.int32(gap * np.float32(2**23 / math.log(2)) + np.float32(127 * 2**23 + 1024))


@njit(cache=True)
@no_type_check
def _hash_chunk(h1: np.uint64, h2: np.uint64, begin: int, missing: np.ndarray) -> None:
    """Write 1 - u, rounded down to a multiple of 2**-24 and in that unit, for the tokens from `begin` on."""
    first = h1 + np.uint64(begin) * np.uint64(G)
    for k in range(len(missing)):
        x = np.uint64(k + 1) * np.uint64(G) + first
        x = (x ^ (x >> np.uint64(30))) * np.uint64(C1) + h2
        x = (x ^ (x >> np.uint64(27))) * np.uint64(C2)  # the last xor leaves the leading bits as they are
        missing[k] = np.float32(2**24 - 1 - np.int32(x >> np.uint64(40)))


@njit(cache=True)
@no_type_check
def _any_possible(missing: np.ndarray, odds: np.ndarray, limit: np.float32) -> bool:
    """Whether any token may win; counted in 32 bits, which becomes vector code as wide as the numbers."""
    count = np.int32(0)
    for k in range(len(missing)):
        count = np.int32(count + np.int32(missing[k] * limit <= odds[k]))
    return count > 0


@njit(cache=True)
@no_type_check
def _limit(best: np.float32, top_score: np.float32) -> np.float32:
    """Return the factor by which 1 - u, in units of 2**-24, must stay within a token's odds for its score to reach `best`.

    float32(score - log E) >= best implies E <= exp(score - best + slack), where the slack holds the roundings of log E (below 3e-6)
    and of the difference; and E >= 1 - u.
    """
    slack = 1e-5 + abs(np.float64(best)) * 2.0**-22
    return np.float32(math.exp(np.float64(best) - np.float64(top_score) - slack) * 2.0**-24)


@njit(cache=True)
@no_type_check
def _find_winners(keys: np.ndarray, positions: np.ndarray, scores: np.ndarray, tops: np.ndarray, out: np.ndarray) -> None:
    """Do what `race` says."""
    size = scores.shape[1]
    bits = np.empty(size, dtype=np.int32)
    odds = bits.view(np.float32)
    missing = np.empty(_CHUNK, dtype=np.float32)
    for i in range(out.shape[1]):
        top = tops[i]
        if top == size or np.isinf(scores[i, top]):  # undecided, or the finite noise does not change the order
            out[:, i] = top
            continue
        top_score = scores[i, top]
        _bound_odds(scores[i], top_score, bits)
        for d in range(out.shape[0]):
            h1 = _position_key(keys[d, i], positions[i])
            h2 = _mix_word(h1 + np.uint64(C1))
            winner, best = top, top_score - _noise_of(h1, h2, top)
            limit = _limit(best, top_score)
            for begin in range(0, size, _CHUNK):
                count = min(_CHUNK, size - begin)
                _hash_chunk(h1, h2, begin, missing[:count])
                if not _any_possible(missing[:count], odds[begin : begin + count], limit):
                    continue
                for k in range(count):
                    if missing[k] * limit <= odds[begin + k]:
                        score = scores[i, begin + k] - _noise_of(h1, h2, begin + k)
                        if score > best or (score == best and begin + k < winner):
                            winner, best = begin + k, score
                            limit = _limit(best, top_score)
            out[d, i] = winner
