"""The block state: an immutable canvas of one block and the denoising step it has reached.

Knows nothing of models, noise or rules. Example: `BlockState.initial(block=2, tail=[5, 7], block_length=4).masked` is `[2, 3]`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Int64

MASKED = -1
"""Canvas entry of a position that holds no token yet; never a token id, so a prompt can contain any id."""


@dataclass(frozen=True, eq=False)
class BlockState:
    """Canvas (token ids or MASKED), block index and step (number of transitions since the block began).

    `num_initial` positions were masked when the block began, which schedules divide; None stands for a whole block.
    """

    block: int
    canvas: Int64[np.ndarray, " L"]
    step: int
    num_initial: int | None = None

    def __post_init__(self) -> None:
        self.canvas.setflags(write=False)

    @classmethod
    def initial(cls, block: int, tail: Sequence[int], block_length: int) -> "BlockState":
        """Return the first state of a block whose leading positions hold the prompt's `tail`.

        Raises:
            ValueError: if the tail does not leave a masked position.
        """
        if len(tail) >= block_length:
            raise ValueError(f"a prompt tail of {len(tail)} tokens leaves no masked position in a block of {block_length}")
        canvas = np.full(block_length, MASKED, dtype=np.int64)
        canvas[: len(tail)] = tail
        return cls(block, canvas, 0, block_length - len(tail))

    @cached_property
    def masked(self) -> Int64[np.ndarray, " m"]:
        """Masked positions inside the block, ascending."""
        return np.flatnonzero(self.canvas == MASKED)

    @property
    def num_begun(self) -> int:
        """Positions that were masked when the block began."""
        return len(self.canvas) if self.num_initial is None else self.num_initial

    @property
    def is_complete(self) -> bool:
        """Whether no masked position is left."""
        return not len(self.masked)

    @property
    def decoded(self) -> "BlockState":
        """The state that a pass over this one decodes: of a complete block, the first state of the next block."""
        return BlockState.initial(self.block + 1, (), len(self.canvas)) if self.is_complete else self

    @cached_property
    def key(self) -> tuple[int, int, bytes]:
        """Identity of the state: two states are equal exactly if their keys are."""
        return self.block, self.step, self.canvas.tobytes()

    def commit(self, positions: Int64[np.ndarray, " k"], tokens: Int64[np.ndarray, " k"]) -> "BlockState":
        """Return the next state, with `tokens` at masked `positions` and the step advanced by one."""
        canvas = self.canvas.copy()
        canvas[positions] = tokens
        return BlockState(self.block, canvas, self.step + 1, self.num_initial)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BlockState) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)
