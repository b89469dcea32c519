"""Drafters: ways to guess the target's next states; none of them can change a token."""

from spot_dlm.drafters.calibrated import Calibrated
from spot_dlm.drafters.chain import Chain
from spot_dlm.drafters.left_to_right import LeftToRight
from spot_dlm.drafters.registry import CALIBRATED, DRAFTERS, build_drafter
from spot_dlm.drafters.root import Root

__all__ = ["CALIBRATED", "DRAFTERS", "Calibrated", "Chain", "LeftToRight", "Root", "build_drafter"]
