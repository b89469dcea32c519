"""The stale chain is what the rule itself would do on stale candidates, to the end of the block and no further than it may go."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from spot_dlm.drafters import Chain, LeftToRight
from spot_dlm.drafters.stale import stale_candidates, stale_chain, still_masked
from spot_dlm.interfaces import DraftContext
from spot_dlm.noise import CoupledNoise
from spot_dlm.schedule import Schedule
from spot_dlm.state import BlockState
from spot_dlm.transition import Sampling, UnmaskRule, commit, denoise

SMALL = settings(max_examples=25, deadline=None, derandomize=True, database=None)
VOCAB = 7
RULES = {
    "top": {},
    "bfloat16": {"resolution": "bfloat16"},
    "three": {"num_per_step": 3},
    "margin": {"confidence": "margin", "num_per_step": 2},
    "entropy": {"confidence": "entropy"},
    "ltr": {"select": "left_to_right"},
    "ltr-2": {"select": "left_to_right", "num_per_step": 2},
    "threshold": {"select": "threshold", "threshold": 0.5},
    "threshold-entropy": {"select": "threshold", "confidence": "entropy", "threshold": -0.9, "strict": False},
    "leftmost": {"select": "leftmost_above", "threshold": 0.5},
    "random": {"order_temperature": math.inf},
    "random-span": {"order_temperature": math.inf, "num_per_step": 2, "span": 3},
    "drawn": {"order_temperature": 0.3, "confidence": "margin", "schedule": Schedule("timesteps", 4)},
    "drawn-bfloat16": {"order_temperature": 0.02, "resolution": "bfloat16"},
    "arrival": {"select": "arrival", "schedule": Schedule("timesteps", 5)},
    "arrival-late": {"select": "arrival", "schedule": Schedule("timesteps", 2), "late_ids": (1,)},
}


def context_of(rule: UnmaskRule, temperature: float, length: int, tail: int, seed: int, **more: object) -> DraftContext:
    """The first transition of a block whose first `tail` positions are the prompt's, on random logits."""
    state = BlockState.initial(3, list(range(tail)), length)
    logits = torch.from_numpy(2 * np.random.default_rng(seed).standard_normal((length - tail, VOCAB)).astype(np.float32))
    sampling, noise = Sampling(temperature, seed=seed), CoupledNoise(seed, 0, rule.noise_step)
    last = denoise(state, logits, rule, sampling, noise)
    return DraftContext(last, logits, rule, sampling, noise, (last,), **more)


def expected_chain(context: DraftContext, budget: int, rule: UnmaskRule, coupled: bool) -> tuple[list[BlockState], list[float]]:
    """Commit by the rule, one state after the other, while there is room and the state may be a guess."""
    states, reach, rows = [context.root], [1.0], 1
    for candidates in stale_candidates(context, len(context.root.masked), coupled):
        transition = commit(states[-1], still_masked(candidates, states[-1]), rule, context.noise)
        state = transition.state
        rows += 1 + state.is_complete
        own = np.flatnonzero(context.root.canvas != state.canvas)
        if rows > budget or (state.is_complete and not (context.crosses and context.stop_ids.isdisjoint(state.canvas[own].tolist()))):
            break
        natural = dict(zip(candidates.positions.tolist(), candidates.natural.tolist(), strict=True))
        chance = {"margin": lambda x: (1 + x) / 2, "entropy": np.exp}.get(rule.confidence, lambda x: x)
        states.append(state)
        reach.append(reach[-1] * float(np.prod([chance(natural[p]) for p in transition.positions.tolist()])))
        if state.is_complete:
            break
    return states, reach


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", RULES)
@SMALL
@given(length=st.integers(1, 7), tail=st.integers(0, 4), budget=st.integers(1, 10), seed=st.integers(0, 999), how=st.integers(0, 7))
def test_it_follows_the_rule(rule, temperature, length, tail, budget, seed, how):
    crosses, coupled, stops = bool(how & 1), bool(how & 2), frozenset({0, 4} if how & 4 else ())
    rule = UnmaskRule(**RULES[rule])
    context = context_of(rule, temperature, length, min(tail, length - 1), seed, crosses=crosses, stop_ids=stops)
    assume(len(context.root.masked))
    ltr = seed % 3 == 0 and rule.num_per_step == 1
    followed = replace(rule, select="left_to_right", order_temperature=0.0) if ltr else rule
    graph = stale_chain(context, budget, followed, coupled)
    graph.validate(context.root, budget, VOCAB, crosses)
    states, reach = expected_chain(context, budget, followed, coupled)
    assert [s.key for s in states] == [(3, int(step), canvas.tobytes()) for step, canvas in zip(graph.steps, graph.canvases, strict=True)]
    assert np.allclose(graph.reach, reach) and (np.diff(graph.reach) <= 0).all()
    assert graph.edges.tolist() == [[n, n + 1] for n in range(len(graph) - 1)]


@pytest.mark.parametrize("drafter", [Chain(), Chain(coupled=False), LeftToRight()], ids=lambda d: d.name)
def test_the_last_position_alone(drafter):
    """The complete block is the only guess, takes two rows, and is none where a stop token is in it or nothing may follow."""
    context = context_of(UnmaskRule(), 0.0, 4, 2, 1, crosses=True)
    assert len(context.root.masked) == 1
    assert [len(drafter.draft(context, budget)) for budget in (1, 2, 3, 9)] == [1, 1, 2, 2]
    graph = drafter.draft(context, 3)
    assert graph.complete.tolist() == [False, True] and 0 < graph.reach[1] < 1
    token = int(graph.canvases[1][context.root.masked[0]])
    assert len(drafter.draft(replace(context, stop_ids=frozenset({token})), 9)) == 1
    assert len(drafter.draft(replace(context, stop_ids=frozenset({0, 1}) - {token}), 9)) == 2  # the prompt's tail does not end it
    assert len(drafter.draft(replace(context, crosses=False), 9)) == 1
