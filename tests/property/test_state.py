"""Properties of the block state: immutable, monotone, equal exactly if block, step and canvas are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spot_dlm.state import MASKED, BlockState

SMALL = settings(max_examples=40, deadline=None, derandomize=True, database=None)
tails = st.lists(st.integers(0, 99), max_size=5)


@SMALL
@given(tails, st.integers(1, 6), st.integers(0, 9), st.randoms(use_true_random=False))
def test_unmasking_is_monotone_and_leaves_the_old_state_alone(tail, more, block, random):
    state = BlockState.initial(block, tail, len(tail) + more)
    assert state.masked.tolist() == list(range(len(tail), len(tail) + more)) and state.step == 0
    while not state.is_complete:
        chosen = np.array(random.sample(state.masked.tolist(), random.randint(1, len(state.masked))))
        tokens = np.array([random.randrange(100) for _ in chosen])
        before = state.key, state.canvas.copy()
        following = state.commit(chosen, tokens)
        assert (state.key, state.canvas.tolist()) == (before[0], before[1].tolist())
        assert following.step == state.step + 1 and following.block == block and following != state
        assert sorted([*following.masked, *chosen]) == state.masked.tolist()
        kept = state.canvas != MASKED
        assert np.array_equal(following.canvas[kept], state.canvas[kept]) and np.array_equal(following.canvas[chosen], tokens)
        state = following
    assert not len(state.masked)


@SMALL
@given(st.lists(st.integers(-1, 2), min_size=3, max_size=3), st.lists(st.integers(-1, 2), min_size=3, max_size=3), *[st.integers(0, 1)] * 4)
def test_equality_is_that_of_block_step_and_canvas(one, other, block, other_block, step, other_step):
    a, b = BlockState(block, np.array(one), step), BlockState(other_block, np.array(other), other_step)
    assert (a == b) == (b == a) == ((block, step, one) == (other_block, other_step, other))
    assert a != "state" and (a != b or hash(a) == hash(b))


def test_the_canvas_cannot_be_written():
    state = BlockState.initial(0, [4], 3)
    with pytest.raises(ValueError):
        state.canvas[0] = 1


@pytest.mark.parametrize("tail", [[1, 2], [1, 2, 3]])
def test_a_tail_that_fills_the_block_is_refused(tail):
    with pytest.raises(ValueError, match=f"tail of {len(tail)} tokens leaves no masked position in a block of 2"):
        BlockState.initial(0, tail, 2)


def test_any_id_may_stand_in_a_prompt():
    """The mask token's id is an ordinary id here: masked is MASKED, not an id."""
    assert BlockState.initial(0, [0, 5], 3).masked.tolist() == [2]
