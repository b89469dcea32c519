"""What the target would draw and how sure it would be at the next steps, if the last distributions still held (method.md section 5).

The noise of later steps is known, so at T > 0 the tokens of every later step are known too, up to what the distributions do meanwhile.
Drawn among the few best tokens of `Outputs`, at near steps from the whole vocabulary where these lack mass. Knows nothing of drafters
and of how the order is predicted.

Example: `look_ahead(read_outputs(root.masked, logits, sampling), root, UnmaskRule(), sampling, noise, depths=7).tokens[0]`.
"""

from dataclasses import dataclass
from typing import no_type_check

import numpy as np
import torch
from jaxtyping import Float, Float32, Int, Int64
from numba import njit
from torch import Tensor

from spot_dlm.noise import CoupledNoise
from spot_dlm.outputs import Outputs
from spot_dlm.state import BlockState
from spot_dlm.transition import Sampling, UnmaskRule, propose, round_to

WIDE_TAIL, WHOLE_DEPTHS = 0.01, 8
"""Positions whose kept tokens lack more mass than the first are drawn from the whole vocabulary, so many depths far."""


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
    fine: Float32[np.ndarray, " m"] | None = None,
    logits: Float[Tensor, "m V"] | None = None,
) -> LookAhead:
    """Return the look-ahead of the root's masked positions (those of `outputs`) from the root's own step on.

    Args:
        outputs: stale distributions at the root's masked positions.
        root: the certain next state.
        rule: says what confidence is.
        sampling: temperature and filters.
        noise: the noise of this sequence.
        depths: steps to look ahead, the root's own being the first.
        fine: the stale ranking values, for rules whose confidence does not depend on the drawn token (margin, entropy, ...).
        logits: stale logits of the same rows, so that tokens outside the best few are drawn where these leave a share of the mass.
    """
    if sampling.temperature == 0:
        shape = (1, len(outputs.positions))
        best = np.zeros(shape, dtype=np.int64)
        second = np.full(shape, min(1, outputs.ids.shape[1] - 1))
        margin = (outputs.scores[:, 0] - outputs.scores[:, second[0, 0]])[None]
    else:
        steps = range(root.step, root.step + max(depths, 1))
        drawn = noise.at(root.block, steps, outputs.positions, outputs.ids)
        best, second, margin = _two_best(outputs.scores, drawn)
    rows = np.arange(len(outputs.positions))
    picked = np.stack((best, second), axis=-1)
    tokens = outputs.ids[rows[None, :, None], picked]
    tokens[..., 1][second == best] = -1
    if rule.confidence == "probability":
        ranked = {"raw": outputs.logp, "tempered": outputs.source, "filtered": _normalised(outputs.scores)}[rule.source]
        values = ranked[rows[None, :, None], picked]
    elif fine is None:
        values = np.broadcast_to(outputs.logp[None, :, :1], picked.shape)
    else:
        values = np.broadcast_to(fine[None, :, None], picked.shape)
    ahead = LookAhead(tokens, np.array(values, dtype=np.float32), margin)
    if logits is not None and sampling.temperature > 0:
        _draw_whole(ahead, outputs, logits, root, rule, sampling, noise)
    return ahead


def _draw_whole(
    ahead: LookAhead,
    outputs: Outputs,
    logits: Float[Tensor, "m V"],
    root: BlockState,
    rule: UnmaskRule,
    sampling: Sampling,
    noise: CoupledNoise,
) -> None:
    """Draw again from the whole vocabulary where the kept tokens lack mass, for the first WHOLE_DEPTHS depths.

    A token from outside becomes the best one and the one it replaces the second; the noise is what verification will ask for anyway.
    """
    open_ended = np.isfinite(outputs.scores[:, -1])  # no filter cuts among the kept tokens
    wide = np.flatnonzero((np.exp(outputs.source).sum(axis=1) < 1 - WIDE_TAIL) & open_ended)
    depths = min(len(ahead.margin), WHOLE_DEPTHS)
    if not len(wide):
        return
    vocab_size, at = logits.shape[-1], torch.from_numpy(wide).to(logits.device)
    drawn = [noise.rows(root.block, root.step + d, outputs.positions, vocab_size)[at] for d in range(depths)]
    flat = propose(np.tile(outputs.positions[wide], depths), logits[at].repeat(depths, 1), rule, sampling, torch.cat(drawn))
    tokens, fine = flat.tokens.reshape(depths, -1), flat.fine.reshape(depths, -1)
    for d in range(depths):
        new = tokens[d] != ahead.tokens[d, wide, 0]
        rows = wide[new]
        ahead.tokens[d, rows, 1], ahead.fine[d, rows, 1] = ahead.tokens[d, rows, 0], ahead.fine[d, rows, 0]
        ahead.tokens[d, rows, 0], ahead.fine[d, rows, 0] = tokens[d, new], fine[d, new]
        ahead.margin[d, rows] = 1.0


def _normalised(scores: Float32[np.ndarray, "m K"]) -> Float32[np.ndarray, "m K"]:
    """Return log-probabilities among the kept tokens."""
    finite = np.maximum(scores, np.float32(-80.0))
    if np.isfinite(scores).all():
        return finite
    return (finite - np.log(np.exp(scores).sum(axis=1, keepdims=True))).astype(np.float32)


@njit(cache=True)
@no_type_check
def _two_best(scores: np.ndarray, drawn: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the indices of the two largest scores - drawn over the last axis and their gap."""
    depths, count, size = drawn.shape
    best = np.zeros((depths, count), dtype=np.int64)
    second = np.zeros((depths, count), dtype=np.int64)
    margin = np.zeros((depths, count), dtype=np.float32)
    for d in range(depths):
        for i in range(count):
            first_value, second_value = np.float32(-np.inf), np.float32(-np.inf)
            first_at, second_at = 0, 0
            for k in range(size):
                value = scores[i, k] - drawn[d, i, k]
                if value > first_value:
                    second_value, second_at = first_value, first_at
                    first_value, first_at = value, k
                elif value > second_value:
                    second_value, second_at = value, k
            best[d, i] = first_at
            second[d, i] = second_at if second_value > -np.inf else first_at
            margin[d, i] = min(first_value - second_value, np.float32(80.0))
    return best, second, margin


def decisive_rank(
    fine: Float32[np.ndarray, "*shape"], positions: Int[np.ndarray, "*shape"], rule: UnmaskRule
) -> Float32[np.ndarray, "*shape"]:
    """Return the number by which the rule orders positions (higher first, then the lower position), from unrounded ranking values."""
    if rule.select == "left_to_right":
        return -positions.astype(np.float32)
    rank = fine
    if rule.resolution != "float32":
        natural = np.exp(np.minimum(fine, 0)) if _is_log(rule) else fine
        rank = round_to(torch.from_numpy(np.array(natural, dtype=np.float32)), rule.resolution).numpy()
    if rule.select == "leftmost_above":
        natural = np.exp(fine) if _is_log(rule) else fine
        above = natural > rule.threshold if rule.strict else natural >= rule.threshold
        rank = np.where(above, np.float32(np.inf), rank)
    return np.asarray(rank, dtype=np.float32)


def rule_order(fine: Float32[np.ndarray, "D m"], positions: Int64[np.ndarray, " m"], rule: UnmaskRule) -> Int64[np.ndarray, "D m"]:
    """Return each position's place (0 = first) in the order that the rule would commit in; ties go to the lower position."""
    rank = decisive_rank(fine, np.ascontiguousarray(np.broadcast_to(positions, fine.shape)), rule)
    places, every = np.zeros(rank.shape, dtype=np.int64), np.ones(rank.shape[1], dtype=np.bool_)
    for depth, row in enumerate(rank):
        count_places(row, every, places[depth])
    return places


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


def _is_log(rule: UnmaskRule) -> bool:
    return rule.confidence in ("probability", "max_probability")
