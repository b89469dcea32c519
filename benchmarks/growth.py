"""How time and memory of a decoding pass grow with block length, vocabulary, nodes, prefix and batch: curves and fitted exponents.

    python benchmarks/growth.py                # measures, writes results/growth.json, docs/images/growth.png and docs/performance.md
    python benchmarks/growth.py --quick --out growth.json   # fewer points, a minute; touches nothing else
    python benchmarks/growth.py --fill         # only fills the tables of docs/performance.md from the committed results

One axis varies, the others stay at the base point. Targets have the shipped model's shape and random weights, at temperature 1 (the more
costly case: noise); drafts are those of `order`. Meaningless while anything else runs.
"""

import argparse
import ctypes
import json
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerator import Shape, random_target

import spot_dlm as spot
from spot_dlm.artifacts import provenance, replace_file, write_json
from spot_dlm.budget import FixedBudget
from spot_dlm.decode import decode_pass
from spot_dlm.drafters import Root
from spot_dlm.sequence import Decoding
from spot_dlm.tune import cpu_name

ROOT = Path(__file__).parents[1]
PARTS = ("target", "draft", "walk", "host", "total")
SHAPE = Shape("shipped-shaped", 4, 192, 6, 6, 32, 512, 768)


@dataclass(frozen=True)
class Point:
    """Where a pass is measured."""

    block_length: int = 16
    vocabulary: int = 768
    nodes: int = 8
    prefix: int = 256
    batch: int = 1


AXES: dict[str, tuple[int, ...]] = {
    "block_length": (4, 8, 16, 32, 64),
    "vocabulary": (768, 3072, 12288, 49152, 151936),
    "nodes": (1, 2, 4, 8, 16, 32, 64),
    "prefix": (64, 128, 256, 512, 1024, 2048, 3584),
    "batch": (1, 2, 4, 8, 16, 32),
}
QUICK_AXES = {name: (*values[:: len(values) // 2][:2], values[-1]) for name, values in AXES.items()}


def measure(point: Point, passes: int) -> dict[str, Any]:
    """Return the median milliseconds of each part of a pass, and its peak memory, over passes whose graphs are full."""
    target = random_target(replace(SHAPE, vocab=point.vocabulary), torch.device("cpu"), torch.float32, point.block_length)
    drafter = spot.build_drafter("order") if point.nodes > 1 else Root()
    rng = np.random.default_rng(0)
    params = spot.DecodeParams(
        sampling=spot.Sampling(temperature=1.0), max_new_tokens=400, nodes=point.nodes, block_length=point.block_length
    )
    prompts = rng.integers(0, point.vocabulary - 1, (point.batch, point.prefix)).tolist()
    live = [Decoding(target, ids, replace(params, sequence=i)) for i, ids in enumerate(prompts)]
    for decoding in live:
        decoding.start()
    budget = FixedBudget(point.nodes)
    decode_pass(target, drafter, budget, live)  # loads and compiles
    decode_pass(target, drafter, budget, live)
    found: list[tuple[int, dict[str, float]]] = []
    base = reset_peak()
    while len(found) < passes:
        before, rows = seconds_of(live), sum(d.counts.rows for d in live)
        began = time.perf_counter()
        decode_pass(target, drafter, budget, live)
        total = time.perf_counter() - began
        spent = [b - a for a, b in zip(before, seconds_of(live), strict=True)]
        parts = dict(zip(PARTS, (*spent, total - sum(spent), total), strict=True))
        found.append((sum(d.counts.rows for d in live) - rows, parts))
        live = [d for d in live if d.result is None]
        if len(live) < point.batch:
            break
    most = max(rows for rows, _ in found)
    full = [parts for rows, parts in found if rows >= 0.75 * most]
    figures = {f"{part}_ms": 1e3 * statistics.median(parts[part] for parts in full) for part in PARTS}
    return {"rows": most, "passes": len(full), **figures, "peak_mib": max(0.0, peak_memory() - base) / 2**20}


def seconds_of(live: Sequence[Decoding]) -> tuple[float, float, float]:
    """Return the seconds that all decodings spent so far, by part (target, draft, walk)."""
    counts = [d.counts for d in live]
    return sum(c.target_s for c in counts), sum(c.draft_s for c in counts), sum(c.verify_s for c in counts)


def reset_peak() -> float:
    """Give free memory back, reset the process's highest resident size where the system allows, and return its size now in bytes."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak_memory() -> float:
    """Return the highest resident size since the reset, in bytes."""
    return _status("VmHWM")


def _status(name: str) -> float:
    with suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text("utf-8").splitlines()
        return 1024.0 * int(next(line for line in lines if line.startswith(name)).split()[1])
    return float("nan")


def exponent(xs: Sequence[float], ys: Sequence[float]) -> float | None:
    """Return the slope of log y over log x in the upper half of the range; None where it cannot be fitted."""
    half = len(xs) // 2 if len(xs) > 3 else len(xs) - 2
    points = [(x, y) for x, y in list(zip(xs, ys, strict=True))[half:] if y > 0]
    if len(points) < 2:
        return None
    return float(np.polyfit(np.log([x for x, _ in points]), np.log([y for _, y in points]), 1)[0])


def grow(axes: dict[str, tuple[int, ...]], passes: int) -> dict[str, Any]:
    """Measure all axes; return the rows and the exponents by axis and part."""
    measured: dict[tuple[int, ...], dict[str, Any]] = {}
    rows = []
    for name, values in axes.items():
        for value in values:
            point = replace(Point(), **{name: value})
            if astuple(point) not in measured:
                measured[astuple(point)] = measure(point, passes)
                print(f"growth: {name} {value}: {measured[astuple(point)]['total_ms']:.1f} ms", file=sys.stderr, flush=True)
            rows.append({"axis": name, "value": value, **measured[astuple(point)]})
    fitted = {}
    for name in axes:
        own = [r for r in rows if r["axis"] == name]
        keys = [*(f"{part}_ms" for part in PARTS), "peak_mib"]
        fitted[name] = {key: exponent([r["value"] for r in own], [r[key] for r in own]) for key in keys}
    return {"base": Point().__dict__, "rows": rows, "exponents": fitted}


def figure(document: dict[str, Any]) -> bytes:
    """Draw time (parts apart) and memory over each axis, both logarithmic."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from spot_dlm.bench.plot import png

    names = list(document["exponents"])
    drawn = Figure(figsize=(3.1 * len(names), 5.4), layout="constrained")
    FigureCanvasAgg(drawn)
    panels = drawn.subplots(2, len(names), squeeze=False, sharey="row")
    for j, name in enumerate(names):
        own = [r for r in document["rows"] if r["axis"] == name]
        for i, keys in enumerate(([f"{part}_ms" for part in PARTS if part != "host"], ["peak_mib"])):
            for key in keys:
                slope = document["exponents"][name][key]
                label = key.removesuffix("_ms").removesuffix("_mib") + ("" if slope is None else f" ~ x^{slope:.2f}")
                points = [(r["value"], r[key]) for r in own if r[key] > 0]
                panels[i][j].plot([x for x, _ in points], [y for _, y in points], marker="o", markersize=3, label=label)
            panels[i][j].set_xscale("log", base=2)
            panels[i][j].set_yscale("log")
            panels[i][j].grid(alpha=0.25)
            panels[i][j].legend(fontsize=7, frameon=False)
        panels[1][j].set_xlabel(name.replace("_", " "))
    panels[0][0].set_ylabel("ms per pass")
    panels[1][0].set_ylabel("peak MiB of a pass")
    return png(drawn)


def growth_table(document: dict[str, Any]) -> str:
    """Return the exponents with the first and the last measured pass of each axis."""
    lines = ["| axis | range | ms per pass | target | draft | walk | total | memory |", "|---" * 8 + "|"]
    for name, slopes in document["exponents"].items():
        own = [r for r in document["rows"] if r["axis"] == name]
        keys = ("target_ms", "draft_ms", "walk_ms", "total_ms", "peak_mib")
        cells = [f"{slopes[k]:.2f}" if slopes[k] is not None else "" for k in keys]
        span = f"{own[0]['value']} to {own[-1]['value']}", f"{own[0]['total_ms']:.1f} to {own[-1]['total_ms']:.1f}"
        lines.append(f"| {name.replace('_', ' ')} | {span[0]} | {span[1]} | " + " | ".join(cells) + " |")
    base = ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in document["base"].items())
    return "\n".join(
        [*lines, "", f"Base point: {base}; {document['processor']}, {document['threads']} thread(s); `{document['command']}`."]
    )


def speed_table(document: dict[str, Any]) -> str:
    """Return, for every place, the medians over tasks of each family's best budget and of `auto`."""
    lines = ["| T | rule | L | batch | prefix | drafter | N | speed-up | passes | outside target |", "|---" * 10 + "|"]
    for r in (r for r in document["medians"] if r["best"]):
        place = f"{r['temperature']:g} | {r['rule']} | {r['block_length']} | {r['batch']} | {r['prefix']}"
        figures = f"{r['speedup']:.2f} | {r['nfe_reduction']:.2f} | {r['share_outside_target']:.0%}"
        lines.append(f"| {place} | {r['drafter']} | {r['nodes']} | {figures} |")
    threads = document["provenance"]["threads"]
    return "\n".join([*lines, "", f"{document['processor']}, {threads} thread(s); `{document['command']}`."])


def short_speed_table(document: dict[str, Any]) -> str:
    """Return the speed-up of each family's best budget, and of `auto`, for single prompts at the shortest prefix; medians over tasks."""
    shortest = min(m["prefix"] for m in document["medians"])
    found = [m for m in document["medians"] if m["best"] and m["batch"] == 1 and m["prefix"] == shortest]
    families = ("chain", "spiffy", "linear", "order", "auto")
    lines = ["| T | rule | FreeDave | Spiffy | linear | SPOT, best N | SPOT, auto |", "|---" * 7 + "|"]
    for temperature, rule in dict.fromkeys((m["temperature"], m["rule"]) for m in found):
        cells = dict.fromkeys(families, "")
        for m in (m for m in found if (m["temperature"], m["rule"]) == (temperature, rule)):
            family = "auto" if m["nodes"] == "auto" else "spiffy" if m["drafter"].startswith("calibrated") else m["drafter"]
            if family in cells:
                cells[family] = f"{m['speedup']:.2f}" + ("" if family == "auto" else f" (N={m['nodes']})")
        lines.append(f"| {temperature:g} | {rule} | " + " | ".join(cells.values()) + " |")
    return "\n".join(lines)


TABLES = {
    "growth": ("growth.json", growth_table),
    "speed": ("bench-speed-auto.json", speed_table),
    "speed-short": ("bench-speed.json", short_speed_table),
}
FILLED = ("docs/performance.md", "README.md")


def filled(text: str) -> str:
    """Return a document with the tables between `<!-- NAME -->` and `<!-- /NAME -->` made from the results that are there."""
    for name, (file, table) in TABLES.items():
        if (path := ROOT / "results" / file).exists():
            before, mark, rest = text.partition(f"<!-- {name} -->\n")
            _, end, after = rest.partition(f"<!-- /{name} -->")
            text = f"{before}{mark}{table(json.loads(path.read_text('utf-8')))}\n{end}{after}" if mark and end else text
    return text


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, or only fill in the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three points of each axis and few passes")
    parser.add_argument("--fill", action="store_true", help="measure nothing")
    parser.add_argument("--axis", action="append", choices=tuple(AXES), help="only these")
    parser.add_argument("--out", type=Path, help="default: results/growth.json; nothing with --quick")
    parser.add_argument("--plot", type=Path, help="default: docs/images/growth.png; nothing with --quick")
    args = parser.parse_args(arguments)
    if not args.fill:
        torch.set_num_threads(1)
        axes = {name: values for name, values in (QUICK_AXES if args.quick else AXES).items() if name in (args.axis or AXES)}
        command = shlex.join(["python", "benchmarks/growth.py", *(sys.argv[1:] if arguments is None else arguments)])
        facts = provenance(None, command) | {"processor": cpu_name(), "threads": torch.get_num_threads()}
        document = facts | grow(axes, 4 if args.quick else 24)
        out = args.out or (None if args.quick else ROOT / "results" / "growth.json")
        plot = args.plot or (None if args.quick else ROOT / "docs" / "images" / "growth.png")
        if out is not None:
            write_json(out, document)
        if plot is not None:
            replace_file(plot, lambda path: path.write_bytes(figure(document)))
        print(json.dumps(document))
    if args.fill or not args.quick:
        for docs in (ROOT / name for name in FILLED):
            if docs.exists():
                text = filled(docs.read_text("utf-8"))
                replace_file(docs, lambda path, text=text: path.write_text(text, "utf-8"))


if __name__ == "__main__":
    main()
