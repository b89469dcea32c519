"""Stale candidates: what F would choose at later steps if the target's last logits still held (method.md section 5).

With coupled noise the candidates of step t + d use the noise of step t + d, known in advance. Shared by the drafters that guess
with stale tokens.
"""

from collections.abc import Iterator
from typing import no_type_check

import numpy as np
import torch
from jaxtyping import Float, Float32, Float64, Int64
from numba import njit
from torch import Tensor

from spot_dlm.confidence import measure, round_to
from spot_dlm.draft_graph import DraftGraph
from spot_dlm.interfaces import DraftContext
from spot_dlm.state import MASKED, BlockState
from spot_dlm.transition import Candidates, UnmaskRule, filter_logits, order_at_random, temper


def still_masked(candidates: Candidates, state: BlockState) -> Candidates:
    """Restrict candidates to the positions that are masked in `state`."""
    at = state.canvas[candidates.positions] == MASKED
    return candidates.take(at)


def stale_candidates(context: DraftContext, depths: int, coupled: bool) -> Iterator[Candidates]:
    """Yield the stale candidates at the root's masked positions for the root's step, the one after it, and so on.

    At temperature 0, or uncoupled, they are those of the last transition at every depth and cost nothing.
    """
    root, rule, sampling = context.root, context.rule, context.sampling
    if sampling.temperature == 0 or not coupled or depths <= 0:
        for _ in range(depths):
            yield still_masked(context.last.candidates, root)
        return
    rows = torch.from_numpy(np.searchsorted(context.last.before.masked, root.masked)).to(context.logits.device)
    logits = context.logits[rows].to(torch.float32)
    tempered = temper(logits, sampling.temperature)
    filtered = filter_logits(tempered, sampling.top_k, sampling.top_p)
    tokens = context.noise.draw(root.block, range(root.step, root.step + depths), root.masked, filtered)
    source = {"raw": logits, "tempered": tempered, "filtered": filtered}[rule.source]
    fine, natural = _measured(source, torch.from_numpy(tokens).to(source.device), rule)
    natural = round_to(natural, rule.resolution)
    rank = fine if rule.resolution == "float32" else natural
    table = torch.stack((rank, natural, fine), dim=1).cpu().numpy()
    for drawn, values in zip(tokens, table, strict=True):
        yield Candidates(root.masked, drawn, *values)


def _measured(
    source: Float[Tensor, "m V"], tokens: Int64[Tensor, "D m"], rule: UnmaskRule
) -> tuple[Float[Tensor, "D m"], Float[Tensor, "D m"]]:
    """Return (rank, natural) confidence at every depth as `measure` does; only "probability" looks at the token."""
    if rule.confidence != "probability":
        rank, natural = measure(source, tokens[0], rule.confidence)
        return rank.expand(tokens.shape), natural.expand(tokens.shape)
    sure, _ = measure(source, tokens[0], "max_probability")
    rank = source.gather(-1, tokens.t()).t() - source.amax(dim=-1) + sure
    return rank, rank.exp()


@njit(cache=True)
@no_type_check
def _levels(values: np.ndarray, above: np.ndarray, counts: np.ndarray, spans: np.ndarray) -> np.ndarray:
    """Return the step (from 1) at which each of m positions would be committed, 0 where no step of `counts` commits it.

    Args:
        values: [D, m] what positions are ordered by at each depth, highest first, ties to the lower position; the last row goes on.
        above: [D, m] positions that are committed all at once; where fewer than the step's count remain, the best others are too.
        counts: positions of each step.
        spans: ascending number of each position's span; a step commits in the first one that is not complete.
    """
    level = np.zeros(values.shape[1], np.int64)
    left = len(level)
    begin = end = 0
    for depth in range(len(counts)):
        row, taken = min(depth, len(values) - 1), 0
        while level[begin] > 0:
            begin += 1
        while end < len(level) and spans[end] == spans[begin]:
            end += 1
        for i in range(begin, end):
            if level[i] == 0 and above[row, i]:
                level[i] = depth + 1
                taken += 1
        while taken < counts[depth]:
            best = -1
            for i in range(begin, end):
                if level[i] == 0 and (best < 0 or values[row, i] > values[row, best]):
                    best = i
            if best < 0:
                break
            level[best] = depth + 1
            taken += 1
        left -= taken
        if left == 0:
            break
    return level


def _followed(
    positions: Int64[np.ndarray, " m"],
    rank: Float32[np.ndarray, "D m"],
    natural: Float32[np.ndarray, "D m"],
    rule: UnmaskRule,
    counts: list[int],
) -> Int64[np.ndarray, " m"]:
    """Return the step at which `rule` commits each position, as `transition.select` would at every depth on what is left."""
    none, steps = np.zeros(rank.shape, dtype=np.bool_), np.array(counts)
    spans = positions // rule.span if rule.span else np.zeros_like(positions)
    if rule.select == "left_to_right":
        return _levels(np.broadcast_to(-positions.astype(np.float32), rank.shape), none, steps, spans)
    if rule.select in ("top", "arrival"):
        return _levels(rank, none, steps, spans)
    above = natural > rule.rounded_threshold if rule.strict else natural >= rule.rounded_threshold
    if rule.select == "threshold":
        return _levels(rank, above, steps, spans)
    return _levels(np.where(above, np.float32(np.inf), rank), none, steps, spans)


def _counts(context: DraftContext, rule: UnmaskRule, most: int) -> list[int]:
    """Return the positions of the coming steps, until they are as many as are masked or the steps `most`."""
    root = context.root
    if rule.select == "arrival":  # those whose times are equal; all times are drawn already
        rank = still_masked(context.last.candidates, root).rank
        return np.unique(-rank, return_counts=True)[1].tolist()[:most]
    counts: list[int] = []
    if rule.span:  # a step stays in one span
        for left in np.unique(root.masked // rule.span, return_counts=True)[1].tolist():
            counts += [min(rule.num_per_step, left - taken) for taken in range(0, left, rule.num_per_step)]
        return counts[:most]
    while len(counts) < most and sum(counts) < len(root.masked):
        counts.append(rule.count(root, len(counts)))
    return counts


def stale_chain(context: DraftContext, budget: int, rule: UnmaskRule, coupled: bool) -> DraftGraph:
    """Return the chain of states that `rule` visits from the root on stale candidates, until the budget or the block ends.

    Where guesses may cross, the chain goes on to the complete block (two of the budget), unless it holds a stop token. The reach of a
    node is the product of the stale probabilities of its tokens: as if the order were sure.
    """
    root, masked = context.root, context.root.masked
    counts = _counts(context, rule, min(budget - 1, len(masked)))  # of as many steps as it may take to the end of the block
    steps = len(counts) if sum(counts) >= len(masked) else budget
    depths = min(budget - 1, steps - (not context.crosses or steps + 2 > budget))
    if depths < 1:
        return DraftGraph.root_only(root)
    settled = context.sampling.temperature == 0 or not coupled
    found = list(stale_candidates(context, 1 if settled else depths, coupled))
    natural = np.stack([c.natural for c in found])
    rank = np.stack([c.rank for c in found])
    if rule.draws_order:
        seen, ahead = np.broadcast_to(natural, (depths, len(masked))), range(root.step, root.step + depths)
        rank = order_at_random(seen, rule, context.noise, root.block, ahead, masked)
    level = _followed(masked, rank, np.broadcast_to(natural, rank.shape), rule, counts[:depths])
    at = np.minimum(level, len(found)) - 1, np.arange(len(level))
    tokens = np.stack([c.tokens for c in found])[at]
    count = int(level.max())
    ends = bool(level.all())
    if ends and not (context.crosses and count + 2 <= budget and context.stop_ids.isdisjoint(tokens.tolist())):
        count -= 1
    depth = np.arange(count + 1)
    canvases = np.tile(root.canvas, (count + 1, 1))
    canvases[:, masked] = np.where((level > 0) & (level <= depth[:, None]), tokens, MASKED)
    chances = np.ones(int(level.max()) + 1)
    np.multiply.at(chances, level, _probabilities(natural[at], rule))
    reach = np.concatenate(([1.0], np.cumprod(chances[1 : count + 1])))
    return DraftGraph(root.block, canvases, root.step + depth, reach, np.stack((depth[:-1], depth[1:]), axis=1))


def _probabilities(natural: Float32[np.ndarray, " m"], rule: UnmaskRule) -> Float64[np.ndarray, " m"]:
    """Return how probable the tokens are, from what the rule measures of them (exact for "probability")."""
    values = natural.astype(np.float64)
    if rule.confidence == "entropy":
        return np.exp(np.minimum(values, 0))
    return np.clip((1 + values) / 2 if rule.confidence == "margin" else values, 0, 1)
