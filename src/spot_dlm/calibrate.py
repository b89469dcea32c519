"""Calibration of the draft graph (Spiffy, arXiv 2509.18085): count which stale ranks were committed next, keep the best connected graph.

From every recorded state s, whose successor s1 (the root) is known at draft time, the next k commits after s1 are written as a set of
rank pairs in the distributions of s: a formula. Knows nothing of targets and of how a graph is used.

Example: `write_graphs(path, calibrate(read_traces(folder), nodes=96))`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from jaxtyping import Bool, Int64

from spot_dlm.lookahead import rule_order
from spot_dlm.rank_graph import MAX_TOKENS, GraphKey, GraphTable, Node, RankGraph
from spot_dlm.rules import describe, parse_rule
from spot_dlm.traces import Traces
from spot_dlm.transition import UnmaskRule

DEFAULT_NODES = 96
DEFAULT_DEPTH = 16
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
    copied = {k: traces.manifest[k] for k in ("target", "seed", "prompts_hash") if k in traces.manifest}
    prompts = len(traces.prompts) if limit_prompts is None else min(limit_prompts, len(traces.prompts))
    return GraphTable(graphs, copied | {"prompts": prompts, "depth": depth, "selection": selection})


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
            yield key, read_formulas(traces, states, parse_rule(rule), depth, length, sampled and coupled, sampled)


def read_formulas(
    traces: Traces, states: Int64[np.ndarray, " S"], rule: UnmaskRule, depth: int, length: int, coupled: bool, sampled: bool
) -> Formulas:
    """Return the formulas of the successors of `states`; roots with fewer than two masked positions are left out."""
    states = states[traces.state["rows"][states] > 2]
    row_offsets, rows = traces.offsets("state"), traces.state["rows"].astype(np.int64)
    block_of = np.repeat(np.arange(len(traces.block["states"])), traces.block["states"])
    count = len(states)
    own = np.repeat(np.arange(count), rows[states])
    at = _ranges(row_offsets[states], rows[states])
    position = traces.row["position"][at].astype(np.int64)
    in_root = position != traces.state["commit_position"][states][own]
    own, at, position = own[in_root], at[in_root], position[in_root]
    nth = _ranges(np.zeros(count, dtype=np.int64), rows[states] - 1)

    ahead_offsets = traces.offsets("ahead")[states]
    if coupled:
        fine_of_row = traces.ahead["fine"][ahead_offsets[own] + nth, 0]
    elif sampled and rule.confidence == "probability":
        fine_of_row = traces.row["logp"][at, 0]
    else:
        fine_of_row = traces.row["fine"][at]
    fine = np.full((count, length), -np.inf, dtype=np.float32)
    fine[own, position] = fine_of_row
    rank = ranks(fine, np.isfinite(fine), rule)
    number = np.full((count, length), -1, dtype=np.int64)
    number[own, position] = nth
    row_of = np.full((count, length), -1, dtype=np.int64)
    row_of[own, position] = at

    remaining = rows[states] - 1
    codes = np.full((count, depth), -1, dtype=np.int64)
    known = np.ones(count, dtype=bool)
    last = len(block_of) - 1
    everyone = np.arange(count)
    for k in range(1, depth + 1):
        later = np.minimum(states + k, last)
        known &= (k < remaining) & (states + k <= last) & (block_of[later] == block_of[states])
        if coupled:
            known &= traces.state["ahead_depths"][states] >= k
        who = everyone[known]
        committed = traces.state["commit_position"][later[who]].astype(np.int64)
        if coupled:
            entry = ahead_offsets[who] + (k - 1) * remaining[who] + number[who, committed]
            tokens = traces.ahead["tokens"][entry]
        else:
            tokens = traces.row["ids"][row_of[who, committed]]
        equal = tokens == traces.state["commit_token"][later[who]][:, None]
        code = rank[who, committed] * MAX_TOKENS + equal.argmax(axis=1)
        codes[who, k - 1] = np.where(equal.any(axis=1), code, -1)
        known[who] = equal.any(axis=1)
    return Formulas(codes)


def ranks(fine: np.ndarray, masked: Bool[np.ndarray, "S L"], rule: UnmaskRule) -> Int64[np.ndarray, "S L"]:
    """Return each masked position's place (0 = first) among its row's masked positions in the order the rule would commit in."""
    size = fine.shape[1]
    places = rule_order(fine, np.arange(size), rule) + np.where(masked, 0, size)
    order = np.argsort(places, axis=1, kind="stable")
    found = np.empty_like(order)
    np.put_along_axis(found, order, np.broadcast_to(np.arange(size), order.shape), axis=1)
    return found


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


def accepted(formulas: Formulas, graph: RankGraph) -> Int64[np.ndarray, " S"]:
    """Return how many guesses of `graph` the walk from each root accepts: what an offline evaluation of a graph adds up."""
    known = {frozenset(node) for node in graph.nodes}
    lengths = formulas.lengths
    found = np.zeros(len(lengths), dtype=np.int64)
    for number, (row, length) in enumerate(zip(formulas.codes, lengths.tolist(), strict=True)):
        pairs = _pairs(row[:length])
        while found[number] < length and frozenset(pairs[: found[number] + 1]) in known:
            found[number] += 1
    return found


def draw(table: GraphTable, path: Path, nodes: int = 31) -> None:
    """Draw the first nodes of every graph by level, shaded by the share of states from which they were seen."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    count = len(table.graphs)
    columns = min(count, 2)
    figure, axes = pyplot.subplots(-(-count // columns), columns, figsize=(9 * columns, 4 * -(-count // columns)), squeeze=False)
    for axis in axes.flat[count:]:
        axis.set_axis_off()
    for axis, (key, whole) in zip(axes.flat, table.graphs.items(), strict=False):
        graph = whole.first(nodes)
        levels = np.concatenate(([0], graph.levels))
        width = np.bincount(levels)
        across = np.zeros(len(levels))
        for level in range(len(width)):
            across[levels == level] = (np.arange(width[level]) + 0.5) / width[level]
        share = np.concatenate(([1.0], np.array(graph.counts) / max(graph.states, 1)))
        for parent, child in graph.edges.tolist():
            axis.plot(levels[[parent, child]], across[[parent, child]], color="0.8", linewidth=0.7, zorder=1)
        axis.scatter(levels, across, c=share, cmap="viridis", vmin=0, vmax=1, s=60, zorder=2)
        for number, node in enumerate(graph.nodes, 1):
            axis.annotate(
                f"{_label(node)}\n{share[number]:.0%}", (levels[number], across[number]), fontsize=5, ha="center", va="center", zorder=3
            )
        axis.set(title=str(key), xlabel="commits after the certain next state", yticks=[])
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=110)
    except ValueError as error:
        raise ValueError(f"{path}: cannot be drawn ({error})") from error
    finally:
        pyplot.close(figure)


def _label(node: Sequence[tuple[int, int]]) -> str:
    return ",".join(f"{i}{'b' * (j - 1)}" for i, j in sorted(node))
