"""Measure the clock of one decoding on this machine: time per pass, share outside the target, speed-up over standard decoding.

    python benchmarks/cost.py --out results/cost.json

Interleaved runs on the same prompts and seeds in one process; medians over the repeats. Meaningless while anything else runs.
"""

import argparse
import json
import os
import platform
import shlex
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

import spot_dlm as spot
from spot_dlm.stats import Counts
from spot_dlm.tasks import load_prompts

TASKS = ("json", "python", "arithmetic", "rewrite")
SETTINGS = (("root", 1), ("chain", 2), ("chain", 4), ("chain", 8), ("order", 4), ("order", 8))


def measure(target: spot.Target, prompts: list[str], temperature: float, repeats: int) -> list[dict[str, Any]]:
    """Return one row for every drafter and budget."""
    runs: dict[tuple[str, int], list[Counts]] = {setting: [] for setting in SETTINGS}
    for _ in range(repeats):
        for name, nodes in SETTINGS:
            params = spot.DecodeParams(sampling=spot.Sampling(temperature=temperature), nodes=nodes)
            drafter = spot.build_drafter(name)
            runs[name, nodes].append(sum((spot.generate(target, p, drafter, params).counts for p in prompts), Counts()))
    standard = [c.total_s for c in runs["root", 1]]
    rows = []
    for (name, nodes), counts in runs.items():
        middle = statistics.median
        rows.append(
            {
                "temperature": temperature,
                "drafter": name,
                "nodes": nodes,
                "nfe": counts[0].nfe,
                "acceptance_length": round(counts[0].acceptance_length, 3),
                "ms_per_pass": round(middle(1e3 * c.total_s / c.nfe for c in counts), 2),
                "host_share": round(middle(c.host_share for c in counts), 3),
                "speed_up": round(middle(s / c.total_s for s, c in zip(standard, counts, strict=True)), 2),
            }
        )
    return rows


def main() -> None:
    """Measure at both temperatures and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--prompts", type=int, default=5, help="prompts of each task")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    target = spot.load_target()
    prompts = [p.prompt for task in TASKS for p in load_prompts(task, limit=args.prompts)]
    measure(target, prompts[:2], 1.0, 1)  # warm-up
    rows = [row for temperature in (0.0, 1.0) for row in measure(target, prompts, temperature, args.repeats)]
    document = {
        "command": shlex.join(["python", "benchmarks/cost.py", *sys.argv[1:]]),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "threads": args.threads,
        "torch": torch.__version__,
        "fingerprint": target.spec.fingerprint,
        "prompts": len(prompts),
        "repeats": args.repeats,
        "rows": rows,
    }
    text = json.dumps(document, indent=1)
    if args.out:
        args.out.write_text(text + "\n")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
