"""The proof of losslessness on one prompt: two trajectories are identical, or this is the first step at which they differ.

A divergence names the two candidates, their gap in rank units (log probability for the default rule) and its class: `tie` (gap 0),
`near-tie` (below 1e-4) or `real`. Knows nothing of commands and files.

Example: `first_divergence(trajectory(target, ids, Root(), params), trajectory(target, ids, Chain(), params), rule)` is None.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from spot_dlm.decode import decode_steps
from spot_dlm.drafters import Root
from spot_dlm.interfaces import DecodeParams, Drafter, Target
from spot_dlm.noise import CoupledNoise
from spot_dlm.sequence import Event, Finished, Pass, Result
from spot_dlm.state import MASKED
from spot_dlm.transition import Transition, UnmaskRule, filter_logits, score_tokens, step_noise, temper

GapClass = Literal["tie", "near-tie", "real"]
NEAR_TIE = 1e-4


@dataclass(frozen=True)
class Trajectory:
    """All transitions of one decode, in order, and its result."""

    transitions: list[Transition]
    result: Result

    @classmethod
    def of(cls, events: Iterable[Event]) -> "Trajectory":
        """Collect the transitions and the result from a decode's events."""
        transitions: list[Transition] = []
        for event in events:
            if isinstance(event, Pass):
                transitions += event.acceptance.transitions
            elif isinstance(event, Finished):
                return cls(transitions, event.result)
        raise ValueError("the events end without a result")


@dataclass(frozen=True)
class Candidate:
    """What one run committed where the other did not: position inside the block, token and its ranking value there."""

    position: int
    token: int
    rank: float


@dataclass(frozen=True)
class Divergence:
    """The first step at which two trajectories differ; a side is None where that run committed less, or had ended."""

    index: int
    block: int
    step: int
    standard: Candidate | None
    speculative: Candidate | None
    gap: float
    kind: GapClass

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for JSON; an infinite gap is null."""
        return asdict(self) | {"gap": self.gap if math.isfinite(self.gap) else None}

    def __str__(self) -> str:
        gap = f"{self.gap:.3g}" if math.isfinite(self.gap) else "none (the states or lengths differ)"
        sides = [("standard", self.standard), ("speculative", self.speculative)]
        named = [f"{n} " + (f"(position {c.position}, token {c.token})" if c else "(nothing)") for n, c in sides]
        return f"block {self.block}, step {self.step}: {named[0]}, {named[1]}, gap {gap}: {self.kind}"


def trajectory(target: Target, prompt: str | Sequence[int], drafter: Drafter, params: DecodeParams) -> Trajectory:
    """Decode one prompt and keep every transition."""
    return Trajectory.of(decode_steps(target, prompt, drafter, params))


def standard_trajectory(target: Target, prompt: str | Sequence[int], params: DecodeParams) -> Trajectory:
    """Decode one prompt without a guess: the reference of every comparison."""
    return trajectory(target, prompt, Root(), replace(params, nodes=1))


def classify(gap: float) -> GapClass:
    """Return the class of a gap in rank units."""
    return "tie" if gap == 0 else "near-tie" if gap < NEAR_TIE else "real"


def same_order(one: Result, two: Result) -> bool:
    """Whether two results have the same tokens committed at the same positions in the same steps, and end alike."""

    def key(result: Result) -> tuple[object, ...]:
        order = [(c.position, c.token, c.block, c.step) for c in result.order]
        return result.token_ids, order, result.finish_reason

    return key(one) == key(two)


def first_divergence(standard: Trajectory, speculative: Trajectory, rule: UnmaskRule) -> Divergence | None:
    """Return where the trajectories part, or None if tokens AND commit order are identical.

    The gap of two tokens at one position is that of their confidences here; `refine` gives that of the scores that decided.
    """
    for index, (ours, theirs) in enumerate(zip(standard.transitions, speculative.transitions, strict=False)):
        if ours.before != theirs.before:
            return _broken(index, ours, theirs)
        if not (np.array_equal(ours.positions, theirs.positions) and np.array_equal(ours.tokens, theirs.tokens)):
            return _divergence(index, ours, theirs, rule)
    index = min(len(standard.transitions), len(speculative.transitions))
    if len(standard.transitions) != len(speculative.transitions):
        longer = max(standard.transitions, speculative.transitions, key=len)[index]
        sides = (longer, None) if len(standard.transitions) > index else (None, longer)
        return _broken(index, *sides)
    if not same_order(standard.result, speculative.result):
        return _broken(index - 1, standard.transitions[-1], speculative.transitions[-1])
    return None


def _committed(transition: Transition | None) -> list[Candidate]:
    if transition is None:
        return []
    at = np.searchsorted(transition.candidates.positions, transition.positions)
    ranks = transition.candidates.fine[at].tolist()
    pairs = zip(transition.positions.tolist(), transition.tokens.tolist(), ranks, strict=True)
    return [Candidate(p, t, r) for p, t, r in pairs]


def _broken(index: int, ours: Transition | None, theirs: Transition | None) -> Divergence:
    """Build the divergence that no rounding explains: other states, another length or another end."""
    either = ours or theirs
    assert either is not None
    first = [next(iter(_committed(t)), None) for t in (ours, theirs)]
    return Divergence(index, either.before.block, either.before.step, first[0], first[1], math.inf, "real")


def _divergence(index: int, ours: Transition, theirs: Transition, rule: UnmaskRule) -> Divergence:
    sides = [_committed(ours), _committed(theirs)]
    pairs = [{(c.position, c.token) for c in side} for side in sides]
    alone = [[c for c in side if (c.position, c.token) not in pairs[1 - i]] for i, side in enumerate(sides)]
    if not any(alone):  # the same commits in another order: the first place where the order differs
        alone = [[a] for a in next((a, b) for a, b in zip(*sides, strict=True) if a.position != b.position)]
    left, right = (next(iter(side), None) for side in alone)
    twin = next(((a, b) for a in alone[0] for b in alone[1] if a.position == b.position), None)
    if twin is not None:
        left, right = twin
        gap = abs(left.rank - right.rank)
    else:
        gap = _position_gap(ours, alone, rule)
    return Divergence(index, ours.before.block, ours.before.step, left, right, gap, classify(gap))


def _position_gap(ours: Transition, alone: list[list[Candidate]], rule: UnmaskRule) -> float:
    """Return how far the reference was from committing the other positions: a rank gap, or the distance to the threshold."""
    seen = ours.candidates
    at = {int(p): i for i, p in enumerate(seen.positions)}
    if any(c.position not in at for side in alone for c in side):
        return math.inf
    gap = math.inf
    if alone[0] and alone[1]:
        gap = float(max(abs(seen.fine[at[a.position]] - seen.fine[at[b.position]]) for a in alone[0] for b in alone[1]))
    if rule.select in ("threshold", "leftmost_above"):
        distances = [abs(_natural(float(seen.fine[at[c.position]]), rule) - _boundary(rule)) for side in alone for c in side]
        crossed = max(distances) if rule.select == "threshold" else min(distances)
        gap = min(gap, crossed)
    return gap


def _natural(fine: float, rule: UnmaskRule) -> float:
    """Return the unrounded natural confidence of an unrounded ranking value."""
    if rule.confidence == "entropy":
        return fine
    return 1 + fine if rule.confidence == "margin" else math.exp(fine)


def _boundary(rule: UnmaskRule) -> float:
    """Return the unrounded confidence at which the comparison with the threshold turns: half a rounding step beside it at bfloat16."""
    threshold = float(rule.rounded_threshold)
    if rule.resolution == "float32" or threshold == 0:
        return threshold
    half = 2.0 ** (math.floor(math.log2(abs(threshold))) - 8)
    return threshold + half if rule.strict else threshold - half


def refine(divergence: Divergence, target: Target, prompt: str | Sequence[int], params: DecodeParams) -> Divergence:
    """Replay standard decoding to the divergent step and take a token gap from the scores that decided (logits minus noise).

    Divergences of position keep their gap: it is already that of the values which were ranked.
    """
    left, right = divergence.standard, divergence.speculative
    if left is None or right is None or left.position != right.position or left.token == right.token:
        return divergence
    scores = _scores_at(target, prompt, params, divergence.index, left.position)
    if scores is None:
        return divergence
    gap = abs(float(scores[left.token]) - float(scores[right.token]))
    gap = math.inf if math.isnan(gap) else gap
    return replace(divergence, gap=gap, kind=classify(gap))


def _scores_at(target: Target, prompt: str | Sequence[int], params: DecodeParams, index: int, position: int) -> Float[Tensor, " V"] | None:
    """Return the scores whose maximum is the token of `position` in standard decoding's transition number `index`."""
    params, seen = replace(params, nodes=1), 0
    for event in decode_steps(target, prompt, Root(), params):
        if not isinstance(event, Pass):
            continue
        if seen < index:
            seen += len(event.acceptance.transitions)
            continue
        state = event.acceptance.transitions[0].before
        row = int(np.searchsorted(state.masked, position))
        logits, sampling = event.acceptance.logits, params.sampling
        noise = CoupledNoise(sampling.seed, params.sequence, params.rule.noise_step, logits.device)
        drawn = step_noise(state, state.masked, logits.shape[-1], sampling, noise)
        filtered = filter_logits(temper(logits, sampling.temperature), sampling.top_k, sampling.top_p)
        return score_tokens(logits, filtered, drawn)[row]
    return None


def rows_are_independent(target: Target, rows: Sequence[int] = (2, 4, 8, 16), seed: int = 0) -> bool:
    """Whether a canvas has the same logits, to the bit, alone and together with others: what exactness rests on.

    Checked on random canvases after no, one and several cached blocks.
    """
    spec, rng = target.spec, np.random.default_rng(seed)
    length = spec.block_length
    for num_blocks in (0, 1, 5):
        if (num_blocks + 1) * length > spec.max_length:
            break
        prefix = target.prefill(rng.integers(0, spec.vocab_size, num_blocks * length), length)
        canvases = rng.integers(0, spec.vocab_size, (max(rows), length))
        masked = rng.random(canvases.shape) < rng.random((max(rows), 1))
        masked[:, -1] = True
        canvases[masked] = MASKED
        alone = [target.evaluate(prefix, canvases[i : i + 1]).packed for i in range(max(rows))]
        for count in rows:
            together = target.evaluate(prefix, canvases[:count])
            if not all(torch.equal(together.of(i), alone[i]) for i in range(count)):
                return False
    return True
