"""Attention of N block states over one shared prefix: the prefix's keys and values exist once, whatever N is.

Registered with transformers as an attention implementation, so the host's own layers call it. Every row of the result is
computed by operations whose rounding does not depend on the number of rows (tests/lossless/test_row_invariance.py).
"""

from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.functional import pad

NAME = "spot_shared_prefix"
_ALIGNED = 16  # floats in 64 bytes: BLAS rounds small matrices differently where the addresses of two rows' matrices differ in alignment


@dataclass
class PrefixCache:
    """Keys and values of the complete blocks, one growing buffer pair per layer; `length` tokens are valid."""

    block_length: int
    length: int = 0
    keys: list[Float[Tensor, "Hkv C D"]] = field(default_factory=list)
    values: list[Float[Tensor, "Hkv C D"]] = field(default_factory=list)

    def append(self, new_keys: list[Float[Tensor, "1 Hkv S D"]], new_values: list[Float[Tensor, "1 Hkv S D"]]) -> None:
        """Append S tokens to every layer, doubling the buffers where they are full."""
        size = new_keys[0].shape[2]
        if not self.keys:
            self.keys = [k.new_empty(k.shape[1], 0, k.shape[3]) for k in new_keys]
            self.values = [v.new_empty(v.shape[1], 0, v.shape[3]) for v in new_values]
        for buffers, news in ((self.keys, new_keys), (self.values, new_values)):
            for layer, new in enumerate(news):
                if buffers[layer].shape[1] < self.length + size:
                    capacity = max(2 * buffers[layer].shape[1], self.length + size)
                    grown = new.new_empty(new.shape[1], capacity, new.shape[3])
                    grown[:, : self.length] = buffers[layer][:, : self.length]
                    buffers[layer] = grown
                buffers[layer][:, self.length : self.length + size] = new[0]
        self.length += size


def shared_prefix_attention(
    module: nn.Module,
    query: Float[Tensor, "N Hq L D"],
    key: Float[Tensor, "N Hkv L D"],
    value: Float[Tensor, "N Hkv L D"],
    attention_mask: Bool[Tensor, "1 1 l s"],
    scaling: float,
    prefix: PrefixCache,
    written: tuple[list[Tensor], list[Tensor]] | None = None,
    **_: object,
) -> tuple[Float[Tensor, "N L Hq D"], None]:
    """Attend from every row to the prefix and to the row itself.

    Args:
        module: the host's attention layer; gives the layer number.
        query: rotated queries.
        key: rotated keys of the rows themselves.
        value: values of the rows themselves.
        attention_mask: True = attend; [1, 1, 1, 1] where everything is visible, else [1, 1, L, prefix + L].
        scaling: factor of the scores.
        prefix: the shared cache, read only here.
        written: lists that receive this pass's keys and values, where the caller wants to append them.
    """
    rows, query_heads, length, size = query.shape
    heads = key.shape[1]
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    if written is not None:
        written[0].append(key)
        written[1].append(value)
    grouped = query.reshape(rows, heads, query_heads // heads * length, size) * scaling
    extra = -length % _ALIGNED
    own = grouped @ pad(key, (0, 0, 0, extra)).transpose(-1, -2)
    own[..., length:] = -torch.inf
    cached = prefix.length
    if cached:
        packed = grouped.transpose(0, 1).reshape(heads, -1, size)
        shared = packed @ prefix.keys[layer][:, :cached].transpose(-1, -2)
        scores = torch.cat((shared.view(heads, rows, -1, cached).transpose(0, 1), own), dim=-1)
    else:
        scores = own
    if attention_mask.numel() > 1:
        visible = pad(attention_mask[0, 0], (0, extra)).repeat(query_heads // heads, 1)
        scores = scores.masked_fill(~visible, -torch.inf)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype)
    out = weights[..., cached:].contiguous() @ pad(value, (0, 0, 0, extra))
    if cached:
        packed = weights[..., :cached].transpose(0, 1).reshape(heads, -1, cached)
        out = out + (packed @ prefix.values[layer][:, :cached]).view(heads, rows, -1, size).transpose(0, 1)
    return out.reshape(rows, query_heads, length, size).transpose(1, 2), None
