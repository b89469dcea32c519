"""The weights of a Llama-like host as plain tensors, laid out for `forward`: fused, on a CPU transposed.

Knows nothing of checkpoints and caches. Example: `read_weights(host)` takes a loaded Qwen3ForCausalLM apart.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

_TABLE_ROWS = 1024
_LENGTH_DEPENDENT = ("dynamic", "longrope")


class Linear(NamedTuple):
    """x @ matrix + bias."""

    matrix: Float[Tensor, "K N"]
    bias: Float[Tensor, " N"] | None


@dataclass(frozen=True)
class Layer:
    """One transformer layer; the norms of query and key heads, one row for each head, are None where the family has none."""

    input_norm: Float[Tensor, " E"]
    qkv: Linear
    head_norms: Float[Tensor, "h D"] | None
    output: Linear
    mlp_norm: Float[Tensor, " E"]
    gate_up: Linear
    down: Linear


@dataclass(frozen=True)
class Weights:
    """A host with silu-gated feed-forward layers, grouped heads and rotary positions."""

    layers: list[Layer]
    embedding: Float[Tensor, "V E"]
    norm: Float[Tensor, " E"]
    head: Linear
    rotary: "RotaryTable"
    eps: float
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int

    @property
    def dtype(self) -> torch.dtype:
        """Number format of activations."""
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights live."""
        return self.embedding.device


class RotaryTable:
    """Cosines and sines of positions, made by the host's own module in fixed stretches, so that their bits depend on the position only."""

    def __init__(self, rotary: Any, like: Float[Tensor, "V E"]) -> None:
        self._rotary, self._like, self._table = rotary, like, like.new_empty(2, 0, 0)

    def __call__(self, positions: Int64[Tensor, " T"], highest: int) -> tuple[Float[Tensor, "T D"], Float[Tensor, "T D"]]:
        """Return cosines and sines; `highest` bounds the positions."""
        while (first := self._table.shape[1]) <= highest:
            steps = torch.arange(first, first + _TABLE_ROWS, device=self._like.device)
            stretch = torch.cat(self._rotary(self._like, steps[None]))
            self._table = torch.cat((self._table, stretch), dim=1) if first else stretch
        cos, sin = self._table.index_select(1, positions).unbind()
        return cos, sin


def read_weights(host: Any) -> Weights:
    """Take a native causal language model apart; its own layers are given up, so that no weight stays twice.

    Raises:
        ValueError: if its activation is not silu or its rotary angles change with the length.
    """
    config, body = host.config, host.model
    if config.hidden_act != "silu":
        raise ValueError(f"hidden_act={config.hidden_act!r} is not supported; only silu is")
    if getattr(body.rotary_emb, "rope_type", "default") in _LENGTH_DEPENDENT:
        raise ValueError(f"rope_type={body.rotary_emb.rope_type!r} is not supported: angles would depend on the length of the text")
    embedding = body.embed_tokens.weight.detach()
    return Weights(
        layers=list(_layers(body.layers)),
        embedding=embedding,
        norm=body.norm.weight.detach(),
        head=_linear([host.lm_head]),
        rotary=RotaryTable(body.rotary_emb, embedding),
        eps=float(config.rms_norm_eps),
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        intermediate=config.intermediate_size,
    )


def _layers(layers: Any) -> Iterator[Layer]:
    for index, layer in enumerate(layers):
        attention, mlp = layer.self_attn, layer.mlp
        yield Layer(
            input_norm=layer.input_layernorm.weight.detach(),
            qkv=_linear([attention.q_proj, attention.k_proj, attention.v_proj]),
            head_norms=_head_norms(attention),
            output=_linear([attention.o_proj]),
            mlp_norm=layer.post_attention_layernorm.weight.detach(),
            gate_up=_linear([mlp.gate_proj, mlp.up_proj]),
            down=_linear([mlp.down_proj]),
        )
        layers[index] = nn.Identity()


def _head_norms(attention: Any) -> Float[Tensor, "h D"] | None:
    if not hasattr(attention, "q_norm"):
        return None
    size = attention.head_dim
    queries, keys = attention.q_proj.out_features // size, attention.k_proj.out_features // size
    norms = (attention.q_norm.weight.detach().expand(queries, size), attention.k_norm.weight.detach().expand(keys, size))
    return torch.cat(norms)


def _linear(parts: Sequence[nn.Linear]) -> Linear:
    """Join layers that read the same input; on a CPU the product with a transposed matrix is up to twice as fast."""
    weights = [part.weight.detach() for part in parts]
    matrix = (torch.cat(weights) if len(weights) > 1 else weights[0]).t()
    biases = [part.bias for part in parts]
    if all(bias is None for bias in biases):
        bias = None
    else:
        bias = torch.cat([w.new_zeros(len(w)) if b is None else b.detach() for w, b in zip(weights, biases, strict=True)])
    return Linear(matrix.contiguous() if matrix.device.type == "cpu" else matrix, bias)
