"""Checkpoints on disk: where they are, what their files say, and their weights in a native transformers class, strict about every key.

No remote code is ever run. Knows nothing of targets. Example: `load_host(locate("JetLM/SDAR-1.7B-Chat"), config, family, torch.float32)`.
"""

import hashlib
import json
import re
from importlib import resources
from itertools import product
from pathlib import Path
from typing import Any

import torch

from spot_dlm.targets.families import Family

SHIPPED = "shipped"
_DOWNLOADED = ["*.json", "*.safetensors", "*.jinja", "merges.txt"]
_SAMPLE_BYTES, _NUM_SAMPLES = 2**16, 256


def locate(model: str) -> Path:
    """Return the folder of "shipped", a folder or a hub id, whose files are fetched where they are not here.

    Raises:
        ValueError: if it is none of the three or cannot be fetched.
    """
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


def read_json(path: Path, model: str) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        ValueError: if it cannot be read or holds no object.
    """
    try:
        parsed = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{model}: {path.name} cannot be read: {error}") from error
    if not isinstance(parsed, dict):
        raise ValueError(f"{model}: {path.name} holds no JSON object")
    return parsed


def fingerprint(folder: Path) -> str:
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


def load_host(folder: Path, config: dict[str, Any], family: Family, dtype: torch.dtype) -> Any:
    """Return the native causal language model that a family's row makes of a checkpoint, on the CPU.

    Raises:
        ValueError: naming the field, tensor or file that is wrong.
    """
    import transformers

    if not any(folder.glob("*.safetensors")):
        raise ValueError(f"{folder}: no weights (*.safetensors) there")
    try:
        own = family.translate(config)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
    config_class, model_class = family.host_of(config)
    logging = transformers.utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        _check_experts(folder, int(config.get("num_experts") or 0))
        host, report = getattr(transformers, model_class).from_pretrained(
            folder,
            config=getattr(transformers, config_class)(**own),
            dtype=dtype,
            key_mapping=dict(family.key_mapping) or None,
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
    _check_keys(folder, host, report)
    if any(kind != "full_attention" for kind in getattr(host.config, "layer_types", None) or ()):
        raise ValueError(f"{folder}: sliding-window attention layers are not supported")
    return host.eval().requires_grad_(False)


def _check_experts(folder: Path, count: int) -> None:
    """Refuse mixtures in which a tensor of an expert is missing; transformers joins them and would not name it."""
    from safetensors import safe_open

    names: set[str] = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names.update(file.keys())
    parts = [found.groups() for found in (re.match(r"(.+\.experts\.)\d+(\..+)", name) for name in names) if found]
    wanted = product({layer for layer, _ in parts}, range(count), {kind for _, kind in parts})
    missing = sorted({f"{layer}{expert}{kind}" for layer, expert, kind in wanted} - names)
    if missing:
        raise ValueError(f"{len(missing)} missing keys, first {missing[0]}")


def _check_keys(folder: Path, host: Any, report: dict[str, Any]) -> None:
    """Refuse tensors that are missing, left over or of another shape than config.json asks for."""
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report[kind]:
            names = sorted(" ".join(map(str, k)) if isinstance(k, tuple) else str(k) for k in report[kind])
            rows = {k[1][0] for k in report[kind] if isinstance(k, tuple) and k[0] in ("model.embed_tokens.weight", "lm_head.weight")}
            vocabulary = f"; vocab_size={host.config.vocab_size} in config.json, the file has {rows.pop()}" if len(rows) == 1 else ""
            raise ValueError(f"{folder}: {len(names)} {kind.replace('_', ' ')} in the weights, first {names[0]}{vocabulary}")
