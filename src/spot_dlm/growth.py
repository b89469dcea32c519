"""Growth of the draft graph from order scores: best first by marginal reach per row, equal states merged, budget exact, compiled.

Knows nothing of where the scores come from, of noise or of targets. Two orders of one set of commits meet in one node because a node's
hash is the wrapping sum of one mixed 64-bit word per commit, whatever their order.

Example: `grow(root, scores, budget=8)` is the DraftGraph; `walk(hashes, positions, tokens)` counts what a true order would accept.
"""

from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import no_type_check

import numpy as np
from jaxtyping import Float32, Float64, Int32, Int64, UInt64
from numba import njit

from spot_dlm.draft_graph import DraftGraph
from spot_dlm.outputs import MAX_SURENESS
from spot_dlm.state import BlockState

MIN_REACH = 1e-7
"""A transition with less reach makes no new candidate (it still counts towards one that exists)."""

_LOW = -1e300
"""What a score that is not finite counts as."""


@dataclass(frozen=True)
class OrderScores:
    """What an order model says about the states below one root with m masked positions (ascending), for D depths (0: at the root).

    The score of a remaining position i at depth d, with S committed on top of the root and j the last of them, is
    base[d, i] + sum_S pair[:, i] + last[j, i] + sum_h gate_out[h] relu(gate_node[d, h] + sum_S gate_commit[:, h] + gate_position[i, h]);
    the softmax over the remaining positions, times p_token, is the probability of a transition. Depths beyond D count as D - 1.
    """

    positions: Int64[np.ndarray, " m"]
    tokens: Int64[np.ndarray, "D m 2"]
    """Best and second-best token of each position at each depth; -1: none."""
    p_token: Float32[np.ndarray, "D m 2"]
    """Probability that the target, committing that position at that depth, commits that token; clipped to 0..1, not finite is 0."""
    base: Float32[np.ndarray, "D m"]
    pair: Float32[np.ndarray, "m m"]
    last: Float32[np.ndarray, "m m"]
    gate_node: Float32[np.ndarray, "D H"]
    gate_commit: Float32[np.ndarray, "m H"]
    gate_position: Float32[np.ndarray, "m H"]
    gate_out: Float32[np.ndarray, " H"]
    moving: "Moving | None" = None


@dataclass(frozen=True)
class Moving:
    """Sureness that moves with the commits, where effects are known (`effects.py`): an additional term of the score.

    At a node with S committed the sureness of i is sure[d, i] + sum_S effect[:, i], which gives each remaining position a place in the
    rule's order; the features (sureness / 4, place / 8, whether first, 1 / (1 + place)) are weighted by dynamic[0] + k dynamic[1], k
    being the mean of `known` over the last commit before the root and S.
    """

    sure: Float32[np.ndarray, "D m"]
    effect: Float32[np.ndarray, "m m"]
    known: Float32[np.ndarray, " m"]
    known_root: float
    dynamic: Float32[np.ndarray, "2 4"]
    rounded: bool
    """Whether confidences are rounded to bfloat16 before they are compared."""


_Scores = namedtuple(
    "_Scores",
    "tokens p_token base pair last gate_node gate_commit gate_position gate_out sure effect known known_root dynamic rounded",
)
"""The arrays of OrderScores and Moving for compiled code."""

_Nodes = namedtuple("_Nodes", "candidate parent position token depth edge_start ended committed pair_sum hidden moved known")
"""Selected candidates in order of selection [N], and what their own scores need: committed, pair_sum and moved [N, m], hidden [N, H] and
known [N] (sums over the commits). Edges edge_start[n]:edge_start[n + 1] leave node n; ended nodes hold a stop token."""

_Candidates = namedtuple("_Candidates", "hash reach rows node edge table")
"""Known states [C], row 0 the root: content hash, reach, rows of a pass (2: complete), node (-1: not selected), newest edge that leads
there; table finds a hash."""

_Edges = namedtuple("_Edges", "parent child commit older probability")
"""Transitions [E] from a node to a candidate: commit is 2 * position index + choice, older the edge to the same candidate before it."""


Grown = tuple[
    Int32[np.ndarray, " N"],
    Int32[np.ndarray, " N"],
    Int64[np.ndarray, " N"],
    Int32[np.ndarray, " N"],
    Float64[np.ndarray, " N"],
    Int32[np.ndarray, "E 2"],
    UInt64[np.ndarray, " N"],
]
"""Parent, position index, token, depth, reach of each node; edges; content hash of each node."""


@njit(cache=True)
@no_type_check  # so that the type-checked test run leaves the function to numba, here and below
def _word(position: int, token: int) -> np.uint64:
    """Return the mixed 64-bit word of one commit (splitmix64 of an injective code)."""
    x = ((np.uint64(position) << np.uint64(40)) ^ np.uint64(token)) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@njit(cache=True)
@no_type_check
def _probability(p: float) -> float:
    """Clip to 0..1; what is not finite is 0."""
    return min(max(np.float64(p), 0.0), 1.0) if np.isfinite(p) else 0.0


@njit(cache=True, fastmath={"reassoc", "contract", "nsz"})
@no_type_check
def _gate(node: np.ndarray, gate_position: np.ndarray, i: int, out: np.ndarray) -> float:
    """Return the hidden layer's share of a score; NaN stays NaN."""
    total = 0.0
    for h in range(len(out)):
        x = node[h] + gate_position[i, h]
        total += out[h] * (0.0 if x <= 0.0 else x)
    return total


@njit(cache=True)
@no_type_check
def _round_bfloat16(x: float) -> float:
    """Round to nearest even; the order of numbers in 0..1 is all that is used."""
    bits = np.float32(x).view(np.uint32)
    bits = np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return np.float64(np.uint32(bits).view(np.float32))


@njit(cache=True)
@no_type_check
def _add_dynamic(scores: _Scores, nodes: _Nodes, node: int, d: int, pi: np.ndarray) -> None:
    """Add the moving term (see Moving) to the scores of the remaining positions."""
    known = (scores.known_root + nodes.known[node]) / (1.0 + nodes.depth[node])
    weight = scores.dynamic[0] + np.float32(known) * scores.dynamic[1]
    if not (weight != 0).any():
        return
    count = len(pi)
    sure, rank = np.zeros(count), np.zeros(count)
    for i in range(count):
        if not nodes.committed[node, i]:
            sure[i] = min(max(scores.sure[d, i] + nodes.moved[node, i], 0.0), MAX_SURENESS)
            rank[i] = _round_bfloat16(1.0 - np.exp(-sure[i])) if scores.rounded else sure[i]
    for i in range(count):
        if nodes.committed[node, i]:
            continue
        place = 0
        for j in range(count):
            if not nodes.committed[node, j] and (rank[j] > rank[i] or (rank[j] == rank[i] and j < i)):
                place += 1
        pi[i] += weight[0] * sure[i] / 4 + weight[1] * place / 8 + weight[3] / (1.0 + place)
        if place == 0:
            pi[i] += weight[2]


@njit(cache=True)
@no_type_check
def _conditionals(scores: _Scores, nodes: _Nodes, node: int, pi: np.ndarray, hidden: np.ndarray) -> None:
    """Write the order model's softmax over the remaining positions of `node` into `pi`, 0 elsewhere; `hidden` is scratch."""
    d = min(nodes.depth[node], len(scores.base) - 1)
    for h in range(len(hidden)):
        hidden[h] = nodes.hidden[node, h] + scores.gate_node[d, h]
    top = -np.inf
    for i in range(len(pi)):
        if not nodes.committed[node, i]:
            s = scores.base[d, i] + nodes.pair_sum[node, i] + _gate(hidden, scores.gate_position, i, scores.gate_out)
            if node > 0:
                s += scores.last[nodes.position[node], i]
            pi[i] = s
    _add_dynamic(scores, nodes, node, d, pi)
    for i in range(len(pi)):
        if not nodes.committed[node, i]:
            pi[i] = pi[i] if np.isfinite(pi[i]) else _LOW
            top = max(top, pi[i])
    total = 0.0
    for i in range(len(pi)):
        pi[i] = 0.0 if nodes.committed[node, i] else np.exp(pi[i] - top)
        total += pi[i]
    for i in range(len(pi)):
        pi[i] /= total


@njit(cache=True)
@no_type_check
def _is_stop(token: int, stops: np.ndarray) -> bool:
    """Whether a token ends the sequence."""
    found = False
    for stop in stops:
        found = found or token == stop
    return found


@njit(cache=True)
@no_type_check
def _expand(
    scores: _Scores,
    nodes: _Nodes,
    candidates: _Candidates,
    edges: _Edges,
    node: int,
    num_candidates: int,
    stops: np.ndarray,
    pi: np.ndarray,
    gain: np.ndarray,
) -> tuple[int, bool]:
    """Add the edges that leave `node`; return the number of candidates and whether a selected node gained reach (then in `gain`)."""
    depth, start = nodes.depth[node], candidates.hash[nodes.candidate[node]]
    d, num_edges, gained, rows = min(depth, len(scores.base) - 1), nodes.edge_start[node], False, 1 + (depth + 1 == len(pi))
    reach = candidates.reach[nodes.candidate[node]]
    for i in range(len(pi)):
        for choice in range(2):
            token = scores.tokens[d, i, choice]
            if nodes.committed[node, i] or token < 0 or (choice == 1 and token == scores.tokens[d, i, 0]):
                continue
            if rows == 2 and _is_stop(token, stops):
                continue
            p = _probability(scores.p_token[d, i, choice])
            if choice == 0 and token == scores.tokens[d, i, 1]:
                p += _probability(scores.p_token[d, i, 1])
            p *= pi[i]
            code = start + _word(i, token)
            at = np.int64(code & np.uint64(len(candidates.table) - 1))
            while candidates.table[at] >= 0 and candidates.hash[candidates.table[at]] != code:
                at = (at + 1) & (len(candidates.table) - 1)
            child = candidates.table[at]
            if child < 0:
                if reach * p < MIN_REACH:
                    continue
                child = num_candidates
                num_candidates += 1
                candidates.table[at], candidates.hash[child] = child, code
                candidates.reach[child], candidates.node[child], candidates.edge[child] = 0.0, -1, -1
                candidates.rows[child] = rows
            candidates.reach[child] += reach * p
            if candidates.node[child] >= 0:
                gain[candidates.node[child]] += reach * p
                gained = True
            edges.parent[num_edges], edges.child[num_edges], edges.commit[num_edges] = node, child, 2 * i + choice
            edges.probability[num_edges], edges.older[num_edges] = p, candidates.edge[child]
            candidates.edge[child] = num_edges
            num_edges += 1
    nodes.edge_start[node + 1] = num_edges
    return num_candidates, gained


@njit(cache=True)
@no_type_check
def _propagate(nodes: _Nodes, candidates: _Candidates, edges: _Edges, num_nodes: int, depth: int, gain: np.ndarray) -> None:
    """Pass the gains of nodes of `depth` and below on to their descendants, level by level; leaves `gain` zero."""
    deepest = nodes.depth[:num_nodes].max()
    for level in range(depth, deepest + 1):
        for node in range(num_nodes):
            if nodes.depth[node] == level and gain[node] > 0.0:
                for edge in range(nodes.edge_start[node], nodes.edge_start[node + 1]):
                    child, more = edges.child[edge], gain[node] * edges.probability[edge]
                    candidates.reach[child] += more
                    if candidates.node[child] >= 0:
                        gain[candidates.node[child]] += more
                gain[node] = 0.0


@njit(cache=True)
@no_type_check
def _select(scores: _Scores, nodes: _Nodes, candidates: _Candidates, edges: _Edges, node: int, best: int, stops: np.ndarray) -> None:
    """Make candidate `best` node `node`, its parent being the one that contributes most (of equal ones the first)."""
    edge, most, heaviest = candidates.edge[best], -1.0, 0
    while edge >= 0:
        share = candidates.reach[nodes.candidate[edges.parent[edge]]] * edges.probability[edge]
        if share >= most:
            most, heaviest = share, edge
        edge = edges.older[edge]
    parent, i, choice = edges.parent[heaviest], edges.commit[heaviest] >> 1, edges.commit[heaviest] & 1
    candidates.node[best], nodes.candidate[node] = node, best
    nodes.parent[node], nodes.position[node], nodes.depth[node] = parent, i, nodes.depth[parent] + 1
    nodes.token[node] = scores.tokens[min(nodes.depth[parent], len(scores.base) - 1), i, choice]
    nodes.edge_start[node + 1] = nodes.edge_start[node]
    nodes.ended[node] = nodes.ended[parent] or _is_stop(nodes.token[node], stops)
    for j in range(nodes.committed.shape[1]):
        nodes.committed[node, j] = nodes.committed[parent, j] or j == i
        nodes.pair_sum[node, j] = nodes.pair_sum[parent, j] + scores.pair[i, j]
        nodes.moved[node, j] = nodes.moved[parent, j] + scores.effect[i, j]
    nodes.known[node] = nodes.known[parent] + scores.known[i]
    for h in range(nodes.hidden.shape[1]):
        nodes.hidden[node, h] = nodes.hidden[parent, h] + scores.gate_commit[i, h]


@njit(cache=True)
@no_type_check
def grow_moving(
    tokens: Int64[np.ndarray, "D m 2"],
    p_token: Float32[np.ndarray, "D m 2"],
    base: Float32[np.ndarray, "D m"],
    pair: Float32[np.ndarray, "m m"],
    last: Float32[np.ndarray, "m m"],
    gate_node: Float32[np.ndarray, "D H"],
    gate_commit: Float32[np.ndarray, "m H"],
    gate_position: Float32[np.ndarray, "m H"],
    gate_out: Float32[np.ndarray, " H"],
    sure: Float32[np.ndarray, "D m"],
    effect: Float32[np.ndarray, "m m"],
    known: Float32[np.ndarray, " m"],
    known_root: float,
    dynamic: Float32[np.ndarray, "2 4"],
    rounded: bool,
    budget: int,
    crosses: bool = False,
    stops: Int64[np.ndarray, " S"] | None = None,
) -> Grown:
    """Grow as `grow_arrays` does, with sureness that moves (see Moving)."""
    ending = np.empty(0, np.int64) if stops is None else stops
    scores = _Scores(
        tokens,
        p_token,
        base,
        pair,
        last,
        gate_node,
        gate_commit,
        gate_position,
        gate_out,
        sure,
        effect,
        known,
        known_root,
        dynamic,
        rounded,
    )
    m, num_hidden = base.shape[1], len(gate_out)
    possible, level = 1, 1
    for k in range(m if crosses else m - 1):
        if possible < budget:
            level *= 2 * (m - k)
            possible += level
    size = max(1, min(budget, possible))
    most, capacity = 2 * m * size + 1, 4
    while capacity < 2 * most:
        capacity *= 2
    parent, position, token = np.full(size, -1, np.int32), np.full(size, -1, np.int32), np.full(size, -1, np.int64)
    ended, committed = np.zeros(size, np.bool_), np.zeros((size, m), np.bool_)
    sums = ended, committed, np.zeros((size, m)), np.zeros((size, num_hidden)), np.zeros((size, m)), np.zeros(size)
    nodes = _Nodes(np.zeros(size, np.int32), parent, position, token, np.zeros(size, np.int32), np.zeros(size + 1, np.int64), *sums)
    kept, table = (np.ones(most, np.int8), np.empty(most, np.int32), np.empty(most, np.int32)), np.full(capacity, -1, np.int32)
    candidates = _Candidates(np.empty(most, np.uint64), np.empty(most), *kept, table)
    edges = _Edges(np.empty(most, np.int32), np.empty(most, np.int32), np.empty(most, np.int32), np.empty(most, np.int32), np.empty(most))
    pi, hidden, gain = np.empty(m), np.empty(num_hidden), np.zeros(size)
    candidates.hash[0], candidates.reach[0], candidates.node[0], candidates.edge[0] = np.uint64(0), 1.0, 0, -1
    num_nodes, num_candidates, left = 1, 1, budget - 1
    while True:
        node = num_nodes - 1
        depth = nodes.depth[node]
        followed = depth + 1 < m or (crosses and depth + 1 == m and not nodes.ended[node])
        if followed and ((num_nodes < size and left > 0) or (nodes.depth[:num_nodes] == depth + 1).any()):  # the last adds edges only
            _conditionals(scores, nodes, node, pi, hidden)
            num_candidates, gained = _expand(scores, nodes, candidates, edges, node, num_candidates, ending, pi, gain)
            if gained:
                _propagate(nodes, candidates, edges, num_nodes, depth + 1, gain)
        best, highest = -1, 0.0
        for candidate in range(1, num_candidates):
            if candidates.reach[candidate] > highest and candidates.node[candidate] < 0:
                rows = candidates.rows[candidate]
                if rows <= left and candidates.reach[candidate] / rows > highest:
                    best, highest = candidate, candidates.reach[candidate] / rows
        if num_nodes == size or best < 0:
            break
        _select(scores, nodes, candidates, edges, num_nodes, best, ending)
        num_nodes += 1
        left -= candidates.rows[best]
    n, chosen = num_nodes, nodes.candidate[:num_nodes]
    child = candidates.node[edges.child[: nodes.edge_start[n]]]
    joins = np.stack((edges.parent[: len(child)][child >= 0], child[child >= 0]), axis=1)
    return parent[:n], position[:n], token[:n], nodes.depth[:n], candidates.reach[chosen], joins, candidates.hash[chosen]


@njit(cache=True)
@no_type_check
def grow_arrays(
    tokens: Int64[np.ndarray, "D m 2"],
    p_token: Float32[np.ndarray, "D m 2"],
    base: Float32[np.ndarray, "D m"],
    pair: Float32[np.ndarray, "m m"],
    last: Float32[np.ndarray, "m m"],
    gate_node: Float32[np.ndarray, "D H"],
    gate_commit: Float32[np.ndarray, "m H"],
    gate_position: Float32[np.ndarray, "m H"],
    gate_out: Float32[np.ndarray, " H"],
    budget: int,
    crosses: bool = False,
    stops: Int64[np.ndarray, " S"] | None = None,
) -> Grown:
    """Grow a graph of at most `budget` nodes; return parent, position index, token, depth, reach, edges and content hash.

    Nodes are in order of selection, the root first with parent, position index and token -1. `parent` is the one that contributed
    most when the node was selected. Edges are all transitions between nodes, but for those below MIN_REACH that came before any
    other to the same child.

    Where guesses may cross the block's end, a complete block is a node too: it takes two of the budget, so it is selected by half its
    reach, and never holds a token of `stops`.
    """
    m = base.shape[1]
    still, weights = np.zeros((len(base), m), np.float32), np.zeros((2, 4), np.float32)
    none = np.zeros((m, m), np.float32)
    return grow_moving(
        tokens,
        p_token,
        base,
        pair,
        last,
        gate_node,
        gate_commit,
        gate_position,
        gate_out,
        still,
        none,
        none[0],
        0.0,
        weights,
        False,
        budget,
        crosses,
        stops,
    )


@njit(cache=True)
@no_type_check
def path_codes(positions: Int32[np.ndarray, " K"], tokens: Int64[np.ndarray, " K"]) -> UInt64[np.ndarray, " K+1"]:
    """Return the content hash of every state along a path of commits, the root's first."""
    codes = np.zeros(len(positions) + 1, np.uint64)
    for k in range(len(positions)):
        codes[k + 1] = codes[k] + _word(positions[k], tokens[k])
    return codes


@njit(cache=True)
@no_type_check
def walk(hashes: UInt64[np.ndarray, " N"], true_positions: Int32[np.ndarray, " K"], true_tokens: Int64[np.ndarray, " K"]) -> int:
    """Return how many of the true next commits, in order, are nodes of the grown graph, up to the first that is not.

    The commit that completes the block counts where the graph may hold complete blocks.
    """
    codes = path_codes(true_positions, true_tokens)
    for k in range(len(true_positions)):
        found = False
        for node in range(1, len(hashes)):
            found = found or hashes[node] == codes[k + 1]
        if not found:
            return k
    return len(true_positions)


@njit(cache=True)
@no_type_check
def _canvases(canvas: np.ndarray, positions: np.ndarray, parent: np.ndarray, position: np.ndarray, token: np.ndarray) -> np.ndarray:
    """Return the canvas of every node: its parent's with one more commit."""
    out = np.empty((len(parent), len(canvas)), np.int64)
    out[0] = canvas
    for node in range(1, len(parent)):
        out[node] = out[parent[node]]
        out[node, positions[position[node]]] = token[node]
    return out


def is_compiled() -> bool:
    """Whether this machine holds compiled code of an earlier run, so that the first draft need not wait for the compiler."""
    cache = getattr(grow_moving, "_cache", None)
    return cache is not None and any(Path(cache.cache_path).glob("growth.grow_moving-*.nbi"))


def grow(root: BlockState, scores: OrderScores, budget: int, crosses: bool = False, stop_ids: frozenset[int] = frozenset()) -> DraftGraph:
    """Return the graph of at most `budget` likeliest states below `root`, the root included; see `grow_arrays`.

    Args:
        root: the certain next state.
        scores: what is likely below it.
        budget: rows of a pass.
        crosses: whether complete blocks are guesses too, of two rows each.
        stop_ids: tokens that end the sequence: no complete block holds one among the tokens committed below the root.
    """
    s, stops = scores, np.array(sorted(stop_ids), dtype=np.int64)
    arrays = (s.tokens, s.p_token, s.base, s.pair, s.last, s.gate_node, s.gate_commit, s.gate_position, s.gate_out)
    if s.moving is None:
        grown = grow_arrays(*arrays, budget, crosses, stops)
    else:
        v = s.moving
        grown = grow_moving(*arrays, v.sure, v.effect, v.known, v.known_root, v.dynamic, v.rounded, budget, crosses, stops)
    parent, position, token, depth, reach, edges, _ = grown
    canvases = _canvases(root.canvas, s.positions, parent, position, token)
    return DraftGraph(root.block, canvases, depth.astype(np.int64) + root.step, reach, edges.astype(np.int64))
