"""Targets: diffusion language models loaded from their authors' checkpoints on transformers' own classes, without remote code."""

from spot_dlm.targets.checkpoints import SHIPPED
from spot_dlm.targets.loader import load_target

__all__ = ["SHIPPED", "load_target"]
