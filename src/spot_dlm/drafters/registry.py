"""Names of the drafters, as the command line and results write them, and the files that some of them are fitted in.

A fitted drafter names the target it was fitted on; with another one it is used only when asked for (transfer). Whatever it is, it never
changes a token: a foreign drafter is merely slow.

Example: `build_drafter("order", spec=target.spec)`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spot_dlm.drafter_files import load_order_model
from spot_dlm.drafters.calibrated import Calibrated
from spot_dlm.drafters.chain import Chain
from spot_dlm.drafters.left_to_right import LeftToRight
from spot_dlm.drafters.order import Order
from spot_dlm.drafters.root import Root
from spot_dlm.interfaces import Drafter, TargetSpec
from spot_dlm.rank_graph import read_graphs

_SHIPPED = Path(__file__).parents[1] / "shipped"
SHIPPED_GRAPH = _SHIPPED / "graph.json"
"""The graph calibrated on the shipped target."""
SHIPPED_MODELS = (_SHIPPED / "order", _SHIPPED / "linear")
"""Order models trained on the shipped target."""
AUTO = "auto"
"""The default: `order` where the shipped drafter was trained on this very target, else `chain`."""


@dataclass(frozen=True)
class _Files:
    """What the command line may give instead of the shipped files."""

    graph: Path | None = None
    file: Path | None = None


def _calibrated(pruned: bool, coupled: bool) -> Callable[[_Files], Drafter]:
    return lambda files: Calibrated(read_graphs(files.graph or SHIPPED_GRAPH), pruned, coupled)


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
    name: str, *, graph: Path | None = None, file: Path | None = None, spec: TargetSpec | None = None, transfer: bool = False
) -> Drafter:
    """Build a drafter by name.

    Args:
        name: one of DRAFTERS, or "auto".
        graph: file of calibrated graphs ('spot calibrate'); None takes the one of the shipped target.
        file: folder of a trained order model ('spot train'); None takes the one of the shipped target.
        spec: the target it will draft for; None skips the check of its origin.
        transfer: use it even if it was fitted on another target.

    Raises:
        ValueError: naming the known drafters, what is wrong with the file, or both targets where they differ.
    """
    if name == AUTO:
        drafter = build_drafter("order", file=file)
        if file is None and spec is not None and spec.fingerprint != origin(drafter):
            return build_drafter("chain")
        name = "order"
    if name not in DRAFTERS:
        raise ValueError(f"drafter={name!r} is unknown; choose one of {', '.join((AUTO, *DRAFTERS))}")
    drafter = DRAFTERS[name](_Files(graph, file))
    if spec is not None and not transfer and is_foreign(drafter, spec):
        theirs = (_about(drafter).get("target") or {}).get("name", "?")
        raise ValueError(
            f"drafter {name} was fitted on target {origin(drafter)} ({theirs}), this one is {spec.fingerprint} ({spec.name}); answers "
            "would be the same, but it may guess badly: give --transfer to use it all the same"
        )
    return drafter


def _about(drafter: Drafter) -> dict[str, Any]:
    """Return what a fitted drafter's file says of its origin, nothing for the others."""
    source = getattr(drafter, "graphs", None) or getattr(drafter, "file", None)
    return dict(getattr(source, "about", {}))


def origin(drafter: Drafter) -> str | None:
    """Return the fingerprint of the target that a drafter was fitted on; None where it needs none."""
    about = _about(drafter)
    return str((about.get("target") or {}).get("fingerprint", "")) if about else None


def is_foreign(drafter: Drafter, spec: TargetSpec) -> bool:
    """Whether a fitted drafter belongs to another target."""
    return origin(drafter) not in (None, spec.fingerprint)
