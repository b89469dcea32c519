"""How many guesses a pass evaluates: a fixed number, or as many as pay by the measured cost of a pass (method.md section 7).

`AutoBudget` weighs what guesses are worth against what they cost. It reads no clock: its decisions follow from the profile and the decoded
data alone.

Example: `AutoBudget(profile).allot([graph], [prefix.length])` is `[6]`: the graph's first six nodes are evaluated.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float64, Int64

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
    """

    def __init__(self, profile: CostProfile, most: int = MOST_NODES) -> None:
        if most < 1:
            raise ValueError(f"most={most} must be at least 1")
        self.profile, self.most = profile, most
        self.calibration, self.account = Calibration(most), Account.open(profile, most)
        self._drafting = [profile.drafting(nodes) for nodes in range(most + 1)]
        self._used = float(min(most, _FIRST_NODES))  # nodes that recent passes evaluated at most
        self._offered, self._drafts, self._tries = 1, 0, False  # of the coming pass: nodes offered, prompts drafted for, as a try
        self._expected = self._pass_ms = self._base_ms = 0.0
        self._prefix, self._costs = -1.0, np.zeros(0)

    def limits(self, contexts: Sequence[DraftContext]) -> list[int]:
        """Offer twice what recent passes used, or 1 where drafting does not pay or nothing can be guessed."""
        possible = [len(c.root.masked) > (0 if c.crosses else 1) for c in contexts]
        self._tries = self.account.is_due
        self._drafts = sum(possible) if self._tries or self.account.pays else 0
        if not self._drafts:
            return [1] * len(contexts)
        self._offered = self._offer(len(contexts))
        return [self._offered if some else 1 for some in possible]

    def allot(self, graphs: Sequence[DraftGraph], prefixes: Sequence[int]) -> list[int]:
        """Evaluate, best first over all graphs, as many guesses as bring most beyond what their time brings in an average pass.

        Over a run that gives the most steps per millisecond; the best ratio of each pass alone would spend too much on poor guesses.
        """
        prompts, roots, rows = len(graphs), 0, 0
        for graph in graphs:
            each = graph.rows
            roots, rows = roots + int(each[0]), rows + int(each.sum())
        costs = self._curve(rows, sum(prefixes) / prompts)
        host = prompts * self.profile.host_ms
        self._base_ms = float(costs[roots]) + host
        drafts = self._drafts * self._drafting[self._offered]
        self._pass_ms, self._expected = self._base_ms + drafts, 1.0
        taken = [1] * prompts
        if rows > roots:
            owner, worth, size = self._queue(graphs)
            steps, pass_ms = prompts + np.cumsum(worth), costs[roots + np.cumsum(size)] + host + drafts
            rate = self.account.expected_gain * prompts / self._base_ms
            best = int((steps - rate * pass_ms).argmax())
            if self._tries or steps[best] - prompts > rate * (pass_ms[best] - self._pass_ms):
                self._pass_ms, self._expected = float(pass_ms[best]), float(steps[best]) / prompts
                taken = [1 + n for n in np.bincount(owner[: best + 1], minlength=prompts).tolist()]
        return taken

    def observe(self, graphs: Sequence[DraftGraph], accepted: Sequence[int]) -> None:
        """Correct the reach and enter the pass in the account."""
        used = max(map(len, graphs))
        if used > 1:
            self.calibration.observe(graphs, accepted)
        steps = 1 + sum(accepted) / len(graphs)
        self.account.book(self._drafts > 0, used > 1, steps, self._expected, self._pass_ms, self._base_ms)
        if self._drafts:
            self._used = max(0.9 * self._used, used)
        self._drafts, self._tries = 0, False

    def _queue(self, graphs: Sequence[DraftGraph]) -> tuple[Int64[np.ndarray, " n"], Float64[np.ndarray, " n"], Int64[np.ndarray, " n"]]:
        """Return all guesses best first, none before an earlier one of its graph: their graph, corrected reach and rows."""
        worth = [self.calibration.correct(graph) for graph in graphs]
        size = [graph.rows[1:] for graph in graphs]
        owner = np.repeat(np.arange(len(graphs)), [len(w) for w in worth])
        if len(graphs) == 1:
            return owner, worth[0], size[0]
        order = np.argsort(-np.concatenate([_densities(w, s) for w, s in zip(worth, size, strict=True)]), kind="stable")
        return owner[order], np.concatenate(worth)[order], np.concatenate(size)[order]

    def _offer(self, prompts: int) -> int:
        """Twice what recent passes used, and never more than pay if every guess is right."""
        costs = self._curve(self.most * prompts, max(self._prefix, 0.0))
        nodes = np.arange(1, self.most + 1)
        at_best = nodes / (costs[nodes * prompts] + prompts * self.profile.host_ms)
        return max(2, min(int(2 * self._used), self.most, int(at_best.argmax()) + 1))

    def _curve(self, rows: int, prefix: int | float) -> Float64[np.ndarray, " R"]:
        """Return the milliseconds by rows (from 0), at least so many; kept while the prefix stays."""
        if prefix != self._prefix or rows >= len(self._costs):
            self._costs = np.concatenate(([0.0], self.profile.curve(max(rows, 2 * self.most), prefix)))
            self._prefix = prefix
        return self._costs


def _densities(worth: Float64[np.ndarray, " n"], rows: Int64[np.ndarray, " n"]) -> Float64[np.ndarray, " n"]:
    """Return what each node is worth by row, never rising along a graph: a good node behind a poor one shares its place."""
    dense = worth / rows
    return -isotonic(-dense) if (dense[1:] > dense[:-1]).any() else dense
