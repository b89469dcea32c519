"""Stale candidates: what F would choose at later steps if the target's last logits still held (method.md section 5).

With coupled noise the candidates of step t + d use the noise of step t + d, known in advance. Shared by the drafters that guess
with stale tokens.
"""

from collections.abc import Iterator

import numpy as np
import torch

from spot_dlm.draft_graph import DraftGraph, GraphBuilder
from spot_dlm.interfaces import DraftContext
from spot_dlm.state import MASKED, BlockState
from spot_dlm.transition import Candidates, UnmaskRule, commit, propose


def still_masked(candidates: Candidates, state: BlockState) -> Candidates:
    """Restrict candidates to the positions that are masked in `state`."""
    at = state.canvas[candidates.positions] == MASKED
    return candidates.take(at)


def stale_candidates(context: DraftContext, depths: int, coupled: bool) -> Iterator[Candidates]:
    """Yield the stale candidates at the root's masked positions for the root's step, the one after it, and so on.

    At temperature 0, or uncoupled, they are those of the last transition at every depth and cost nothing. Otherwise one
    vectorised `propose` over all depths.
    """
    root = context.root
    if context.sampling.temperature == 0 or not coupled or depths <= 0:
        for _ in range(depths):
            yield still_masked(context.last.candidates, root)
        return
    count, vocab_size = len(root.masked), context.logits.shape[-1]
    rows = torch.from_numpy(np.searchsorted(context.last.before.masked, root.masked)).to(context.logits.device)
    noise = [context.noise.rows(root.block, root.step + d, root.masked, vocab_size) for d in range(depths)]
    positions = np.tile(root.masked, depths)
    flat = propose(positions, context.logits[rows].repeat(depths, 1), context.rule, context.sampling, torch.cat(noise))
    for depth in range(depths):
        at = slice(depth * count, (depth + 1) * count)
        yield flat.take(at)


def stale_chain(context: DraftContext, budget: int, rule: UnmaskRule, coupled: bool) -> DraftGraph:
    """Return the chain of states that `rule` visits from the root on stale candidates, until the budget or the block ends."""
    builder = GraphBuilder(context.root, budget)
    state, node = context.root, 0
    depths = min(budget - 1, -(-len(state.masked) // rule.num_per_step) - 1)
    for candidates in stale_candidates(context, depths, coupled):
        state = commit(state, still_masked(candidates, state), rule).state
        added = builder.add(node, state, 1.0)
        if added is None:
            break
        node = added
    return builder.build()
