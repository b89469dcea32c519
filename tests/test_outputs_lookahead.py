"""The vocabulary-free view of logits against float64, the look-ahead against the full vocabulary, the predicted order against `select`."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
import torch

from spot_dlm import outputs as outputs_module
from spot_dlm.confidence import Confidence, measure
from spot_dlm.lookahead import WHOLE_DEPTHS, decisive_rank, look_ahead
from spot_dlm.noise import CoupledNoise
from spot_dlm.outputs import NUM_TOP, read_outputs
from spot_dlm.state import BlockState
from spot_dlm.transition import Candidates, Sampling, Source, UnmaskRule, propose, select


def random_logits(rows: int, size: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(0, scale, (rows, size)).astype(np.float32))


def special_logits(size: int = 50) -> torch.Tensor:
    """Sure positions (gaps of 20), impossible tokens, one possible token, even odds."""
    logits = random_logits(6, size)
    logits[0] = -20.0
    logits[0, 7] = 0.0
    logits[1] = -torch.inf
    logits[1, [3, 9]] = torch.tensor([1.0, -19.0])
    logits[2] = -torch.inf
    logits[2, 5] = 2.0
    logits[3] = 0.0
    logits[4, ::2] = -torch.inf
    return logits


@pytest.mark.parametrize("size", [3, 12, 50, 700])
def test_read_outputs_is_the_float64_distribution(size: int) -> None:
    logits = torch.cat((random_logits(8, size, seed=size), special_logits(size))) if size >= 12 else random_logits(8, size)
    outputs = read_outputs(np.arange(len(logits)), logits)
    count = min(NUM_TOP, size)
    assert outputs.ids.shape == outputs.logp.shape == (len(logits), count)
    exact = logits.double().numpy()
    exact = exact - exact.max(1, keepdims=True)
    exact -= np.log(np.exp(exact).sum(1, keepdims=True))
    ordered = -np.sort(-exact, axis=1)
    for i, (row, ids) in enumerate(zip(exact, outputs.ids, strict=True)):
        assert len(set(ids.tolist())) == count and (row[ids] == ordered[i, :count]).all()
    np.testing.assert_allclose(outputs.logp, np.maximum(ordered[:, :count], ordered[:, :1] - 80), rtol=2e-6, atol=2e-6)
    with np.errstate(divide="ignore"):
        log_rest = np.log(np.exp(ordered[:, 1:]).sum(1))
    certain = ~np.isfinite(log_rest)
    np.testing.assert_allclose(outputs.log_rest[~certain], log_rest[~certain], rtol=2e-6, atol=2e-6)
    assert (outputs.log_rest[certain] < -70).all()
    terms = np.where(np.isfinite(exact), np.exp(exact) * np.where(np.isfinite(exact), exact, 0), 0)
    np.testing.assert_allclose(outputs.entropy, -terms.sum(1), rtol=1e-5, atol=1e-6)
    assert (outputs.source == outputs.logp).all() and (outputs.scores == outputs.logp).all()
    taken = outputs.take(np.array([2, 0]))
    assert (taken.ids == outputs.ids[[2, 0]]).all() and (taken.positions == [2, 0]).all()


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 1.7])
@pytest.mark.parametrize(("size", "levels"), [(1, 0), (2, 0), (63, 0), (64, 3), (65, 0), (768, 0), (768, 40), (5000, 0)])
def test_the_host_reads_what_a_device_reads(size: int, levels: int, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled summary and torch's: the same tokens where they differ in value, numbers to rounding."""
    logits = random_logits(7, size, seed=size, scale=6.0)
    if levels:
        logits = torch.round(logits * levels / 20)
    if size > 4:
        logits[2, ::3], logits[3], logits[3, 1] = -torch.inf, -torch.inf, 5.0
    sampling = Sampling(temperature=temperature)
    host = read_outputs(np.arange(7), logits, sampling)
    monkeypatch.setattr(outputs_module, "_FEW", 0)
    device = read_outputs(np.arange(7), logits, sampling)
    values = logits.numpy()
    assert (np.take_along_axis(values, host.ids, 1) == np.take_along_axis(values, device.ids, 1)).all()
    ordered = np.lexsort((np.broadcast_to(np.arange(size), values.shape), -values), axis=1)
    assert (host.ids == ordered[:, : host.ids.shape[1]]).all()
    for name in ("logp", "source", "scores", "entropy"):
        np.testing.assert_allclose(getattr(host, name), getattr(device, name), rtol=5e-6, atol=5e-6)
    assert (host.log_rest[np.isneginf(device.log_rest)] == -np.inf).all()
    certain = device.log_rest < -70  # the mass of tokens that count as exp(-80)
    np.testing.assert_allclose(host.log_rest[~certain], device.log_rest[~certain], rtol=2e-6, atol=2e-6)
    assert (host.log_rest[certain] < -70).all()


def test_sure_positions_keep_their_digits() -> None:
    """Where p1 rounds to 1 in float32, log(1 - p1) still tells positions apart."""
    logits = torch.full((2, 30), -torch.inf)
    logits[:, 0] = 0.0
    logits[0, 1], logits[1, 1] = -20.0, -21.0
    outputs = read_outputs(np.arange(2), logits)
    np.testing.assert_allclose(outputs.log_rest, [-20, -21], atol=1e-5)
    assert outputs.logp[0, 0] < outputs.logp[1, 0] < 0


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [(0.7, 0, 1.0), (1.0, 0, 0.9), (1.3, 5, 1.0), (0.7, 6, 0.8), (1.0, 0, 1e-6)])
def test_temperature_and_filters(temperature: float, top_k: int, top_p: float) -> None:
    logits = random_logits(12, 40, scale=4.0)
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    outputs = read_outputs(np.arange(12), logits, sampling)
    exact = torch.log_softmax(logits.double() / temperature, -1).numpy()
    np.testing.assert_allclose(outputs.source, np.take_along_axis(exact, outputs.ids, 1), rtol=1e-5, atol=1e-5)
    for row, ids, source, scores in zip(exact, outputs.ids, outputs.source, outputs.scores, strict=True):
        limited = np.exp(row[ids])
        if top_k:
            limited = np.where(np.arange(len(ids)) < top_k, limited, 0) / limited[:top_k].sum()
        before = np.cumsum(limited) - limited
        kept = (before < top_p) & (limited > 0)
        kept[0] = True
        assert (np.isfinite(scores) == kept).all() and (scores[kept] == source[kept]).all()


def test_ties_in_the_logits() -> None:
    """Equal logits: any order among equals that are kept, the best value always first."""
    logits = torch.from_numpy(np.random.default_rng(3).integers(0, 3, (20, 40)).astype(np.float32))
    outputs = read_outputs(np.arange(20), logits)
    values = np.take_along_axis(logits.numpy(), outputs.ids, 1)
    assert (np.diff(values, axis=1) <= 0).all() and (values[:, 0] == logits.numpy().max(1)).all()
    assert all(len(set(ids)) == NUM_TOP for ids in outputs.ids.tolist())


def root_of(positions: np.ndarray, length: int, step: int = 2, block: int = 3) -> BlockState:
    canvas = np.zeros(length, dtype=np.int64)
    canvas[positions] = -1
    return BlockState(block, canvas, step)


SAMPLINGS = [
    Sampling(),
    Sampling(temperature=1.0, seed=4),
    Sampling(temperature=0.7, seed=5),
    Sampling(temperature=1.0, top_p=0.9, seed=6),
    Sampling(temperature=0.7, top_k=4, top_p=0.95, seed=7),
]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda s: f"T{s.temperature:g}-k{s.top_k}-p{s.top_p:g}")
@pytest.mark.parametrize("source", get_args(Source))
@pytest.mark.parametrize("size", [9, 200])
def test_look_ahead_is_the_full_vocabularys(sampling: Sampling, source: Source, size: int) -> None:
    """Whenever the winner of a depth is among the tokens that were kept: the same token, the same confidence; and it mostly is."""
    positions = np.array([0, 1, 3, 4, 6, 7, 9, 11, 12, 13])
    logits, rule, depths = random_logits(10, size, seed=size, scale=4.0), UnmaskRule(source=source), 5
    root, noise = root_of(positions, 14), CoupledNoise(sampling.seed, 1)
    outputs = read_outputs(positions, logits, sampling)
    ahead = look_ahead(outputs, root, rule, sampling, noise, depths)
    sampled = sampling.temperature > 0
    assert ahead.tokens.shape == ahead.fine.shape == (depths if sampled else 1, 10, 2) and ahead.margin.shape == ahead.tokens.shape[:2]
    known = 0
    for d in range(len(ahead.tokens)):
        drawn = noise.rows(root.block, root.step + d, positions, size) if sampled else None
        true = propose(positions, logits, rule, sampling, drawn)
        inside = (outputs.ids == true.tokens[:, None]).any(1)
        assert (ahead.tokens[d, inside, 0] == true.tokens[inside]).all()
        np.testing.assert_allclose(ahead.fine[d, inside, 0], true.fine[inside], rtol=1e-4, atol=1e-5)
        known += inside.sum()
        assert (ahead.tokens[d, :, 0] != ahead.tokens[d, :, 1]).all()
    assert known >= 0.9 * ahead.tokens[..., 0].size
    assert (ahead.margin >= 0).all()


@pytest.mark.parametrize("sampling", SAMPLINGS[1:4], ids=lambda s: f"T{s.temperature:g}-p{s.top_p:g}")
@pytest.mark.parametrize("source", get_args(Source))
def test_wide_positions_are_drawn_from_the_whole_vocabulary(sampling: Sampling, source: Source) -> None:
    """Given the logits, near depths hold exactly the target's tokens wherever the kept ones lack mass; sharp positions stay as they are."""
    positions, rule, size = np.array([1, 2, 5, 8]), UnmaskRule(source=source), 300
    every = torch.cat((random_logits(2, size, scale=0.3), random_logits(1, size, seed=1, scale=30), random_logits(3, size, scale=1.2)))
    rows = np.array([5, 2, 0, 3])
    logits = every[torch.from_numpy(rows)]
    root, noise, depths = root_of(positions, 9), CoupledNoise(sampling.seed, 1), WHOLE_DEPTHS + 2
    outputs = read_outputs(positions, logits, sampling)
    kept = look_ahead(outputs, root, rule, sampling, noise, depths)
    among = read_outputs(np.array([5, 0, 2, 8, 0, 1]), every, sampling)
    ahead = look_ahead(among, root, rule, sampling, noise, depths, logits=every, at=rows)
    wide = [0, 2, 3]
    for d in range(depths):
        if d >= WHOLE_DEPTHS:
            assert (ahead.tokens[d] == kept.tokens[d]).all() and (ahead.fine[d] == kept.fine[d]).all()
            continue
        true = propose(positions, logits, rule, sampling, noise.rows(root.block, root.step + d, positions, size))
        assert (ahead.tokens[d, wide, 0] == true.tokens[wide]).all()
        new = ahead.tokens[d, :, 0] != kept.tokens[d, :, 0]
        np.testing.assert_allclose(ahead.fine[d, new, 0], true.fine[new], rtol=1e-4, atol=1e-5)
        assert (ahead.tokens[d, new, 1] == kept.tokens[d, new, 0]).all() and (ahead.margin[d, new] == 1).all()
        assert (ahead.tokens[d, ~new] == kept.tokens[d, ~new]).all() and not new[1]
    assert (ahead.tokens != kept.tokens).any()


@pytest.mark.parametrize("sampling", SAMPLINGS[:4], ids=lambda s: f"T{s.temperature:g}-p{s.top_p:g}")
def test_second_token_and_margin(sampling: Sampling) -> None:
    positions, size = np.arange(6), NUM_TOP
    logits, noise = random_logits(6, size, seed=8, scale=2.0), CoupledNoise(sampling.seed, 0)
    outputs = read_outputs(positions, logits, sampling)
    ahead = look_ahead(outputs, root_of(positions, 8), UnmaskRule(), sampling, noise, 30)
    for d in range(len(ahead.tokens)):
        scores = np.full((6, size), -np.inf)
        np.put_along_axis(scores, outputs.ids, outputs.scores.astype(np.float64), 1)
        if sampling.temperature > 0:
            scores = scores - noise.rows(3, 2 + d, positions, size).double().numpy()
        order = np.argsort(-scores, axis=1)
        best = np.take_along_axis(scores, order, 1)
        alone = ~np.isfinite(best[:, 1])
        assert (ahead.tokens[d, :, 0] == order[:, 0]).all()
        assert (ahead.tokens[d, :, 1] == np.where(alone, -1, order[:, 1])).all()
        np.testing.assert_allclose(ahead.margin[d, ~alone], (best[:, 0] - best[:, 1])[~alone], rtol=1e-4, atol=1e-5)
        assert (ahead.margin[d, alone] == 80).all()


@pytest.mark.parametrize("confidence", get_args(Confidence))
def test_confidences_that_ignore_the_token(confidence: Confidence) -> None:
    """They are those of the last transition at every depth; of the raw probability, what `measure` says of the drawn token."""
    positions, sampling, rule = np.arange(5), Sampling(temperature=1.0), UnmaskRule(confidence=confidence)
    logits, noise = random_logits(5, 30, seed=1), CoupledNoise(0, 0)
    outputs = read_outputs(positions, logits, sampling)
    stale = propose(positions, logits, rule, sampling, noise.rows(3, 1, positions, 30)).fine
    ahead = look_ahead(outputs, root_of(positions, 6), rule, sampling, noise, 2, stale)
    for d in range(2):
        drawn = measure(logits, torch.from_numpy(ahead.tokens[d, :, 0]), confidence)[0].numpy()
        expected = drawn if confidence == "probability" else stale
        np.testing.assert_allclose(ahead.fine[d, :, 0], expected, rtol=1e-4, atol=1e-6)


RULES = [
    {},
    {"resolution": "bfloat16"},
    {"confidence": "max_probability", "resolution": "bfloat16"},
    {"confidence": "entropy"},
    {"confidence": "entropy", "resolution": "bfloat16"},
    {"confidence": "margin"},
    {"select": "left_to_right"},
    {"select": "leftmost_above", "threshold": 0.9},
    {"select": "leftmost_above", "threshold": 0.5, "strict": False},
    {"select": "leftmost_above", "threshold": 0.9, "resolution": "bfloat16"},
]
LOG_CONFIDENCES = np.log(np.array([0.1, 0.3, 0.5, 0.502, 0.7, 0.88, 0.95, 0.9501, 0.998, 0.9985, 0.9999, 1 - 1e-6, 1.0]))


@pytest.mark.parametrize("options", RULES, ids=str)
def test_decisive_ranks_order_as_repeated_selection(options: dict) -> None:
    """Candidates with equal values, and with values that only bfloat16 makes equal."""
    rule, rng = UnmaskRule(**options), np.random.default_rng(0)
    is_log = rule.confidence in ("probability", "max_probability")
    for _ in range(60):
        positions = np.sort(rng.choice(32, int(rng.integers(1, 13)), replace=False))
        fine = rng.choice(LOG_CONFIDENCES, (2, len(positions))).astype(np.float32)
        ranks = decisive_rank(fine, positions[None], rule)
        for values, decisive in zip(fine, ranks, strict=True):
            natural = np.exp(values) if is_log else values
            if rule.resolution == "bfloat16":
                natural = torch.from_numpy(natural).to(torch.bfloat16).float().numpy()
            rank = values if rule.resolution == "float32" else natural
            left = Candidates(positions, np.zeros(len(positions), np.int64), rank, natural, values)
            expected = []
            while len(left.positions):
                first = select(left, rule)[0]
                expected.append(int(left.positions[first]))
                left = left.take(np.arange(len(left.positions)) != first)
            assert positions[np.argsort(-decisive, kind="stable")].tolist() == expected
