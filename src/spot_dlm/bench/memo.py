"""A target that evaluates every state at most once: what makes a grid of drafters and budgets affordable.

The walk reads only the rows of states that it visits, and those are the states of standard decoding, whose logits are known after
the first run. Rows that nobody reads are never evaluated; rows that were not seen before are evaluated truly, so a decoder
that leaves the standard trajectory is not covered up. Exact where a row's logits do not depend on the other rows, to the bit.

Example: `memo = MemoTarget(target); generate(memo, prompt, Root()); generate(memo, prompt, Chain())`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from spot_dlm.interfaces import MaskedLogits, Prefix, SeededTarget, Target, TargetSpec, WholeCanvasTarget
from spot_dlm.state import MASKED


class RowsOnDemand(MaskedLogits):
    """Logits of N canvases of which a row is looked up or evaluated when it is asked for."""

    def __init__(self, counts: Sequence[int], rows: Callable[[Sequence[int]], list[Float[Tensor, "m V"]]]) -> None:
        self._counts, self._rows = counts, rows

    def of(self, row: int) -> Float[Tensor, "m V"]:
        """Return the logits of one canvas."""
        return self._rows([row])[0]

    @property
    def packed(self) -> Float[Tensor, "M V"]:
        """All rows, those that are not known evaluated together."""
        return torch.cat(self._rows(range(len(self._counts))))

    @property
    def offsets(self) -> list[int]:
        """Where each canvas begins in `packed`."""
        return [0, *np.cumsum(self._counts).tolist()]


@dataclass
class MemoPrefix:
    """The tokens of a prefix, and the target's own cache once a row had to be evaluated on it.

    The own cache repeats the same prefill and the same commits: their rounding may differ from each other. `folded` are the complete
    canvases of the last pass.
    """

    prefilled: Int64[np.ndarray, " P"]
    block_length: int
    end: int | None = None
    committed: list[Int64[np.ndarray, " L"]] = field(default_factory=list)
    own: Prefix | None = None
    num_own: int = 0
    folded: frozenset[bytes] = frozenset()

    @property
    def length(self) -> int:
        """Number of tokens in complete blocks."""
        return len(self.prefilled) + sum(map(len, self.committed))

    @property
    def key(self) -> tuple[int, int | None, bytes, bytes]:
        """What decides the logits of a canvas after this prefix."""
        return self.block_length, self.end, self.prefilled.tobytes(), b"".join(block.tobytes() for block in self.committed)


class MemoTarget:
    """A Target around another that remembers logits by (prefix, canvas); make a new one for every prompt to free the memory.

    Attributes:
        evaluated: number of rows that the real target evaluated.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._rows: dict[tuple[object, bytes], Float[Tensor, "m V"]] = {}
        self.evaluated = 0

    @property
    def spec(self) -> TargetSpec:
        """Sizes and special ids of the real target."""
        return self._target.spec

    def encode(self, text: str) -> list[int]:
        """Return the prompt ids of user text."""
        return self._target.encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of generated ids."""
        return self._target.decode(token_ids)

    def prefill(self, token_ids: Int64[np.ndarray, " P"], block_length: int) -> MemoPrefix:
        """Note the prompt's complete blocks; the real target sees them when a row needs it."""
        return MemoPrefix(token_ids.copy(), block_length)

    def open_canvas(self, token_ids: Int64[np.ndarray, " P"], end: int) -> MemoPrefix:
        """Note where a canvas begins and ends."""
        return MemoPrefix(token_ids.copy(), self.spec.block_length, end)

    def seed(self, prefix: Prefix) -> int:
        """Return the real target's seed."""
        return cast(SeededTarget, self._target).seed(self._own(_noted(prefix)))

    def commit(self, prefix: Prefix, token_ids: Int64[np.ndarray, " L"]) -> int:
        """Note a complete block; no pass is counted if the last one held it as a complete canvas, whether it was looked up or not."""
        noted = _noted(prefix)
        passes = int(token_ids.tobytes() not in noted.folded)
        noted.committed.append(token_ids.copy())
        noted.folded = frozenset()
        return passes

    def evaluate(self, prefix: Prefix, canvases: Int64[np.ndarray, "N L"]) -> RowsOnDemand:
        """Return logits that are looked up, or evaluated, when they are read."""
        noted = _noted(prefix)
        masked = (canvases == MASKED).sum(axis=1)
        noted.folded = frozenset(canvas.tobytes() for canvas in canvases[masked == 0])
        key, at = noted.key, len(noted.committed)

        def rows(indices: Sequence[int]) -> list[Float[Tensor, "m V"]]:
            wanted = [(key, canvases[i].tobytes()) for i in indices]
            unknown = {where: i for where, i in zip(wanted, indices, strict=True) if where not in self._rows}
            if unknown:
                if len(noted.committed) != at:
                    raise RuntimeError("a row was read after its prefix had changed")
                found = self._evaluate(noted, canvases[list(unknown.values())])
                self._rows |= {where: found.of(n) for n, where in enumerate(unknown)}
            return [self._rows[where] for where in wanted]

        return RowsOnDemand(np.where(masked == 0, canvases.shape[1], masked).tolist(), rows)

    def _evaluate(self, noted: MemoPrefix, canvases: Int64[np.ndarray, "N L"]) -> MaskedLogits:
        own = self._own(noted)
        self.evaluated += len(canvases)
        return self._target.evaluate(own, canvases)

    def _own(self, noted: MemoPrefix) -> Prefix:
        """Return the real target's cache of what is noted."""
        if noted.own is None and noted.end is not None:
            noted.own = cast(WholeCanvasTarget, self._target).open_canvas(noted.prefilled, noted.end)
        elif noted.own is None:
            noted.own = self._target.prefill(noted.prefilled, noted.block_length)
        for block in noted.committed[noted.num_own :]:
            self._target.commit(noted.own, block)
        noted.num_own = len(noted.committed)
        return noted.own


def _noted(prefix: Prefix) -> MemoPrefix:
    if not isinstance(prefix, MemoPrefix):
        raise TypeError(f"the prefix must come from MemoTarget.prefill, got {type(prefix).__name__}")
    return prefix
