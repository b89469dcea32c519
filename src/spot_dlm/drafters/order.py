"""The learned drafters: an order model predicts what is committed next, the graph is grown best first (SPOT, arXiv 2610.22543).

One encoder run per pass; nodes cost additions only (growth). Where the rule commits several positions per step the order is the rule's
own, and the coupled chain is drafted instead.

Example: `build_drafter("order")` with the shipped weights, or `Order(load_order_model(Path("drafter")))`.
"""

from dataclasses import dataclass

import numpy as np
import torch

from spot_dlm.draft_graph import DraftGraph
from spot_dlm.drafter_files import OrderModelFile
from spot_dlm.drafters.stale import stale_chain
from spot_dlm.features import encode, live_state
from spot_dlm.growth import OrderScores, grow
from spot_dlm.interfaces import DraftContext
from spot_dlm.lookahead import LookAhead
from spot_dlm.order_model import Scores, inputs


@dataclass(frozen=True)
class Order:
    """Drafts with an order model, `order` or `linear` by the kind of its file.

    Args:
        file: the trained model.
        token_branches: also draft second-best tokens where they are likely.
    """

    file: OrderModelFile
    token_branches: bool = True

    @property
    def name(self) -> str:
        """Name on the command line."""
        return self.file.model.config.kind

    def draft(self, context: DraftContext, budget: int) -> DraftGraph:
        """Encode the last distributions once and grow the graph."""
        rule, root = context.rule, context.root
        if rule.num_per_step > 1 or rule.select == "threshold":
            return stale_chain(context, budget, rule, coupled=True)
        depths = min(budget, len(root.masked)) - 1
        if depths < 1:
            return DraftGraph.root_only(root)
        batch, ahead = live_state(context, depths)
        with torch.inference_mode():
            scores = self.file.model(*inputs(encode(batch, depths)))
        return grow(root, self._compact(scores, root.masked, ahead), budget)

    def _compact(self, scores: Scores, masked: np.ndarray, ahead: LookAhead) -> OrderScores:
        """Keep the masked positions only."""
        chances = scores.token[0].softmax(dim=-1).numpy()[:, masked, :2]
        if not self.token_branches:
            chances[..., 1] = 0
        depths = chances.shape[0]
        tokens = ahead.tokens if len(ahead.tokens) >= depths else np.repeat(ahead.tokens, depths, axis=0)
        square = np.ix_(masked, masked)
        return OrderScores(
            positions=masked,
            tokens=np.ascontiguousarray(tokens[:depths]),
            p_token=np.ascontiguousarray(chances),
            base=np.ascontiguousarray(scores.base[0].numpy()[:, masked]),
            pair=scores.pair[0].numpy()[square],
            last=scores.last[0].numpy()[square],
            gate_node=scores.gate_node.numpy(),
            gate_commit=scores.gate_commit[0].numpy()[masked],
            gate_position=scores.gate_position[0].numpy()[masked],
            gate_out=scores.gate_out.numpy(),
        )
