"""The adapter for block-causal targets: SDAR, TraDo, LLaDA2, Fast-dLLM v2, bd3lm and the shipped model.

A segment sees the cached blocks, what `packing` says and itself. `evaluate` reads the cache, only `prefill` and `commit` write it.
Sources of the contracts: docs/families.md.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from spot_dlm.interfaces import MaskedLogits, Prefix, Query, TargetSpec
from spot_dlm.state import MASKED
from spot_dlm.targets.adapter import MAX_SCORES, PASS_TOKENS, Adapter
from spot_dlm.targets.forward import run
from spot_dlm.targets.packing import Group, Packed, Piece, chunks, pack
from spot_dlm.targets.prefix_cache import PrefixCache
from spot_dlm.targets.text import TextCodec
from spot_dlm.targets.weights import Weights

Shift = Literal["none", "block", "prefix"]
_PREFILL_TOKENS = 512


class BlockCausalTarget(Adapter):
    """A host with block-causal attention.

    Args:
        weights: the host's weights (`read_weights`).
        spec: sizes and special ids.
        codec: text in and out; None for a checkpoint without tokenizer (token ids only).
        padded_rows: see Adapter.
        shift: the row that predicts a position: "none" its own, "block" the one before it (of a block's first position its own:
            Fast-dLLM v2, where a seed stands there), "prefix" the one before it, in the cached block too (dllm's right_shift_logits).

    Memory of an evaluation besides weights and cache: its logits, masked rows x vocabulary x 4 bytes, and for the pass at work (at most
    PASS_TOKENS tokens and MAX_SCORES scores, or one canvas) tokens x (2 hidden + 4 heads x head size + 4 key heads x head size + 3
    feed-forward) numbers and 2 x tokens x heads x (cached + own) scores; the head's results pass through 2**28 bytes. The complete
    canvases of the last evaluation keep layers x 2 x key heads x block x head size numbers each.
    """

    def __init__(self, weights: Weights, spec: TargetSpec, codec: TextCodec | None, padded_rows: int = 1, shift: Shift = "none") -> None:
        super().__init__(weights, spec, codec, padded_rows)
        self._shift: Shift = shift

    @torch.inference_mode()
    def prefill(self, token_ids: Int64[np.ndarray, " P"], block_length: int) -> PrefixCache:
        """Cache prompt blocks, in chunks of whole blocks under a block-causal mask.

        Blocks that count from the end of the prompt leave a shorter one at its beginning.

        Raises:
            ValueError: for a part of a block on a grid, and for blocks that a seed would fill.
        """
        if self._spec.seeds and block_length < 2:
            raise ValueError(f"block_length={block_length} must be at least 2 where every block begins with a seed")
        ragged = len(token_ids) % block_length
        if ragged and self._spec.blocks == "grid":
            raise ValueError(f"prefill takes whole blocks of {block_length}, got {len(token_ids)} tokens")
        prefix, done = PrefixCache(block_length), ragged
        if ragged:
            self._append(prefix, token_ids[:ragged])
        while done < len(token_ids):
            fitting = MAX_SCORES // (self._weights.heads * (prefix.length + _PREFILL_TOKENS))
            chunk = max(1, min(_PREFILL_TOKENS, fitting) // block_length) * block_length
            self._append(prefix, token_ids[done : done + chunk])
            done += chunk
        self._wait()
        return prefix

    @torch.inference_mode()
    def commit(self, prefix: Prefix, token_ids: Int64[np.ndarray, " L"]) -> int:
        """Append one complete block to the cache, without a pass where the last evaluation held it; return the passes it took."""
        own = _own(prefix)
        seen = token_ids if self._spec.invisible_id is None else token_ids[token_ids != self._spec.invisible_id]
        if len(seen) == len(token_ids) and own.fold(token_ids):
            return 0
        if len(seen):
            self._append(own, seen)
        self._wait()
        return 1

    def seed(self, prefix: Prefix) -> int:
        """Return the most probable token after the prefix, as its last row predicts it (Fast-dLLM v2: greedy at any temperature)."""
        following = _own(prefix).following
        assert following is not None, "the prefix is empty"
        return int(following.argmax())

    @torch.inference_mode()
    def evaluate_many(self, queries: Sequence[Query]) -> list[MaskedLogits]:
        """Return what `evaluate` returns for each query, in one packed pass (in chunks, where it is large)."""
        pieces = [(_own(prefix), canvases) for prefix, canvases in queries]
        for prefix, _ in pieces:
            prefix.scratch.clear()
        counts = [_decoded_positions(canvases) for _, canvases in pieces]
        packed = torch.empty(sum(int(count.sum()) for count in counts), self._spec.vocab_size, device=self._spec.device)
        row = 0
        for chunk in chunks(pieces, PASS_TOKENS, MAX_SCORES // self._weights.heads, self._padded_rows):
            row = self._evaluate(chunk, packed, row)
        found = self._by_query(packed, counts)
        if self._shift == "prefix":
            for (prefix, canvases), logits in zip(pieces, found, strict=True):
                if prefix.following is not None:
                    logits.packed[np.array(logits.offsets[:-1])[canvases[:, 0] == MASKED]] = prefix.following
        self._wait()
        return found

    def _evaluate(self, chunk: Sequence[Piece], packed: Float[Tensor, "M V"], row: int) -> int:
        """Write one pass's logits from `row` on, leave the complete canvases' keys and values in scratch; return the row after it."""
        length = max(canvases.shape[1] for _, canvases in chunk)
        least = self._least_tokens(self._padded_rows, length)
        batch = pack(chunk, self._spec.mask_token_id, self._padded_rows, shifted=self._shift != "none")
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

    def _append(self, prefix: PrefixCache, token_ids: Int64[np.ndarray, " S"]) -> None:
        """Run tokens that follow the cache, one or more complete blocks, and append their keys and values."""
        length = prefix.block_length
        visible, rows = None, self._padded_rows
        if len(token_ids) > length:
            blocks = torch.arange(len(token_ids), device=self._spec.device) // length
            visible, rows = blocks <= blocks[:, None], 1
        last = np.array([len(token_ids) - 1] if self._spec.seeds or self._shift == "prefix" else [], dtype=np.int64)
        group = Group(prefix, 0, 1, len(token_ids), kept=1, visible=visible, also_decoded=bool(len(last)))
        positions = np.arange(prefix.length, prefix.length + len(token_ids))
        least = self._least_tokens(rows, length)
        hidden, kept = run(self._weights, Packed(token_ids, positions, last, [group], rows).padded(least, least))
        assert kept[0] is not None
        prefix.append(kept[0].flatten(3, 4))
        if hidden is not None:
            following = torch.empty(1, self._spec.vocab_size, device=self._spec.device)
            self._project(hidden, following)
            prefix.following = following.index_fill_(1, self._excluded, -torch.inf)[0]


def _decoded_positions(canvases: Int64[np.ndarray, "N L"]) -> Int64[np.ndarray, " N"]:
    """Return the number of positions whose logits a canvas asks for."""
    masked = (canvases == MASKED).sum(axis=1)
    return np.where(masked == 0, canvases.shape[1], masked)


def _own(prefix: Prefix) -> PrefixCache:
    """Narrow the loop's prefix to the cache that `prefill` made."""
    if not isinstance(prefix, PrefixCache):
        raise TypeError(f"the prefix must come from this target's prefill, got {type(prefix).__name__}")
    return prefix
