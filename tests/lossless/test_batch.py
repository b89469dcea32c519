"""The shipped model: a prompt decoded in a batch is the prompt decoded alone, to the last bit of every confidence."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from toy import unchecked

from spot_dlm.batch import Request, decode_batch
from spot_dlm.budget import AutoBudget, CostProfile
from spot_dlm.compare import Trajectory, same_order, standard_trajectory
from spot_dlm.drafters import build_drafter
from spot_dlm.interfaces import BatchTarget, DecodeParams, Target
from spot_dlm.rules import parse_rule
from spot_dlm.sequence import Event
from spot_dlm.targets import load_target
from spot_dlm.tasks import FAMILY_TASKS, load_prompts
from spot_dlm.transition import Sampling

PROFILE = CostProfile(rows=(1, 64), prefixes=(0, 512), pass_ms=((1.0, 4.0), (1.5, 6.0)), host_ms=0.1, draft_ms=((2, 0.2), (32, 0.6)))


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target("shipped")


@pytest.fixture(scope="module")
def requests() -> list[Request[int]]:
    """Twelve requests of all families: lengths from one token to several blocks, own rules, noise, budgets, blocks and ends."""
    rules = ("standard", "bfloat16", "threshold=0.8", "k=2", "sdar")
    prompts = [p.prompt for name in FAMILY_TASKS for p in load_prompts(name, limit=2)]
    given: list[str | list[int]] = [*prompts[:8], [7], list(range(1, 33)), list(range(20, 73)), prompts[0] + " " + prompts[1]]
    out = []
    for i, prompt in enumerate(given):
        sampling = Sampling((0.0, 1.0, 0.7)[i % 3], top_p=(1.0, 0.9)[i % 2], seed=i % 4)
        nodes = (1, 4, 16, "auto", "auto")[i % 5]
        block_length = (None, None, 32, 8, None, 5)[i % 6]
        stop = ("block", "prefix")[i % 2]
        params = DecodeParams(parse_rule(rules[i % 5]), sampling, 12 + 4 * (i % 5), nodes, block_length, stop, sequence=i // 3)
        out.append(Request(i, prompt, params))
    return out


@pytest.fixture(scope="module")
def alone(target: Target, requests: list[Request[int]]) -> list[Trajectory]:
    with unchecked():
        return [standard_trajectory(target, r.prompt, r.params) for r in requests]


@pytest.mark.parametrize("name", ["order", "chain"])
@pytest.mark.parametrize("max_requests", [3, 12])
def test_batch_equals_standard_decoding_of_each_prompt(
    target: Target, requests: list[Request[int]], alone: list[Trajectory], name: str, max_requests: int
) -> None:
    assert isinstance(target, BatchTarget)
    events: dict[int, list[Event]] = {r.id: [] for r in requests}
    with unchecked():
        for number, event in decode_batch(target, requests, build_drafter(name), AutoBudget(PROFILE), max_requests):
            events[number].append(event)  # type: ignore[arg-type]
    together = [Trajectory.of(events[r.id]) for r in requests]
    for r, one, many in zip(requests, alone, together, strict=True):
        assert same_order(one.result, many.result) and one.result.text == many.result.text, r
        assert len(one.transitions) == len(many.transitions)
        for ours, theirs in zip(one.transitions, many.transitions, strict=True):
            assert ours.before == theirs.before
            assert np.array_equal(ours.candidates.fine, theirs.candidates.fine) and np.array_equal(ours.positions, theirs.positions)
    drafted = [t.result.counts for t, r in zip(together, requests, strict=True) if r.params.nodes != 1]
    assert sum(c.nfe for c in drafted) < 0.8 * sum(c.transitions for c in drafted)


def test_the_same_request_many_times(target: Target) -> None:
    """Copies side by side: whatever their place in the pass, the same answer; other noise keys give other ones."""
    one = Request(0, "To JSON: Anna Berg, 34, Oslo.", DecodeParams(sampling=Sampling(2.5), nodes=4, max_new_tokens=12))
    requests = [replace(one, id=i, params=replace(one.params, sequence=max(0, i - 11))) for i in range(16)]
    events: dict[int, list[Event]] = {i: [] for i in range(16)}
    with unchecked():
        standard = standard_trajectory(target, one.prompt, one.params).result
        for number, event in decode_batch(target, requests, build_drafter("chain")):
            events[number].append(event)  # type: ignore[arg-type]
    results = [Trajectory.of(events[i]).result for i in range(16)]
    assert all(same_order(r, standard) for r in results[:12])
    assert len({tuple(r.token_ids) for r in results}) == 5
