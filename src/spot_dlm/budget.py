"""How many guesses a pass evaluates: a fixed number, or as many as pay by the measured cost of a pass (method.md section 7).

`CostProfile` says what a pass, a draft and the loop around them cost on this machine (measured in `tune`); `AutoBudget` weighs that
against what the guesses are worth. It reads no clock: the decisions follow from the profile and the decoded data alone. Budgets decide
the time only, never the tokens. Knows nothing of how anything is measured or decoded.

Example: `AutoBudget(profile).allot([graph], [prefix.length])` is `[6]`: the graph's first six nodes are evaluated.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float64, Int64

from spot_dlm.draft_graph import DraftGraph
from spot_dlm.interfaces import DraftContext

MOST_NODES = 32
_MEMORY = 0.98  # of what was observed, kept from pass to pass: about the last 50 passes count
_PRIOR = 4.0  # passes that the first belief counts as
_HOPE = 1.2  # what drafting is believed to gain before anything is known
_ALLOWED = 0.01  # share of the time that unsuccessful drafting may take
_START, _MOST_CREDIT = 2.0, 8.0  # credit in passes of standard decoding: at the start, and at most
_WAITS = (4, 64)  # passes between two tries while drafting does not pay: at first, doubled up to


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


@dataclass(frozen=True)
class CostProfile:
    """What decoding costs with one target and one drafter on one machine, in milliseconds.

    Args:
        rows: measured numbers of rows of a pass, ascending from 1.
        prefixes: measured numbers of cached tokens, ascending.
        pass_ms: of a target pass, for every prefix (outer) and number of rows (inner); made to rise with both, as the true cost does.
        host_ms: of the loop for each pass and prompt, outside target and drafter.
        token_ms: of the loop for each committed step, which no budget changes.
        draft_ms: of one draft by nodes asked for, ascending: (nodes, milliseconds).
        steps_per_pass: steps of one pass that these drafts gave, by nodes: (nodes, steps); the first belief of what drafting is worth.
        drafter: its name.
        device: torch's name of the device.
        dtype: number type of the target.
        threads: CPU threads.
        block_length: tokens of a block.

    Raises:
        ValueError: if the numbers do not fit together.
    """

    rows: tuple[int, ...]
    prefixes: tuple[int, ...]
    pass_ms: tuple[tuple[float, ...], ...]
    host_ms: float = 0.0
    token_ms: float = 0.0
    draft_ms: tuple[tuple[int, float], ...] = ()
    steps_per_pass: tuple[tuple[int, float], ...] = ()
    drafter: str = ""
    device: str = ""
    dtype: str = ""
    threads: int = 1
    block_length: int = 1

    def __post_init__(self) -> None:
        for name in ("rows", "prefixes"):
            values = getattr(self, name)
            if not values or min(values) < 0 or any(b <= a for a, b in pairwise(values)):
                raise ValueError(f"cost profile: {name} must ascend, got {values}")
        curves = np.array(self.pass_ms, dtype=np.float64)
        if self.rows[0] != 1 or curves.shape != (len(self.prefixes), len(self.rows)):
            raise ValueError(f"cost profile: pass_ms must hold {len(self.prefixes)} x {len(self.rows)} numbers, the first of one row")
        others = [self.host_ms, self.token_ms, *(v for pair in self.draft_ms + self.steps_per_pass for v in pair)]
        if not np.isfinite(curves).all() or curves.min() <= 0 or not np.isfinite(others).all() or min(others) < 0:
            raise ValueError("cost profile: milliseconds must be finite, and those of a pass above 0")
        curves = np.apply_along_axis(isotonic, 0, np.apply_along_axis(isotonic, 1, curves))
        object.__setattr__(self, "pass_ms", tuple(tuple(row) for row in curves.tolist()))

    def curve(self, most: int, prefix: float) -> Float64[np.ndarray, " R"]:
        """Return the milliseconds of passes with 1 to `most` rows after `prefix` cached tokens, linear between what was measured."""
        across = np.array([_linear(np.arange(1, most + 1), self.rows, curve) for curve in self.pass_ms])
        if len(self.prefixes) == 1:
            return across[0]
        i = int(np.clip(np.searchsorted(self.prefixes, prefix) - 1, 0, len(self.prefixes) - 2))
        share = max(0.0, (prefix - self.prefixes[i]) / (self.prefixes[i + 1] - self.prefixes[i]))
        return across[i] + share * (across[i + 1] - across[i])

    def cost(self, rows: int, prefix: float) -> float:
        """Return the milliseconds of one pass."""
        return float(self.curve(rows, prefix)[-1])

    def drafting(self, nodes: int) -> float:
        """Return the milliseconds of one draft of so many nodes."""
        return float(np.interp(nodes, *zip(*self.draft_ms, strict=True))) if self.draft_ms else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> "CostProfile":
        """Return the profile that `to_dict` wrote; other keys are ignored.

        Raises:
            ValueError: if a field is missing or no such thing.
        """
        try:
            known = {f.name: _tuples(document[f.name]) for f in fields(cls)}
            return cls(**known)
        except (KeyError, TypeError) as error:
            raise ValueError(f"cost profile: a field is missing or of another type ({error})") from error


def isotonic(values: Sequence[float] | Float64[np.ndarray, " n"]) -> Float64[np.ndarray, " n"]:
    """Return the nearest sequence (least squares) that never falls: neighbours out of order share their mean."""
    pools: list[tuple[float, int]] = []
    for value in values:
        mean, size = float(value), 1
        while pools and pools[-1][0] > mean:
            before, count = pools.pop()
            mean, size = (before * count + mean * size) / (count + size), count + size
        pools.append((mean, size))
    return np.repeat([mean for mean, _ in pools], [size for _, size in pools])


def _linear(at: Int64[np.ndarray, " n"], known: Sequence[int], values: Sequence[float]) -> Float64[np.ndarray, " n"]:
    """Interpolate; beyond the last known point follow the last slope."""
    found = np.interp(at, known, values)
    if len(known) > 1:
        slope = (values[-1] - values[-2]) / (known[-1] - known[-2])
        found += slope * np.maximum(0, at - known[-1])
    return found


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, list | tuple) else value


class AutoBudget:
    """As many guesses as pay; none where drafting would be slower than standard decoding.

    Three things are learned while decoding and kept for the whole run: what the drafter's reach is worth (accepted / expected, by
    depth), what drafting gains over standard decoding, and an account of the time that it gained or lost. Drafting goes on while it gains
    and the account is not empty; else it is tried again from time to time. The account earns 1 % of the time and pays for failed
    tries, so that by the profile no run is slower than standard decoding by more than 1 % and two passes.

    Args:
        profile: measured milliseconds.
        most: nodes of one prompt at most.
    """

    def __init__(self, profile: CostProfile, most: int = MOST_NODES) -> None:
        if most < 1:
            raise ValueError(f"most={most} must be at least 1")
        self.profile, self.most = profile, most
        base = profile.cost(1, profile.prefixes[0]) + profile.host_ms
        steps, pass_ms = self._believed(base)
        self._gain = _PRIOR * np.array([steps, pass_ms, 1.0, base])  # steps and ms of drafting; steps and ms of standard decoding
        self._expected, self._accepted = np.zeros(most + 1), np.zeros(most + 1)
        self._credit = _START  # in passes of standard decoding
        self._waited, self._wait = 0, _WAITS[0]
        self._used = 8.0  # nodes that recent passes evaluated, at most
        self._offered, self._drafts = 1, 0  # of the coming pass
        self._ratio = np.ones(most + 1)
        self._pass_ms = self._base_ms = 0.0
        self._curve: tuple[float, Float64[np.ndarray, " R"]] = (-1.0, np.zeros(0))

    def limits(self, contexts: Sequence[DraftContext]) -> list[int]:
        """Offer as many nodes as recent passes could use, or 1 where drafting does not pay or nothing can be guessed."""
        possible = [len(c.root.masked) > (0 if c.crosses else 1) for c in contexts]
        self._drafts = sum(possible) if self._pays or self._may_try else 0
        self._offered = self._offer(len(contexts)) if self._drafts else 1
        return [self._offered if some and self._drafts else 1 for some in possible]

    def allot(self, graphs: Sequence[DraftGraph], prefixes: Sequence[int]) -> list[int]:
        """Evaluate, best first over all graphs, the number of nodes that gives the most steps per millisecond."""
        prompts, roots = len(graphs), sum(int(g.rows[0]) for g in graphs)
        reach = [np.minimum(1.0, g.reach[1:] * self._ratio[np.minimum(g.depths[1:], self.most)]) for g in graphs]
        rows = [g.rows[1:] for g in graphs]
        owner = np.repeat(np.arange(prompts), [len(r) for r in reach])
        worth, size = np.concatenate(reach), np.concatenate(rows)
        if prompts > 1:
            order = np.argsort(-np.concatenate([_densities(r, s) for r, s in zip(reach, rows, strict=True)]), kind="stable")
            owner, worth, size = owner[order], worth[order], size[order]
        total = roots + np.concatenate(([0], np.cumsum(size)))
        curve = self._costs(int(total[-1]), float(np.mean(prefixes)))
        fixed = prompts * self.profile.host_ms
        pass_ms = curve[total - 1] + fixed + self._drafts * self.profile.drafting(self._offered)
        steps = prompts + np.concatenate(([0.0], np.cumsum(worth)))
        best = int(np.argmax(steps / pass_ms))
        self._pass_ms, self._base_ms = float(pass_ms[best]), float(curve[roots - 1] + fixed)
        taken: list[int] = np.bincount(owner[:best], minlength=prompts).tolist()
        return [1 + count for count in taken]

    def observe(self, graphs: Sequence[DraftGraph], accepted: Sequence[int]) -> None:
        """Correct the reach, the gain of drafting and the account."""
        prompts, steps = len(graphs), len(graphs) + sum(accepted)
        self._expected *= _MEMORY
        self._accepted *= _MEMORY
        for graph, count in zip(graphs, accepted, strict=True):
            if len(graph) > 1:
                depths = np.minimum(graph.depths[1:], self.most)
                expected = np.bincount(depths, graph.reach[1:], minlength=self.most + 1)
                self._expected += expected
                self._accepted[1 : count + 1] += 1
        overall = (_PRIOR + self._accepted.sum()) / (_PRIOR + self._expected.sum())
        self._ratio = (_PRIOR * overall + self._accepted) / (_PRIOR + self._expected)
        earned = _ALLOWED * steps / prompts
        if self._drafts:
            self._gain = _MEMORY * self._gain + [steps, self._pass_ms, prompts, self._base_ms]
            earned += steps / prompts - self._pass_ms / self._base_ms
            self._used = max(0.9 * self._used, *(len(g) for g in graphs))
            self._waited = 0
            self._wait = _WAITS[0] if self._pays else min(2 * self._wait, _WAITS[1])
        else:
            self._waited += 1
        self._credit = min(self._credit + earned, _MOST_CREDIT)
        self._drafts = 0

    @property
    def gain(self) -> float:
        """Steps per millisecond of drafting, as believed now, over those of standard decoding."""
        steps, pass_ms, base_steps, base_ms = self._gain
        return float(steps / pass_ms / (base_steps / base_ms))

    @property
    def _pays(self) -> bool:
        return self.gain > 1 and self._credit > 0

    @property
    def _may_try(self) -> bool:
        """Whether it is time to try again, and the account can bear that nothing is accepted."""
        _, pass_ms, _, base_ms = self._gain
        return self._waited >= self._wait and self._credit >= pass_ms / base_ms - 1

    def _offer(self, prompts: int) -> int:
        """Half as many again as recent passes used, and never more than pay if every guess is right."""
        prefix, curve = self._curve
        curve = self._costs(self.most * prompts, max(prefix, 0.0))
        nodes = np.arange(1, self.most + 1)
        at_best = nodes / (curve[nodes * prompts - 1] + prompts * self.profile.host_ms)
        return max(2, min(int(1.5 * self._used) + 1, self.most, int(np.argmax(at_best)) + 1))

    def _costs(self, rows: int, prefix: float) -> Float64[np.ndarray, " R"]:
        """Return the milliseconds by rows (from 1), at least so many; kept while the prefix stays."""
        known, curve = self._curve
        if prefix != known or rows > len(curve):
            curve = self.profile.curve(max(rows, 2 * self.most), prefix)
            self._curve = (prefix, curve)
        return curve

    def _believed(self, base_ms: float) -> tuple[float, float]:
        """Return steps and milliseconds of a drafting pass before any was seen: the best of the profile's drafts, else a hope."""
        profile, prefix = self.profile, self.profile.prefixes[0]
        measured = [
            (s, profile.cost(n, prefix) + profile.host_ms + profile.drafting(n)) for n, s in profile.steps_per_pass if 1 < n <= self.most
        ]
        hoped = _HOPE, base_ms
        return max(measured, key=lambda pair: pair[0] / pair[1], default=hoped)


def _densities(reach: Float64[np.ndarray, " n"], rows: Int64[np.ndarray, " n"]) -> Float64[np.ndarray, " n"]:
    """Return what each node is worth by row, never rising along a graph: a good node behind a poor one shares its place."""
    dense = reach / rows
    if (dense[1:] > dense[:-1]).any():
        dense = -isotonic(-dense)
    return dense
