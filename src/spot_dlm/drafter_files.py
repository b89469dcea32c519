"""Fitted drafters on disk: a folder with config.json and model.safetensors, self-describing and checked when read.

config.json has the shape of vllm-project/speculators (`speculators_*`, `verifier`) and, beside it, what that has no field for: sizes,
provenance, the settings of the traces and the hashes of target, tokenizer and preset that the drafter was fitted with. It names the hash
of the weights and is written last, so a folder without it is unfinished. docs/huggingface.md has the fields. Knows nothing of drafting.

Example: `load_order_model(Path("drafter")).model`, `load_graphs(Path("graphs")).find("standard", True, True, 16)`.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from spot_dlm.artifacts import file_hash, provenance, read_json, replace_file, write_json
from spot_dlm.features import FEATURES_VERSION
from spot_dlm.order_model import OrderConfig, OrderModel
from spot_dlm.rank_graph import GraphTable, graph_rows, join_pairs, read_graphs, split_pairs, table_of
from spot_dlm.rules import describe, parse_rule

FORMAT = "spot-drafter/2"
_FIRST = "spot-drafter/1"
SPECULATORS_VERSION = "0.9.0"
"""The release of speculators whose fields config.json has."""
REPOSITORY = r"[A-Za-z0-9][\w.-]*/[\w.-]+"
"""How the hub names repositories."""
CALIBRATED = "calibrated"
WEIGHTS, CONFIG = "model.safetensors", "config.json"
_CLASSES = {"order": "OrderModel", "linear": "OrderModel", CALIBRATED: "RankGraph"}


@dataclass(frozen=True)
class OrderModelFile:
    """A loaded order model and what its file says of its origin."""

    model: OrderModel
    about: Mapping[str, Any]

    @property
    def target_fingerprint(self) -> str:
        """Fingerprint of the target whose traces trained it."""
        return str((self.about.get("target") or {}).get("fingerprint", ""))


def preset_hash(settings: Iterable[Mapping[str, Any]]) -> str:
    """Return the short hash of how traces were decoded: every different setting once, without lengths and seeds."""
    names = ("rule", "temperature", "top_p", "top_k", "block_length")
    known = sorted({json.dumps({n: s[n] for n in names if n in s}) for s in settings})
    return hashlib.sha256("\n".join(known).encode()).hexdigest()[:16] if known else ""


def trained_rules(about: Mapping[str, Any]) -> list[str]:
    """Return the rules that a drafter was fitted for, each once, in their shortest form; none where the file does not say."""
    return list(dict.fromkeys(describe(parse_rule(s["rule"])) for s in about.get("trace_settings", ()) if "rule" in s))


def write_drafter(folder: Path, kind: str, tensors: Mapping[str, Tensor], own: Mapping[str, Any]) -> None:
    """Write model.safetensors, then config.json with the fields of speculators.

    Args:
        folder: made if needed.
        kind: "order", "linear" or "calibrated".
        tensors: the weights.
        own: the fields that are ours: provenance, `target`, `trace_settings` and what the kind needs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights = folder / WEIGHTS
    replace_file(weights, lambda partial: save_file(dict(tensors), partial))
    write_json(folder / CONFIG, _document(kind, {**own, "weights_sha256": file_hash(weights)}))


def _document(kind: str, own: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json: the fields of speculators' SpeculatorModelConfig, then ours."""
    target = own.get("target") or {}
    architecture = target.get("architecture")
    hashes = {
        "target": target.get("fingerprint", ""),
        "model": target.get("model_hash", ""),
        "tokenizer": target.get("tokenizer_hash", ""),
        "preset": preset_hash(own.get("trace_settings", ())),
    }
    return {
        "format": FORMAT,
        "architectures": [_CLASSES[kind]],
        "model_type": "speculator_model",
        "speculators_model_type": f"spot_{kind}",
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": "spot",
            "proposal_methods": [{"proposal_type": "draft_graph"}],
            "default_proposal_method": "draft_graph",
            "verifier": {"name_or_path": target.get("name"), "architectures": [architecture] if architecture else []},
        },
        "kind": kind,
        "hashes": {name: value for name, value in hashes.items() if value},
        **{name: value for name, value in own.items() if name not in ("format", "hashes", "kind")},
    }


def read_config(folder: Path) -> dict[str, Any]:
    """Return what config.json says; one of the first format (spot-dlm before drafters had cards) comes as if written today.

    Raises:
        ValueError: if the folder is no drafter, unfinished, damaged or written by a newer version.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder}: {'is a file' if folder.is_file() else 'no such folder'}; train one with 'spot train'")
    path = folder / CONFIG
    if not path.is_file():
        raise ValueError(f"{folder}: no config.json: the training is unfinished (run the same 'spot train' again) or this is no drafter")
    found = _peek(path)
    if found.get("format") in (FORMAT, _FIRST):
        check_about(found, path)
    if found.get("format") == _FIRST:
        return _document(str((found.get("architecture") or {}).get("kind", "order")), found)
    if "format" not in found and (other := found.get("speculators_model_type") or found.get("model_type")):
        raise ValueError(f"{folder}: is a model of type {other!r}, not a drafter of spot-dlm ({FORMAT})")
    newer = str(found.get("format")).removeprefix("spot-drafter/")[:9]
    if newer.isascii() and newer.isdigit() and int(newer) > int(FORMAT.rpartition("/")[2]):
        raise ValueError(f"{folder}: is in format spot-drafter/{newer}, of a newer spot-dlm; this one reads {FORMAT}: upgrade spot-dlm")
    document = read_json(path, FORMAT)
    if document.get("kind") not in _CLASSES:
        raise ValueError(f"{folder}: kind {document.get('kind')!r} in config.json is unknown; known are {', '.join(_CLASSES)}")
    stated, own = (document.get("hashes") or {}).get("preset", ""), preset_hash(document.get("trace_settings", ()))
    if stated != own:
        raise ValueError(f"{folder}: hashes.preset is {stated!r} but trace_settings give {own!r}: config.json was changed by hand")
    return document


_TEXTS = ("kind", "command", "spot_dlm", "weights_sha256", "git_revision")
_TARGET_TEXTS = ("name", "family", "fingerprint", "dtype", "architecture", "model_hash", "tokenizer_hash")


def check_about(about: Mapping[str, Any], path: Path) -> None:
    """Refuse an origin whose fields are of other types than those that are written.

    Raises:
        ValueError: naming the file, the field and its value.
    """

    def check(field: str, value: Any, kinds: Any, what: str) -> None:
        if not isinstance(value, kinds) or type(value) is bool:
            raise ValueError(f"{path}: {field}={str(value)[:40]} must be {what}: the file is damaged or was changed by hand")

    def texts(inside: str, found: Mapping[str, Any], names: Iterable[str]) -> None:
        for name in names:
            check(f"{inside}{name}", found.get(name, ""), str | None, "a text")

    texts("", about, _TEXTS)
    for name in ("target", "hashes", "training"):
        check(name, about.get(name), Mapping | None, "an object")
    texts("target.", about.get("target") or {}, _TARGET_TEXTS)
    texts("hashes.", about.get("hashes") or {}, about.get("hashes") or {})
    for name in ("calibrated", "best"):
        figures = (about.get("training") or {}).get(name)
        check(f"training.{name}", figures, Mapping | None, "an object")
        for key in ("acceptance_8", "acceptance_32"):
            check(f"training.{name}.{key}", (figures or {}).get(key), int | float | None, "a number")
    check("trace_settings", about.get("trace_settings", []), list, "a list of objects")
    for setting in about.get("trace_settings", []):
        check("trace_settings", setting, Mapping, "a list of objects")
        check("trace_settings.temperature", setting.get("temperature", 0), int | float, "a number")
        check("trace_settings.block_length", setting.get("block_length"), int | None, "a whole number")
        check("trace_settings.rule", setting.get("rule", ""), str, "a text")
        try:
            parse_rule(setting.get("rule", "standard"))
        except ValueError as error:
            raise ValueError(f"{path}: trace_settings: {error}") from error


def _peek(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: cannot be read ({error}); the file is damaged or no {FORMAT}") from error
    return found if isinstance(found, dict) else {}


def _read_tensors(folder: Path, about: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the weights that config.json describes, all of them finite.

    Raises:
        ValueError: if the file is missing, another one, damaged or holds numbers that are not finite.
    """
    weights = folder / WEIGHTS
    if not weights.is_file() or file_hash(weights) != about.get("weights_sha256"):
        raise ValueError(f"{weights}: missing or not the file that config.json describes; train or download the drafter again")
    try:
        tensors = dict(load_file(weights))
    except Exception as error:
        raise ValueError(f"{weights}: damaged ({_short(error)}); train or download the drafter again") from error
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"{weights}: {name} holds numbers that are not finite; train the drafter again")
    return tensors


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def save_order_model(folder: Path, model: OrderModel, traces: Mapping[str, Any], training: Mapping[str, Any], command: str = "") -> None:
    """Write weights, then config.json.

    Args:
        folder: made if needed.
        model: the order model.
        traces: the manifest of the traces it was trained on.
        training: how it was trained and how well it does.
        command: for the provenance.
    """
    tensors = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    own = {
        "architecture": asdict(model.config),
        "features_version": FEATURES_VERSION,
        "num_parameters": model.num_parameters,
        **provenance(None, command),
        "target": traces.get("target", {}),
        "trace_settings": traces.get("settings", []),
        "training": dict(training),
    }
    write_drafter(folder, model.config.kind, tensors, own)


def load_order_model(folder: Path) -> OrderModelFile:
    """Read a trained order model.

    Raises:
        ValueError: if the folder is no drafter, unfinished, damaged, or made for another version of the features.
    """
    about = read_config(folder)
    if about["kind"] == CALIBRATED:
        raise ValueError(f"{folder}: holds a drafter of kind 'calibrated', not 'order' or 'linear'")
    if about.get("features_version") != FEATURES_VERSION:
        raise ValueError(f"{folder}: trained on features version {about.get('features_version')}, this version has {FEATURES_VERSION}")
    tensors = _read_tensors(folder, about)
    try:
        sizes = {f.name: about["architecture"][f.name] for f in fields(OrderConfig)}
        model = OrderModel(OrderConfig(**sizes))
        model.load_state_dict(tensors)
    except Exception as error:
        raise ValueError(f"{folder}: the weights do not fit config.json ({_short(error)})") from error
    return OrderModelFile(model.eval().requires_grad_(False), about)


def save_graphs(folder: Path, table: GraphTable) -> None:
    """Write calibrated graphs as a drafter's folder; config.json lists their settings, the weights file their nodes."""
    rows, tensors = graph_rows(table), dict[str, Tensor]()
    for number, row in enumerate(rows):
        pairs, lengths = split_pairs(row.pop("nodes"))
        tensors |= {f"{number}.pairs": pairs, f"{number}.lengths": lengths, f"{number}.counts": torch.tensor(row.pop("counts"))}
    settings = [{"rule": r["rule"], "temperature": float(r["sampled"]), "block_length": r["block_length"]} for r in rows]
    unique = list({json.dumps(s): s for s in settings}.values())
    own = {k: v for k, v in table.about.items() if k not in _document(CALIBRATED, {})}
    write_drafter(folder, CALIBRATED, tensors, {**own, "trace_settings": unique, "graphs": rows})


def load_graphs(path: Path) -> GraphTable:
    """Read calibrated graphs, a drafter's folder or the file that `spot calibrate` wrote.

    Raises:
        ValueError: in one line, saying what is wrong.
    """
    if not path.is_dir():
        table = read_graphs(path)
        check_about(table.about, path)
        return table
    about = read_config(path)
    if about["kind"] != CALIBRATED:
        raise ValueError(f"{path}: holds a drafter of kind {about['kind']!r}, not 'calibrated'")
    tensors = _read_tensors(path, about)
    rows = [dict(row) for row in about.pop("graphs", None) or []]
    names = {f"{number}.{part}" for number in range(len(rows)) for part in ("pairs", "lengths", "counts")}
    for what, left in (("lacks", names - tensors.keys()), ("has too much:", tensors.keys() - names)):
        if left:
            raise ValueError(f"{path / WEIGHTS}: {what} {min(left)}; it does not fit config.json")
    for number, row in enumerate(rows):
        row["nodes"] = join_pairs(tensors[f"{number}.pairs"], tensors[f"{number}.lengths"])
        row["counts"] = tensors[f"{number}.counts"].tolist()
    return table_of(rows, about, path)


def load_fitted(folder: Path) -> OrderModelFile | GraphTable:
    """Read a fitted drafter of whatever kind.

    Raises:
        ValueError: in one line, saying what is wrong.
    """
    if not folder.is_dir() and folder.is_file():
        return load_graphs(folder)
    return load_graphs(folder) if read_config(folder)["kind"] == CALIBRATED else load_order_model(folder)


def save_fitted(folder: Path, fitted: OrderModelFile | GraphTable) -> None:
    """Write a loaded drafter, its origin unchanged."""
    if isinstance(fitted, GraphTable):
        save_graphs(folder, fitted)
        return
    tensors = {name: value.detach().cpu().contiguous() for name, value in fitted.model.state_dict().items()}
    written = _document(fitted.model.config.kind, {})
    write_drafter(folder, fitted.model.config.kind, tensors, {k: v for k, v in fitted.about.items() if k not in written})
