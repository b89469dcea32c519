"""Properties of the draft graph (merging, budget, look-up) and of the counts."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import unchecked

from spot_dlm.draft_graph import DraftGraph, GraphBuilder
from spot_dlm.state import MASKED, BlockState
from spot_dlm.stats import Counts

SMALL = settings(max_examples=25, deadline=None, derandomize=True, database=None)
LENGTH, VOCAB = 4, 3
moves = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3), st.integers(0, VOCAB - 1), st.floats(0, 1)), max_size=25)


def grow(moves, budget, crosses):
    """Add random children; returns the builder and the probability of every edge by the states it joins."""
    root = BlockState.initial(3, [1], LENGTH)
    builder, known, edges, left = GraphBuilder(root, budget, crosses), {root.key}, {}, budget - 1
    for parent, at, token, probability in moves:
        parent %= len(builder.states)
        state = builder.states[parent]
        if state.is_complete:
            continue
        child = state.commit(state.masked[at % len(state.masked)][None], np.array([token]))
        seen, rows = child.key in known, 1 + child.is_complete
        node = builder.add(parent, child, probability)
        assert (node is None) == ((child.is_complete and not crosses) or (rows > left and not seen))
        if node is not None:
            left -= 0 if seen else rows
            assert builder.states[node] == child
            known.add(child.key)
            edges[state.key, child.key] = probability
    return builder, edges


def reach_of(key, edges, root):
    """Sum over all paths, one by one."""
    return 1.0 if key == root else sum(reach_of(a, edges, root) * p for (a, b), p in edges.items() if b == key)


@SMALL
@given(moves, st.integers(1, 9), st.booleans())
def test_equal_states_are_one_node_and_reach_sums_over_paths(moves, budget, crosses):
    with unchecked():
        builder, edges = grow(moves, budget, crosses)
    graph = builder.build()
    graph.validate(builder.states[0], budget, VOCAB, crosses)
    assert len(graph) == len({s.key for s in builder.states}) <= graph.rows.sum() <= budget
    assert graph.complete.tolist() == [s.is_complete for s in builder.states] and (crosses or not graph.complete.any())
    if graph.complete.any():
        with pytest.raises(ValueError, match="a complete block takes no node"):
            graph.validate(builder.states[0], budget, VOCAB)
    used = int(graph.rows.sum())
    with pytest.raises(ValueError, match=f"{used} nodes, the budget allows 1 to {used - 1}"):
        graph.validate(builder.states[0], used - 1, VOCAB, crosses)
    root = builder.states[0].key
    assert [reach_of(s.key, edges, root) for s in builder.states] == pytest.approx(graph.reach.tolist())
    assert len(graph.edges) == len(edges)
    for parent, child in graph.edges:
        assert graph.steps[child] == graph.steps[parent] + 1 and graph.depths[child] == graph.depths[parent] + 1
        gained = graph.canvases[child] != graph.canvases[parent]
        assert gained.sum() == 1 and (graph.canvases[parent][gained] == MASKED).all()
    for node, state in enumerate(builder.states):
        assert graph.find(state) == node
        assert graph.find(BlockState(state.block, state.canvas, state.step + 9)) is None
        assert graph.find(BlockState(state.block + 1, state.canvas, state.step)) is None
    for count in range(1, len(graph) + 1):
        first = graph.first(count)
        first.validate(builder.states[0], int(first.rows.sum()), VOCAB, crosses)
        assert len(first) == count and np.array_equal(first.canvases, graph.canvases[:count])
        assert first.edges.tolist() == [e for e in graph.edges.tolist() if max(e) < count]


def test_a_complete_block_is_one_node_of_two_rows():
    """Two orders of the last two commits meet in it; it is added where two of the budget are left."""
    root = BlockState.initial(0, [2], 3)
    left, right = (root.commit(np.array([p]), np.array([0])) for p in (1, 2))
    whole = left.commit(np.array([2]), np.array([0]))
    for budget, crosses, expected in ((5, True, 3), (4, True, None), (9, False, None)):
        builder = GraphBuilder(root, budget, crosses)
        a, b = builder.add(0, left, 0.6), builder.add(0, right, 0.4)
        assert builder.add(a, whole, 1.0) == builder.add(b, right.commit(np.array([1]), np.array([0])), 0.5) == expected
    graph = GraphBuilder(root, 3, True)
    graph.add(0, left, 0.6)
    assert graph.add(1, whole, 1.0) is None and graph.add(0, right, 0.4) == 2


def test_a_complete_root_counts_one():
    """Where the pass is the first of the next block, its root is the complete block itself."""
    root = BlockState(0, np.array([1, 2]), 2)
    graph = DraftGraph.root_only(root)
    graph.validate(root, 1, 5, crosses=True)
    assert graph.complete.all() and graph.rows.tolist() == [2] and graph.find(root) == 0


def test_two_orders_of_the_same_content_meet():
    root = BlockState.initial(0, [], 4)
    builder = GraphBuilder(root, 8)
    left, right = (root.commit(np.array([p]), np.array([t])) for p, t in ((0, 5), (1, 6)))
    a, b = builder.add(0, left, 0.6), builder.add(0, right, 0.25)
    joined = left.commit(np.array([1]), np.array([6]))
    both = builder.add(a, joined, 0.5)
    below = builder.add(both, joined.commit(np.array([2]), np.array([7])), 0.5)
    assert builder.add(b, right.commit(np.array([0]), np.array([5])), 0.4) == both  # after a child was added below it
    graph = builder.build()
    assert below == 4 and graph.reach.tolist() == pytest.approx([1.0, 0.6, 0.25, 0.4, 0.2]) and graph.depths.tolist() == [0, 1, 1, 2, 3]
    assert graph.edges.tolist() == [[0, 1], [0, 2], [1, 3], [3, 4], [2, 3]]


def test_a_guess_follows_its_parent_by_one_step():
    root = BlockState.initial(0, [], 3)
    builder = GraphBuilder(root, 8)
    child = root.commit(np.array([0]), np.array([1]))
    for wrong in (root, BlockState(0, child.canvas, 2)):
        with pytest.raises(ValueError, match="cannot follow"):
            builder.add(0, wrong, 0.5)


def test_of_duplicated_nodes_the_first_is_found():
    root = BlockState.initial(0, [], 2)
    child = root.commit(np.array([0]), np.array([1]))
    canvases = np.stack([root.canvas, child.canvas, child.canvas])
    graph = DraftGraph(0, canvases, np.array([0, 1, 1]), np.ones(3), np.zeros((0, 2), np.int64))
    graph.validate(root, 3, 2)
    assert graph.find(child) == 1


def test_root_only():
    root = BlockState.initial(7, [1, 2], 4)
    graph = DraftGraph.root_only(root)
    graph.validate(root, 1, 5)
    assert len(graph) == 1 and graph.find(root) == 0 and graph.edges.shape == (0, 2)


passes = st.lists(st.tuples(st.lists(st.integers(1, 6), max_size=6), st.integers(0, 6)), max_size=6)


@SMALL
@given(passes, passes)
def test_counts_add_up(first, second):
    def counted(passes):
        counts = Counts(sequences=1, tokens=3, total_s=0.5)
        for depths, accepted in passes:
            counts.count_pass(depths, accepted, rows=1 + len(depths))
        return counts

    total, whole = counted(first) + counted(second), counted(first + second)
    for item in fields(Counts):
        if item.name not in ("sequences", "tokens", "total_s"):
            assert getattr(total, item.name) == getattr(whole, item.name), item.name
    assert (total.sequences, total.tokens, total.total_s) == (2, 6, 1.0)
    everything = first + second
    assert total.nfe == len(everything) and total.transitions == total.nfe + total.accepted
    assert total.drafted == sum(len(d) for d, _ in everything) and sum(total.reached) == total.accepted
    for depth in range(1, len(total.reached) + 1):
        assert total.reached[depth - 1] == sum(accepted >= depth for _, accepted in everything)
        assert total.offered[depth - 1] == sum(depth in depths for depths, _ in everything)
    assert Counts() + total == total and total.to_dict()["nfe"] == total.nfe
