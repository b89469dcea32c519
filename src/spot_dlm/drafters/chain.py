"""The training-free chain (FreeDave, arXiv 2510.00294): apply F again and again to the stale logits.

The published drafter fills the tokens that the last pass drew; the coupled one draws each depth's tokens with the noise
that the target will use there, so a guess is as often right at T = 1 as at T = 0. Where the rule draws the order of positions, both know
the noise of that, and with it, under random remasking, the order itself.
"""

from dataclasses import dataclass

from spot_dlm.draft_graph import DraftGraph
from spot_dlm.drafters.stale import stale_chain
from spot_dlm.interfaces import DraftContext


@dataclass(frozen=True)
class Chain:
    """Positions by descending stale confidence, one chain of nodes.

    Args:
        coupled: draw every depth's tokens with that depth's noise; False is the published form. Equal at temperature 0.
    """

    coupled: bool = True

    @property
    def name(self) -> str:
        """Name on the command line."""
        return "chain" if self.coupled else "chain-published"

    def draft(self, context: DraftContext, budget: int) -> DraftGraph:
        """Follow the rule itself on stale candidates."""
        return stale_chain(context, budget, context.rule, self.coupled)
