"""Special ids and the length of a block, each with the place that says so.

Knows nothing of weights. Example: `mask_token(config, codec, family, "my-model")` is `Found(151669, "config.json")`.
"""

import re
from pathlib import Path
from typing import Any, NamedTuple

from spot_dlm.targets.checkpoints import read_json
from spot_dlm.targets.families import Family
from spot_dlm.targets.text import TextCodec

CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer"


class Found(NamedTuple):
    """One id or number and where it came from."""

    value: int
    source: str


class FoundIds(NamedTuple):
    """Ids and where they came from."""

    values: frozenset[int]
    source: str


def mask_token(config: dict[str, Any], codec: TextCodec | None, family: Family, model: str) -> Found:
    """Return the mask's id: config.json's, else the tokenizer's, else the family's.

    Raises:
        ValueError: if none of them has one.
    """
    if config.get("mask_token_id") is not None:
        return Found(int(config["mask_token_id"]), CONFIG)
    for text in family.mask_tokens if codec is not None else ():
        if (known := codec.id_of(text)) is not None:  # type: ignore[union-attr]  # the loop is empty without codec
            return Found(known, f"{TOKENIZER} ({text})")
    if family.mask_id is None:
        raise ValueError(f"{model}: config.json has no mask_token_id and the tokenizer has no {' or '.join(family.mask_tokens)}")
    return Found(family.mask_id, _default(family))


def end_tokens(folder: Path, config: dict[str, Any], family: Family) -> FoundIds:
    """Return the end tokens: generation_config.json's, else config.json's, else the family's.

    Raises:
        ValueError: if generation_config.json cannot be read.
    """
    path = folder / GENERATION
    stated, source = (read_json(path, folder.name).get("eos_token_id") if path.exists() else None), GENERATION
    if stated is None:
        stated, source = (config["eos_token_id"], CONFIG) if "eos_token_id" in config else (list(family.stop_ids), _default(family))
    padding = [config.get("pad_token_id")] if family.ends_with_padding else []
    return FoundIds(frozenset(int(i) for i in (*(stated if isinstance(stated, list) else [stated]), *padding) if i is not None), source)


def block_length(config: dict[str, Any], family: Family, model: str) -> Found:
    """Return the length of a block: config.json's, else what the model's name ends with ("-b16"), else the family's.

    Raises:
        ValueError: if config.json holds no whole number.
    """
    field = next((name for name in ("block_size", "block_length", "bd_size") if config.get(name) is not None), None)
    if field is not None:
        if not isinstance(config[field], int):
            raise ValueError(f"{model}: block_size {config[field]!r} in config.json must be a whole number")
        return Found(config[field], f"{CONFIG} ({field})")
    named = re.search(r"-b(\d+)(?:$|[-/])", model)
    return Found(int(named.group(1)), "the model's name") if named else Found(family.block_length, _default(family))


def _default(family: Family) -> str:
    return f"default of {family.name}"
