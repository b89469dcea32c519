"""The one definition of a denoising step: unmask rules and `denoise` (docs/decoding-rules.md; method.md section 2).

`denoise` maps a block state, the target's logits for its masked positions and the noise of its step to the next state. A rule may draw
the order too (`order_at_random`), with noise that is known as far ahead as that of tokens. Every decoder,
drafter and test that needs "what the target does next" calls it. Knows nothing of targets, drafts or loops.

Example: `denoise(state, logits, UnmaskRule(), Sampling(temperature=1.0), CoupledNoise(seed=0, sequence=0)).state`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Literal, get_args

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor

from spot_dlm.confidence import Confidence, Resolution, measure, round_to
from spot_dlm.noise import CoupledNoise, draw_each
from spot_dlm.race import descending, first_argmax, on_host
from spot_dlm.schedule import Schedule
from spot_dlm.state import BlockState

Select = Literal["top", "threshold", "left_to_right", "leftmost_above", "arrival"]
Source = Literal["raw", "tempered", "filtered"]


MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-4, 1e4
"""Below the first, logits divided by the temperature overflow float32 (use 0); above the second every token is as likely."""


def _require(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is unknown; choose one of {', '.join(allowed)}")


@dataclass(frozen=True)
class UnmaskRule:
    """Which masked positions a step commits; the default is standard decoding: the one most confident position.

    Args:
        select: "top" the most confident positions, "threshold" all above it and the most confident ones at least, "left_to_right" the
            first ones, "leftmost_above" the first one above the threshold, "arrival" all whose time, drawn for each position alone, is
            next (Dream's "origin"; the schedule must be "timesteps").
        num_per_step: positions of a step, where no schedule says it.
        threshold: of the natural confidence.
        strict: whether a confidence must be above the threshold, or may equal it.
        confidence: what is compared.
        source: the distribution it is taken from: raw logits, divided by the temperature, or also filtered by top-k and top-p.
        resolution: the number format in which confidences are compared.
        noise_step: whether the step is part of the noise's key.
        schedule: positions of every step of a block instead of `num_per_step`.
        span: positions are committed in spans of so many, one after the other (Fast-dLLM v2's small blocks); 0: the whole block.
        late_ids: tokens that are chosen as any other, but with the least confidence, and left out of the others' (LLaDA's
            confidence_eos_eot_inf).
        suppressed_ids: tokens that are never chosen (LLaDA's logits_eos_inf).
        order_temperature: of select="top": 0 takes the most confident positions; else they are drawn without replacement, with
            probabilities softmax(confidence / order_temperature) (Dream's alg_temp); infinite: every order is as likely (LLaDA's random
            remasking).

    Raises:
        ValueError: naming the field, the value and what is allowed.
    """

    select: Select = "top"
    num_per_step: int = 1
    threshold: float = 0.9
    strict: bool = True
    confidence: Confidence = "probability"
    source: Source = "raw"
    resolution: Resolution = "float32"
    noise_step: bool = True
    schedule: Schedule | None = None
    span: int = 0
    late_ids: tuple[int, ...] = ()
    suppressed_ids: tuple[int, ...] = ()
    order_temperature: float = 0.0

    def __post_init__(self) -> None:
        _require("select", self.select, get_args(Select))
        _require("confidence", self.confidence, get_args(Confidence))
        _require("source", self.source, get_args(Source))
        _require("resolution", self.resolution, get_args(Resolution))
        if self.num_per_step < 1:
            raise ValueError(f"num_per_step={self.num_per_step} must be at least 1")
        if self.late_ids and self.source != "raw":
            raise ValueError(f"late_ids need source='raw', not {self.source!r}")
        if self.span < 0:
            raise ValueError(f"span={self.span} must be at least 0 (0 = the whole block)")
        if self.schedule is not None and (self.num_per_step > 1 or self.span or self.select == "leftmost_above"):
            raise ValueError("a schedule says how many positions a step commits: leave num_per_step and span, and select='leftmost_above'")
        if self.num_per_step > 1 and self.select not in ("top", "left_to_right"):
            raise ValueError(f"num_per_step={self.num_per_step} has no meaning with select={self.select!r}; leave it at 1")
        low, high = (-math.inf, 0.0) if self.confidence == "entropy" else (0.0, 1.0)
        if not math.isfinite(self.threshold):
            raise ValueError(f"threshold={self.threshold} must be finite")
        if self.select in ("threshold", "leftmost_above") and not low <= self.threshold <= high:
            raise ValueError(f"threshold={self.threshold} can never decide: confidence {self.confidence!r} lies in {low:g}..{high:g}")
        if self.select == "arrival" and (self.schedule is None or self.schedule.kind != "timesteps"):
            raise ValueError("select='arrival' draws a position's time from the schedule 'timesteps': give that one")
        temperature = self.order_temperature
        if not (temperature in (0, math.inf) or MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE):
            raise ValueError(
                f"order_temperature={temperature:.6g} must be 0 (by confidence), infinite (random) or between "
                f"{MIN_TEMPERATURE:g} and {MAX_TEMPERATURE:g}"
            )
        if temperature and self.select != "top":
            raise ValueError(f"order_temperature={temperature:.6g} has no meaning with select={self.select!r}, only with 'top'")
        if temperature and self.late_ids:
            raise ValueError(
                f"late_ids have no meaning with order_temperature={temperature:.6g}: no token goes last in an order that is drawn"
            )
        by_token = self.confidence == "probability" and self.select not in ("left_to_right", "arrival") and temperature < math.inf
        if not self.noise_step and by_token:
            raise ValueError(
                "noise_step=False would change the law of the output: the order looks at the sampled token "
                "(confidence='probability'); use max_probability, margin, entropy or left_to_right, or keep the step in the noise"
            )

    @property
    def draws_order(self) -> bool:
        """Whether noise has a part in the order of positions, or all of it."""
        return self.order_temperature > 0 or self.select == "arrival"

    def count(self, state: BlockState, ahead: int = 0) -> int:
        """Return how many positions the step after `ahead` more steps commits at least (fewer where fewer are masked)."""
        if self.select == "arrival":
            return 1
        if self.schedule is None:
            return self.num_per_step
        counts = self.schedule.counts(state.num_begun, len(state.canvas))
        return counts[min(state.step + ahead, len(counts) - 1)]

    def is_over(self, state: BlockState) -> bool:
        """Whether a schedule has no step left for a state, whatever is still masked."""
        if self.schedule is None or self.select == "arrival":
            return False
        return state.step >= len(self.schedule.counts(state.num_begun, len(state.canvas)))

    def idle(self, end: BlockState) -> int:
        """Return the official loop's passes that commit nothing, in a block that ended with a state."""
        if self.schedule is None:
            return 0
        return self.schedule.steps - end.step if self.select == "arrival" else self.schedule.idle(end.num_begun, len(end.canvas))

    @cached_property
    def rounded_threshold(self) -> np.float32:
        """The threshold at the rule's resolution, as confidences meet it."""
        return np.float32(round_to(torch.tensor(self.threshold, dtype=torch.float32), self.resolution).item())


@dataclass(frozen=True)
class Sampling:
    """How a position's token is drawn: temperature (0 = argmax), top-k (0 = off), top-p (1 = off), seed.

    Raises:
        ValueError: naming the field, the value and what is allowed.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (self.temperature == 0 or MIN_TEMPERATURE <= self.temperature <= MAX_TEMPERATURE):
            raise ValueError(f"temperature={self.temperature:.6g} must be 0 or between {MIN_TEMPERATURE:g} and {MAX_TEMPERATURE:g}")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k} must be at least 0 (0 = off)")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1 (1 = off)")


@dataclass(frozen=True)
class Candidates:
    """For every masked position: the token it would receive and its confidence.

    `rank` orders positions (higher first) and `natural` (p, p1 - p2 or sum p log p) meets thresholds, both at the rule's
    resolution; `fine` is the ranking value before any rounding. Where a rule draws the order, a transition's ranks hold that noise.
    """

    positions: Int64[np.ndarray, " m"]
    tokens: Int64[np.ndarray, " m"]
    rank: Float32[np.ndarray, " m"]
    natural: Float32[np.ndarray, " m"]
    fine: Float32[np.ndarray, " m"]

    def take(self, at: Bool[np.ndarray, " m"] | slice) -> "Candidates":
        """Return the candidates that a mask or a slice picks."""
        return Candidates(self.positions[at], self.tokens[at], self.rank[at], self.natural[at], self.fine[at])


@dataclass(frozen=True)
class Transition:
    """One application of F: the state before, what was committed, the state after, and all candidates it chose from."""

    before: BlockState
    state: BlockState
    positions: Int64[np.ndarray, " k"]
    tokens: Int64[np.ndarray, " k"]
    candidates: Candidates


def temper(logits: Float[Tensor, "m V"], temperature: float) -> Float[Tensor, "m V"]:
    """Divide by the temperature in float32; by a tensor, because CUDA multiplies by the reciprocal of a Python number."""
    return logits if temperature in (0, 1) else logits / logits.new_full((), temperature)


def score_tokens(logits: Float[Tensor, "m V"], filtered: Float[Tensor, "m V"], noise: Float[Tensor, "m V"] | None) -> Float[Tensor, "m V"]:
    """Return what the choice of a token maximises: the logits themselves, or filtered logits minus the noise."""
    return logits if noise is None else filtered - noise


def filter_logits(logits: Float[Tensor, "m V"], top_k: int, top_p: float) -> Float[Tensor, "m V"]:
    """Set logits outside top-k, then outside top-p, to minus infinity; ties keep the lower id; the best token always stays."""
    if not top_k and top_p >= 1:
        return logits
    index = descending(logits)
    ordered = logits.gather(-1, index)
    if 0 < top_k < logits.shape[-1]:
        ordered[..., top_k:] = -torch.inf
    if top_p < 1:
        probabilities = torch.softmax(ordered, dim=-1)
        before = torch.cumsum(probabilities, dim=-1) - probabilities
        removed = before >= top_p
        removed[..., 0] = False
        ordered = ordered.masked_fill(removed, -torch.inf)
    return torch.empty_like(logits).scatter_(-1, index, ordered)


Draw = Callable[[Int64[np.ndarray, " m"], Float32[Tensor, "m V"], Int64[Tensor, " m"]], Int64[Tensor, " m"]]
"""Takes positions, filtered logits and the first argmax of each row; returns the token that each position draws."""


def propose(
    positions: Int64[np.ndarray, " m"],
    logits: Float[Tensor, "m V"],
    rule: UnmaskRule,
    sampling: Sampling,
    noise: Float[Tensor, "m V"] | Draw | None,
) -> Candidates:
    """Choose every masked position's token and confidence; row i of `logits` and `noise` belongs to `positions[i]`.

    Rows are independent of each other to the bit. `noise` holds its values or draws with them; it is None exactly at temperature 0.

    Raises:
        ValueError: if a logit is NaN or plus infinity, a row has no finite logit, or rows are missing.
    """
    if len(logits) != len(positions):
        raise ValueError(f"the target gave {len(logits)} rows of logits for {len(positions)} masked positions")
    logits, lone = logits.to(torch.float32).contiguous(), len(positions) == 1
    if lone:  # it would be summed in another order, as a reduction to a scalar
        logits = logits.repeat(2, 1)
    if (rule.suppressed_ids or rule.late_ids) and not bool((logits < torch.inf).all()):  # nothing below would see these tokens' logits
        raise ValueError(_bad_logits(positions, logits))
    if rule.suppressed_ids:
        logits = logits.index_fill(1, torch.tensor(rule.suppressed_ids, device=logits.device), -torch.inf)
    tempered = temper(logits, sampling.temperature)
    filtered = filter_logits(tempered, sampling.top_k, sampling.top_p)
    top = tokens = first_argmax(tempered)  # and of `filtered`: the best token always stays
    if callable(noise):
        tokens = noise(positions, filtered[:1], top[:1]).expand(2) if lone else noise(positions, filtered, top)
    elif noise is not None:
        tokens = first_argmax(filtered - noise)
    if int(tokens.max()) >= logits.shape[-1]:
        raise ValueError(_bad_logits(positions, logits))
    source = {"raw": logits, "tempered": tempered, "filtered": filtered}[rule.source]
    known = top if rule.source != "raw" or tempered is logits else None
    if rule.late_ids:
        source, known = source.index_fill(1, torch.tensor(rule.late_ids, device=source.device), -torch.inf), None
    ids, fine, natural = _to_host(len(positions), tokens, *measure(source, tokens, rule.confidence, known), rule.resolution)
    if math.isnan(fine[fine.argmax()]):  # which finds NaN first
        raise ValueError(_bad_logits(positions, logits))
    return Candidates(positions, ids, fine if rule.resolution == "float32" else natural, natural, fine)


def _to_host(
    count: int, tokens: Int64[Tensor, " m"], fine: Float32[Tensor, " m"], natural: Float32[Tensor, " m"], resolution: Resolution
) -> tuple[Int64[np.ndarray, " n"], Float32[np.ndarray, " n"], Float32[np.ndarray, " n"]]:
    """Return the first `count` tokens and confidences, the natural ones rounded."""
    natural = round_to(natural, resolution)
    if on_host(fine):
        return tokens.numpy()[:count], fine.numpy()[:count], natural.numpy()[:count]
    table = torch.stack((fine, natural))[:, :count].cpu().numpy()  # one copy for both
    return tokens[:count].cpu().numpy(), table[0], table[1]


def _bad_logits(positions: Int64[np.ndarray, " m"], logits: Float[Tensor, "m V"]) -> str:
    bad = torch.isnan(logits) | (logits == torch.inf)
    bad |= ~torch.isfinite(logits).any(dim=-1, keepdim=True)
    rows = np.flatnonzero(bad.any(dim=-1)[: len(positions)].cpu().numpy())
    named = ", ".join(str(int(positions[r])) for r in rows) or "unknown"
    return f"the target gave NaN or infinite logits (block position {named}); the checkpoint or its dtype is broken"


def select(candidates: Candidates, rule: UnmaskRule, count: int | None = None) -> Int64[np.ndarray, " k"]:
    """Return the indices into `candidates` that the rule commits, best first; ties go to the lower position.

    Args:
        candidates: all masked positions of a block, ascending.
        rule: what is compared, and how.
        count: positions of this step (`UnmaskRule.count`); None takes the rule's `num_per_step`.
    """
    count = rule.num_per_step if count is None else count
    if rule.span:
        spans = candidates.positions // rule.span
        candidates = candidates.take(slice(int(np.searchsorted(spans, spans[0], side="right"))))
    if rule.select == "left_to_right":
        return np.arange(min(count, len(candidates.positions)))
    if rule.select == "top":
        return _best(candidates.rank, count)
    if rule.select == "arrival":
        return np.flatnonzero(candidates.rank == candidates.rank.max())
    threshold = rule.rounded_threshold
    above = np.flatnonzero(candidates.natural > threshold if rule.strict else candidates.natural >= threshold)
    if len(above) < count:
        return _best(candidates.rank, count)
    return above[_best(candidates.rank[above], len(above))] if rule.select == "threshold" else above[:1]


def _best(rank: Float32[np.ndarray, " m"], count: int) -> Int64[np.ndarray, " k"]:
    """Return the places of the `count` highest ranks, best first; ties go to the lower place."""
    return rank.argmax(axis=0, keepdims=True) if count == 1 else np.argsort(-rank, kind="stable")[:count]


def step_noise(
    state: BlockState, positions: Int64[np.ndarray, " m"], vocab_size: int, sampling: Sampling, noise: CoupledNoise
) -> Float[Tensor, "m V"] | None:
    """Return the noise that `state`'s transition uses at `positions`; None at temperature 0."""
    return None if sampling.temperature == 0 else noise.rows(state.block, state.step, positions, vocab_size)


def denoise(state: BlockState, logits: Float[Tensor, "m V"], rule: UnmaskRule, sampling: Sampling, noise: CoupledNoise) -> Transition:
    """Apply one transition F to `state`, given the target's logits for its masked positions in ascending order.

    Raises:
        ValueError: for logits that decide nothing (see `propose`).
    """
    draw = partial(draw_each, [(noise, state.block, state.step, len(state.masked))]) if sampling.temperature > 0 else None
    return commit(state, propose(state.masked, logits, rule, sampling, draw), rule, noise)


def order_at_random(
    natural: Float32[np.ndarray, "D m"],
    rule: UnmaskRule,
    noise: CoupledNoise,
    block: int,
    steps: Sequence[int],
    positions: Int64[np.ndarray, " m"],
) -> Float32[np.ndarray, "D m"]:
    """Return the ranks, higher first, of positions at several steps under a rule that draws the order.

    The highest of confidence / temperature + Gumbel noise are a draw without replacement from the softmax of the first term.

    Args:
        natural: confidences at every step, at the rule's resolution.
        rule: one that `draws_order`.
        noise: of the sequence.
        block: the block's index.
        steps: of the block.
        positions: inside the block.
    """
    if rule.select == "arrival":
        assert rule.schedule is not None
        times = rule.schedule.arrivals(noise.times(block, positions))
        return np.broadcast_to(-times.astype(np.float32), natural.shape)
    drawn = noise.order(block, steps, positions)
    return drawn if math.isinf(rule.order_temperature) else natural / np.float32(rule.order_temperature) + drawn


def commit(state: BlockState, candidates: Candidates, rule: UnmaskRule, noise: CoupledNoise) -> Transition:
    """Commit what the rule selects among `candidates`, which must cover the state's masked positions."""
    if rule.draws_order:
        rank = order_at_random(candidates.natural[None], rule, noise, state.block, [state.step], candidates.positions)[0]
        candidates = replace(candidates, rank=rank, fine=rank)
    chosen = select(candidates, rule, rule.count(state))
    positions, tokens = candidates.positions[chosen], candidates.tokens[chosen]
    return Transition(state, state.commit(positions, tokens), positions, tokens, candidates)
