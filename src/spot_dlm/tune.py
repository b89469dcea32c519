"""Placeholder until the cost measurement is in: a fixed budget."""

from typing import Any

from spot_dlm.budget import Budget, FixedBudget
from spot_dlm.interfaces import DecodeParams, Drafter, Target


def budget_for(target: Target, drafter: Drafter, params: DecodeParams, run: Any = None, say: Any = None) -> Budget:
    """Return a fixed budget."""
    return FixedBudget(8 if params.nodes == "auto" else params.nodes)
