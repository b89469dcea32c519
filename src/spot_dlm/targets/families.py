"""The table of model families: one row says how a checkpoint's layout maps to a native class and how its attention is shaped.

Facts were read in the authors' sources; line references are in docs/families.md. Knows nothing of weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Family:
    """One row: the vendor's architecture name, the native transformers class and the decoding contract."""

    name: str
    architectures: tuple[str, ...]
    host_config: str
    host_model: str
    mask_token: str
    default_block_length: int


FAMILIES = (
    Family(
        name="sdar",
        architectures=("SDARForCausalLM",),
        host_config="Qwen3Config",
        host_model="Qwen3ForCausalLM",
        mask_token="<|MASK|>",
        default_block_length=4,
    ),
)


def find_family(config: Mapping[str, Any]) -> Family:
    """Return the row for a raw config.json.

    Raises:
        ValueError: naming the architecture found and those known.
    """
    stated = config.get("architectures")
    names = stated if isinstance(stated, list) and stated else ["(none)"]
    for family in FAMILIES:
        if names[0] in family.architectures:
            return family
    known = ", ".join(a for f in FAMILIES for a in f.architectures)
    raise ValueError(f"architecture {names[0]} is not supported; supported: {known}")
