"""The learned drafters: an order model predicts what is committed next, the graph is grown best first (SPOT, arXiv 2610.22543).

One encoder run per pass; nodes cost additions only (growth). Where the rule commits several positions per step, or is none that
the model was trained on (left to right, say, whose order needs no model), the coupled chain is drafted instead.

Example: `build_drafter("order")` with the shipped weights, or `Order(load_order_model(Path("drafter")))`.
"""

from dataclasses import dataclass
from functools import cached_property

from spot_dlm.draft_graph import DraftGraph
from spot_dlm.drafter_files import OrderModelFile
from spot_dlm.drafters.stale import stale_chain
from spot_dlm.features import NUM_AHEAD, encode, live_state
from spot_dlm.growth import grow
from spot_dlm.interfaces import DraftContext
from spot_dlm.order_inference import FastScorer
from spot_dlm.rules import parse_rule
from spot_dlm.transition import UnmaskRule


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

    @cached_property
    def _rules(self) -> frozenset[UnmaskRule]:
        """Rules that the model was trained on; none known: all are tried."""
        return frozenset(parse_rule(s["rule"]) for s in self.file.about.get("trace_settings", ()))

    @cached_property
    def _scorer(self) -> FastScorer:
        return FastScorer(self.file.model)

    def draft(self, context: DraftContext, budget: int) -> DraftGraph:
        """Encode the last distributions once and grow the graph."""
        rule, root = context.rule, context.root
        if rule.num_per_step > 1 or rule.select == "threshold" or (self._rules and rule not in self._rules):
            return stale_chain(context, budget, rule, coupled=True)
        depths = min(budget, len(root.masked)) - 1
        if depths < 1:
            return DraftGraph.root_only(root)
        depths = max(depths, NUM_AHEAD)  # features look so far ahead whatever the budget
        batch, ahead = live_state(context, min(depths, len(root.masked)), with_effects=self.name == "order")
        scores = self._scorer(encode(batch, depths), root.masked, ahead, self.token_branches)
        return grow(root, scores, budget)
