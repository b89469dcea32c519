"""Drafters: ways to guess the target's next states; none of them can change a token."""

from spot_dlm.drafters.calibrated import Calibrated
from spot_dlm.drafters.chain import Chain
from spot_dlm.drafters.left_to_right import LeftToRight
from spot_dlm.drafters.order import Order
from spot_dlm.drafters.registry import AUTO, CALIBRATED, DRAFTERS, FITTED, build_drafter, is_foreign
from spot_dlm.drafters.root import Root

__all__ = [
    "AUTO",
    "CALIBRATED",
    "DRAFTERS",
    "FITTED",
    "Calibrated",
    "Chain",
    "LeftToRight",
    "Order",
    "Root",
    "build_drafter",
    "is_foreign",
]
