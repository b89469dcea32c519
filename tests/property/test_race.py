"""Properties of the compiled race: the tokens that drawing all noise gives, whatever the scores, with ties by rule."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import unchecked

from spot_dlm import race
from spot_dlm.noise import CoupledNoise, draw_each
from spot_dlm.race import descending, first_argmax
from spot_dlm.transition import filter_logits, temper

SMALL = settings(max_examples=60, deadline=None, derandomize=True, database=None)
SIZES = (1, 2, 3, 5, 64, 127, 128, 129, 300, 768, 5000)
STEPS = (7, 3, 8)


def drawn_in_full(noise, block, steps, positions, scores):
    """The definition: all noise, one subtraction in float32, the first maximum."""
    rows = [noise.rows(block, step, positions, scores.shape[-1]) for step in steps]
    return np.stack([(scores - values).numpy().argmax(-1) for values in rows])


def scores_of(rng, rows, size):
    """Sharp, flat, tied, with few or many removed tokens, at any scale, before or after the temperature and the filters."""
    scale = rng.choice([0.0, 0.1, 1.0, 4.0, 30.0, 1e3, 1e6, 1e30])
    scores = (scale * rng.standard_normal((rows, size))).astype(np.float32)
    if rng.integers(3) == 0:
        scores = np.round(scores)
    if rng.integers(3) == 0:
        scores[rng.random(scores.shape) < rng.random()] = -np.inf
    if rng.integers(3) == 0:
        scores[np.arange(rows), rng.integers(0, size, rows)] += np.float32(rng.choice([5, 20, 100]))
    scores = temper(torch.from_numpy(scores), float(rng.choice([1, 1, 0.7, 2.5])))
    return filter_logits(scores, int(rng.choice([0, 0, 1, 3, 50])), float(rng.choice([1, 1, 0.9, 0.3])))


@SMALL
@given(st.integers(0, 2**32), st.sampled_from(SIZES))
def test_the_winner_of_all_noise_is_drawn(seed, size):
    rng = np.random.default_rng(seed)
    positions = np.sort(rng.choice(64, 5, replace=False))
    noise = CoupledNoise(seed, 1, use_step=bool(rng.integers(4)))
    with unchecked():
        scores = scores_of(rng, 5, size)
        drawn = noise.draw(2, STEPS, positions, scores)
        assert np.array_equal(drawn, drawn_in_full(noise, 2, STEPS, positions, scores))
        spans = [(0, 2), (2, 3), (3, 5)]  # rows of several noises in one call
        parts = [(CoupledNoise(seed + begin, 1), 2 + begin, begin, end - begin) for begin, end in spans]
        each = [n.draw(b, [s], positions[i:j], scores[i:j])[0] for (n, b, s, _), (i, j) in zip(parts, spans, strict=True)]
        assert draw_each(parts, positions, scores, first_argmax(scores)).tolist() == np.concatenate(each).tolist()


@SMALL
@given(st.integers(0, 2**32), st.sampled_from((2, 40, 129, 1000)), st.sampled_from([0.0, 1e-3, 3.0, -50.0, 1e4, 3e7]))
def test_scores_that_all_but_tie(seed, size, level):
    """Scores set to the noise itself, up to their rounding: every token is within an ulp or two of winning, and many tie exactly."""
    rng, positions, noise = np.random.default_rng(seed), np.arange(4), CoupledNoise(seed, 2)
    with unchecked():
        scores = np.float32(level) + noise.rows(0, 0, positions, size).numpy()
        scores = np.nextafter(scores, np.where(rng.random(scores.shape) < 0.5, scores, np.float32(np.inf)))
        scores[rng.random(scores.shape) < 0.2] = -np.inf
        scores = torch.from_numpy(scores)
        won = noise.draw(0, [0, 1], positions, scores)
        assert np.array_equal(won, drawn_in_full(noise, 0, [0, 1], positions, scores))


@pytest.mark.parametrize("size", [1, 3, 200])
def test_undecided_rows(size):
    """NaN gives V, whatever else is in the row; plus infinity wins, the first one; a row without a finite score keeps its first token."""
    scores = torch.zeros(6, size)
    scores[0, size // 2] = torch.nan
    scores[1] = torch.nan
    scores[2, size // 2 :] = torch.inf
    scores[3] = -torch.inf
    scores[4] = -torch.inf
    scores[4, -1] = -3e38
    scores[5, 0], scores[5, -1] = torch.inf, torch.nan
    drawn = CoupledNoise(0, 0).draw(0, [0, 5], np.arange(6), scores)
    assert drawn.tolist() == [[size, size, size // 2, 0, size - 1, size]] * 2


def test_no_positions_and_no_steps():
    noise = CoupledNoise(0, 0)
    assert noise.draw(0, [1, 2], np.arange(0), torch.zeros(0, 5)).shape == (2, 0)
    assert noise.draw(0, [], np.arange(3), torch.zeros(3, 5)).shape == (0, 3)


def test_the_scores_layout_does_not_matter():
    wide = torch.randn(4, 90, generator=torch.Generator().manual_seed(0))
    scores, noise = wide[:, ::3], CoupledNoise(3, 1)
    assert np.array_equal(noise.draw(0, [2], np.arange(4), scores), noise.draw(0, [2], np.arange(4), scores.contiguous()))


def test_odds_are_bounded_from_above():
    """The whole argument of the race: never below the true odds, so that no possible winner is passed over, and not far above."""
    gaps = np.concatenate((-np.logspace(-8, 1.9, 200_000), -np.linspace(0, 80, 200_000))).astype(np.float32)
    for top in (0.0, 5.5, -300.0):
        scores = np.float32(top) + gaps
        bits = np.empty(len(scores), np.int32)
        race._bound_odds(scores, np.float32(top), bits)
        ratio = bits.view(np.float32) / np.exp(scores.astype(np.float64) - top)
        kept = scores - np.float32(top) >= -80
        assert ratio.min() > 1 + 2e-5 and ratio[kept].max() < 1.07


def test_one_minus_u_is_rounded_down():
    missing, h1, h2 = np.empty(1000, np.float32), np.uint64(2**63 + 12345), np.uint64(99)
    race._hash_chunk(h1, h2, 5, missing)
    exact = -np.expm1(-np.exp([np.float64(race._noise_of(h1, h2, k)) for k in range(5, 1005)]))
    units = exact * 2**24
    assert ((missing <= units * (1 + 1e-5)) & (units - missing < 1 + units * 1e-5)).all()


def test_only_few_logarithms_are_taken(monkeypatch):
    """What makes it cheap: of 5000 tokens a few dozen are candidates, for flat and for sharp distributions."""
    plain, calls = race._noise_of.py_func, []
    names = ("_noise_of", "_limit", "_bound_odds", "_hash_chunk", "_any_possible", "_position_key", "_mix_word", "log_scalar")
    for name in names:
        monkeypatch.setattr(race, name, getattr(race, name).py_func)
    monkeypatch.setattr(race, "_noise_of", lambda h1, h2, k: calls.append(k) or plain(h1, h2, k))
    keys, positions, out = np.array([[5]], dtype=np.uint64), np.arange(1), np.empty((1, 1), np.int64)
    for scale in (0.0, 3.0):
        scores = (scale * np.random.default_rng(0).standard_normal((1, 5000))).astype(np.float32)
        calls.clear()
        with np.errstate(over="ignore"):
            race._find_winners.py_func(keys, positions, scores, scores.argmax(-1), out)
        assert np.array_equal(out, race.race(keys, positions, scores, scores.argmax(-1))) and 1 <= len(calls) < 60


special = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 3e38, -3e38, float("inf"), -float("inf")])


@SMALL
@given(st.lists(st.lists(special | st.floats(width=32, allow_nan=False), min_size=9, max_size=9), min_size=1, max_size=4))
def test_descending_is_the_stable_order(rows):
    values = torch.tensor(rows, dtype=torch.float32)
    assert torch.equal(descending(values), torch.sort(values, dim=-1, descending=True, stable=True)[1])
    assert torch.equal(descending(values)[:, 0], first_argmax(values))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_cuda_device_draws_the_same_tokens():
    rng, positions = np.random.default_rng(0), np.arange(6)
    for size in SIZES:
        scores = scores_of(rng, 6, size)
        there = CoupledNoise(1, 2, device="cuda").draw(0, STEPS, positions, scores.cuda())
        assert np.array_equal(CoupledNoise(1, 2).draw(0, STEPS, positions, scores), there)
        assert torch.equal(first_argmax(scores.cuda()).cpu(), first_argmax(scores))
        assert torch.equal(descending(scores.cuda()).cpu(), descending(scores))
