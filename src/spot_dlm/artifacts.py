"""Files that describe themselves: provenance beside the data, written to a temporary name and renamed last, checked when read.

Knows nothing of what is inside. Example: `write_json(path, {"format": "spot-graph/1", **provenance(target.spec)})`.
"""

import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from spot_dlm.interfaces import TargetSpec
from spot_dlm.noise import NOISE_VERSION


def provenance(spec: TargetSpec | None = None, command: str = "") -> dict[str, Any]:
    """Return what an artifact says of its origin: target and its hash, noise version, command, revision, library versions."""
    about: dict[str, Any] = {
        "command": command,
        "spot_dlm": version("spot-dlm"),
        "git_revision": _revision(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "noise_version": NOISE_VERSION,
    }
    if spec is not None:
        about["target"] = {
            "name": Path(spec.name).name if "/" in spec.name and Path(spec.name).exists() else spec.name,
            "family": spec.family,
            "fingerprint": spec.fingerprint,
            "vocab_size": spec.vocab_size,
            "dtype": spec.dtype,
        }
        more = {"architecture": spec.architecture, "model_hash": spec.model_hash, "tokenizer_hash": spec.tokenizer_hash}
        about["target"] |= {name: value for name, value in more.items() if value}
    return about


def _revision() -> str:
    """Return the git revision of the source tree, empty where the package is installed without one."""
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, timeout=5
        )
        if done.returncode == 0:
            return done.stdout.strip()
    return ""


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file beside `path`, then rename it: `path` is whole or as it was."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        write(partial)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def write_json(path: Path, document: dict[str, Any], indent: int | None = 1) -> None:
    """Write a JSON document whole or not at all."""
    replace_file(path, lambda partial: partial.write_text(json.dumps(document, indent=indent) + "\n", "utf-8"))


def read_json(path: Path, kind: str) -> dict[str, Any]:
    """Read a JSON object whose field `format` is `kind`.

    Raises:
        ValueError: if the file is missing, damaged or of another format.
    """
    try:
        document = json.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"{path}: no such file") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: cannot be read ({error}); the file is damaged or no {kind}") from error
    found = document.get("format") if isinstance(document, dict) else None
    if found != kind:
        raise ValueError(f"{path}: the format is {found!r}, this version reads {kind!r}")
    return dict(document)


def file_hash(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
