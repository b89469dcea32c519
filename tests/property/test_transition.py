"""Properties of the transition: rows are independent to the bit, ties are broken by rule, commits follow the rule."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import unchecked

from spot_dlm import confidence as confidence_module
from spot_dlm import noise as noise_module
from spot_dlm import race, transition, verify
from spot_dlm.confidence import measure
from spot_dlm.noise import CoupledNoise
from spot_dlm.schedule import Schedule
from spot_dlm.state import BlockState
from spot_dlm.transition import (
    Candidates,
    Sampling,
    UnmaskRule,
    commit,
    denoise,
    filter_logits,
    first_argmax,
    propose,
    select,
    step_noise,
)
from spot_dlm.verify import Step, denoise_many

SMALL = settings(max_examples=40, deadline=None, derandomize=True, database=None)
CONFIDENCES = ("probability", "max_probability", "margin", "entropy")


def bits(candidates: Candidates, at=slice(None)) -> tuple:
    return tuple(getattr(candidates, name)[at].tobytes() for name in ("positions", "tokens", "rank", "natural", "fine"))


def drawn(rng, rows, vocab, scale):
    return torch.from_numpy((scale * rng.standard_normal((rows, vocab))).astype(np.float32))


@pytest.mark.parametrize("vocab", [5, 64, 768, 40000])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.7), Sampling(1.0, top_k=50, top_p=0.9)], ids=["T0", "T0.7", "filtered"])
def test_rows_are_independent_to_the_bit(vocab, sampling):
    """All rows at once, one at a time, in pairs, reversed, and among strangers: the same tokens and the same confidence bits."""
    rng = np.random.default_rng(vocab)
    count = 9 if vocab < 40000 else 5
    logits = drawn(rng, count, vocab, 4.0)
    logits[:, rng.integers(0, vocab)] = -torch.inf
    positions = np.arange(count)
    noise = None if sampling.temperature == 0 else CoupledNoise(1, 2).rows(0, 0, positions, vocab)
    sources = ("raw", "filtered") if sampling.top_k else ("tempered",)
    groups = [[i] for i in range(count)] + [[0, 1], [count - 1, 2, 0], list(range(count))[::-1]]
    with unchecked():
        for confidence, source in itertools.product(CONFIDENCES, sources):
            rule = UnmaskRule(confidence=confidence, source=source)
            whole = propose(positions, logits, rule, sampling, noise)
            for group in groups:
                part = propose(positions[group], logits[group], rule, sampling, None if noise is None else noise[group])
                assert bits(part) == bits(whole, group), (confidence, source, group)
            strangers = torch.cat((logits, drawn(rng, 12, vocab, 1.0)))
            more = None if noise is None else torch.cat((noise, noise.flip(0), noise))[: len(strangers)]
            strangers = strangers if more is None else strangers[: len(more)]
            among = propose(np.arange(len(strangers)), strangers, rule, sampling, more)
            assert bits(among, slice(count)) == bits(whole), (confidence, source, "among strangers")


def test_rows_do_not_depend_on_the_number_of_threads():
    rng, rule = np.random.default_rng(0), UnmaskRule(confidence="entropy")
    logits = drawn(rng, 6, 40000, 3.0)
    one = propose(np.arange(6), logits, rule, Sampling(), None)
    torch.set_num_threads(2)
    try:
        two = propose(np.arange(6), logits, rule, Sampling(), None)
    finally:
        torch.set_num_threads(1)
    assert bits(one) == bits(two)


@SMALL
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=4, max_size=4), min_size=1, max_size=5), st.sampled_from([torch.float32, torch.bfloat16])
)
def test_the_first_maximum_wins(rows, dtype):
    got = first_argmax(torch.tensor(rows, dtype=dtype))
    assert got.tolist() == [row.index(max(row)) for row in rows]


def test_an_undecided_row_has_no_maximum():
    assert first_argmax(torch.tensor([[0.0, float("nan"), 1.0], [3.0, 3.0, 0.0]])).tolist() == [3, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("resolution", ["float32", "bfloat16"])
def test_token_and_position_ties_go_low(dtype, resolution):
    """Equal logits give the lower id, equal confidences the lower position, for every confidence."""
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0]] * 4).to(dtype)
    state = BlockState.initial(0, [9], 5)
    for confidence in CONFIDENCES:
        for k in (1, 2, 3, 4):
            rule = UnmaskRule(confidence=confidence, resolution=resolution, num_per_step=k)
            done = denoise(state, logits, rule, Sampling(), CoupledNoise(0, 0))
            assert done.positions.tolist() == [1, 2, 3, 4][:k] and done.tokens.tolist() == [1] * k


ranks = st.lists(st.integers(0, 4), min_size=1, max_size=7)


def candidates_of(values, offset=2):
    values = np.array(values, dtype=np.float32) / 4
    return Candidates(np.arange(len(values)) * 2 + offset, np.arange(len(values)) + 10, values, values, values)


@SMALL
@given(ranks, st.integers(1, 8))
def test_select_top_is_the_stable_order(values, k):
    got = select(candidates_of(values), UnmaskRule(num_per_step=k)).tolist()
    assert got == sorted(range(len(values)), key=lambda i: (-values[i], i))[:k]
    assert select(candidates_of(values), UnmaskRule(select="left_to_right", num_per_step=k)).tolist() == list(range(len(values)))[:k]


@SMALL
@given(ranks, st.integers(0, 4), st.booleans())
def test_select_by_threshold(values, limit, strict):
    above = [i for i, v in enumerate(values) if (v > limit if strict else v >= limit)]
    best = [values.index(max(values))]
    every = select(candidates_of(values), UnmaskRule(select="threshold", threshold=limit / 4, strict=strict))
    assert sorted(every.tolist()) == (above or best)
    assert every.tolist() == sorted(every.tolist(), key=lambda i: (-values[i], i))
    first = select(candidates_of(values), UnmaskRule(select="leftmost_above", threshold=limit / 4, strict=strict))
    assert first.tolist() == (above[:1] or best)


@SMALL
@given(ranks)
def test_commit_writes_what_was_selected(values):
    found = candidates_of(values, offset=0)
    canvas = np.full(2 * len(values), 7)
    canvas[found.positions] = -1
    state = BlockState(1, canvas, 3)
    done = commit(state, found, UnmaskRule(num_per_step=2), CoupledNoise(0, 0))
    assert done.before is state and done.state.step == 4 and len(done.positions) == min(2, len(values))
    assert done.state.canvas[done.positions].tolist() == done.tokens.tolist() == (done.positions // 2 + 10).tolist()
    assert done.state.masked.tolist() == sorted(set(state.masked.tolist()) - set(done.positions.tolist()))


@SMALL
@given(st.lists(st.integers(-3, 3), min_size=2, max_size=8), st.integers(0, 9), st.sampled_from([1.0, 0.9, 0.5, 0.01]))
def test_filters_keep_the_best_tokens_and_break_ties_by_id(row, top_k, top_p):
    logits = torch.tensor([row, row[::-1]], dtype=torch.float32)
    kept = torch.isfinite(filter_logits(logits, top_k, top_p))
    for values, keep in zip((row, row[::-1]), kept.tolist(), strict=True):
        order = sorted(range(len(values)), key=lambda v: (-values[v], v))
        count = sum(keep)
        assert {v for v, k in enumerate(keep) if k} == set(order[:count]) and count >= 1
        assert count <= (top_k or len(values)) and (top_p < 1 or count == min(top_k or len(values), len(values)))
    assert torch.equal(filter_logits(logits, top_k, top_p)[kept], logits[kept])


def plain_measure(source, tokens, confidence):
    """`measure` in torch alone, as it runs on devices."""
    top = source.amax(-1, keepdim=True)
    at = torch.where(source == top, torch.arange(source.shape[-1]), source.shape[-1]).amin(-1, keepdim=True)
    gaps = source - top
    odds = gaps.exp().scatter_(-1, at, 0.0)
    rest = odds.sum(dim=-1)
    logp_top = -torch.log1p(rest)
    if confidence == "probability":
        rank = gaps.gather(-1, tokens[:, None])[:, 0] + logp_top
        return rank, rank.exp()
    if confidence == "max_probability":
        return logp_top, logp_top.exp()
    if confidence == "margin":
        second = odds.amax(dim=-1)
        return -(rest + second) / (1 + rest), (1 - second) / (1 + rest)
    entropy = torch.where(odds > 0, odds * gaps, 0.0).sum(dim=-1) / (1 + rest) + logp_top
    return entropy, entropy


@pytest.mark.parametrize("vocab", [1, 2, 7, 768, 5000])
@pytest.mark.parametrize("confidence", CONFIDENCES)
def test_compiled_confidence_has_the_bits_of_torch(vocab, confidence):
    rng = np.random.default_rng(vocab)
    for scale in (0.0, 1.0, 9.0, 500.0):
        source = drawn(rng, 9, vocab, scale)
        source[torch.from_numpy(rng.random(source.shape)) < 0.2] = -torch.inf
        source[:, rng.integers(vocab)] = 0.5
        tokens = torch.from_numpy(rng.integers(0, vocab, 9))
        for ours, plain in zip(measure(source, tokens, confidence), plain_measure(source, tokens, confidence), strict=True):
            assert torch.equal(ours.view(torch.int32), plain.view(torch.int32))


def random_rule(rng):
    confidence, select = str(rng.choice(CONFIDENCES)), str(rng.choice(("top", "threshold", "left_to_right", "leftmost_above", "arrival")))
    return UnmaskRule(
        select,
        int(rng.integers(1, 4)) if select in ("top", "left_to_right") else 1,
        -0.6 if confidence == "entropy" else 0.6,
        bool(rng.integers(2)),
        confidence,
        str(rng.choice(("raw", "tempered", "filtered"))),
        str(rng.choice(("float32", "bfloat16"))),
        noise_step=bool(rng.integers(2)) or (confidence == "probability" and select not in ("left_to_right", "arrival")),
        schedule=Schedule("timesteps", 5) if select == "arrival" else None,
        order_temperature=float(rng.choice((0.0, 0.3, np.inf))) if select == "top" else 0.0,
    )


SAMPLINGS = [Sampling(), Sampling(1.0), Sampling(0.7), Sampling(1.0, top_p=0.9), Sampling(1.3, top_k=3, top_p=0.95)]


def random_step(rng, rule, sampling, vocab):
    length = int(rng.integers(1, 9))
    canvas = np.where(rng.random(length) < 0.7, -1, 5)
    canvas[rng.integers(length)] = -1
    state = BlockState(int(rng.integers(5)), canvas, int(rng.integers(5)))
    logits = drawn(rng, len(state.masked), vocab, float(rng.choice([0.5, 3.0, 20.0])))
    logits[:, rng.integers(vocab)] = -torch.inf if vocab > 1 else 0.0
    logits = logits.to(torch.bfloat16) if rng.integers(5) == 0 else logits
    return Step(state, logits, rule, sampling, CoupledNoise(int(rng.integers(9)), int(rng.integers(9)), rule.noise_step))


def one_by_one(step):
    try:
        return denoise(step.state, step.logits, step.rule, step.sampling, step.noise)
    except ValueError as error:
        return error


def same(a, b):
    if isinstance(a, ValueError) or isinstance(b, ValueError):
        return str(a) == str(b)
    return (a.before, a.state, a.positions.tolist(), a.tokens.tolist(), bits(a.candidates)) == (
        b.before,
        b.state,
        b.positions.tolist(),
        b.tokens.tolist(),
        bits(b.candidates),
    )


@SMALL
@given(st.integers(0, 2**32))
def test_a_step_is_its_definition_with_all_noise_drawn(seed):
    rng = np.random.default_rng(seed)
    with unchecked():
        step = random_step(rng, random_rule(rng), SAMPLINGS[rng.integers(len(SAMPLINGS))], int(rng.choice([1, 2, 9, 300])))
        state = step.state
        noise = step_noise(state, state.masked, step.logits.shape[-1], step.sampling, step.noise)
        proposed = propose(state.masked, step.logits, step.rule, step.sampling, noise)
        assert same(one_by_one(step), commit(state, proposed, step.rule, step.noise))


@SMALL
@given(st.integers(0, 2**32), st.sampled_from([2**20, 40, 1]))
def test_steps_together_are_those_one_by_one(seed, shared):
    """Any mixture of rules, samplings, noises and vocabularies, to the bit, and broken logits stay with their own step."""
    rng = np.random.default_rng(seed)
    rules, samplings = [random_rule(rng) for _ in range(2)], [SAMPLINGS[i] for i in rng.integers(0, len(SAMPLINGS), 2)]
    limit, verify._SHARED_LOGITS = verify._SHARED_LOGITS, shared
    try:
        with unchecked():
            choices = [(rules[rng.integers(2)], samplings[rng.integers(2)], int(rng.choice([1, 9, 9, 300]))) for _ in range(12)]
            steps = [random_step(rng, *choice) for choice in choices]
            for i in rng.integers(0, len(steps), rng.integers(3)):
                steps[i].logits[rng.integers(len(steps[i].logits))] = float(rng.choice([np.nan, np.inf, -np.inf]))
            assert all(map(same, denoise_many(steps), map(one_by_one, steps)))
    finally:
        verify._SHARED_LOGITS = limit


def test_an_error_of_one_step_is_its_own():
    """With shape checks: two good steps, one broken one, and none at all."""
    rng, rule = np.random.default_rng(0), UnmaskRule()
    good, bad, more = (random_step(rng, rule, Sampling(1.0), 9) for _ in range(3))
    bad.logits[-1, 3] = torch.nan
    first, second, third = denoise_many([good, bad, more])
    assert same(first, one_by_one(good)) and same(third, one_by_one(more))
    assert isinstance(second, ValueError) and f"(block position {bad.state.masked[-1]})" in str(second)
    assert denoise_many([]) == []


def test_missing_rows_do_not_shift_those_of_others():
    rng, rule = np.random.default_rng(0), UnmaskRule()
    good, more = (random_step(rng, rule, Sampling(1.0), 9) for _ in range(2))
    short, long = replace(good, logits=good.logits[1:]), replace(good, logits=good.logits.repeat(2, 1))
    with unchecked():
        first, second, third = denoise_many([short, more, long])
        assert same(second, one_by_one(more))
        assert all("rows of logits" in str(e) and same(e, one_by_one(step)) for e, step in ((first, short), (third, long)))


def test_padding_between_rows_does_not_matter():
    """Logits cut from a wider table, as padded vocabularies give them."""
    wide = drawn(np.random.default_rng(1), 4, 80, 3.0)
    state, rest = BlockState.initial(0, [], 4), (UnmaskRule(), Sampling(1.0, top_p=0.9), CoupledNoise(1, 1))
    assert same(denoise(state, wide[:, :70], *rest), denoise(state, wide[:, :70].contiguous(), *rest))


def test_the_path_of_other_devices_has_the_same_bits(monkeypatch):
    """What torch computes where compiled code cannot: on the host's tensors here, so that it is tested everywhere."""
    rng = np.random.default_rng(3)
    with unchecked():
        steps = [random_step(rng, random_rule(rng), SAMPLINGS[i % len(SAMPLINGS)], int(rng.choice([2, 9, 300]))) for i in range(150)]
        for step in steps[::10]:
            step.logits[-1, -1] = float(rng.choice([np.nan, np.inf]))
        compiled = denoise_many(steps)
        scores = drawn(rng, 4, 50, 2.0)
        tokens = CoupledNoise(1, 1).draw(0, [3, 4], np.arange(4), scores)
        for module in (race, noise_module, confidence_module, transition):
            monkeypatch.setattr(module, "on_host", lambda _: False)
        assert sum(isinstance(a, ValueError) for a in compiled) == 15
        assert all(map(same, map(one_by_one, steps), compiled)) and all(map(same, denoise_many(steps), compiled))
        assert np.array_equal(CoupledNoise(1, 1).draw(0, [3, 4], np.arange(4), scores), tokens)
        assert CoupledNoise(1, 1).draw(0, [], np.arange(4), scores).shape == (0, 4)
