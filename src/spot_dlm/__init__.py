"""Lossless speculative decoding for diffusion language models: the tokens of plain decoding in fewer target passes.

    import spot_dlm as spot
    target = spot.load_target()
    drafter = spot.build_drafter("auto", spec=target.spec)
    result = spot.generate(target, "To JSON: Anna Berg, 34, lives in Oslo.", drafter)

The names below are imported when first used, so that the command line starts without waiting for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spot_dlm.batch import Batch, Request, decode_batch
    from spot_dlm.decode import decode_steps, generate, stream
    from spot_dlm.drafters import Chain, LeftToRight, Root, build_drafter
    from spot_dlm.interfaces import DecodeParams, Drafter, Target
    from spot_dlm.presets import official
    from spot_dlm.sequence import Finished, Pass, Result
    from spot_dlm.targets import load_target
    from spot_dlm.transition import Sampling, UnmaskRule

__version__ = "0.1.0"

_HOMES = {
    "batch": ("Batch", "Request", "decode_batch"),
    "decode": ("decode_steps", "generate", "stream"),
    "drafters": ("Chain", "LeftToRight", "Root", "build_drafter"),
    "interfaces": ("DecodeParams", "Drafter", "Target"),
    "presets": ("official",),
    "sequence": ("Finished", "Pass", "Result"),
    "targets": ("load_target",),
    "transition": ("Sampling", "UnmaskRule"),
}

__all__ = [
    "Batch",
    "Chain",
    "DecodeParams",
    "Drafter",
    "Finished",
    "LeftToRight",
    "Pass",
    "Request",
    "Result",
    "Root",
    "Sampling",
    "Target",
    "UnmaskRule",
    "build_drafter",
    "decode_batch",
    "decode_steps",
    "generate",
    "load_target",
    "official",
    "stream",
]


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"spot_dlm.{module}"), name)
    raise AttributeError(f"module 'spot_dlm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
