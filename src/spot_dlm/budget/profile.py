"""What decoding costs on this machine: milliseconds of a pass by rows and prefix, of a draft, and of the loop around them.

Measured and kept by `tune`. Example: `profile.cost(rows=8, prefix=512)`.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64


@dataclass(frozen=True)
class CostProfile:
    """What decoding costs with one target and one drafter on one machine, in milliseconds.

    Args:
        rows: measured numbers of rows of a pass, ascending from 1.
        prefixes: measured numbers of cached tokens, ascending.
        pass_ms: of a target pass, for every prefix (outer) and number of rows (inner); made to rise with both, as the true cost does.
        host_ms: of the loop for each pass and prompt, outside target and drafter.
        token_ms: of the loop for each committed step, which no budget changes.
        draft_ms: of one draft by nodes asked for, ascending: (nodes, milliseconds).
        steps_per_pass: steps of one pass that these drafts gave, by nodes: (nodes, steps); the first belief of what drafting is worth.
        reached: share of the walks that arrived at depth 1, 2, ... with most nodes; the first belief of what reach is worth.
        drafter: its name.
        device: torch's name of the device.
        dtype: number type of the target.
        threads: CPU threads.
        block_length: tokens of a block.

    Raises:
        ValueError: if the numbers do not fit together.
    """

    rows: tuple[int, ...]
    prefixes: tuple[int, ...]
    pass_ms: tuple[tuple[float, ...], ...]
    host_ms: float = 0.0
    token_ms: float = 0.0
    draft_ms: tuple[tuple[int, float], ...] = ()
    steps_per_pass: tuple[tuple[int, float], ...] = ()
    reached: tuple[float, ...] = ()
    drafter: str = ""
    device: str = ""
    dtype: str = ""
    threads: int = 1
    block_length: int = 1

    def __post_init__(self) -> None:
        for name in ("rows", "prefixes"):
            values = getattr(self, name)
            if not values or min(values) < 0 or any(b <= a for a, b in pairwise(values)):
                raise ValueError(f"cost profile: {name} must ascend, got {values}")
        curves = np.array(self.pass_ms, dtype=np.float64)
        if self.rows[0] != 1 or curves.shape != (len(self.prefixes), len(self.rows)):
            raise ValueError(f"cost profile: pass_ms must hold {len(self.prefixes)} x {len(self.rows)} numbers, the first of one row")
        others = [self.host_ms, self.token_ms, *self.reached, *(v for pair in self.draft_ms + self.steps_per_pass for v in pair)]
        if not np.isfinite(curves).all() or curves.min() <= 0 or not np.isfinite(others).all() or min(others) < 0:
            raise ValueError("cost profile: milliseconds must be finite, and those of a pass above 0")
        curves = np.apply_along_axis(isotonic, 0, np.apply_along_axis(isotonic, 1, curves))
        object.__setattr__(self, "pass_ms", tuple(tuple(row) for row in curves.tolist()))

    def curves(self, most: int) -> Float64[np.ndarray, "P R"]:
        """Return the milliseconds of passes with 1 to `most` rows for the measured prefixes, linear between and beyond."""
        return np.maximum.accumulate([_linear(np.arange(1, most + 1), self.rows, curve) for curve in self.pass_ms])

    def between(self, curves: Float64[np.ndarray, "P R"], prefix: int | float) -> Float64[np.ndarray, " R"]:
        """Return the curve after `prefix` cached tokens."""
        if len(curves) == 1:
            return curves[0]
        i = min(max(bisect_left(self.prefixes, prefix) - 1, 0), len(curves) - 2)
        share = max(0.0, (prefix - self.prefixes[i]) / (self.prefixes[i + 1] - self.prefixes[i]))
        between = curves[i] + share * (curves[i + 1] - curves[i])
        return between if share <= 1 else np.maximum.accumulate(between)

    def cost(self, rows: int, prefix: int | float) -> float:
        """Return the milliseconds of one pass."""
        return float(self.between(self.curves(rows), prefix)[-1])

    def drafting(self, nodes: int) -> float:
        """Return the milliseconds of one draft of so many nodes."""
        asked, taken = [n for n, _ in self.draft_ms], [ms for _, ms in self.draft_ms]
        return float(np.interp(nodes, asked, taken)) if asked else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> "CostProfile":
        """Return the profile that `to_dict` wrote; other keys are ignored.

        Raises:
            ValueError: if a field is missing or no such thing.
        """
        try:
            return cls(
                rows=tuple(int(r) for r in document["rows"]),
                prefixes=tuple(int(p) for p in document["prefixes"]),
                pass_ms=tuple(tuple(float(ms) for ms in curve) for curve in document["pass_ms"]),
                draft_ms=tuple((int(n), float(ms)) for n, ms in document["draft_ms"]),
                steps_per_pass=tuple((int(n), float(steps)) for n, steps in document["steps_per_pass"]),
                reached=tuple(float(share) for share in document["reached"]),
                host_ms=float(document["host_ms"]),
                token_ms=float(document["token_ms"]),
                drafter=str(document["drafter"]),
                device=str(document["device"]),
                dtype=str(document["dtype"]),
                threads=int(document["threads"]),
                block_length=int(document["block_length"]),
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"cost profile: a field is missing or wrong ({error})") from error


def isotonic(values: Sequence[float] | Float64[np.ndarray, " n"]) -> Float64[np.ndarray, " n"]:
    """Return the nearest sequence (least squares) that never falls: neighbours out of order share their mean."""
    pools: list[tuple[float, int]] = []
    for value in values:
        mean, size = float(value), 1
        while pools and pools[-1][0] > mean:
            before, count = pools.pop()
            mean, size = (before * count + mean * size) / (count + size), count + size
        pools.append((mean, size))
    return np.repeat([mean for mean, _ in pools], [size for _, size in pools])


def _linear(at: Int64[np.ndarray, " n"], known: Sequence[int], values: Sequence[float]) -> Float64[np.ndarray, " n"]:
    """Interpolate; beyond the last known point follow the slope of the last half, which noise sways less than the last step."""
    half = int(np.searchsorted(known, known[-1] / 2, side="right")) - 1
    slope = (values[-1] - values[half]) / (known[-1] - known[half]) if 0 <= half < len(known) - 1 else 0.0
    return np.interp(at, known, values) + slope * np.maximum(0, at - known[-1])
