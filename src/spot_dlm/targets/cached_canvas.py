"""Full attention with a cache that is refreshed at the beginning of every block: another, approximate decoder, many times cheaper.

Inside a block the keys and values of other positions are those that they had when the block was all masks (Fast-dLLM v1, arXiv
2505.22618, NVlabs/Fast-dLLM `llada/generate.py`: "prefix" caches what stands before the block, "dual" what comes after it, too). When the
cache is refreshed depends on the trajectory alone, so speculation is lossless relative to standard decoding with the same cache.

Example: `load_target(model, cache="dual")`.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from spot_dlm.interfaces import Prefix, TargetSpec
from spot_dlm.state import MASKED
from spot_dlm.targets.forward import run
from spot_dlm.targets.full_attention import CanvasPrefix, FullAttentionTarget, Segments, own_prefix
from spot_dlm.targets.packing import Group, Packed
from spot_dlm.targets.prefix_cache import PrefixCache
from spot_dlm.targets.text import TextCodec
from spot_dlm.targets.weights import Weights


@dataclass
class CachedPrefix(CanvasPrefix):
    """A prefix with keys and values of the whole canvas, as they were when the block at work was all masks.

    `caches` holds, by the position after the last row of a pass, what its rows see besides themselves.
    """

    pairs: Float[Tensor, "Y 2 Hkv T D"] | None = None
    caches: dict[int, PrefixCache] = field(default_factory=dict)

    def outside(self, last: int) -> PrefixCache:
        """Return keys and values of all positions but those from the block's first one up to `last`, which is left out."""
        if last not in self.caches:
            assert self.pairs is not None, "the cache was never filled"
            cache = PrefixCache(last - self.length)
            others = torch.cat((self.pairs[:, :, :, : self.length], self.pairs[:, :, :, last:]), dim=3)
            if others.shape[3]:
                cache.append(others)
            self.caches[last] = cache
        return self.caches[last]


class CachedCanvasTarget(FullAttentionTarget):
    """Full attention whose passes run the block at work only ("dual"), or it and what comes after it ("prefix").

    Args:
        weights: the host's weights (`read_weights`).
        spec: sizes and special ids; it names the cache.
        codec: text in and out; None for a checkpoint without tokenizer (token ids only).
        padded_rows: see Adapter.
        cache: what is kept through a block, "prefix" or "dual".

    Memory besides that of `FullAttentionTarget`: layers x 2 x key heads x canvas x head size numbers, twice.
    """

    def __init__(self, weights: Weights, spec: TargetSpec, codec: TextCodec | None, padded_rows: int, cache: str) -> None:
        super().__init__(weights, spec, codec, padded_rows)
        self._cache = cache

    def open_canvas(self, token_ids: Int64[np.ndarray, " P"], end: int) -> CachedPrefix:
        """Return the prefix of a canvas of `end` tokens that begins with `token_ids`; takes one pass.

        Raises:
            ValueError: if the canvas has no room.
        """
        plain = super().open_canvas(token_ids, end)
        prefix = CachedPrefix(plain.token_ids, plain.end)
        self._refresh(prefix)
        return prefix

    def commit(self, prefix: Prefix, token_ids: Int64[np.ndarray, " L"]) -> int:
        """Append one block to the tokens and renew the cache; takes a pass unless the canvas is full."""
        super().commit(prefix, token_ids)
        own = _cached(prefix)
        if own.length == own.end:
            return 0
        self._refresh(own)
        return 1

    @torch.inference_mode()
    def _refresh(self, prefix: CachedPrefix) -> None:
        """Run the canvas with the block at work and all after it masked, for the keys and values of every position."""
        ids = np.full(prefix.end, self._spec.mask_token_id)
        ids[: prefix.length] = np.where(prefix.token_ids == MASKED, self._spec.mask_token_id, prefix.token_ids)
        group = Group(PrefixCache(prefix.end), 0, 1, prefix.end, kept=1)
        least = self._least_tokens(1, 1)
        packed = Packed(ids, np.arange(prefix.end), np.zeros(0, dtype=np.int64), [group], self._padded_rows)
        _, kept = run(self._weights, packed.padded(least, least))
        assert kept[0] is not None
        prefix.pairs = kept[0][:, :, :, 0]
        prefix.caches.clear()
        self._wait()

    def _segments(self, prefix: CanvasPrefix, canvases: Int64[np.ndarray, "N L"]) -> Segments:
        """Return the rows of the whole canvases that are not cached, and which of them are wanted."""
        _, _, ids, wanted = super()._segments(prefix, canvases)
        last = prefix.length + canvases.shape[1] if self._cache == "dual" else prefix.end
        rows = slice(prefix.length, last)
        return Segments(_cached(prefix).outside(last), prefix.length, ids[:, rows], wanted[:, rows])


def _cached(prefix: Prefix) -> CachedPrefix:
    """Narrow the loop's prefix to one that this target made."""
    own = own_prefix(prefix)
    if not isinstance(own, CachedPrefix):
        raise TypeError("the prefix must come from this target's open_canvas")
    return own
