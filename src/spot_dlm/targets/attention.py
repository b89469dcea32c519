"""Attention of one group of segments: over the shared cache, whose keys and values exist once, and over each segment's own tokens.

A segment's own products have shapes that depend on nothing else in the pass. The packed product with the cache keeps to the rules of
`products`, its queries scaled beforehand: a scale factor inside a product makes a row depend on their number (docs/log.md). Matrices are
padded to 16 numbers: BLAS rounds small ones differently where their addresses differ in alignment. Knows nothing of canvases.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from spot_dlm.targets.kernels import Kernels
from spot_dlm.targets.packing import Group
from spot_dlm.targets.prefix_cache import aligned
from spot_dlm.targets.products import MIN_ROWS, inner_spans
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
        least = MIN_ROWS if like.device.type == "cpu" and cached else 1
        n = max(count, rows // blocks, -(-least // per_segment))
        self._queries = like.new_zeros(heads, n, group.length, grouped, size)
        self._pairs = like.new_zeros(2, heads, n, own, size)
        self._out = torch.empty_like(self._queries)
        self._scores = like.new_empty(heads, n, per_segment, own + cached)
        self._weights = torch.empty_like(self._scores)
        split = heads * n * per_segment * own
        flat = self._weights.view(-1)  # raw scores lie where the weights will
        self._own_scores = flat[:split].view(heads * n, per_segment, own)
        self._cached_scores = flat[split:].view(heads, n * per_segment, cached)
        self._spans = inner_spans(cached, like.device)
        self._bias = _bias(like, blocks * group.length, own, group.cache.length, cached)

    def __call__(self, heads: Float[Tensor, "T H D"], layer: int, attended: Float[Tensor, "T O"]) -> None:
        """Attend in one layer; queries in `heads` are scaled and rotated, as are its keys."""
        group = self._group
        self._kernels.place_queries(heads, group.start, self._count, self._queries)
        if group.context is not None:
            self._kernels.place_pairs(heads, group.context, self._count, group.length, self._pairs, 0)
        column = 0 if group.context is None else group.length
        self._kernels.place_pairs(heads, group.start, self._count, group.length, self._pairs, column)
        self._weigh(layer)
        self._sum_values(layer)
        self._kernels.gather(self._out, group.start, self._count, attended)

    def _weigh(self, layer: int) -> None:
        """Turn queries and keys into weights."""
        heads, n, rows, _ = self._scores.shape
        own, cache = self._own_scores, self._group.cache
        torch.bmm(self._queries.view(heads * n, rows, -1), self._pairs[0].flatten(0, 1).transpose(1, 2), out=own)
        parts = [own.view(heads, n, rows, -1)]
        if cache.length:
            keys = cache.padded(layer, 0).transpose(1, 2)
            torch.bmm(self._queries.view(heads, n * rows, -1), keys, out=self._cached_scores)
            parts.append(self._cached_scores.view(heads, n, rows, -1))
        torch.cat(parts, dim=-1, out=self._scores)
        if self._bias is not None:
            self._scores += self._bias
        if self._group.visible is not None:
            hidden = ~self._group.visible.repeat_interleave(rows // self._group.length, dim=0)
            self._scores[..., : self._group.length].masked_fill_(hidden, -torch.inf)
        torch.softmax(self._scores, dim=-1, out=self._weights)

    def _sum_values(self, layer: int) -> None:
        heads, n, rows, _ = self._weights.shape
        values = self._pairs[1].flatten(0, 1)
        own = values.shape[1]
        out = self._out.view(heads * n, rows, -1)
        torch.bmm(self._weights.flatten(0, 1)[..., :own], values, out=out)
        if self._group.cache.length:
            weights, cached = self._weights.flatten(1, 2)[..., own:], self._group.cache.padded(layer, 1)
            for span in self._spans:
                out.view(heads, n * rows, -1).baddbmm_(weights[..., span], cached[:, span])


def _bias(like: Tensor, own: int, own_padded: int, cached: int, cached_padded: int) -> Float[Tensor, " W"] | None:
    """Return minus infinity for padded columns, None where there are none."""
    if own == own_padded and cached == cached_padded:
        return None
    bias = like.new_zeros(own_padded + cached_padded)
    bias[own:own_padded] = -torch.inf
    bias[own_padded + cached :] = -torch.inf
    return bias
