"""The package against the NumPy reference, which shares no line with it: same ids, order, passes and finish reason."""

from __future__ import annotations

import itertools
from typing import get_args

import numpy as np
import pytest
import torch
from reference_decoder import ReferenceRule, ToyTarget, noise_uniform, order_uniform, reference_noise
from toy import Excluding, SameRows, ToyTargetAdapter, reference_of, split_rule, trajectory, unchecked

from spot_dlm import noise as noise_module
from spot_dlm.decode import generate
from spot_dlm.drafters import Root
from spot_dlm.interfaces import DecodeParams
from spot_dlm.noise import CoupledNoise
from spot_dlm.schedule import Kind, Schedule

SELECTS = ("top", "threshold", "left_to_right", "leftmost_above", "random", "arrival")
"""Of the rule, but for "random": "top" in an order that is drawn."""
CONFIDENCES = ("probability", "max_probability", "margin", "entropy")
SOURCES = ("raw", "tempered", "filtered")
RESOLUTIONS = ("float32", "bfloat16")
NEAR_TIE = 3e-6  # slack of the reference below which a float32 sum may order two positions differently


def pick(rng, *values):
    return values[rng.integers(len(values))]


def random_case(rng, select, confidence, source, resolution, temperature):
    """Draw everything that is not given; returns (target, options, prompt, params)."""
    options = {"select": select, "confidence": confidence, "source": source, "resolution": resolution, "temperature": temperature}
    options["seed"] = int(rng.integers(0, 2**63))
    if select == "random":
        options.update(select="top", order_temperature=pick(rng, np.inf, 0.05, 0.7, 20.0))
    if select == "arrival":
        options["schedule"] = Schedule("timesteps", int(rng.integers(1, 9)))
    elif select in ("top", "left_to_right", "random"):
        options["num_per_step"] = int(rng.integers(1, 4))
    else:
        limits = (-1.2, -0.6, -0.1) if confidence == "entropy" else (0.2, 0.4, 0.6, 0.9)
        options.update(threshold=pick(rng, *limits), strict=bool(rng.integers(2)))
    options.update(top_k=pick(rng, 0, 0, 1, 2, 4), top_p=pick(rng, 1.0, 1.0, 0.3, 0.8, 0.95))
    if select not in ("leftmost_above", "arrival") and rng.integers(3) == 0:
        options.update(num_per_step=1, schedule=Schedule(pick(rng, *get_args(Kind)), int(rng.integers(1, 7))))
    elif select != "arrival":
        options["span"] = pick(rng, 0, 0, 1, 2, 3)
    if source == "raw" and "order_temperature" not in options and rng.integers(3) == 0:
        options["late_ids"] = (int(rng.integers(3)),)
    elif rng.integers(4) == 0:
        options["suppressed_ids"] = (int(rng.integers(3)),)
    if confidence != "probability" or select in ("left_to_right", "arrival") or options.get("order_temperature") == np.inf:
        options["noise_step"] = bool(rng.integers(2))
    length, vocab = int(rng.integers(1, 6)), pick(rng, 3, 5, 9)
    toy = ToyTarget(vocab, length, int(rng.integers(10**6)), pick(rng, 0.5, 1.0, 3.0, 8.0))
    if rng.integers(4) == 0:
        toy = Excluding(toy, [int(rng.integers(vocab))])
    stops = rng.permutation(vocab)[: pick(rng, 0, 1, 2)].tolist()
    prompt = rng.integers(0, vocab, pick(rng, max(1, length - 1), length, length + 1, 2 * length)).tolist()
    params = DecodeParams(
        *split_rule(options)[:2], int(rng.integers(1, 2 * length + 2)), 1, pick(rng, None, length), pick(rng, "block", "prefix"), 5
    )
    return ToyTargetAdapter(toy, stop_ids=stops), options, prompt, params


def test_root_decoding_equals_the_reference():
    """All 144 rule families at three temperatures; a difference is forgiven only where the reference itself sees a near-tie."""
    rng = np.random.default_rng(20250101)
    cases, near_ties, unequal, multi = 0, [], [], 0
    grid = itertools.product(SELECTS, CONFIDENCES, SOURCES, RESOLUTIONS, (0.0, 0.7, 1.0))
    with unchecked():
        for family in grid:
            for _ in range(2):
                target, options, prompt, params = random_case(rng, *family)
                ours, theirs = generate(target, prompt, Root(), params), reference_of(target, options, prompt, params)
                cases += 1
                multi += len(theirs.order) > theirs.nfe
                if (trajectory(ours), ours.counts.nfe) == (trajectory(theirs), theirs.nfe):
                    continue
                slack = reference_of(target, options, prompt, params, measure_slack=True).min_slack
                (near_ties if slack < NEAR_TIE else unequal).append((options, target.toy, prompt, params, slack))
    assert not unequal, f"{len(unequal)} of {cases} differ, first: {unequal[0]}"
    assert cases == 864 and len(near_ties) < cases / 100, near_ties
    assert multi > cases / 10  # steps that commit several positions are among them


@pytest.mark.parametrize("select, confidence", list(itertools.product(SELECTS, CONFIDENCES)))
def test_every_rule_with_shape_checks(select, confidence):
    """The same comparison with jaxtyping and beartype switched on, one case for each rule."""
    rng = np.random.default_rng([SELECTS.index(select), CONFIDENCES.index(confidence)])
    target, options, prompt, params = random_case(rng, select, confidence, "filtered", "float32", 0.7)
    ours = generate(target, prompt, Root(), params)
    theirs = reference_of(target, options, prompt, params)
    assert trajectory(ours) == trajectory(theirs) and ours.counts.nfe == ours.counts.transitions == theirs.nfe


@pytest.mark.parametrize("levels", [0, 2])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("resolution", RESOLUTIONS)
def test_exact_ties_go_to_the_lower_position_and_id(levels, temperature, resolution):
    """Every position has the same row, so every order that ignores the sample ties exactly; no near-tie excuse here."""
    for seed, confidence, k in itertools.product(range(3), CONFIDENCES[1:], (1, 2)):
        options = {"confidence": confidence, "resolution": resolution, "temperature": temperature, "num_per_step": k}
        target = ToyTargetAdapter(SameRows(5, 5, seed, levels))
        params = DecodeParams(*split_rule(options)[:2], max_new_tokens=9)
        with unchecked():
            ours = generate(target, [0, 1], Root(), params)
        assert trajectory(ours) == trajectory(reference_of(target, options, [0, 1], params))
        blocks = {c.block for c in ours.order}
        assert all(
            [c.position for c in ours.order if c.block == b] == sorted(c.position for c in ours.order if c.block == b) for b in blocks
        )


KEYS = [(0, 0, 0, 0), (1, 2, 3, 4), (2**64 - 1, 2**63, 7, 0), (-1, 5, 1000, 63), (12345, 2**40, 2**31, 15), (7, -3, 0, 10**6)]


@pytest.mark.parametrize("seed, sequence, block, step", KEYS)
def test_noise_integers_are_exact_and_values_within_an_ulp(monkeypatch, seed, sequence, block, step):
    """The uniforms (all 52 bits) agree exactly, so the integer generator does; the logarithms to their documented error."""
    positions = np.array([0, 1, 2, 7, 31])
    values = CoupledNoise(seed, sequence).rows(block, step, positions, 3000).numpy()
    expected = np.stack([reference_noise(seed, sequence, block, step, p, 3000) for p in positions.tolist()])
    assert values.dtype == np.float32
    ulp = np.spacing(np.abs(expected))
    assert (np.abs(values.astype(np.float64) - expected) <= np.maximum(ulp, 3e-9)).all()
    assert (values == expected).mean() > 0.98

    seen = []

    def spy(x):
        seen.append(x.clone())
        return x

    monkeypatch.setattr(noise_module, "_log", spy)
    CoupledNoise(seed, sequence).rows(block, step, positions, 3000)
    uniforms = np.stack([noise_uniform(seed, sequence, block, step, p, 3000) for p in positions.tolist()])
    assert np.array_equal(seen[0].numpy(), uniforms)


@pytest.mark.parametrize("seed, sequence, block, step", KEYS)
def test_noise_of_the_order_follows_its_own_key(seed, sequence, block, step):
    """Uniforms to the bit, their logarithms to an ulp; neither a device nor `noise_step` is in them."""
    positions, steps = np.array([0, 1, 2, 7, 31]), [step, step + 1]
    noise, other = CoupledNoise(seed, sequence), CoupledNoise(seed, sequence, use_step=False, device="meta")
    uniform = np.array([[order_uniform(seed, sequence, block, t, p) for p in positions.tolist()] for t in [0, *steps]])
    assert np.array_equal(noise.times(block, positions), uniform[0]) and np.array_equal(other.times(block, positions), uniform[0])
    drawn, expected = noise.order(block, steps, positions), (-np.log(-np.log(uniform[1:]))).astype(np.float32)
    assert np.array_equal(drawn, other.order(block, steps, positions))
    assert (np.abs(drawn.astype(np.float64) - expected) <= np.maximum(np.spacing(np.abs(expected)), 3e-9)).all()


def test_noise_without_the_step_uses_step_zero():
    positions = np.arange(4)
    kept = CoupledNoise(3, 1, use_step=False)
    for step in (0, 1, 9):
        assert torch.equal(kept.rows(2, step, positions, 50), CoupledNoise(3, 1).rows(2, 0, positions, 50))


def test_reference_refuses_nothing_that_the_package_accepts():
    """Both know the same names, so a case above cannot silently test another rule."""
    for select, confidence, source, resolution in itertools.product(SELECTS, CONFIDENCES, SOURCES, RESOLUTIONS):
        options = {"select": select, "confidence": confidence, "source": source, "resolution": resolution}
        options["threshold"] = -0.5 if confidence == "entropy" else 0.5
        if select == "random":
            options.update(select="top", order_temperature=0.5)
        if select == "arrival":
            options["schedule"] = Schedule("timesteps", 3)
        rule, _, reference = split_rule(options)
        assert isinstance(reference, ReferenceRule)
        assert all(getattr(rule, name) == getattr(reference, name) for name in vars(rule))
