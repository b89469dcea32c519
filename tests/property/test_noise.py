"""Properties of the coupled noise: a pure function of its key, whatever was asked before, and exponential."""

from __future__ import annotations

from inspect import unwrap

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from toy import unchecked

from spot_dlm import noise as noise_module
from spot_dlm.noise import CoupledNoise

SMALL = settings(max_examples=15, deadline=None, derandomize=True, database=None)
words = st.integers(0, 2**64 - 1)
keys = st.tuples(words, words, st.integers(0, 2**31), st.integers(0, 300))
position_sets = st.lists(st.integers(0, 63), min_size=1, max_size=8, unique=True)


def rows(noise, block, step, positions, vocab=11):
    with unchecked():
        return noise.rows(block, step, np.array(positions, dtype=np.int64), vocab)


@SMALL
@given(keys, st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), position_sets, st.sampled_from([3, 11])), min_size=1, max_size=8))
def test_bits_do_not_depend_on_earlier_calls(key, calls):
    """One object with a cache, asked in any order, for any (also unsorted) subsets, equals a fresh object for every single row."""
    seed, sequence, block, step = key
    warm = CoupledNoise(seed, sequence)
    for more_blocks, more_steps, positions, vocab in [*calls, *calls[::-1]]:
        got = rows(warm, block + more_blocks, step + more_steps, positions, vocab)
        assert got.dtype == torch.float32 and got.shape == (len(positions), vocab)
        for i, position in enumerate(positions):
            alone = rows(CoupledNoise(seed, sequence), block + more_blocks, step + more_steps, [position], vocab)
            assert torch.equal(got[i : i + 1], alone)


@SMALL
@given(keys, position_sets)
def test_bits_do_not_depend_on_the_eviction(key, positions):
    seed, sequence, block, step = key
    limit, noise_module._CACHE_BYTES = noise_module._CACHE_BYTES, 10
    try:
        small = CoupledNoise(seed, sequence)
        first = [rows(small, block, step + d, positions).clone() for d in range(4)]
        assert len(small._cache) == 1 and small._cached_bytes == first[0].nbytes
        assert all(torch.equal(rows(small, block, step + d, positions), first[d]) for d in (2, 0, 3, 1))
    finally:
        noise_module._CACHE_BYTES = limit


def test_a_changed_positions_array_does_not_reach_the_cache():
    noise, positions = CoupledNoise(1, 2), np.array([0, 3, 5])
    noise.rows(0, 0, positions, 7)
    positions[:] = [1, 2, 4]
    assert torch.equal(noise.rows(0, 0, positions, 7), rows(CoupledNoise(1, 2), 0, 0, [1, 2, 4], 7))


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.uint32, np.int64, np.uint64])
def test_bits_do_not_depend_on_the_dtype_of_positions(dtype):
    """Past the test run's annotation checks, which ask for int64; users of other dtypes get the same bits."""
    plain = unwrap(CoupledNoise._draw)
    positions = np.array([7, 0, 31])
    expected = rows(CoupledNoise(5, 6), 2, 3, positions)
    assert torch.equal(plain(CoupledNoise(5, 6), 2, 3, positions.astype(dtype), 11), expected)


@SMALL
@given(keys, st.integers(0, 63), st.integers(0, 4), st.integers(1, 2**20))
def test_every_word_of_the_key_matters(key, position, which, change):
    words_before = [*key, position]
    words_after = [w + change if i == which else w for i, w in enumerate(words_before)]
    first, second = (rows(CoupledNoise(w[0], w[1]), w[2], w[3], [w[4]], 16) for w in (words_before, words_after))
    assert (first != second).all()


@SMALL
@given(words, words)
def test_seed_and_sequence_are_not_interchangeable(seed, sequence):
    same = torch.equal(rows(CoupledNoise(seed, sequence), 0, 0, [0]), rows(CoupledNoise(sequence, seed), 0, 0, [0]))
    assert same == (seed == sequence)


@SMALL
@given(keys, st.integers(1, 40), st.integers(1, 40))
def test_a_wider_vocabulary_only_adds_columns(key, narrow, more):
    seed, sequence, block, step = key
    wide = rows(CoupledNoise(seed, sequence), block, step, [0, 9], narrow + more)
    assert torch.equal(wide[:, :narrow], rows(CoupledNoise(seed, sequence), block, step, [0, 9], narrow))


def test_only_the_low_64_bits_of_the_keys_count():
    assert torch.equal(rows(CoupledNoise(-1, 2**64 + 3), 0, 0, [1]), rows(CoupledNoise(2**64 - 1, 3), 0, 0, [1]))


def test_log_is_accurate():
    x = torch.cat((torch.logspace(-300, 300, 4001, dtype=torch.float64), torch.linspace(0.5, 2, 4001, dtype=torch.float64)))
    exact = np.log(x.numpy())
    error = np.abs(noise_module._log(x).numpy() - exact)
    assert (error <= 1e-9 * np.abs(exact) + 1e-300).all()


def test_values_are_finite_at_the_extreme_uniforms():
    """The least and the greatest uniform that the 52 bits allow."""
    uniform = torch.tensor([0.5 * 2.0**-52, (2**52 - 0.5) * 2.0**-52], dtype=torch.float64)
    values = noise_module._log(noise_module._log(uniform).neg_())
    assert torch.isfinite(values).all() and values.tolist() == pytest.approx([3.6, -36.7], abs=0.1)


def test_it_is_exponential_and_uncorrelated():
    """Kolmogorov-Smirnov over tokens and over keys, at 1e-6 each; correlations between neighbours of every word within 5 sigma."""
    wide = rows(CoupledNoise(3, 4), 5, 6, [0], 100_000)[0].double().exp()
    assert stats.kstest(wide.numpy(), "expon").pvalue > 1e-6
    cube = torch.stack([torch.stack([rows(CoupledNoise(8, q), b, 0, range(16), 16) for b in range(8)]) for q in range(16)]).double()
    assert stats.kstest(cube.exp().flatten().numpy(), "expon").pvalue > 1e-6
    cube = (cube - cube.mean()) / cube.std()
    for axis in range(4):
        size = cube.shape[axis]
        product = cube.narrow(axis, 0, size - 1) * cube.narrow(axis, 1, size - 1)
        assert abs(product.mean().item()) < 5 / product.numel() ** 0.5


def test_the_race_has_the_softmax_law():
    logits = torch.tensor([0.5, -1.0, 1.2, 0.0])
    noise = rows(CoupledNoise(0, 0), 0, 0, range(20_000), 4)
    counts = np.bincount((logits - noise).argmax(-1).numpy(), minlength=4)
    assert stats.chisquare(counts, 20_000 * torch.softmax(logits.double(), -1).numpy()).pvalue > 1e-6
