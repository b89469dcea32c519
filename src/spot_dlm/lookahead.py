"""What the target would draw and how sure it would be at the next steps, if the last distributions still held (method.md section 5).

The noise of later steps is known, so at T > 0 the tokens of every later step are known too, up to what the distributions do meanwhile.
Drawn among the few best tokens of `Outputs`, at near steps from the whole vocabulary where these lack mass. Knows nothing of drafters
and of how the order is predicted.

Example: `look_ahead(read_outputs(root.masked, logits, sampling), root, UnmaskRule(), sampling, noise, depths=7).tokens[0]`.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import no_type_check

import numpy as np
import torch
from jaxtyping import Float, Float32, Float64, Int, Int64, UInt64
from numba import njit
from torch import Tensor

from spot_dlm.noise import CoupledNoise
from spot_dlm.outputs import Outputs, exp_negative, host_array, is_filtered
from spot_dlm.race import C1, C2, G, _find_winners, _mix_word, _position_key, log_scalar
from spot_dlm.state import BlockState
from spot_dlm.transition import Sampling, UnmaskRule, filter_logits, temper

WIDE_TAIL, WHOLE_DEPTHS = 0.01, 8
"""Positions whose kept tokens lack more mass than the first are drawn from the whole vocabulary, so many depths far."""

NO_KEYS = np.empty(0, dtype=np.uint64)


@dataclass(frozen=True)
class LookAhead:
    """Best and second-best token of every position at D depths; at temperature 0, where depths do not differ, D is 1.

    `fine` is the rule's unrounded ranking value of either token and `margin` the gap of their scores, noise included.
    """

    tokens: Int64[np.ndarray, "D m 2"]
    fine: Float32[np.ndarray, "D m 2"]
    margin: Float32[np.ndarray, "D m"]


def look_ahead(
    outputs: Outputs,
    root: BlockState,
    rule: UnmaskRule,
    sampling: Sampling,
    noise: CoupledNoise,
    depths: int,
    fine: Float32[np.ndarray, " r"] | None = None,
    logits: Float[Tensor, "r V"] | None = None,
    at: Int64[np.ndarray, " m"] | None = None,
    keys: UInt64[np.ndarray, " D"] | None = None,
) -> LookAhead:
    """Return the look-ahead of the root's masked positions from the root's own step on.

    Args:
        outputs: stale distributions, those of the root's masked positions among them.
        root: the certain next state.
        rule: says what confidence is.
        sampling: temperature and filters.
        noise: the noise of this sequence.
        depths: steps to look ahead, the root's own being the first.
        fine: the last transition's ranking values: what the best tokens keep at temperature 0, and every token under rules whose
            confidence does not depend on the token drawn (margin, entropy, ...).
        logits: stale logits, so that tokens outside the best few are drawn where these leave a share of the mass.
        at: rows of `outputs`, `fine` and `logits` that belong to the root's masked positions; None if they all do.
        keys: `noise.step_keys` of the steps, where they are known.
    """
    at, sampled = np.arange(len(outputs.positions)) if at is None else at, sampling.temperature > 0
    if not sampled:
        keys = NO_KEYS
    elif keys is None:
        keys = noise.step_keys(root.block, range(root.step, root.step + max(depths, 1)))
    shape = (len(keys) or 1, len(at))
    ahead = LookAhead(np.empty((*shape, 2), np.int64), np.empty((*shape, 2), np.float32), np.empty(shape, np.float32))
    lacking = np.empty(shape[1], np.float32)
    ranked = _ranked(outputs, rule, fine)
    arrays = (outputs.ids, outputs.scores, outputs.source, ranked, ahead.tokens, ahead.fine, ahead.margin, lacking)
    look_at_rows(keys, outputs.positions, at, *arrays)
    if not sampled and fine is not None:
        ahead.fine[0, :, 0] = fine[at]
    elif sampled and logits is not None and (lacking > WIDE_TAIL).any():
        if logits.device.type == "cpu" and not is_filtered(sampling):
            how = (sampling.temperature, rule.confidence == "probability", rule.source == "raw")
            found = (outputs.ids, ranked, lacking, ahead.tokens, ahead.fine, ahead.margin)
            draw_whole_rows(host_array(logits), keys, outputs.positions, at, *how, *found)
        else:
            wide = np.flatnonzero(lacking > WIDE_TAIL)
            of_wide = logits[torch.from_numpy(at[wide]).to(logits.device)]
            _draw_whole(ahead, wide, outputs.positions[at[wide]], of_wide, root, rule, sampling, noise)
    return ahead


def _ranked(outputs: Outputs, rule: UnmaskRule, fine: Float32[np.ndarray, " r"] | None) -> Float32[np.ndarray, "r _"]:
    """Return the unrounded ranking value of every kept token, or of every position where the token does not matter."""
    if rule.confidence != "probability":
        return np.ascontiguousarray(outputs.logp[:, :1] if fine is None else fine[:, None], dtype=np.float32)
    if rule.source == "filtered":
        return _normalised(outputs.scores)
    return outputs.logp if rule.source == "raw" else outputs.source


def _draw_whole(
    ahead: LookAhead,
    wide: Int64[np.ndarray, " w"],
    positions: Int64[np.ndarray, " w"],
    logits: Float[Tensor, "w V"],
    root: BlockState,
    rule: UnmaskRule,
    sampling: Sampling,
    noise: CoupledNoise,
) -> None:
    """`draw_whole_rows` for logits elsewhere than in the host's memory, and for filters."""
    logits = logits.float()
    tempered = temper(logits, sampling.temperature)
    filtered = filter_logits(tempered, sampling.top_k, sampling.top_p)
    depths = min(len(ahead.margin), WHOLE_DEPTHS)
    tokens = noise.draw(root.block, range(root.step, root.step + depths), positions, filtered)
    d, w = np.nonzero(tokens != ahead.tokens[:depths, wide, 0])
    if not len(d):
        return
    drawn, i = tokens[d, w], wide[w]
    ahead.tokens[d, i, 1], ahead.fine[d, i, 1] = ahead.tokens[d, i, 0], ahead.fine[d, i, 0]
    ahead.tokens[d, i, 0], ahead.margin[d, i] = drawn, 1.0
    if rule.confidence == "probability":
        source = {"raw": logits, "tempered": tempered, "filtered": filtered}[rule.source].log_softmax(dim=-1)
        ahead.fine[d, i, 0] = source[torch.from_numpy(w).to(source.device), torch.from_numpy(drawn).to(source.device)].cpu().numpy()


def _normalised(scores: Float32[np.ndarray, "m K"]) -> Float32[np.ndarray, "m K"]:
    """Return log-probabilities among the kept tokens."""
    finite = np.maximum(scores, np.float32(-80.0))
    if np.isfinite(scores).all():
        return finite
    return (finite - np.log(np.exp(scores).sum(axis=1, keepdims=True))).astype(np.float32)


@njit(cache=True)
@no_type_check
def draw_whole_rows(
    logits: np.ndarray,
    keys: np.ndarray,
    positions: np.ndarray,
    at: np.ndarray,
    temperature: float,
    by_token: bool,
    raw: bool,
    ids: np.ndarray,
    ranked: np.ndarray,
    lacking: np.ndarray,
    tokens: np.ndarray,
    fine: np.ndarray,
    margin: np.ndarray,
) -> None:
    """Draw again from the whole vocabulary where the kept tokens lack mass, for the first WHOLE_DEPTHS depths.

    A token from outside becomes the best one and the one it replaces the second.
    """
    depths, size = min(len(margin), WHOLE_DEPTHS), logits.shape[1]
    some, drawn = np.empty((depths, 1), np.uint64), np.empty((depths, 1), np.int64)
    scores, divisor = np.empty((1, size), np.float32), np.float32(temperature)
    for d in range(depths):
        some[d, 0] = keys[d]
    for i in range(len(at)):
        if lacking[i] <= WIDE_TAIL:
            continue
        r = at[i]
        for v in range(size):
            scores[0, v] = logits[r, v] / divisor
        _find_winners(some, positions[r : r + 1], scores, ids[r, :1], drawn)
        for d in range(depths):
            token = drawn[d, 0]
            if token != tokens[d, i, 0]:
                tokens[d, i, 1], fine[d, i, 1] = tokens[d, i, 0], fine[d, i, 0]
                tokens[d, i, 0], margin[d, i] = token, 1.0
                if by_token:
                    gap = logits[r, token] - logits[r, ids[r, 0]]
                    fine[d, i, 0] = ranked[r, 0] + (gap if raw else gap / divisor)


@njit(cache=True)
@no_type_check
def look_at_rows(
    keys: np.ndarray,
    positions: np.ndarray,
    at: np.ndarray,
    ids: np.ndarray,
    scores: np.ndarray,
    source: np.ndarray,
    ranked: np.ndarray,
    tokens: np.ndarray,
    fine: np.ndarray,
    margin: np.ndarray,
    lacking: np.ndarray,
) -> None:
    """Fill a look-ahead from rows `at`; keys[d] is that of step d's noise, none of them is temperature 0.

    lacking[i] is the share of the mass that the kept tokens lack, 0 where a filter cuts among them.
    """
    last, ranks = ids.shape[1] - 1, ranked.shape[1] - 1
    for i in range(len(at)):
        r = at[i]
        lacking[i] = 0.0
        if len(keys) and np.isfinite(scores[r, last]):
            lacking[i] = 1.0
            for k in range(last + 1):
                lacking[i] -= exp_negative(source[r, k])
        for d in range(len(margin)):
            best, second, gap = 0, min(1, last), scores[r, 0] - scores[r, min(1, last)]
            if len(keys):
                best, second, gap = _race_two(keys[d], positions[r], ids[r], scores[r])
            tokens[d, i, 0], tokens[d, i, 1] = ids[r, best], ids[r, second] if second != best else -1
            fine[d, i, 0], fine[d, i, 1], margin[d, i] = ranked[r, min(best, ranks)], ranked[r, min(second, ranks)], gap


@njit(cache=True)
@no_type_check
def _race_two(key: np.uint64, position: int, ids: np.ndarray, scores: np.ndarray) -> tuple[int, int, np.float32]:
    """Return the indices of the two largest scores minus noise (of equal ones the first) and their gap; the same index if one is finite.

    E = -log u is at least 1 - u, so the integer behind u shows what cannot come in second, without a logarithm.
    """
    h1 = _position_key(key, position)
    h2 = _mix_word(h1 + np.uint64(C1))
    first_value, second_value = np.float32(-np.inf), np.float32(-np.inf)
    best, second = 0, 0
    for k in range(len(ids)):
        x = (np.uint64(ids[k]) + np.uint64(1)) * np.uint64(G) + h1  # `race._noise_of`
        x = (x ^ (x >> np.uint64(30))) * np.uint64(C1) + h2
        x = (x ^ (x >> np.uint64(27))) * np.uint64(C2)
        x = x ^ (x >> np.uint64(31))
        uniform = (np.float64(np.int64(x >> np.uint64(12))) + 0.5) * 2.0**-52
        exponent = (np.float64(1.0 - uniform).view(np.int64) >> 52) - 1023
        if scores[k] - exponent * 0.6931472 + 1e-3 < second_value:
            continue
        value = scores[k] - np.float32(log_scalar(-log_scalar(uniform)))
        if value > first_value:
            second_value, second = first_value, best
            first_value, best = value, k
        elif value > second_value:
            second_value, second = value, k
    if second_value == -np.inf:
        second = best
    return best, second, min(first_value - second_value, np.float32(80.0))


@lru_cache
def decision_of(rule: UnmaskRule) -> Float64[np.ndarray, " 5"]:
    """Return what makes a ranking value decisive, for `decide`: left to right, logarithmic, rounded, threshold, strict."""
    threshold = rule.threshold if rule.select == "leftmost_above" else np.inf
    is_log = rule.confidence in ("probability", "max_probability")
    return np.array([rule.select == "left_to_right", is_log, rule.resolution == "bfloat16", threshold, rule.strict], dtype=np.float64)


def decisive_rank(
    fine: Float32[np.ndarray, "*shape"], positions: Int[np.ndarray, "*#shape"], rule: UnmaskRule
) -> Float32[np.ndarray, "*shape"]:
    """Return the number by which the rule orders positions (higher first, then the lower position), from unrounded ranking values."""
    rank = np.array(fine, dtype=np.float32, order="C")
    places = np.ascontiguousarray(np.broadcast_to(positions, rank.shape)).reshape(-1)
    _decide_each(rank.reshape(-1), places, decision_of(rule))
    return rank


@njit(cache=True)
@no_type_check
def decide(fine: np.float32, position: int, decision: np.ndarray) -> np.float32:
    """Return what orders positions: the ranking value, rounded to bfloat16 (nearest even) if the rule does; infinite above a threshold."""
    if decision[0] > 0:
        return np.float32(-position)
    is_log, rounded, threshold = decision[1] > 0, decision[2] > 0, np.float32(decision[3])
    if not rounded and threshold == np.inf:
        return fine
    natural = np.exp(fine) if is_log else fine
    if natural > threshold or (natural == threshold and decision[4] == 0):
        return np.float32(np.inf)
    if not rounded:
        return fine
    bits = np.float32(min(natural, np.float32(1)) if is_log else natural).view(np.uint32)
    bits = np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return np.uint32(bits).view(np.float32)


@njit(cache=True)
@no_type_check
def _decide_each(values: np.ndarray, positions: np.ndarray, decision: np.ndarray) -> None:
    for i in range(len(values)):
        values[i] = decide(values[i], positions[i], decision)


@njit(cache=True)
@no_type_check
def count_places(rank: np.ndarray, among: np.ndarray, out: np.ndarray) -> None:
    """Write the place of every marked entry in descending order, the earlier entry first on ties, 0 elsewhere; O(m^2), m is small."""
    out[:] = 0
    for i in range(len(rank)):
        if among[i]:
            for j in range(i):
                if among[j]:
                    if rank[i] > rank[j]:
                        out[j] += 1
                    else:
                        out[i] += 1
