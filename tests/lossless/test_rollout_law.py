"""The joint law of tokens and order of rollouts, and what their log-probabilities add up to.

Chi-square at alpha = 1e-6 for each of the four cases; the seeds are fixed. Outcomes expected under 5 times are pooled.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from reference_decoder import (
    ReferenceRule,
    ToyTarget,
    commit_law,
    compared_values,
    confidence_of,
    filter_logits,
    softmax64,
    tempered_logits,
)
from scipy import stats
from toy import ToyTargetAdapter, split_rule, unchecked

from spot_dlm.batch import Request
from spot_dlm.drafters import Chain
from spot_dlm.interfaces import DecodeParams
from spot_dlm.rollout import Rollout, decode_rollouts

SIZE, SAMPLES, ALPHA = 3, 400, 1e-6
TOY = ToyTarget(SIZE, SIZE, 265, 1.0)
LAWS = {
    "top-max_probability": {"confidence": "max_probability"},
    "top-entropy-filtered": {"confidence": "entropy", "temperature": 0.7, "top_p": 0.9},
    "random": {"order_temperature": math.inf},
    "top-probability": {},
}


def joint_law(rule: ReferenceRule) -> dict[tuple, float]:
    """The exact law of the trajectories of one block: a tuple of steps, each the (position, token) pairs it commits."""
    law: dict[tuple, float] = {}

    def visit(canvas: list, steps: tuple, probability: float) -> None:
        if None not in canvas:
            law[steps] = law.get(steps, 0.0) + probability
            return
        options = {}
        for i, row in TOY([0] * SIZE, canvas).items():
            tempered = tempered_logits(rule, row)
            filtered, _ = filter_logits(rule, tempered)
            p = softmax64(filtered)
            measured = {v: compared_values(rule, *confidence_of(rule, row, tempered, filtered, v)) for v in np.flatnonzero(p).tolist()}
            options[i] = [(v, float(p[v]), *values) for v, values in measured.items()]
        following: dict[tuple, float] = {}
        for choice in itertools.product(*options.values()):
            drawn = dict(zip(options, choice, strict=True))
            rank, natural = ({i: c[k] for i, c in drawn.items()} for k in (2, 3))
            chance = math.prod(c[1] for c in choice)
            for chosen, p in commit_law(rule, rank, natural, 1, len(steps)).items():
                step = tuple((i, drawn[i][0]) for i in chosen)
                following[step] = following.get(step, 0.0) + chance * p
        for step, p in following.items():
            tokens = dict(step)
            visit([tokens.get(i, t) for i, t in enumerate(canvas)], (*steps, step), probability * p)

    visit([None] * SIZE, (), 1.0)
    return law


def sampled(options: dict) -> list[tuple[tuple, float]]:
    """Trajectory and sum of log-probabilities of many speculative samples, 64 in a pass."""
    params = DecodeParams(*split_rule(options)[:2], SIZE, nodes=4)
    requests = (Request(i, [0] * SIZE, replace(params, sequence=i)) for i in range(SAMPLES))
    found = []
    with unchecked():
        for _, rollout in decode_rollouts(ToyTargetAdapter(TOY), requests, Chain(), max_requests=64):
            assert isinstance(rollout, Rollout)
            groups = itertools.groupby(rollout.result.order, lambda c: c.step)
            steps = tuple(tuple(sorted((c.position - SIZE, c.token) for c in commits)) for _, commits in groups)
            found.append((steps, sum(rollout.logprobs)))
    return found


def options_of(case: str) -> dict:
    return {"temperature": 1.0, "seed": 20} | LAWS[case]


@pytest.fixture(scope="module")
def laws() -> dict[str, dict[tuple, float]]:
    return {case: joint_law(ReferenceRule(**options_of(case))) for case in LAWS}


def p_value(counts: Counter, law: dict[tuple, float]) -> float:
    """Chi-square of counts against the law; an impossible outcome gives 0."""
    if not set(counts) <= {steps for steps, p in law.items() if p > 0}:
        return 0.0
    rows = [(counts[steps], SAMPLES * p) for steps, p in law.items() if SAMPLES * p >= 5]
    rest = [(counts[steps], SAMPLES * p) for steps, p in law.items() if SAMPLES * p < 5]
    rows += [tuple(np.sum(rest, axis=0))] if rest else []
    o, e = np.array(rows).T
    return float(stats.chi2.sf(((o - e) ** 2 / e).sum(), len(rows) - 1))


@pytest.mark.parametrize("case", LAWS)
def test_joint_law_of_tokens_and_order(case, laws):
    """400 speculative samples against the exact law, and against those of the other cases, which must be rejected.

    Where the order does not look at the sampled token, the log-probabilities of a trajectory add up to that of its tokens given the order.
    """
    law, found = laws[case], sampled(options_of(case))
    assert math.isclose(sum(law.values()), 1)
    counts = Counter(steps for steps, _ in found)
    assert p_value(counts, law) > ALPHA
    assert all(p_value(counts, laws[other]) < ALPHA for other in LAWS if other != case)
    chance_of_order = 1 / math.factorial(SIZE) if case == "random" else 1.0
    same = [math.isclose(math.exp(logp) * chance_of_order, law[steps], rel_tol=1e-4) for steps, logp in found]
    assert all(same) == (case != "top-probability"), "an order that looks at the sampled token has another law"
