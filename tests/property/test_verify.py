"""Properties of the walk: several graphs in lockstep prove what each proves alone, and errors stay where they belong."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import unchecked

from spot_dlm.draft_graph import GraphBuilder
from spot_dlm.noise import CoupledNoise
from spot_dlm.state import BlockState
from spot_dlm.transition import Sampling, UnmaskRule, denoise
from spot_dlm.verify import Acceptance, Walk, accept, accept_many

SMALL = settings(max_examples=30, deadline=None, derandomize=True, database=None)
VOCAB, LENGTH = 7, 4


class Rows:
    """Logits of a graph's nodes, a function of each node's canvas; those of `broken` states hold NaN."""

    def __init__(self, graph, seed, broken=()):
        self.graph, self.seed, self.broken = graph, seed, broken

    def __call__(self, node):
        state = BlockState(self.graph.block, self.graph.canvases[node].copy(), int(self.graph.steps[node]))
        return self.of(state)

    def of(self, state):
        """The row of a complete block is the first of the next one."""
        rng = np.random.default_rng([self.seed, *(state.canvas + 1).tolist()])
        logits = torch.from_numpy((3 * rng.standard_normal((len(state.decoded.masked), VOCAB))).astype(np.float32))
        if state.key in self.broken:
            logits[-1, 2] = torch.nan
        return logits


def random_walk(rng, breaks):
    """A graph along the true path, up to some depth and across the block's end, with wrong guesses beside it."""
    seed = int(rng.integers(1000))
    rule = [UnmaskRule(), UnmaskRule(num_per_step=2), UnmaskRule(confidence="entropy", resolution="bfloat16")][rng.integers(3)]
    sampling = [Sampling(), Sampling(1.0), Sampling(1.0, top_p=0.9)][rng.integers(3)]
    noise = CoupledNoise(seed, 0)
    root = BlockState.initial(int(rng.integers(3)), list(range(rng.integers(0, LENGTH))), LENGTH)
    builder = GraphBuilder(root, 20, crosses=True)
    rows = Rows(builder, seed)
    state, node, path = root, 0, [root]
    for _ in range(rng.integers(0, 6)):
        if state.is_complete:
            break
        wrong = state.commit(state.masked[:1], np.array([VOCAB - 1]))
        state = denoise(state, rows.of(state), rule, sampling, noise).state
        builder.add(node, wrong, 0.1)
        node = builder.add(node, state, 0.9)
        path.append(state)
    broken = {path[rng.integers(len(path))].key} if breaks else set()
    graph = builder.build()
    return Walk(graph, root, Rows(graph, seed, broken), rule, sampling, noise, lambda s: s.is_complete and s.block == 2)


def alone(walk):
    step = partial(denoise, rule=walk.rule, sampling=walk.sampling, noise=walk.noise)
    try:
        return accept(walk.graph, walk.root, walk.logits_of, step, walk.is_final)
    except ValueError as error:
        return error


def proved(answer):
    if isinstance(answer, ValueError):
        return str(answer)
    return answer.nodes, [(t.before.key, t.state.key) for t in answer.transitions], answer.logits.numpy().tobytes(), answer.state.key


@SMALL
@given(st.integers(0, 2**32))
def test_walks_in_lockstep_are_the_walks_alone(seed):
    rng = np.random.default_rng(seed)
    with unchecked():
        walks = [random_walk(rng, breaks=rng.integers(4) == 0) for _ in range(8)]
        assert [proved(a) for a in accept_many(walks)] == [proved(alone(w)) for w in walks]


def test_walks_reach_the_next_block_and_stop_at_the_end():
    """The toys above do what they are for: some walks cross a block's end, some end there, and some fail on the way."""
    rng = np.random.default_rng(0)
    with unchecked():
        answers = accept_many([random_walk(rng, breaks=i % 4 == 0) for i in range(60)])
    done = [a for a in answers if isinstance(a, Acceptance)]
    assert any(a.transitions[-1].before.block > a.transitions[0].before.block for a in done)
    assert any(a.state.is_complete and a.state.block == 2 for a in done) and max(len(a.nodes) for a in done) >= 4
    assert 5 <= sum(isinstance(a, ValueError) for a in answers) <= 15


def test_an_error_that_is_not_of_the_logits_is_raised():
    """With shape checks: what a broken target raises is not a walk's answer."""
    rng = np.random.default_rng(1)
    walk, other = random_walk(rng, False), random_walk(rng, False)

    def fail(node):
        raise RuntimeError("device lost")

    assert [proved(a) for a in accept_many([walk, other])] == [proved(alone(walk)), proved(alone(other))] and accept_many([]) == []
    with pytest.raises(RuntimeError, match="device lost"):
        accept_many([walk, Walk(other.graph, other.root, fail, other.rule, other.sampling, other.noise, other.is_final)])
