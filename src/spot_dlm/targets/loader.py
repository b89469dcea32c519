"""Load a target from a checkpoint folder, a hub id or the package itself: config, weights, tokenizer, special ids.

Reads config.json raw, finds the family's row and takes the native class apart. No remote code is ever run. Example:
`load_target("JetLM/SDAR-1.7B-Chat")` or `load_target()` for the shipped model.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from spot_dlm.interfaces import TargetSpec
from spot_dlm.state import MASKED
from spot_dlm.targets.block_causal import BlockCausalTarget
from spot_dlm.targets.cached_canvas import CachedCanvasTarget
from spot_dlm.targets.checkpoints import SHIPPED, fingerprint, load_host, locate, read_json
from spot_dlm.targets.encoder_weights import read_encoder
from spot_dlm.targets.families import Family, chat_templates, find_family
from spot_dlm.targets.full_attention import FullAttentionTarget
from spot_dlm.targets.special_ids import block_length as stated_length
from spot_dlm.targets.special_ids import end_tokens, mask_token
from spot_dlm.targets.text import TextCodec
from spot_dlm.targets.weights import Weights, read_weights

LoadedTarget = BlockCausalTarget | FullAttentionTarget


def load_target(
    model: str = SHIPPED,
    *,
    family: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    block_length: int | None = None,
    mask_token_id: int | None = None,
    stop_ids: Iterable[int] | None = None,
    pad_token_id: int | None = None,
    right_shift: bool = False,
    use_template: bool = True,
    padded_rows: int = 1,
    cache: str = "exact",
) -> LoadedTarget:
    """Load a target.

    Args:
        model: "shipped", a folder, or a hub id.
        family: a row of the family table (docs/families.md); default: the one that config.json and the name of the model lead to.
        device: "cpu", "cuda", ...; default: an accelerator if there is one (the shipped model stays on the CPU).
        dtype: "float32", "bfloat16", "float16"; default: float32 on a CPU, the checkpoint's own elsewhere.
        block_length: overrides the checkpoint's.
        mask_token_id: overrides the checkpoint's.
        stop_ids: overrides the checkpoint's end tokens.
        pad_token_id: overrides the checkpoint's; of use to bd3lm only, where later blocks do not see it.
        right_shift: logits of an A2D checkpoint predict the next position (dllm's right_shift_logits).
        use_template: wrap text prompts in the checkpoint's chat template, or in its family's where it has none and is no base model.
        padded_rows: see Adapter (strict mode).
        cache: for full attention: "exact" runs whole canvases; "prefix" and "dual" are other, approximate decoders (CachedCanvasTarget).

    Raises:
        ValueError: saying what is wrong with the checkpoint and what to do.
    """
    folder = locate(model)
    config = read_json(folder / "config.json", model)
    called = model if model == SHIPPED or not Path(model).exists() else str(folder.resolve())
    row = find_family(config, called, family)
    codec = TextCodec.read(folder, use_template, chat_templates(row, called))
    default_device = "cpu" if model == SHIPPED or not torch.cuda.is_available() else "cuda"
    place = torch.device(device or default_device)
    number = _dtype(dtype, config, place)
    host = load_host(folder, config, row, number).to(place)
    return build_target(
        host,
        config,
        row,
        codec,
        name=model,
        end_ids=end_tokens(folder, config, row).values if stop_ids is None else frozenset(stop_ids),
        block_length=block_length,
        mask_token_id=mask_token_id,
        pad_token_id=pad_token_id,
        right_shift=right_shift,
        padded_rows=padded_rows,
        cache=cache,
        hashes=(fingerprint(folder), fingerprint(folder, with_tokenizer=False)),
    )


def build_target(
    host: Any,
    config: dict[str, Any],
    row: Family,
    codec: TextCodec | None,
    *,
    name: str,
    end_ids: frozenset[int],
    hashes: tuple[str, str],
    block_length: int | None = None,
    mask_token_id: int | None = None,
    pad_token_id: int | None = None,
    right_shift: bool = False,
    padded_rows: int = 1,
    cache: str = "exact",
    shared: bool = False,
) -> LoadedTarget:
    """Make a target of a loaded native model; arguments as in `load_target`.

    Args:
        host: the model, on its device and in its number format.
        config: the vendor's config.json, or what it came to be.
        row: the family's row.
        codec: text in and out; None: token ids only.
        name: for provenance and messages; block lengths may be read from it.
        end_ids: end tokens.
        hashes: of the checkpoint with and without its tokenizer.
        shared: the host lives on and shares its weights (`read_weights`).

    Raises:
        ValueError: saying what does not fit.
    """
    mask = mask_token(config, codec, row, name).value if mask_token_id is None else mask_token_id
    vocab_size = host.config.vocab_size
    for what, value in (("mask_token_id", mask), *(("end token", i) for i in sorted(end_ids))):
        if not 0 <= value < vocab_size:
            raise ValueError(f"{name}: {what} {value} lies outside the vocabulary of {vocab_size}")
    _check_cache(cache, row, right_shift, name)
    length = stated_length(config, row, name).value if block_length is None else block_length
    if length < 1:
        raise ValueError(f"block_length={length} must be at least 1")
    stated = config.get("architectures")
    embedding = host.get_input_embeddings().weight
    spec = TargetSpec(
        name=name,
        family=row.name,
        block_length=length,
        vocab_size=vocab_size,
        mask_token_id=mask,
        stop_ids=end_ids,
        max_length=int(host.config.max_position_embeddings),
        device=embedding.device,
        dtype=str(embedding.dtype).removeprefix("torch."),
        num_parameters=sum(p.numel() for p in host.parameters()),
        fingerprint=hashes[0] + ("" if cache == "exact" else f"-{cache}"),
        crosses=row.attention == "block_causal" and row.shift == "none" and not right_shift,
        blocks=row.blocks,
        cuts_last_block=row.cuts_last_block,
        whole_canvas=row.attention == "full",
        cache=cache,
        seeds=row.needs_seed,
        invisible_id=_pad_token_id(config, pad_token_id) if row.hides_padding else None,
        architecture=str(stated[0]) if isinstance(stated, list) and stated else "",
        model_hash=hashes[1] + ("" if cache == "exact" else f"-{cache}"),
        tokenizer_hash="" if codec is None else codec.fingerprint,
    )
    if right_shift and row.name not in ("a2d", "bd3lm"):
        raise ValueError(f"{name}: right_shift is for A2D checkpoints; family {row.name} has shift {row.shift!r}")
    weights = read_encoder(host) if row.encoder else read_weights(host, row.rotary_float32, shared)
    target = _build(row, weights, spec, codec, padded_rows, right_shift)
    start = target.prefill(np.zeros(length, dtype=np.int64), length)
    target.evaluate(start, np.full((1, length), MASKED))  # loads compiled code and libraries, which no decoding should pay for
    return target


def _build(
    family: Family, weights: Weights, spec: TargetSpec, codec: TextCodec | None, padded_rows: int, right_shift: bool
) -> LoadedTarget:
    """Return the adapter for a family's contract."""
    if spec.cache != "exact":
        return CachedCanvasTarget(weights, spec, codec, padded_rows, spec.cache)
    if family.attention == "full":
        return FullAttentionTarget(weights, spec, codec, padded_rows, shifted=right_shift or family.shift == "global")
    return BlockCausalTarget(weights, spec, codec, padded_rows, "prefix" if right_shift else "block" if family.shift == "block" else "none")


def _check_cache(cache: str, family: Family, right_shift: bool, model: str) -> None:
    """Refuse a cache where there is none to choose.

    Raises:
        ValueError: naming the cache, the family and why.
    """
    if cache not in ("exact", "prefix", "dual"):
        raise ValueError(f"cache={cache!r} is unknown; choose one of exact, prefix, dual")
    if cache == "exact":
        return
    if family.encoder:
        raise ValueError(f"{model}: cache={cache!r} is not offered for family {family.name}, whose layers see only their neighbourhood")
    if family.attention != "full":
        raise ValueError(f"{model}: cache={cache!r} is for full attention; family {family.name} has an exact cache already")
    if family.shift != "none" or family.blocks == "whole" or right_shift:
        raise ValueError(f"{model}: cache={cache!r} needs blocks and logits without shift; family {family.name} runs whole canvases only")


def _pad_token_id(config: dict[str, Any], given: int | None) -> int | None:
    stated = config.get("pad_token_id") if given is None else given
    return None if stated is None else int(stated)


def _dtype(dtype: str | None, config: dict[str, Any], device: torch.device) -> torch.dtype:
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    name = dtype or ("float32" if device.type == "cpu" else str(config.get("dtype") or config.get("torch_dtype") or "float32"))
    if name not in known:
        raise ValueError(f"dtype={name!r} is unknown; choose one of {', '.join(known)}")
    return known[name]
