"""Independent, deliberately naive reference for standard decoding (docs/decoding-rules.md).

Plain NumPy and plain loops, written from the document alone. It imports neither the package under test nor torch, so
that an agreement between the two means something.

Precision: quantities that the document calls float32 *inputs* (logits, tempered logits, noise, `e - f`) are float32
here too and must agree bit for bit. Sums (softmax, confidences, cumulative probabilities) are computed in float64 and rounded
to float32 once, so an implementation that sums in float32 may order a near-tie differently. `gap` (literal difference of
the compared values) and `reference_slack` (size of the confidence error that would change the commit) tell such cases apart.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

MASK64 = (1 << 64) - 1
G = 0x9E3779B97F4A7C15
C1 = 0xBF58476D1CE4E5B9
C2 = 0x94D049BB133111EB
NEG_INF = float("-inf")

LogitsFn = Callable[[list, list], dict]


# ---------------------------------------------------------------------------------------------------------------- noise


def _mix(z: int) -> int:
    z &= MASK64
    z ^= z >> 30
    z = (z * C1) & MASK64
    z ^= z >> 27
    z = (z * C2) & MASK64
    z ^= z >> 31
    return z


def _absorb(h: int, w: int) -> int:
    return _mix(((h ^ _mix((w + G) & MASK64)) + G) & MASK64)


def noise_uniform(seed: int, sequence: int, block: int, step: int, position: int, vocab_size: int) -> np.ndarray:
    """The uniforms U of the noise, float64, one for each token."""
    return _uniform((seed, sequence, block, step, position), vocab_size)


ORDER = int.from_bytes(b"order", "big")


def order_uniform(seed: int, sequence: int, block: int, step: int, position: int) -> float:
    """The uniform of a position, from a key of six words; nothing of the tokens' noise is in it."""
    return float(_uniform((seed, sequence, ORDER, block, step, position), 1)[0])


def _uniform(words: tuple, vocab_size: int) -> np.ndarray:
    h1 = 0
    for word in words:
        h1 = _absorb(h1, word & MASK64)
    h2 = _mix((h1 + C1) & MASK64)
    token = np.arange(vocab_size, dtype=np.uint64)  # arrays wrap around silently
    x = np.full(vocab_size, h1, np.uint64) + (token + np.uint64(1)) * np.uint64(G)
    x = x ^ (x >> np.uint64(30))
    x = x * np.uint64(C1)
    x = x + np.full(vocab_size, h2, np.uint64)
    x = x ^ (x >> np.uint64(27))
    x = x * np.uint64(C2)
    x = x ^ (x >> np.uint64(31))
    return ((x >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def reference_noise(seed: int, sequence: int, block: int, step: int, position: int, vocab_size: int) -> np.ndarray:
    """`float32(log E)` with E ~ Exp(1), one for each token. `position` counts from 0 inside the block."""
    uniform = noise_uniform(seed, sequence, block, step, position, vocab_size)
    return np.log(-np.log(uniform)).astype(np.float32)


# ------------------------------------------------------------------------------------------------------------- the rule


@dataclass(frozen=True)
class ReferenceRule:
    """Field names and string values of the document.

    `noise_step=False` with an order that looks at the sample is NOT refused here, because the power test needs that broken
    decoder; `exact_law` refuses it.
    """

    select: str = "top"  # top | threshold | left_to_right | leftmost_above | arrival
    num_per_step: int = 1
    threshold: float = 0.9
    strict: bool = True
    confidence: str = "probability"  # probability | max_probability | margin | entropy
    source: str = "raw"  # raw | tempered | filtered
    resolution: str = "float32"  # float32 | bfloat16
    noise_step: bool = True
    schedule: object | None = None  # .kind and .steps
    span: int = 0
    late_ids: tuple = ()
    suppressed_ids: tuple = ()
    order_temperature: float = 0.0  # 0: by confidence, inf: every order alike
    temperature: float = 0.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1.0: off
    seed: int = 0

    def __post_init__(self):
        assert self.select in ("top", "threshold", "left_to_right", "leftmost_above", "arrival"), self.select
        assert self.select != "arrival" or self.schedule.kind == "timesteps"
        assert self.order_temperature == 0 or self.select == "top"
        assert self.confidence in ("probability", "max_probability", "margin", "entropy"), self.confidence
        assert self.source in ("raw", "tempered", "filtered"), self.source
        assert self.resolution in ("float32", "bfloat16"), self.resolution
        assert self.num_per_step >= 1 and self.temperature >= 0 and self.top_k >= 0

    @property
    def order_depends_on_sample(self) -> bool:
        if self.select in ("left_to_right", "arrival") or self.order_temperature == math.inf:
            return False
        return self.confidence == "probability"


def without(token_ids: tuple, logits: np.ndarray) -> np.ndarray:
    logits = logits.copy()
    logits[list(token_ids)] = NEG_INF
    return logits


def scheduled_counts(kind: str, steps: int, begun: int, length: int) -> list:
    """Positions of each step that commits any; `begun` masks when the block begins, of `length` positions."""
    counts, left = [], begun
    for i in range(steps):
        if kind == "remainder_first":
            count = begun // steps + (1 if i < begun % steps else 0)
        elif kind == "remainder_first_of_block":
            count = length // steps + (1 if i < length % steps else 0)
        elif kind == "timesteps":  # from 1 down to 0.001 in float32
            now, after = (np.float32(np.linspace(1, 1e-3, steps + 1)[j]) for j in (i, i + 1))
            count = left if i == steps - 1 else int(np.float32(left) * (np.float32(1) - after / now))
        else:
            assert kind == "half_even", kind
            count = min(left, round(left * (1 - ((steps - i - 1) / steps) / ((steps - i) / steps))))
        counts.append(count)
        left -= count
    return [count for count in counts if count > 0]


def count_of(rule: ReferenceRule, begun: int, length: int, step: int) -> int:
    if rule.schedule is None or rule.select == "arrival":
        return rule.num_per_step
    counts = scheduled_counts(rule.schedule.kind, rule.schedule.steps, begun, length)
    return counts[min(step, len(counts) - 1)]


def round_float32(value: float) -> float:
    return float(np.float32(value))


def round_bfloat16(value: float) -> float:
    """Nearest even, from the float32 bits."""
    bits = int(np.asarray(value, np.float32).reshape(()).view(np.uint32))
    if (bits & 0x7F800000) == 0x7F800000 and (bits & 0x007FFFFF):
        return float("nan")
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return float(np.asarray(bits, np.uint32).view(np.float32))


def round_to_resolution(rule: ReferenceRule, value: float) -> float:
    return round_bfloat16(value) if rule.resolution == "bfloat16" else round_float32(value)


# --------------------------------------------------------------------------------------------- step 1: tempered, filtered


def softmax64(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64)
    weight = np.exp(x - x.max())
    return weight / weight.sum()


def descending(logits: np.ndarray) -> list:
    """Token ids by descending logit, lower id first among equals."""
    return sorted(range(len(logits)), key=lambda v: (-float(logits[v]), v))


def tempered_logits(rule: ReferenceRule, logits: np.ndarray) -> np.ndarray:
    assert logits.dtype == np.float32 and logits.ndim == 1
    if rule.temperature == 0:
        return logits
    return logits / np.float32(rule.temperature)


def filter_logits(rule: ReferenceRule, tempered: np.ndarray) -> tuple:
    """The filtered logits, and the least distance of a cumulative probability to `top_p` (inf without top-p)."""
    filtered = tempered.copy()
    slack = math.inf
    if rule.top_k > 0:
        for v in descending(tempered)[rule.top_k :]:
            filtered[v] = NEG_INF
    if rule.top_p < 1.0:
        p = softmax64(filtered)
        before = 0.0
        first = True
        for v in descending(filtered):
            if filtered[v] == NEG_INF:
                break  # everything from here on is removed already
            if not first:
                slack = min(slack, abs(before - rule.top_p))
                if not before < rule.top_p:
                    filtered[v] = NEG_INF
            before += float(p[v])
            first = False
    return filtered, slack


# ----------------------------------------------------------------------------------------------------- step 2: the token


def first_argmax(values) -> int:
    best = 0
    for v in range(1, len(values)):
        if values[v] > values[best]:
            best = v
    return best


def choose_token(rule, logits, filtered, sequence, block, step, position) -> int:
    if rule.temperature == 0:
        return first_argmax(logits)
    word = step if rule.noise_step else 0
    e = reference_noise(rule.seed, sequence, block, word, position, len(logits))
    race = (e - filtered).tolist()  # float32 subtraction; removed tokens are +inf
    best = 0
    for v in range(1, len(race)):
        if race[v] < race[best]:
            best = v
    assert filtered[best] != NEG_INF
    return best


# ------------------------------------------------------------------------------------------------- step 3: the confidence


def confidence_of(rule: ReferenceRule, logits, tempered, filtered, token: int) -> tuple:
    """(ranking value, natural value), both float64 and not yet rounded."""
    source = {"raw": logits, "tempered": tempered, "filtered": filtered}[rule.source]
    x = source.astype(np.float64)
    if rule.late_ids:
        assert rule.source == "raw"
        source = source.copy()
        source[list(rule.late_ids)] = NEG_INF
        x = source.astype(np.float64)
    if rule.confidence in ("probability", "max_probability"):
        chosen = token if rule.confidence == "probability" else first_argmax(source)
        if x[chosen] == NEG_INF:
            return NEG_INF, NEG_INF
        difference = x - x[chosen]
        difference[chosen] = NEG_INF
        others = 0.0
        with np.errstate(over="ignore"):
            others = float(np.exp(difference).sum())
        return -math.log1p(others), 1.0 / (1.0 + others)
    p = softmax64(source)
    if rule.confidence == "margin":
        order = descending(source)
        first = order[0]
        second = float(p[order[1]]) if len(order) > 1 else 0.0
        others = float(sum(float(p[v]) for v in order[:0:-1]))  # every token but the first, smallest first
        return -(others + second), float(p[first]) - second
    # sum p log p with log p = (l - max) - log(sum); the most probable token's log by log1p so that no digits are lost
    top = first_argmax(source)
    shifted = x - x[top]
    rest = float(np.exp(np.delete(shifted, top)).sum())
    log_total = math.log1p(rest)
    total = 0.0
    for v in range(len(x)):
        if x[v] != NEG_INF and p[v] > 0:
            total += float(p[v]) * (float(shifted[v]) - log_total)
    return total, total


def compared_values(rule: ReferenceRule, rank: float, natural: float) -> tuple:
    """(what is ranked, what is held against the threshold) at the rule's resolution."""
    if rule.resolution == "bfloat16":
        return round_bfloat16(natural), round_bfloat16(natural)
    return round_float32(rank), round_float32(natural)


# ----------------------------------------------------------------------------------------------------- step 4: the commit


def share_left(step: int, steps: int) -> float:
    """Share of the positions that Dream's "origin" leaves masked after an official step; nothing after the last."""
    return 0.0 if step == steps - 1 else 1 - (step + 1) * (1 - 1e-3) / steps


def ranked_at_random(rule: ReferenceRule, rank: float, natural: float, sequence: int, block: int, step: int, position: int) -> float:
    """The ranking value with the noise of the order in it, where the rule draws the order."""
    if rule.select == "arrival":
        uniform = order_uniform(rule.seed, sequence, block, 0, position)
        return -float(next(i for i in range(rule.schedule.steps) if not uniform < share_left(i, rule.schedule.steps)))
    if rule.order_temperature == 0:
        return rank
    gumbel = np.float32(-np.log(-np.log(order_uniform(rule.seed, sequence, block, step, position))))
    if rule.order_temperature == math.inf:
        return float(gumbel)
    return float(np.float32(natural) / np.float32(rule.order_temperature) + gumbel)


def choose_positions(rule: ReferenceRule, rank: dict, natural: dict, count: int | None = None) -> list:
    """Positions that are committed, ascending. Both dictionaries hold values already rounded to the resolution."""
    left_to_right, count = sorted(rank), count or rule.num_per_step
    if rule.span:  # only the first span that is not complete
        left_to_right = [i for i in left_to_right if i // rule.span == left_to_right[0] // rule.span]
    if rule.select == "left_to_right":
        return left_to_right[:count]
    if rule.select == "arrival":
        return [i for i in left_to_right if rank[i] == max(rank.values())]
    by_confidence = sorted(left_to_right, key=lambda i: (-rank[i], i))
    if rule.select == "top":
        return sorted(by_confidence[:count])
    limit = round_to_resolution(rule, rule.threshold)
    above = [i for i in left_to_right if (natural[i] > limit if rule.strict else natural[i] >= limit)]
    if len(above) < count:
        return sorted(by_confidence[:count])
    return above if rule.select == "threshold" else [above[0]]


class ReferenceTransition(NamedTuple):
    committed: list  # (position, token), by position
    tokens: dict  # position -> token chosen this step, for every masked position
    confidences: dict  # position -> ranking value as compared (rounded to the resolution)
    gap: float  # see `commit_gap`


def commit_gap(rule: ReferenceRule, rank: dict, chosen: list) -> float:
    """Lowest committed minus highest other ranking value; inf if there is no other or the order ignores confidence.

    At bfloat16 0 is an ordinary tie, and with `leftmost_above` the value may be negative: judge near-ties by
    `reference_slack` in those cases.
    """
    others = [rank[i] for i in rank if i not in chosen]
    if rule.select == "left_to_right" or not others:
        return math.inf
    low, high = min(rank[i] for i in chosen), max(others)
    return 0.0 if low == high else low - high


def _examine(rule, logits, sequence, block, step):
    tokens, exact, rank, natural = {}, {}, {}, {}
    filter_slack = math.inf
    logits = {i: without(rule.suppressed_ids, row) for i, row in logits.items()}
    for i in sorted(logits):
        tempered = tempered_logits(rule, logits[i])
        filtered, slack = filter_logits(rule, tempered)
        filter_slack = min(filter_slack, slack)
        tokens[i] = choose_token(rule, logits[i], filtered, sequence, block, step, i)
        exact[i] = confidence_of(rule, logits[i], tempered, filtered, tokens[i])
        rank[i], natural[i] = compared_values(rule, *exact[i])
        rank[i] = ranked_at_random(rule, rank[i], natural[i], sequence, block, step, i)
    return tokens, exact, rank, natural, filter_slack


def reference_transition(
    rule: ReferenceRule, logits: dict, sequence: int, block: int, step: int, count: int | None = None
) -> ReferenceTransition:
    """One transition F. `logits`: position in the block -> float32 array, for the masked positions. `count`: see `count_of`."""
    assert logits
    count = count or rule.num_per_step
    tokens, _, rank, natural, _ = _examine(rule, logits, sequence, block, step)
    chosen = choose_positions(rule, rank, natural, count)
    return ReferenceTransition([(i, tokens[i]) for i in chosen], tokens, rank, commit_gap(rule, rank, chosen))


SLACK_LADDER = tuple(10.0**-e for e in range(8, 0, -1))


def reference_slack(rule: ReferenceRule, logits: dict, sequence: int, block: int, step: int, count: int | None = None) -> float:
    """The confidence error that would change this step's commit: the first rung of 1e-8, 1e-7, ... 0.1 at which lowering
    every committed position and raising every other one gives another commit, or inf. The error is relative for float32 ranking
    values that are logs or `1 - margin` (they keep their relative precision near 0) and absolute for everything else. The distance
    of a cumulative probability to `top_p` counts too, as it is (not a rung).
    """
    count = count or rule.num_per_step
    _, exact, rank, natural, filter_slack = _examine(rule, logits, sequence, block, step)
    chosen = choose_positions(rule, rank, natural, count)
    for error in SLACK_LADDER:
        moved_rank, moved_natural = {}, {}
        for i, (exact_rank, exact_natural) in exact.items():
            sign = -1.0 if i in chosen else 1.0
            size = error if rule.confidence == "entropy" or exact_rank == NEG_INF else error * abs(exact_rank)
            moved_rank[i], moved_natural[i] = compared_values(rule, exact_rank + sign * size, exact_natural + sign * error)
            moved_rank[i] = ranked_at_random(rule, moved_rank[i], moved_natural[i], sequence, block, step, i)
        if choose_positions(rule, moved_rank, moved_natural, count) != chosen:
            return min(error, filter_slack)
    return filter_slack


# ------------------------------------------------------------------------------------------------------------ whole texts


@dataclass
class ReferenceResult:
    ids: list  # generated ids, trimmed to max_new_tokens and to the first end token (included)
    finish_reason: str  # stop | length
    order: list = field(default_factory=list)  # (absolute position, token, block, step) in commit order
    nfe: int = 0  # passes = transitions
    min_gap: float = math.inf
    min_slack: float = math.inf  # only with measure_slack=True


def trim(generated: list, max_new_tokens: int, stop_ids) -> list:
    text = []
    for token in generated[:max_new_tokens]:
        text.append(token)
        if token in stop_ids:
            break
    return text


def prefix_is_final(canvas: list, start: int, stop_ids) -> bool:
    """True if the generated part of the block (from `start`) is committed up to and including an end token."""
    for token in canvas[start:]:
        if token is None:
            return False
        if token in stop_ids:
            return True
    return False


def reference_decode(
    logits_fn: LogitsFn,
    rule: ReferenceRule,
    prompt_ids: list,
    block_length: int,
    max_new_tokens: int,
    stop_ids,
    stop: str = "block",
    sequence: int = 0,
    measure_slack: bool = False,
) -> ReferenceResult:
    """`logits_fn(complete blocks before, canvas with None for masked)` -> position in the block -> float32 logits."""
    assert stop in ("block", "prefix") and max_new_tokens >= 1
    prompt, length = [int(v) for v in prompt_ids], block_length
    first_block = len(prompt) // length
    last_block = -(-(len(prompt) + max_new_tokens) // length) - 1
    known = prompt[: first_block * length]  # complete blocks
    tail = prompt[first_block * length :]
    result = ReferenceResult([], "length")
    for block in range(first_block, last_block + 1):
        start = len(tail) if block == first_block else 0  # first generated position of this block
        canvas = (tail if block == first_block else []) + [None] * (length - start)
        step = 0
        stopped = False
        while None in canvas and not stopped:
            logits = logits_fn(list(known), list(canvas))
            assert sorted(logits) == [i for i in range(length) if canvas[i] is None]
            result.nfe += 1
            count = count_of(rule, length - start, length, step)
            done = reference_transition(rule, logits, sequence, block, step, count)
            result.min_gap = min(result.min_gap, done.gap)
            if measure_slack:
                result.min_slack = min(result.min_slack, reference_slack(rule, logits, sequence, block, step, count))
            for position, token in done.committed:
                assert canvas[position] is None
                canvas[position] = token
                result.order.append((block * length + position, token, block, step))
            step += 1
            stopped = stop == "prefix" and prefix_is_final(canvas, start, stop_ids)
        if stopped:
            upto = canvas.index(None) if None in canvas else length
            result.ids = trim((known + canvas[:upto])[len(prompt) :], max_new_tokens, stop_ids)
            result.finish_reason = "stop" if any(token in stop_ids for token in result.ids) else "length"
            return result
        known = known + canvas
        if any(token in stop_ids for token in known[len(prompt) :]):
            break
    result.ids = trim(known[len(prompt) :], max_new_tokens, stop_ids)
    result.finish_reason = "stop" if any(token in stop_ids for token in result.ids) else "length"
    return result


# -------------------------------------------------------------------------------------------------------------- exact law


def commit_law(rule: ReferenceRule, rank: dict, natural: dict, count: int, step: int) -> dict:
    """Probabilities of the sets of positions that a step commits, given every position's confidence; ascending tuples.

    Written as the authors' loops draw: one position after the other in proportion to what is left of a softmax, or every position
    with the probability of its official step. An official step may commit nothing; `step` counts official ones then.
    """
    if rule.select == "arrival":
        steps = rule.schedule.steps
        chance = 1.0 if step == steps - 1 else 1 - share_left(step, steps) / (share_left(step - 1, steps) if step else 1.0)
        sets = {}
        for taken in itertools.product((False, True), repeat=len(rank)):
            probability = math.prod(chance if t else 1 - chance for t in taken)
            sets[tuple(i for i, t in zip(sorted(rank), taken, strict=True) if t)] = probability
        return {chosen: p for chosen, p in sets.items() if p > 0}
    if rule.order_temperature == 0:
        return {tuple(choose_positions(rule, rank, natural, count)): 1.0}
    among = [i for i in sorted(rank) if not rule.span or i // rule.span == min(rank) // rule.span]
    infinite = rule.order_temperature == math.inf
    weight = {i: 1.0 if infinite else math.exp((natural[i] - max(natural.values())) / rule.order_temperature) for i in among}
    sets = {}
    for drawn in itertools.permutations(among, min(count, len(among))):
        probability, left = 1.0, sum(weight.values())
        for i in drawn:
            probability *= weight[i] / left
            left -= weight[i]
        sets[tuple(sorted(drawn))] = sets.get(tuple(sorted(drawn)), 0.0) + probability
    return sets


def exact_law(logits_fn: LogitsFn, rule: ReferenceRule, prompt_ids: list, block_length: int, max_new_tokens: int, stop_ids) -> dict:
    """The exact law of the trimmed ids, by recursion over states (stop="block" and "prefix" have the same one).

    With `noise_step=True` every step draws fresh noise for every masked position, so a state's future depends on the state
    alone, and its joint token choice is a product over positions of softmax(filtered logits). Hence states can be merged.

    With `noise_step=False` position i reuses one noise row in every step. If the order does not depend on the sample, that row is
    looked at only when i is committed: the earlier states are functions of the logits and of the rows of the positions committed
    before, which are independent of row i. Given the history the row is therefore still fresh, and the law is the same. If the
    order does look at the sample, "i was passed over" tells something about row i, the states are not Markov, and this
    function refuses. `left_to_right` never looks at the confidence, so it is fine with any.

    Cost: (states) x V^(masked). Meant for V <= 4, L <= 4 and one or two short blocks.
    """
    if not rule.noise_step and rule.order_depends_on_sample:
        raise ValueError("without the step in the noise the states are not Markov when the order depends on the sample")
    prompt, length = tuple(int(v) for v in prompt_ids), block_length
    first_block = len(prompt) // length
    last_block = -(-(len(prompt) + max_new_tokens) // length) - 1
    memo, tail = {}, prompt[first_block * length :]

    def complete(known):
        ended = any(token in stop_ids for token in known[len(prompt) :])
        if ended or len(known) == (last_block + 1) * length:
            return {tuple(trim(list(known[len(prompt) :]), max_new_tokens, stop_ids)): 1.0}
        return law(known, (None,) * length, 0)

    def law(known, canvas, step):
        if None not in canvas:
            return complete(known + canvas)
        if (known, canvas, step) not in memo:
            total = {}
            for following, probability in successors(known, canvas, step).items():
                for ids, p in law(known, following, step + 1).items():
                    total[ids] = total.get(ids, 0.0) + probability * p
            memo[known, canvas, step] = total
        return memo[known, canvas, step]

    def successors(known, canvas, step):
        begun = length - (len(tail) if len(known) == first_block * length else 0)
        logits = {i: without(rule.suppressed_ids, row) for i, row in logits_fn(list(known), list(canvas)).items()}
        options = {}  # position -> list of (token, probability, ranked value, thresholded value)
        for i in sorted(logits):
            tempered = tempered_logits(rule, logits[i])
            filtered, _ = filter_logits(rule, tempered)
            if rule.temperature == 0:
                law_of_token = {first_argmax(logits[i]): 1.0}
            else:
                p = softmax64(filtered)
                law_of_token = {v: float(p[v]) for v in range(len(p)) if p[v] > 0}
            options[i] = [
                (v, p, *compared_values(rule, *confidence_of(rule, logits[i], tempered, filtered, v))) for v, p in law_of_token.items()
            ]
        positions = list(options)
        found = {}
        for choice in itertools.product(*(options[i] for i in positions)):
            probability = 1.0
            for _, p, _, _ in choice:
                probability *= p
            rank = {i: c[2] for i, c in zip(positions, choice, strict=False)}
            natural = {i: c[3] for i, c in zip(positions, choice, strict=False)}
            token = {i: c[0] for i, c in zip(positions, choice, strict=False)}
            for chosen, p in commit_law(rule, rank, natural, count_of(rule, begun, length, step), step).items():
                following = list(canvas)
                for i in chosen:
                    following[i] = token[i]
                found[tuple(following)] = found.get(tuple(following), 0.0) + probability * p
        return found

    return law(prompt[: first_block * length], tail + (None,) * (length - len(tail)), 0)


def total_variation(one: dict, other: dict) -> float:
    return 0.5 * sum(abs(one.get(k, 0.0) - other.get(k, 0.0)) for k in set(one) | set(other))


# -------------------------------------------------------------------------------------------------------------- toy target


class ToyTarget:
    """Random but fixed logits, `scale` x normal, for every (complete blocks, canvas, position). Nothing is shared between canvases."""

    def __init__(self, vocab_size: int, block_length: int, seed: int = 0, scale: float = 1.0):
        self.vocab_size, self.block_length, self.seed, self.scale = vocab_size, block_length, seed, scale
        self._seen = {}

    def __call__(self, prefix_ids: list, canvas: list) -> dict:
        assert len(canvas) == self.block_length and len(prefix_ids) % self.block_length == 0
        key = (tuple(prefix_ids), tuple(canvas))
        if key not in self._seen:
            cells = [self.vocab_size if token is None else int(token) for token in canvas]
            answer = {}
            for i in range(self.block_length):
                if canvas[i] is None:
                    words = [self.seed, len(prefix_ids), *map(int, prefix_ids), *cells, i, 1]
                    normal = np.random.default_rng(np.random.SeedSequence(words)).standard_normal(self.vocab_size)
                    answer[i] = (self.scale * normal).astype(np.float32)
                    answer[i].setflags(write=False)
            self._seen[key] = answer
        return dict(self._seen[key])
