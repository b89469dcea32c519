"""What an order model reads: vocabulary-free features of block states, the same for a live draft and for recorded traces.

A `StateBatch` holds B states of blocks of L positions densely: the last distributions, which are stale for the root (the certain next
state), and the look-ahead with the coming noise (method.md section 6). `encode` turns it into the inputs of `order_model`. Knows
nothing of models, files and targets.

Example: `encode(states.batch(indices, depths=8)[0], depths=8).positions` has shape [B, L, NUM_POSITION].
"""

from dataclasses import dataclass
from typing import Any, no_type_check

import numpy as np
from jaxtyping import Float32, Int8, Int16, Int64
from numba import njit

from spot_dlm.draft_graph import DraftGraph
from spot_dlm.effects import Effects
from spot_dlm.interfaces import MaskedLogits
from spot_dlm.lookahead import count_places
from spot_dlm.outputs import MAX_SURENESS
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
    expected = np.full(len(effects.token), -2)
    expected[last.state.masked] = tokens
    expected[last.positions] = last.tokens
    value, known = effects.of(expected)
    return value[None], known[None]


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
    for b in range(len(status)):
        out_known_root[b] = encode_state(
            status[b], age[b], commit_fine[b], logp[b], log_rest[b], entropy[b], fine[b], past[b], ahead_fine[b], ahead_rank[b],
            margin[b], agree[b], effect[b], known[b], temperature[b], rounded[b],
            x[b], linear[b], token[b], out_sure[b], out_effect[b], out_known[b],
        )  # fmt: skip


@njit(cache=True, error_model="numpy")
@no_type_check
def encode_state(
    status, age, commit_fine, logp, log_rest, entropy, fine, past, ahead_fine, ahead_rank, margin, agree, effect, known,
    temperature, rounded, x, linear, token, out_sure, out_effect, out_known,
):  # fmt: skip
    """Fill the inputs of one state, zero before, and return how near the last commit's effect is; see StateBatch and Encoded.

    Features are scaled to about one, sureness and effects are in nats.
    """
    length, known_depths, depths = len(status), len(ahead_fine), len(linear)
    shifted = np.zeros(length, dtype=np.int64)
    place = np.zeros((depths, length), dtype=np.int64)
    sure = np.zeros((depths, length), dtype=np.float64)
    masked = status == 3
    just, num_masked = -1, 0
    for i in range(length):
        if status[i] == 2:
            just = i
        elif status[i] == 3:
            num_masked += 1
    for d in range(min(depths, known_depths)):
        for i in range(length):
            sure[d, i] = sureness(ahead_fine[d, i]) if masked[i] else 0.0
        count_places(ahead_rank[d], masked, place[d])
    best = np.float32(-np.inf)
    num_known = 0.0
    near = known[just] if just >= 0 else 0.0
    for i in range(length):
        if status[i] == 3:
            best = max(best, ahead_rank[0, i])
            out_known[i] = known[i]
            num_known += known[i]
            moved = _clip(effect[just, i], -8.0, 8.0) if near > 0 else 0.0
            for d in range(depths):
                e = min(d, known_depths - 1)
                out_sure[d, i] = max(sure[e, i] + (moved if agree[e, i] else 0.0), 0.0)
            if known[i] > 0:
                for j in range(length):
                    if status[j] == 3 and j != i:
                        out_effect[i, j] = _clip(effect[i, j], -8.0, 8.0)
    count_places(out_sure[0], masked, shifted)
    left_masked = 0
    for i in range(length):
        f = x[i]
        f[36 + status[i]] = 1.0
        f[40] = temperature > 0
        f[41] = min(temperature, 2.0)
        f[42] = rounded
        f[43] = num_masked / length
        f[44] = i / 32.0
        f[45] = length / 32.0
        f[46] = 1.0 if i > 0 and status[i - 1] < 3 else 0.0
        f[47] = 1.0 if i + 1 < length and status[i + 1] < 3 else 0.0
        f[48] = _clip((i - just) / 8.0, -2.0, 2.0)
        f[49] = left_masked / 16.0
        if status[i] == 1 or status[i] == 2:
            f[50] = age[i] / 16.0
            f[51] = sureness(commit_fine[i]) / 16.0
        if status[i] >= 2:
            for k in range(8):
                f[k] = max(logp[i, k], -24.0) / 8.0
            f[8] = max(log_rest[i], -40.0) / 8.0
            f[9] = min(entropy[i], 6.0) / 3.0
            f[10] = _clip(logp[i, 0] - logp[i, 1], 0.0, 24.0) / 8.0
            now = sureness(fine[i])
            f[11] = now / 8.0
            for back in range(2):
                if past[back, i] <= 0:
                    f[52 + back] = _clip(now - sureness(past[back, i]), -8.0, 8.0) / 2.0
                    f[54 + back] = 1.0
        if status[i] == 3:
            left_masked += 1
            f[12] = place[0, i] / 16.0
            f[13] = 1.0 / (1.0 + place[0, i])
            f[14] = 1.0 if ahead_rank[0, i] == best else 0.0
            f[15] = 1.0 if ahead_fine[0, i] > -0.00195 else 0.0
            f[16] = max(ahead_fine[0, i], -16.0) / 8.0
            f[56] = known[i]
            f[57] = near
            f[58] = _clip(effect[just, i], -8.0, 8.0) / 2.0 if near > 0 else 0.0
            f[59] = out_sure[0, i] / 8.0
            f[60] = shifted[i] / 16.0
            f[61] = 1.0 / (1.0 + shifted[i])
            for j in range(length):
                f[62] += abs(out_effect[i, j]) / num_masked
            f[63] = num_known / num_masked
            for d in range(8):
                e = min(d, known_depths - 1, depths - 1)
                f[20 + d] = sure[e, i] / 8.0
                f[28 + d] = agree[e, i]
            for d in range(depths):
                e = min(d, known_depths - 1)
                g = linear[d, i]
                g[0] = max(ahead_fine[e, i], -16.0)
                g[1] = sure[e, i] / 4.0
                g[2] = place[e, i] / 8.0
                g[3] = 1.0 if place[e, i] == 0 else 0.0
                g[4] = 1.0 / (1.0 + place[e, i])
                g[5] = agree[e, i]
                g[6] = 1.0 if ahead_fine[e, i] > -0.00195 else 0.0
                g[7] = (left_masked - 1) / 8.0
                g[8] = f[46]
                g[9] = 1.0 if i == just + 1 else 0.0
                g[10] = min(abs(i - just), 16) / 8.0
                g[11] = f[47]
                h = token[d, i]
                h[0] = np.log1p(max(margin[e, i], 0.0))
                h[1] = min(margin[e, i], 10.0) / 5.0
                h[2] = sure[e, i] / 8.0
                h[3] = max(ahead_fine[e, i], -8.0) / 4.0
                h[4] = agree[e, i]
                h[5] = f[40]
    return near
