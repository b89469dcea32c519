"""Decoding by numbers: drafters of known acceptance, passes of known cost, to see what a budget makes of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from types import SimpleNamespace

import numpy as np

from spot_dlm.budget import Budget, CostProfile
from spot_dlm.draft_graph import DraftGraph

LENGTH = 32
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
HOST_MS = 0.3
CURVES: dict[str, Callable[[int], float]] = {
    "flat": lambda rows: 5 + 0.02 * rows,
    "cpu": lambda rows: 4 + 0.6 * rows,
    "linear": lambda rows: 1 + 4 * rows,
    "stepped": lambda rows: 5 + 2.5 * ((rows - 1) // 8),
    "one dearer": lambda rows: 5.35 if rows == 1 else 5 + 0.1 * rows,
    "one cheaper": lambda rows: 3.0 if rows == 1 else 6 + 0.1 * rows,
}
CONTEXT = SimpleNamespace(root=SimpleNamespace(masked=np.arange(LENGTH), canvas=range(64), block=1), crosses=False)


class Guesses:
    """A tree of guesses, best first: at every depth the branches are right with these probabilities, and reach says `bias` times that.

    `truth` are the probabilities of the target where the drafter is wrong about them.
    """

    def __init__(self, claimed: Sequence[float], bias: float = 1.0, truth: Sequence[float] | None = None, most: int = 32) -> None:
        self.truth = np.array(claimed if truth is None else truth)
        heap: list = [(-1.0, 0, (), -1)]
        paths, reach, edges = [], [], []
        self.index: dict[tuple, int] = {}
        while heap and len(paths) < most:
            negative, _, path, parent = heappop(heap)
            node = self.index[path] = len(paths)
            paths.append(path)
            reach.append(min(1.0, -negative * (bias if path else 1.0)))
            edges += [(parent, node)] if path else []
            for branch, p in enumerate(claimed if len(path) < LENGTH - 1 else ()):
                if p > 0:
                    heappush(heap, (negative * p, node * 10 + branch, (*path, branch), node))
        canvases = np.full((len(paths), LENGTH), -1)
        for node, path in enumerate(paths):
            canvases[node, : len(path)] = path
        steps = np.array([len(path) for path in paths])
        whole = DraftGraph(0, canvases, steps, np.array(reach), np.array(edges, dtype=np.int64).reshape(-1, 2))
        self._graphs = [whole.first(n) for n in range(1, len(paths) + 1)]
        right = [float(np.prod([self.truth[b] for b in path])) for path in paths]
        self.steps = np.cumsum(right)
        """Steps of a pass with the first n nodes, on average."""

    def first(self, nodes: int) -> DraftGraph:
        return self._graphs[min(nodes, len(self._graphs)) - 1]

    def reached(self) -> tuple[float, ...]:
        """Return the share of walks through the whole graph that arrive at depth 1, 2, ..."""
        depths, gains = self._graphs[-1].depths, np.diff(self.steps, prepend=0.0)
        return tuple(float(gains[depths == d].sum()) for d in range(1, int(depths.max()) + 1))

    def walk(self, rng: np.random.Generator, nodes: int) -> int:
        """Draw how many guesses among the first nodes are accepted."""
        path: tuple = ()
        while True:
            branch = int(np.searchsorted(np.cumsum(self.truth), rng.random(), side="right"))
            node = self.index.get((*path, branch))
            if branch == len(self.truth) or node is None or node >= nodes:
                return len(path)
            path = (*path, branch)


@dataclass(frozen=True)
class Machine:
    """What passes and drafts really cost."""

    curve: Callable[[int], float]
    own: float = 0.0
    """Time of a draft, in passes of one row."""

    def draft_ms(self, nodes: int) -> float:
        return self.own * self.curve(1) if nodes > 1 else 0.0

    def profile(self, tried: Guesses | None = None, noise: np.random.Generator | None = None) -> CostProfile:
        """What a measurement finds: the true costs, or 5 % off; `tried` is what it drafted with."""
        factors = np.ones(len(ROWS)) if noise is None else noise.normal(1, 0.05, len(ROWS))
        curve = tuple(self.curve(r) * f for r, f in zip(ROWS, factors.tolist(), strict=True))
        steps = tuple((n, float(tried.steps[min(n, len(tried.steps)) - 1])) for n in (2, 4, 8, 16, 32)) if tried else ()
        drafts = ((2, self.draft_ms(2)),)
        return CostProfile(ROWS, (64,), (curve,), HOST_MS, draft_ms=drafts, steps_per_pass=steps, reached=tried.reached() if tried else ())

    def fixed(self, guesses: Sequence[Guesses], nodes: int, prompts: int = 1) -> float:
        """Return steps per millisecond with a fixed number of nodes, on average over drafters that take turns at random."""
        steps = np.mean([g.steps[min(nodes, len(g.steps)) - 1] for g in guesses])
        return float(prompts * steps / (self.curve(nodes * prompts) + prompts * (HOST_MS + self.draft_ms(nodes))))

    def best_fixed(self, guesses: Sequence[Guesses], prompts: int = 1) -> float:
        return max(self.fixed(guesses, n, prompts) for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32))


def simulate(
    budget: Budget,
    machine: Machine,
    at: Callable[[float, np.random.Generator], Guesses],
    steps: int = 2000,
    prompts: int = 1,
    seed: int = 0,
) -> float:
    """Decode so many steps of each prompt with the drafter that `at(steps done)` gives; return steps per millisecond.

    Counted are the steps that the evaluated nodes bring on average, so that luck sways the budget but not the figure.
    """
    rng = np.random.default_rng(seed)
    done, mean_done, ms = 0, 0.0, 0.0
    while done < steps * prompts:
        guesses = [at(done / prompts, rng) for _ in range(prompts)]
        limits = budget.limits([CONTEXT] * prompts)
        kept = budget.allot([g.first(n) for g, n in zip(guesses, limits, strict=True)], [64] * prompts)
        accepted = [g.walk(rng, n) for g, n in zip(guesses, kept, strict=True)]
        budget.observe([g.first(n) for g, n in zip(guesses, kept, strict=True)], accepted)
        ms += machine.curve(sum(kept)) + prompts * HOST_MS + sum(map(machine.draft_ms, limits))
        done += prompts + sum(accepted)
        mean_done += sum(float(g.steps[n - 1]) for g, n in zip(guesses, kept, strict=True))
    return mean_done / ms
