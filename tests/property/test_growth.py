"""Properties of compiled growth: against a plain-Python reference, exact Plackett-Luce reach, hostile scores, the walk."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from spot_dlm.growth import MIN_REACH, OrderScores, grow, grow_arrays, walk
from spot_dlm.state import MASKED, BlockState

SMALL = settings(max_examples=60, deadline=None, derandomize=True, database=None)
VOCAB = 6
EMPTY = frozenset()
sizes = st.fixed_dictionaries(
    {
        "m": st.integers(1, 6),
        "depths": st.integers(1, 4),
        "hidden": st.sampled_from([0, 1, 5]),
        "branches": st.booleans(),
        "scale": st.sampled_from([0.0, 0.5, 3.0]),
        "seed": st.integers(0, 2**32 - 1),
    }
)


def draw(m, depths, hidden, branches, scale, seed):
    """Random scores; `branches` off leaves no second token."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return (scale * rng.normal(size=shape)).astype(np.float32)

    tokens = rng.integers(-1, VOCAB, size=(depths, m, 2))
    p_token = rng.dirichlet([4, 1, 1], size=(depths, m))[..., :2].astype(np.float32)
    if not branches:
        tokens[..., 1], p_token[..., 1] = -1, 0
        tokens[..., 0] = np.where(rng.random((depths, m)) < 0.9, tokens[:1, :, 0], tokens[..., 0])
    score, commits = (normal(depths, m), normal(m, m), normal(m, m)), (normal(depths, hidden), normal(m, hidden), normal(m, hidden))
    return OrderScores(np.arange(m) * 2 + 1, tokens, p_token, *score, *commits, normal(hidden))


def root_of(scores):
    canvas = np.zeros(2 * len(scores.positions) + 2, dtype=np.int64)
    canvas[scores.positions] = MASKED
    return BlockState(4, canvas, 7)


NO_STOPS = np.zeros(0, dtype=np.int64)
crossing = st.fixed_dictionaries({"crosses": st.just(True), "stops": st.sampled_from([(), (2,), (0, 4), tuple(range(VOCAB))])})


def arrays(s, budget, crosses=False, stops=()):
    given_ = (s.tokens, s.p_token, s.base, s.pair, s.last, s.gate_node, s.gate_commit, s.gate_position, s.gate_out)
    return grow_arrays(*given_, budget, crosses, np.array(stops, dtype=np.int64))


def contents(parent, position, token):
    """The set of commits of every node, from its chain of parents."""
    found = [EMPTY]
    for node in range(1, len(parent)):
        assert parent[node] < node
        found.append(found[parent[node]] | {(int(position[node]), int(token[node]))})
    return found


def children(s, content, last, crosses, stops):
    """Children of a state and their probabilities, straight from the definition."""
    m, d = len(s.positions), min(len(content), len(s.base) - 1)
    done = [j for j, _ in content]
    if len(content) == m:
        return {}
    score = {}
    for i in set(range(m)) - set(done):
        with np.errstate(all="ignore"):
            x = s.gate_node[d].astype(float) + s.gate_commit[done].astype(float).sum(0) + s.gate_position[i]
            value = s.base[d, i] + s.pair[done, i].astype(float).sum() + (s.last[last, i] if content else 0.0)
            value += (s.gate_out * np.maximum(x, 0)).sum()
        score[i] = float(value) if np.isfinite(value) else -1e300
    top = max(score.values())
    total = sum(math.exp(v - top) for v in score.values())
    out = {}
    for i, value in score.items():
        for token, p in zip(s.tokens[d, i].tolist(), s.p_token[d, i].tolist(), strict=True):
            if token >= 0:
                child = content | {(i, token)}
                p = min(max(p, 0.0), 1.0) if math.isfinite(p) else 0.0
                out[child] = out.get(child, 0.0) + math.exp(value - top) / total * p
    return {c: p for c, p in out.items() if len(c) < m or (crosses and not {t for _, t in c} & set(stops))}


def check_against_reference(s, budget, crosses=False, stops=()):
    """Replay the growth with all reaches recomputed from scratch before every selection; the kernel may differ by rounding only."""
    parent, position, token, depth, reach, edges, hashes = arrays(s, budget, crosses, stops)
    states, m = contents(parent, position, token), len(s.positions)

    def rows(content):
        return 1 + (len(content) == m)

    assert len(set(states)) == len(set(hashes.tolist())) == len(states)
    assert [len(c) for c in states] == depth.tolist()
    assert (parent[0], position[0], token[0], hashes[0], reach[0]) == (-1, -1, -1, 0, 1.0)
    slack = MIN_REACH * (4 * len(states) + 4)  # what dropped transitions may hide
    below, spent = {}, 0
    for node in range(len(states) + 1):
        total = {EMPTY: 1.0}
        for content in sorted(below, key=len):
            for child, p in below[content].items():
                total[child] = total.get(child, 0.0) + total[content] * p
        open_ = {c: r / rows(c) for c, r in total.items() if c not in below and spent + rows(c) <= budget}
        if node == len(states):
            break
        assert open_[states[node]] >= max(open_.values()) - slack
        if node:
            shares = {c: total[c] * p[states[node]] for c, p in below.items() if states[node] in p}
            assert shares[states[parent[node]]] >= max(shares.values()) - slack
        below[states[node]] = children(s, states[node], position[node], crosses, stops)
        spent += rows(states[node])
    assert spent <= budget and max(open_.values(), default=0.0) <= slack
    assert np.allclose(reach, [total[c] for c in states], rtol=1e-6, atol=slack)
    index = {c: n for n, c in enumerate(states)}
    expected = {(n, index[c]): p * reach[n] for n, state in enumerate(states) for c, p in below[state].items() if c in index}
    found = {tuple(e) for e in edges.tolist()}
    assert len(found) == len(edges) and found <= set(expected)
    assert all(expected[e] < MIN_REACH * (1 + 1e-6) for e in set(expected) - found)
    sums = np.eye(1, len(states))[0]
    for e in sorted(found, key=lambda e: depth[e[0]]):
        sums[e[1]] += sums[e[0]] * expected[e] / reach[e[0]]
    assert np.allclose(sums, reach, rtol=1e-6)


@given(sizes, st.integers(1, 40))
@SMALL
def test_agrees_with_the_reference(size, budget):
    check_against_reference(draw(**size), budget)


@given(sizes, st.integers(1, 40), crossing)
@SMALL
def test_agrees_with_the_reference_across_the_end(size, budget, options):
    check_against_reference(draw(**size), budget, **options)


def test_agrees_with_the_reference_on_a_large_block():
    check_against_reference(draw(m=12, depths=3, hidden=8, branches=True, scale=1.0, seed=5), 64)


@given(sizes, st.integers(1, 40), st.booleans(), st.sampled_from([(), (3,)]))
@SMALL
def test_graph_is_valid(size, budget, crosses, stops):
    scores = draw(**size)
    root = root_of(scores)
    graph = grow(root, scores, budget, crosses, frozenset(stops))
    graph.validate(root, budget, VOCAB, crosses)
    parent, position, token, _, reach, edges, _ = arrays(scores, budget, crosses, stops)
    assert np.array_equal(graph.reach, reach) and np.array_equal(graph.edges, edges)
    for canvas, content in zip(graph.canvases, contents(parent, position, token), strict=True):
        expected = root.canvas.copy()
        for i, t in content:
            expected[scores.positions[i]] = t
        assert np.array_equal(canvas, expected)
    assert graph.complete.tolist() == [len(c) == size["m"] for c in contents(parent, position, token)]
    assert not (graph.canvases[graph.complete][:, scores.positions] == 3).any() or not stops


@given(st.integers(2, 5), st.integers(0, 2**32 - 1))
@SMALL
def test_plackett_luce_reach_is_exact(m, seed):
    """Without pair and last the order is Plackett-Luce: reach is the probability that the first k commits are the node's set."""
    weights = np.random.default_rng(seed).uniform(0.2, 2, m)
    plain = draw(m=m, depths=1, hidden=0, branches=False, scale=0.0, seed=seed)
    tokens, p_token = np.array([[[3, -1]] * m]), np.array([[[1, 0]] * m], dtype=np.float32)
    scores = replace(plain, base=np.log(weights)[None].astype(np.float32), tokens=tokens, p_token=p_token)
    parent, position, token, _, reach, edges, _ = arrays(scores, 10**6)
    assert len(reach) == 2**m - 1  # every set but the complete one
    assert len(edges) == sum(math.comb(m, k) * k for k in range(m))
    parent, position, token, _, reach, edges, _ = arrays(scores, 10**6, crosses=True)
    assert len(reach) == 2**m and len(edges) == sum(math.comb(m, k) * k for k in range(m + 1))
    assert reach[contents(parent, position, token).index(frozenset((i, 3) for i in range(m)))] == pytest.approx(1)  # by whatever order
    for content, r in zip(contents(parent, position, token), reach, strict=True):
        exact = 0.0
        for order in itertools.permutations(i for i, _ in content):
            left, p = weights.sum(), 1.0
            for i in order:
                p, left = p * weights[i] / left, left - weights[i]
            exact += p
        assert r == pytest.approx(exact, rel=1e-5)


@given(sizes, st.integers(1, 24))
@SMALL
def test_walk_counts_the_true_prefix(size, budget):
    scores = draw(**size)
    rng = np.random.default_rng(size["seed"])
    parent, position, token, _, _, _, hashes = arrays(scores, budget, bool(rng.integers(2)))
    states = contents(parent, position, token)
    for _ in range(10):
        order = rng.permutation(len(scores.positions))[: rng.integers(0, 7)].astype(np.int32)
        depth = np.minimum(np.arange(len(order)), len(scores.base) - 1)
        true = scores.tokens[depth, order, 0] if rng.random() < 0.8 else rng.integers(0, VOCAB, len(order))
        committed, accepted = EMPTY, 0
        for i, t in zip(order.tolist(), true.tolist(), strict=True):
            committed |= {(i, t)}
            if committed not in states:
                break
            accepted += 1
        assert walk(hashes, order, true) == accepted


@given(sizes, st.integers(1, 24), st.lists(st.sampled_from([np.nan, np.inf, -np.inf, 7.0, -7.0, 0.0]), min_size=1, max_size=4))
@SMALL
def test_hostile_numbers_leave_the_graph_valid(size, budget, values):
    scores = draw(**size)
    rng = np.random.default_rng(size["seed"])
    hostile = {}
    for name in ("p_token", "base", "pair", "last", "gate_node", "gate_commit", "gate_position", "gate_out"):
        array = getattr(scores, name).copy()
        at = rng.random(array.shape) < rng.choice([0.0, 0.2, 1.0])
        array[at] = rng.choice(values, size=int(at.sum()))
        hostile[name] = array
    scores, root = replace(scores, **hostile), root_of(scores)
    for crosses in (False, True):
        graph = grow(root, scores, budget, crosses)
        graph.validate(root, budget, VOCAB, crosses)
        assert np.isfinite(graph.reach).all() and (graph.reach > 0).all()
        check_against_reference(scores, budget, crosses)


@pytest.mark.parametrize("budget", [1, 2, 5, 500])
def test_equal_scores_select_the_candidate_made_first(budget):
    """Four equal positions: the root's children come in position order, and every set in the end."""
    scores = draw(m=4, depths=1, hidden=0, branches=False, scale=0.0, seed=0)
    scores = replace(scores, tokens=np.array([[[1, -1]] * 4]), p_token=np.array([[[1, 0]] * 4], dtype=np.float32))
    parent, position, *_ = arrays(scores, budget)
    assert len(parent) == min(budget, 15)
    assert position[1:5].tolist() == [0, 1, 2, 3][: budget - 1] and not parent[1:5].any()
    check_against_reference(scores, budget)


@pytest.mark.parametrize(("m", "tokens", "options"), [(1, 2, {}), (5, -1, {}), (5, -1, {"crosses": True}), (1, 2, {"crosses": True})])
def test_nothing_to_guess_leaves_the_root(m, tokens, options):
    scores = draw(m=m, depths=2, hidden=3, branches=True, scale=1.0, seed=0)
    scores = replace(scores, tokens=np.full_like(scores.tokens, tokens))
    graph = grow(root_of(scores), scores, 9, **options, stop_ids=frozenset({2}))
    assert len(graph) == 1 and graph.edges.shape == (0, 2)


def chain_scores(m, p):
    """Positions surely from left to right, each with its one token m + i of probability p[i]."""
    plain = draw(m=m, depths=1, hidden=0, branches=False, scale=0.0, seed=0)
    tokens = np.stack((m + np.arange(m), np.full(m, -1)), axis=-1)[None]
    p_token = np.stack((np.array(p), np.zeros(m)), axis=-1)[None].astype(np.float32)
    return replace(plain, base=(-50.0 * np.arange(m, dtype=np.float32))[None], tokens=tokens, p_token=p_token)


def test_the_last_position_alone():
    """One masked position: the complete block is the only guess, and needs two rows besides the root."""
    scores = chain_scores(1, [0.75])
    for budget, size in ((1, 1), (2, 1), (3, 2), (9, 2)):
        graph = grow(root_of(scores), scores, budget, crosses=True)
        assert len(graph) == size and graph.complete.tolist() == [False, True][:size]
    assert graph.reach.tolist() == [1.0, 0.75] and graph.edges.tolist() == [[0, 1]]
    assert len(grow(root_of(scores), scores, 9)) == 1


def test_a_complete_block_counts_two_rows():
    """It is chosen by half its reach, and where it does not fit the next best takes the row."""
    scores = chain_scores(3, [1.0, 0.9, 0.8])
    wide = replace(scores, tokens=np.array([[[3, 5], [4, 5], [5, 1]]]), p_token=np.array([[[0.9, 0.1]] * 3], dtype=np.float32))

    def drafted(scores, budget, **options):
        parent, position, token, _, reach, _, _ = arrays(scores, budget, crosses=True, **options)
        return contents(parent, position, token), reach

    states, reach = drafted(scores, 5)
    assert [len(c) for c in states] == [0, 1, 2, 3] and np.allclose(reach, [1, 1, 0.9, 0.72])
    assert [len(c) for c in drafted(scores, 4)[0]] == [0, 1, 2]  # one row is left and nothing fits it
    assert [len(c) for c in drafted(scores, 5, stops=(4,))[0]] == [0, 1, 2]
    for budget in range(1, 9):
        states, _ = drafted(wide, budget)
        assert 1 + sum(1 + (len(c) == 3) for c in states[1:]) == budget
    states, reach = drafted(wide, 4)  # 0.9, 0.81; then 0.729 / 2 does not fit and is passed over
    assert [len(c) for c in states] == [0, 1, 2, 1] and reach[3] == pytest.approx(0.1)
    states, reach = drafted(wide, 5)
    assert [len(c) for c in states] == [0, 1, 2, 3] and reach[3] == pytest.approx(0.729)


def test_callable_from_compiled_code():
    @njit
    def accepted(tokens, p, base, pair, last, node, commit, position, out, true_positions, true_tokens):
        hashes = grow_arrays(tokens, p, base, pair, last, node, commit, position, out, 8)[6]
        return walk(hashes, true_positions, true_tokens)

    s = draw(m=4, depths=2, hidden=2, branches=False, scale=1.0, seed=3)
    given_ = (s.tokens, s.p_token, s.base, s.pair, s.last, s.gate_node, s.gate_commit, s.gate_position, s.gate_out)
    _, position, token, *_ = arrays(s, 8)
    assert accepted(*given_, position[1:2].copy(), token[1:2].copy()) == 1
