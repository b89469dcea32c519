"""Offline speculation on recorded trajectories: what an order model's drafts would have been accepted, without the target.

Acceptance is a function of the trajectory alone, so traces are enough: the graph is grown from every state that a speculative
decoder would reach and walked along the true commits. Knows nothing of training.

Example: `simulate(model, states, blocks, budgets=(8, 32))[8].acceptance_length`.
"""

from collections import namedtuple
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import no_type_check

import numpy as np
import torch
from jaxtyping import Float64, Int64
from numba import njit

from spot_dlm.features import MASKED, encode
from spot_dlm.growth import grow_moving, path_codes, walk
from spot_dlm.order_model import OrderModel, Scores, inputs
from spot_dlm.trace_states import TraceStates

DEPTHS = 32
"""Transitions below a root that are simulated; at T > 0 traces know the coming tokens of the first 16 only, the rest repeat."""
_STATES_PER_CHUNK = 256


_Arrays = namedtuple(
    "_Arrays",
    "masked look_ahead p_token base pair last gate_node gate_commit gate_position gate_out sure effect known known_root dynamic rounded "
    "positions tokens steps",
)
"""Scores of many roots over all positions, and the true path of each: positions, tokens and its number of steps."""


@dataclass(frozen=True)
class Simulated:
    """Passes, transitions and the sum of expected transitions of every simulated block."""

    blocks: Int64[np.ndarray, " n"]
    passes: Int64[np.ndarray, " n"]
    transitions: Int64[np.ndarray, " n"]
    expected: Float64[np.ndarray, " n"]

    @property
    def acceptance_length(self) -> float:
        """Transitions per pass, each block's first pass included."""
        return float(self.transitions.sum() / self.passes.sum())

    @property
    def expected_length(self) -> float:
        """What the drafter's reach probabilities promise."""
        return float(self.expected.sum() / self.passes.sum())


def p_token(scores: Scores) -> torch.Tensor:
    """Return the probabilities [B, D, L, 2] that a committed position holds the best, the second-best stale token."""
    return scores.token.float().softmax(dim=-1)[..., :2]


def simulate(
    model: OrderModel,
    states: TraceStates,
    blocks: Int64[np.ndarray, " n"],
    budgets: Sequence[int],
    token_branches: bool = True,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[int, Simulated]:
    """Return the outcome for every budget.

    Args:
        model: the order model.
        states: recorded states.
        blocks: block numbers.
        budgets: rows of a pass.
        token_branches: also draft second-best tokens.
        progress: called with blocks done and all blocks.
    """
    results = {budget: (np.zeros(len(blocks), np.int64), np.zeros(len(blocks))) for budget in budgets}
    done = 0
    for chunk in _chunks(states, blocks):
        arrays, starts, totals = _score_blocks(model, states, blocks[chunk], token_branches)
        for budget, (passes, expected) in results.items():
            for number, start, total in zip(chunk, starts, totals, strict=True):
                drafts = arrays is not None and total > 2
                passes[number], expected[number] = _run_block(arrays, start, total, budget) if drafts else (total, total)
        done += len(chunk)
        progress(done, len(blocks))
    transitions = (states.first_state[blocks + 1] - states.first_state[blocks]).astype(np.int64)
    return {budget: Simulated(blocks, passes, transitions, expected) for budget, (passes, expected) in results.items()}


def reach_histogram(
    model: OrderModel, states: TraceStates, blocks: Int64[np.ndarray, " n"], budget: int, edges: Float64[np.ndarray, " b"]
) -> Float64[np.ndarray, "S b 3"]:
    """Return, per setting and bin of predicted reach, the number of drafted nodes, the sum of their reach, and how many came true.

    A node comes true if the walk arrives at it, which is what reach predicts. Roots, which are certain, are left out.

    Args:
        model: the order model.
        states: recorded states.
        blocks: block numbers.
        budget: rows of a pass.
        edges: lower ends of the bins, ascending, the first 0.
    """
    counts = np.zeros((len(states.traces.settings), len(edges), 3))
    for chunk in _chunks(states, blocks):
        arrays, starts, totals = _score_blocks(model, states, blocks[chunk], True)
        for number, start, total in zip(chunk, starts, totals, strict=True):
            if arrays is not None and total > 2:
                _reach_block(arrays, start, total, budget, edges, counts[states.setting_of_block[blocks[number]]])
    return counts


def _chunks(states: TraceStates, blocks: Int64[np.ndarray, " n"]) -> list[Int64[np.ndarray, " k"]]:
    """Group block numbers (by place in `blocks`) of equal length, about _STATES_PER_CHUNK states together."""
    chunks: list[Int64[np.ndarray, " k"]] = []
    lengths = states.length_of_block[blocks]
    for length in np.unique(lengths):
        members = np.flatnonzero(lengths == length)
        size = max(1, _STATES_PER_CHUNK // int(length))
        chunks += [members[i : i + size] for i in range(0, len(members), size)]
    return chunks


def _score_blocks(
    model: OrderModel, states: TraceStates, blocks: Int64[np.ndarray, " k"], token_branches: bool
) -> tuple[_Arrays | None, Int64[np.ndarray, " k"], list[int]]:
    """Score every state of the blocks at which something can be drafted (all but the last two of each).

    Returns:
        The scores (None where there is no such state), each block's first row in them, each block's number of transitions.
    """
    first, totals = states.first_state[blocks], np.diff(states.first_state)[blocks]
    usable = np.maximum(totals - 2, 0)
    starts = np.cumsum(usable) - usable
    indices = np.arange(usable.sum()) - np.repeat(starts - first, usable)
    return _score(model, states, indices, token_branches) if len(indices) else None, starts, totals.tolist()


def draft_outcomes(
    model: OrderModel, states: TraceStates, indices: Int64[np.ndarray, " n"], budgets: Sequence[int], token_branches: bool = True
) -> dict[int, tuple[Int64[np.ndarray, " n"], Float64[np.ndarray, " n"]]]:
    """Return, for one draft at each of the given states, the transitions that its pass would make and those that it expects.

    Recorded effects count, so this is what a speculative decoder earns at the states where one recorded.
    """
    outcome = {budget: (np.zeros(len(indices), np.int64), np.zeros(len(indices))) for budget in budgets}
    lengths = states.lengths(indices)
    for length in np.unique(lengths):
        members = np.flatnonzero(lengths == length)
        for start in range(0, len(members), _STATES_PER_CHUNK):
            chunk = members[start : start + _STATES_PER_CHUNK]
            arrays = _score(model, states, indices[chunk], token_branches)
            for budget, (made, expected) in outcome.items():
                made[chunk], expected[chunk] = _draft_each(arrays, budget)
    return outcome


@torch.inference_mode()
def _score(model: OrderModel, states: TraceStates, indices: Int64[np.ndarray, " n"], token_branches: bool) -> _Arrays:
    batch, paths = states.batch(indices, DEPTHS)
    encoded = encode(batch, DEPTHS)
    device = next(model.parameters()).device
    s = model(inputs(encoded, device))
    chances = p_token(s)
    if not token_branches:
        chances[..., 1] = 0
    order = (s.base, s.pair, s.last, s.gate_node, s.gate_commit, s.gate_position, s.gate_out)
    moving = (s.sure, s.effect, s.known, s.known_root, s.dynamic, s.rounded)
    arrays = [np.ascontiguousarray(part.float().cpu().numpy()) for part in (chances, *order, *moving)]
    steps = (paths.kind >= 0).sum(axis=1)
    return _Arrays._make((batch.status == MASKED, paths.look_ahead, *arrays, paths.positions, paths.tokens, steps))


@njit(cache=True)
@no_type_check
def _grow(a, row, budget):
    """Grow one graph; return depth, reach, hashes and the true path's position indices and tokens (nodes only, not the block's end)."""
    at = np.flatnonzero(a.masked[row])
    place = np.zeros(a.masked.shape[1], np.int32)
    place[at] = np.arange(len(at), dtype=np.int32)
    _, _, _, depth, reach, _, hashes = grow_moving(
        np.ascontiguousarray(a.look_ahead[row][:, at]), np.ascontiguousarray(a.p_token[row][:, at]),
        np.ascontiguousarray(a.base[row][:, at]), np.ascontiguousarray(a.pair[row][at][:, at]),
        np.ascontiguousarray(a.last[row][at][:, at]), a.gate_node[row], np.ascontiguousarray(a.gate_commit[row][at]),
        np.ascontiguousarray(a.gate_position[row][at]), a.gate_out, np.ascontiguousarray(a.sure[row][:, at]),
        np.ascontiguousarray(a.effect[row][at][:, at]), a.known[row][at], np.float64(a.known_root[row]),
        np.ascontiguousarray(a.dynamic[row]), a.rounded[row] > 0, budget,
    )  # fmt: skip
    count = min(a.steps[row], len(at) - 1)
    return depth, reach, hashes, place[a.positions[row, :count]], a.tokens[row, :count]


@njit(cache=True)
@no_type_check
def _draft_each(a, budget):
    """Return the transitions made and expected of one pass from every root."""
    made, expected = np.zeros(len(a.masked), np.int64), np.zeros(len(a.masked))
    for row in range(len(a.masked)):
        _, reach, hashes, positions, tokens = _grow(a, row, budget)
        made[row], expected[row] = 1 + walk(hashes, positions, tokens), reach.sum()
    return made, expected


@njit(cache=True)
@no_type_check
def _run_block(a, start, total, budget):
    """Return (passes, expected transitions) of one block of `total` transitions whose first state is row `start`."""
    passes, expected = 1, 1.0
    t = 0  # transitions 0..t are done, the root is the state after them
    while t + 1 < total:
        passes += 1
        if t + 2 >= total:
            expected += 1.0
            break
        _, reach, hashes, positions, tokens = _grow(a, start + t, budget)
        expected += reach.sum()
        t += 1 + walk(hashes, positions, tokens)
    return passes, expected


@njit(cache=True)
@no_type_check
def _reach_block(a, start, total, budget, edges, counts):
    """Add the nodes drafted in the passes of one block (see `_run_block`) to `counts`."""
    t = 0
    while t + 2 < total:
        depth, reach, hashes, positions, tokens = _grow(a, start + t, budget)
        accepted = walk(hashes, positions, tokens)
        codes = path_codes(positions[:accepted], tokens[:accepted])
        for node in range(1, len(reach)):
            place_of = np.searchsorted(edges, reach[node], side="right") - 1
            counts[place_of, 0] += 1
            counts[place_of, 1] += reach[node]
            counts[place_of, 2] += depth[node] <= accepted and hashes[node] == codes[min(depth[node], accepted)]
        t += 1 + accepted
