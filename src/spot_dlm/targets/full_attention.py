"""The adapter for full attention: every pass runs whole canvases, with the masks of all blocks to come; exact, without a cache.

Covers LLaDA, LLaDA-MoE, Dream, A2D's mdlm and their like. Sources of the contracts: docs/families.md.

Example: `target.evaluate(target.open_canvas(prompt_ids, end=len(prompt_ids) + 32), canvases)`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Int64

from spot_dlm.interfaces import MaskedLogits, Prefix, Query, TargetSpec
from spot_dlm.state import MASKED
from spot_dlm.targets.adapter import MAX_SCORES, PASS_TOKENS, Adapter
from spot_dlm.targets.forward import run
from spot_dlm.targets.packing import Group, Packed
from spot_dlm.targets.prefix_cache import PrefixCache
from spot_dlm.targets.text import TextCodec
from spot_dlm.targets.weights import Weights


@dataclass
class CanvasPrefix:
    """The tokens before the block at work and where the canvas ends."""

    token_ids: Int64[np.ndarray, " P"]
    end: int

    @property
    def length(self) -> int:
        """Tokens before the block."""
        return len(self.token_ids)


class Segments(NamedTuple):
    """A query, or a part of it: N segments of T tokens from absolute position `first` on, and the cache that they see besides."""

    cache: PrefixCache
    first: int
    ids: Int64[np.ndarray, "N T"]
    wanted: Bool[np.ndarray, "N T"]


class FullAttentionTarget(Adapter):
    """A host whose positions all see each other.

    Args:
        weights: the host's weights (`read_weights`).
        spec: sizes and special ids.
        codec: text in and out; None for a checkpoint without tokenizer (token ids only).
        padded_rows: see Adapter.
        shifted: whether row i - 1 predicts position i (position 0: row 0), as in Dream.

    Memory of an evaluation besides the weights: its logits, masked rows x vocabulary x 4 bytes, and for the pass at work (at most
    PASS_TOKENS tokens and MAX_SCORES scores, or one canvas) what `BlockCausalTarget` states, with nothing cached.
    """

    def __init__(self, weights: Weights, spec: TargetSpec, codec: TextCodec | None, padded_rows: int = 1, shifted: bool = False) -> None:
        super().__init__(weights, spec, codec, padded_rows)
        self._shifted = shifted

    def open_canvas(self, token_ids: Int64[np.ndarray, " P"], end: int) -> CanvasPrefix:
        """Return the prefix of a canvas of `end` tokens that begins with `token_ids`; nothing is computed.

        Raises:
            ValueError: if the canvas has no room.
        """
        if end <= len(token_ids):
            raise ValueError(f"a canvas of {end} tokens has no room after {len(token_ids)}")
        return CanvasPrefix(np.array(token_ids, dtype=np.int64), end)

    def prefill(self, token_ids: Int64[np.ndarray, " P"], block_length: int) -> CanvasPrefix:
        """Return the prefix of a canvas with one block after `token_ids`."""
        return self.open_canvas(token_ids, len(token_ids) + block_length)

    def commit(self, prefix: Prefix, token_ids: Int64[np.ndarray, " L"]) -> int:
        """Append one block to the tokens; takes no pass."""
        own = own_prefix(prefix)
        own.token_ids = np.concatenate((own.token_ids, token_ids))
        return 0

    @torch.inference_mode()
    def evaluate_many(self, queries: Sequence[Query]) -> list[MaskedLogits]:
        """Return what `evaluate` returns for each query, in one packed pass (in chunks, where it is large)."""
        whole = [self._segments(own_prefix(prefix), canvases) for prefix, canvases in queries]
        counts = [query.wanted.sum(axis=1) for query in whole]
        packed = torch.empty(sum(int(count.sum()) for count in counts), self._spec.vocab_size, device=self._spec.device)
        row = 0
        for chunk in self._chunks(whole):
            batch = self._pack(chunk)
            count = len(batch.wanted)
            if count:
                least = self._least_tokens(1, 1)
                hidden, _ = run(self._weights, batch.padded(least, least))
                assert hidden is not None
                self._project(hidden, packed[row : row + count])
            row += count
        found = self._by_query(packed, counts)
        self._wait()
        return found

    def _segments(self, prefix: CanvasPrefix, canvases: Int64[np.ndarray, "N L"]) -> Segments:
        """Return the whole canvases, and which of their rows are wanted."""
        count, length = canvases.shape
        ids = np.full((count, prefix.end), self._spec.mask_token_id)
        wanted = np.zeros(ids.shape, dtype=np.bool_)
        ids[:, : prefix.length] = np.where(prefix.token_ids == MASKED, self._spec.mask_token_id, prefix.token_ids)
        block = slice(prefix.length, prefix.length + length)
        ids[:, block] = np.where(canvases == MASKED, self._spec.mask_token_id, canvases)
        wanted[:, block] = canvases == MASKED
        return Segments(PrefixCache(prefix.end), 0, ids, wanted)

    def _chunks(self, whole: Sequence[Segments]) -> Iterator[list[Segments]]:
        """Cut the queries into passes of whole canvases, in order, one canvas at least."""
        made: list[Segments] = []
        tokens = scores = 0
        for cache, first, ids, wanted in whole:
            size = ids.shape[1]
            pairs = size * (cache.length + size) * self._weights.heads
            start = 0
            while start < len(ids):
                room = min((PASS_TOKENS - tokens) // size, (MAX_SCORES - scores) // pairs)
                if room < 1 and made:
                    yield made
                    made, tokens, scores = [], 0, 0
                    continue
                stop = min(len(ids), start + max(1, room))
                made.append(Segments(cache, first, ids[start:stop], wanted[start:stop]))
                tokens, scores, start = tokens + (stop - start) * size, scores + (stop - start) * pairs, stop
        if made:
            yield made

    def _pack(self, chunk: Sequence[Segments]) -> Packed:
        """Lay out segments that see their query's cache and themselves."""
        groups, rows, start = [], [], 0
        for cache, _, ids, wanted in chunk:
            count, size = ids.shape
            groups.append(Group(cache, start, count, size))
            canvas, position = np.nonzero(wanted)
            rows.append(start + canvas * size + (np.maximum(position - 1, 0) if self._shifted else position))
            start += count * size
        tokens = np.concatenate([part.ids.ravel() for part in chunk])
        positions = np.concatenate([np.tile(part.first + np.arange(part.ids.shape[1]), len(part.ids)) for part in chunk])
        return Packed(tokens, positions, np.concatenate(rows), groups, self._padded_rows)


def own_prefix(prefix: Prefix) -> CanvasPrefix:
    """Narrow the loop's prefix to one that this target made."""
    if not isinstance(prefix, CanvasPrefix):
        raise TypeError(f"the prefix must come from this target, got {type(prefix).__name__}")
    return prefix
