"""The calibrated graph (Spiffy, arXiv 2509.18085) at run time: chosen sets of stale ranks, filled with stale tokens.

Positions are ranked among the root's masked ones in the rule's own order, by the confidences of the last pass. At temperature > 0 the
published form ranks and names the stale best tokens; the coupled one names what the noise of each depth will draw, and its rank i is what
that noise would commit i-th, the order of the coupled chain (measured: as good or better at every budget than ranking by the best tokens
or by the noise of the first depth alone). Knows nothing of how a graph is calibrated.

Example: `Calibrated(read_graphs(Path("graph.json"))).draft(context, budget=8)`.
"""

from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np
import torch
from jaxtyping import Bool, Float32, Float64, Int64

from spot_dlm.draft_graph import DraftGraph
from spot_dlm.interfaces import DraftContext
from spot_dlm.lookahead import decisive_rank, look_ahead
from spot_dlm.outputs import read_outputs
from spot_dlm.rank_graph import GraphTable, RankGraph, chain_order
from spot_dlm.rules import describe
from spot_dlm.state import MASKED
from spot_dlm.transition import UnmaskRule

NUM_DRAWN = 128
"""Tokens of a position among which the coupled one is sought; with the 16 of a trace, unsure positions cost 2 to 5 % of the passes."""
POOL = 10 / 3
"""Nodes that pruning chooses from, for each that it keeps; 10 and 3 in the paper."""


def fitting(graph: RankGraph, masked: int, crosses: bool = False) -> Int64[np.ndarray, " n"]:
    """Return the nodes that fit a root with so many masked positions: no higher rank, and the complete block only where guesses cross."""
    return np.flatnonzero((graph.highest <= masked) & (graph.levels < masked + crosses))


@dataclass(frozen=True)
class Plan:
    """The nodes of a graph that fit a root: their numbers in the graph and one entry for every pair of every node.

    `levels` and `share` are those of the nodes, `edges` as in RankGraph with the plan's own numbers, `rows` what a node takes of a budget.
    """

    depths: int
    levels: Int64[np.ndarray, " n"]
    share: Float64[np.ndarray, " n"]
    rows: Int64[np.ndarray, " n"]
    edges: Int64[np.ndarray, "E 2"]
    node: Int64[np.ndarray, " P"]
    rank: Int64[np.ndarray, " P"]
    token: Int64[np.ndarray, " P"]
    depth: Int64[np.ndarray, " P"]
    starts: Int64[np.ndarray, " n"]

    @classmethod
    def of(cls, graph: RankGraph, masked: int, count: int, crosses: bool = False) -> "Plan":
        """Return the plan for a root with so many masked positions.

        Nodes after the first `count` stay as substitutes for nodes without a token, as far as they look no further ahead.
        """
        fit = fitting(graph, masked, crosses)
        depths = int(graph.levels[fit[:count]].max()) if len(fit) and count else 0
        fit = fit[graph.levels[fit] <= depths] if depths else fit[:0]
        number = np.full(len(graph) + 1, -1, dtype=np.int64)
        number[0] = 0
        number[fit + 1] = np.arange(1, len(fit) + 1)
        edges = number[graph.edges]
        edges = edges[(edges >= 0).all(axis=1)]
        levels = graph.levels[fit]
        entries = [(n, i - 1, j - 1, d) for n, at in enumerate(fit.tolist()) for d, (i, j) in enumerate(graph.nodes[at])]
        node, rank, token, depth = np.array(entries, dtype=np.int64).reshape(-1, 4).T
        share = np.array([graph.counts[n] for n in fit], dtype=np.float64) / max(graph.states, 1)
        starts = np.cumsum(levels) - levels
        complete = levels == masked
        share[complete] = _arriving(share, edges, complete)
        return cls(depths, levels, share, 1 + complete, edges, node, rank, token, depth, starts)

    def __len__(self) -> int:
        return len(self.levels)


def _arriving(
    share: Float64[np.ndarray, " n"], edges: Int64[np.ndarray, "E 2"], complete: Bool[np.ndarray, " n"]
) -> Float64[np.ndarray, " k"]:
    """Return the share of states that come to each complete block: counts are those of larger roots, where the last commit was not sure.

    Whatever comes to a parent goes on to the complete blocks below it, to each by its own share.
    """
    own, below = np.concatenate(([1.0], share)), np.concatenate(([False], complete))
    last = edges[below[edges[:, 1]]]
    total, found = np.zeros(len(own)), np.zeros(len(own))
    np.add.at(total, last[:, 0], own[last[:, 1]])
    np.add.at(found, last[:, 1], own[last[:, 0]] * own[last[:, 1]] / np.maximum(total[last[:, 0]], 1e-9))
    return np.clip(found, own, 1)[1:][complete]


def within(nodes: Int64[np.ndarray, " k"], rows: Int64[np.ndarray, " n"], budget: int) -> Int64[np.ndarray, " j"]:
    """Return the first nodes whose rows fit a budget; a single row that is left goes to the next node of one row."""
    spent = np.cumsum(rows[nodes])
    count = int(np.searchsorted(spent, budget, side="right"))
    left = budget - (int(spent[count - 1]) if count else 0)
    return np.concatenate((nodes[:count], nodes[count:][rows[nodes[count:]] <= left][:left]))


@dataclass(frozen=True)
class Calibrated:
    """A graph of rank sets, instantiated on stale tokens.

    Args:
        graphs: a graph for every setting; the nearest of the same rule is taken.
        pruned: keep the best N - 1 of a larger graph by the stale probabilities, instead of the graph of exactly N - 1 nodes.
        coupled: tokens with the noise of their depth; False is the published form. Equal at temperature 0.
    """

    graphs: GraphTable
    pruned: bool = False
    coupled: bool = True
    _plans: dict[tuple[str, bool, int, int, int, bool], Plan] = field(default_factory=dict, repr=False, compare=False)

    @property
    def name(self) -> str:
        """Name on the command line."""
        return "calibrated" + ("" if self.coupled else "-published") + ("-pruned" if self.pruned else "")

    def draft(self, context: DraftContext, budget: int) -> DraftGraph:
        """Fill the graph's nodes with stale tokens.

        Raises:
            ValueError: if the file holds no graph of the rule.
        """
        root = context.root
        plan = self._plan(context, budget)
        if not len(plan):
            return DraftGraph.root_only(root)
        tokens, logp, positions = self._stale(context, plan)
        shown = np.minimum(plan.depth, len(tokens) - 1)
        filled = tokens[shown, plan.rank, plan.token]
        usable = np.logical_and.reduceat(filled >= 0, plan.starts)
        if context.crosses:
            ends = np.isin(filled, np.array(sorted(context.stop_ids), dtype=np.int64))
            usable &= (plan.rows == 1) | ~np.logical_or.reduceat(ends, plan.starts)
        if self.pruned:
            local = np.add.reduceat(logp[shown, plan.rank, plan.token], plan.starts) / plan.levels
            chosen = best_connected(plan, local, usable, budget - 1)
        else:
            chosen = within(np.flatnonzero(usable), plan.rows, budget - 1)
        canvases = np.tile(root.canvas, (len(plan) + 1, 1))
        canvases[plan.node + 1, positions[plan.rank]] = filled
        number = np.full(len(plan) + 1, -1, dtype=np.int64)
        kept = np.concatenate(([0], chosen + 1))
        number[kept] = np.arange(len(kept))
        canvases = canvases[kept]
        edges = number[plan.edges]
        edges = edges[(edges >= 0).all(axis=1)]
        if len(tokens) > 1:  # tokens differ by depth, so a set may contradict a smaller one
            above = canvases[edges[:, 0]]
            edges = edges[((above == MASKED) | (above == canvases[edges[:, 1]])).all(axis=1)]
        steps = root.step + np.concatenate(([0], plan.levels[chosen]))
        reach = np.concatenate(([1.0], plan.share[chosen]))
        return DraftGraph(root.block, canvases, steps, reach, edges)

    def _plan(self, context: DraftContext, budget: int) -> Plan:
        rule, sampled = describe(context.rule), context.sampling.temperature > 0
        masked, length = len(context.root.masked), len(context.root.canvas)
        crosses = context.crosses
        key = (rule, sampled, length, masked, budget, crosses)
        if key not in self._plans:
            graph = self.graphs.find(rule, sampled, self.coupled or not sampled, length)
            count = budget - 1
            if self.pruned:
                pool = fitting(graph, masked, crosses)[: round(count * POOL)]
                graph = RankGraph(tuple(graph.nodes[n] for n in pool), tuple(graph.counts[n] for n in pool), graph.states)
                count = len(pool)
            self._plans[key] = Plan.of(graph, masked, count, crosses)
        return self._plans[key]

    def _stale(
        self, context: DraftContext, plan: Plan
    ) -> tuple[Int64[np.ndarray, "d m 2"], Float64[np.ndarray, "d m 2"], Int64[np.ndarray, " m"]]:
        """Return tokens (-1: none) and their log-probabilities by depth, rank and j, and the position of every rank."""
        root, rule = context.root, context.rule
        at = np.searchsorted(context.last.before.masked, root.masked)
        drawn = context.last.candidates.fine[at]
        sampled = context.sampling.temperature > 0
        if not sampled and not self.pruned and not plan.token.any():  # best tokens only: nothing to read
            order = _order(None, drawn, root.masked, rule)
            best = context.last.candidates.tokens[at][order]
            tokens = np.stack((best, np.full_like(best, -1)), axis=-1)[None]
            return tokens, np.zeros(tokens.shape), root.masked[order]
        rows, by_token = torch.from_numpy(at).to(context.logits.device), rule.confidence == "probability"
        coupled = sampled and self.coupled
        outputs = read_outputs(root.masked, context.logits[rows], context.sampling if coupled else None, NUM_DRAWN if coupled else 2)
        two = np.minimum([0, 1], outputs.ids.shape[1] - 1)
        rest = outputs.logp[:, 0] if sampled and by_token else drawn
        if not coupled:
            order = _order(None, rest, root.masked, rule)
            tokens, logp = outputs.ids[:, two], outputs.logp[:, two]
            tokens[:, 1] = np.where(two[1] == 0, -1, tokens[:, 1])  # a vocabulary of one token
            return tokens[None, order], logp[None, order].astype(np.float64), root.masked[order]
        ahead = look_ahead(outputs, root, rule, context.sampling, context.noise, plan.depths, drawn)
        order = _order(ahead.fine[..., 0], rest, root.masked, rule)
        logp = ahead.fine if by_token else np.broadcast_to(outputs.logp[None, :, two], ahead.fine.shape)
        return ahead.tokens[:, order], np.minimum(logp[:, order], 0).astype(np.float64), root.masked[order]


def _order(
    by_depth: Float32[np.ndarray, "d m"] | None, rest: Float32[np.ndarray, " m"], positions: Int64[np.ndarray, " m"], rule: UnmaskRule
) -> Int64[np.ndarray, " m"]:
    """Return indices of positions by rank, from unrounded ranking values of each depth's tokens, then of the best tokens."""
    values = rest[None] if by_depth is None else np.concatenate((by_depth, rest[None]))
    ranks = decisive_rank(values, np.broadcast_to(positions, values.shape), rule)
    return chain_order(ranks[None, :-1], ranks[-1:], np.ones((1, len(positions)), dtype=np.bool_))[0]


def best_connected(plan: Plan, local: Float64[np.ndarray, " n"], usable: Bool[np.ndarray, " n"], budget: int) -> Int64[np.ndarray, " k"]:
    """Return nodes of at most `budget` rows, the best ones that each have a chosen parent, by the paper's score.

    A node's score is the geometric mean of its local score (log-probability `local`) and its children's scores, from the last level up.
    """
    parent, child = plan.edges[:, 0], plan.edges[:, 1]
    total, parts = np.concatenate(([0.0], local)), np.ones(len(local) + 1)
    score = total.copy()
    alive = np.concatenate(([True], usable))
    both = alive[parent] & alive[child]
    parent, child = parent[both], child[both]
    level = plan.levels[child - 1]
    for depth in range(plan.depths, 1, -1):
        at = level == depth
        score[child[at]] = total[child[at]] / parts[child[at]]
        np.add.at(total, parent[at], score[child[at]])
        np.add.at(parts, parent[at], 1)
    score = total / parts
    below: dict[int, list[int]] = {}
    for above, node in zip(parent.tolist(), child.tolist(), strict=True):
        below.setdefault(above, []).append(node)
    heap: list[tuple[float, int]] = []
    seen = {0}
    chosen: list[int] = []
    node, values = 0, score.tolist()
    while True:
        for found in below.get(node, ()):
            if found not in seen:
                seen.add(found)
                heappush(heap, (-values[found], found))
        if not heap or not budget:
            break
        node = heappop(heap)[1]
        if plan.rows[node - 1] <= budget:  # a complete block, which nothing follows, may not fit
            chosen.append(node - 1)
            budget -= int(plan.rows[node - 1])
    return np.sort(np.array(chosen, dtype=np.int64))
