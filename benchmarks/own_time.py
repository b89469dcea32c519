"""Measure a drafter's own time per pass on one core, its parts apart: what speculation adds to the target's pass.

    python benchmarks/own_time.py --out results/own-time.json

Medians over the passes of held-out prompts; meaningless while anything else runs.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

import spot_dlm as spot
from spot_dlm.artifacts import provenance, write_json
from spot_dlm.draft_graph import DraftGraph
from spot_dlm.drafters.order import Order
from spot_dlm.features import encode, live_state
from spot_dlm.growth import grow
from spot_dlm.interfaces import DraftContext, Drafter
from spot_dlm.order_inference import FastScorer
from spot_dlm.tasks import load_prompts

TASKS = ("json", "python", "arithmetic", "rewrite")
SETTINGS = ((8, 16), (16, 16), (32, 32))


class Stopwatch:
    """A drafter that times another and repeats its parts on the same contexts."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter, self.name = drafter, drafter.name
        self.scorer = FastScorer(drafter.file.model) if isinstance(drafter, Order) else None
        self.ms: dict[str, list[float]] = {}

    def draft(self, context: DraftContext, budget: int) -> DraftGraph:
        """Draft once for real, timed; then time the parts."""
        graph = self._time("draft", lambda: self.drafter.draft(context, budget))
        masked = context.root.masked
        if self.scorer is None or len(masked) < 2:
            return graph
        depths = max(min(budget, len(masked)) - 1, 8)
        state, ahead = self._time("features", lambda: live_state(context, min(depths, len(masked)), False))
        encoded = encode(state, depths)
        scorer = self.scorer
        scores = self._time("encoder and head", lambda: scorer(encoded, masked, ahead))
        self._time("growth", lambda: grow(context.root, scores, budget))
        return graph

    def _time(self, name: str, run: Callable[[], Any]) -> Any:
        began = perf_counter()
        value = run()
        self.ms.setdefault(name, []).append(1e3 * (perf_counter() - began))
        return value


def main() -> None:
    """Measure every setting and print one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--prompts", type=int, default=3, help="prompts of each task")
    args = parser.parse_args()
    torch.set_num_threads(1)
    target = spot.load_target()
    prompts = [p.prompt for task in TASKS for p in load_prompts(task, limit=args.prompts)]
    rows = []
    for name in ("order", "linear", "calibrated", "chain"):
        for temperature in (0.0, 1.0):
            for nodes, length in SETTINGS:
                params = spot.DecodeParams(sampling=spot.Sampling(temperature=temperature), nodes=nodes, block_length=length)
                spot.generate(target, prompts[0], Stopwatch(spot.build_drafter(name)), params)  # warm-up
                watch = Stopwatch(spot.build_drafter(name))
                for prompt in prompts:
                    spot.generate(target, prompt, watch, params)
                parts = {part: round(statistics.median(times), 3) for part, times in watch.ms.items()}
                rows.append({"drafter": name, "temperature": temperature, "nodes": nodes, "block_length": length, **parts})
    document = provenance(target.spec, "python benchmarks/own_time.py --out results/own-time.json") | {"unit": "ms", "rows": rows}
    if args.out:
        write_json(args.out, document)
    print(json.dumps(document))


if __name__ == "__main__":
    main()
