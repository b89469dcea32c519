"""Attention of one group of segments: over the shared cache, whose keys and values exist once, and over each segment's own tokens.

Scores lie in one buffer, own keys first, then the cache's; it is made once a pass and used by every layer. A segment's own products have
shapes that depend on nothing else, the packed product with the cache keeps to the rules of `elementwise`. Knows nothing of canvases.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from spot_dlm.targets.elementwise import MIN_ROWS, inner_spans
from spot_dlm.targets.packing import Group
from spot_dlm.targets.prefix_cache import aligned
from spot_dlm.targets.weights import Weights

_NAIVE = 400  # torch multiplies batches of matrices with fewer products by a plain loop


class Attention:
    """Buffers of one group; calling it reads the heads of a layer and writes what the group's tokens attend to.

    Memory: scores and weights, 2 x tokens x heads x (cached + own + padding) numbers.
    """

    def __init__(self, weights: Weights, group: Group, count: int, rows: int) -> None:
        self._group, self._count = group, count
        self._query_heads, self._heads, self._size = weights.heads, weights.kv_heads, weights.head_dim
        self._per_segment = group.length * (self._query_heads // self._heads)
        self._own = group.length * (1 if group.context is None else 2)
        segments = max(count, rows if group.context is None else rows // 2, -(-self._least_rows(weights.device) // self._per_segment))
        like, width = weights.embedding, aligned(aligned(self._own) + group.cache.length)
        self._queries = like.new_zeros(self._heads, segments, self._per_segment, self._size)
        self._pairs = like.new_zeros(2, self._heads, segments, aligned(self._own), self._size)
        self._scores = like.new_full((self._heads, segments, self._per_segment, width), -torch.inf)
        self._weights = torch.empty_like(self._scores)
        self._out = torch.empty_like(self._queries)

    def __call__(self, heads: Float[Tensor, "T H D"], layer: int, attended: Float[Tensor, "T O"]) -> None:
        """Attend in one layer; queries in `heads` are scaled and rotated, as are its keys."""
        self._fill(heads)
        self._score(layer)
        torch.softmax(self._scores, dim=-1, out=self._weights)
        self._sum_values(layer)
        tokens, grouped = self._tokens(self._group.start), self._query_heads // self._heads
        shape = (self._heads, -1, self._group.length, grouped, self._size)
        rows = attended[tokens].view(self._count, self._group.length, self._heads, grouped, self._size)
        rows.copy_(self._out.view(shape)[:, : self._count].permute(1, 2, 0, 3, 4))

    def _tokens(self, start: int) -> slice:
        return slice(start, start + self._count * self._group.length)

    def _least_rows(self, device: torch.device) -> int:
        """Rows below which the product with the cache would take another way through the libraries."""
        if device.type != "cpu" or not self._group.cache.length:
            return 1
        return max(MIN_ROWS, -(-_NAIVE // (self._size * self._group.cache.length)))

    def _fill(self, heads: Float[Tensor, "T H D"]) -> None:
        """Copy queries, keys and values of the group, and keys and values of its context, into matrices by head and segment."""
        group, length, queries = self._group, self._group.length, self._query_heads
        tokens = self._tokens(group.start)
        shape = (self._count, length, self._heads, queries // self._heads, self._size)
        target = self._queries.view(self._heads, -1, *shape[1:2], *shape[3:])[:, : self._count]
        target.copy_(heads[tokens, :queries].view(shape).permute(2, 0, 1, 3, 4))
        starts = (group.start,) if group.context is None else (group.context, group.start)
        for at, start in enumerate(starts):
            own = self._pairs[:, :, : self._count, at * length : (at + 1) * length]
            own.copy_(by_head(heads[self._tokens(start), queries:], length))

    def _score(self, layer: int) -> None:
        scores, queries = self._scores.flatten(0, 1), self._queries.flatten(0, 1)
        keys = self._pairs[0].flatten(0, 1)[:, : self._own]
        scores[..., : self._own].baddbmm_(queries, keys.transpose(1, 2), beta=0)
        if self._group.visible is not None:
            hidden = ~self._group.visible.repeat_interleave(self._per_segment // self._group.length, dim=0)
            self._scores[..., : self._own].masked_fill_(hidden, -torch.inf)
        if self._group.cache.length:
            columns = self._scores.flatten(1, 2)[..., self._cached]
            columns.baddbmm_(self._queries.flatten(1, 2), self._group.cache.keys(layer).transpose(1, 2), beta=0)

    @property
    def _cached(self) -> slice:
        start = aligned(self._own)
        return slice(start, start + self._group.cache.length)

    def _sum_values(self, layer: int) -> None:
        values = self._pairs[1].flatten(0, 1)[:, : self._own]
        torch.bmm(self._weights.flatten(0, 1)[..., : self._own], values, out=self._out.flatten(0, 1))
        if not self._group.cache.length:
            return
        weights, cached = self._weights.flatten(1, 2)[..., self._cached], self._group.cache.values(layer)
        out = self._out.flatten(1, 2)
        for span in inner_spans(self._group.cache.length, out.device):
            out.baddbmm_(weights[..., span], cached[:, span])


def by_head(pairs: Float[Tensor, "T H D"], length: int) -> Float[Tensor, "2 Hkv n L D"]:
    """View the keys and values of neighbouring segments by head and segment."""
    tokens, heads, _ = pairs.shape
    return pairs.unflatten(0, (tokens // length, length)).unflatten(2, (2, heads // 2)).permute(2, 3, 0, 1, 4)
