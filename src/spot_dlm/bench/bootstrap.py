"""Intervals: paired bootstrap over prompts, for ratios of sums and differences of methods on the same prompts; shares of right answers.

Example: `ratio_interval(transitions, nfe)` gives (low, high) of `transitions.sum() / nfe.sum()`.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64, Real

RESAMPLES, LEVEL, SEED = 2000, 0.95, 0
PAIRED = f"{LEVEL:.0%} paired bootstrap over prompts, {RESAMPLES} resamples, seed {SEED}"
"""How documents name these intervals."""


@lru_cache(maxsize=8)
def resample_counts(num_prompts: int, resamples: int = RESAMPLES, seed: int = SEED) -> Int64[np.ndarray, "B P"]:
    """Return how often every prompt is drawn in every resample: the same for all methods on the same number of prompts.

    Raises:
        ValueError: if there is no prompt.
    """
    if num_prompts < 1:
        raise ValueError(f"num_prompts={num_prompts} must be at least 1")
    rng = np.random.default_rng(seed)
    counts = rng.multinomial(num_prompts, np.full(num_prompts, 1 / num_prompts), size=resamples).astype(np.int64)
    counts.setflags(write=False)
    return counts


def resampled_ratio(numerator: Real[np.ndarray, " P"], denominator: Real[np.ndarray, " P"]) -> Float64[np.ndarray, " B"]:
    """Return sum(numerator) / sum(denominator) of every resample of the prompts."""
    counts = resample_counts(len(numerator))
    return np.asarray((counts @ numerator) / (counts @ denominator), dtype=np.float64)


def interval(values: Float64[np.ndarray, " B"]) -> tuple[float, float]:
    """Return the central 95 % of resampled values."""
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def ratio_interval(numerator: Real[np.ndarray, " P"], denominator: Real[np.ndarray, " P"]) -> tuple[float, float]:
    """Return the 95 % interval of a ratio of sums over prompts."""
    return interval(resampled_ratio(numerator, denominator))


def wilson(right: int, total: int) -> tuple[float, float]:
    """Return the 95 % interval of a share (Wilson)."""
    z = 1.959964
    share, scale = right / total, 1 + z * z / total
    centre = (share + z * z / (2 * total)) / scale
    half = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total)) / scale
    return max(0.0, centre - half), min(1.0, centre + half)


def accuracy(verdicts: Sequence[bool | None]) -> dict[str, Any]:
    """Return how many answers were graded and right, their share and its 95 % interval; None counts as not graded."""
    graded = [v for v in verdicts if v is not None]
    low, high = wilson(sum(graded), len(graded)) if graded else (None, None)
    share = sum(graded) / len(graded) if graded else None
    return {"graded": len(graded), "right": sum(graded), "accuracy": share, "accuracy_low": low, "accuracy_high": high}
