"""What an order model reads: vocabulary-free features of block states, the same for a live draft and for recorded traces.

A `StateBatch` holds B states of blocks of L positions densely: the last distributions, which are stale for the root (the certain next
state), and the look-ahead with the coming noise (method.md section 6). `encode` turns it into the inputs of `order_model`. Knows
nothing of models, files and targets.

Example: `encode(live_state(context, depths=8)[0], depths=8).positions` has shape [1, L, NUM_POSITION].
"""

from dataclasses import dataclass
from typing import Any, no_type_check

import numpy as np
import torch
from jaxtyping import Float32, Int8, Int16, Int64
from numba import njit

from spot_dlm.draft_graph import DraftGraph
from spot_dlm.effects import Effects
from spot_dlm.interfaces import DraftContext, MaskedLogits
from spot_dlm.lookahead import LookAhead, count_places, decisive_rank, look_ahead
from spot_dlm.outputs import MAX_SURENESS, read_outputs
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
    """Return the one state before a draft, and the look-ahead of the root's masked positions.

    Args:
        context: what is known before the pass.
        depths: steps to look ahead at T > 0 (at T = 0 one serves for all).
        with_effects: read the last pass's nodes; False for models that make no use of them.
    """
    last, root = context.last, context.root
    length = len(root.canvas)
    outputs = read_outputs(last.before.masked, context.logits, context.sampling)
    at = np.flatnonzero(root.canvas[last.before.masked] == -1)
    stale = context.logits[torch.from_numpy(at).to(context.logits.device)] if context.sampling.temperature > 0 else None
    known_of_rows = (root, context.rule, context.sampling, context.noise, depths, last.candidates.fine[at], stale)
    ahead = look_ahead(outputs.take(at), *known_of_rows)
    before, masked = last.before.masked, root.masked
    status = np.full((1, length), TAIL, dtype=np.int8)
    age = np.zeros((1, length), dtype=np.int16)
    commit_fine = np.zeros((1, length), dtype=np.float32)
    past = np.ones((1, 2, length), dtype=np.float32)
    for transition in context.history:
        rows = np.searchsorted(transition.candidates.positions, transition.positions)
        status[0, transition.positions] = COMMITTED
        age[0, transition.positions] = root.step - transition.before.step - 1
        commit_fine[0, transition.positions] = transition.candidates.fine[rows]
    status[0, last.positions] = JUST
    status[0, masked] = MASKED
    for back, transition in enumerate(context.history[-2:-4:-1]):
        past[0, back, transition.candidates.positions] = transition.candidates.fine
    logp = np.zeros((1, length, NUM_LOGP), dtype=np.float32)
    kept = min(NUM_LOGP, outputs.logp.shape[1])
    logp[0, before] = -80.0
    logp[0, before, :kept] = outputs.logp[:, :kept]
    rows_of = np.zeros((3, 1, length), dtype=np.float32)
    rows_of[:, 0, before] = outputs.log_rest, outputs.entropy, last.candidates.fine
    count = len(ahead.margin)
    rank = decisive_rank(ahead.fine[..., 0], np.broadcast_to(masked, (count, len(masked))), context.rule)
    spread = np.zeros((3, 1, count, length), dtype=np.float32)
    spread[0, 0][:, masked] = ahead.fine[..., 0]
    spread[1, 0][:, masked] = rank
    spread[2, 0][:, masked] = ahead.margin
    agree = np.zeros((1, count, length), dtype=np.int8)
    agree[0][:, masked] = ahead.tokens[..., 0] == outputs.ids[at, 0]
    temperature = np.array([context.sampling.temperature], dtype=np.float32)
    rounded = np.array([context.rule.resolution == "bfloat16"], dtype=np.int8)
    log_rest, entropy, fine = rows_of
    effect, known = _live_effects(context, ahead) if with_effects else _no_effects(length)
    state = StateBatch(
        status,
        age,
        commit_fine,
        logp,
        log_rest,
        entropy,
        fine,
        past,
        spread[0],
        spread[1],
        spread[2],
        agree,
        effect,
        known,
        temperature,
        rounded,
    )
    return state, ahead


def remember(memory: dict[str, Any], graph: DraftGraph, logits: MaskedLogits, canvas: Int64[np.ndarray, " L"], advanced: int) -> Effects:
    """Take a pass into the block's memory of effects and return it."""
    effects = memory.setdefault("effects", Effects.empty(len(canvas)))
    assert isinstance(effects, Effects)
    if memory.get("observed") is not graph:  # a second draft of one pass sees the same
        effects.observe(graph, logits, canvas, advanced)
        memory["observed"] = graph
    return effects


def _live_effects(context: DraftContext, ahead: LookAhead) -> tuple[Float32[np.ndarray, "1 L L"], Float32[np.ndarray, "1 L"]]:
    """Return the effects that the block's passes have shown, where the token is still the one that would be committed."""
    canvas = context.last.before.canvas
    if context.graph is None or context.evaluated is None:
        return _no_effects(len(canvas))
    advanced = context.root.step - int(context.graph.steps[0])
    effects = remember(context.memory, context.graph, context.evaluated, canvas, advanced)
    return select_effects(effects, context.last, ahead.tokens[0, :, 0])


def _no_effects(length: int) -> tuple[Float32[np.ndarray, "1 L L"], Float32[np.ndarray, "1 L"]]:
    return np.zeros((1, length, length), np.float32), np.zeros((1, length), np.float32)


def select_effects(
    effects: Effects, last: Transition, tokens: Int64[np.ndarray, " m"]
) -> tuple[Float32[np.ndarray, "1 L L"], Float32[np.ndarray, "1 L"]]:
    """Return effects and how near they are, of the last commit and of committing `tokens` at the root's masked positions."""
    expected = np.full(len(effects.token), -2)
    expected[last.state.masked] = tokens
    expected[last.positions] = last.tokens
    known = np.where(effects.token == expected, effects.known, np.float32(0))
    return (effects.value * (known > 0)[:, None])[None], known[None]


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
    status: Int8[np.ndarray, "B L"],
    age: Int16[np.ndarray, "B L"],
    commit_fine: Float32[np.ndarray, "B L"],
    logp: Float32[np.ndarray, "B L 8"],
    log_rest: Float32[np.ndarray, "B L"],
    entropy: Float32[np.ndarray, "B L"],
    fine: Float32[np.ndarray, "B L"],
    past: Float32[np.ndarray, "B 2 L"],
    ahead_fine: Float32[np.ndarray, "B E L"],
    ahead_rank: Float32[np.ndarray, "B E L"],
    margin: Float32[np.ndarray, "B E L"],
    agree: Int8[np.ndarray, "B E L"],
    effect: Float32[np.ndarray, "B L L"],
    known: Float32[np.ndarray, "B L"],
    temperature: Float32[np.ndarray, " B"],
    rounded: Int8[np.ndarray, " B"],
    x: Float32[np.ndarray, "B L F"],
    linear: Float32[np.ndarray, "B D L K"],
    token: Float32[np.ndarray, "B D L M"],
    out_sure: Float32[np.ndarray, "B D L"],
    out_effect: Float32[np.ndarray, "B L L"],
    out_known: Float32[np.ndarray, "B L"],
    out_known_root: Float32[np.ndarray, " B"],
) -> None:
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
