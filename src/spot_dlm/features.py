"""What an order model reads: vocabulary-free features of block states, the same for a live draft and for recorded traces.

A `StateBatch` holds B states of blocks of L positions densely: the last distributions, which are stale for the root (the certain next
state), and the look-ahead with the coming noise (method.md section 6). `encode` turns it into the inputs of `order_model`. Knows
nothing of models, files and targets.

Example: `encode(live_state(context, depths=8)[0], depths=8).positions` has shape [1, L, NUM_POSITION].
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, no_type_check

import numpy as np
from jaxtyping import Float32, Int8, Int16, Int64, UInt64
from numba import njit

from spot_dlm.draft_graph import DraftGraph
from spot_dlm.effects import Effects
from spot_dlm.interfaces import DraftContext, MaskedLogits
from spot_dlm.lookahead import LookAhead, count_places, decide, decision_of, look_ahead
from spot_dlm.outputs import MAX_SURENESS, NUM_TOP, Outputs, read_outputs
from spot_dlm.transition import Transition

FEATURES_VERSION = 1
"""Changes whenever a feature changes its meaning; recorded with every trained model."""
NUM_LOGP = 8
NUM_AHEAD = 8
NUM_POSITION = 64
NUM_LINEAR = 12
NUM_TOKEN = 6
TAIL, COMMITTED, JUST, MASKED = 0, 1, 2, 3
"""Status of a position: prompt, committed earlier, committed by the last transition, masked in the root."""


@dataclass(frozen=True)
class StateBatch:
    """B states, densely; entries of positions without a distribution are zero.

    `effect[j, i]` is the observed change of sureness at i when j is committed and `known[j]` how near the observation was (0: none).
    `fine` is the ranking value by which the last transition judged a position, `past` that of one and two transitions
    earlier (1 where there is none), `age` the transitions since a commit and `commit_fine` its ranking value.
    Look-ahead arrays start at the root's own step: `ahead_fine` and `margin` of the best token, `ahead_rank` what decides the rule's
    order, `agree` whether the best token is the most probable one.
    """

    status: Int8[np.ndarray, "B L"]
    age: Int16[np.ndarray, "B L"]
    commit_fine: Float32[np.ndarray, "B L"]
    logp: Float32[np.ndarray, "B L 8"]
    log_rest: Float32[np.ndarray, "B L"]
    entropy: Float32[np.ndarray, "B L"]
    fine: Float32[np.ndarray, "B L"]
    past: Float32[np.ndarray, "B 2 L"]
    ahead_fine: Float32[np.ndarray, "B D L"]
    ahead_rank: Float32[np.ndarray, "B D L"]
    margin: Float32[np.ndarray, "B D L"]
    agree: Int8[np.ndarray, "B D L"]
    effect: Float32[np.ndarray, "B L L"]
    known: Float32[np.ndarray, "B L"]
    temperature: Float32[np.ndarray, " B"]
    rounded: Int8[np.ndarray, " B"]


@dataclass(frozen=True)
class Encoded:
    """Inputs of an order model: per position, per depth and position for the order, and for the token.

    `sure` is the sureness of every depth's best token, moved by the last commit's effect where that is known; `effect` and `known`
    are those of the root's masked positions, `known_root` that of the last commit.
    """

    positions: Float32[np.ndarray, "B L F"]
    linear: Float32[np.ndarray, "B D L K"]
    token: Float32[np.ndarray, "B D L M"]
    masked: Int8[np.ndarray, "B L"]
    sure: Float32[np.ndarray, "B D L"]
    effect: Float32[np.ndarray, "B L L"]
    known: Float32[np.ndarray, "B L"]
    known_root: Float32[np.ndarray, " B"]
    rounded: Float32[np.ndarray, " B"]


def live_state(context: DraftContext, depths: int, with_effects: bool = True) -> tuple[StateBatch, LookAhead]:
    """Return the one state before a draft, and the look-ahead of the root's masked positions (see `live_states`)."""
    batch, (ahead,) = live_states([context], [depths], with_effects)
    return batch, ahead


def live_states(contexts: Sequence[DraftContext], depths: Sequence[int], with_effects: bool = True) -> tuple[StateBatch, list[LookAhead]]:
    """Return the states before drafts of one block length, and the look-ahead of every root's masked positions.

    Args:
        contexts: what is known before the pass.
        depths: steps to look ahead of each at T > 0 (at T = 0 one serves for all); shorter look-aheads repeat their last step.
        with_effects: read the last pass's nodes; False for models that make no use of them.
    """
    seen = [_look(context, wanted) for context, wanted in zip(contexts, depths, strict=True)]
    size, length, count = len(contexts), len(contexts[0].root.canvas), max(len(ahead.margin) for _, ahead in seen)
    temperature = np.array([c.sampling.temperature for c in contexts], dtype=np.float32)
    batch = _blank(size, length, count, temperature, np.array([c.rule.resolution == "bfloat16" for c in contexts], dtype=np.int8))
    for b, (context, (outputs, ahead)) in enumerate(zip(contexts, seen, strict=True)):
        last, root, commits = context.last, context.root, _commits_of(context)
        for back, transition in enumerate(context.history[-2:-4:-1]):
            batch.past[b, back, transition.candidates.positions] = transition.candidates.fine
        _fill(
            b, root.canvas, root.step, commits.step, commits.fine, last.positions, outputs.positions, outputs.ids, outputs.logp,
            outputs.log_rest, outputs.entropy, last.candidates.fine, ahead.tokens, ahead.fine, ahead.margin, *decision_of(context.rule),
            batch.status, batch.age, batch.commit_fine, batch.logp, batch.log_rest, batch.entropy, batch.fine,
            batch.ahead_fine, batch.ahead_rank, batch.margin, batch.agree,
        )  # fmt: skip
        if with_effects and context.graph is not None and context.evaluated is not None:
            advanced = root.step - int(context.graph.steps[0])
            effects = remember(context.memory, context.graph, context.evaluated, last.before.canvas, advanced)
            batch.effect[b], batch.known[b] = _expected(effects, last, ahead.tokens[0, :, 0])
    return batch, [ahead for _, ahead in seen]


def _blank(size: int, length: int, count: int, temperature: Float32[np.ndarray, " B"], rounded: Int8[np.ndarray, " B"]) -> StateBatch:
    f32, shape, ahead = np.float32, (size, length), (size, count, length)
    return StateBatch(
        np.empty(shape, np.int8), np.empty(shape, np.int16), np.zeros(shape, f32), np.zeros((*shape, NUM_LOGP), f32),
        np.zeros(shape, f32), np.zeros(shape, f32), np.zeros(shape, f32), np.ones((size, 2, length), f32),
        np.zeros(ahead, f32), np.zeros(ahead, f32), np.zeros(ahead, f32), np.zeros(ahead, np.int8),
        np.zeros((size, length, length), f32), np.zeros(shape, f32), temperature, rounded,
    )  # fmt: skip


def _look(context: DraftContext, depths: int) -> tuple[Outputs, LookAhead]:
    """Read the last distributions and look ahead at the root's masked positions."""
    last, root, sampling = context.last, context.root, context.sampling
    before, fine = last.before.masked, last.candidates.fine
    at = np.flatnonzero(root.canvas[before] == -1)
    given = (root, context.rule, sampling, context.noise, depths, fine)
    if sampling.temperature == 0:
        outputs = read_outputs(before, context.logits, sampling, NUM_LOGP)
        return outputs, look_ahead(outputs, *given, at=at)
    outputs = read_outputs(before, context.logits, sampling, NUM_TOP)
    return outputs, look_ahead(outputs, *given, context.logits, at, _step_keys(context, depths))


def _step_keys(context: DraftContext, depths: int) -> UInt64[np.ndarray, " D"]:
    """Return the keys of the coming steps' noise; the block's memory holds those that an earlier draft asked for."""
    known, root = context.memory.setdefault("step_keys", {}), context.root
    for step in range(root.step, root.step + depths):
        if step not in known:
            known[step] = context.noise.step_key(root.block, step)
    return np.array([known[step] for step in range(root.step, root.step + depths)], dtype=np.uint64)


@dataclass
class _Commits:
    """For every position of a block the step of its commit (-1: none) and its ranking value then, of the first `count` transitions."""

    step: Int64[np.ndarray, " L"]
    fine: Float32[np.ndarray, " L"]
    count: int = 0
    last: Transition | None = None


def _commits_of(context: DraftContext) -> _Commits:
    """Return the commits of the history; what the block's memory holds is taken up where it ended."""
    history, length = context.history, len(context.root.canvas)
    known = context.memory.get("commits")
    if not isinstance(known, _Commits) or known.count > len(history) or (known.count and history[known.count - 1] is not known.last):
        known = _Commits(np.full(length, -1), np.zeros(length, np.float32))
    for transition in history[known.count :]:
        step, candidates = transition.before.step, transition.candidates
        _take_commits(transition.positions, candidates.positions, candidates.fine, step, known.step, known.fine)
        known.last = transition
    known.count = len(history)
    context.memory["commits"] = known
    return known


@njit(cache=True)
@no_type_check
def _take_commits(positions, candidates, fine, step, out_step, out_fine):
    for i in positions:
        out_step[i], out_fine[i] = step, fine[np.searchsorted(candidates, i)]


@njit(cache=True)
@no_type_check
def _fill(
    b, canvas, step, commit_step, committed, just, before, ids, kept, rest, spread, stale, tokens, values, gap,
    to_the_left, is_log, rounded, threshold, strict,
    status, age, commit_fine, logp, log_rest, entropy, fine, ahead_fine, ahead_rank, margin, agree,
):  # fmt: skip
    """Fill state b of a batch: `before` are the positions of the last distributions, `just` those that the last transition took."""
    for i in range(len(canvas)):
        status[b, i], age[b, i] = 0, 0
        if commit_step[i] >= 0:
            status[b, i], age[b, i], commit_fine[b, i] = 1, step - commit_step[i] - 1, committed[i]
    for i in just:
        status[b, i] = 2
    num = 0
    for r in range(len(before)):
        i = before[r]
        for k in range(logp.shape[2]):
            logp[b, i, k] = kept[r, k] if k < kept.shape[1] else -80.0
        log_rest[b, i], entropy[b, i], fine[b, i] = rest[r], spread[r], stale[r]
        if canvas[i] == -1:
            status[b, i] = 3
            for d in range(ahead_fine.shape[1]):
                e = min(d, len(gap) - 1)
                ahead_fine[b, d, i], margin[b, d, i], agree[b, d, i] = values[e, num, 0], gap[e, num], tokens[e, num, 0] == ids[r, 0]
                ahead_rank[b, d, i] = decide(values[e, num, 0], i, to_the_left, is_log, rounded, threshold, strict)
            num += 1


def remember(memory: dict[str, Any], graph: DraftGraph, logits: MaskedLogits, canvas: Int64[np.ndarray, " L"], advanced: int) -> Effects:
    """Take a pass into the block's memory of effects and return it."""
    effects = memory.setdefault("effects", Effects.empty(len(canvas)))
    assert isinstance(effects, Effects)
    if memory.get("observed") is not graph:  # a second draft of one pass sees the same
        effects.observe(graph, logits, canvas, advanced)
        memory["observed"] = graph
    return effects


def select_effects(
    effects: Effects, last: Transition, tokens: Int64[np.ndarray, " m"]
) -> tuple[Float32[np.ndarray, "1 L L"], Float32[np.ndarray, "1 L"]]:
    """Return effects and how near they are, of the last commit and of committing `tokens` at the root's masked positions."""
    value, known = _expected(effects, last, tokens)
    return value[None], known[None]


def _expected(
    effects: Effects, last: Transition, tokens: Int64[np.ndarray, " m"]
) -> tuple[Float32[np.ndarray, "L L"], Float32[np.ndarray, " L"]]:
    expected = np.full(len(effects.token), -2)
    expected[last.state.masked] = tokens
    expected[last.positions] = last.tokens
    return effects.of(expected)


def encode(batch: StateBatch, depths: int) -> Encoded:
    """Return the inputs of an order model for `depths` depths (a shorter look-ahead repeats its last step)."""
    size, length = batch.status.shape
    x = np.zeros((size, length, NUM_POSITION), dtype=np.float32)
    linear = np.zeros((size, depths, length, NUM_LINEAR), dtype=np.float32)
    token = np.zeros((size, depths, length, NUM_TOKEN), dtype=np.float32)
    sure = np.zeros((size, depths, length), dtype=np.float32)
    effect, known = np.zeros((size, length, length), dtype=np.float32), np.zeros((size, length), dtype=np.float32)
    known_root = np.zeros(size, dtype=np.float32)
    fields = (
        batch.status, batch.age, batch.commit_fine, batch.logp, batch.log_rest, batch.entropy, batch.fine, batch.past,
        batch.ahead_fine, batch.ahead_rank, batch.margin, batch.agree, batch.effect, batch.known, batch.temperature, batch.rounded,
    )  # fmt: skip
    _encode(*fields, x, linear, token, sure, effect, known, known_root)
    masked = (batch.status == MASKED).astype(np.int8)
    return Encoded(x, linear, token, masked, sure, effect, known, known_root, batch.rounded.astype(np.float32))


@njit(cache=True)
@no_type_check
def _clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


@njit(cache=True)
@no_type_check
def sureness(fine: float) -> float:
    """Return -log(1 - p) of a log-probability, clipped to 0..40: how sure, resolved where p rounds to 1."""
    rest = -np.expm1(min(fine, 0.0))
    return MAX_SURENESS if rest < 4e-18 else -np.log(rest)


@njit(cache=True)
@no_type_check
def _encode(
    status, age, commit_fine, logp, log_rest, entropy, fine, past, ahead_fine, ahead_rank, margin, agree, effect, known,
    temperature, rounded, x, linear, token, out_sure, out_effect, out_known, out_known_root,
):  # fmt: skip
    """Fill the outputs; features are scaled to about one, sureness and effects are in nats."""
    size, length = status.shape
    known_depths = ahead_fine.shape[1]
    depths = linear.shape[1]
    shifted = np.zeros(length, dtype=np.int64)
    place = np.zeros((depths, length), dtype=np.int64)
    sure = np.zeros((depths, length), dtype=np.float64)
    for b in range(size):
        masked = status[b] == 3
        just, num_masked = -1, 0
        for i in range(length):
            if status[b, i] == 2:
                just = i
            elif status[b, i] == 3:
                num_masked += 1
        for d in range(min(depths, known_depths)):
            for i in range(length):
                sure[d, i] = sureness(ahead_fine[b, d, i]) if masked[i] else 0.0
            count_places(ahead_rank[b, d], masked, place[d])
        best = np.float32(-np.inf)
        num_known = 0.0
        near = known[b, just] if just >= 0 else 0.0
        out_known_root[b] = near
        for i in range(length):
            if status[b, i] == 3:
                best = max(best, ahead_rank[b, 0, i])
                out_known[b, i] = known[b, i]
                num_known += known[b, i]
                moved = _clip(effect[b, just, i], -8.0, 8.0) if near > 0 else 0.0
                for d in range(depths):
                    e = min(d, known_depths - 1)
                    out_sure[b, d, i] = max(sure[e, i] + (moved if agree[b, e, i] else 0.0), 0.0)
                if known[b, i] > 0:
                    for j in range(length):
                        if status[b, j] == 3 and j != i:
                            out_effect[b, i, j] = _clip(effect[b, i, j], -8.0, 8.0)
        count_places(out_sure[b, 0], masked, shifted)
        left_masked = 0
        for i in range(length):
            f = x[b, i]
            f[36 + status[b, i]] = 1.0
            f[40] = temperature[b] > 0
            f[41] = min(temperature[b], 2.0)
            f[42] = rounded[b]
            f[43] = num_masked / length
            f[44] = i / 32.0
            f[45] = length / 32.0
            f[46] = 1.0 if i > 0 and status[b, i - 1] < 3 else 0.0
            f[47] = 1.0 if i + 1 < length and status[b, i + 1] < 3 else 0.0
            f[48] = _clip((i - just) / 8.0, -2.0, 2.0)
            f[49] = left_masked / 16.0
            if status[b, i] == 1 or status[b, i] == 2:
                f[50] = age[b, i] / 16.0
                f[51] = sureness(commit_fine[b, i]) / 16.0
            if status[b, i] >= 2:
                for k in range(8):
                    f[k] = max(logp[b, i, k], -24.0) / 8.0
                f[8] = max(log_rest[b, i], -40.0) / 8.0
                f[9] = min(entropy[b, i], 6.0) / 3.0
                f[10] = _clip(logp[b, i, 0] - logp[b, i, 1], 0.0, 24.0) / 8.0
                now = sureness(fine[b, i])
                f[11] = now / 8.0
                for back in range(2):
                    if past[b, back, i] <= 0:
                        f[52 + back] = _clip(now - sureness(past[b, back, i]), -8.0, 8.0) / 2.0
                        f[54 + back] = 1.0
            if status[b, i] == 3:
                left_masked += 1
                f[12] = place[0, i] / 16.0
                f[13] = 1.0 / (1.0 + place[0, i])
                f[14] = 1.0 if ahead_rank[b, 0, i] == best else 0.0
                f[15] = 1.0 if ahead_fine[b, 0, i] > -0.00195 else 0.0
                f[16] = max(ahead_fine[b, 0, i], -16.0) / 8.0
                f[56] = known[b, i]
                f[57] = near
                f[58] = _clip(effect[b, just, i], -8.0, 8.0) / 2.0 if near > 0 else 0.0
                f[59] = out_sure[b, 0, i] / 8.0
                f[60] = shifted[i] / 16.0
                f[61] = 1.0 / (1.0 + shifted[i])
                for j in range(length):
                    f[62] += abs(out_effect[b, i, j]) / num_masked
                f[63] = num_known / num_masked
                for d in range(8):
                    e = min(d, known_depths - 1, depths - 1)
                    f[20 + d] = sure[e, i] / 8.0
                    f[28 + d] = agree[b, e, i]
                for d in range(depths):
                    e = min(d, known_depths - 1)
                    g = linear[b, d, i]
                    g[0] = max(ahead_fine[b, e, i], -16.0)
                    g[1] = sure[e, i] / 4.0
                    g[2] = place[e, i] / 8.0
                    g[3] = 1.0 if place[e, i] == 0 else 0.0
                    g[4] = 1.0 / (1.0 + place[e, i])
                    g[5] = agree[b, e, i]
                    g[6] = 1.0 if ahead_fine[b, e, i] > -0.00195 else 0.0
                    g[7] = (left_masked - 1) / 8.0
                    g[8] = f[46]
                    g[9] = 1.0 if i == just + 1 else 0.0
                    g[10] = min(abs(i - just), 16) / 8.0
                    g[11] = f[47]
                    h = token[b, d, i]
                    h[0] = np.log1p(max(margin[b, e, i], 0.0))
                    h[1] = min(margin[b, e, i], 10.0) / 5.0
                    h[2] = sure[e, i] / 8.0
                    h[3] = max(ahead_fine[b, e, i], -8.0) / 4.0
                    h[4] = agree[b, e, i]
                    h[5] = f[40]
