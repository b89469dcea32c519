"""The reference decoder against hand-computed cases, exact laws and the noise's own distribution."""

from __future__ import annotations

import ast
import math
import pathlib
import sys
from typing import NamedTuple

import numpy as np
import pytest
from scipy import stats

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import reference_decoder as ref
from reference_decoder import (
    ReferenceRule,
    ToyTarget,
    exact_law,
    reference_decode,
    reference_noise,
    reference_slack,
    reference_transition,
    round_bfloat16,
    total_variation,
)

INF = math.inf


def logs(*p):
    with np.errstate(divide="ignore"):
        return np.log(np.array(p, np.float64)).astype(np.float32)


def commit(logits, step=0, **rule):
    return reference_transition(ReferenceRule(**rule), logits, 0, 0, step)


def test_imports_only_the_standard_library_and_numpy():
    tree = ast.parse(pathlib.Path(ref.__file__).read_text())
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module.split(".")[0])
    assert names <= {"__future__", "collections", "itertools", "math", "dataclasses", "typing", "numpy"}


# ---------------------------------------------------------------------------------------------------------------- noise


def scalar_noise(seed, sequence, block, step, position, v):
    """The document's formulas once more, one token at a time, on Python integers."""
    m = 2**64
    g, c1, c2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

    def mix(z):
        z ^= z >> 30
        z = z * c1 % m
        z ^= z >> 27
        z = z * c2 % m
        return z ^ (z >> 31)

    def absorb(h, w):
        return mix(((h ^ mix((w + g) % m)) + g) % m)

    h1 = absorb(absorb(absorb(absorb(absorb(0, seed), sequence), block), step), position)
    h2 = mix((h1 + c1) % m)
    x = (h1 + (v + 1) * g) % m
    x ^= x >> 30
    x = x * c1 % m
    x = (x + h2) % m
    x ^= x >> 27
    x = x * c2 % m
    x ^= x >> 31
    return np.float32(math.log(-math.log(((x >> 12) + 0.5) / 2**52)))


def test_noise_follows_the_formula_and_splitmix():
    assert ref._mix(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF  # SplitMix64, first output for seed 0
    for key in [(0, 0, 0, 0, 0), (1, 2, 3, 4, 5), (2**64 - 1, 2**63, 7, 0, 31), (12345, 2**40, 1000, 63, 15)]:
        noise = reference_noise(*key, 40)
        assert noise.dtype == np.float32 and noise.shape == (40,)
        np.testing.assert_allclose(noise, [scalar_noise(*key, v) for v in range(40)], rtol=2e-7, atol=1e-7)


def test_noise_is_exponential_uncorrelated_and_a_pure_function():
    noise = reference_noise(7, 0, 0, 0, 0, 50_000).astype(np.float64)
    assert stats.kstest(np.exp(noise), "expon").pvalue > 1e-3
    keys = [(9, q, b, t, i) for q in range(8) for b in range(8) for t in range(4) for i in range(8)]
    rows = np.array([reference_noise(*key, 8) for key in keys])
    backwards = np.array([reference_noise(*key, 8) for key in reversed(keys)])[::-1]
    assert np.array_equal(rows, backwards)  # call order
    assert np.array_equal(rows[:, :3], np.array([reference_noise(*key, 3) for key in keys]))  # width
    assert stats.kstest(np.exp(rows[:, 0].astype(np.float64)), "expon").pvalue > 1e-3  # over keys, one token
    assert len(np.unique(rows)) > 0.999 * rows.size  # every word of the key matters
    correlation = np.corrcoef(rows.T) - np.eye(8)
    assert np.abs(correlation).max() < 4.5 / math.sqrt(len(rows))
    neighbours = np.corrcoef(rows[:-1, 0], rows[1:, 0])[0, 1]
    assert abs(neighbours) < 4.5 / math.sqrt(len(rows))


def test_seed_and_sequence_are_not_interchangeable():
    keys = [(seed, sequence) for seed in range(4) for sequence in range(4)]
    assert len({reference_noise(*key, 0, 0, 0, 8).tobytes() for key in keys}) == len(keys)


def test_noise_step_word():
    flat = {0: np.zeros(64, np.float32)}
    fresh = [commit(flat, t, temperature=1.0).committed for t in range(6)]
    kept = [commit(flat, t, temperature=1.0, noise_step=False).committed for t in range(6)]
    assert kept == [fresh[0]] * 6 and len({c[0] for c in fresh}) > 1


# ------------------------------------------------------------------------------------------------------------- rounding


@pytest.mark.parametrize(
    "value, expected",
    [
        (1.0, 1.0),
        (-2.5, -2.5),
        (0.0, 0.0),
        (1 + 2.0**-8, 1.0),  # tie to even, down
        (1 + 3 * 2.0**-8, 1 + 2.0**-6),  # tie to even, up
        (1 + 2.0**-8 + 2.0**-20, 1 + 2.0**-7),
        (math.pi, 3.140625),
        (0.1, 0.10009765625),
        (0.998, 0.99609375),
        (0.9981, 1.0),
        (0.9, 0.8984375),
        (0.95, 0.94921875),
        (3.4e38, INF),  # above the largest bfloat16 by more than half a step
        (INF, INF),
        (-INF, -INF),
    ],
)
def test_bfloat16_known_values(value, expected):
    assert round_bfloat16(value) == expected


def test_bfloat16_is_nearest_even():
    rng = np.random.default_rng(0)
    for value in np.concatenate([rng.standard_normal(300), rng.random(300), 10.0 ** rng.uniform(-30, 30, 300)]):
        value = float(np.float32(value))
        spacing = 2.0 ** (math.frexp(value)[1] - 8)  # 8 significant bits
        assert round_bfloat16(value) == round(value / spacing) * spacing  # Python rounds half to even, exactly here
    assert math.isnan(round_bfloat16(math.nan))


# ----------------------------------------------------------------------------------------------------- token and filters


def filtered_tokens(p, **rule):
    filtered, _ = ref.filter_logits(ReferenceRule(**rule), logs(*p) if isinstance(p, tuple) else p)
    return [v for v in range(len(filtered)) if filtered[v] > -INF]


def test_greedy_ties_go_to_the_lower_id():
    assert commit({0: np.array([1, 3, 3, 2], np.float32)}).committed == [(0, 1)]
    assert commit({0: np.array([-INF, 0, 0], np.float32)}).committed == [(0, 1)]


def test_top_k():
    assert filtered_tokens((0.1, 0.4, 0.3, 0.2), top_k=2) == [1, 2]
    assert filtered_tokens((0.1, 0.4, 0.3, 0.2), top_k=1) == [1]
    assert filtered_tokens((0.1, 0.4, 0.3, 0.2), top_k=9) == [0, 1, 2, 3]
    assert filtered_tokens((0.1, 0.4, 0.3, 0.2), top_k=0) == [0, 1, 2, 3]
    assert filtered_tokens(np.array([1, 2, 2, 2], np.float32), top_k=2) == [1, 2]  # ties: lower id


def test_top_p():
    p = (0.125, 0.5, 0.25, 0.125)
    assert filtered_tokens(p, top_p=0.0) == [1]  # the first token always stays
    assert filtered_tokens(p, top_p=0.49) == [1]
    assert filtered_tokens(p, top_p=0.51) == [1, 2]
    assert filtered_tokens(p, top_p=0.76) == [0, 1, 2]  # ties: lower id
    assert filtered_tokens(p, top_p=1.0) == [0, 1, 2, 3]
    flat = np.zeros(4, np.float32)  # cumulative 0, .25, .5, .75, all exact: preceding mass must be BELOW top_p
    assert filtered_tokens(flat, top_p=0.5) == [0, 1]
    assert filtered_tokens(flat, top_p=0.5000001) == [0, 1, 2]
    assert filtered_tokens((0.4, 0.3, 0.2, 0.1), top_k=2, top_p=0.6) == [0, 1]  # after top-k 4/7 = 0.571 precedes
    assert filtered_tokens((0.4, 0.3, 0.2, 0.1), top_k=2, top_p=0.57) == [0]
    assert filtered_tokens((0.4, 0.0, 0.6), top_p=0.99) == [0, 2]


def test_filtered_and_excluded_tokens_are_never_sampled():
    logits = {0: logs(0.4, 0.3, 0.2, 0.1), 1: logs(0.5, 0.5, 0.0, 0.0)}
    for step in range(200):
        done = commit(logits, step, temperature=2.0, top_k=3)
        assert done.tokens[0] in (0, 1, 2) and done.tokens[1] in (0, 1)


def test_sampling_is_the_race():
    logits = np.random.default_rng(3).standard_normal(9).astype(np.float32)
    for step in range(50):
        race = reference_noise(5, 2, 1, step, 3, 9) - logits / np.float32(0.7)
        rule = ReferenceRule(temperature=0.7, seed=5)
        assert reference_transition(rule, {3: logits}, 2, 1, step).tokens == {3: int(np.argmin(race))}


def test_sampling_frequencies():
    p = np.array([0.5, 0.3, 0.15, 0.05])
    counts = np.zeros(4)
    for step in range(2000):
        counts[commit({0: logs(*p)}, step, temperature=1.0).tokens[0]] += 1
    assert stats.chisquare(counts, 2000 * p).pvalue > 1e-3


# ---------------------------------------------------------------------------------------------------------- confidences

A, B = (0.5, 0.49, 0.01), (0.45, 0.275, 0.275)  # A: higher p, lower entropy; B: larger margin


def test_confidence_values_by_hand():
    logits = {0: logs(*A), 1: logs(*B)}
    got = {c: commit(logits, confidence=c).confidences for c in ("probability", "max_probability", "margin", "entropy")}
    for c in ("probability", "max_probability"):
        assert got[c][0] == pytest.approx(math.log(0.5), rel=1e-6)
        assert got[c][1] == pytest.approx(math.log(0.45), rel=1e-6)
    assert got["margin"][0] == pytest.approx(-(0.5 + 0.49), rel=1e-6)
    assert got["margin"][1] == pytest.approx(-(0.55 + 0.275), rel=1e-6)
    assert got["entropy"][0] == pytest.approx(sum(p * math.log(p) for p in A), rel=1e-6)
    assert got["entropy"][1] == pytest.approx(sum(p * math.log(p) for p in B), rel=1e-6)


def test_each_confidence_orders_by_itself():
    logits = {0: logs(*A), 1: logs(*B)}
    assert commit(logits, confidence="probability").committed == [(0, 0)]
    assert commit(logits, confidence="max_probability").committed == [(0, 0)]
    assert commit(logits, confidence="margin").committed == [(1, 0)]
    assert commit(logits, confidence="entropy").committed == [(0, 0)]
    # entropy against probability: (.5, .5, 0, 0) is surer by entropy than (.55, .15, .15, .15)
    logits = {0: logs(0.55, 0.15, 0.15, 0.15), 1: logs(0.5, 0.5, 0, 0)}
    assert commit(logits, confidence="probability").committed == [(0, 0)]
    assert commit(logits, confidence="entropy").committed == [(1, 0)]


def test_probability_looks_at_the_sample_and_max_probability_does_not():
    logits = {0: logs(0.9, 0.1), 1: logs(0.6, 0.4)}
    differed = 0
    for step in range(60):
        done = commit(logits, step, temperature=1.0)
        for i, p in ((0, (0.9, 0.1)), (1, (0.6, 0.4))):
            assert done.confidences[i] == pytest.approx(math.log(p[done.tokens[i]]), rel=1e-5)
        assert commit(logits, step, temperature=1.0, confidence="max_probability").committed[0][0] == 0
        differed += done.committed[0][0] == 1
    assert 0 < differed < 30


def test_sources():
    # raw: .5 against .45. At T = .5 squares: .25/.4902 = .510 against .2025/.35375 = .572. top-2: .505 against .62 (T = 1).
    logits = {0: logs(*A), 1: logs(*B)}

    def values(**rule):
        return commit(logits, confidence="max_probability", **rule).confidences

    assert values(source="raw", temperature=0.5)[0] == pytest.approx(math.log(0.5), rel=1e-6)
    tempered = values(source="tempered", temperature=0.5)
    assert tempered[0] == pytest.approx(math.log(0.25 / 0.4902), rel=1e-5)
    assert tempered[1] == pytest.approx(math.log(0.2025 / 0.35375), rel=1e-5)
    top2 = values(source="filtered", temperature=1.0, top_k=2)
    assert top2[0] == pytest.approx(math.log(0.5 / 0.99), rel=1e-5)
    assert top2[1] == pytest.approx(math.log(0.45 / 0.725), rel=1e-5)
    assert values(source="tempered", temperature=1.0, top_k=2)[1] == pytest.approx(math.log(0.45), rel=1e-6)
    assert values(source="tempered", temperature=0.0) == values(source="raw", temperature=0.0)
    one = values(source="filtered", temperature=1.0, top_k=1)
    assert one == {0: 0.0, 1: 0.0}  # a certain token
    for c in ("margin", "entropy"):
        assert commit(logits, confidence=c, source="filtered", top_k=1).confidences == {0: 0.0, 1: 0.0}


def test_chosen_token_outside_the_source_has_no_confidence():
    filtered = np.array([0, -INF], np.float32)
    rule = ReferenceRule(source="filtered")
    assert ref.confidence_of(rule, filtered, filtered, filtered, 1) == (-INF, -INF)


def test_float32_ranking_keeps_what_bfloat16_loses():
    logits = {0: logs(0.9985, 0.0015), 1: logs(0.9999, 0.0001)}  # both round to 1 in bfloat16
    for confidence in ("probability", "max_probability"):
        assert commit(logits, confidence=confidence).committed == [(1, 0)]
        low = commit(logits, confidence=confidence, resolution="bfloat16")
        assert low.committed == [(0, 0)] and low.confidences == {0: 1.0, 1: 1.0} and low.gap == 0
    # gaps of 20 and 21: p is 1 in float32 as well, the log is not
    logits = {0: np.array([20, 0], np.float32), 1: np.array([21, 0], np.float32)}
    for confidence in ("probability", "margin", "entropy"):
        done = commit(logits, confidence=confidence)
        assert done.committed == [(1, 0)], confidence
        assert 0 < done.gap < 1e-7
        assert reference_slack(ReferenceRule(confidence=confidence), logits, 0, 0, 0) > 1e-8 or confidence == "entropy"
    assert done.confidences[1] == pytest.approx(-22 * math.exp(-21), rel=1e-5)


def test_bfloat16_compares_the_natural_value():
    done = commit({0: logs(0.7, 0.2, 0.1)}, confidence="margin", resolution="bfloat16")
    assert done.confidences[0] == round_bfloat16(0.5)
    done = commit({0: logs(0.7, 0.2, 0.1)}, confidence="probability", resolution="bfloat16")
    assert done.confidences[0] == round_bfloat16(0.7) == 0.69921875
    done = commit({0: logs(0.5, 0.5)}, confidence="entropy", resolution="bfloat16")
    assert done.confidences[0] == round_bfloat16(math.log(0.5)) == -0.69140625


# ---------------------------------------------------------------------------------------------------------------- commit

FIVE = {0: logs(0.6, 0.4), 1: logs(0.2, 0.8), 3: logs(0.95, 0.05), 4: logs(0.2, 0.8), 6: logs(0.3, 0.7)}


def positions(**rule):
    return [i for i, _ in commit(FIVE, **rule).committed]


def test_select_top():
    assert commit(FIVE).committed == [(3, 0)]
    assert positions(num_per_step=2) == [1, 3]  # 1 and 4 tie: lower position
    assert positions(num_per_step=4) == [1, 3, 4, 6]
    assert positions(num_per_step=99) == [0, 1, 3, 4, 6]
    assert commit(FIVE, num_per_step=2).gap == 0
    assert commit(FIVE).gap == pytest.approx(math.log(0.95 / 0.8), rel=1e-5)
    assert commit(FIVE, num_per_step=5).gap == INF
    assert commit(FIVE, num_per_step=2).committed == [(1, 1), (3, 0)]


def test_select_threshold():
    assert positions(select="threshold", threshold=0.65) == [1, 3, 4, 6]
    assert positions(select="threshold", threshold=0.75) == [1, 3, 4]
    assert positions(select="threshold", threshold=0.99) == [3]  # none: the best
    assert positions(select="threshold", threshold=0.99, num_per_step=3) == [1, 3, 4]  # fewer than the step wants: its best
    assert positions(select="threshold", threshold=0.0) == [0, 1, 3, 4, 6]


def test_strictness_and_threshold_rounding():
    half = {0: np.zeros(2, np.float32), 1: logs(0.9, 0.1)}  # p = 0.5 exactly, and 0.9
    for strict, expected in ((True, [1]), (False, [0, 1])):
        for select, want in (("threshold", expected), ("leftmost_above", expected[:1])):
            done = commit(half, select=select, threshold=0.5, strict=strict)
            assert [i for i, _ in done.committed] == want
    # 0.9 rounds to 0.8984375 in bfloat16, as 0.8985 does
    near = {0: logs(0.8985, 0.1015), 1: logs(0.99, 0.01)}
    for strict, resolution, want in (
        (True, "float32", [1]),
        (False, "float32", [1]),
        (True, "bfloat16", [1]),
        (False, "bfloat16", [0, 1]),
    ):
        done = commit(near, select="threshold", threshold=0.9, strict=strict, resolution=resolution)
        assert [i for i, _ in done.committed] == want
    # the float32 of 0.1 lies above the float64 one
    rule = ReferenceRule(select="threshold", threshold=0.1, strict=True)
    rank = {0: -0.5, 1: -0.4}
    assert ref.choose_positions(rule, rank, {0: float(np.float32(0.1)), 1: 0.2}) == [1]


def test_threshold_uses_the_natural_value():
    logits = {0: logs(0.7, 0.2, 0.1), 1: logs(0.9, 0.05, 0.05)}  # margins .5, .85; negative entropies -.80, -.39
    for confidence, threshold in (("margin", 0.6), ("entropy", -0.5)):
        assert len(commit(logits, select="threshold", confidence=confidence, threshold=threshold).committed) == 1
    assert len(commit(logits, select="threshold", confidence="margin", threshold=0.4).committed) == 2
    assert len(commit(logits, select="threshold", confidence="entropy", threshold=-0.9).committed) == 2


def test_select_left_to_right():
    assert positions(select="left_to_right") == [0]
    assert positions(select="left_to_right", num_per_step=3) == [0, 1, 3]
    assert positions(select="left_to_right", num_per_step=9) == [0, 1, 3, 4, 6]
    assert commit(FIVE, select="left_to_right").gap == INF


def test_select_leftmost_above():
    assert positions(select="leftmost_above", threshold=0.5) == [0]
    assert positions(select="leftmost_above", threshold=0.65) == [1]
    assert positions(select="leftmost_above", threshold=0.9) == [3]
    assert positions(select="leftmost_above", threshold=0.99) == [3]  # none: the best


def test_slack_sees_near_ties():
    close = {0: np.array([1, 0], np.float32), 1: np.array([1 + 2e-6, 0], np.float32)}
    far = {0: np.array([1, 0], np.float32), 1: np.array([2, 0], np.float32)}
    assert commit(close).committed[0][0] == 1
    assert reference_slack(ReferenceRule(), close, 0, 0, 0) <= 1e-5
    assert reference_slack(ReferenceRule(), far, 0, 0, 0) >= 0.1
    low = ReferenceRule(resolution="bfloat16")
    # p = .9985 and .9999 both become 1; the boundary .998047 is 4.5e-4 away
    assert reference_slack(low, {0: logs(0.9985, 0.0015), 1: logs(0.9999, 0.0001)}, 0, 0, 0) == pytest.approx(1e-3)
    at = ReferenceRule(select="threshold", threshold=0.9)
    assert reference_slack(at, {0: logs(0.9000005, 0.0999995), 1: logs(0.99, 0.01)}, 0, 0, 0) <= 1e-6
    assert reference_slack(ReferenceRule(top_p=0.7), {0: logs(0.6999, 0.2001, 0.1)}, 0, 0, 0) == pytest.approx(1e-4, rel=0.01)


# ------------------------------------------------------------------------------------------------------------ whole texts


def fixed(block_length, text, order):
    """Greedy target that writes `text` (absolute positions) in the order given for each block."""

    def logits_fn(prefix, canvas):
        start = len(prefix)
        answer = {}
        for i in range(block_length):
            if canvas[i] is None:
                row = np.zeros(10, np.float32)
                row[text[start + i]] = 5 - order.index(i)
                answer[i] = row
        return answer

    return logits_fn


def test_decode_order_prompt_tail_and_trimming():
    text = [9, 9, 9, 9, 9, 1, 2, 3, 4, 5, 6, 7]
    out = reference_decode(fixed(4, text, [3, 1, 2, 0]), ReferenceRule(), [9] * 5, 4, 5, (), measure_slack=True)
    assert out.ids == [1, 2, 3, 4, 5] and out.finish_reason == "length"
    # block 1 keeps the prompt's tail at position 4; block 2 is filled completely
    assert out.order == [(7, 3, 1, 0), (5, 1, 1, 1), (6, 2, 1, 2), (11, 7, 2, 0), (9, 5, 2, 1), (10, 6, 2, 2), (8, 4, 2, 3)]
    assert out.nfe == 7 and 0 < out.min_gap < INF and out.min_slack > 1e-3
    two = reference_decode(fixed(4, text, [3, 1, 2, 0]), ReferenceRule(num_per_step=2), [9] * 5, 4, 5, ())
    assert two.ids == out.ids and two.nfe == 4
    assert two.order[:2] == [(5, 1, 1, 0), (7, 3, 1, 0)]  # within a transition by position


def test_decode_whole_prompt_blocks_and_empty_prompt():
    out = reference_decode(fixed(2, [0, 0, 1, 2, 3, 4], [0, 1]), ReferenceRule(), [0, 0], 2, 3, ())
    assert out.ids == [1, 2, 3] and [o[2] for o in out.order] == [1, 1, 2, 2]
    out = reference_decode(fixed(2, [5, 6], [0, 1]), ReferenceRule(), [], 2, 1, ())
    assert out.ids == [5] and out.nfe == 2


def test_stop_modes():
    text, left = [1, 2, 8, 3, 4, 5, 6, 7], [0, 1, 2, 3]
    block = reference_decode(fixed(4, text, left), ReferenceRule(), [], 4, 8, (8,))
    prefix = reference_decode(fixed(4, text, left), ReferenceRule(), [], 4, 8, (8,), stop="prefix")
    assert block.ids == prefix.ids == [1, 2, 8] and block.finish_reason == prefix.finish_reason == "stop"
    assert block.nfe == 4 and prefix.nfe == 3 and prefix.order == block.order[:3]
    # the end token comes first, but the text before it is still open
    late = reference_decode(fixed(4, text, [2, 3, 1, 0]), ReferenceRule(), [], 4, 8, (8,), stop="prefix")
    assert late.ids == [1, 2, 8] and late.nfe == 4
    # an end token in the prompt's tail does not count
    own = reference_decode(fixed(4, [8, 1, 2, 3], left), ReferenceRule(), [8], 4, 3, (8,), stop="prefix")
    assert own.ids == [1, 2, 3] and own.finish_reason == "length"
    # later blocks are not started
    assert reference_decode(fixed(4, text, left), ReferenceRule(), [], 4, 8, (7,)).nfe == 8
    assert reference_decode(fixed(4, text, left), ReferenceRule(), [], 4, 8, (3,)).nfe == 4


@pytest.mark.parametrize("seed", range(4))
def test_both_stop_modes_give_the_same_text(seed):
    toy, rule = ToyTarget(5, 4, seed, 2.0), ReferenceRule(temperature=1.0, seed=seed)
    for sequence in range(15):
        block = reference_decode(toy, rule, [0], 4, 10, (1,), "block", sequence)
        prefix = reference_decode(toy, rule, [0], 4, 10, (1,), "prefix", sequence)
        assert block.ids == prefix.ids and block.finish_reason == prefix.finish_reason
        assert prefix.order == block.order[: len(prefix.order)] and prefix.nfe <= block.nfe


def test_toy_target():
    toy = ToyTarget(4, 3, 1)
    first, again = toy([], [None, 2, None]), ToyTarget(4, 3, 1)([], [None, 2, None])
    assert list(first) == [0, 2] and first[0].dtype == np.float32
    assert all(np.array_equal(first[i], again[i]) for i in first)
    rows = [toy(p, c)[2] for p in ([], [0, 0, 0], [0, 0, 1]) for c in ([None, 2, None], [0, 2, None], [3, 2, None])]
    rows += [first[0], ToyTarget(4, 3, 2)([], [None, 2, None])[2]]
    assert len({r.tobytes() for r in rows}) == len(rows)


# ------------------------------------------------------------------------------------------------------------------- law


def sampled_law(toy, rule, prompt, length, tokens, stops, samples, stop="block"):
    law = {}
    for sequence in range(samples):
        ids = tuple(reference_decode(toy, rule, prompt, length, tokens, stops, stop, sequence).ids)
        law[ids] = law.get(ids, 0.0) + 1 / samples
    return law


def law_pvalue(law, exact, samples):
    """Chi-square of sampled against exact frequencies, outcomes expected under 5 times pooled."""
    rows, rest = [], [0.0, 0.0]
    for ids, p in exact.items():
        if samples * p >= 5:
            rows.append((samples * law.get(ids, 0.0), samples * p))
        else:
            rest[0] += samples * law.get(ids, 0.0)
            rest[1] += samples * p
    if rest[1] > 0:
        rows.append(tuple(rest))
    observed, expected = np.array(rows).T
    statistic = float(((observed - expected) ** 2 / expected).sum())
    return float(stats.chi2.sf(statistic, len(rows) - 1))


def noise_floor(exact, samples):
    """Expected total variation of `samples` independent draws from the law itself."""
    return 0.5 * sum(math.sqrt(2 * p * (1 - p) / (math.pi * samples)) for p in exact.values())


def test_exact_law_by_hand():
    # position 1's law given the token of position 0, left to right
    table = {None: (0.25, 0.75), 0: (0.5, 0.5), 1: (0.1, 0.9)}

    def logits_fn(prefix, canvas):
        return {i: logs(*table[canvas[0]]) if i == 1 else logs(0.3, 0.7) for i in (0, 1) if canvas[i] is None}

    rule = ReferenceRule(select="left_to_right", temperature=1.0)
    law = exact_law(logits_fn, rule, [], 2, 2, ())
    expected = {(0, 0): 0.15, (0, 1): 0.15, (1, 0): 0.07, (1, 1): 0.63}
    assert law == {k: pytest.approx(v, rel=1e-6) for k, v in expected.items()}
    both = exact_law(logits_fn, ReferenceRule(num_per_step=2, temperature=1.0), [], 2, 2, ())
    assert both[1, 0] == pytest.approx(0.7 * 0.25, rel=1e-6)
    # most probable first: position 1 (0.75) unless it drew 0 (0.25, then position 0 always wins, with .3 or .7)
    top = exact_law(logits_fn, ReferenceRule(temperature=1.0), [], 2, 2, ())
    assert top[0, 0] == pytest.approx(0.25 * 0.3 * 0.5, rel=1e-6)
    assert top[0, 1] == pytest.approx(0.25 * 0.3 * 0.5 + 0.75 * 0.3, rel=1e-6)
    ended = exact_law(logits_fn, rule, [], 2, 2, (0,))
    assert ended[(0,)] == pytest.approx(0.3, rel=1e-6) and ended[1, 0] == pytest.approx(0.07, rel=1e-6)
    assert exact_law(logits_fn, ReferenceRule(), [], 2, 2, ()) == {(1, 1): 1.0}


class Timesteps(NamedTuple):
    steps: int
    kind: str = "timesteps"


LAWS = [
    ({}, (3, 3, [], 3, ())),
    ({"confidence": "max_probability", "noise_step": False}, (3, 3, [], 3, ())),
    ({"confidence": "entropy", "select": "threshold", "threshold": -0.7, "noise_step": False}, (3, 3, [], 3, ())),
    ({"confidence": "margin", "source": "tempered", "temperature": 1.7}, (3, 2, [1], 3, (2,))),
    ({"select": "left_to_right", "noise_step": False, "top_p": 0.8}, (3, 2, [1], 3, (0,))),
    ({"select": "threshold", "threshold": 0.6, "resolution": "bfloat16"}, (3, 3, [], 3, (1,))),
    ({"select": "leftmost_above", "threshold": 0.5, "source": "filtered", "top_k": 2}, (3, 3, [], 3, ())),
    ({"order_temperature": INF, "noise_step": False}, (3, 3, [], 3, ())),
    ({"order_temperature": 0.2, "num_per_step": 2, "span": 2}, (3, 3, [], 3, (1,))),
    ({"order_temperature": 0.3, "confidence": "entropy", "schedule": Timesteps(5)}, (3, 3, [], 3, ())),
    ({"select": "arrival", "schedule": Timesteps(4)}, (3, 3, [], 3, (2,))),
]


@pytest.mark.parametrize("options, case", LAWS)
def test_law_sums_to_one_and_matches_decoding(options, case):
    vocab, length, prompt, tokens, stops = case
    toy, rule = ToyTarget(vocab, length, 11, 1.5), ReferenceRule(**{"temperature": 1.0, **options})
    exact = exact_law(toy, rule, prompt, length, tokens, stops)
    assert sum(exact.values()) == pytest.approx(1, abs=1e-12)
    samples = 800 if options else 3000  # the default rule with all of them: these tests share two cores
    stop = "prefix" if stops else "block"
    law = sampled_law(toy, rule, prompt, length, tokens, stops, samples, stop)
    assert set(law) <= set(exact)
    assert total_variation(law, exact) < 2 * noise_floor(exact, samples) + 0.005
    assert law_pvalue(law, exact, samples) > 1e-4


def test_law_sums_to_one_at_the_largest_size():
    exact = exact_law(ToyTarget(4, 4, 0, 1.0), ReferenceRule(temperature=1.0, num_per_step=2), [], 4, 4, ())
    assert len(exact) == 256 and sum(exact.values()) == pytest.approx(1, abs=1e-12)


def test_exact_law_refuses_stale_noise_with_a_sampled_order():
    toy = ToyTarget(2, 2)
    with pytest.raises(ValueError):
        exact_law(toy, ReferenceRule(temperature=1.0, noise_step=False), [], 2, 2, ())
    exact_law(toy, ReferenceRule(temperature=1.0, noise_step=False, select="left_to_right"), [], 2, 2, ())


# Toys on which dropping the step from the noise shows best (of 300 seeds; 400,000 simulated decodes):
# scale 1, seed 265: total variation 0.222; scale 2, seed 286: 0.172. With the step 0.002, the Monte Carlo floor.
POWER = [(265, 1.0, 0.222), (286, 2.0, 0.172)]


@pytest.mark.parametrize("seed, scale, expected", POWER)
def test_power_the_law_test_notices_noise_without_the_step(seed, scale, expected):
    toy, samples = ToyTarget(3, 3, seed, scale), 1200
    good = ReferenceRule(temperature=1.0)
    broken = ReferenceRule(temperature=1.0, noise_step=False)
    exact = exact_law(toy, good, [], 3, 3, ())
    right, wrong = (sampled_law(toy, rule, [], 3, 3, (), samples) for rule in (good, broken))
    assert abs(total_variation(wrong, exact) - expected) < 0.06
    assert total_variation(right, exact) < 0.07 < 0.11 < total_variation(wrong, exact)
    assert law_pvalue(right, exact, samples) > 1e-4
    assert law_pvalue(wrong, exact, samples) < 1e-12
