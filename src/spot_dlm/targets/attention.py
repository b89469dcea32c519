"""Attention of one group of segments: over the shared cache, whose keys and values exist once, and over each segment's own tokens.

A segment's own products have shapes that depend on nothing else in the pass. The packed product with the cache keeps to the rules of
`products`, its queries scaled beforehand: a scale factor inside a product makes a row depend on their number (docs/log.md). Matrices are
padded to 16 numbers: BLAS rounds small ones differently where their addresses differ in alignment. Knows nothing of canvases.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from spot_dlm.targets.kernels import Kernels
from spot_dlm.targets.packing import Group
from spot_dlm.targets.prefix_cache import aligned
from spot_dlm.targets.products import inner_spans, least_rows
from spot_dlm.targets.weights import Weights


class Attention:
    """Buffers of one group, made once a pass and used by every layer; calling it writes what the group's tokens attend to.

    Memory: 2 x tokens x heads x (cached + own + padding) numbers, own twice the length of a segment where there is a context.
    """

    def __init__(self, weights: Weights, kernels: Kernels, group: Group, count: int, rows: int) -> None:
        self._kernels, self._group, self._count = kernels, group, count
        heads, size, grouped, like = weights.kv_heads, weights.head_dim, weights.heads // weights.kv_heads, weights.embedding
        blocks, cached = 1 if group.context is None else 2, aligned(group.cache.length)
        per_segment, own = group.length * grouped, aligned(blocks * group.length)
        least = least_rows(like.device) if cached else 1
        n = max(count, rows // blocks, -(-least // per_segment))
        self._column = (blocks - 1) * group.length
        self._queries = like.new_zeros(heads, n, group.length, grouped, size)
        self._pairs = like.new_zeros(2, heads, n, own, size)
        self._out = torch.empty_like(self._queries)
        self._scores = like.new_empty(heads, n, per_segment, own + cached)
        self._weights = torch.empty_like(self._scores)
        self._bias = _bias(like, blocks * group.length, own, group.cache.length, cached)
        self._own = _Own.of(self._queries, self._pairs, self._weights, self._out)
        self._cached = _Cached.of(self._queries, self._weights, self._out, own) if cached else None

    def __call__(self, heads: Float[Tensor, "T H D"], layer: int, attended: Float[Tensor, "T O"], window: int | None = None) -> None:
        """Attend in one layer; queries in `heads` are scaled and rotated, as are its keys.

        `window`: a token of a segment sees those at most so many positions away (for segments without cache and context only).
        """
        group = self._group
        self._kernels.place_queries(heads, group.start, self._count, self._queries)
        if group.context is not None:
            self._kernels.place_pairs(heads, group.context, self._count, group.length, self._pairs, 0)
        self._kernels.place_pairs(heads, group.start, self._count, group.length, self._pairs, self._column)
        scores = [self._own.score()]
        if self._cached is not None:
            scores.append(self._cached.score(group.cache.padded(layer, 0)))
        self._weigh(scores, window)
        self._own.sum_values()
        if self._cached is not None:
            self._cached.add_values(group.cache.padded(layer, 1))
        self._kernels.gather(self._out, group.start, self._count, attended)

    def _weigh(self, scores: list[Float[Tensor, "Hkv n r _"]], window: int | None) -> None:
        """Turn scores into weights, where the scores lay."""
        torch.cat(scores, dim=-1, out=self._scores)
        if self._bias is not None:
            self._scores += self._bias
        for visible in (self._group.visible, self._near(window)):
            if visible is not None:
                hidden = ~visible.repeat_interleave(self._scores.shape[2] // self._group.length, dim=0)
                self._scores[..., : self._group.length].masked_fill_(hidden, -torch.inf)
        torch.softmax(self._scores, dim=-1, out=self._weights)

    def _near(self, window: int | None) -> Bool[Tensor, "L L"] | None:
        """Return which tokens of a segment are in each other's window, None where all are."""
        if window is None or window >= self._group.length - 1:
            return None
        assert self._cached is None and self._group.context is None
        steps = torch.arange(self._group.length, device=self._scores.device)
        return (steps[:, None] - steps).abs() <= window


class _Own(NamedTuple):
    """Views for the products of every segment with its own tokens."""

    queries: Float[Tensor, "B r D"]
    keys: Float[Tensor, "B D w"]
    scores: Float[Tensor, "B r w"]
    by_head: Float[Tensor, "Hkv n r w"]
    weights: Float[Tensor, "B r w"]
    values: Float[Tensor, "B w D"]
    out: Float[Tensor, "B r D"]

    @classmethod
    def of(cls, queries: Tensor, pairs: Tensor, weights: Tensor, out: Tensor) -> "_Own":
        heads, n, rows, _ = weights.shape
        width = pairs.shape[3]
        scores = weights.view(-1)[: heads * n * rows * width].view(heads * n, rows, width)
        return cls(
            queries=queries.view(heads * n, rows, -1),
            keys=pairs[0].flatten(0, 1).transpose(1, 2),
            scores=scores,
            by_head=scores.view(heads, n, rows, width),
            weights=weights.flatten(0, 1)[..., :width],
            values=pairs[1].flatten(0, 1),
            out=out.view(heads * n, rows, -1),
        )

    def score(self) -> Float[Tensor, "Hkv n r w"]:
        torch.bmm(self.queries, self.keys, out=self.scores)
        return self.by_head

    def sum_values(self) -> None:
        torch.bmm(self.weights, self.values, out=self.out)


class _Cached(NamedTuple):
    """Views for the products of all segments, packed, with the cache."""

    queries: Float[Tensor, "Hkv m D"]
    scores: Float[Tensor, "Hkv m P"]
    by_head: Float[Tensor, "Hkv n r P"]
    weights: Float[Tensor, "Hkv m P"]
    out: Float[Tensor, "Hkv m D"]
    spans: list[slice]

    @classmethod
    def of(cls, queries: Tensor, weights: Tensor, out: Tensor, own: int) -> "_Cached":
        heads, n, rows, _ = weights.shape
        packed = weights.flatten(1, 2)[..., own:]
        scores = weights.view(-1)[heads * n * rows * own :].view(heads, n * rows, -1)
        return cls(
            queries=queries.view(heads, n * rows, -1),
            scores=scores,
            by_head=scores.view(heads, n, rows, -1),
            weights=packed,
            out=out.view(heads, n * rows, -1),
            spans=inner_spans(packed.shape[2], packed.device),
        )

    def score(self, keys: Float[Tensor, "Hkv P D"]) -> Float[Tensor, "Hkv n r P"]:
        torch.bmm(self.queries, keys.transpose(1, 2), out=self.scores)
        return self.by_head

    def add_values(self, values: Float[Tensor, "Hkv P D"]) -> None:
        if len(self.spans) == 1:
            self.out.baddbmm_(self.weights, values)
            return
        for span in self.spans:
            self.out.baddbmm_(self.weights[..., span], values[:, span])


def _bias(like: Tensor, own: int, own_padded: int, cached: int, cached_padded: int) -> Float[Tensor, " W"] | None:
    """Return minus infinity for padded columns, None where there are none."""
    if own == own_padded and cached == cached_padded:
        return None
    bias = like.new_zeros(own_padded + cached_padded)
    bias[own:own_padded] = -torch.inf
    bias[own_padded + cached :] = -torch.inf
    return bias
