"""Measure a drafter's own time per pass, its parts apart, and per prompt of a batch: what speculation adds to the target's pass.

    python benchmarks/own_time.py --out results/own-time.json
    python benchmarks/own_time.py --threads 2 --drafters order

Medians over the passes of held-out prompts, each draft right after a pass of the target, so with cold caches. With one thread its own time
is measured, which other programs lengthen only through the caches; with more, nothing else may run.
"""

import argparse
import copy
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any

import torch

import spot_dlm as spot
from spot_dlm.artifacts import provenance, write_json
from spot_dlm.draft_graph import DraftGraph
from spot_dlm.drafters.order import Order
from spot_dlm.features import remember
from spot_dlm.growth import grow
from spot_dlm.interfaces import DraftContext, Drafter
from spot_dlm.live import read_live
from spot_dlm.order_inference import FastScorer
from spot_dlm.tasks import load_prompts

TASKS = ("json", "python", "arithmetic", "rewrite")
SETTINGS = ((8, 16), (16, 16), (32, 32))
BATCHES = (4, 16)


def memory_of(context: DraftContext) -> dict[str, Any]:
    """Return the block's memory as it is now, so that a draft can be repeated."""
    kept = {"observed", "last"}  # compared by identity
    return {k: v if k in kept else copy.copy(v) if isinstance(v, dict) else _copy(v) for k, v in context.memory.items()}


def _copy(value: Any) -> Any:
    return replace(value, **{k: v.copy() for k, v in vars(value).items() if hasattr(v, "dtype")})


@dataclass
class Stopwatch:
    """A drafter that times another and repeats its parts on the same contexts."""

    drafter: Drafter
    ms: dict[str, list[float]] = field(default_factory=dict)
    asked: list[tuple[DraftContext, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.name, self.clock = self.drafter.name, thread_time if torch.get_num_threads() == 1 else perf_counter
        self.scorer = FastScorer(self.drafter.file.model) if isinstance(self.drafter, Order) else None

    def draft(self, context: DraftContext, budget: int) -> DraftGraph:
        """Draft once for real, timed; then time the parts."""
        before = replace(context, memory=memory_of(context))
        graph = self._time("draft", lambda: self.drafter.draft(context, budget))
        self.asked.append((before, budget))
        masked, scorer = context.root.masked, self.scorer
        if scorer is None or len(masked) < 2:
            return graph
        context = replace(before, memory=memory_of(before))
        depths = max(min(budget - 1, len(masked) - (not context.crosses)), 8)
        encoded, tokens = self._time("features", lambda: read_live([context], [min(depths, len(masked))], False))
        if self.name == "order" and context.graph is not None and context.evaluated is not None:
            seen = (context.graph, context.evaluated, context.last.before.canvas, context.root.step - int(context.graph.steps[0]))
            self._time("effects", lambda: remember(context.memory, *seen))
        scores = self._time("encoder and head", lambda: scorer(encoded, [masked], tokens, [depths])[0])
        self._time("growth", lambda: grow(context.root, scores, budget, context.crosses, context.stop_ids))
        return graph

    def time_batches(self, rounds: int = 3) -> None:
        """Time drafting for several prompts at once, per prompt."""
        many = getattr(self.drafter, "draft_many", None)
        for size in BATCHES if many else ():
            for _ in range(rounds):
                for start in range(0, len(self.asked) - size + 1, size):
                    self._time_batch(many, self.asked[start : start + size])

    def _time_batch(self, many: Callable[..., Any], asked: Sequence[tuple[DraftContext, int]]) -> None:
        contexts = [replace(context, memory=memory_of(context)) for context, _ in asked]
        began = self.clock()
        many(contexts, [budget for _, budget in asked])
        self.ms.setdefault(f"draft, {len(asked)} prompts", []).append(1e3 * (self.clock() - began) / len(asked))

    def _time(self, name: str, run: Callable[[], Any]) -> Any:
        began = self.clock()
        value = run()
        self.ms.setdefault(name, []).append(1e3 * (self.clock() - began))
        return value


def main() -> None:
    """Measure every setting and print one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--prompts", type=int, default=3, help="prompts of each task")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--drafters", nargs="+", default=["order", "linear", "calibrated", "chain"])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    target = spot.load_target()
    prompts = [p.prompt for task in TASKS for p in load_prompts(task, limit=args.prompts)]
    rows = []
    for name in args.drafters:
        for temperature in (0.0, 1.0):
            for nodes, length in SETTINGS:
                params = spot.DecodeParams(sampling=spot.Sampling(temperature=temperature), nodes=nodes, block_length=length)
                spot.generate(target, prompts[0], Stopwatch(spot.build_drafter(name)), params)  # warm-up
                watch = Stopwatch(spot.build_drafter(name))
                for prompt in prompts:
                    spot.generate(target, prompt, watch, params)
                watch.time_batches()
                parts = {part: round(statistics.median(times), 3) for part, times in watch.ms.items()}
                rows.append({"drafter": name, "temperature": temperature, "nodes": nodes, "block_length": length, **parts})
    document = provenance(target.spec, "python benchmarks/own_time.py --out results/own-time.json")
    document |= {"unit": "ms", "threads": args.threads, "rows": rows}
    if args.out:
        write_json(args.out, document)
    print(json.dumps(document))


if __name__ == "__main__":
    main()
