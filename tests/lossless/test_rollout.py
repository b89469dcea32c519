"""Rollouts: the same tokens, steps and log-probabilities, to the bit, with every drafter and in every batch."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from reference_decoder import ReferenceRule, ToyTarget, filter_logits, softmax64, tempered_logits, without
from toy import ToyTargetAdapter, split_rule, unchecked

from spot_dlm.batch import Request
from spot_dlm.budget import FixedBudget
from spot_dlm.drafters import Chain, LeftToRight, Root, build_drafter
from spot_dlm.interfaces import DecodeParams
from spot_dlm.rollout import Rollout, decode_rollouts
from spot_dlm.rules import parse_rule
from spot_dlm.targets import load_target
from spot_dlm.tasks import load_prompts
from spot_dlm.transition import Sampling

from .test_drafters_never_change_tokens import LENGTH, RULES, VOCAB, Adversarial

CHOSEN = ("top", "top-2", "threshold-entropy", "leftmost-above-margin", "timesteps", "drawn-late-bf16", "arrival", "threshold-span-late")
SAMPLINGS = [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.6, "top_k": 4, "top_p": 0.8}]


def facts(rollout: Rollout) -> tuple:
    """All that speculation must not change, log-probabilities to the bit."""
    order = [(c.position, c.token, c.block, c.step) for c in rollout.result.order]
    same = rollout.result.token_ids, rollout.result.finish_reason, rollout.result.commit_steps, order, rollout.steps, rollout.ends
    return *same, np.array(rollout.logprobs).tobytes(), np.array(rollout.raw_logprobs).tobytes()


def decoded(target, requests, drafter, together=1) -> list[Rollout]:
    found = dict(decode_rollouts(target, requests, drafter, raw=True, budget=FixedBudget(1), max_requests=together))
    assert all(isinstance(r, Rollout) for r in found.values()), found
    return [found[request.id] for request in requests]


def reference_logprobs(target, options, rollout: Rollout) -> list[tuple[float, float]]:
    """Every commit's log-probability, filtered and raw, by the reference in float64, from the toy's logits at the state before."""
    rule, found = ReferenceRule(**options), []
    known = dict(enumerate(rollout.result.prompt_ids))
    for _, commits in itertools.groupby(rollout.result.order, lambda c: (c.block, c.step)):
        commits = list(commits)
        start = commits[0].block * LENGTH
        logits = target.toy([known[i] for i in range(start)], [known.get(start + i) for i in range(LENGTH)])
        for c in commits:
            raw = logits[c.position - start]
            row = filter_logits(rule, tempered_logits(rule, without(rule.suppressed_ids, raw)))[0] if rule.temperature else raw
            found.append((math.log(softmax64(row)[c.token]), math.log(softmax64(raw)[c.token])))
        known |= {c.position: c.token for c in commits}
    return found


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["T0", "T1", "filtered"])
@pytest.mark.parametrize("rule", CHOSEN)
def test_toys(rule, sampling):
    """Drafters and batches agree to the bit; the log-probabilities are those of an independent reference."""
    options = {k: v for k, v in RULES[rule].items() if k not in ("top_k", "top_p")} | sampling
    crossing = rule in ("top", "drawn-late-bf16")
    target = ToyTargetAdapter(ToyTarget(VOCAB, LENGTH, 41, 1.5), stop_ids=(3,), crosses=crossing)
    params = DecodeParams(*split_rule(options)[:2], max_new_tokens=9, nodes=1)
    requests = [Request(i, [0, 1, 2][: i % 3 + 1], replace(params, sequence=i, stop=("block", "prefix")[i % 2])) for i in range(3)]
    with unchecked():
        plain = decoded(target, requests, Root())
        expected = [facts(r) for r in plain]
        for nodes, drafter in ((3, Chain()), (8, Chain(coupled=False)), (8, LeftToRight()), (16, Adversarial(5))):
            at = [replace(r, params=replace(r.params, nodes=nodes)) for r in requests]
            for together in (1, 3) if drafter == Chain() else (3,):
                assert [facts(r) for r in decoded(target, at, drafter, together)] == expected, (nodes, drafter, together)
    for rollout in plain:
        truth = reference_logprobs(target, options, rollout)
        np.testing.assert_allclose(rollout.logprobs, [p for p, _ in truth], rtol=1e-4, atol=2e-6)
        np.testing.assert_allclose(rollout.raw_logprobs, [p for _, p in truth], rtol=1e-4, atol=2e-6)
        assert [rollout.result.order[i].token for i in rollout.by_token] == rollout.result.token_ids
        assert [rollout.steps[i] for i in rollout.by_token] == rollout.result.commit_steps


@pytest.mark.parametrize("name", ["order", "chain"])
def test_the_shipped_model(name):
    """Learned guesses across block ends, rules, temperatures and filters, one at a time and all in one pass."""
    target, requests = load_target("shipped"), []
    settings = itertools.product(("standard", "bfloat16", "confidence=max_probability"), (0.0, 1.5))
    prompts = [load_prompts(task, limit=1)[0].prompt for task in ("json", "python", "arithmetic", "stdlib")]
    for i, (rule, temperature) in enumerate(settings):
        sampling = Sampling(temperature, top_k=(0, 20)[i % 2], top_p=(1.0, 0.95)[i // 2 % 2])
        requests.append(Request(i, prompts[i % 4], DecodeParams(parse_rule(rule), sampling, 20, 1, sequence=i)))
    with unchecked():
        expected = [facts(r) for r in decoded(target, requests, Root())]
        speculative = [replace(r, params=replace(r.params, nodes=8)) for r in requests]
        for together in (1, 6):
            found = decoded(target, speculative, build_drafter(name), together)
            assert [facts(r) for r in found] == expected
    counts = [r.result.counts for r in found]
    assert sum(c.nfe for c in counts) < 0.7 * sum(c.transitions for c in counts)
