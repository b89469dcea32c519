"""From timed samples to figures: speed-ups with intervals, passes saved, where the time goes and what is missing to the roofline.

Knows nothing of decoding. Example: `speed_document(samples, facts, "spot bench speed")["rows"]`.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from jaxtyping import Float64

from spot_dlm.bench.bootstrap import LEVEL, RESAMPLES, SEED, interval, resample_counts
from spot_dlm.bench.speed import Sample
from spot_dlm.bench.speed_plan import PLAIN, Method, Setting
from spot_dlm.stats import Counts
from spot_dlm.tune import cpu_name

PLACE = ("temperature", "rule", "block_length", "batch", "prefix")
"""What rows have in common that are compared across tasks."""
PARTS = ("prefill", "target", "draft", "noise_and_walk", "host")
GAPS = {"rows": "target", "draft": "draft", "walk": "noise_and_walk", "host": "host"}
"""What separates a run from its roofline: the name of each piece, and the part of the time that it is the growth of."""


def median_interval(values: Float64[np.ndarray, " P"]) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of a median."""
    order = np.sort(values)
    below = np.cumsum(resample_counts(len(values))[:, np.argsort(values, kind="stable")], axis=1)
    low, high = ((below > k).argmax(axis=1) for k in ((len(values) - 1) // 2, len(values) // 2))
    return interval((order[low] + order[high]) / 2)


def rows(samples: Iterable[Sample]) -> list[dict[str, Any]]:
    """Return one row for every setting and method."""
    groups: dict[Setting, dict[Method, list[Sample]]] = {}
    for sample in samples:
        groups.setdefault(sample.setting, {}).setdefault(sample.method, []).append(sample)
    return [_row(group[PLAIN], found) for group in groups.values() for found in group.values()]


def _row(plain: list[Sample], found: list[Sample]) -> dict[str, Any]:
    standard = {(s.unit, s.repeat): s for s in plain}
    pairs = [(standard[s.unit, s.repeat], s) for s in found]
    ratios = np.array([a.seconds / b.seconds for a, b in pairs])
    low, high = median_interval(ratios)
    setting, method = found[0].setting, found[0].method
    ours, theirs = _typical(found), _typical(plain)
    counts, base = _total(ours), _total(theirs)
    split, seconds = _split(ours), sum(s.seconds for s in ours)
    decoding = seconds - split["prefill"]
    return {
        **asdict(setting),
        "drafter": method.label,
        "family": method.family,
        "nodes": method.nodes,
        "speedup": float(np.median(ratios)),
        "low": low,
        "high": high,
        "speedup_decoding": statistics.median((a.seconds - a.prefill_s) / (b.seconds - b.prefill_s) for a, b in pairs),
        "nfe": counts.nfe,
        "nfe_standard": base.nfe,
        "nfe_official": base.nfe_official,
        "nfe_reduction": base.nfe / counts.nfe,
        "nfe_reduction_official": base.nfe_official / (counts.nfe + counts.nfe_commit),
        "rows_per_pass": counts.rows / counts.nfe,
        "share_outside_target": 1 - split["target"] / decoding,
        "tokens": counts.tokens,
        "tokens_per_s": counts.tokens / seconds,
        "standard_tokens_per_s": base.tokens / sum(s.seconds for s in theirs),
        "identical": not any(s.problem for s in found),
        "prompts": counts.sequences,
        "prompt_tokens": sum(s.prompt_tokens for s in ours) / counts.sequences,
        "pairs": len(pairs),
        "seconds": seconds,
        "split": split,
        "roofline": _roofline(split, counts.nfe, _split(theirs), base.nfe),
    }


def _typical(samples: list[Sample]) -> list[Sample]:
    """Return, for every batch, the repetition of median seconds: parts of one run add up, medians of parts do not."""
    units: dict[int, list[Sample]] = {}
    for sample in samples:
        units.setdefault(sample.unit, []).append(sample)
    return [sorted(group, key=lambda s: s.seconds)[(len(group) - 1) // 2] for group in units.values()]


def _total(samples: list[Sample]) -> Counts:
    return sum((s.counts for s in samples), Counts())


def _split(samples: list[Sample]) -> dict[str, float]:
    """Return the seconds of each part."""
    return {part: sum(s.parts[part] for s in samples) for part in PARTS}


def _roofline(split: Mapping[str, float], nfe: int, base: Mapping[str, float], base_nfe: int) -> dict[str, Any]:
    """Compare a run with one whose passes cost what standard decoding's cost; prefills, equal in both, are left out.

    The gap, in milliseconds per pass (and prompt), is what wider passes, drafting, the longer walk and the host add.
    """

    def per_pass(parts: Mapping[str, float], passes: int) -> dict[str, float]:
        return {part: 1e3 * parts[part] / passes for part in GAPS.values()}

    ours, theirs = per_pass(split, nfe), per_pass(base, base_nfe)
    return {
        "speedup": base_nfe / nfe,
        "ms_per_pass": sum(ours.values()),
        "standard_ms_per_pass": sum(theirs.values()),
        "gap_ms": {name: ours[part] - theirs[part] for name, part in GAPS.items()},
    }


def medians(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the medians over tasks for every method in every place, `best` marking each family's fastest budget there.

    Milliseconds per pass are means, so that the gaps still add up. Standard decoding, which is 1 throughout, is left out.
    """
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in found:
        if row["drafter"] != PLAIN.label:
            groups.setdefault((*(row[k] for k in PLACE), row["family"], row["drafter"], row["nodes"]), []).append(row)
    figures = []
    for key, group in groups.items():
        gaps = {name: statistics.fmean(r["roofline"]["gap_ms"][name] for r in group) for name in GAPS}
        figures.append(
            dict(zip((*PLACE, "family", "drafter", "nodes"), key, strict=True))
            | {name: statistics.median(r[name] for r in group) for name in _MEDIANS}
            | {"lowest": min(r["speedup"] for r in group), "tasks": len(group), "identical": all(r["identical"] for r in group)}
            | {name: statistics.fmean(r["roofline"][name] for r in group) for name in ("ms_per_pass", "standard_ms_per_pass")}
            | {"gap_ms": gaps}
        )
    fixed: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in figures:
        fixed.setdefault((*(row[k] for k in PLACE), row["family"], row["nodes"] == "auto"), []).append(row)
    for same in fixed.values():
        fastest = max(same, key=lambda r: r["speedup"])
        for row in same:
            row["best"] = row is fastest
    return figures


_MEDIANS = (
    "speedup", "speedup_decoding", "nfe_reduction", "nfe_reduction_official", "rows_per_pass", "share_outside_target", "tokens_per_s",
    "standard_tokens_per_s",
)  # fmt: skip


def speed_document(samples: Sequence[Sample], facts: Mapping[str, Any], command: str = "", tuning_s: float = 0.0) -> dict[str, Any]:
    """Return the JSON document of `speed`."""
    found = rows(samples)
    return {
        "rows": found,
        "medians": medians(found),
        "all_identical": all(r["identical"] for r in found),
        "problems": [
            asdict(s.setting) | {"drafter": s.method.label, "nodes": s.method.nodes, "problem": s.problem} for s in samples if s.problem
        ],
        "intervals": f"{LEVEL:.0%} bootstrap of the median over (batch, repetition) pairs, {RESAMPLES} resamples, seed {SEED}",
        "tuning_s": tuning_s,
        "processor": cpu_name(),
        "provenance": dict(facts),
        "command": command,
    }


SPEED_HEAD = ("drafter", "N", "speed-up", "least", "passes", "official", "rows", "outside", "tok/s")
GAP_HEAD = ("drafter", "N", "ms/pass", "standard", "rows", "draft", "walk", "host")


def speed_tables(figures: Sequence[Mapping[str, Any]]) -> list[tuple[str, Sequence[str], list[list[str]]]]:
    """Return (title, head, rows): for every place the medians over tasks, and for its best methods where the gap goes."""
    tables: list[tuple[str, Sequence[str], list[list[str]]]] = []
    for place in dict.fromkeys(tuple(r[k] for k in PLACE) for r in figures):
        here = [r for r in figures if tuple(r[k] for k in PLACE) == place]
        temperature, rule, length, batch, prefix = place
        title = f"T = {temperature:g}, {rule}, L = {length}, batch {batch}, prefix {prefix}"
        tables.append((f"{title}: medians over tasks ({here[0]['tasks']}), * = fastest N", SPEED_HEAD, [_speed_line(r) for r in here]))
        tables.append((f"{title}: milliseconds per pass and prompt", GAP_HEAD, [_gap_line(r) for r in here if r["best"]]))
    return tables


def _speed_line(row: Mapping[str, Any]) -> list[str]:
    return [
        row["drafter"], str(row["nodes"]), f"{row['speedup']:.2f}{'*' if row['best'] else ''}", f"{row['lowest']:.2f}",
        f"{row['nfe_reduction']:.2f}", f"{row['nfe_reduction_official']:.2f}",
        f"{row['rows_per_pass']:.1f}", f"{row['share_outside_target']:.0%}",
        f"{row['tokens_per_s']:.0f}" + ("" if row["identical"] else " NOT IDENTICAL"),
    ]  # fmt: skip


def _gap_line(row: Mapping[str, Any]) -> list[str]:
    numbers = [row["ms_per_pass"], row["standard_ms_per_pass"], *row["gap_ms"].values()]
    return [row["drafter"], str(row["nodes"]), *(f"{n:.2f}" for n in numbers[:2]), *(f"{n:+.2f}" for n in numbers[2:])]
