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
from spot_dlm.outputs import MAX_SURENESS

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

        Args:
            graph: the pass.
            logits: logits of all its nodes.
            canvas: the last visited state, whose logits are the last ones.
            advanced: transitions of the pass.
        """
        seen = self.distance < _NEVER
        self.distance[seen] += advanced
        if len(graph) > 1:
            sure = _dense(graph.canvases, sureness_of(logits.packed))
            _observe(graph.canvases, graph.edges, sure, canvas, self.value, self.token, self.distance)

    @property
    def known(self) -> Float32[np.ndarray, " L"]:
        """1 where the effect of committing `token[j]` at j has been seen, nearer ones closer to 1; 0 where not."""
        nearness = 1.0 / (1.0 + 0.1 * self.distance)
        return np.where(self.distance < _NEVER, nearness, 0.0).astype(np.float32)


def sureness_of(logits: torch.Tensor) -> Float32[np.ndarray, " M"]:
    """Return -log(1 - p1) of every row, exact where p1 rounds to 1."""
    logits = logits.float()
    top = logits.max(dim=-1, keepdim=True)
    odds = (logits - top.values).clamp_(min=-80.0).exp_()
    odds.scatter_(-1, top.indices, 0.0)
    rest = odds.sum(dim=-1)
    return (torch.log1p(rest) - rest.log()).clamp_(0.0, MAX_SURENESS).cpu().numpy()


def _dense(canvases: Int64[np.ndarray, "N L"], packed: Float32[np.ndarray, " M"]) -> Float32[np.ndarray, "N L"]:
    sure = np.zeros(canvases.shape, dtype=np.float32)
    sure[canvases == -1] = packed
    return sure


@njit(cache=True)
@no_type_check
def _observe(canvases, edges, sure, canvas, value, token, distance):
    """Overwrite each position's effect by that of the nearest edge of the pass, where it is nearer than what is known."""
    length = len(canvas)
    for e in range(len(edges)):
        parent, child = edges[e, 0], edges[e, 1]
        j, apart = -1, 0
        for i in range(length):
            if canvases[parent, i] != canvas[i]:
                apart += 1
            if canvases[parent, i] == -1 and canvases[child, i] != -1:
                j = i
        if j >= 0 and apart < distance[j]:
            distance[j] = apart
            token[j] = canvases[child, j]
            for i in range(length):
                value[j, i] = sure[child, i] - sure[parent, i] if canvases[child, i] == -1 else 0.0
