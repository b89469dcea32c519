"""The pass itself: packed tokens through a host, every segment attending as its group says (`packing`).

Every row of a result is made by operations whose rounding does not depend on what else is in the pass. Knows nothing of canvases,
checkpoints and logits. Example: `run(weights, pack(pieces, mask_token_id).padded(16, 16))`.
"""

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from spot_dlm.targets.attention import Attention
from spot_dlm.targets.kernels import Kernels, kernels_for
from spot_dlm.targets.packing import Packed
from spot_dlm.targets.products import add_linear, linear
from spot_dlm.targets.weights import Weights

Kept = list[Float[Tensor, "Y 2 Hkv _ _ D"] | None]
"""For every group of a pass, keys and values of its kept segments."""


def run(weights: Weights, batch: Packed) -> tuple[Float[Tensor, "R E"] | None, Kept]:
    """Return the hidden states of the wanted tokens, ready for the head (None if there are none), and what the groups keep."""
    ids, positions, wanted = _to_device(batch, weights.device)
    x = weights.embedding.index_select(0, ids)
    kernels = kernels_for(x)
    x = weights.embedding_norm(x, kernels)
    highest = int(batch.positions.max())
    angles = [table(positions, highest) for table in weights.rotary]
    attentions = [Attention(weights, kernels, group, group.count, batch.rows) for group in batch.groups]
    attended = x.new_zeros(len(x), weights.heads * weights.head_dim)
    kept = _empty(weights, batch)
    last = len(weights.layers) - 1
    for index, layer in enumerate(weights.layers):
        heads = linear(layer.input_norm(x, kernels), layer.qkv).view(len(x), -1, weights.head_dim)
        kernels.turn(heads, layer.head_norms, weights.eps, angles[layer.rotary], weights.heads, weights.kv_heads)
        _keep(batch, kernels, heads, index, kept)
        if index == last:
            if not len(batch.wanted):
                return None, kept
            attentions = _decoded(weights, kernels, batch, attentions)
        for attention in attentions:
            attention(heads, index, attended, layer.window)
        if index == last:
            x, attended = x.index_select(0, wanted), attended.index_select(0, wanted)
        add_linear(attended, layer.output, onto=x)
        layer.feed_forward.add_to(x, layer.mlp_norm(x, kernels), kernels)
    hidden = weights.norm(x, kernels)
    return hidden if weights.prediction is None else weights.prediction(hidden, kernels), kept


def _to_device(batch: Packed, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids, positions and wanted tokens, moved in one transfer."""
    joined = torch.from_numpy(np.concatenate((batch.ids, batch.positions, batch.wanted))).to(device)
    ids, positions, wanted = joined.split([len(batch.ids), len(batch.positions), len(batch.wanted)])
    return ids, positions, wanted


def _decoded(weights: Weights, kernels: Kernels, batch: Packed, attentions: list[Attention]) -> list[Attention]:
    """Return the attentions of the last layer, where kept segments need none."""
    pairs = zip(batch.groups, attentions, strict=True)
    needed = [(g, a) for g, a in pairs if g.decoded or g.also_decoded]
    return [Attention(weights, kernels, g, g.decoded, batch.rows) if g.kept and not g.also_decoded else a for g, a in needed]


def _empty(weights: Weights, batch: Packed) -> Kept:
    shape = (len(weights.layers), 2, weights.kv_heads)
    return [
        weights.embedding.new_empty(*shape, group.kept, group.length, weights.head_dim) if group.kept else None for group in batch.groups
    ]


def _keep(batch: Packed, kernels: Kernels, heads: Float[Tensor, "T H D"], layer: int, kept: Kept) -> None:
    for group, store in zip(batch.groups, kept, strict=True):
        if store is not None:
            kernels.place_pairs(heads, group.start + group.decoded * group.length, group.kept, group.length, store[layer], 0)
