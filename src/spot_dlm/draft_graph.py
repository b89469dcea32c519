"""The draft graph: guessed future block states as flat arrays, merged where two orders reach the same state.

Row 0 is the certain next state (the root); every other row is a guess with at least one parent. Reach is the drafter's estimate that
the walk arrives at a node (method.md section 5). Knows nothing of targets, rules or how guesses are made.

Example: `builder = GraphBuilder(root, budget=4); builder.add(0, child_state, reach=0.7); graph = builder.build()`.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Float64, Int64

from spot_dlm.state import MASKED, BlockState


@dataclass(frozen=True)
class DraftGraph:
    """Nodes as arrays: canvas, step, reach probability and depth of each node, and the (parent, child) edges."""

    block: int
    canvases: Int64[np.ndarray, "N L"]
    steps: Int64[np.ndarray, " N"]
    reach: Float64[np.ndarray, " N"]
    depths: Int64[np.ndarray, " N"]
    edges: Int64[np.ndarray, "E 2"]

    def __len__(self) -> int:
        return len(self.canvases)

    @classmethod
    def root_only(cls, root: BlockState) -> "DraftGraph":
        """Return the graph without a guess: standard decoding."""
        return GraphBuilder(root, 1).build()

    @cached_property
    def index(self) -> dict[tuple[int, int, bytes], int]:
        """Node of every state key; of duplicated nodes the first."""
        found: dict[tuple[int, int, bytes], int] = {}
        for node, (step, canvas) in enumerate(zip(self.steps.tolist(), self.canvases, strict=True)):
            found.setdefault((self.block, step, canvas.tobytes()), node)
        return found

    def find(self, state: BlockState) -> int | None:
        """Return the node that is exactly `state`, or None."""
        return self.index.get(state.key)

    def validate(self, root: BlockState, budget: int, vocab_size: int) -> None:
        """Check a drafter's graph before the target sees it; wrong guesses are fine, malformed graphs are not.

        Raises:
            ValueError: naming what is malformed.
        """
        count, length = len(self.canvases), len(root.canvas)
        if self.canvases.ndim != 2 or self.canvases.shape[1] != length or self.canvases.dtype != np.int64:
            raise ValueError(f"draft graph: canvases must be int64 of shape [N, {length}], got {self.canvases.dtype} {self.canvases.shape}")
        if not 1 <= count <= budget:
            raise ValueError(f"draft graph: {count} nodes, the budget allows 1 to {budget} (the certain next state included)")
        for name, dtype in (("steps", np.int64), ("reach", np.float64), ("depths", np.int64)):
            array = getattr(self, name)
            if array.shape != (count,) or array.dtype != dtype:
                raise ValueError(f"draft graph: {name} must be {np.dtype(dtype)} of shape [{count}], got {array.dtype} {array.shape}")
        if self.depths[0] != 0 or (count > 1 and not 1 <= self.depths[1:].min() <= self.depths[1:].max() < count):
            raise ValueError(f"draft graph: depths must be 0 for node 0 and 1..{max(count - 1, 1)} for guesses")
        if self.block != root.block or int(self.steps[0]) != root.step or not np.array_equal(self.canvases[0], root.canvas):
            raise ValueError("draft graph: node 0 must be the certain next state")
        if self.canvases.min() < MASKED or self.canvases.max() >= vocab_size:
            raise ValueError(f"draft graph: token ids must lie in 0..{vocab_size - 1} (or {MASKED} for masked)")
        if (self.canvases != MASKED).all(axis=1).any():
            raise ValueError("draft graph: a complete block takes no node, its logits are not needed")
        if (
            self.edges.ndim != 2
            or self.edges.shape[1] != 2
            or (len(self.edges) and not (0 <= self.edges.min() <= self.edges.max() < count))
        ):
            raise ValueError(f"draft graph: edges must be pairs of node numbers in 0..{count - 1}")


class GraphBuilder:
    """Collects nodes up to a budget and merges equal states, adding their reach."""

    def __init__(self, root: BlockState, budget: int) -> None:
        self.budget = budget
        self.states = [root]
        self.reach = [1.0]
        self.depths = [0]
        self._edges: list[tuple[int, int]] = []
        self._index = {root.key: 0}

    @property
    def is_full(self) -> bool:
        """Whether the budget is spent."""
        return len(self.states) >= self.budget

    def add(self, parent: int, state: BlockState, reach: float) -> int | None:
        """Add a guess below `parent`; return its node, an existing one if the state is known, None if there is no room.

        A complete block is never added: its logits are not needed.
        """
        node = self._index.get(state.key)
        if node is None:
            if self.is_full or state.is_complete:
                return None
            node = len(self.states)
            self._index[state.key] = node
            self.states.append(state)
            self.reach.append(reach)
            self.depths.append(self.depths[parent] + 1)
        else:
            self.reach[node] += reach
        self._edges.append((parent, node))
        return node

    def build(self) -> DraftGraph:
        """Return the finished graph."""
        return DraftGraph(
            self.states[0].block,
            np.stack([s.canvas for s in self.states]),
            np.array([s.step for s in self.states], dtype=np.int64),
            np.array(self.reach, dtype=np.float64),
            np.array(self.depths, dtype=np.int64),
            np.array(self._edges, dtype=np.int64).reshape(-1, 2),
        )
