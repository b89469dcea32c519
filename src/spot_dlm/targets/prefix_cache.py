"""Keys and values of one prompt's complete blocks, and the scratch that a folded commit splices.

Knows nothing of models. Example: `cache.append(new)` with `new` of shape [layers, 2, heads, tokens, head size], then `cache.keys(0)`.
"""

from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float, Int64
from torch import Tensor

_ALIGNED = 16  # floats in 64 bytes: BLAS rounds small matrices differently where their addresses differ in alignment


def aligned(count: int) -> int:
    """Return the next multiple of 16."""
    return -(-count // _ALIGNED) * _ALIGNED


@dataclass
class PrefixCache:
    """One growing buffer [layers, 2 (keys, values), heads, capacity, head size], of which `length` tokens are valid, zeros after them.

    `following` are the logits of the next position as the last row predicts them, where a target asks for that; `scratch` holds, by
    the bytes of the canvas, the keys and values of the complete canvases of the last evaluation.
    """

    block_length: int
    length: int = 0
    buffer: Float[Tensor, "Y 2 Hkv C D"] | None = None
    following: Float[Tensor, " V"] | None = None
    scratch: dict[bytes, Float[Tensor, "Y 2 Hkv L D"]] = field(default_factory=dict)

    def padded(self, layer: int, kind: int) -> Float[Tensor, "Hkv P D"]:
        """Return a view of a layer's keys (kind 0) or values (1), with zeros up to the next multiple of 16 tokens."""
        assert self.buffer is not None, "the prefix is empty"
        return self.buffer[layer, kind, :, : aligned(self.length)]

    def append(self, new: Float[Tensor, "Y 2 Hkv S D"]) -> None:
        """Append S tokens to every layer, doubling the buffer where it is full; the scratch is dropped."""
        end = self.length + new.shape[3]
        if self.buffer is None or self.buffer.shape[3] < end:
            grown = new.new_zeros(*new.shape[:3], aligned(max(end, 2 * self.length)), new.shape[4])
            if self.buffer is not None:
                grown[:, :, :, : self.length] = self.buffer[:, :, :, : self.length]
            self.buffer = grown
        self.buffer[:, :, :, self.length : end] = new
        self.length = end
        self.scratch.clear()

    def fold(self, canvas: Int64[np.ndarray, " L"]) -> bool:
        """Append a complete canvas from the scratch; return whether it was there."""
        found = self.scratch.get(canvas.tobytes())
        if found is not None:
            self.append(found)
        return found is not None
