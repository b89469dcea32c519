"""Trained drafters on disk: a folder with config.json and model.safetensors, self-describing and checked when read.

config.json names the target that the model was trained on (fingerprint, vocabulary size, noise version) and the hash of the weights
file; it is written last, so a folder without it is unfinished. Knows nothing of drafting.

Example: `load_order_model(Path("drafter")).model`.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from spot_dlm.artifacts import file_hash, provenance, read_json, replace_file, write_json
from spot_dlm.features import FEATURES_VERSION
from spot_dlm.order_model import OrderConfig, OrderModel

FORMAT = "spot-drafter/1"


@dataclass(frozen=True)
class OrderModelFile:
    """A loaded order model and what its file says of its origin."""

    model: OrderModel
    about: Mapping[str, Any]

    @property
    def target_fingerprint(self) -> str:
        """Fingerprint of the target whose traces trained it."""
        return str((self.about.get("target") or {}).get("fingerprint", ""))


def save_order_model(folder: Path, model: OrderModel, traces: Mapping[str, Any], training: Mapping[str, Any], command: str = "") -> None:
    """Write weights, then config.json.

    Args:
        folder: made if needed.
        model: the order model.
        traces: the manifest of the traces it was trained on.
        training: how it was trained and how well it does.
        command: for the provenance.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights = folder / "model.safetensors"
    tensors = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    replace_file(weights, lambda partial: save_file(tensors, partial))
    document = {
        "format": FORMAT,
        "architecture": asdict(model.config),
        "features_version": FEATURES_VERSION,
        "num_parameters": model.num_parameters,
        "weights_sha256": file_hash(weights),
        **provenance(None, command),
        "target": traces.get("target", {}),
        "trace_settings": traces.get("settings", []),
        "training": dict(training),
    }
    write_json(folder / "config.json", document)


def load_order_model(folder: Path) -> OrderModelFile:
    """Read a trained order model.

    Raises:
        ValueError: if the folder is no drafter, unfinished, damaged, or made for another version of the features.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; train one with 'spot train'")
    if not (folder / "config.json").exists():
        raise ValueError(f"{folder}: no config.json: the training is unfinished (run the same 'spot train' again) or this is no drafter")
    about = read_json(folder / "config.json", FORMAT)
    if about.get("features_version") != FEATURES_VERSION:
        raise ValueError(f"{folder}: trained on features version {about.get('features_version')}, this version has {FEATURES_VERSION}")
    weights = folder / "model.safetensors"
    if not weights.exists() or file_hash(weights) != about.get("weights_sha256"):
        raise ValueError(f"{weights}: missing or not the file that config.json describes; train the drafter again")
    try:
        sizes = {f.name: about["architecture"][f.name] for f in fields(OrderConfig)}
        model = OrderModel(OrderConfig(**sizes))
        model.load_state_dict(load_file(weights))
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{folder}: the weights do not fit config.json ({reason})") from error
    if not all(bool(torch.isfinite(p).all()) for p in model.parameters()):
        raise ValueError(f"{weights}: holds numbers that are not finite; train the drafter again")
    return OrderModelFile(model.eval().requires_grad_(False), about)
