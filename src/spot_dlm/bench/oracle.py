"""The oracle: a chain of the true next positions with stale tokens, the ceiling of any order drafter without token branches.

It reads the answer's own trajectory, so it exists in benchmarks only. Example: `Oracle.of(standard_trajectory(target, ids, params))`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64

from spot_dlm.compare import Trajectory
from spot_dlm.draft_graph import DraftGraph, GraphBuilder
from spot_dlm.drafters.stale import stale_candidates
from spot_dlm.interfaces import DraftContext


@dataclass(frozen=True)
class Oracle:
    """Propose the positions that standard decoding of this very prompt commits next.

    Args:
        order: committed positions by (block, step).
    """

    order: Mapping[tuple[int, int], Int64[np.ndarray, " k"]]
    name: str = "oracle"

    @classmethod
    def of(cls, standard: Trajectory) -> "Oracle":
        """Take the order from a standard trajectory."""
        return cls({(t.before.block, t.before.step): t.positions for t in standard.transitions})

    def draft(self, context: DraftContext, budget: int) -> DraftGraph:
        """Fill the true positions with stale tokens, drawn with the coupled noise of their depth, until nothing is left.

        The complete block is a guess too where that is allowed.
        """
        builder = GraphBuilder(context.root, budget, context.crosses)
        state, node = context.root, 0
        depths = min(budget - 1, len(state.masked) - (not context.crosses))
        for candidates in stale_candidates(context, depths, coupled=True):
            positions = self.order.get((state.block, state.step))
            if positions is None or not np.isin(positions, state.masked).all():
                break
            tokens = candidates.tokens[np.searchsorted(candidates.positions, positions)]
            state = state.commit(positions, tokens)
            if state.is_complete and not context.stop_ids.isdisjoint(state.canvas[context.root.masked].tolist()):
                break
            added = builder.add(node, state, 1.0)
            if added is None:
                break
            node = added
        return builder.build()
