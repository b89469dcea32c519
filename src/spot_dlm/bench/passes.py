"""How many transitions one pass yields: every drafter on the same prompts, noise and node budgets, compared with standard decoding.

`run` decodes and returns the raw counts of every prompt; `cells.py` turns them into figures with intervals.

Example: `run(target, Grid(tasks=("json",), limit=2), entries(["chain", "oracle"])[0], print)`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from spot_dlm.bench.drafters import Entry
from spot_dlm.bench.memo import MemoTarget
from spot_dlm.compare import Divergence, Trajectory, first_divergence, refine, standard_trajectory
from spot_dlm.decode import decode_steps
from spot_dlm.interfaces import DecodeParams, Target
from spot_dlm.rules import parse_rule
from spot_dlm.sequence import Event, Pass, check_prompt
from spot_dlm.tasks import SPLITS, TASKS, TaskPrompt, load_prompts
from spot_dlm.transition import Sampling

RESOLUTIONS = {"float32": "standard", "bfloat16": "bfloat16"}


def _check_values(name: str, values: Sequence[object], allowed: Sequence[object] | None = None) -> None:
    """Refuse an empty or unknown choice of one axis.

    Raises:
        ValueError: naming the axis, the value and what is allowed.
    """
    if not values:
        raise ValueError(f"{name} is empty; give at least one")
    if len(set(values)) < len(values):
        raise ValueError(f"{name}={list(values)} names a value twice")
    for value in values:
        if allowed is not None and value not in allowed:
            raise ValueError(f"{name}={value!r} is unknown; choose one of {', '.join(map(str, allowed))}")


@dataclass(frozen=True)
class Grid:
    """What is measured: the product of all axes, on the first `limit` prompts of each task.

    Args:
        block_lengths: None stands for the target's own.
        audit: prompts of each task, resolution and temperature that are decoded again with every row evaluated truly.
        real: evaluate every row of every pass truly.

    Raises:
        ValueError: naming the axis, the value and what is allowed.
    """

    tasks: tuple[str, ...] = ("json",)
    split: str = "heldout_values"
    limit: int = 1
    temperatures: tuple[float, ...] = (0.0, 1.0)
    nodes: tuple[int, ...] = (4, 8)
    resolutions: tuple[str, ...] = ("float32", "bfloat16")
    block_lengths: tuple[int | None, ...] = (None,)
    max_new_tokens: int = 128
    seed: int = 0
    audit: int = 1
    real: bool = False

    def __post_init__(self) -> None:
        _check_values("task", self.tasks, TASKS)
        _check_values("split", (self.split,), SPLITS)
        _check_values("resolution", self.resolutions, tuple(RESOLUTIONS))
        for name, values in (("temperature", self.temperatures), ("nodes", self.nodes), ("block_length", self.block_lengths)):
            _check_values(name, values)
        if self.limit < 1:
            raise ValueError(f"limit={self.limit} must be at least 1")
        if self.audit < 0:
            raise ValueError(f"audit={self.audit} must be at least 0")
        for temperature, nodes, length in product(self.temperatures, self.nodes, self.block_lengths):
            self.params(temperature, "float32", length, nodes)

    def params(self, temperature: float, resolution: str, block_length: int | None, nodes: int) -> DecodeParams:
        """Return the parameters of one cell."""
        sampling = Sampling(temperature=temperature, seed=self.seed)
        rule = parse_rule(RESOLUTIONS[resolution])
        return DecodeParams(rule, sampling, self.max_new_tokens, nodes, block_length)


@dataclass(frozen=True)
class Setting:
    """The cells that are compared with each other, but for budget and drafter."""

    task: str
    resolution: str
    block_length: int
    temperature: float


@dataclass(frozen=True)
class Run:
    """One prompt decoded by one drafter at one budget.

    `expected` is the sum over its passes of the graph's total reach: what the drafter expected to get.
    """

    setting: Setting
    prompt: str
    drafter: str
    family: str
    nodes: int
    nfe_standard: int
    nfe: int
    transitions: int
    drafted: int
    expected: float
    divergence: Divergence | None = None
    audit: bool = False
    problem: str = ""
    """Why the run is not what it must be; empty where it is identical."""

    def where(self) -> dict[str, Any]:
        """Return the coordinates for JSON."""
        s = self.setting
        return {
            "task": s.task, "resolution": s.resolution, "block_length": s.block_length, "temperature": s.temperature,
            "nodes": self.nodes, "drafter": self.drafter,
        }  # fmt: skip


def load(target: Target, grid: Grid) -> dict[str, list[tuple[TaskPrompt, list[int]]]]:
    """Return the prompts of every task with their ids, checked before anything is decoded.

    Raises:
        ValueError: if a task has no prompts or one does not fit the target's context.
    """
    loaded: dict[str, list[tuple[TaskPrompt, list[int]]]] = {}
    for task in grid.tasks:
        loaded[task] = [(p, target.encode(p.prompt)) for p in load_prompts(task, grid.split, grid.limit)]
        for prompt, ids in loaded[task]:
            for length in grid.block_lengths:
                try:
                    check_prompt(target.spec, ids, grid.params(0.0, "float32", length, 1))
                except ValueError as error:
                    raise ValueError(f"{prompt.id}: {error}") from error
    return loaded


def count_runs(grid: Grid, num_prompts: int, compared: Sequence[Entry]) -> int:
    """Return how many runs a grid is, audits included."""
    decoded = num_prompts * len(grid.nodes) * sum(len(_at(temperature, compared)) for temperature in grid.temperatures)
    audits = 0 if grid.real else min(grid.audit, grid.limit) * len(grid.tasks) * len(grid.temperatures)
    return (decoded + audits) * len(grid.block_lengths) * len(grid.resolutions)


def _at(temperature: float, compared: Sequence[Entry]) -> list[Entry]:
    return [e for e in compared if temperature > 0 or not e.only_sampled]


def run(target: Target, grid: Grid, compared: Sequence[Entry], on_run: Callable[[Run], None] = lambda _: None) -> list[Run]:
    """Decode the whole grid; `on_run` is called after every run.

    Raises:
        ValueError: if nothing is compared, or a prompt does not fit.
    """
    if not all(_at(temperature, compared) for temperature in grid.temperatures):
        raise ValueError("no drafter of the list is available")
    runs: list[Run] = []
    for task, prompts in load(target, grid).items():
        for length, (index, (prompt, ids)) in product(grid.block_lengths, enumerate(prompts)):
            memo = target if grid.real else MemoTarget(target)
            for temperature, resolution in product(grid.temperatures, grid.resolutions):
                params = replace(grid.params(temperature, resolution, length, 1), sequence=index)
                setting = Setting(task, resolution, length or target.spec.block_length, temperature)
                one = _Prompt(setting, prompt.id, ids, params, standard_trajectory(memo, ids, params))
                here: list[Run] = []
                for entry, nodes in product(_at(temperature, compared), grid.nodes):
                    here.append(one.decode(memo, entry, nodes))
                    on_run(here[-1])
                if index < grid.audit and not grid.real:
                    here.append(one.audit(target, _at(temperature, compared), here))
                    on_run(here[-1])
                runs += here
    return runs


@dataclass(frozen=True)
class _Prompt:
    """One prompt under one setting: what every drafter is given."""

    setting: Setting
    id: str
    ids: list[int]
    params: DecodeParams
    standard: Trajectory

    def decode(self, target: Target, entry: Entry, nodes: int, audit: bool = False) -> Run:
        """Decode with one drafter and compare tokens and order with standard decoding."""
        if entry.family == "root":
            counts = self.standard.result.counts
            return Run(self.setting, self.id, "root", "root", nodes, counts.nfe, counts.nfe, counts.transitions, 0, float(counts.nfe))
        params, drafter = replace(self.params, nodes=nodes), entry.build(self.standard, nodes)
        expected: list[float] = []

        def watched() -> Iterator[Event]:  # keeps no event, for a pass holds the logits of all its nodes
            for event in decode_steps(target, self.ids, drafter, params):
                if isinstance(event, Pass):
                    expected.append(float(event.graph.reach.sum()))
                yield event

        decoded = Trajectory.of(watched())
        divergence = first_divergence(self.standard, decoded, params.rule)
        if divergence is not None:
            divergence = refine(divergence, target, self.ids, params)
        counts = decoded.result.counts
        sums = (self.standard.result.counts.nfe, counts.nfe, counts.transitions, counts.drafted, sum(expected))
        return Run(self.setting, self.id, entry.label, entry.family, nodes, *sums, divergence, audit, str(divergence or ""))

    def audit(self, target: Target, compared: Sequence[Entry], runs: Sequence[Run]) -> Run:
        """Decode once more at the largest budget with every row evaluated truly; passes and nodes must be the same."""
        entry = next((e for e in compared if e.family == "order"), None) or next((e for e in compared if e.family != "root"), compared[0])
        seen = max((r for r in runs if r.drafter == entry.label), key=lambda r: r.nodes)
        again = self.decode(target, entry, seen.nodes, audit=True)
        if not again.problem and (again.nfe, again.drafted) != (seen.nfe, seen.drafted):
            remembered = f"{seen.nfe} passes and {seen.drafted} guesses with remembered rows"
            return replace(again, problem=f"{again.nfe} passes and {again.drafted} guesses with every row evaluated, {remembered}")
        return again
