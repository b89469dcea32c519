"""How many guesses a pass evaluates: a fixed number, or as many as pay by the measured cost of a pass (method.md section 7).

`AutoBudget` weighs what guesses are worth against what they cost. It reads no clock: its decisions follow from the profile and the decoded
data alone.

Example: `AutoBudget(profile).allot([graph], [prefix.length])` is `[6]`: the graph's first six nodes are evaluated.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, runtime_checkable

from spot_dlm.budget.account import Account, Calibration
from spot_dlm.budget.profile import CostProfile, isotonic
from spot_dlm.draft_graph import DraftGraph
from spot_dlm.interfaces import DraftContext

MOST_NODES = 32
_FIRST_NODES = 8


@runtime_checkable
class Budget(Protocol):
    """Decides how many guesses are drafted and evaluated; called once a pass each, in this order."""

    def limits(self, contexts: Sequence[DraftContext]) -> list[int]:
        """Return the most nodes that each prompt's drafter may propose in the coming pass; 1 = it is not run at all."""

    def allot(self, graphs: Sequence[DraftGraph], prefixes: Sequence[int]) -> list[int]:
        """Return how many of the first nodes of each graph are evaluated (at least 1), in one pass over all prompts.

        Args:
            graphs: one for each prompt of the pass.
            prefixes: cached tokens of each.
        """

    def observe(self, graphs: Sequence[DraftGraph], accepted: Sequence[int]) -> None:
        """Take note of a pass: the evaluated graphs and how many guesses each walk accepted."""


@dataclass(frozen=True)
class FixedBudget:
    """The same number of nodes in every pass; 1 is standard decoding."""

    nodes: int

    def __post_init__(self) -> None:
        if self.nodes < 1:
            raise ValueError(f"nodes={self.nodes} must be at least 1 (1 = standard decoding)")

    def limits(self, contexts: Sequence[DraftContext]) -> list[int]:
        """Return the number for every prompt."""
        return [self.nodes] * len(contexts)

    def allot(self, graphs: Sequence[DraftGraph], prefixes: Sequence[int]) -> list[int]:
        """Evaluate everything that was drafted."""
        return [len(graph) for graph in graphs]

    def observe(self, graphs: Sequence[DraftGraph], accepted: Sequence[int]) -> None:
        """Learn nothing."""


class AutoBudget:
    """As many guesses as pay, and none where drafting would be slower than standard decoding (`Calibration`, `Account`).

    What is learned is kept for the whole run. By the profile no run is slower than standard decoding by more than 1 % and eight passes.

    Args:
        profile: measured milliseconds.
        most: nodes of one prompt at most.
        account: what is known already; None begins with what the profile says of the first drafts' prompts, their number and length.
    """

    def __init__(self, profile: CostProfile, most: int = MOST_NODES, account: Account | None = None) -> None:
        if most < 1:
            raise ValueError(f"most={most} must be at least 1")
        self.profile, self.most = profile, most
        self.calibration, self.account = Calibration(most, profile.reached), account
        self._drafting = [profile.drafting(nodes) for nodes in range(most + 1)]
        self._costs = _Costs(profile)
        self._used = float(min(most, _FIRST_NODES))  # nodes that recent passes evaluated at most
        self._offered, self._drafts, self._tries = 1, 0, False  # of the coming pass: nodes offered, prompts drafted for, as a try
        self._expected, self._pass_ms, self._base_ms = 1.0, 0.0, 0.0  # its steps for each prompt, its milliseconds, those without drafting

    def limits(self, contexts: Sequence[DraftContext]) -> list[int]:
        """Offer twice what recent passes used, or 1 where drafting does not pay or nothing can be guessed."""
        possible = [len(c.root.masked) > (0 if c.crosses else 1) for c in contexts]
        if self.account is None:
            prefix = sum(c.root.block * len(c.root.canvas) for c in contexts) / len(contexts)
            self.account = Account.open(self.profile, self.most, len(contexts), prefix)
        self._tries = self.account.is_due
        self._drafts = sum(possible) if self.most > 1 and (self._tries or self.account.pays) else 0
        if not self._drafts:
            return [1] * len(contexts)
        pays = self._costs.most_that_pay(self.most, len(contexts))
        self._offered = max(2, min(int(2 * self._used), self.most, pays))
        return [self._offered if some else 1 for some in possible]

    def allot(self, graphs: Sequence[DraftGraph], prefixes: Sequence[int]) -> list[int]:
        """Evaluate, best first over all graphs, as many guesses as bring most beyond what their time brings in an average pass.

        Over a run that gives the most steps per millisecond; the best ratio of each pass alone would spend too much on poor guesses.
        """
        prompts, sizes = len(graphs), [graph.rows.tolist() for graph in graphs]
        roots = sum(size[0] for size in sizes)
        costs = self._costs.after(sum(prefixes) / prompts, sum(map(sum, sizes)))
        self._base_ms = costs[roots] + prompts * self.profile.host_ms
        drafts = self._drafts * self._drafting[self._offered]
        rate = (self.account.expected_gain if self.account else 1.0) * prompts / self._base_ms
        rows, steps, best, best_count, best_rows, best_steps = roots, 0.0, -math.inf if self._tries else 0.0, 0, roots, 0.0
        queue = self._queue(graphs, sizes)
        for count, (_, worth, size) in enumerate(queue, 1):
            rows, steps = rows + size, steps + worth
            value = steps - rate * (costs[rows] - costs[roots])
            if value > best:
                best, best_count, best_rows, best_steps = value, count, rows, steps
        self._expected, self._pass_ms = 1 + best_steps / prompts, self._base_ms + drafts + costs[best_rows] - costs[roots]
        taken = [1] * prompts
        for owner, _, _ in queue[:best_count]:
            taken[owner] += 1
        return taken

    def observe(self, graphs: Sequence[DraftGraph], accepted: Sequence[int]) -> None:
        """Correct the reach and enter the pass in the account."""
        used = max(map(len, graphs))
        if used > 1:
            self.calibration.observe(graphs, accepted)
        steps = 1 + sum(accepted) / len(graphs)
        if self.account:
            self.account.book(self._drafts > 0, used > 1, steps, self._expected, self._pass_ms, self._base_ms)
        if self._drafts:
            self._used = max(0.9 * self._used, used)
        self._drafts, self._tries = 0, False

    def _queue(self, graphs: Sequence[DraftGraph], sizes: Sequence[list[int]]) -> list[tuple[int, float, int]]:
        """Return (graph, corrected reach, rows) of all guesses: best first, but none before an earlier one of its graph."""
        guesses: list[list[tuple[int, float, int]]] = []
        for owner, (graph, size) in enumerate(zip(graphs, sizes, strict=True)):
            if len(size) > 1:
                worth = self.calibration.correct(graph)
                guesses.append([(owner, w, s) for w, s in zip(worth, size[1:], strict=True)])
        if len(guesses) == 1:
            return guesses[0]
        ranked = [pair for own in guesses for pair in zip(_densities(own), own, strict=True)]
        ranked.sort(key=lambda pair: -pair[0])
        return [guess for _, guess in ranked]


class _Costs:
    """Milliseconds of passes by rows after the prefix of the day, looked up in lists."""

    def __init__(self, profile: CostProfile) -> None:
        self._profile = profile
        self._curves = profile.curves(2 * MOST_NODES)
        self._prefix, self._costs = math.nan, [0.0]
        self._paying: dict[tuple[int, int], int] = {}

    def after(self, prefix: float, rows: int) -> list[float]:
        """Return the milliseconds after a prefix by rows, from 0 to so many at least."""
        if rows > self._curves.shape[1]:
            self._curves, self._prefix = self._profile.curves(2 * rows), math.nan
        if prefix != self._prefix:
            self._costs = [0.0, *self._profile.between(self._curves, prefix).tolist()]
            self._prefix, self._paying = prefix, {}
        return self._costs

    def most_that_pay(self, most: int, prompts: int) -> int:
        """Return how many nodes of each prompt give the most steps per millisecond if every guess is right, after the last prefix."""
        if (most, prompts) not in self._paying:
            costs = self.after(0.0 if math.isnan(self._prefix) else self._prefix, most * prompts)
            host_ms = prompts * self._profile.host_ms
            best = max(range(1, most + 1), key=lambda nodes: nodes / (costs[nodes * prompts] + host_ms))
            self._paying[most, prompts] = best
        return self._paying[most, prompts]


def _densities(guesses: Sequence[tuple[int, float, int]]) -> list[float]:
    """Return what each guess is worth by row, never rising along its graph: a good one behind a poor one shares its place."""
    dense = [worth / rows for _, worth, rows in guesses]
    if any(later > before for before, later in pairwise(dense)):
        dense = [-d for d in isotonic([-d for d in dense]).tolist()]
    return dense
