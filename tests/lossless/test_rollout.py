"""Rollouts: the same tokens, steps and log-probabilities, to the bit, with every drafter and in every batch."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from reference_decoder import ReferenceRule, ToyTarget, filter_logits, softmax64, tempered_logits, without
from toy import ToyTargetAdapter, split_rule, unchecked

from spot_dlm.batch import Failed, Request
from spot_dlm.budget import FixedBudget
from spot_dlm.drafters import Chain, LeftToRight, Root, build_drafter
from spot_dlm.interfaces import DecodeParams, Target
from spot_dlm.rollout import FORMAT, Rollout, Rollouts, decode_rollouts, read_rollouts
from spot_dlm.rules import parse_rule
from spot_dlm.state import MASKED
from spot_dlm.targets import load_target
from spot_dlm.tasks import load_prompts
from spot_dlm.transition import Sampling

from .test_drafters_never_change_tokens import LENGTH, RULES, VOCAB, Adversarial

CHOSEN = (
    "top",
    "top-2",
    "threshold-entropy",
    "leftmost-above-margin",
    "timesteps",
    "drawn-suppressed-bf16",
    "arrival-filtered",
    "threshold-span-late",
)
GOLDEN = Path(__file__).parents[1] / "golden"
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
    crossing = rule in ("top", "drawn-suppressed-bf16")
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


# ------------------------------------------------------------------------------------------------------- other families

MASK = 318


def read_back(path: Path, found: list[Rollout]) -> Rollouts:
    """What the reader makes of rollouts."""
    settings = {"rollouts": FORMAT, "raw_logprobs": None, "temperature": 1.0, "mask_token_id": MASK}
    with path.open("w", encoding="utf-8") as file:
        for i, rollout in enumerate(found):
            r = rollout.result
            row = {"id": i, "sample": 0, "sequence": i, "text": "", "token_ids": r.token_ids, "commit_steps": r.commit_steps}
            file.write(json.dumps(row | {"finish_reason": r.finish_reason} | rollout.row() | {"settings": settings}) + "\n")
    return read_rollouts(path)


def family(name: str) -> Target:
    return load_target(str(GOLDEN / name), device="cpu", mask_token_id=MASK, stop_ids=(), block_length=8)


def requests_for(name: str) -> list[Request[int]]:
    rule = parse_rule("threshold=0.3" if name == "fastdllm_v2" else "standard")
    prompts = [[5, 6, 7], [*range(20, 41)], [9, MASK, 11, 12] if name == "llada" else [9]]  # of a whole canvas a hole, filled, too
    return [Request(i, p, DecodeParams(rule, Sampling(1.0), 16, 1, block_length=8, sequence=i)) for i, p in enumerate(prompts)]


@pytest.mark.parametrize("name", ["llada", "dream", "fastdllm_v2"])
def test_other_families(name, tmp_path):
    """Whole canvases, shifted logits, seeds: equal with guesses; seeds are no draws; the states are those that were evaluated."""
    target, requests = family(name), requests_for(name)
    speculative = [replace(r, params=replace(r.params, nodes=6)) for r in requests]
    with unchecked():
        plain, guessed = (
            [r for _, r in sorted(decode_rollouts(target, given, drafter, max_requests=count))]
            for given, drafter, count in ((requests, Root(), 1), (speculative, Chain(), 3))
        )
    for one, two in zip(plain, guessed, strict=True):
        assert [(c.position, c.token, c.block, c.step) for c in one.result.order] == [
            (c.position, c.token, c.block, c.step) for c in two.result.order
        ]
        assert (one.logprobs, one.ends, one.row()) == (two.logprobs, two.ends, two.row())
        for c, logp in zip(one.result.order, one.logprobs, strict=True):
            assert (logp == 0) == (c.step == -1)
    assert any(c.step == -1 for r in plain for c in r.result.order) == (name == "fastdllm_v2")
    found = read_back(tmp_path / "r.jsonl", plain)
    for i, rollout in enumerate(plain):
        states = list(found.states(i))
        drawn = [(c.position, c.token) for c in rollout.result.order if c.step >= 0]
        assert [p for s in states for p in zip(s.positions.tolist(), s.tokens.tolist(), strict=True)] == drawn
        for state in states[:: 1 if target.spec.whole_canvas else len(states)]:
            assert (state.canvas[state.positions] == MASK).all()
            if target.spec.whole_canvas:
                canvas = state.canvas.numpy()
                canvas[canvas == MASK] = MASKED
                logits = target.evaluate(target.open_canvas(canvas[:0], len(canvas)), canvas[None]).packed
                rows = np.searchsorted(np.flatnonzero(canvas == MASKED), state.positions.numpy())
                logps = logits[rows].log_softmax(-1).gather(-1, state.tokens[:, None])[:, 0]
                torch.testing.assert_close(logps, state.logprobs, rtol=1e-3, atol=1e-4)


def test_raw_logprobs_of_seeds_are_refused():
    target = family("fastdllm_v2")
    with pytest.raises(ValueError, match="raw log-probabilities are not known"):
        list(decode_rollouts(target, requests_for("fastdllm_v2"), Root(), raw=True))


def test_one_request_that_fails_and_one_twice():
    target = ToyTargetAdapter(ToyTarget(VOCAB, LENGTH, 41, 1.5))
    requests = [Request("good", [0]), Request("bad", [99]), Request("long", [0], DecodeParams(max_new_tokens=5000))]
    found = dict(decode_rollouts(target, requests, Chain(), budget=FixedBudget(4)))
    assert isinstance(found["good"], Rollout) and isinstance(found["bad"], Failed) and isinstance(found["long"], Failed)
    with pytest.raises(ValueError, match="'a' is being decoded already"):
        list(decode_rollouts(target, [Request("a", [0]), Request("a", [0])], Chain(), budget=FixedBudget(4)))
