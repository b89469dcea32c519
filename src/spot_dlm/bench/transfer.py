"""How well a drafter serves targets that it was not trained on, beside what was fitted on those very targets.

For each target: traces of standard decoding, a Spiffy graph calibrated on them, a drafter trained on them (`own`) and one trained on the
other targets' traces (`others`); all beside the drafter under test (`transferred`), which was fitted to none of them. What the folder
holds is not made again.

Example: `fit_graph(subject); compared(subject, transferred)` are the drafters for `passes.run`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from spot_dlm.bench.bootstrap import interval
from spot_dlm.bench.cells import Cell
from spot_dlm.bench.drafters import Entry, entries, fixed
from spot_dlm.bench.passes import RESOLUTIONS, Grid
from spot_dlm.calibrate import calibrate
from spot_dlm.drafter_files import OrderModelFile, load_order_model
from spot_dlm.drafters.order import Order
from spot_dlm.interfaces import Target
from spot_dlm.rank_graph import read_graphs, write_graphs
from spot_dlm.record import Recording, TraceSetting, record
from spot_dlm.traces import join_traces, read_traces
from spot_dlm.train import TrainParams, train

TRANSFERRED, OWN, OTHERS = "transferred", "own", "others"
FREEDAVE = ("chain", "chain-published")
RIVALS = ("freedave", "spiffy", OWN, OTHERS)
"""What the transferred drafter is compared with; "freedave" is the better of its two variants."""


@dataclass(frozen=True)
class Subject:
    """One target of the bench, and the folder of what is fitted on it.

    Args:
        name: what tables call it.
        model: what `load_target` takes.
        folder: holds traces, graph.json, own and others.
    """

    name: str
    model: str
    folder: Path

    @property
    def traces(self) -> Path:
        """Traces of standard decoding."""
        return self.folder / "traces"

    @property
    def graph(self) -> Path:
        """Spiffy's graphs, calibrated on the traces."""
        return self.folder / "graph.json"

    def drafter(self, kind: str) -> Path:
        """Folder of the drafter trained on this target's traces (OWN) or on the others' (OTHERS)."""
        return self.folder / kind


def subjects(models: Sequence[str], folder: Path) -> list[Subject]:
    """Return the targets with a folder each, called by the last part of their path.

    Raises:
        ValueError: if two have the same name.
    """
    names = [model.rstrip("/").rpartition("/")[2] for model in models]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two models are called {name!r}; their folders must differ in the last part")
    return [Subject(name, model, folder / name) for name, model in zip(names, models, strict=True)]


def recording(
    subject: Subject, prompts: Sequence[dict[str, Any]], grid: Grid, transferred: Path, load_options: Mapping[str, Any] = {}
) -> Recording:
    """Return the plan of a target's traces: every prompt in one of the grid's settings, in turn, decoded with the transferred drafter.

    `load_options` are `load_target`'s, for processes that load the target themselves.
    """
    settings = [
        TraceSetting(RESOLUTIONS[resolution], temperature, max_new_tokens=grid.max_new_tokens)
        for resolution, temperature in product(grid.resolutions, grid.temperatures)
    ]
    return Recording(subject.model, prompts, settings, seed=1, spread=True, drafter=str(transferred), load_options=dict(load_options))


def record_traces(
    subject: Subject, plan: Recording, workers: int, progress: Callable[[int, int], None], target: Target | None = None, command: str = ""
) -> None:
    """Record what is missing of a target's traces.

    Raises:
        ValueError: if the folder holds other traces.
    """
    subject.folder.mkdir(parents=True, exist_ok=True)
    record(plan, subject.traces, workers, 1, progress, command, target)


def fit_graph(subject: Subject) -> None:
    """Calibrate Spiffy's graphs on the target's own traces, unless that is done."""
    if not subject.graph.exists():
        write_graphs(subject.graph, calibrate(read_traces(subject.traces)))
    read_graphs(subject.graph)


def fit_drafter(
    traces: Iterable[Path],
    out: Path,
    params: TrainParams,
    initial: OrderModelFile,
    progress: Callable[[int, dict[str, float]], None],
    command: str = "",
) -> None:
    """Train a drafter on all traces, beginning with `initial`, unless that is done; an interrupted training goes on.

    Raises:
        ValueError: if the folder holds a training with other parameters or traces.
    """
    train(join_traces([read_traces(folder) for folder in traces]), out, params, progress=progress, command=command, initial=initial)


def compared(subject: Subject, transferred: OrderModelFile) -> list[Entry]:
    """Return the drafters to compare on a target: those that need no fitting, and what the folder holds."""
    found, _ = entries([*FREEDAVE, "oracle"])
    found.append(fixed(TRANSFERRED, TRANSFERRED, Order(transferred)))
    if subject.graph.exists():
        found += entries(["spiffy"], [subject.graph])[0]
    for kind in (OWN, OTHERS):
        if (subject.drafter(kind) / "config.json").exists():
            found.append(fixed(kind, kind, Order(load_order_model(subject.drafter(kind)))))
    return found


def comparisons(target: str, found: Sequence[Cell]) -> list[dict[str, Any]]:
    """Return a row for every setting, budget and rival: the transferred drafter's acceptance length over the rival's, with its interval.

    The resamples of the prompts are the same for both, so the interval is that of a paired ratio.
    """
    groups: dict[tuple[Any, int], dict[str, Cell]] = {}
    for cell in found:
        groups.setdefault((cell.setting, cell.nodes), {})[cell.drafter] = cell
    rows = []
    for (setting, nodes), group in groups.items():
        ours = group[TRANSFERRED]
        for rival in RIVALS:
            candidates = [group[n] for n in (FREEDAVE if rival == "freedave" else (rival,)) if n in group]
            if not candidates:
                continue
            theirs = max(candidates, key=lambda c: c.acceptance_length)
            low, high = interval(ours.resampled() / theirs.resampled())
            rows.append(
                {
                    "target": target, "task": setting.task, "temperature": setting.temperature, "resolution": setting.resolution,
                    "block_length": setting.block_length, "nodes": nodes, "rival": rival, "variant": theirs.variant or theirs.drafter,
                    "transferred": ours.acceptance_length, "theirs": theirs.acceptance_length,
                    "ratio": ours.acceptance_length / theirs.acceptance_length, "low": low, "high": high,
                }
            )  # fmt: skip
    return rows
