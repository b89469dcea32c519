"""Print the README's tables from the committed result files.

python benchmarks/tables.py
"""

import json
from pathlib import Path
from statistics import geometric_mean
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"


def read(name: str) -> dict[str, Any]:
    """Return one result document."""
    document: dict[str, Any] = json.loads((RESULTS / name).read_text("utf-8"))
    return document


def accuracy_table() -> str:
    """Return exact answers by task, block length and split."""
    rows = read("accuracy.json")["rows"]
    lines = ["| exact answers, T = 0 | values, L=16 | templates, L=16 | values, L=32 | templates, L=32 |", "|---|---|---|---|---|"]
    for task in dict.fromkeys(r["task"] for r in rows):
        cells = [
            f"{r['right']}/{r['prompts']}"
            for length in (16, 32)
            for split in ("heldout_values", "heldout_templates")
            for r in rows
            if (r["task"], r["block_length"], r["split"]) == (task, length, split)
        ]
        lines.append(f"| {task} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def passes_table(name: str) -> str:
    """Return how many times fewer passes each drafter needs, by node budget."""
    document = read(name)
    rows = document["rows"]
    budgets = sorted({r["nodes"] for r in rows})
    lines = ["| T | rule | drafter | " + " | ".join(f"N={n}" for n in budgets) + " | identical |", "|---" * (len(budgets) + 4) + "|"]
    for key in dict.fromkeys((r["temperature"], r["rule"], r["drafter"]) for r in rows):
        found = {r["nodes"]: r for r in rows if (r["temperature"], r["rule"], r["drafter"]) == key}
        cells = [f"{found[n]['nfe_reduction']:.2f}" if n in found else "" for n in budgets]
        same, cases = (sum(r[field] for r in found.values()) for field in ("identical", "cases"))
        lines.append(f"| {key[0]:g} | {key[1]} | {key[2]} | " + " | ".join(cells) + f" | {same}/{cases} |")
    return "\n".join(lines)


DRAFTERS = ("ltr", "chain-published", "chain", "spiffy", "linear", "order", "oracle")
COMPETENT = ("json", "python", "arithmetic", "rewrite")


def bench_table(name: str, tasks: tuple[str, ...] = COMPETENT, figure: str = "nfe_reduction") -> str:
    """Return passes of standard decoding over passes of each drafter (or transitions per pass), tasks together, by budget."""
    cells = [c for c in read(name)["cells"] if c["task"] in tasks]
    budgets = sorted({c["nodes"] for c in cells})
    lines = ["| T | resolution | drafter | " + " | ".join(f"N={n}" for n in budgets) + " |", "|---" * (len(budgets) + 3) + "|"]
    over = {"nfe_reduction": "nfe_standard", "acceptance_length": "transitions"}[figure]
    for temperature, resolution in dict.fromkeys((c["temperature"], c["resolution"]) for c in cells):
        for drafter in DRAFTERS:
            row = []
            for nodes in budgets:
                key = (temperature, resolution, drafter, nodes)
                found = [c for c in cells if (c["temperature"], c["resolution"], c["drafter"], c["nodes"]) == key]
                row.append(f"{sum(c[over] for c in found) / sum(c['nfe'] for c in found):.2f}" if found else "")
            if any(row):
                lines.append(f"| {temperature:g} | {resolution} | {drafter} | " + " | ".join(row) + " |")
    return "\n".join(lines)


def transfer_table(nodes: int) -> str:
    """Return, for every target and setting, the transferred drafter's acceptance length, and over each rival's (star: 1 outside)."""
    documents = [read(path.name) for path in sorted(RESULTS.glob("transfer-*.json"))]
    cells = [c for d in documents for c in d["cells"] if c["nodes"] == nodes and c["drafter"] == "transferred"]
    ratios = [r for d in documents for r in d["comparisons"] if r["nodes"] == nodes]
    rivals = list(dict.fromkeys(r["rival"] for r in ratios))
    lines = ["| target | T | resolution | transferred | over " + " | over ".join(rivals) + " |", "|---" * (len(rivals) + 4) + "|"]
    for cell in cells:
        key = tuple(cell[k] for k in ("target", "temperature", "resolution"))
        found = {r["rival"]: r for r in ratios if tuple(r[k] for k in ("target", "temperature", "resolution")) == key}
        over = [f"{r['ratio']:.2f}{'' if r['low'] <= 1 <= r['high'] else '*'}" if r else "" for r in map(found.get, rivals)]
        lines.append(f"| {key[0]} | {key[1]:g} | {key[2]} | {cell['acceptance_length']:.2f} | " + " | ".join(over) + " |")
    return "\n".join(lines)


def transfer_ranges() -> str:
    """Return, for every target, the transferred drafter over each rival: lowest, geometric mean and highest of all settings and budgets."""
    documents = [read(path.name) for path in sorted(RESULTS.glob("transfer-*.json"))]
    rows = [r for d in documents for r in d["comparisons"]]
    rivals = list(dict.fromkeys(r["rival"] for r in rows))
    lines = ["| target | over " + " | over ".join(rivals) + " |", "|---" * (len(rivals) + 1) + "|"]
    for target in (*dict.fromkeys(r["target"] for r in rows), None):
        cells = []
        for rival in rivals:
            ratios = [r["ratio"] for r in rows if r["rival"] == rival and target in (r["target"], None)]
            cells.append(f"{min(ratios):.2f} to {max(ratios):.2f}, mean {geometric_mean(ratios):.2f}" if ratios else "")
        lines.append(f"| {target or 'all'} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Print every table whose file is there."""
    if (RESULTS / "accuracy.json").exists():
        print(accuracy_table(), end="\n\n")
    for path in sorted(RESULTS.glob("bench-passes-*.json")):
        for tasks in (COMPETENT, ("stdlib",)):
            print(f"{path.name}, {', '.join(tasks)}: passes saved\n\n{bench_table(path.name, tasks)}\n")
    if any(RESULTS.glob("transfer-*.json")):
        print(f"transfer, all settings\n\n{transfer_ranges()}\n")
        for nodes in (8, 16):
            print(f"transfer, N = {nodes}\n\n{transfer_table(nodes)}\n")
    for path in sorted(RESULTS.glob("verify-*.json")):
        print(f"{path.name}: {read(path.name)['cases']} comparisons\n\n{passes_table(path.name)}\n")


if __name__ == "__main__":
    main()
