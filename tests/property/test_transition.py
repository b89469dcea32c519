"""Properties of the transition: rows are independent to the bit, ties are broken by rule, commits follow the rule."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import unchecked

from spot_dlm.noise import CoupledNoise
from spot_dlm.state import BlockState
from spot_dlm.transition import Candidates, Sampling, UnmaskRule, commit, denoise, filter_logits, first_argmax, propose, select

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
    done = commit(state, found, UnmaskRule(num_per_step=2))
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
