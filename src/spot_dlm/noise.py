"""Coupled noise: log-exponential variables as a pure function of (seed, sequence, block, step, position, token).

Integer counter-based generator, then logarithms made of basic IEEE float64 operations, so the bits do not depend on the device, the
vector library, the batch slot or the order of calls (docs/decoding-rules.md, "Noise"). Source: Gumbel coupling (arXiv 2408.07978,
2506.05632), drawn as an exponential race in the log domain. Knows nothing of states or rules.

Example: `CoupledNoise(seed=0, sequence=0).rows(block=1, step=2, positions=np.array([3, 4]), vocab_size=768)`.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import no_type_check

import numpy as np
import torch
from jaxtyping import Float, Float32, Float64, Int64
from numba import njit
from torch import Tensor

NOISE_VERSION = 1
"""Changes whenever a bit of the noise changes; recorded with every artifact that depends on it."""

_MASK64 = (1 << 64) - 1
_G, _C1, _C2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_CACHE_BYTES = 256 * 2**20


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * _C1) & _MASK64
    z = ((z ^ (z >> 27)) * _C2) & _MASK64
    return z ^ (z >> 31)


def _absorb(h: int, word: int) -> int:
    return _mix((h ^ _mix((word + _G) & _MASK64)) + _G & _MASK64)


def _signed(z: int) -> int:
    return z - (1 << 64) if z >> 63 else z


def _shift_right(x: Int64[Tensor, "..."], bits: int) -> Int64[Tensor, "..."]:
    """Shift logically (torch shifts int64 arithmetically)."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _log(x: Float64[Tensor, "..."]) -> Float64[Tensor, "..."]:
    """Natural logarithm of positive normal numbers by +, -, *, / alone: the same bits on every IEEE device.

    Range reduction to [sqrt(1/2), sqrt(2)), then 2 atanh(s) with s = (m - 1) / (m + 1) to s^11; relative error below 1e-9.
    """
    offset = 0x3FE6A09E00000000
    bits = x.view(torch.int64) + (0x3FF0000000000000 - offset)
    exponent = (bits >> 52).sub_(1023).to(torch.float64)
    m = bits.bitwise_and_(0xFFFFFFFFFFFFF).add_(offset).view(torch.float64)
    s = (m - 1.0).div_(m.add_(1.0))
    q = s * s
    series = torch.full_like(q, 2 / 11)
    for coefficient in (2 / 9, 2 / 7, 2 / 5, 2 / 3, 2.0):
        series.mul_(q).add_(coefficient)
    return exponent.mul_(0.6931471805599453).add_(series.mul_(s))


@njit(cache=True)
@no_type_check
def _log_scalar(x: float) -> float:
    """`_log` for one number: the same operations in the same order, so the same bits."""
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
    """`_mix` for a 64-bit word."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_C1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_C2)
    return z ^ (z >> np.uint64(31))


@njit(cache=True)
@no_type_check
def _draw_some(base: np.ndarray, positions: np.ndarray, token_ids: np.ndarray, out: np.ndarray) -> None:
    """Fill out[d, i, k] with log E of token_ids[i, k] at positions[i]; base[d] is the key of step d."""
    for d in range(out.shape[0]):
        for i in range(out.shape[1]):
            h1 = _mix_word((base[d] ^ _mix_word(np.uint64(positions[i]) + np.uint64(_G))) + np.uint64(_G))
            h2 = _mix_word(h1 + np.uint64(_C1))
            for k in range(out.shape[2]):
                x = (np.uint64(token_ids[i, k]) + np.uint64(1)) * np.uint64(_G) + h1
                x = (x ^ (x >> np.uint64(30))) * np.uint64(_C1) + h2
                x = (x ^ (x >> np.uint64(27))) * np.uint64(_C2)
                x = x ^ (x >> np.uint64(31))
                uniform = (np.float64(np.int64(x >> np.uint64(12))) + 0.5) * 2.0**-52
                out[d, i, k] = np.float32(_log_scalar(-_log_scalar(uniform)))


class CoupledNoise:
    """The noise of one sequence; both decoders of a comparison build it from the same seed and sequence key.

    Args:
        seed: any integer; only its low 64 bits count.
        sequence: key of the sequence, so that several samples of one prompt differ.
        use_step: whether the denoising step enters the key; may be False only where the order ignores the sampled token.
        device: where the noise is produced.
    """

    def __init__(self, seed: int, sequence: int, use_step: bool = True, device: torch.device | str = "cpu") -> None:
        self._root = _absorb(_absorb(0, seed & _MASK64), sequence & _MASK64)
        self._use_step = use_step
        self._device = torch.device(device)
        self._cache: OrderedDict[tuple[int, int, int], tuple[Int64[np.ndarray, " m"], Tensor]] = OrderedDict()
        self._cached_bytes = 0

    def rows(self, block: int, step: int, positions: Int64[np.ndarray, " m"], vocab_size: int) -> Float[Tensor, "m V"]:
        """Return log E, E ~ Exp(1), for `positions` inside the block; recent steps are remembered."""
        step = step if self._use_step else 0
        key = (block, step, vocab_size)
        if key in self._cache:
            known, values = self._cache[key]
            if len(known) == len(positions) and np.array_equal(known, positions):
                self._cache.move_to_end(key)
                return values
            at = np.searchsorted(known, positions)
            if len(known) and np.array_equal(known[np.minimum(at, len(known) - 1)], positions):
                self._cache.move_to_end(key)
                return values[torch.from_numpy(at).to(self._device)]
            self._cached_bytes -= values.nbytes
            del self._cache[key]
        values = self._draw(block, step, positions, vocab_size)
        self._cache[key] = (positions.copy(), values)
        self._cached_bytes += values.nbytes
        while self._cached_bytes > _CACHE_BYTES and len(self._cache) > 1:
            self._cached_bytes -= self._cache.popitem(last=False)[1][1].nbytes
        return values

    def at(
        self, block: int, steps: Sequence[int], positions: Int64[np.ndarray, " m"], token_ids: Int64[np.ndarray, "m K"]
    ) -> Float32[np.ndarray, "D m K"]:
        """Return log E of a few tokens of every position at several steps, on the host: the same bits as in `rows`."""
        block_key = _absorb(self._root, block)
        base = np.array([_absorb(block_key, step if self._use_step else 0) for step in steps], dtype=np.uint64)
        out = np.empty((len(steps), *token_ids.shape), dtype=np.float32)
        _draw_some(base, positions, token_ids, out)
        return out

    def _draw(self, block: int, step: int, positions: Int64[np.ndarray, " m"], vocab_size: int) -> Float[Tensor, "m V"]:
        base = _absorb(_absorb(self._root, block), step)
        first = [_absorb(base, int(p)) for p in positions]
        h1 = torch.tensor([_signed(h) for h in first], dtype=torch.int64, device=self._device)[:, None]
        h2 = torch.tensor([_signed(_mix(h + _C1 & _MASK64)) for h in first], dtype=torch.int64, device=self._device)[:, None]
        tokens = torch.arange(1, vocab_size + 1, dtype=torch.int64, device=self._device)
        x = tokens.mul_(_signed(_G))[None] + h1
        x.bitwise_xor_(_shift_right(x, 30)).mul_(_signed(_C1)).add_(h2)
        x.bitwise_xor_(_shift_right(x, 27)).mul_(_signed(_C2))
        x.bitwise_xor_(_shift_right(x, 31))
        uniform = _shift_right(x, 12).to(torch.float64).add_(0.5).mul_(2.0**-52)
        return _log(_log(uniform).neg_()).to(torch.float32)
