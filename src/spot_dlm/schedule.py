"""How many positions a step commits where the authors spread a block over a fixed number of steps.

Official loops also make steps that commit nothing; here steps count only where something is committed, and `idle` says how many passes
that saves (docs/families.md). Sources: LLaDA generate.py l.22-40, SDAR generate.py l.49-54, Dream generation_utils.py l.406-447,
dllm schedulers/utils.py l.6-69. Knows nothing of states and rules.

Example: `Schedule("remainder_first", 3).counts(8, 8)` is `(3, 3, 2)`.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

import numpy as np
import torch
from jaxtyping import Float64, Int64

Kind = Literal["remainder_first", "remainder_first_of_block", "timesteps", "half_even"]


@dataclass(frozen=True)
class Schedule:
    """A block over `steps` steps.

    Args:
        kind: "remainder_first" divides the positions that are masked when the block begins, the first steps get the remainder (LLaDA);
            "remainder_first_of_block" divides the block's length, whatever a prompt's tail holds already (SDAR, LLaDA2);
            "timesteps" commits the share 1 - s/t of what is masked, all of it in the last step (Dream);
            "half_even" rounds cumulative shares of a linear schedule to the nearest even number (dllm).
        steps: steps of the official loop for one block.

    Raises:
        ValueError: for an unknown kind or steps below 1.
    """

    kind: Kind
    steps: int

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"schedule={self.kind!r} is unknown; choose one of {', '.join(get_args(Kind))}")
        if self.steps < 1:
            raise ValueError(f"steps={self.steps} must be at least 1")

    def counts(self, masked: int, length: int) -> tuple[int, ...]:
        """Return the positions of every step that commits any, for a block of `length` that begins with `masked` masks."""
        return _made(self, masked, length)

    def idle(self, masked: int, length: int) -> int:
        """Return the official loop's steps that commit nothing."""
        return sum(not n for n in _counts(self, masked, length))

    def arrivals(self, uniform: Float64[np.ndarray, " m"]) -> Int64[np.ndarray, " m"]:
        """Return the official loop's step at which each position is committed where that is left to chance (Dream's "origin", l.422-427).

        There a step from time t to s commits every masked position with probability 1 - s/t, the last step all; so the share s of all
        positions is still masked after it, and a position whose number is below s waits longer.

        Args:
            uniform: a number in (0, 1) of each position.
        """
        ascending = _shares_left(self.steps)
        return len(ascending) - np.searchsorted(ascending, uniform, side="right")


_EPS = 1e-3  # Dream's last timestep


@lru_cache(maxsize=64)
def _shares_left(steps: int) -> Float64[np.ndarray, " s"]:
    """Return the share of positions still masked after every step of "timesteps" but the last, ascending."""
    return 1 - np.arange(steps - 1, 0, -1) * (1 - _EPS) / steps


@lru_cache(maxsize=4096)
def _made(schedule: Schedule, masked: int, length: int) -> tuple[int, ...]:
    return tuple(n for n in _counts(schedule, masked, length) if n)


@lru_cache(maxsize=4096)
def _counts(schedule: Schedule, masked: int, length: int) -> tuple[int, ...]:
    steps = schedule.steps
    if schedule.kind == "timesteps":
        times = torch.linspace(1, _EPS, steps + 1)
        left, counts = masked, []
        for i in range(steps):
            share = 1 - times[i + 1] / times[i]
            counts.append(int(left * share) if i < steps - 1 else left)
            left -= counts[-1]
        return tuple(counts)
    if schedule.kind == "half_even":
        left, counts = masked, []
        for t in range(steps, 0, -1):
            counts.append(min(left, round(left * (1 - ((t - 1) / steps) / (t / steps)))))
            left -= counts[-1]
        return tuple(n for n in counts if n)  # that loop makes no step without a commit
    base, more = divmod(masked if schedule.kind == "remainder_first" else length, steps)
    return tuple(base + (i < more) for i in range(steps))
