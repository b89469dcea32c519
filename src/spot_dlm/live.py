"""What an order model reads while decoding: the inputs of `features`, straight from a context's logits, in one compiled call.

The same features as recorded traces have, by the same functions. Logits elsewhere than in the host's memory, and filters, take the longer
way through `read_outputs` and `look_ahead`. Knows nothing of models.

Example: `read_live([context], depths=[8])[0].positions` has shape [1, L, NUM_POSITION].
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import no_type_check

import numpy as np
from jaxtyping import Float32, Int64, UInt64
from numba import njit

from spot_dlm.effects import Effects, choose
from spot_dlm.features import MASKED, NUM_LINEAR, NUM_LOGP, NUM_POSITION, NUM_TOKEN, Encoded, encode_state, remember
from spot_dlm.interfaces import DraftContext
from spot_dlm.lookahead import NO_KEYS, WIDE_TAIL, decide, decision_of, draw_whole_rows, look_ahead, look_at_rows
from spot_dlm.outputs import NUM_TOP, host_array, is_filtered, read_outputs, summarise_rows
from spot_dlm.transition import Transition

_UNSEEN = Effects.empty(0)


def read_live(
    contexts: Sequence[DraftContext], depths: Sequence[int], with_effects: bool = True
) -> tuple[Encoded, list[Int64[np.ndarray, "_ _ 2"]]]:
    """Return an order model's inputs before drafts of one block length, and the tokens of the look-ahead of each (`LookAhead.tokens`).

    Args:
        contexts: what is known before the pass.
        depths: steps to look ahead of each at T > 0 (at T = 0 one serves for all); shorter look-aheads repeat their last step.
        with_effects: read the last pass's nodes; False for models that make no use of them.
    """
    steps = [wanted if context.sampling.temperature > 0 else 1 for context, wanted in zip(contexts, depths, strict=True)]
    f32, size, length, count = np.float32, len(contexts), len(contexts[0].root.canvas), max(steps)
    encoded = Encoded(
        np.zeros((size, length, NUM_POSITION), f32), np.zeros((size, count, length, NUM_LINEAR), f32),
        np.zeros((size, count, length, NUM_TOKEN), f32), np.zeros((size, length), np.int8), np.zeros((size, count, length), f32),
        np.zeros((size, length, length), f32), np.zeros((size, length), f32), np.empty(size, f32), np.empty(size, f32),
    )  # fmt: skip
    into = (
        encoded.positions, encoded.linear, encoded.token, encoded.masked, encoded.sure, encoded.effect, encoded.known,
        encoded.known_root, encoded.rounded,
    )  # fmt: skip
    tokens = [_read_one(b, *asked, with_effects, into) for b, asked in enumerate(zip(contexts, steps, strict=True))]
    return encoded, tokens


def _read_one(b: int, context: DraftContext, depths: int, with_effects: bool, into: tuple[np.ndarray, ...]) -> Int64[np.ndarray, "D m 2"]:
    """Fill state b of the arrays; return the tokens of the look-ahead."""
    last, root, rule, sampling, logits = context.last, context.root, context.rule, context.sampling, context.logits
    before, fine, sampled, past = last.before.masked, last.candidates.fine, sampling.temperature > 0, _past_of(context)
    effects = _UNSEEN
    if with_effects and context.graph is not None and context.evaluated is not None:
        advanced = root.step - int(context.graph.steps[0])
        effects = remember(context.memory, context.graph, context.evaluated, last.before.canvas, advanced)
    state = (
        root.canvas, root.step, before, last.positions, last.tokens, fine, past.step, past.fine, past.recent, decision_of(rule),
        sampling.temperature, rule.resolution == "bfloat16", effects.value, effects.token, effects.distance,
    )  # fmt: skip
    count, keys = (NUM_TOP, _step_keys(context, depths)) if sampled else (NUM_LOGP, NO_KEYS)
    if logits.device.type == "cpu" and not is_filtered(sampling):
        tokens = np.empty((depths, len(root.masked), 2), np.int64)
        count = min(count, logits.shape[1])
        _read(host_array(logits), keys, rule.confidence == "probability", rule.source == "raw", count, tokens, b, *state, *into)
        return tokens
    outputs = read_outputs(before, logits, sampling, count)
    at = np.flatnonzero(root.canvas[before] == -1)
    ahead = look_ahead(outputs, root, rule, sampling, context.noise, depths, fine, logits if sampled else None, at, keys)
    seen = (outputs.ids, outputs.logp, outputs.log_rest, outputs.entropy, ahead.tokens, ahead.fine, ahead.margin)
    _encode(*seen, b, *state, *into)
    return ahead.tokens


def _step_keys(context: DraftContext, depths: int) -> UInt64[np.ndarray, " D"]:
    """Return the keys of the coming steps' noise; the block's memory holds those that an earlier draft asked for."""
    known, root = context.memory.setdefault("step_keys", {}), context.root
    for step in range(root.step, root.step + depths):
        if step not in known:
            known[step] = context.noise.step_key(root.block, step)
    return np.array([known[step] for step in range(root.step, root.step + depths)], dtype=np.uint64)


@dataclass
class _Past:
    """The first `count` transitions of a block: for every position the step of its commit (-1: none) and its ranking value then.

    `recent` are the ranking values of all positions by the last transition, the one before it and the one before that; 1 where none.
    """

    step: Int64[np.ndarray, " L"]
    fine: Float32[np.ndarray, " L"]
    recent: Float32[np.ndarray, "3 L"]
    count: int = 0
    last: Transition | None = None


def _past_of(context: DraftContext) -> _Past:
    """Return the transitions of the history; what the block's memory holds is taken up where it ended."""
    history, length = context.history, len(context.root.canvas)
    known = context.memory.get("past")
    if not isinstance(known, _Past) or known.count > len(history) or (known.count and history[known.count - 1] is not known.last):
        known = _Past(np.full(length, -1), np.zeros(length, np.float32), np.ones((3, length), np.float32))
    for transition in history[known.count :]:
        step, candidates = transition.before.step, transition.candidates
        _take(transition.positions, candidates.positions, candidates.fine, step, known.step, known.fine, known.recent)
        known.last = transition
    known.count = len(history)
    context.memory["past"] = known
    return known


@njit(cache=True)
@no_type_check
def _take(committed, positions, fine, step, out_step, out_fine, recent):
    """Take in one transition."""
    for i in range(recent.shape[1]):
        recent[2, i], recent[1, i], recent[0, i] = recent[1, i], recent[0, i], 1.0
    for r in range(len(positions)):
        recent[0, positions[r]] = fine[r]
    for i in committed:
        out_step[i], out_fine[i] = step, recent[0, i]


@njit(cache=True)
@no_type_check
def _read(
    logits, keys, by_token, raw, count, tokens,
    b, canvas, step, before, just, just_tokens, stale, commit_step, commit_value, recent, decision, temperature, coarse,
    effect_value, effect_token, effect_distance,
    out_positions, out_linear, out_token, out_masked, out_sure, out_effect, out_known, out_known_root, out_rounded,
):  # fmt: skip
    """Do what `read_outputs` and `look_ahead` do, then `_encode`."""
    rows, (depths, num_masked, _), divisor = len(logits), tokens.shape, temperature if len(keys) else 1.0
    ids, logp = np.empty((rows, count), np.int64), np.empty((rows, count), np.float32)
    source = logp if divisor == 1 else np.empty((rows, count), np.float32)
    log_rest, entropy = np.empty(rows, np.float32), np.empty(rows, np.float32)
    summarise_rows(logits, divisor, ids, logp, source, log_rest, entropy)
    ranked = (logp if raw else source) if by_token else stale.reshape(-1, 1)
    at, k = np.empty(num_masked, np.int64), 0
    for r in range(rows):
        if canvas[before[r]] == -1:
            at[k] = r
            k += 1
    fine, margin = np.empty((depths, num_masked, 2), np.float32), np.empty((depths, num_masked), np.float32)
    lacking = np.empty(num_masked, np.float32)
    look_at_rows(keys, before, at, ids, source, source, ranked, tokens, fine, margin, lacking)
    if len(keys) == 0:
        for i in range(num_masked):
            fine[0, i, 0] = stale[at[i]]
    elif (lacking > WIDE_TAIL).any():
        draw_whole_rows(logits, keys, before, at, divisor, by_token, raw, ids, ranked, lacking, tokens, fine, margin)
    _encode(
        ids, logp, log_rest, entropy, tokens, fine, margin,
        b, canvas, step, before, just, just_tokens, stale, commit_step, commit_value, recent, decision, temperature, coarse,
        effect_value, effect_token, effect_distance,
        out_positions, out_linear, out_token, out_masked, out_sure, out_effect, out_known, out_known_root, out_rounded,
    )  # fmt: skip


@njit(cache=True)
@no_type_check
def _encode(
    ids, kept, rest, spread, tokens, values, gap,
    b, canvas, step, before, just, just_tokens, stale, commit_step, commit_value, recent, decision, temperature, coarse,
    effect_value, effect_token, effect_distance,
    out_positions, out_linear, out_token, out_masked, out_sure, out_effect, out_known, out_known_root, out_rounded,
):  # fmt: skip
    """Fill state b: `before` are the positions of the last distributions, `just` those of the last transition."""
    length, looked = len(canvas), len(gap)
    status, age, commit_fine = np.zeros(length, np.int8), np.zeros(length, np.int16), np.zeros(length, np.float32)
    logp, log_rest = np.zeros((length, NUM_LOGP), np.float32), np.zeros(length, np.float32)
    entropy, fine = np.zeros(length, np.float32), np.zeros(length, np.float32)
    ahead_fine, ahead_rank = np.zeros((looked, length), np.float32), np.zeros((looked, length), np.float32)
    margin, agree = np.zeros((looked, length), np.float32), np.zeros((looked, length), np.int8)
    effect, known, expected = np.zeros((length, length), np.float32), np.zeros(length, np.float32), np.full(length, -2)
    for i in range(length):
        if commit_step[i] >= 0:
            status[i], age[i], commit_fine[i] = 1, step - commit_step[i] - 1, commit_value[i]
    for k in range(len(just)):
        status[just[k]] = 2
        expected[just[k]] = just_tokens[k]
    num = 0
    for r in range(len(before)):
        i = before[r]
        for k in range(NUM_LOGP):
            logp[i, k] = kept[r, k] if k < kept.shape[1] else -80.0
        log_rest[i], entropy[i], fine[i] = rest[r], spread[r], stale[r]
        if canvas[i] == -1:
            status[i], out_masked[b, i], expected[i] = MASKED, 1, tokens[0, num, 0]
            for d in range(looked):
                value = values[d, num, 0]
                ahead_fine[d, i], margin[d, i], agree[d, i] = value, gap[d, num], tokens[d, num, 0] == ids[r, 0]
                ahead_rank[d, i] = decide(value, i, decision)
            num += 1
    if len(effect_token):
        choose(effect_value, effect_token, effect_distance, expected, effect, known)
    out_rounded[b] = coarse
    out_known_root[b] = encode_state(
        status, age, commit_fine, logp, log_rest, entropy, fine, recent[1:], ahead_fine, ahead_rank, margin, agree,
        effect, known, np.float32(temperature), np.int8(coarse),
        out_positions[b], out_linear[b], out_token[b], out_sure[b], out_effect[b], out_known[b],
    )  # fmt: skip
