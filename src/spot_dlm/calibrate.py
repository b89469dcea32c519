"""Calibration of the draft graph (Spiffy, arXiv 2509.18085): count which stale ranks were committed next, keep the best connected graph.

From every recorded state s, whose successor s1 (the root) is known at draft time, the next k commits after s1 are written as a set of
rank pairs in the distributions of s: a formula. Knows nothing of targets and of how a graph is used.

Example: `write_graphs(path, calibrate(read_traces(folder), nodes=96))`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import Float32, Int64

from spot_dlm.lookahead import decisive_rank
from spot_dlm.rank_graph import MAX_TOKENS, GraphKey, GraphTable, Node, RankGraph, chain_order
from spot_dlm.rules import describe, parse_rule
from spot_dlm.traces import Traces
from spot_dlm.transition import UnmaskRule

DEFAULT_NODES = 96
DEFAULT_DEPTH = 16
CHUNK = 8192
"""States read at a time."""
Selection = Literal["reach", "count"]


@dataclass(frozen=True)
class Formulas:
    """Of S roots the next commits as codes (rank - 1) * 2 + (j - 1), -1 from the first on that no pair names or that ends the block."""

    codes: Int64[np.ndarray, "S K"]

    @property
    def lengths(self) -> Int64[np.ndarray, " S"]:
        """Commits of every root that have a formula."""
        return (self.codes >= 0).cumprod(axis=1).sum(axis=1)


def calibrate(
    traces: Traces,
    nodes: int = DEFAULT_NODES,
    depth: int = DEFAULT_DEPTH,
    limit_prompts: int | None = None,
    selection: Selection = "reach",
) -> GraphTable:
    """Return a graph for every setting (rule, sampled or not, block length) of the traces, two where tokens are sampled.

    Args:
        traces: recorded standard decoding.
        nodes: D, the root left out.
        depth: K, the most commits to look ahead.
        limit_prompts: count the first so many prompts only.
        selection: "reach" counts a formula only where the walk gets to it along chosen nodes, so that the sum is the number of accepted
            guesses; "count" adds up the formulas' own counts, as published.

    Raises:
        ValueError: naming the argument that is out of range, or if no state can be counted.
    """
    for name, value in (("nodes", nodes), ("depth", depth), ("limit_prompts", 1 if limit_prompts is None else limit_prompts)):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    graphs = {}
    for key, formulas in all_formulas(traces, depth, limit_prompts):
        if len(formulas.codes):
            graphs[key] = build_graph(formulas, nodes, selection)
    if not graphs:
        raise ValueError("the traces hold no state with two masked positions: nothing to calibrate")
    return GraphTable(graphs, origin(traces, depth, limit_prompts, selection))


def origin(traces: Traces, depth: int, limit_prompts: int | None, selection: Selection) -> dict[str, Any]:
    """Return what a graph file says of its traces and of the calibration."""
    about = {k: traces.manifest[k] for k in ("target", "seed", "prompts_hash") if k in traces.manifest}
    prompts = len(traces.prompts) if limit_prompts is None else min(limit_prompts, len(traces.prompts))
    return about | {"prompts": prompts, "depth": depth, "selection": selection}


def all_formulas(traces: Traces, depth: int, limit_prompts: int | None = None) -> Iterator[tuple[GraphKey, Formulas]]:
    """Yield the formulas of every setting: at temperature > 0 with coupled tokens, then with the stale best ones."""
    groups: dict[tuple[str, bool, int], list[int]] = {}
    for number, setting in enumerate(traces.settings):
        rule = describe(parse_rule(setting["rule"]))
        groups.setdefault((rule, setting["temperature"] > 0, int(setting["block_length"])), []).append(number)
    used = np.isin(traces.sequence["prompt"], np.arange(len(traces.prompts) if limit_prompts is None else limit_prompts))
    for (rule, sampled, length), numbers in groups.items():
        of_sequence = used & np.isin(traces.sequence["setting"], numbers)
        of_block = np.repeat(of_sequence, traces.sequence["blocks"])
        states = np.flatnonzero(np.repeat(of_block, traces.block["states"]))
        for coupled in (True, False) if sampled else (True,):
            key = GraphKey(rule, sampled, coupled, length)
            yield key, read_formulas(traces, states, parse_rule(rule), depth, length, sampled, coupled)


def read_formulas(
    traces: Traces, states: Int64[np.ndarray, " S"], rule: UnmaskRule, depth: int, length: int, sampled: bool, coupled: bool
) -> Formulas:
    """Return the formulas of the successors of `states`; roots with fewer than two masked positions are left out.

    Args:
        traces: what was recorded.
        states: numbers of states.
        rule: the rule they were decoded by.
        depth: commits to look ahead.
        length: block length.
        sampled: whether tokens were drawn (temperature > 0).
        coupled: rank and name tokens by the noise of later steps; without effect unless sampled.
    """
    reader = _Reader(traces, rule, depth, length, sampled, sampled and coupled)
    states = states[traces.state["rows"][states] > 2]
    parts = [reader.read(states[at : at + CHUNK]) for at in range(0, len(states), CHUNK)]
    return Formulas(np.concatenate([np.empty((0, depth), dtype=np.int64), *parts]))


class _Reader:
    """Reads the formulas of some states at a time, positions padded to the block length."""

    def __init__(self, traces: Traces, rule: UnmaskRule, depth: int, length: int, sampled: bool, coupled: bool) -> None:
        self._traces, self._rule, self._depth, self._length = traces, rule, depth, length
        self._sampled, self._coupled = sampled, coupled
        self._rows = traces.state["rows"].astype(np.int64)
        self._row_offsets, self._ahead_offsets = traces.offsets("state"), traces.offsets("ahead")
        self._block_of = np.repeat(np.arange(len(traces.block["states"])), traces.block["states"])

    def read(self, states: Int64[np.ndarray, " S"]) -> Int64[np.ndarray, "S K"]:
        """Return the codes of each state's successor."""
        traces, count, shape = self._traces, len(states), (len(states), self._length)
        own = np.repeat(np.arange(count), self._rows[states])
        row = _ranges(self._row_offsets[states], self._rows[states])
        position = traces.row["position"][row].astype(np.int64)
        in_root = position != traces.state["commit_position"][states][own]
        own, row, position = own[in_root], row[in_root], position[in_root]
        remaining = self._rows[states] - 1
        nth = _ranges(np.zeros(count, dtype=np.int64), remaining)
        row_of, nth_of = np.full(shape, -1), np.full(shape, -1)
        row_of[own, position], nth_of[own, position] = row, nth
        rank = self._ranks(states, own, position, row, nth, shape)

        codes = np.full((count, self._depth), -1, dtype=np.int64)
        known, last = np.ones(count, dtype=bool), len(self._block_of) - 1
        for k in range(1, self._depth + 1):
            later = np.minimum(states + k, last)
            known &= (k < remaining) & (later == states + k) & (self._block_of[later] == self._block_of[states])
            if self._coupled:
                known &= traces.state["ahead_depths"][states] >= k
            who = np.flatnonzero(known)
            committed = traces.state["commit_position"][later[who]].astype(np.int64)
            if self._coupled:
                entry = self._ahead_offsets[states[who]] + (k - 1) * remaining[who] + nth_of[who, committed]
                tokens = traces.ahead["tokens"][entry]
            else:
                tokens = traces.row["ids"][row_of[who, committed]]
            equal = tokens == traces.state["commit_token"][later[who]][:, None]
            known[who] = equal.any(axis=1)
            codes[who, k - 1] = np.where(known[who], rank[who, committed] * MAX_TOKENS + equal.argmax(axis=1), -1)
        return codes

    def _ranks(
        self,
        states: Int64[np.ndarray, " S"],
        own: Int64[np.ndarray, " R"],
        position: Int64[np.ndarray, " R"],
        row: Int64[np.ndarray, " R"],
        nth: Int64[np.ndarray, " R"],
        shape: tuple[int, int],
    ) -> Int64[np.ndarray, "S L"]:
        """Return the rank (from 0) of every position masked in the root."""
        traces, count = self._traces, len(states)
        by_best = self._sampled and self._rule.confidence == "probability"
        rest, masked = np.zeros(shape, dtype=np.float32), np.zeros(shape, dtype=bool)
        rest[own, position] = self._decisive(traces.row["logp"][row, 0] if by_best else traces.row["fine"][row], position)
        masked[own, position] = True
        depths = traces.state["ahead_depths"][states].astype(np.int64)
        deepest = min(self._depth, int(depths.max(initial=0))) if self._coupled else 0
        by_depth = np.zeros((count, deepest, shape[1]), dtype=np.float32)
        for d in range(deepest):
            at = depths[own] > d
            entry = self._ahead_offsets[states[own[at]]] + d * (self._rows[states[own[at]]] - 1) + nth[at]
            by_depth[own[at], d, position[at]] = self._decisive(traces.ahead["fine"][entry, 0], position[at])
        order = chain_order(by_depth, rest, masked)
        at = np.argwhere(order >= 0)
        rank = np.full(shape, -1)
        rank[at[:, 0], order[order >= 0]] = at[:, 1]
        return rank

    def _decisive(self, fine: Float32[np.ndarray, " R"], position: Int64[np.ndarray, " R"]) -> Float32[np.ndarray, " R"]:
        return decisive_rank(fine, position, self._rule)


def _ranges(starts: Int64[np.ndarray, " S"], sizes: Int64[np.ndarray, " S"]) -> Int64[np.ndarray, " R"]:
    """Return starts[0], starts[0] + 1, ..., sizes[0] of them, then those of the next."""
    ends = np.cumsum(sizes)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - (ends - sizes), sizes)


def build_graph(formulas: Formulas, nodes: int, selection: Selection = "reach") -> RankGraph:
    """Choose `nodes` formulas one by one, each with a chosen parent: the one that adds most (ties: seen first).

    Counts are not monotone (a set can be reached in several orders, each of them rarer), hence the two selections. Each choice depends on
    earlier ones only, so the graph of fewer nodes is a prefix of this one.
    """
    paths, first = _number(formulas)
    total = len(first)
    counts = np.bincount(paths[paths >= 0], minlength=total)
    reach = paths.shape[1]
    padded = np.concatenate((paths, np.full((len(paths), 1), -1)), axis=1)
    chosen = np.zeros(total + 1, dtype=bool)  # the last entry stands for -1 and is never chosen
    everyone = np.arange(len(paths))
    done = np.zeros(len(paths), dtype=np.int64)  # chosen formulas at the head of each path
    order_of: dict[int, Node] = {}
    result: list[int] = []
    while len(result) < nodes:
        blocked = padded[everyone, done]
        if selection == "reach":
            longer = np.ones(len(paths), dtype=np.int64)
            going = blocked >= 0
            for step in range(1, reach):
                going = going & chosen[padded[everyone, np.minimum(done + step, reach)]]
                if not going.any():
                    break
                longer += going
            gain = np.bincount(blocked[blocked >= 0], weights=longer[blocked >= 0], minlength=total)
        else:
            gain = np.where(np.bincount(blocked[blocked >= 0], minlength=total) > 0, counts, 0)
        if total == 0 or gain.max() <= 0:
            break
        best = int(gain.argmax())
        at = np.flatnonzero(blocked == best)
        parents, times = np.unique(np.where(done[at] > 0, padded[at, done[at] - 1], -1), return_counts=True)
        parent = int(parents[times.argmax()])
        before = order_of[parent] if parent >= 0 else ()
        pairs = _pairs(formulas.codes[first[best, 0], : first[best, 1] + 1])
        added = next(pair for pair in pairs if pair not in before)
        order_of[best] = (*before, added)
        result.append(best)
        chosen[best] = True
        while len(at):
            done[at] += 1
            at = at[chosen[padded[at, done[at]]]]
    return RankGraph(tuple(order_of[n] for n in result), tuple(int(counts[n]) for n in result), len(paths))


def _number(formulas: Formulas) -> tuple[Int64[np.ndarray, "S K"], Int64[np.ndarray, "F 2"]]:
    """Number the sets of each path's first 1, 2, ... codes in the order of their first appearance; return also where that is.

    Sets are compared by the wrapping sum of one random word per code, so the order of commits does not matter.
    """
    codes = formulas.codes
    if not codes.size or codes.max() < 0:
        return np.full_like(codes, -1), np.empty((0, 2), dtype=np.int64)
    valid = np.arange(codes.shape[1]) < formulas.lengths[:, None]
    words = np.random.default_rng(0).integers(0, 2**63, int(codes.max()) + 1, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    sums = np.cumsum(np.where(valid, words[np.maximum(codes, 0)], np.uint64(0)), axis=1, dtype=np.uint64)
    _, index, inverse = np.unique(sums[valid], return_index=True, return_inverse=True)
    rank = np.empty(len(index), dtype=np.int64)
    rank[np.argsort(index)] = np.arange(len(index))
    paths = np.full(codes.shape, -1, dtype=np.int64)
    paths[valid] = rank[inverse]
    return paths, np.argwhere(valid)[np.sort(index)]


def _pairs(codes: Int64[np.ndarray, " k"]) -> Node:
    return tuple((code // MAX_TOKENS + 1, code % MAX_TOKENS + 1) for code in codes.tolist())


NEVER = 2**31
"""More nodes than any budget."""


def accepted(formulas: Formulas, graph: RankGraph) -> Int64[np.ndarray, "S K"]:
    """Return how many first nodes of the graph each root needs to accept 1, 2, ... guesses; NEVER where it does not."""
    known = {frozenset(node): n for n, node in enumerate(graph.nodes, 1)}
    needed = np.full(formulas.codes.shape, NEVER, dtype=np.int64)
    seen: dict[tuple[int, ...], list[int]] = {}
    for row, (codes, length) in enumerate(zip(formulas.codes.tolist(), formulas.lengths.tolist(), strict=True)):
        path = tuple(codes[:length])
        if path not in seen:
            pairs = _pairs(formulas.codes[row, :length])
            seen[path] = [known.get(frozenset(pairs[:k]), NEVER) for k in range(1, length + 1)]
        needed[row, :length] = seen[path]
    return np.maximum.accumulate(needed, axis=1)


def per_pass(needed: Int64[np.ndarray, "S K"], budget: int) -> float:
    """Return the mean commits per pass of N nodes, the certain next state included, on the roots that `accepted` was given."""
    return float(1 + (needed < budget).sum(axis=1).mean())
