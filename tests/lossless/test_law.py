"""The law of the output: package decodes of an enumerable toy against its exact law, and broken decoders that must be rejected.

Chi-square at alpha = 1e-6. Each of the 24 sound checks would fail a correct decoder with probability 1e-6 (the statistic's chi-square
approximation aside; outcomes expected under 5 times are pooled), so 2.4e-5 for the file over random seeds; the seeds are fixed, so
a run that passed keeps passing until a bit of the noise or of a decoder changes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from reference_decoder import ReferenceRule, exact_law
from scipy import stats
from toy import SameRows, ToyTargetAdapter, reference_of, split_rule, trajectory, unchecked

from spot_dlm import transition
from spot_dlm.decode import generate
from spot_dlm.drafters import Root
from spot_dlm.interfaces import DecodeParams

from .law_runs import BROKEN_CASES, CASES, LENGTH, options_of, toy

pytestmark = pytest.mark.timeout(3600)  # four minutes on a quiet machine

ALPHA = 1e-6
SAMPLES, BROKEN_SAMPLES = 20_000, 2_000


@pytest.fixture(scope="module")
def sampled() -> dict:
    """Counts of every case and variant."""
    script = Path(__file__).with_name("law_runs.py")
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), str(SAMPLES), str(BROKEN_SAMPLES)]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def law_of(case: str) -> dict[tuple, float]:
    return exact_law(toy(), ReferenceRule(**options_of(case)), [0] * LENGTH, LENGTH, LENGTH, ())


def p_value(counts: dict[str, int], law: dict[tuple, float]) -> float:
    """Chi-square of counts against the law; an impossible outcome gives 0."""
    observed = {tuple(map(int, ids.split(","))): n for ids, n in counts.items()}
    if not set(observed) <= {ids for ids, p in law.items() if p > 0}:
        return 0.0
    samples = sum(observed.values())
    expected = {ids: samples * p for ids, p in law.items()}
    rows = [(observed.get(ids, 0), e) for ids, e in expected.items() if e >= 5]
    rest = [(observed.get(ids, 0), e) for ids, e in expected.items() if e < 5]
    if rest:
        rows.append(tuple(np.sum(rest, axis=0)))
    o, e = np.array(rows, dtype=np.float64).T
    return float(stats.chi2.sf(((o - e) ** 2 / e).sum(), len(rows) - 1))


@pytest.mark.parametrize("variant", ["standard", "chain"])
@pytest.mark.parametrize("case", CASES)
def test_output_has_the_exact_law(sampled, case, variant):
    """20,000 decodes, standard and speculative; false-failure probability 1e-6 each."""
    counts = sampled[f"{case}/{variant}"]
    assert sum(counts.values()) == SAMPLES
    assert p_value(counts, law_of(case)) > ALPHA


@pytest.mark.parametrize("case", CASES)
def test_speculation_gives_the_same_counts(sampled, case):
    """Not only the same law: the same sequences."""
    assert sampled[f"{case}/chain"] == sampled[f"{case}/standard"]


@pytest.mark.parametrize("variant", BROKEN_CASES)
def test_power_broken_decoders_are_rejected(sampled, variant):
    """The same check at the same alpha, with a tenth of the samples, must reject: noise that forgets the step under an order that looks
    at the sample; a verifier that takes one guess without comparing it; uncoupled draft tokens accepted as final; an order drawn with the
    noise of the tokens.
    """
    case = BROKEN_CASES[variant]
    counts = sampled[f"{case}/{variant}"]
    assert sum(counts.values()) == BROKEN_SAMPLES
    assert p_value(counts, law_of(case)) < ALPHA


def test_power_the_rules_have_different_laws(sampled):
    """The check tells rules apart, so a case cannot pass by testing another rule."""
    different = [*list(CASES)[:3], "random-order", "order-drawn-by-probability", "arrival"]
    for case in different:
        for other in different:
            if other != case:
                assert p_value(sampled[f"{case}/standard"], law_of(other)) < ALPHA


def select_with_reversed_ties(candidates, rule, count):
    order = np.argsort(-candidates.rank[::-1], kind="stable")
    return (len(order) - 1 - order)[:count]


def last_argmax(values):
    return values.shape[-1] - 1 - values.flip(-1).argmax(-1)


@pytest.mark.parametrize("name, broken", [("select", select_with_reversed_ties), ("first_argmax", last_argmax)])
def test_power_reversed_ties_are_caught(monkeypatch, name, broken):
    """Tie-breaks that prefer the higher position, or the higher id, change the trajectory on the tie toy."""
    options = {"confidence": "max_probability", "resolution": "bfloat16"}
    params = DecodeParams(*split_rule(options)[:2], max_new_tokens=10)
    target = ToyTargetAdapter(SameRows(5, 5, 1, 2))
    expected = trajectory(reference_of(target, options, [0], params))
    with unchecked():
        assert trajectory(generate(target, [0], Root(), params)) == expected
        monkeypatch.setattr(transition, name, broken)
        assert trajectory(generate(target, [0], Root(), params)) != expected
