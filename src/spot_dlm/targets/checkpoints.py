"""Checkpoints on disk: where they are, what their files say, and their weights in a native transformers class, strict about every key.

No remote code is ever run. Knows nothing of targets. Example: `load_host(locate("JetLM/SDAR-1.7B-Chat"), config, family, torch.float32)`.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import resources
from itertools import product
from logging import CRITICAL, getLogger
from pathlib import Path
from typing import Any

import torch

from spot_dlm.targets.families import Family

SHIPPED = "shipped"
_VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight", "model.embeddings.tok_embeddings.weight", "decoder.weight")
_TEXT_FILES = ["*.json", "*.jinja", "merges.txt"]
_SAMPLE_BYTES, _NUM_SAMPLES = 2**16, 256


def locate(model: str, weights: bool = True) -> Path:
    """Return the folder of "shipped", a folder or a hub id, whose files are fetched where they are not here, the weights only if asked.

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
        return Path(snapshot_download(model, allow_patterns=[*_TEXT_FILES, *(["*.safetensors"] if weights else [])]))
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


def fingerprint(folder: Path, with_tokenizer: bool = True) -> str:
    """Hash config.json, and of the tokenizer and every weights file the size and samples spread over it (all would be gigabytes)."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted([*folder.glob("*.safetensors"), *(folder.glob("tokenizer.json") if with_tokenizer else ())]):
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
    from safetensors import safe_open

    if not any(folder.glob("*.safetensors")):
        raise ValueError(f"{folder}: no weights (*.safetensors) there")
    native = _native_config(folder, config, family)
    try:
        names: set[str] = set()
        for path in folder.glob("*.safetensors"):
            with safe_open(path, "pt") as file:
                names.update(file.keys())
        if missing := missing_experts(names, config):
            raise ValueError(f"{len(missing)} missing keys, first {missing[0]}")
        host, report = _from_pretrained(folder, native, config, family, dtype, local_files_only=True, use_safetensors=True)
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(
            f"{folder}: the weights do not load ({reason}); the file is damaged or config.json does not belong to it"
        ) from error
    for problem in (*key_problems(host, report), *attention_problems(host, family)):
        raise ValueError(f"{folder}: {problem}")
    return host.eval().requires_grad_(False)


def outline(folder: Path, config: dict[str, Any], family: Family, shapes: Mapping[str, Sequence[int]]) -> tuple[Any, dict[str, Any]]:
    """Return the native model without any numbers, and transformers' report on tensors of these names and shapes.

    Raises:
        ValueError: naming the field that is wrong, or if no model can be made of them.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    native = _native_config(folder, config, family)
    try:
        with _one_thread(), FakeTensorMode(allow_non_fake_inputs=True):
            tensors = {name: torch.empty(list(shape)) for name, shape in shapes.items()}
            return _from_pretrained(None, native, config, family, torch.float32, state_dict=tensors)
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"{folder}: no native model can be made of config.json and these tensors ({reason})") from error


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let transformers load in the calling thread, as a FakeTensorMode cannot be shared by threads, and torch not log what it raises."""
    name, logger = "HF_DEACTIVATE_ASYNC_LOAD", getLogger("torch._subclasses.fake_tensor")
    before, level = os.environ.get(name), logger.level
    os.environ[name] = "1"
    logger.setLevel(CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers from logging and drawing bars."""
    import transformers

    logging = transformers.utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _native_config(folder: Path, config: dict[str, Any], family: Family) -> Any:
    import transformers

    try:
        own = family.translate(config)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
    try:
        with _quiet():
            return getattr(transformers, family.host_of(config)[0])(**own)
    except Exception as error:  # transformers checks fields in several ways
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"{folder}: the weights do not load ({reason}); config.json is damaged or does not belong to them") from error


def _from_pretrained(
    folder: Path | None, native: Any, config: dict[str, Any], family: Family, dtype: torch.dtype, **more: Any
) -> tuple[Any, dict[str, Any]]:
    """Return the native model and the report on its keys, in silence."""
    import transformers

    with _quiet():
        host, report = getattr(transformers, family.host_of(config)[1]).from_pretrained(
            folder,
            config=native,
            dtype=dtype,
            key_mapping=dict(family.key_mapping) or None,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **more,
        )
    return host, report


def missing_experts(names: Iterable[str], config: dict[str, Any]) -> list[str]:
    """Return the tensors of experts that are missing where others of their layer are there; transformers joins and would not name them."""
    known = set(names)
    parts = [found.groups() for found in (re.match(r"(.+\.experts\.)\d+(\..+)", name) for name in known) if found]
    wanted = product({layer for layer, _ in parts}, range(int(config.get("num_experts") or 0)), {kind for _, kind in parts})
    return sorted({f"{layer}{expert}{kind}" for layer, expert, kind in wanted} - known)


def key_problems(host: Any, report: dict[str, Any]) -> list[str]:
    """Return what is to say of tensors that are missing, left over or of another shape than config.json asks for."""
    problems = []
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report[kind]:
            names = sorted(" ".join(map(str, k)) if isinstance(k, tuple) else str(k) for k in report[kind])
            rows = {k[1][0] for k in report[kind] if isinstance(k, tuple) and k[0] in _VOCABULARY}
            vocabulary = f"; vocab_size={host.config.vocab_size} in config.json, the file has {rows.pop()}" if len(rows) == 1 else ""
            problems.append(f"{len(names)} {kind.replace('_', ' ')} in the weights, first {names[0]}{vocabulary}")
    return problems


def attention_problems(host: Any, family: Family) -> list[str]:
    """Return what is to say of layers that do not see the whole text, where the family has none."""
    if family.encoder:
        return []
    sliding = any(kind != "full_attention" for kind in getattr(host.config, "layer_types", None) or ())
    return ["sliding-window attention layers are not supported"] if sliding else []
