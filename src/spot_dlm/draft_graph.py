"""The draft graph: guessed future block states as flat arrays, merged where two orders reach the same state.

Row 0 is the certain next state (the root); every other row is a guess with at least one parent. Reach is the drafter's estimate that
the walk arrives at a node (method.md section 5). Knows nothing of targets, rules or how guesses are made.

Example: `builder = GraphBuilder(root, budget=4); builder.add(0, child_state, 0.7); graph = builder.build()`.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Bool, Float64, Int64

from spot_dlm.state import MASKED, BlockState


@dataclass(frozen=True)
class DraftGraph:
    """Nodes as arrays: canvas, step and reach probability of each node, and the (parent, child) edges, one step apart."""

    block: int
    canvases: Int64[np.ndarray, "N L"]
    steps: Int64[np.ndarray, " N"]
    reach: Float64[np.ndarray, " N"]
    edges: Int64[np.ndarray, "E 2"]

    def __len__(self) -> int:
        return len(self.canvases)

    @classmethod
    def root_only(cls, root: BlockState) -> "DraftGraph":
        """Return the graph without a guess: standard decoding."""
        steps, none = np.array([root.step], dtype=np.int64), np.zeros((0, 2), dtype=np.int64)
        return cls(root.block, root.canvas[None], steps, np.ones(1), none)

    @property
    def depths(self) -> Int64[np.ndarray, " N"]:
        """Transitions between the root and each node."""
        return self.steps - self.steps[0]

    @cached_property
    def complete(self) -> Bool[np.ndarray, " N"]:
        """Nodes that are complete blocks: a pass over them is the first of the next block."""
        return (self.canvases != MASKED).all(axis=1)

    @property
    def rows(self) -> Int64[np.ndarray, " N"]:
        """Rows of a pass that each node takes: a complete block is evaluated together with the next one."""
        return 1 + self.complete.astype(np.int64)

    def first(self, count: int) -> "DraftGraph":
        """Return the graph of the first `count` nodes."""
        if count >= len(self):
            return self
        kept = (self.edges < count).all(axis=1)
        return DraftGraph(self.block, self.canvases[:count], self.steps[:count], self.reach[:count], self.edges[kept])

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

    def validate(self, root: BlockState, budget: int, vocab_size: int, crosses: bool = False) -> None:
        """Check a drafter's graph before the target sees it; wrong guesses are fine, malformed graphs are not.

        The budget counts one for the root and the `rows` of the guesses; complete blocks are allowed where the target `crosses`.

        Raises:
            ValueError: naming what is malformed.
        """
        count, length = len(self.canvases), len(root.canvas)
        if self.canvases.ndim != 2 or self.canvases.shape[1] != length or self.canvases.dtype != np.int64:
            raise ValueError(f"draft graph: canvases must be int64 of shape [N, {length}], got {self.canvases.dtype} {self.canvases.shape}")
        used = 1 + int(self.rows[1:].sum()) if count else 0
        if not 1 <= used <= budget:
            raise ValueError(f"draft graph: {used} nodes, the budget allows 1 to {budget} (the certain next state included)")
        for name, dtype in (("steps", np.int64), ("reach", np.float64)):
            array = getattr(self, name)
            if array.shape != (count,) or array.dtype != dtype:
                raise ValueError(f"draft graph: {name} must be {np.dtype(dtype)} of shape [{count}], got {array.dtype} {array.shape}")
        if self.block != root.block or int(self.steps[0]) != root.step or not np.array_equal(self.canvases[0], root.canvas):
            raise ValueError("draft graph: node 0 must be the certain next state")
        deepest = len(root.masked)
        if count > 1 and not 1 <= int(self.steps[1:].min()) - root.step <= int(self.steps[1:].max()) - root.step <= deepest:
            raise ValueError(
                f"draft graph: a guess must be 1 to {deepest} steps after node 0 (step {root.step}), got {self.steps[1:].tolist()}"
            )
        if self.canvases.min() < MASKED or self.canvases.max() >= vocab_size:
            raise ValueError(f"draft graph: token ids must lie in 0..{vocab_size - 1} (or {MASKED} for masked)")
        if not crosses and self.complete.any():
            raise ValueError("draft graph: a complete block takes no node, its logits are not needed")
        if self.edges.ndim != 2 or self.edges.shape[1] != 2 or self.edges.dtype != np.int64:
            raise ValueError(f"draft graph: edges must be int64 of shape [E, 2], got {self.edges.dtype} {self.edges.shape}")
        if len(self.edges) and not 0 <= self.edges.min() <= self.edges.max() < count:
            raise ValueError(f"draft graph: edges must be pairs of node numbers in 0..{count - 1}")
        if (self.steps[self.edges[:, 1]] != self.steps[self.edges[:, 0]] + 1).any():
            raise ValueError("draft graph: an edge must lead to the next step")


class GraphBuilder:
    """Collects nodes up to a budget and merges equal states; a node's reach is the sum over its parents."""

    def __init__(self, root: BlockState, budget: int, crosses: bool = False) -> None:
        self.budget, self.crosses = budget, crosses
        self._used = 1
        self.states = [root]
        self._edges: dict[tuple[int, int], float] = {}
        self._index = {root.key: 0}

    def add(self, parent: int, state: BlockState, probability: float) -> int | None:
        """Add a guess below `parent`; return its node, an existing one if the state is known, None if there is no room.

        A complete block takes two of the budget, and is added only where the builder `crosses`.

        Args:
            parent: node of the state before.
            state: the guess, one step after it.
            probability: that the target goes from `parent` to `state`.

        Raises:
            ValueError: if the state is not one step after its parent.
        """
        if state.step != self.states[parent].step + 1:
            raise ValueError(f"a guess at step {state.step} cannot follow a node at step {self.states[parent].step}")
        node = self._index.get(state.key)
        if node is None:
            if self._used + 1 + state.is_complete > self.budget or (state.is_complete and not self.crosses):
                return None
            self._used += 1 + state.is_complete
            node = len(self.states)
            self._index[state.key] = node
            self.states.append(state)
        self._edges[parent, node] = probability
        return node

    def build(self) -> DraftGraph:
        """Return the finished graph, reach summed along the edges in step order."""
        steps = np.array([s.step for s in self.states], dtype=np.int64)
        reach = np.zeros(len(steps), dtype=np.float64)
        reach[0] = 1.0
        for (parent, node), probability in sorted(self._edges.items(), key=lambda edge: steps[edge[0][0]]):
            reach[node] += reach[parent] * probability
        canvases = np.stack([s.canvas for s in self.states])
        edges = np.array(list(self._edges), dtype=np.int64).reshape(-1, 2)
        return DraftGraph(self.states[0].block, canvases, steps, reach, edges)
