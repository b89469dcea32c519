"""How many guesses a pass evaluates, weighed by what passes cost here; budgets decide the time only, never the tokens.

Knows nothing of how costs are measured or how decoding is done.
"""

from spot_dlm.budget.account import Account, Calibration
from spot_dlm.budget.automatic import MOST_NODES, AutoBudget, Budget, FixedBudget
from spot_dlm.budget.profile import CostProfile, isotonic

__all__ = ["MOST_NODES", "Account", "AutoBudget", "Budget", "Calibration", "CostProfile", "FixedBudget", "isotonic"]
