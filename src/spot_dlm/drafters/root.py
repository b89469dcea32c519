"""The drafter that guesses nothing: standard decoding, and the reference of every comparison."""

from dataclasses import dataclass

from spot_dlm.draft_graph import DraftGraph
from spot_dlm.interfaces import DraftContext


@dataclass(frozen=True)
class Root:
    """Propose only the certain next state."""

    name: str = "root"

    def draft(self, context: DraftContext, budget: int) -> DraftGraph:
        """Return the root alone, whatever the budget."""
        return DraftGraph.root_only(context.root)
