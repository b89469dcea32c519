"""The learned drafters: an order model predicts what is committed next, the graph is grown best first (SPOT, arXiv 2610.22543).

One encoder run per pass, for all prompts of a batch; nodes cost additions only (growth). Where the rule commits several positions per
step, draws the order itself (the noise of which the chain knows), or is none that the model was trained on (left to right, say, whose order
needs no model), the coupled chain is drafted instead.

Example: `build_drafter("order")` with the shipped weights, or `Order(load_order_model(Path("drafter")))`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from spot_dlm.draft_graph import DraftGraph
from spot_dlm.drafter_files import OrderModelFile
from spot_dlm.drafters.stale import stale_chain
from spot_dlm.features import NUM_AHEAD
from spot_dlm.growth import grow
from spot_dlm.interfaces import DraftContext
from spot_dlm.live import read_live
from spot_dlm.order_inference import FastScorer
from spot_dlm.rules import describe, parse_rule
from spot_dlm.state import BlockState
from spot_dlm.transition import Sampling, UnmaskRule


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
        return self.draft_many([context], [budget])[0]

    def draft_many(self, contexts: Sequence[DraftContext], budgets: Sequence[int]) -> list[DraftGraph]:
        """Draft for several prompts; blocks of one length share a run of the encoder."""
        graphs: dict[int, DraftGraph] = {}
        alike: dict[int, list[int]] = {}
        for i, (context, budget) in enumerate(zip(contexts, budgets, strict=True)):
            rule, count = context.rule, len(context.root.masked)
            unknown = bool(self._rules) and _plain(rule, context.sampling) not in self._rules
            if unknown or rule.draws_order or _commits_several(rule, context.root):
                graphs[i] = stale_chain(context, budget, rule, coupled=True)
            elif budget < 2 or (count == 1 and not (context.crosses and budget > 2)):
                graphs[i] = DraftGraph.root_only(context.root)
            else:
                alike.setdefault(len(context.root.canvas), []).append(i)
        for members in alike.values():
            drafted = self._draft_alike([contexts[i] for i in members], [budgets[i] for i in members])
            graphs.update(zip(members, drafted, strict=True))
        return [graphs[i] for i in range(len(contexts))]

    def _draft_alike(self, contexts: Sequence[DraftContext], budgets: Sequence[int]) -> list[DraftGraph]:
        """Draft for blocks of one length; features look NUM_AHEAD steps ahead whatever the budget."""
        masked = [context.root.masked for context in contexts]
        deepest = [len(at) - (not context.crosses) for context, at in zip(contexts, masked, strict=True)]
        depths = [max(min(budget - 1, most), NUM_AHEAD) for budget, most in zip(budgets, deepest, strict=True)]
        looks = [min(wanted, len(at)) for wanted, at in zip(depths, masked, strict=True)]
        encoded, tokens = read_live(contexts, looks, with_effects=self.name == "order")
        scores = self._scorer(encoded, masked, tokens, depths, self.token_branches)
        return [
            grow(context.root, each, budget, context.crosses, context.stop_ids)
            for context, each, budget in zip(contexts, scores, budgets, strict=True)
        ]


@lru_cache
def _plain(rule: UnmaskRule, sampling: Sampling) -> UnmaskRule:
    """Return the rule without what changes nothing, or little, where one position is committed per step."""
    alike = sampling.temperature in (0, 1) and not sampling.top_k and sampling.top_p == 1  # raw, tempered and filtered are the same
    plain = replace(rule, source="raw" if alike else rule.source, schedule=None, late_ids=(), suppressed_ids=())
    return parse_rule(describe(plain))  # which leaves out fields without effect


def _commits_several(rule: UnmaskRule, root: BlockState) -> bool:
    """Whether a step before the block's last one may commit more than one position, or only some of the masked ones can be next."""
    if rule.num_per_step > 1 or rule.span or rule.select == "threshold":
        return True
    return any(rule.count(root, ahead) > 1 for ahead in range(len(root.masked) - 2))
