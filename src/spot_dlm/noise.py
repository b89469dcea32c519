"""Coupled noise: log-exponential variables as a pure function of (seed, sequence, block, step, position, token).

Integer counter-based generator, then logarithms made of basic IEEE float64 operations, so the bits do not depend on the device, the
vector library, the batch slot or the order of calls (docs/decoding-rules.md, "Noise"). Source: Gumbel coupling (arXiv 2408.07978,
2506.05632), drawn as an exponential race in the log domain. A second stream, under keys of its own, has one number for every position: what
rules that draw the order need. Knows nothing of states or rules.

Example: `CoupledNoise(seed=0, sequence=0).rows(block=1, step=2, positions=np.array([3, 4]), vocab_size=768)`.
"""

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Float32, Float64, Int64, UInt64
from torch import Tensor

from spot_dlm.race import C1, C2, G, first_argmax, gumbels, on_host, race, uniforms

NOISE_VERSION = 1
"""Changes whenever a bit of the noise changes; recorded with every artifact that depends on it."""

_MASK64 = (1 << 64) - 1
_ORDER = int.from_bytes(b"order", "big")
"""A word between sequence and block that only keys of positions' own noise have; these are one word longer than those of tokens."""
_CACHE_BYTES = 256 * 2**20


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * C1) & _MASK64
    z = ((z ^ (z >> 27)) * C2) & _MASK64
    return z ^ (z >> 31)


def _absorb(h: int, word: int) -> int:
    return _mix((h ^ _mix((word + G) & _MASK64)) + G & _MASK64)


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


def _values(keys: list[int], vocab_size: int, device: torch.device) -> Float32[Tensor, "m V"]:
    """Return log E of every token for each position's key."""
    h1 = torch.tensor([_signed(h) for h in keys], dtype=torch.int64, device=device)[:, None]
    h2 = torch.tensor([_signed(_mix(h + C1 & _MASK64)) for h in keys], dtype=torch.int64, device=device)[:, None]
    tokens = torch.arange(1, vocab_size + 1, dtype=torch.int64, device=device)
    x = tokens.mul_(_signed(G))[None] + h1
    x.bitwise_xor_(_shift_right(x, 30)).mul_(_signed(C1)).add_(h2)
    x.bitwise_xor_(_shift_right(x, 27)).mul_(_signed(C2))
    x.bitwise_xor_(_shift_right(x, 31))
    uniform = _shift_right(x, 12).to(torch.float64).add_(0.5).mul_(2.0**-52)
    return _log(_log(uniform).neg_()).to(torch.float32)


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
        for past in [k for k in self._cache if k[0] < block]:  # blocks that are finished
            self._cached_bytes -= self._cache.pop(past)[1].nbytes
        values = self._draw(block, step, positions, vocab_size)
        self._cache[key] = (positions.copy(), values)
        self._cached_bytes += values.nbytes
        while self._cached_bytes > _CACHE_BYTES and len(self._cache) > 1:
            self._cached_bytes -= self._cache.popitem(last=False)[1][1].nbytes
        return values

    def draw(
        self, block: int, steps: Sequence[int], positions: Int64[np.ndarray, " m"], scores: Float32[Tensor, "m V"]
    ) -> Int64[np.ndarray, "D m"]:
        """Return the token that every position draws at each of several steps: the first argmax of `scores` minus the noise of that step.

        The same tokens as `first_argmax(scores - rows(block, step, positions, V))`, for much less: no noise is drawn for tokens that
        cannot win. What drafters need in place of `rows`: `scores` are stale tempered and filtered logits (`transition.filter_logits`
        of `temper`), the same for all steps. A row whose scores hold NaN is undecided and gives V.
        """
        if not on_host(scores):
            drawn = [first_argmax(scores - self.rows(block, step, positions, scores.shape[-1])) for step in steps]
            return torch.stack(drawn).cpu().numpy() if drawn else np.empty((0, len(positions)), dtype=np.int64)
        keys = np.repeat(self.step_keys(block, steps)[:, None], len(positions), axis=1)
        return race(keys, positions, scores.contiguous().numpy(), first_argmax(scores).numpy())

    def step_keys(self, block: int, steps: Sequence[int]) -> UInt64[np.ndarray, " D"]:
        """Return the keys that the noise of these steps comes from, positions not yet absorbed."""
        return np.array([self.step_key(block, step) for step in steps], dtype=np.uint64)

    def step_key(self, block: int, step: int) -> int:
        """Return the key that the noise of a step comes from."""
        return _absorb(_absorb(self._root, block), step if self._use_step else 0)

    def order(self, block: int, steps: Sequence[int], positions: Int64[np.ndarray, " m"]) -> Float32[np.ndarray, "D m"]:
        """Return Gumbel noise of positions at several steps, independent of the tokens' noise: what draws the order of positions.

        The step is always part of its key. Computed on the host, whatever the device.
        """
        return gumbels(np.array([self._order_key(block, step) for step in steps], dtype=np.uint64), positions)

    def times(self, block: int, positions: Int64[np.ndarray, " m"]) -> Float64[np.ndarray, " m"]:
        """Return a uniform number in (0, 1) of every position, the same at every step: `order`'s of step 0 before the logarithms."""
        return uniforms(np.array([self._order_key(block, 0)], dtype=np.uint64), positions)[0]

    def _order_key(self, block: int, step: int) -> int:
        return _absorb(_absorb(_absorb(self._root, _ORDER), block), step)

    def _draw(self, block: int, step: int, positions: Int64[np.ndarray, " m"], vocab_size: int) -> Float[Tensor, "m V"]:
        base = _absorb(_absorb(self._root, block), step)
        return _values([_absorb(base, int(p)) for p in positions], vocab_size, self._device)


Drawing = tuple[CoupledNoise, int, int, int]
"""Noise, block, step and number of positions of rows that draw together."""


def draw_each(
    drawings: Sequence[Drawing], positions: Int64[np.ndarray, " R"], scores: Float32[Tensor, "R V"], top: Int64[Tensor, " R"]
) -> Int64[Tensor, " R"]:
    """Return the first argmax of `scores` minus the noise, for the positions of the first drawing, then of the second, and so on.

    On the host without drawing what cannot win (`race`).

    Args:
        drawings: say what noise it is.
        positions: of all rows.
        scores: filtered logits.
        top: their first argmax, V in undecided rows.
    """
    counts = [count for *_, count in drawings]
    if not on_host(scores):
        parts = zip(drawings, np.split(positions, np.cumsum(counts)[:-1]), strict=True)
        return first_argmax(
            scores - torch.cat([noise.rows(block, step, part, scores.shape[-1]) for (noise, block, step, _), part in parts])
        )
    keys = np.array([noise.step_key(block, step) for noise, block, step, _ in drawings], dtype=np.uint64)
    return torch.from_numpy(race(np.repeat(keys, counts)[None], positions, scores.contiguous().numpy(), top.numpy())[0])
