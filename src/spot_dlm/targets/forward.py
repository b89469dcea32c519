"""The pass itself: packed tokens through a Llama-like host, every segment attending as its group says (`packing`).

Every row of a result is made by operations whose rounding does not depend on what else is in the pass. Knows nothing of canvases,
checkpoints and logits. Example: `run(weights, pack(pieces, mask_token_id).padded(16, 16))`.
"""

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from spot_dlm.targets.attention import Attention, by_head
from spot_dlm.targets.elementwise import add_linear, gated, linear, rms_norm, rotate
from spot_dlm.targets.packing import Packed
from spot_dlm.targets.weights import Layer, Weights

Kept = list[Float[Tensor, "Y 2 Hkv _ _ D"] | None]
"""For every group of a pass, keys and values of its kept segments."""


def run(weights: Weights, batch: Packed) -> tuple[Float[Tensor, "R E"] | None, Kept]:
    """Return the normalised hidden states of the wanted tokens (None if there are none) and what the groups keep."""
    ids, positions, wanted = _to_device(batch, weights.device)
    x = weights.embedding[ids]
    cos, sin = weights.rotary(positions, int(batch.positions.max()))
    attentions = [Attention(weights, group, group.count, batch.rows) for group in batch.groups]
    attended = x.new_zeros(len(x), weights.heads * weights.head_dim)
    kept = _empty(weights, batch)
    last = len(weights.layers) - 1
    for index, layer in enumerate(weights.layers):
        heads = _heads(weights, layer, x, cos, sin)
        _keep(weights, batch, heads, index, kept)
        if index == last:
            if not len(batch.wanted):
                return None, kept
            attentions = [Attention(weights, group, group.decoded, batch.rows) for group in batch.groups if group.decoded]
        for attention in attentions:
            attention(heads, index, attended)
        if index == last:
            x, attended = x[wanted], attended[wanted]
        add_linear(attended, layer.output, onto=x)
        add_linear(gated(linear(rms_norm(x, layer.mlp_norm, weights.eps), layer.gate_up)), layer.down, onto=x)
    return rms_norm(x, weights.norm, weights.eps), kept


def _to_device(batch: Packed, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids, positions and wanted tokens, moved in one transfer."""
    joined = torch.from_numpy(np.concatenate((batch.ids, batch.positions, batch.wanted))).to(device)
    ids, positions, wanted = joined.split([len(batch.ids), len(batch.positions), len(batch.wanted)])
    return ids, positions, wanted


def _heads(
    weights: Weights, layer: Layer, x: Float[Tensor, "T E"], cos: Float[Tensor, "T D"], sin: Float[Tensor, "T D"]
) -> Float[Tensor, "T H D"]:
    """Return queries (scaled), keys and values by head, queries and keys normalised and rotated."""
    heads = linear(rms_norm(x, layer.input_norm, weights.eps), layer.qkv).view(len(x), -1, weights.head_dim)
    turned = heads[:, : weights.heads + weights.kv_heads]
    normal = turned if layer.head_norms is None else rms_norm(turned, layer.head_norms, weights.eps)
    turned.copy_(rotate(normal, cos, sin))
    heads[:, : weights.heads].mul_(weights.head_dim**-0.5)
    return heads


def _empty(weights: Weights, batch: Packed) -> Kept:
    shape = (len(weights.layers), 2, weights.kv_heads)
    return [
        weights.embedding.new_empty(*shape, group.kept, group.length, weights.head_dim) if group.kept else None for group in batch.groups
    ]


def _keep(weights: Weights, batch: Packed, heads: Float[Tensor, "T H D"], layer: int, kept: Kept) -> None:
    for group, store in zip(batch.groups, kept, strict=True):
        if store is not None:
            first, end = (group.start + n * group.length for n in (group.decoded, group.count))
            store[layer].copy_(by_head(heads[first:end, weights.heads :], group.length))
