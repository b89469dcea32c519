"""Offline speculation on recorded trajectories: what an order model's drafts would have been accepted, without the target.

Acceptance is a function of the trajectory alone, so traces are enough: the graph is grown from every state that a speculative
decoder would reach and walked along the true commits. Knows nothing of training.

Example: `simulate(model, states, blocks, budgets=(8, 32))[8].acceptance_length`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import no_type_check

import numpy as np
import torch
from jaxtyping import Float64, Int64
from numba import njit

from spot_dlm.features import MASKED, encode
from spot_dlm.growth import grow_arrays, walk
from spot_dlm.order_model import OrderModel, Scores, inputs
from spot_dlm.trace_states import TraceStates

DEPTHS = 16
_STATES_PER_CHUNK = 256


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
    chunks = list(_chunks(states, blocks))
    done = 0
    for chunk in chunks:
        first, last = states.first_state[blocks[chunk]], states.first_state[blocks[chunk] + 1]
        usable = np.maximum(last - first - 2, 0)
        indices = np.concatenate([np.arange(f, f + u) for f, u in zip(first, usable, strict=True)]) if usable.sum() else np.empty(0, int)
        starts = np.concatenate(([0], np.cumsum(usable)))
        arrays = _score(model, states, indices, token_branches) if len(indices) else None
        for budget, (passes, expected) in results.items():
            for at, number in enumerate(chunk):
                total = int(last[at] - first[at])
                if arrays is None or not usable[at]:
                    passes[number], expected[number] = total, total
                else:
                    passes[number], expected[number] = _run_block(*arrays, starts[at], total, budget)
        done += len(chunk)
        progress(done, len(blocks))
    transitions = (states.first_state[blocks + 1] - states.first_state[blocks]).astype(np.int64)
    return {budget: Simulated(blocks, passes, transitions, expected) for budget, (passes, expected) in results.items()}


def _chunks(states: TraceStates, blocks: Int64[np.ndarray, " n"]) -> list[Int64[np.ndarray, " k"]]:
    """Group block numbers (by place in `blocks`) of equal length, about _STATES_PER_CHUNK states together."""
    chunks: list[Int64[np.ndarray, " k"]] = []
    lengths = states.length_of_block[blocks]
    for length in np.unique(lengths):
        members = np.flatnonzero(lengths == length)
        size = max(1, _STATES_PER_CHUNK // int(length))
        chunks += [members[i : i + size] for i in range(0, len(members), size)]
    return chunks


@torch.inference_mode()
def _score(model: OrderModel, states: TraceStates, indices: Int64[np.ndarray, " n"], token_branches: bool) -> tuple[np.ndarray, ...]:
    batch, paths = states.batch(indices, DEPTHS)
    encoded = encode(batch, DEPTHS)
    device = next(model.parameters()).device
    scores = model(*inputs(encoded, device))
    chances = p_token(scores)
    if not token_branches:
        chances[..., 1] = 0
    parts = [chances, *(scores.base, scores.pair, scores.last, scores.gate_node, scores.gate_commit, scores.gate_position, scores.gate_out)]
    arrays = [np.ascontiguousarray(p.float().cpu().numpy()) for p in parts]
    return ((batch.status == MASKED), paths.look_ahead, *arrays, paths.positions, paths.tokens, (paths.kind >= 0).sum(axis=1))


@njit(cache=True)
@no_type_check
def _run_block(
    masked, look_ahead, chances, base, pair, last, gate_node, gate_commit, gate_position, gate_out, positions, tokens, known,
    start, total, budget,
):  # fmt: skip
    """Return (passes, expected transitions) of one block of `total` transitions whose first state is row `start`."""
    length = masked.shape[1]
    passes, expected = 1, 1.0
    t = 0  # transitions 0..t are done, the root is the state after them
    place = np.zeros(length, np.int32)
    while t + 1 < total:
        passes += 1
        if t + 2 >= total:
            expected += 1.0
            break
        row = start + t
        at = np.flatnonzero(masked[row])
        place[at] = np.arange(len(at), dtype=np.int32)
        _, _, _, _, reach, _, hashes = grow_arrays(
            np.ascontiguousarray(look_ahead[row][:, at]), np.ascontiguousarray(chances[row][:, at]),
            np.ascontiguousarray(base[row][:, at]), np.ascontiguousarray(pair[row][at][:, at]), np.ascontiguousarray(last[row][at][:, at]),
            gate_node, np.ascontiguousarray(gate_commit[row][at]), np.ascontiguousarray(gate_position[row][at]), gate_out, budget,
        )  # fmt: skip
        expected += reach.sum()
        count = min(known[row], total - t - 3 + 1)
        accepted = walk(hashes, place[positions[row, :count]], tokens[row, :count])
        t += 1 + accepted
    return passes, expected
