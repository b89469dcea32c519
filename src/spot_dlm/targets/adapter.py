"""What all adapters of Llama-like hosts share: text in and out, sizes, and the way from hidden states to logits.

Knows nothing of attention and caches.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from spot_dlm.interfaces import MaskedLogits, Prefix, Query, TargetSpec
from spot_dlm.targets.products import least_rows, linear
from spot_dlm.targets.text import TextCodec
from spot_dlm.targets.weights import Weights

PASS_TOKENS = 4096
"""Tokens of one pass; evaluations and prompts beyond it run in chunks."""
MAX_SCORES = 2**26
"""Query-key pairs times heads of one pass."""
_HEAD_BYTES = 2**28


class Adapter(ABC):
    """A host with its special ids and its tokenizer.

    Args:
        weights: the host's weights (`read_weights`).
        spec: sizes and special ids.
        codec: text in and out; None for a checkpoint without tokenizer (token ids only).
        padded_rows: evaluate every pass at this many rows at least (a complete canvas counts two), so that standard and speculative
            decoding run the same kernels on devices whose rounding depends on the shape (strict mode, method.md section 9d).
    """

    def __init__(self, weights: Weights, spec: TargetSpec, codec: TextCodec | None, padded_rows: int = 1) -> None:
        self._weights, self._spec, self._codec, self._padded_rows = weights, spec, codec, padded_rows
        defined = set(range(spec.vocab_size)) if codec is None else codec.defined_ids
        excluded = sorted({spec.mask_token_id} | (set(range(spec.vocab_size)) - defined))
        self._excluded = torch.tensor(excluded, device=spec.device)

    @property
    def spec(self) -> TargetSpec:
        """Sizes and special ids."""
        return self._spec

    @property
    def codec(self) -> TextCodec | None:
        """The tokenizer with its chat template; None for a checkpoint without tokenizer."""
        return self._codec

    def encode(self, text: str) -> list[int]:
        """Return the prompt ids of user text (see TextCodec).

        Raises:
            ValueError: if the text is empty or the checkpoint has no tokenizer.
        """
        if self._codec is None:
            raise ValueError(f"{self._spec.name} has no tokenizer files; give token ids or add tokenizer.json")
        return self._codec.encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids; empty for a checkpoint without tokenizer."""
        return "" if self._codec is None else self._codec.decode(token_ids)

    def token_text(self, token_id: int) -> str:
        """Return the literal text of one id, special or not; empty where the tokenizer has none."""
        return "" if self._codec is None else self._codec.token_text(token_id)

    @property
    def sizes(self) -> dict[str, int]:
        """Layers, hidden and feed-forward size, query and key/value heads of the host."""
        weights = self._weights
        return {
            "layers": len(weights.layers),
            "hidden": weights.embedding.shape[1],
            "intermediate": weights.intermediate,
            "heads": weights.heads,
            "kv_heads": weights.kv_heads,
        }

    @abstractmethod
    def evaluate_many(self, queries: Sequence[Query]) -> list[MaskedLogits]:
        """Return what `evaluate` returns for each query."""

    def evaluate(self, prefix: Prefix, canvases: Int64[np.ndarray, "N L"]) -> MaskedLogits:
        """Return logits (float32) for the masked positions of N canvases of the block after the prefix, of a complete one (where the
        target crosses) those of the block after it.
        """
        return self.evaluate_many([(prefix, canvases)])[0]

    def _by_query(self, packed: Float[Tensor, "M V"], counts: Sequence[Int64[np.ndarray, " _"]]) -> list[MaskedLogits]:
        """Exclude what must not be generated and cut the rows of a pass into its queries; `counts` are the rows of every canvas."""
        packed.index_fill_(1, self._excluded, -torch.inf)
        parts = packed.split([int(count.sum()) for count in counts])
        return [MaskedLogits(part, [0, *np.cumsum(count).tolist()]) for part, count in zip(parts, counts, strict=True)]

    def _project(self, hidden: Float[Tensor, "R E"], packed: Float[Tensor, "m V"]) -> None:
        """Write the logits of the first m hidden states, in equal parts of a bounded number of bytes."""
        parts = -(-len(hidden) // max(2 * least_rows(hidden.device), _HEAD_BYTES // (4 * self._spec.vocab_size)))
        row = 0
        for part in hidden.tensor_split(parts):
            target = packed[row : row + len(part)]
            target.copy_(linear(part, self._weights.head)[: len(target)])
            row += len(part)

    def _least_tokens(self, rows: int, length: int) -> int:
        return max(least_rows(self._spec.device), rows * length if rows > 1 else 1)

    def _wait(self) -> None:
        """Wait for an accelerator's queue, so that the seconds of a pass are counted as the target's."""
        if self._spec.device.type == "cuda":
            torch.cuda.synchronize(self._spec.device)
