"""The weights of a host as plain tensors, laid out for `forward`: fused, on a CPU transposed; `read_weights` takes Llama-like ones apart.

Knows nothing of checkpoints and caches. Example: `read_weights(host)` takes a loaded Qwen3ForCausalLM apart.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from spot_dlm.targets.feed_forward import Dense, Experts, FeedForward, SigmoidRouter, SoftmaxRouter
from spot_dlm.targets.kernels import Kernels
from spot_dlm.targets.norms import UNCHANGED, Norm, RmsNorm
from spot_dlm.targets.plain import gelu
from spot_dlm.targets.products import Linear, least_columns, linear

_TABLE_ROWS = 1024
_LENGTH_DEPENDENT = ("dynamic", "longrope")


class Prediction(NamedTuple):
    """What an encoder does with a final hidden state before its logits: norm(gelu(dense))."""

    dense: Linear
    norm: Norm

    def __call__(self, hidden: Float[Tensor, "R E"], kernels: Kernels) -> Float[Tensor, "R E"]:
        """Return the states to project."""
        return self.norm(gelu(linear(hidden, self.dense)), kernels)


@dataclass(frozen=True)
class Layer:
    """One transformer layer.

    Args:
        input_norm, mlp_norm: before the attention and the feed-forward part.
        qkv: queries, keys and values of all heads.
        head_norms: of query and key heads, one row for each head; None where the family has none.
        output: of the attention.
        rotary: which of the host's tables turns its heads.
        window: a token sees others that are at most so many positions away; None: all.
    """

    input_norm: Norm
    qkv: Linear
    head_norms: Float[Tensor, "h D"] | None
    output: Linear
    mlp_norm: Norm
    feed_forward: FeedForward
    rotary: int = 0
    window: int | None = None


@dataclass(frozen=True)
class Weights:
    """A host with gated feed-forward layers, grouped heads and rotary positions.

    Args:
        norm: after the last layer.
        head: from there to logits.
        rotary: tables of angles, of which every layer names one.
        eps: of the norms of heads.
        embedding_norm: before the first layer.
        prediction: between `norm` and `head`, as in encoders.
    """

    layers: list[Layer]
    embedding: Float[Tensor, "V E"]
    norm: Norm
    head: Linear
    rotary: "tuple[RotaryTable, ...]"
    eps: float
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    embedding_norm: Norm = UNCHANGED
    prediction: Prediction | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Number format of activations."""
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights live."""
        return self.embedding.device


class RotaryTable:
    """Cosines and sines of positions, made by the host's own module in fixed stretches, so that their bits depend on the position only.

    Args:
        rotary: the host's module.
        head_dim: numbers of a head; those beyond the module's own are not turned (cosine 1, sine 0), their order is `_head_order`'s.
        like: a tensor of the device and number format in which the module makes angles.
        dtype: number format in which they are kept, and heads turned; default: the same.
    """

    def __init__(self, rotary: Any, head_dim: int, like: Float[Tensor, "V E"], dtype: torch.dtype | None = None) -> None:
        self._rotary, self._half, self._like = rotary, head_dim // 2, like
        self._table = like.new_empty(2, 0, 0, dtype=dtype or like.dtype)

    def __call__(self, positions: Int64[Tensor, " T"], highest: int) -> tuple[Float[Tensor, "T D"], Float[Tensor, "T D"]]:
        """Return cosines and sines; `highest` bounds the positions."""
        while (first := self._table.shape[1]) <= highest:
            steps = torch.arange(first, first + _TABLE_ROWS, device=self._like.device)
            stretch = self._whole(torch.cat(self._rotary(self._like, steps[None]))).to(self._table.dtype)
            self._table = torch.cat((self._table, stretch), dim=1) if first else stretch
        cos, sin = self._table.index_select(1, positions).unbind()
        return cos, sin

    def _whole(self, turned: Float[Tensor, "2 T r"]) -> Float[Tensor, "2 T D"]:
        if turned.shape[2] == 2 * self._half:
            return turned
        whole = turned.new_zeros(2, turned.shape[1], 2, self._half)
        whole[0] = 1
        whole[..., : turned.shape[2] // 2] = turned.view(2, -1, 2, turned.shape[2] // 2)
        return whole.flatten(2)


def check_host(host: Any) -> None:
    """Refuse a host that `forward` does not compute.

    Raises:
        ValueError: if its activation is not silu or its rotary angles change with the length.
    """
    config, body = host.config, host.model
    if config.hidden_act != "silu":
        raise ValueError(f"hidden_act={config.hidden_act!r} is not supported; only silu is")
    check_rotary(getattr(body.rotary_emb, "rope_type", "default"))


def check_rotary(rope_type: str) -> None:
    """Refuse angles that change with the length.

    Raises:
        ValueError: naming the type.
    """
    if rope_type in _LENGTH_DEPENDENT:
        raise ValueError(f"rope_type={rope_type!r} is not supported: angles would depend on the length of the text")


def read_weights(host: Any, rotary_float32: bool = False, shared: bool = False) -> Weights:
    """Take a native causal language model apart; its own layers are given up, so that no weight stays twice.

    Args:
        host: a loaded Llama, Qwen2, Qwen3, Qwen3Moe or Glm4Moe model.
        rotary_float32: turn heads in float32 whatever the number format (LLaDA).
        shared: let the host live on: what is joined here becomes the storage of its weights, where the layout allows that.

    Raises:
        ValueError: if its activation is not silu or its rotary angles change with the length.
    """
    check_host(host)
    config, body = host.config, host.model
    embedding = body.embed_tokens.weight.detach()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    order = _head_order(2 * len(body.rotary_emb.inv_freq), head_dim)
    return Weights(
        layers=list(_layers(body.layers, order.to(embedding.device), float(config.rms_norm_eps), shared)),
        embedding=embedding,
        norm=RmsNorm(body.norm.weight.detach(), float(config.rms_norm_eps)),
        head=joined([host.lm_head], shared and host.lm_head.weight is not body.embed_tokens.weight),
        rotary=(RotaryTable(body.rotary_emb, head_dim, embedding[:1].float() if rotary_float32 else embedding),),
        eps=float(config.rms_norm_eps),
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        intermediate=config.intermediate_size,
    )


def _layers(layers: Any, order: Int64[Tensor, " D"], eps: float, shared: bool) -> Iterator[Layer]:
    for index, layer in enumerate(layers):
        attention = layer.self_attn
        turned = not torch.equal(order, torch.arange(len(order), device=order.device))  # in another order, which the host cannot use
        yield Layer(
            input_norm=RmsNorm(layer.input_layernorm.weight.detach(), eps),
            qkv=_ordered(joined([attention.q_proj, attention.k_proj, attention.v_proj], shared and not turned), attention, order),
            head_norms=_head_norms(attention, order),
            output=joined([attention.o_proj], shared),
            mlp_norm=RmsNorm(layer.post_attention_layernorm.weight.detach(), eps),
            feed_forward=_experts(layer.mlp, shared) if hasattr(layer.mlp, "experts") else _dense(layer.mlp, shared),
        )
        if not shared:
            layers[index] = nn.Identity()


def _head_order(turned: int, head_dim: int) -> Int64[Tensor, " D"]:
    """Return the order of a head's numbers in which number k and k + D / 2 are turned together, or neither is.

    The products of queries and keys do not depend on it, so that a host which turns only the first `turned` numbers runs as one that
    turns all of them.
    """
    halves = (torch.arange(turned).view(2, -1), torch.arange(turned, head_dim).view(2, -1))
    return torch.cat(halves, dim=1).flatten()


def _ordered(qkv: Linear, attention: Any, order: Int64[Tensor, " D"]) -> Linear:
    """Return the projection with the numbers of query and key heads in another order."""
    size = len(order)
    if torch.equal(order, torch.arange(size, device=order.device)):
        return qkv
    columns = torch.arange(qkv.matrix.shape[1], device=order.device).view(-1, size)
    turned = len(columns) - attention.v_proj.out_features // size
    columns[:turned] = columns[:turned, order]
    return Linear(qkv.matrix[:, columns.flatten()], None if qkv.bias is None else qkv.bias[columns.flatten()])


def _head_norms(attention: Any, order: Int64[Tensor, " D"]) -> Float[Tensor, "h D"] | None:
    if not hasattr(attention, "q_norm"):
        return None
    size = attention.head_dim
    queries, keys = attention.q_proj.out_features // size, attention.k_proj.out_features // size
    norms = (attention.q_norm.weight.detach().expand(queries, size), attention.k_norm.weight.detach().expand(keys, size))
    return torch.cat(norms)[:, order]


def _dense(mlp: Any, shared: bool) -> Dense:
    return Dense(joined([mlp.gate_proj, mlp.up_proj], shared), joined([mlp.down_proj], shared))


def _experts(mlp: Any, shared: bool) -> Experts:
    """Take a mixture apart: Glm4Moe's, whose gate has a bias for the choice, or Qwen3Moe's."""
    gate, always = mlp.gate, getattr(mlp, "shared_experts", None)
    router: SoftmaxRouter | SigmoidRouter
    if hasattr(gate, "e_score_correction_bias"):
        router = SigmoidRouter(
            gate=_gate(gate.weight.detach().float()),
            bias=gate.e_score_correction_bias.detach().float(),
            top=gate.top_k,
            groups=gate.num_group,
            kept_groups=gate.topk_group,
            normalised=bool(gate.norm_topk_prob),
            scale=float(gate.routed_scaling_factor),
        )
    else:
        router = SoftmaxRouter(_gate(gate.weight.detach()), len(gate.weight), gate.top_k, bool(gate.norm_topk_prob))
    pairs = [_transposed(part.detach()) for part in (mlp.experts.gate_up_proj, mlp.experts.down_proj)]
    if shared:
        mlp.experts.gate_up_proj.data, mlp.experts.down_proj.data = (part.transpose(-1, -2) for part in pairs)
    experts = [Dense(Linear(gate_up, None), Linear(down, None)) for gate_up, down in zip(*(p.unbind() for p in pairs), strict=True)]
    return Experts(router, experts, None if always is None else _dense(always, shared))


def _gate(weight: Float[Tensor, "n E"]) -> Linear:
    """Return the product that scores experts, padded to `least_columns`."""
    return Linear(_transposed(nn.functional.pad(weight, (0, 0, 0, max(0, least_columns(weight.device) - len(weight))))), None)


def joined(parts: Sequence[nn.Linear], shared: bool = False) -> Linear:
    """Return layers that read the same input as one product; `shared`: they go on with parts of its matrix as their weights."""
    weights = [part.weight.detach() for part in parts]
    biases = [part.bias for part in parts]
    if all(bias is None for bias in biases):
        bias = None
    else:
        bias = torch.cat([w.new_zeros(len(w)) if b is None else b.detach() for w, b in zip(weights, biases, strict=True)])
    matrix = _transposed(torch.cat(weights) if len(weights) > 1 else weights[0])
    if shared:
        for part, own in zip(parts, matrix.split([len(w) for w in weights], dim=1), strict=True):
            part.weight.data = own.T
    return Linear(matrix, bias)


def _transposed(weight: Float[Tensor, "... N K"]) -> Float[Tensor, "... K N"]:
    """Return the matrix of x @ matrix; on a CPU the product with one that lies in memory so is up to twice as fast."""
    matrix = weight.transpose(-1, -2)
    return matrix.contiguous() if matrix.device.type == "cpu" else matrix
