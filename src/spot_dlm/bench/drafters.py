"""Which drafters a bench compares: names of the command line to ways of building a drafter for one prompt.

A family such as `spiffy` has several variants; a result shows the best of them under the family's name. A drafter that is not
there (not registered, or without its graph file) is left out with a remark.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
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


def entries(names: Sequence[str], graphs: Sequence[Path] = (), optional: bool = False) -> tuple[list[Entry], list[str]]:
    """Return the drafters of these families, and a remark for each that cannot be built.

    Args:
        names: of FAMILIES; a variant's own name is allowed too.
        graphs: calibrated graph files for `spiffy`; none takes the shipped one.
        optional: leave out, with a remark, what is not registered or has no file; a file that was given must always be right.

    Raises:
        ValueError: for an unknown name, a damaged file, or what is missing and not optional.
    """
    found: dict[str, Entry] = {}
    missing: list[str] = []
    for name in dict.fromkeys(names):
        if name not in (*FAMILIES, *SPIFFY_VARIANTS, *DRAFTERS):
            raise ValueError(f"drafter={name!r} is unknown; choose one of {', '.join(FAMILIES)}")
        given = bool(graphs) and (name == SPIFFY or name in SPIFFY_VARIANTS)
        try:
            found |= {e.label: e for e in _family(name, graphs)}
        except ValueError as error:
            if given or not optional:
                raise
            missing.append(f"{name} is left out: {error}")
    return list(found.values()), missing


def in_order(names: Iterable[str]) -> list[str]:
    """Return drafters without repetition in the order of FAMILIES, others last."""
    return sorted(dict.fromkeys(names), key=lambda n: FAMILIES.index(n) if n in FAMILIES else len(FAMILIES))


def _family(name: str, graphs: Sequence[Path]) -> list[Entry]:
    """Return the entries of one name.

    Raises:
        ValueError: if it is not registered or its file cannot be read.
    """
    if name == "oracle":
        return [Entry(name, name, lambda standard, _: Oracle.of(standard))]
    variants = [n for n in (SPIFFY_VARIANTS if name == SPIFFY else (name,)) if n in DRAFTERS]
    if not variants:
        raise ValueError(f"drafter={name!r} is not in this version")
    if name not in (SPIFFY, *SPIFFY_VARIANTS):
        return [fixed(name, name, build_drafter(name))]
    found = []
    files: Sequence[Path | None] = graphs or (None,)
    for variant, path in product(variants, files):
        label = variant if len(graphs) < 2 else f"{variant} {path}"
        found.append(fixed(label, SPIFFY, build_drafter(variant, graph=path), "published" in variant))
    return found


def fixed(label: str, family: str, drafter: Drafter, only_sampled: bool = False) -> Entry:
    """Return the entry of a drafter that serves every prompt and budget, with what it says of its origin."""
    file = getattr(drafter, "graphs", None) or getattr(drafter, "file", None)  # what fitted drafters were read from
    return Entry(label, family, lambda _, __: drafter, only_sampled, dict(getattr(file, "about", {})))
