"""The calibrated drafters, with whatever graph, change neither tokens nor order; their nodes are what the graph says."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from toy import split_rule, trajectory, unchecked
from trace_toys import settled_target

from spot_dlm.decode import generate
from spot_dlm.drafters import Calibrated, Chain, Root
from spot_dlm.drafters.calibrated import Plan, within
from spot_dlm.interfaces import DecodeParams
from spot_dlm.rank_graph import GraphKey, GraphTable, Node, RankGraph
from spot_dlm.rules import describe
from spot_dlm.state import MASKED

LENGTH = 8
VARIANTS = [(pruned, coupled) for pruned in (False, True) for coupled in (True, False)]
SAMPLINGS = {"T=0": {"temperature": 0.0}, "T=1": {"temperature": 1.0}, "T=0.7 p=0.9": {"temperature": 0.7, "top_p": 0.9}}
RULES = {
    "standard": {},
    "bfloat16": {"resolution": "bfloat16"},
    "margin": {"confidence": "margin"},
    "leftmost": {"select": "leftmost_above", "threshold": 0.5},
    "filtered": {"source": "filtered"},
    "two at once": {"num_per_step": 2},
}


def chain_graph(size: int) -> RankGraph:
    """The chain as a graph: ranks in their order."""
    return RankGraph(tuple(tuple((i, 1) for i in range(1, n + 1)) for n in range(1, size + 1)), (1,) * size, 1)


def random_graph(rng: np.random.Generator, size: int, highest: int) -> RankGraph:
    """A connected graph of random rank sets, some beyond every block; at most 3^highest - 1 of them exist."""
    assert size < 3**highest, f"there are no {size} sets of {highest} ranks"
    nodes: list[Node] = []
    sets: set[frozenset] = set()
    while len(nodes) < size:
        above = () if not nodes or rng.random() < 0.3 else nodes[rng.integers(len(nodes))]
        node = (*above, (int(rng.integers(1, highest + 1)), int(rng.integers(1, 3))))
        if len({i for i, _ in node}) == len(node) and frozenset(node) not in sets:
            nodes.append(node)
            sets.add(frozenset(node))
    return RankGraph(tuple(nodes), tuple(rng.integers(0, 9, size).tolist()), 9)


def table(graph: RankGraph, rule: str) -> GraphTable:
    return GraphTable({GraphKey(rule, True, True, LENGTH): graph}, {})


def params_of(rule: str, sampling: str, nodes: int = 1) -> DecodeParams:
    chosen, drawn, _ = split_rule(RULES[rule] | SAMPLINGS[sampling] | {"seed": 5})
    return DecodeParams(chosen, drawn, max_new_tokens=13, nodes=nodes)


@pytest.mark.parametrize(("rule", "sampling"), [(r, s) for r in RULES for s in SAMPLINGS if r in ("standard", "bfloat16") or "p" in s])
def test_no_graph_changes_a_token(rule, sampling):
    rng = np.random.default_rng(len(rule) + len(sampling))
    target, prompt, params = settled_target(6, seed=2), [1, 2, 3], params_of(rule, sampling)
    graphs = [chain_graph(12), random_graph(rng, 60, 4), random_graph(rng, 60, 20), RankGraph((((9, 1),), ((9, 1), (1, 2))), (0, 0), 0)]
    sizes = [(2, 16), (8, 32), (5, 32), (16,)]
    with unchecked():
        standard = generate(target, prompt, Root(), params)
        for graph, budgets in zip(graphs, sizes, strict=True):
            for pruned, coupled in VARIANTS:
                drafter = Calibrated(table(graph, describe(params.rule)), pruned, coupled)
                for nodes in budgets:
                    got = generate(target, prompt, drafter, replace(params, nodes=nodes))
                    assert trajectory(got) == trajectory(standard), (drafter.name, nodes)
                    assert got.counts.transitions == standard.counts.nfe == got.counts.nfe + got.counts.accepted


@pytest.mark.parametrize(("pruned", "coupled"), VARIANTS)
def test_with_shape_checks(pruned, coupled):
    params = params_of("margin", "T=0.7 p=0.9", 16)
    drafter = Calibrated(table(random_graph(np.random.default_rng(1), 40, 9), "confidence=margin"), pruned, coupled)
    standard = generate(settled_target(), [1, 2], Root(), replace(params, nodes=1))
    assert trajectory(generate(settled_target(), [1, 2], drafter, params)) == trajectory(standard)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("coupled", [True, False])
def test_the_graph_of_the_chain_is_the_chain(sampling, coupled):
    """Ranks follow the order of the coupled chain, so the graph 1, 12, 123, ... proposes its very states."""
    if sampling != "T=0" and not coupled:
        pytest.skip("published: the chain keeps what was drawn, the graph the best tokens")
    target, params = settled_target(seed=4), params_of("standard", sampling, 6)
    ours, theirs = Calibrated(table(chain_graph(12), "standard"), False, coupled), Chain()
    with unchecked():
        generate(target, [1, 2, 3], Both(ours, theirs), params)
        assert Both.compared > 5


class Both:
    """Drafts with the first drafter after comparing its nodes with the second's."""

    compared = 0
    name = "both"

    def __init__(self, first, second):
        self.first, self.second = first, second

    def draft(self, context, budget):
        got, expected = self.first.draft(context, budget), self.second.draft(context, budget)
        assert np.array_equal(got.canvases, expected.canvases) and np.array_equal(got.steps, expected.steps)
        assert np.array_equal(got.edges, expected.edges)
        Both.compared += len(got) > 1
        return got


class Watched:
    """Checks every graph that a drafter draws up."""

    name = "watched"

    def __init__(self, drafter, available):
        self.drafter, self.available, self.sizes, self.crossed = drafter, available, [], 0

    def draft(self, context, budget):
        graph = self.drafter.draft(context, budget)
        root = context.root
        masked = len(root.masked)
        fit = [n for n in self.available.nodes if len(n) < masked + context.crosses and max(i for i, _ in n) <= masked]
        assert len(graph) == 1 + min(budget - 1, len(fit)) or context.crosses
        assert np.array_equal(graph.complete, graph.depths == masked)
        ended = np.isin(graph.canvases[graph.complete][:, root.masked], sorted(context.stop_ids)).any()
        assert not ended and graph.reach.min() >= 0 and graph.reach.max() <= 1
        self.crossed += int(graph.complete.sum())
        filled = (graph.canvases != MASKED).sum(axis=1) - (root.canvas != MASKED).sum()
        assert np.array_equal(filled, graph.depths)
        if not context.sampling.temperature:  # else a set may contradict a smaller one
            assert set(graph.edges[:, 1].tolist()) == set(range(1, len(graph)))  # every guess has a parent
        self.sizes.append(int(graph.rows.sum()))
        return graph


@pytest.mark.parametrize("crosses", [False, True])
@pytest.mark.parametrize(("pruned", "coupled"), VARIANTS)
def test_the_budget_is_used(pruned, coupled, crosses):
    """Nodes that do not fit are replaced by the next ones, and every node hangs together with the root."""
    graph = random_graph(np.random.default_rng(3), 200, 8)
    for sampling in ("T=0", "T=1"):
        drafter = Watched(Calibrated(table(graph, "standard"), pruned, coupled), graph)
        with unchecked():
            generate(settled_target(seed=1, crosses=crosses), [1], drafter, params_of("standard", sampling, 9))
        assert max(drafter.sizes) == 9 and (drafter.crossed > 0) == crosses


def test_the_first_nodes_that_fit():
    """Rows are spent in order; one that is left goes to the next node of one row."""
    rows = np.array([1, 2, 2, 1, 1])
    for budget, expected in (
        (0, []),
        (1, [0]),
        (2, [0, 3]),
        (3, [0, 1]),
        (4, [0, 1, 3]),
        (5, [0, 1, 2]),
        (6, [0, 1, 2, 3]),
        (9, [0, 1, 2, 3, 4]),
    ):
        assert within(np.arange(5), rows, budget).tolist() == expected, budget
    assert within(np.array([1, 2]), rows, 1).tolist() == []


def test_what_comes_to_a_complete_block():
    """Of a root with two masked positions: all that comes to its parents, the last token's kinds by their own counts."""
    nodes = (((1, 1),), ((1, 1), (2, 1)), ((2, 1),), ((1, 1), (2, 2)), ((1, 1), (2, 1), (3, 1)))
    plan = Plan.of(RankGraph(nodes, (60, 30, 20, 10, 25), 100), 2, 9, crosses=True)
    assert plan.rows.tolist() == [1, 2, 1, 2] and plan.levels.tolist() == [1, 2, 1, 2]
    assert plan.share.tolist() == pytest.approx([0.6, 0.6 * 30 / 40 + 0.2, 0.2, 0.6 * 10 / 40])
    assert Plan.of(RankGraph(nodes, (60, 30, 20, 10, 25), 100), 2, 9).levels.tolist() == [1, 1]
    alone = Plan.of(RankGraph((((1, 1),), ((1, 2),)), (60, 20), 100), 1, 9, crosses=True)
    assert alone.share.tolist() == pytest.approx([0.75, 0.25]) and alone.rows.tolist() == [2, 2]


@pytest.mark.parametrize(("pruned", "coupled"), VARIANTS)
def test_crossing_saves_passes(pruned, coupled):
    """On a target whose stale tokens mostly hold, the complete block is reached whatever the order."""
    passes = []
    with unchecked():
        for boundary in (True, False):
            drafter = Calibrated(table(random_graph(np.random.default_rng(1), 60, 4), "standard"), pruned, coupled)
            params = replace(params_of("standard", "T=0", 12), max_new_tokens=40, boundary=boundary)
            passes.append(generate(settled_target(seed=3, block_length=4, crosses=True), [1], drafter, params).counts.nfe)
    assert passes[0] < passes[1]


def test_nearest_graph_or_a_clear_error():
    near, far = chain_graph(3), chain_graph(4)
    both = GraphTable({GraphKey("standard", False, True, 16): near, GraphKey("standard", True, True, 32): far}, {})
    assert both.find("standard", False, True, 64) is near and both.find("standard", True, False, 8) is far
    with pytest.raises(ValueError, match="nothing for rule 'k=2', only for 'standard'"):
        generate(settled_target(), [1], Calibrated(both), DecodeParams(split_rule({"num_per_step": 2})[0], nodes=4))
