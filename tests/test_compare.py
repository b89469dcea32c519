"""Comparison of trajectories: identical ones, and every class of divergence of targets whose rows depend on the batch."""

import math
from dataclasses import replace

import pytest
from cli.broken_targets import Uneven

from spot_dlm.compare import (
    Trajectory,
    classify,
    first_divergence,
    refine,
    rows_are_independent,
    same_order,
    standard_trajectory,
    trajectory,
)
from spot_dlm.drafters import Chain
from spot_dlm.interfaces import DecodeParams
from spot_dlm.rules import parse_rule
from spot_dlm.transition import Sampling, UnmaskRule


def runs(target: Uneven, rule: UnmaskRule, temperature: float = 0.0) -> tuple[DecodeParams, Trajectory, Trajectory]:
    params = DecodeParams(rule=rule, sampling=Sampling(temperature=temperature), max_new_tokens=12, nodes=4)
    return params, standard_trajectory(target, [1, 2, 3], params), trajectory(target, [1, 2, 3], Chain(), params)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", ["standard", "k=2", "threshold=0.5", "leftmost=0.5", "ltr"])
def test_identical(rule: str, temperature: float) -> None:
    _, standard, speculative = runs(Uneven(0.25), parse_rule(rule), temperature)
    assert first_divergence(standard, speculative, parse_rule(rule)) is None
    assert same_order(standard.result, speculative.result)
    assert standard.result.counts.nfe >= speculative.result.counts.nfe


@pytest.mark.parametrize(("step", "later", "kind"), [(0.25, 9.0, "real"), (1e-5, 1e-2, "near-tie"), (0.0, 1e-2, "tie")])
@pytest.mark.parametrize("rule", ["standard", "bfloat16", "k=2", "confidence=margin"])
def test_divergence_of_positions(rule: str, step: float, later: float, kind: str) -> None:
    parsed = parse_rule(rule)
    params, standard, speculative = runs(Uneven(step, later), parsed)
    found = first_divergence(standard, speculative, parsed)
    assert found is not None and found.standard is not None and found.speculative is not None
    assert found.kind == kind or (rule == "bfloat16" and kind == "near-tie" and found.kind == "tie")
    assert found.standard.position < found.speculative.position
    assert found.block == 0 and found.step == found.index > 0
    assert refine(found, Uneven(step, later), [1, 2, 3], params) == found
    assert f"position {found.standard.position}" in str(found) and str(found).endswith(found.kind)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_divergence_of_tokens_takes_the_gap_of_the_scores(temperature: float) -> None:
    target = Uneven(0.25, zero=50.0)
    params, standard, speculative = runs(target, parse_rule("ltr"), temperature)
    found = first_divergence(standard, speculative, params.rule)
    assert found is not None and found.standard is not None and found.speculative is not None
    assert found.standard.position == found.speculative.position and found.speculative.token == 0
    refined = refine(found, target, [1, 2, 3], params)
    assert refined.kind == "real"
    if temperature == 0:
        assert refined.gap == pytest.approx(3 - 0.25 * found.standard.position)
    assert refined.to_dict()["gap"] == refined.gap


def test_threshold_measures_the_distance_to_the_threshold() -> None:
    """Alone no position but the first passes the threshold; in company more do."""
    rule = parse_rule("threshold=0.89")
    params, standard, speculative = runs(Uneven(0.25, later=5.0), rule)
    found = first_divergence(standard, speculative, rule)
    assert found is not None and found.kind == "real" and 0 < found.gap < 1
    assert params.rule == rule


def test_other_length_or_state_is_real() -> None:
    rule = UnmaskRule()
    _, standard, speculative = runs(Uneven(0.25), rule)
    shorter = replace(speculative, transitions=speculative.transitions[:-1])
    for pair in ((standard, shorter), (shorter, standard)):
        found = first_divergence(*pair, rule)
        assert found is not None and found.kind == "real" and math.isinf(found.gap)
        assert found.to_dict()["gap"] is None and "nothing" in str(found)
    skipped = replace(speculative, transitions=speculative.transitions[1:])
    found = first_divergence(standard, skipped, rule)
    assert found is not None and found.kind == "real" and found.index == 0
    other_end = replace(speculative, result=replace(speculative.result, finish_reason="stop"))
    found = first_divergence(standard, other_end, rule)
    assert found is not None and found.kind == "real"


def test_events_without_a_result() -> None:
    with pytest.raises(ValueError, match="without a result"):
        Trajectory.of([])


def test_classes() -> None:
    assert [classify(g) for g in (0.0, 9e-5, 1e-4, math.inf)] == ["tie", "near-tie", "real", "real"]


def test_rows_are_independent() -> None:
    assert rows_are_independent(Uneven(0.25))
    assert not rows_are_independent(Uneven(0.25, later=1e-6))
