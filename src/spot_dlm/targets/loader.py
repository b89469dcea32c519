"""Load a target from a checkpoint folder, a hub id or the package itself: config, weights, tokenizer, strict about every key.

Reads config.json raw, finds the family's row, builds the native class and refuses missing, unexpected or misshapen weights. No remote
code is ever run. Example: `load_target("JetLM/SDAR-1.7B-Chat")` or `load_target()` for the shipped model.
"""

import hashlib
import json
import re
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch

from spot_dlm.interfaces import TargetSpec
from spot_dlm.state import MASKED
from spot_dlm.targets.block_causal import BlockCausalTarget
from spot_dlm.targets.families import Family, find_family
from spot_dlm.targets.text import TextCodec
from spot_dlm.targets.weights import read_weights

SHIPPED = "shipped"
_DOWNLOADED = ["*.json", "*.safetensors", "*.jinja", "merges.txt"]
_SAMPLE_BYTES, _NUM_SAMPLES = 2**16, 256
_DROPPED = ("auto_map", "architectures", "model_type", "attn_implementation", "torch_dtype", "dtype")


def load_target(
    model: str = SHIPPED,
    *,
    device: str | None = None,
    dtype: str | None = None,
    block_length: int | None = None,
    stop_ids: Iterable[int] | None = None,
    use_template: bool = True,
    padded_rows: int = 1,
) -> BlockCausalTarget:
    """Load a target.

    Args:
        model: "shipped", a folder, or a hub id.
        device: "cpu", "cuda", ...; default: an accelerator if there is one (the shipped model stays on the CPU).
        dtype: "float32", "bfloat16", "float16"; default: float32 on a CPU, the checkpoint's own elsewhere.
        block_length: overrides the checkpoint's.
        stop_ids: overrides the checkpoint's end tokens.
        use_template: wrap text prompts in the checkpoint's chat template.
        padded_rows: see BlockCausalTarget (strict mode).

    Raises:
        ValueError: saying what is wrong with the checkpoint and what to do.
    """
    folder = _locate(model)
    config = _read_json(folder / "config.json", model)
    family = find_family(config)
    codec = TextCodec.read(folder, use_template)
    default_device = "cpu" if model == SHIPPED or not torch.cuda.is_available() else "cuda"
    place = torch.device(device or default_device)
    number = _dtype(dtype, config, place)
    host = _load_host(folder, config, family, number).to(place)
    mask_token_id = config.get("mask_token_id")
    if mask_token_id is None and codec is not None:
        mask_token_id = codec.id_of(family.mask_token)
    if mask_token_id is None:
        raise ValueError(f"{model}: config.json has no mask_token_id and the tokenizer has no {family.mask_token}")
    vocab_size = host.config.vocab_size
    ends = frozenset(_stop_ids(folder, config) if stop_ids is None else stop_ids)
    for name, value in (("mask_token_id", mask_token_id), *(("end token", i) for i in sorted(ends))):
        if not 0 <= int(value) < vocab_size:
            raise ValueError(f"{model}: {name} {value} lies outside the vocabulary of {vocab_size}")
    length = _block_length(config, family, model) if block_length is None else block_length
    if length < 1:
        raise ValueError(f"block_length={length} must be at least 1")
    spec = TargetSpec(
        name=model,
        family=family.name,
        block_length=length,
        vocab_size=vocab_size,
        mask_token_id=int(mask_token_id),
        stop_ids=ends,
        max_length=int(config.get("max_position_embeddings") or 32768),
        device=place,
        dtype=str(number).removeprefix("torch."),
        num_parameters=sum(p.numel() for p in host.parameters()),
        fingerprint=_fingerprint(folder),
        crosses=True,
    )
    target = BlockCausalTarget(read_weights(host), spec, codec, padded_rows)
    start = target.prefill(np.zeros(length, dtype=np.int64), length)
    target.evaluate(start, np.full((1, length), MASKED))  # loads compiled code and libraries, which no decoding should pay for
    return target


def _locate(model: str) -> Path:
    if model == SHIPPED:
        return Path(str(resources.files("spot_dlm") / "shipped" / "target"))
    path = Path(model).expanduser()
    if model and path.exists():
        if not (path / "config.json").is_file():
            raise ValueError(f"{model}: no config.json there; give the folder of a checkpoint")
        return path
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", model) or model.startswith("."):
        raise ValueError(f"model {model[:80]!r} is neither a folder nor a hub id (owner/name) nor 'shipped'")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=_DOWNLOADED))
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"model {model!r} is no folder here and could not be fetched from the hub: {reason}") from error


def _read_json(path: Path, model: str) -> dict[str, Any]:
    try:
        parsed = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{model}: {path.name} cannot be read: {error}") from error
    if not isinstance(parsed, dict):
        raise ValueError(f"{model}: {path.name} holds no JSON object")
    return parsed


def _dtype(dtype: str | None, config: dict[str, Any], device: torch.device) -> torch.dtype:
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    name = dtype or ("float32" if device.type == "cpu" else str(config.get("dtype") or config.get("torch_dtype") or "float32"))
    if name not in known:
        raise ValueError(f"dtype={name!r} is unknown; choose one of {', '.join(known)}")
    return known[name]


def _block_length(config: dict[str, Any], family: Family, model: str) -> int:
    stated = config.get("block_size", config.get("block_length"))
    named = re.search(r"-b(\d+)(?:$|[-/])", model)
    length = stated if stated is not None else int(named.group(1)) if named else family.default_block_length
    if not isinstance(length, int):
        raise ValueError(f"{model}: block_size {length!r} in config.json must be a whole number")
    return length


def _stop_ids(folder: Path, config: dict[str, Any]) -> set[int]:
    path = folder / "generation_config.json"
    stated = _read_json(path, folder.name).get("eos_token_id") if path.exists() else None
    ids = config.get("eos_token_id") if stated is None else stated
    return {int(i) for i in (ids if isinstance(ids, list) else [ids]) if i is not None}


def _fingerprint(folder: Path) -> str:
    """Hash config.json, and of the tokenizer and every weights file the size and samples spread over it (all would be gigabytes)."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted([*folder.glob("*.safetensors"), *folder.glob("tokenizer.json")]):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for offset in range(0, size, max(_SAMPLE_BYTES, size // _NUM_SAMPLES)):
                file.seek(offset)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def _load_host(folder: Path, config: dict[str, Any], family: Family, dtype: torch.dtype) -> Any:
    import transformers

    if not any(folder.glob("*.safetensors")):
        raise ValueError(f"{folder}: no weights (*.safetensors) there")
    own = {k: v for k, v in config.items() if k not in _DROPPED}
    logging = transformers.utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        host_config = getattr(transformers, family.host_config)(**own)
        host, report = getattr(transformers, family.host_model).from_pretrained(
            folder,
            config=host_config,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(
            f"{folder}: the weights do not load ({reason}); the file is damaged or config.json does not belong to it"
        ) from error
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report[kind]:
            names = sorted(" ".join(map(str, k)) if isinstance(k, tuple) else str(k) for k in report[kind])
            raise ValueError(f"{folder}: {len(names)} {kind.replace('_', ' ')} in the weights, first {names[0]}")
    if any(kind != "full_attention" for kind in getattr(host_config, "layer_types", None) or ()):
        raise ValueError(f"{folder}: sliding-window attention layers are not supported")
    return host.eval().requires_grad_(False)
