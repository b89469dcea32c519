"""What is learned while decoding: what a drafter's reach is worth, and whether drafting gains time.

Example: `Account.open(profile, most=32, prompts=1, prefix=64).pays`.
"""

from collections.abc import Sequence

from spot_dlm.budget.profile import CostProfile
from spot_dlm.draft_graph import DraftGraph

_HOPED = 1.2  # what drafting is believed to gain before anything is known
_MEMORY = 0.98  # of what was observed, kept from pass to pass: about the last 50 passes count


class Calibration:
    """What a drafter's reach is worth: guesses accepted / expected by depth, of recent passes with guesses.

    Depths that were seldom evaluated follow the overall ratio, and that begins above one: a drafter that understates is tried as well.
    Plain lists: a pass has few guesses, and this runs once a pass.

    Args:
        depths: deeper guesses count as of this depth.
        reached: share of walks that arrived at depth 1, 2, ... in measurements; with the first graph's reach that is a first belief.
    """

    PRIOR, HOPE = 4.0, 1.2  # walks that a belief before any observation counts as, and that belief

    def __init__(self, depths: int, reached: Sequence[float] = ()) -> None:
        self._deepest, self._reached = depths, reached
        self._expected, self._accepted = [0.0] * (depths + 1), [0.0] * (depths + 1)
        self._walks, self._overall = 0.0, self.HOPE
        self._weight = 1.0  # of an observation: it grows, which makes the earlier ones fade

    def correct(self, graph: DraftGraph) -> list[float]:
        """Return the corrected reach of the guesses."""
        depths, reach = self._depths(graph), graph.reach.tolist()[1:]
        if self._reached:
            self._believe(depths, reach)
        prior = self.PRIOR * self._weight
        return [
            min(1.0, r * (prior * self._overall + self._accepted[d]) / (prior + self._expected[d]))
            for d, r in zip(depths, reach, strict=True)
        ]

    def observe(self, graphs: Sequence[DraftGraph], accepted: Sequence[int]) -> None:
        """Take note of a pass with guesses."""
        self._weight /= _MEMORY
        for graph, count in zip(graphs, accepted, strict=True):
            if len(graph) > 1:
                self._walks += self._weight  # the depths of one walk end together, so it is one observation of the overall ratio
                for depth, reach in zip(self._depths(graph), graph.reach.tolist()[1:], strict=True):
                    self._expected[depth] += self._weight * reach
                for depth in range(1, min(count, self._deepest) + 1):
                    self._accepted[depth] += self._weight
        self._update()

    def _believe(self, depths: list[int], reach: list[float]) -> None:
        """Let the measured walks have had a graph like this one."""
        expected = [0.0] * (self._deepest + 1)
        for d, r in zip(depths, reach, strict=True):
            expected[d] += r
        for d, share in enumerate(self._reached[: self._deepest], 1):
            if expected[d] > 0:
                self._expected[d] += self.PRIOR * expected[d]
                self._accepted[d] += self.PRIOR * share
        self._walks, self._reached = self.PRIOR, ()
        self._update()

    def _update(self) -> None:
        seen = sum(self._accepted) / max(sum(self._expected), 1e-9)
        prior = self.PRIOR * self._weight
        self._overall = (prior * self.HOPE + self._walks * seen) / (prior + self._walks)
        if self._weight > 1e6:
            self._expected, self._accepted = ([v / self._weight for v in values] for values in (self._expected, self._accepted))
            self._walks, self._weight = self._walks / self._weight, 1.0

    def _depths(self, graph: DraftGraph) -> list[int]:
        first, *others = graph.steps.tolist()
        return [min(step - first, self._deepest) for step in others]


class Account:
    """Whether drafting pays: what it gains over standard decoding, and the time that it may lose while that is found out.

    The account holds passes of standard decoding. Every pass earns a hundredth, and drafting adds what it gained or lost. While
    drafting may well gain and the account is not empty it goes on. Passes without a guess make it due to be tried: after waits that
    double, a few passes in a row, and only if the account can bear that nothing is accepted.

    Args:
        steps: steps of a drafting pass, believed before any was seen.
        pass_ms: its milliseconds.
        base_ms: milliseconds of a pass of standard decoding.
        measured: whether that was measured, or is a mere hope.
    """

    PRIOR = 4.0  # passes that the belief counts as
    EARNED, MOST, RISKED = 0.01, 8.0, 0.2  # of every pass; credit at most, and the share of what was saved that it may hold above that
    WAIT, LONGEST_WAIT, TRIES = 4, 64, 4  # passes
    DOUBT = 0.5  # of a single pass, about half its standard deviation
    LEAST = 1.05  # gain worth drafting for: measured costs are not exact, and nobody is to lose by them

    def __init__(self, steps: float, pass_ms: float, base_ms: float, measured: bool) -> None:
        self._steps, self._expected, self._pass_ms = self.PRIOR * steps, self.PRIOR * steps, self.PRIOR * pass_ms
        self._passes, self._base_ms = self.PRIOR, self.PRIOR * base_ms  # all of passes with drafts, fading
        self.credit = self.MOST if measured and self.gain > 1 else self.MOST / 4
        self._saved = 0.0
        self._idle, self._wait, self._left = 0, self.WAIT, 0

    @classmethod
    def open(cls, profile: CostProfile, most: int, prompts: int, prefix: float) -> "Account":
        """Begin with what the profile's own drafts would give so many prompts after such a prefix; with a hope where it has none.

        The best of their budgets up to `most` nodes of each prompt counts.
        """
        base_ms = profile.cost(prompts, prefix) + prompts * profile.host_ms
        tried = [
            (s, profile.cost(n * prompts, prefix) + prompts * (profile.host_ms + profile.drafting(n)))
            for n, s in profile.steps_per_pass
            if 1 < n <= most
        ]
        if not tried:
            return cls(_HOPED, base_ms, base_ms, measured=False)
        return cls(*max(tried, key=lambda pair: pair[0] / pair[1]), base_ms, measured=True)

    @property
    def gain(self) -> float:
        """Steps per millisecond of drafting over those of standard decoding."""
        return self._steps * self._base_ms / (self._pass_ms * self._passes)

    @property
    def expected_gain(self) -> float:
        """The same by what was expected of the guesses, which varies less; at least 1, for nobody has to draft."""
        return max(1.0, self._expected * self._base_ms / (self._pass_ms * self._passes))

    @property
    def pays(self) -> bool:
        """Whether drafting gains, or may for all that is known: the fewer the passes, the greater the doubt."""
        return self.credit > 0 and self.gain * (1 + self.DOUBT / self._passes**0.5) > self.LEAST

    @property
    def is_due(self) -> bool:
        """Whether guesses are due to be tried."""
        return (self._left > 0 or self._idle >= self._wait) and self.credit >= self._pass_ms / self._base_ms - 1

    def book(self, drafted: bool, guessed: bool, steps: float, expected: float, pass_ms: float, base_ms: float) -> None:
        """Enter a pass.

        Args:
            drafted: whether the drafter was run.
            guessed: whether guesses were evaluated.
            steps: steps of each prompt.
            expected: steps that were expected.
            pass_ms: milliseconds that the pass took by the profile.
            base_ms: those of the same pass without drafting.
        """
        change = self.EARNED * steps
        if drafted:
            self._steps = _MEMORY * self._steps + steps
            self._expected = _MEMORY * self._expected + expected
            self._pass_ms = _MEMORY * self._pass_ms + pass_ms
            self._passes = _MEMORY * self._passes + 1
            self._base_ms = _MEMORY * self._base_ms + base_ms
            saved = steps - pass_ms / base_ms
            self._saved += saved
            change += saved
        self.credit = min(self.credit + change, self.MOST + self.RISKED * max(0.0, self._saved))
        if not guessed:
            self._idle += 1
            return
        if self._left:
            self._left -= 1
        elif self._idle >= self._wait:
            self._wait, self._left = min(2 * self._wait, self.LONGEST_WAIT), self.TRIES - 1
        if self.pays:
            self._wait, self._left = self.WAIT, 0
        self._idle = 0
