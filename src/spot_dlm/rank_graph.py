"""The calibrated draft graph of Spiffy (arXiv 2509.18085) as a value: which sets of stale ranks the target is likely to commit next.

A node is a set of rank pairs (i, j): the position that the rule would commit i-th by the stale distributions, with its j-th best token.
Published, both are those of the distribution itself; coupled, those that the known noise of later steps would give.
Nodes stand in the order in which calibration chose them and every prefix is connected, so the first N - 1 ARE the graph calibrated
for N - 1 nodes. A file holds one graph for every setting. Knows nothing of traces, targets and states.

Example: `read_graphs(Path("graph.json")).find("standard", sampled=False, coupled=True, block_length=16).nodes[0]` is `((1, 1),)`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, no_type_check

import numpy as np
import torch
from jaxtyping import Int64
from numba import njit
from torch import Tensor

from spot_dlm.artifacts import read_json, write_json

FORMAT = "spot-graph/1"
MAX_TOKENS = 2
"""Tokens of a position that a node may name: the best and the second best."""

Pair = tuple[int, int]
Node = tuple[Pair, ...]


@njit(cache=True)
@no_type_check
def chain_order(by_depth: np.ndarray, rest: np.ndarray, masked: np.ndarray) -> np.ndarray:
    """Return order[s, i], the position of rank i (from 0): what the rule would commit i-th if the last distributions still held; -1 beyond.

    At temperature > 0 the noise of the i-th step decides; where its look-ahead ends, and in the published form, the best tokens do.

    Args:
        by_depth: [S, D, m] what the rule orders positions by (`decisive_rank`) at D depths, highest first, ties to the lower position.
        rest: [S, m] the same for every later rank.
        masked: [S, m] positions that are ranked.
    """
    order = np.full(rest.shape, -1, dtype=np.int64)
    for s in range(rest.shape[0]):
        left = masked[s].copy()
        for i in range(rest.shape[1]):
            best = -1
            values = by_depth[s, i] if i < by_depth.shape[1] else rest[s]
            for at in range(rest.shape[1]):
                if left[at] and (best < 0 or values[at] > values[best]):
                    best = at
            if best < 0:
                break
            order[s, i] = best
            left[best] = False
    return order


@dataclass(frozen=True)
class RankGraph:
    """Nodes in the order of their choice, the root (no pair) left out, and how often each was seen from so many states.

    A node lists its pairs in the order of their commits that was seen most: pair d is committed d steps after the root, which
    decides its token where later steps draw other tokens. What identifies a node is the set, whatever the order.

    Raises:
        ValueError: if a rank is impossible, a node is named twice or its predecessor does not stand before it.
    """

    nodes: tuple[Node, ...]
    counts: tuple[int, ...]
    states: int

    def __post_init__(self) -> None:
        if len(self.counts) != len(self.nodes):
            raise ValueError(f"{len(self.nodes)} nodes but {len(self.counts)} counts")
        if not all(0 <= count <= self.states for count in self.counts):
            raise ValueError(f"counts must lie between 0 and the number of states ({self.states})")
        known: set[Node] = {()}
        sets: set[frozenset[Pair]] = {frozenset()}
        for number, node in enumerate(self.nodes):
            if any(i < 1 or not 1 <= j <= MAX_TOKENS for i, j in node):
                raise ValueError(f"node {number} {node}: ranks are (position >= 1, token 1..{MAX_TOKENS})")
            if len({i for i, _ in node}) < len(node):
                raise ValueError(f"node {number} {node} names a position twice")
            if frozenset(node) in sets:
                raise ValueError(f"node {number} {node} is the root or stands there already")
            if node[:-1] not in known:
                raise ValueError(f"node {number} {node} is not connected: {node[:-1]} must stand before it")
            known.add(node)
            sets.add(frozenset(node))

    def __len__(self) -> int:
        return len(self.nodes)

    def first(self, count: int) -> "RankGraph":
        """Return the graph of the first so many nodes."""
        return RankGraph(self.nodes[:count], self.counts[:count], self.states)

    @cached_property
    def levels(self) -> Int64[np.ndarray, " D"]:
        """Number of pairs of every node: transitions after the root."""
        return np.array([len(node) for node in self.nodes], dtype=np.int64)

    @cached_property
    def highest(self) -> Int64[np.ndarray, " D"]:
        """Highest position rank of every node."""
        return np.array([max(i for i, _ in node) for node in self.nodes], dtype=np.int64)

    @cached_property
    def edges(self) -> Int64[np.ndarray, "E 2"]:
        """(parent, child) pairs of numbers, the root being 0 and nodes[n] n + 1; the child has exactly one pair more."""
        number = {frozenset(node): n for n, node in enumerate(((), *self.nodes))}
        found = [
            (number[above], n)
            for n, node in enumerate(self.nodes, 1)
            for pair in node
            if (above := frozenset(node) - {pair}) in number
        ]  # fmt: skip
        return np.array(sorted(found), dtype=np.int64).reshape(-1, 2)


@dataclass(frozen=True)
class GraphKey:
    """The setting of a graph; `coupled` says what j counts at temperature > 0: the coupled tokens of each depth, or the stale best ones.

    Without sampling the two are the same and `coupled` is True.
    """

    rule: str
    sampled: bool
    coupled: bool
    block_length: int

    def __str__(self) -> str:
        drawn = f"T > 0 {'coupled' if self.coupled else 'published'}" if self.sampled else "T = 0"
        return f"{self.rule}, {drawn}, block length {self.block_length}"


@dataclass(frozen=True)
class GraphTable:
    """Graphs by setting; `about` is the provenance of the file."""

    graphs: dict[GraphKey, RankGraph]
    about: dict[str, Any]

    def find(self, rule: str, sampled: bool, coupled: bool, block_length: int) -> RankGraph:
        """Return the graph of a setting, or the nearest of the same rule: sampling first, then what j counts, then the block length.

        Raises:
            ValueError: if the table has no graph of this rule, naming what is there.
        """

        def distance(key: GraphKey) -> tuple[bool, bool, float]:
            length = abs(float(np.log(key.block_length / block_length)))
            return key.sampled != sampled, key.sampled and key.coupled != coupled, length

        found = [key for key in self.graphs if key.rule == rule]
        if not found:
            there = ", ".join(sorted({repr(key.rule) for key in self.graphs}))
            raise ValueError(
                f"the calibrated graph has nothing for rule {rule!r}, only for {there}; make one with 'spot calibrate' from its traces"
            )
        return self.graphs[min(found, key=distance)]


def graph_rows(table: GraphTable) -> list[dict[str, Any]]:
    """Return a table as rows of plain values."""
    return [
        {
            "rule": key.rule,
            "sampled": key.sampled,
            "coupled": key.coupled,
            "block_length": key.block_length,
            "states": graph.states,
            "nodes": graph.nodes,
            "counts": graph.counts,
        }
        for key, graph in table.graphs.items()
    ]


def write_graphs(path: Path, table: GraphTable) -> None:
    """Write a table of graphs whole or not at all."""
    write_json(path, {"format": FORMAT, **table.about, "graphs": graph_rows(table)}, indent=None)


def split_pairs(nodes: Sequence[Node]) -> tuple[Int64[Tensor, "P 2"], Int64[Tensor, " n"]]:
    """Return the pairs of all nodes one after the other, and how many each node has."""
    pairs = torch.tensor([pair for node in nodes for pair in node], dtype=torch.int64).reshape(-1, 2)
    return pairs, torch.tensor([len(node) for node in nodes], dtype=torch.int64)


def join_pairs(pairs: Tensor, lengths: Tensor) -> list[list[list[int]]]:
    """Return nodes from their pairs; what does not fit is left to the check of the rows (`table_of`)."""
    ends = lengths.cumsum(0).tolist()
    return [pairs[end - length : end].tolist() for end, length in zip(ends, lengths.tolist(), strict=True)]


def read_graphs(path: Path) -> GraphTable:
    """Read and check a table of graphs.

    Raises:
        ValueError: in one line, if the file is missing, damaged, of another format or holds an impossible graph.
    """
    document = read_json(path, FORMAT)
    return table_of(document.pop("graphs", None), document, path)


def table_of(rows: Any, about: dict[str, Any], path: Path) -> GraphTable:
    """Return checked rows as a table; `path` is named in messages.

    Raises:
        ValueError: in one line, if a row is damaged or an impossible graph.
    """
    if not isinstance(rows, list) or not rows:
        raise ValueError(f"{path}: damaged: no list of graphs")
    graphs: dict[GraphKey, RankGraph] = {}
    for number, row in enumerate(rows):
        try:
            key = GraphKey(
                _typed(row, "rule", str), _typed(row, "sampled", bool), _typed(row, "coupled", bool), _whole(row["block_length"])
            )
            if key.block_length < 1:
                raise ValueError(f"block_length={key.block_length} must be at least 1")
            if key in graphs:
                raise ValueError(f"{key}: stands there twice")
            nodes = tuple(_node(node) for node in _typed(row, "nodes", list))
            graphs[key] = RankGraph(nodes, tuple(map(_whole, _typed(row, "counts", list))), _whole(row["states"]))
        except KeyError as error:
            raise ValueError(f"{path}: damaged: graph {number} has no {error}") from error
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}: damaged: graph {number}: {error}") from error
    return GraphTable(graphs, {k: v for k, v in about.items() if k != "format"})


def _typed(row: dict[str, Any], name: str, kind: type) -> Any:
    if not isinstance(row[name], kind):
        raise ValueError(f"{name}={row[name]!r} must be of type {kind.__name__}")
    return row[name]


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise ValueError(f"{value!r} must be a whole number")
    return value


def _node(pairs: Any) -> Node:
    if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise ValueError(f"node {pairs!r} must be a list of pairs")
    return tuple((_whole(i), _whole(j)) for i, j in pairs)
