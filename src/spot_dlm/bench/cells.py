"""From runs to figures: one cell per task, resolution, block length, temperature, budget and drafter, with intervals over prompts.

Families of several variants get one more cell, that of their best variant. Knows nothing of decoding.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Float64

from spot_dlm.bench.bootstrap import PAIRED, interval, ratio_interval, resampled_ratio
from spot_dlm.bench.drafters import BASELINES
from spot_dlm.bench.passes import Run, Setting

ALL_TASKS = "all"


@dataclass(frozen=True)
class Cell:
    """The runs of one drafter at one budget, one for each prompt, and standard decoding's passes on the same prompts."""

    setting: Setting
    nodes: int
    drafter: str
    family: str
    runs: tuple[Run, ...]
    problems: tuple[str, ...] = ()
    variant: str = ""

    def column(self, name: str) -> Float64[np.ndarray, " P"]:
        """Return one count of every prompt."""
        return np.array([getattr(r, name) for r in self.runs], dtype=np.float64)

    @property
    def acceptance_length(self) -> float:
        """Transitions per decoding pass."""
        return float(self.column("transitions").sum() / self.column("nfe").sum())

    def resampled(self) -> Float64[np.ndarray, " B"]:
        """Return the acceptance length of every resample of the prompts; the same resamples for every drafter."""
        return resampled_ratio(self.column("transitions"), self.column("nfe"))

    def to_dict(self) -> dict[str, Any]:
        """Return the figures for JSON."""
        nfe, transitions = self.column("nfe"), self.column("transitions")
        standard = self.column("nfe_standard")
        low, high = interval(self.resampled())
        reduction = ratio_interval(standard, nfe)
        where = {"task": self.setting.task, "resolution": self.setting.resolution, "block_length": self.setting.block_length}
        figures = {
            "temperature": self.setting.temperature,
            "nodes": self.nodes,
            "drafter": self.drafter,
            "family": self.family,
            "acceptance_length": self.acceptance_length,
            "low": low,
            "high": high,
            "nfe_reduction": float(standard.sum() / nfe.sum()),
            "nfe_reduction_low": reduction[0],
            "nfe_reduction_high": reduction[1],
            "identical": not self.problems,
            "prompts": len(self.runs),
            "nfe": int(nfe.sum()),
            "nfe_standard": int(standard.sum()),
            "transitions": int(transitions.sum()),
            "drafted": int(self.column("drafted").sum()),
            "expected_acceptance_length": float(self.column("expected").sum() / nfe.sum()),
        }
        return where | figures | ({"variant": self.variant} if self.variant else {})


def cells(runs: Iterable[Run]) -> list[Cell]:
    """Group runs into cells; the best variant of a family with variants follows them under the family's name."""
    groups: dict[tuple[Setting, int, str], list[Run]] = {}
    problems: dict[tuple[Setting, int, str], list[str]] = {}
    for run in runs:
        key = run.setting, run.nodes, run.drafter
        if run.problem:
            problems.setdefault(key, []).append(f"{run.prompt}: {run.problem}")
        if not run.audit:
            groups.setdefault(key, []).append(run)
    found = [
        Cell(setting, nodes, drafter, group[0].family, tuple(group), tuple(problems.get((setting, nodes, drafter), ())))
        for (setting, nodes, drafter), group in groups.items()
    ]
    return _with_best_variants(found)


def _with_best_variants(found: Sequence[Cell]) -> list[Cell]:
    variants: dict[tuple[Setting, int, str], list[Cell]] = {}
    for cell in found:
        if cell.drafter != cell.family:
            variants.setdefault((cell.setting, cell.nodes, cell.family), []).append(cell)
    best = [max(group, key=lambda c: c.acceptance_length) for group in variants.values()]
    return [*found, *(replace(c, drafter=c.family, variant=c.drafter) for c in best)]


def pooled(runs: Iterable[Run]) -> list[Cell]:
    """Return cells over the prompts of all tasks together."""
    return cells(replace(r, setting=replace(r.setting, task=ALL_TASKS)) for r in runs)


def comparisons(found: Sequence[Cell]) -> list[dict[str, Any]]:
    """Return, for every setting and budget, how `order` compares with the best baseline, with `linear` and with the oracle (paired)."""
    groups: dict[tuple[Setting, int], dict[str, Cell]] = {}
    for cell in found:
        groups.setdefault((cell.setting, cell.nodes), {})[cell.drafter] = cell
    rows = []
    for (setting, nodes), group in groups.items():
        order = group.get("order")
        baselines = [group[name] for name in BASELINES if name in group]
        if order is None or not baselines:
            continue
        best = max(baselines, key=lambda c: c.acceptance_length)
        row = {
            "task": setting.task,
            "resolution": setting.resolution,
            "block_length": setting.block_length,
            "temperature": setting.temperature,
            "nodes": nodes,
            "best_baseline": best.drafter,
            "order": order.acceptance_length,
            "baseline": best.acceptance_length,
            **_difference(order, best),
        }
        if "linear" in group:
            row["linear"] = _difference(order, group["linear"])
        if "oracle" in group:
            row["oracle_share"] = order.acceptance_length / group["oracle"].acceptance_length
        rows.append(row)
    return rows


def _difference(ours: Cell, theirs: Cell) -> dict[str, float]:
    low, high = interval(ours.resampled() - theirs.resampled())
    difference = ours.acceptance_length - theirs.acceptance_length
    return {"difference": difference, "low": low, "high": high, "ratio": ours.acceptance_length / theirs.acceptance_length}


def divergences(runs: Iterable[Run]) -> list[dict[str, Any]]:
    """Return, for JSON, the runs that are not identical to standard decoding, with where they part."""
    return [
        {"id": r.prompt, **r.where(), "audit": r.audit, "problem": r.problem, **(r.divergence.to_dict() if r.divergence else {})}
        for r in runs
        if r.problem
    ]


def passes_document(runs: Sequence[Run], facts: Mapping[str, Any], command: str = "") -> dict[str, Any]:
    """Return the JSON document of `passes`."""
    found, together = cells(runs), pooled(runs)
    several = len({r.setting.task for r in runs}) > 1
    return {
        "cells": [c.to_dict() for c in found],
        "pooled": [c.to_dict() for c in together] if several else [],
        "comparisons": comparisons(found) + (comparisons(together) if several else []),
        "all_identical": not any(r.problem for r in runs),
        "divergences": divergences(runs),
        "intervals": PAIRED,
        "audited": sum(r.audit for r in runs),
        "provenance": dict(facts),
        "command": command,
    }
