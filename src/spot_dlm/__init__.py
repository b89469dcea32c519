"""Lossless speculative decoding for diffusion language models: the tokens of plain decoding in fewer target passes.

import spot_dlm as spot
target = spot.load_target()
result = spot.generate(target, "To JSON: Anna Berg, 34, lives in Oslo.", spot.Chain())
"""

from spot_dlm.decode import Finished, Pass, Result, decode_steps, generate, stream
from spot_dlm.drafters import Chain, LeftToRight, Root, build_drafter
from spot_dlm.interfaces import DecodeParams, Drafter, Target
from spot_dlm.targets import load_target
from spot_dlm.transition import Sampling, UnmaskRule

__version__ = "0.1.0"

__all__ = [
    "Chain",
    "DecodeParams",
    "Drafter",
    "Finished",
    "LeftToRight",
    "Pass",
    "Result",
    "Root",
    "Sampling",
    "Target",
    "UnmaskRule",
    "build_drafter",
    "decode_steps",
    "generate",
    "load_target",
    "stream",
]
