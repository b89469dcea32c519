"""Names of the drafters, as the command line and results write them, and the files that some of them are fitted in.

A fitted drafter names the target it was fitted on; with another one it is used only when asked for (transfer). Whatever it is, it never
changes a token: a foreign drafter is merely slow.

Example: `build_drafter("order", spec=target.spec)`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spot_dlm import drafter_files
from spot_dlm.drafter_files import load_graphs, load_order_model, read_config, trained_rules
from spot_dlm.drafters.calibrated import Calibrated
from spot_dlm.drafters.chain import Chain
from spot_dlm.drafters.left_to_right import LeftToRight
from spot_dlm.drafters.order import Order
from spot_dlm.drafters.root import Root
from spot_dlm.interfaces import DecodeParams, Drafter, TargetSpec
from spot_dlm.rules import describe

_SHIPPED = Path(__file__).parents[1] / "shipped"
SHIPPED_GRAPH = _SHIPPED / "graph.json"
"""The graph calibrated on the shipped target."""
SHIPPED_MODELS = (_SHIPPED / "order", _SHIPPED / "linear")
"""Order models trained on the shipped target."""
AUTO = "auto"
"""The default: the drafter in `file`, else `order` with the shipped model, on any target (docs/transfer.md)."""


@dataclass(frozen=True)
class _Files:
    """What the command line may give instead of the shipped files."""

    graph: Path | None = None
    file: Path | None = None


def _calibrated(pruned: bool, coupled: bool) -> Callable[[_Files], Drafter]:
    def build(files: _Files) -> Drafter:
        own = files.file if files.file is not None and read_config(files.file)["kind"] == drafter_files.CALIBRATED else None
        return Calibrated(load_graphs(files.graph or own or SHIPPED_GRAPH), pruned, coupled)

    return build


def _order(kind: str) -> Callable[[_Files], Drafter]:
    def build(files: _Files) -> Drafter:
        folder = files.file or _SHIPPED / kind
        loaded = load_order_model(folder)
        if loaded.model.config.kind != kind:
            raise ValueError(f"{folder}: holds a drafter of kind {loaded.model.config.kind!r}, not {kind!r}")
        return Order(loaded)

    return build


DRAFTERS: dict[str, Callable[[_Files], Drafter]] = {
    "order": _order("order"),
    "linear": _order("linear"),
    "root": lambda _: Root(),
    "chain": lambda _: Chain(),
    "chain-published": lambda _: Chain(coupled=False),
    "ltr": lambda _: LeftToRight(),
    "calibrated": _calibrated(pruned=False, coupled=True),
    "calibrated-pruned": _calibrated(pruned=True, coupled=True),
    "calibrated-published": _calibrated(pruned=False, coupled=False),
    "calibrated-published-pruned": _calibrated(pruned=True, coupled=False),
}
CALIBRATED = tuple(name for name in DRAFTERS if name.startswith("calibrated"))
"""Drafters that read a graph, and know the rules only that it was calibrated for."""
FITTED = ("order", "linear", *CALIBRATED)
"""Drafters that belong to a target."""


def build_drafter(
    name: str,
    *,
    graph: Path | None = None,
    file: Path | None = None,
    spec: TargetSpec | None = None,
    transfer: bool = False,
    params: DecodeParams | None = None,
) -> Drafter:
    """Build a drafter by name.

    Args:
        name: one of DRAFTERS, or "auto", which takes the kind that `file` holds, and without one "order", whatever the target.
        graph: calibrated graphs, the file of 'spot calibrate' or a folder; None takes those of the shipped target.
        file: folder of a fitted drafter ('spot train', 'spot drafter save'); None takes the one of the shipped target.
        spec: the target it will draft for; None skips the check of its origin.
        transfer: use it even if it was fitted on another target, tokenizer or preset.
        params: how it will be decoded, for the check of a `file`'s preset; None skips it.

    Raises:
        ValueError: naming the known drafters, what is wrong with the file, or what differs (target, tokenizer, preset), with both values.
    """
    if name == AUTO:
        name, transfer = ("order", True) if file is None else (str(read_config(file)["kind"]), transfer)
    if name not in DRAFTERS:
        raise ValueError(f"drafter={name!r} is unknown; choose one of {', '.join((AUTO, *DRAFTERS))}")
    drafter = DRAFTERS[name](_Files(graph, file))
    found = [] if spec is None or transfer else differences(drafter, spec, None if file is None else params)
    if found:
        raise ValueError(
            f"drafter {name} does not belong here: {'; '.join(found)}; answers would be the same, but it may guess badly: "
            "give --transfer to use it all the same"
        )
    return drafter


def differences(drafter: Drafter, spec: TargetSpec, params: DecodeParams | None = None) -> list[str]:
    """Return what a fitted drafter was made for that is not so here, each with both values: target, tokenizer, preset.

    The fingerprint of a target covers its tokenizer; where model and tokenizer have hashes of their own, these decide which it is.
    """
    about = _about(drafter)
    if not about:
        return []
    known = about.get("target") or {}
    found, model = [], known.get("model_hash", "")
    theirs, ours = known.get("tokenizer_hash", ""), spec.tokenizer_hash
    other_tokenizer = bool(theirs and ours) and theirs != ours
    same_model = bool(model and theirs and ours) and model == spec.model_hash
    if not same_model and known.get("fingerprint", "") != spec.fingerprint:
        found.append(f"it was fitted on target {known.get('fingerprint', '')} ({known.get('name', '?')}), this one is {_named(spec)}")
    if other_tokenizer:
        found.append(f"it was fitted with tokenizer {theirs}, this one is {ours}")
    rules = [] if params is None or about.get("kind") == drafter_files.CALIBRATED else trained_rules(about)
    if params is not None and rules and describe(params.rule) not in rules:
        found.append(f"it was fitted for preset {' | '.join(rules)}, this one is {describe(params.rule)}")
    return found


def _named(spec: TargetSpec) -> str:
    return f"{spec.fingerprint} ({spec.name})"


def _about(drafter: Drafter) -> dict[str, Any]:
    """Return what a fitted drafter's file says of its origin, nothing for the others."""
    source = getattr(drafter, "graphs", None) or getattr(drafter, "file", None)
    return dict(getattr(source, "about", {}))


def is_foreign(drafter: Drafter, spec: TargetSpec) -> bool:
    """Whether a fitted drafter belongs to another target or tokenizer."""
    return bool(differences(drafter, spec))
