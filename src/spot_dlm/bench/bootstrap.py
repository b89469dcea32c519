"""Paired bootstrap over prompts: intervals of ratios of sums, and of differences between methods that ran on the same prompts.

Example: `ratio_interval(transitions, nfe)` gives (low, high) of `transitions.sum() / nfe.sum()`.
"""

from functools import lru_cache

import numpy as np
from jaxtyping import Float64, Int64, Real

RESAMPLES, LEVEL, SEED = 2000, 0.95, 0


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
