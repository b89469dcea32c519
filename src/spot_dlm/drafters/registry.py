"""Names of the drafters, as the command line and results write them, and the files that some of them are fitted in."""

from collections.abc import Callable
from pathlib import Path

from spot_dlm.drafters.calibrated import Calibrated
from spot_dlm.drafters.chain import Chain
from spot_dlm.drafters.left_to_right import LeftToRight
from spot_dlm.drafters.root import Root
from spot_dlm.interfaces import Drafter
from spot_dlm.rank_graph import read_graphs

SHIPPED_GRAPH = Path(__file__).parents[1] / "shipped" / "graph.json"
"""The graph calibrated on the shipped target."""


def _calibrated(pruned: bool, coupled: bool) -> Callable[[Path | None], Drafter]:
    return lambda graph: Calibrated(read_graphs(graph or SHIPPED_GRAPH), pruned, coupled)


DRAFTERS: dict[str, Callable[[Path | None], Drafter]] = {
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


def build_drafter(name: str, *, graph: Path | None = None) -> Drafter:
    """Build a drafter by name.

    Args:
        name: one of DRAFTERS.
        graph: file of calibrated graphs ('spot calibrate'); None takes the one of the shipped target.

    Raises:
        ValueError: naming the known drafters, or what is wrong with the file.
    """
    if name not in DRAFTERS:
        raise ValueError(f"drafter={name!r} is unknown; choose one of {', '.join(DRAFTERS)}")
    return DRAFTERS[name](graph)
