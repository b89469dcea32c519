"""The left-to-right chain: stale tokens in position order, the simplest guess of the order.

Where confidences tie (bfloat16 resolution) the true order is exactly this one; a learned order must beat it.
"""

from dataclasses import dataclass, replace

from spot_dlm.draft_graph import DraftGraph
from spot_dlm.drafters.stale import stale_chain
from spot_dlm.interfaces import DraftContext


@dataclass(frozen=True)
class LeftToRight:
    """One chain of nodes in position order, tokens drawn with the coupled noise of their depth."""

    name: str = "ltr"

    def draft(self, context: DraftContext, budget: int) -> DraftGraph:
        """Fill the leftmost masked positions one node after the other (k at a time where the rule commits k)."""
        return stale_chain(context, budget, replace(context.rule, select="left_to_right", order_temperature=0.0), coupled=True)
