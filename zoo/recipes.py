"""What is trained: the shipped target from nothing, and six targets in other layouts, each grown from the shipped one and trained on.

Knows nothing of tensors. Example: `RECIPES["dream"].config.hidden_size`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from zoo.model import ModelConfig

WEIGHTS = {"json": 0.22, "python": 0.22, "arithmetic": 0.32, "rewrite": 0.16, "stdlib": 0.08}
_LAST_WEIGHTS = {"facts": 0.08, "json": 0.18, "python": 0.22, "arithmetic": 0.34, "rewrite": 0.14, "stdlib": 0.04}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One target: its network, its layout, and how it is trained.

    Args:
        family: row of `spot_dlm.targets.families` whose layout and contract the checkpoint has.
        attention: "block_causal": zoo/batches.py; "full": zoo/canvases.py.
        block_lengths: trained in turn; the first is written to config.json; 0: the canvas is one block.
        after_prompt: blocks count from the end of the prompt.
        shifted: the row before a position predicts it.
        stages: mixture of families from a step on; boundaries are multiples of `train.POOL_BATCHES`.
        schedule: factor of the learning rates, linear between these steps; the last step ends training.
        donor_layers: the shipped target's layer that each layer begins as, None: as one that does nothing yet; empty: from nothing.
        seed: of data and initial weights.
    """

    family: str
    config: ModelConfig
    attention: Literal["block_causal", "full"] = "block_causal"
    block_lengths: tuple[int, ...]
    after_prompt: bool = False
    shifted: bool = False
    stages: tuple[tuple[int, Mapping[str, float]], ...] = ((0, _LAST_WEIGHTS),)
    schedule: tuple[tuple[int, float], ...]
    donor_layers: tuple[int | None, ...] = ()
    seed: int
    batch_rows: int = 24
    muon_lr: float = 0.02
    adam_lr: float = 4e-3

    @property
    def steps(self) -> int:
        """Optimisation steps of the whole training."""
        return self.schedule[-1][0]


# The further a network begins from the shipped one (dropped layers, mean heads), the longer it is trained.
_NEAR = ((0, 1.0), (100, 1.0), (450, 0.0))
_MIDDLE = ((0, 1.0), (200, 1.0), (700, 0.0))
_NEAR_LONGER = (*_NEAR, (500, 0.5), (900, 0.0))  # once more, where answers were still wrong too often
_MIDDLE_LONGER = (*_MIDDLE, (750, 0.5), (1200, 0.0))
_SHIFTED = (*_MIDDLE, (750, 0.7), (1400, 0.0))
_FAR = ((0, 1.0), (600, 1.0), (1600, 0.0))

RECIPES: Mapping[str, Recipe] = {
    # The drill stage in the middle is there because arithmetic facts stay at chance in the mixture (docs/log.md).
    "shipped": Recipe(
        family="sdar",
        config=ModelConfig(),
        block_lengths=(16, 32),
        stages=(
            (0, WEIGHTS),
            (3104, {"drill": 0.70, "json": 0.10, "python": 0.06, "rewrite": 0.08, "arithmetic": 0.06}),
            (3504, {"facts": 0.70, "json": 0.10, "python": 0.06, "rewrite": 0.08, "arithmetic": 0.06}),
            (3904, {"facts": 0.10, "json": 0.22, "python": 0.14, "arithmetic": 0.30, "rewrite": 0.17, "stdlib": 0.07}),
            (5200, _LAST_WEIGHTS),
        ),
        schedule=((0, 1.0), (2300, 1.0), (3104, 0.7022), (3904, 0.7022), (5200, 0.2878), (6900, 0.0)),
        seed=1,
    ),
    "llada": Recipe(
        family="llada",
        config=ModelConfig(num_layers=5, qk_norm=False, tied=False),
        attention="full",
        block_lengths=(32,),
        schedule=_NEAR_LONGER,
        donor_layers=(0, 1, None, 2, 3),
        seed=11,
        batch_rows=20,
        muon_lr=0.012,
    ),
    "dream": Recipe(
        family="dream",
        config=ModelConfig(hidden_size=224, num_heads=7, qk_norm=False, qkv_bias=True, tied=False),
        attention="full",
        block_lengths=(0,),
        shifted=True,
        schedule=_SHIFTED,
        donor_layers=(0, 1, 2, 3),
        seed=12,
        batch_rows=20,
        muon_lr=0.012,
    ),
    "sdar-b8": Recipe(
        family="sdar",
        config=ModelConfig(num_layers=3, num_key_heads=3, intermediate_size=640),
        block_lengths=(8,),
        schedule=_FAR,
        donor_layers=(0, 1, 3),
        seed=13,
    ),
    "bd3lm": Recipe(
        family="bd3lm",
        config=ModelConfig(num_layers=6),
        block_lengths=(32,),
        after_prompt=True,
        schedule=_NEAR,
        donor_layers=(0, None, 1, 2, None, 3),
        seed=14,
    ),
    "llada_moe": Recipe(
        family="llada_moe",
        config=ModelConfig(intermediate_size=160, num_experts=6, experts_per_token=2),
        attention="full",
        block_lengths=(32,),
        schedule=_MIDDLE_LONGER,
        donor_layers=(0, 1, 2, 3),
        seed=15,
        batch_rows=20,
    ),
    "fast_dllm_v2": Recipe(
        family="fast_dllm_v2",
        config=ModelConfig(num_layers=5, qk_norm=False, qkv_bias=True),
        block_lengths=(32,),
        shifted=True,
        schedule=_SHIFTED,
        donor_layers=(0, 1, 2, None, 3),
        seed=16,
        muon_lr=0.012,
    ),
}
