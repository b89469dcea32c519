"""Which drafters a bench compares: names of the command line to ways of building a drafter for one prompt.

A family such as `spiffy` has several variants; a result shows the best of them under the family's name. A drafter that is not
there (not registered, or without its graph file) is left out with a remark.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spot_dlm.bench.oracle import Oracle
from spot_dlm.compare import Trajectory
from spot_dlm.drafters import DRAFTERS, build_drafter
from spot_dlm.interfaces import Drafter

Build = Callable[[Trajectory, int], Drafter]

SPIFFY = "spiffy"
FAMILIES = ("root", "ltr", "chain-published", "chain", SPIFFY, "linear", "order", "oracle")
OURS = ("linear", "order", "oracle")
BASELINES = tuple(f for f in FAMILIES if f not in ("root", *OURS))
SPIFFY_VARIANTS = ("calibrated", "calibrated-pruned", "calibrated-published", "calibrated-published-pruned")


@dataclass(frozen=True)
class Entry:
    """One drafter of a bench: its label in the rows, the family it stands for, and how it is built from (standard trajectory, nodes).

    `only_sampled` leaves it out at temperature 0, where it is another variant under a second name.
    """

    label: str
    family: str
    build: Build
    only_sampled: bool = False
    provenance: Mapping[str, Any] = field(default_factory=dict)


def entries(names: Sequence[str], graphs: Sequence[Path] = ()) -> tuple[list[Entry], list[str]]:
    """Return the drafters of these families that can be built, and a remark for each that cannot.

    Args:
        names: of FAMILIES; a variant's own name is allowed too.
        graphs: calibrated graph files for `spiffy`; none takes the shipped one.

    Raises:
        ValueError: for an unknown name or a damaged file.
    """
    found: dict[str, Entry] = {}
    missing: list[str] = []
    for name in dict.fromkeys(names):
        if name not in (*FAMILIES, *SPIFFY_VARIANTS, *DRAFTERS):
            raise ValueError(f"drafter={name!r} is unknown; choose one of {', '.join(FAMILIES)}")
        if name == "oracle":
            found[name] = Entry(name, name, lambda standard, _: Oracle.of(standard))
        elif name == SPIFFY or name in SPIFFY_VARIANTS:
            variants = _spiffy(SPIFFY_VARIANTS if name == SPIFFY else (name,), graphs)
            found |= {e.label: e for e in variants}
            missing += [] if variants else [f"{name} is not available (no calibrated graph): left out"]
        elif name in DRAFTERS:
            found[name] = _fixed(name, name, build_drafter(name))
        else:
            missing.append(f"drafter {name} is not available: left out")
    return list(found.values()), missing


def _fixed(label: str, family: str, drafter: Drafter, only_sampled: bool = False) -> Entry:
    """Return the entry of a drafter that serves every prompt and budget, with what it says of its origin."""
    told = getattr(drafter, "provenance", None) or getattr(getattr(drafter, "graphs", None), "about", None) or {}
    return Entry(label, family, lambda _, __: drafter, only_sampled, dict(told() if callable(told) else told))


def _spiffy(names: Sequence[str], graphs: Sequence[Path]) -> list[Entry]:
    """Return the calibrated variants: every name with every graph file."""
    found = []
    for name in (n for n in names if n in DRAFTERS):
        published = "published" in name
        for path in graphs:
            build: Callable[..., Drafter] = build_drafter
            label = name if len(graphs) == 1 else f"{name} {path}"
            found.append(_fixed(label, SPIFFY, build(name, graph=path), published))
        if not graphs:
            with suppress(ValueError):  # nothing is shipped
                found.append(_fixed(name, SPIFFY, build_drafter(name), published))
    return found
