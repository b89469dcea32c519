"""The pictures of docs/algorithm.md, from hand-made passes."""

import numpy as np
import pytest

from benchmarks import draw_algorithm as draw
from spot_dlm.draft_graph import DraftGraph, GraphBuilder
from spot_dlm.sequence import Committed
from spot_dlm.state import BlockState

LIMIT_BYTES = 150_000


def diamond():
    """Two orders of two commits, and a third commit below: 0 -> 1, 2 -> 3 (merged) -> 4."""
    root = BlockState.initial(block=1, tail=[9], block_length=6)
    left, right = (root.commit(np.array([p]), np.array([p + 10])) for p in (1, 3))
    both = left.commit(np.array([3]), np.array([13]))
    deep, other = (both.commit(np.array([p]), np.array([p + 10])) for p in (4, 5))
    builder = GraphBuilder(root, 8)
    builder.add(0, left, 0.6)
    builder.add(0, right, 0.3)
    builder.add(1, both, 0.5)
    builder.add(2, both, 0.5)
    builder.add(3, deep, 0.4)
    return builder.build(), other


def chain():
    root = BlockState.initial(block=0, tail=[], block_length=4)
    builder = GraphBuilder(root, 3)
    following = root.commit(np.array([0]), np.array([5]))
    builder.add(0, following, 1.0)
    return draw.Walk(builder.build(), [0, 1], following.commit(np.array([1]), np.array([6])))


def text(token):
    return f"tok${token}$"


@pytest.mark.parametrize("accepted", [False, True])
def test_graph_is_drawn(tmp_path, accepted):
    graph, leaving = diamond()
    walk = draw.Walk(graph, [0, 2, 3], leaving, number=7)
    assert walk.merged == [3]
    draw.draw_graph(walk, text, tmp_path / "sub" / "graph.png", accepted)
    assert 5_000 < (tmp_path / "sub" / "graph.png").stat().st_size < LIMIT_BYTES


def test_root_alone_is_drawn(tmp_path):
    root = BlockState.initial(block=0, tail=[], block_length=2)
    walk = draw.Walk(DraftGraph.root_only(root), [0], root.commit(np.array([1]), np.array([4])))
    draw.draw_graph(walk, text, tmp_path / "root.png", accepted=True)
    assert (tmp_path / "root.png").exists()


def test_choice_prefers_merging_and_takes_the_best_otherwise():
    graph, leaving = diamond()
    rich = draw.Walk(graph, [0, 2, 3], leaving)
    assert draw.choose([chain(), rich]) is rich
    poor = chain()
    assert not poor.qualifies and draw.choose([poor]) is poor
    with pytest.raises(ValueError, match="no pass"):
        draw.choose([])


def test_merged_node_names_both_last_commits():
    graph, _ = diamond()
    assert draw.node_lines(graph, 3, str, room=12) == ["\u203913\u203a at 3", "\u203911\u203a at 1"]
    assert draw.lay_out(graph)[[1, 2]].tolist() == [0.5, -0.5]


def test_canvas_is_drawn(tmp_path):
    start = BlockState.initial(block=1, tail=[9], block_length=4)
    steps = [(2, 0), (1, 1), (3, 2)]
    standard = [Committed(4 + p, 10 + p, 1, step, step) for p, step in steps]
    fewer = [Committed(4 + p, 10 + p, 1, step, number) for (p, step), number in zip(steps, (5, 6, 6), strict=True)]
    draw.draw_canvas(start, {"standard": standard, "speculative": fewer}, text, tmp_path / "canvas.png")
    assert 3_000 < (tmp_path / "canvas.png").stat().st_size < LIMIT_BYTES
