"""The adapter for block-causal targets with same-position logits (SDAR, TraDo and the shipped model).

Blocks count from absolute position 0; a segment sees the cached complete blocks, what `packing` says and itself. `evaluate` reads the
cache, only `prefill` and `commit` write it. Source of the contract: SDAR's generate.py and modeling_sdar.py (docs/families.md).
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from spot_dlm.interfaces import MaskedLogits, Prefix, Query, TargetSpec
from spot_dlm.state import MASKED
from spot_dlm.targets.forward import run
from spot_dlm.targets.packing import Group, Packed, Piece, chunks, pack
from spot_dlm.targets.prefix_cache import PrefixCache
from spot_dlm.targets.products import least_rows, linear
from spot_dlm.targets.text import TextCodec
from spot_dlm.targets.weights import Weights

PASS_TOKENS = 4096
"""Tokens of one pass; evaluations and prompts beyond it run in chunks."""
_PREFILL_TOKENS = 512
_SCORES = 2**26  # query-key pairs times heads
_HEAD_BYTES = 2**28


class BlockCausalTarget:
    """A Qwen3-like host with block-causal attention.

    Args:
        weights: the host's weights (`read_weights`).
        spec: sizes and special ids.
        codec: text in and out; None for a checkpoint without tokenizer (token ids only).
        padded_rows: evaluate every pass at this many rows at least (a complete canvas counts two), so that standard and speculative
            decoding run the same kernels on devices whose rounding depends on the shape (strict mode, method.md section 9d).

    Memory of an evaluation besides weights and cache: its logits, masked rows x vocabulary x 4 bytes, and for the pass at work (at most
    PASS_TOKENS tokens and 2**26 scores, or one canvas) tokens x (2 hidden + 4 heads x head size + 4 key heads x head size + 3 feed-forward)
    numbers and 2 x tokens x heads x (cached + own) scores; the head's results pass through 2**28 bytes. The complete canvases of the last
    evaluation keep layers x 2 x key heads x block x head size numbers each.
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

    @torch.inference_mode()
    def prefill(self, token_ids: Int64[np.ndarray, " P"], block_length: int) -> PrefixCache:
        """Cache complete prompt blocks, in chunks of whole blocks under a block-causal mask."""
        if len(token_ids) % block_length:
            raise ValueError(f"prefill takes whole blocks of {block_length}, got {len(token_ids)} tokens")
        prefix = PrefixCache(block_length)
        while prefix.length < len(token_ids):
            fitting = _SCORES // (self._weights.heads * (prefix.length + _PREFILL_TOKENS))
            chunk = max(1, min(_PREFILL_TOKENS, fitting) // block_length) * block_length
            self._append(prefix, token_ids[prefix.length : prefix.length + chunk])
        self._wait()
        return prefix

    @torch.inference_mode()
    def commit(self, prefix: Prefix, token_ids: Int64[np.ndarray, " L"]) -> int:
        """Append one complete block to the cache, without a pass where the last evaluation held it; return the passes it took."""
        own = _own(prefix)
        if own.fold(token_ids):
            return 0
        self._append(own, token_ids)
        self._wait()
        return 1

    def evaluate(self, prefix: Prefix, canvases: Int64[np.ndarray, "N L"]) -> MaskedLogits:
        """Return logits (float32) for the masked positions of N canvases, of a complete one those of the block after it."""
        return self.evaluate_many([(prefix, canvases)])[0]

    @torch.inference_mode()
    def evaluate_many(self, queries: Sequence[Query]) -> list[MaskedLogits]:
        """Return what `evaluate` returns for each query, in one packed pass (in chunks, where it is large)."""
        pieces = [(_own(prefix), canvases) for prefix, canvases in queries]
        for prefix, _ in pieces:
            prefix.scratch.clear()
        counts = [_decoded_positions(canvases) for _, canvases in pieces]
        ends = np.cumsum([0, *(int(count.sum()) for count in counts)]).tolist()
        packed = torch.empty(ends[-1], self._spec.vocab_size, device=self._spec.device)
        row = 0
        for chunk in chunks(pieces, PASS_TOKENS, _SCORES // self._weights.heads, self._padded_rows):
            row = self._evaluate(chunk, packed, row)
        packed.index_fill_(1, self._excluded, -torch.inf)
        self._wait()
        parts = [packed[a:b] for a, b in pairwise(ends)]
        return [MaskedLogits(part, [0, *np.cumsum(count).tolist()]) for part, count in zip(parts, counts, strict=True)]

    def _evaluate(self, chunk: Sequence[Piece], packed: Float[Tensor, "M V"], row: int) -> int:
        """Write one pass's logits from `row` on, leave the complete canvases' keys and values in scratch; return the row after it."""
        length = max(canvases.shape[1] for _, canvases in chunk)
        least = self._least_tokens(self._padded_rows, length)
        batch = pack(chunk, self._spec.mask_token_id, self._padded_rows)
        count = len(batch.wanted)
        hidden, kept = run(self._weights, batch.padded(least, least))
        assert hidden is not None
        self._project(hidden, packed[row : row + count])
        for group, store in zip(batch.groups, kept, strict=True):
            if store is not None:
                canvases = batch.ids[group.start + group.decoded * group.length :][: group.kept * group.length]
                names = [canvas.tobytes() for canvas in canvases.reshape(group.kept, -1)]
                group.cache.scratch.update(zip(names, store.unbind(3), strict=True))
        return row + count

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

    def _append(self, prefix: PrefixCache, token_ids: Int64[np.ndarray, " S"]) -> None:
        """Run tokens that follow the cache, one or more complete blocks, and append their keys and values."""
        length = prefix.block_length
        visible, rows = None, self._padded_rows
        if len(token_ids) > length:
            blocks = torch.arange(len(token_ids), device=self._spec.device) // length
            visible, rows = blocks <= blocks[:, None], 1
        group = Group(prefix, 0, 1, len(token_ids), kept=1, visible=visible)
        positions = np.arange(prefix.length, prefix.length + len(token_ids))
        batch = Packed(token_ids, positions, np.empty(0, dtype=np.int64), [group], rows)
        _, kept = run(self._weights, batch.padded(self._least_tokens(rows, length), 0))
        assert kept[0] is not None
        prefix.append(kept[0].flatten(3, 4))

    def _wait(self) -> None:
        """Wait for an accelerator's queue, so that the seconds of a pass are counted as the target's."""
        if self._spec.device.type == "cuda":
            torch.cuda.synchronize(self._spec.device)


def _decoded_positions(canvases: Int64[np.ndarray, "N L"]) -> Int64[np.ndarray, " N"]:
    """Return the number of positions whose logits a canvas asks for."""
    masked = (canvases == MASKED).sum(axis=1)
    return np.where(masked == 0, canvases.shape[1], masked)


def _own(prefix: Prefix) -> PrefixCache:
    """Narrow the loop's prefix to the cache that `prefill` made."""
    if not isinstance(prefix, PrefixCache):
        raise TypeError(f"the prefix must come from this target's prefill, got {type(prefix).__name__}")
    return prefix
