"""What one commit does to the others' confidence, observed for free: the nodes that were verified but not taken (method.md section 6).

Two nodes of a pass that differ by one commit show how every other position's sureness -log(1 - p1) moves with it. On the shipped target an
effect seen one step earlier correlates 0.97 with the one to come (docs/log.md), so a drafter that remembers effects knows the
confidences of states that no pass has evaluated. Knows nothing of order models.

Example: `effects = Effects.empty(L); effects.observe(graph, logits, state.canvas, advanced=2); effects.value[j, i]`.
"""

from dataclasses import dataclass
from typing import no_type_check

import numpy as np
import torch
from jaxtyping import Float32, Int64
from numba import njit

from spot_dlm.draft_graph import DraftGraph
from spot_dlm.interfaces import MaskedLogits
from spot_dlm.outputs import MAX_SURENESS, highest, host_array, odds_of_others

_NEVER = 1 << 30


@dataclass
class Effects:
    """For every position j: how sureness of each position i changed when `token[j]` was committed at j.

    `distance[j]` counts the commits by which the state of the observation differs from the current one (_NEVER: not observed).
    Entries of positions that had no distribution then are 0.
    """

    value: Float32[np.ndarray, "L L"]
    token: Int64[np.ndarray, " L"]
    distance: Int64[np.ndarray, " L"]

    @classmethod
    def empty(cls, length: int) -> "Effects":
        """Return the memory of a block that has just begun."""
        return cls(np.zeros((length, length), np.float32), np.full(length, -1), np.full(length, _NEVER))

    def observe(self, graph: DraftGraph, logits: MaskedLogits, canvas: Int64[np.ndarray, " L"], advanced: int) -> None:
        """Take in one pass; the observation nearest to the state that the pass arrived at wins.

        Only positions that are masked there count: no draft will ask for the others.

        Args:
            graph: the pass; complete blocks in it show nothing.
            logits: logits of all its nodes.
            canvas: the last visited state, whose logits are the last ones.
            advanced: transitions of the pass.
        """
        canvases, offsets, memory = graph.canvases, np.array(logits.offsets), (self.value, self.token)
        if logits.packed.device.type == "cpu":
            _observe_rows(host_array(logits.packed), canvases, graph.edges, canvas, advanced, offsets, *memory, self.distance)
            return
        nearest = _nearest(canvases, graph.edges, canvas, advanced, self.distance)
        if len(nearest):
            _observe(sureness_of(logits.packed), nearest, canvases, canvas, offsets, *memory)

    @property
    def known(self) -> Float32[np.ndarray, " L"]:
        """1 where the effect of committing `token[j]` at j has been seen, nearer ones closer to 1; 0 where not."""
        return self.of(self.token)[1]

    def of(self, tokens: Int64[np.ndarray, " L"]) -> tuple[Float32[np.ndarray, "L L"], Float32[np.ndarray, " L"]]:
        """Return the effect of committing `tokens` and how near the observations were, 0 where another token was seen or none."""
        value, known = np.empty_like(self.value), np.empty(len(tokens), np.float32)
        choose(self.value, self.token, self.distance, tokens, value, known)
        return value, known


def sureness_of(logits: torch.Tensor) -> Float32[np.ndarray, " M"]:
    """Return -log(1 - p1) of every row, exact where p1 rounds to 1; on the logits' device."""
    logits = logits.float()
    top = logits.max(dim=-1, keepdim=True)
    odds = (logits - top.values).clamp_(min=-80.0).exp_()
    odds.scatter_(-1, top.indices, 0.0)
    rest = odds.sum(dim=-1)
    return (torch.log1p(rest) - rest.log()).clamp_(0.0, MAX_SURENESS).cpu().numpy()


@njit(cache=True)
@no_type_check
def sureness_of_row(logits: np.ndarray) -> np.float32:
    """`sureness_of` for one row in the host's memory."""
    rest = odds_of_others(logits, highest(logits), np.float32(1))[0]
    return np.float32(min(max(np.log1p(rest) - np.log(rest), 0.0), MAX_SURENESS))


@njit(cache=True)
@no_type_check
def _nearest(canvases: np.ndarray, edges: np.ndarray, canvas: np.ndarray, advanced: int, distance: np.ndarray) -> np.ndarray:
    """Move what is known away by `advanced` transitions; return (parent, child, j) of the edges that come nearer, with their distance set.

    An edge commits position j; its distance counts the commits between its parent and `canvas`, the first of equal edges wins.
    """
    length = len(canvas)
    winner = np.full(length, -1)
    for j in range(length):
        if distance[j] < _NEVER:
            distance[j] += advanced
    for e in range(len(edges)):
        parent, child = edges[e, 0], edges[e, 1]
        j, apart, left = -1, 0, 0
        for i in range(length):
            if canvases[parent, i] != canvas[i]:
                apart += 1
            if canvases[child, i] == -1:
                left += 1
            elif canvases[parent, i] == -1:
                j = i
        if j >= 0 and left > 0 and canvas[j] == -1 and apart < distance[j]:
            distance[j], winner[j] = apart, e
    out = np.empty((np.sum(winner >= 0), 3), np.int64)
    k = 0
    for j in range(length):
        if winner[j] >= 0:
            out[k, 0], out[k, 1], out[k, 2] = edges[winner[j], 0], edges[winner[j], 1], j
            k += 1
    return out


@njit(cache=True)
@no_type_check
def _observe_rows(packed, canvases, edges, canvas, advanced, offsets, value, token, distance):
    """Take in a pass from its logits; only rows that an edge compares are read."""
    nearest = _nearest(canvases, edges, canvas, advanced, distance)
    sure = np.full(len(packed), np.float32(-1))
    for e in range(len(nearest)):
        row, other = offsets[nearest[e, 0]], offsets[nearest[e, 1]]
        for i in range(len(canvas)):
            if canvases[nearest[e, 1], i] == -1:
                for r in (row, other):
                    if canvas[i] == -1 and sure[r] < 0:
                        sure[r] = sureness_of_row(packed[r])
                other += 1
            if canvases[nearest[e, 0], i] == -1:
                row += 1
    _observe(sure, nearest, canvases, canvas, offsets, value, token)


@njit(cache=True)
@no_type_check
def _observe(sure, nearest, canvases, canvas, offsets, value, token):
    """Overwrite positions' effects by those of edges (parent, child, j), from the sureness of the rows of the pass."""
    for e in range(len(nearest)):
        parent, child, j = nearest[e]
        row, other = offsets[parent], offsets[child]
        token[j] = canvases[child, j]
        for i in range(len(canvas)):
            value[j, i] = 0.0
            if canvases[child, i] == -1:
                if canvas[i] == -1:
                    value[j, i] = sure[other] - sure[row]
                other += 1
            if canvases[parent, i] == -1:
                row += 1


@njit(cache=True)
@no_type_check
def choose(
    value: np.ndarray, token: np.ndarray, distance: np.ndarray, tokens: np.ndarray, out_value: np.ndarray, out_known: np.ndarray
) -> None:
    """Write effects and nearness where the token is the expected one, 0 elsewhere."""
    for j in range(len(token)):
        out_known[j] = 1.0 / (1.0 + 0.1 * distance[j]) if distance[j] < _NEVER and token[j] == tokens[j] else 0.0
        for i in range(len(token)):
            out_value[j, i] = value[j, i] if out_known[j] > 0 else np.float32(0)
