"""The weights of an encoder host (ModernBERT) laid out for `forward`: norms with means, gelu, windows, a head of its own.

Knows nothing of checkpoints. Source of the formulas: transformers' ModernBertForMaskedLM. Example: `read_encoder(host)`.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from spot_dlm.targets.feed_forward import GeluDense
from spot_dlm.targets.norms import UNCHANGED, LayerNorm, Norm
from spot_dlm.targets.weights import Layer, Prediction, RotaryTable, Weights, check_rotary, joined

_KINDS = ("full_attention", "sliding_attention")


def check_encoder(host: Any) -> None:
    """Refuse a host that `forward` does not compute.

    Raises:
        ValueError: if an activation is not gelu or its rotary angles change with the length.
    """
    config = host.config
    for name in ("hidden_activation", "classifier_activation"):
        if getattr(config, name) != "gelu":
            raise ValueError(f"{name}={getattr(config, name)!r} is not supported; only gelu is")
    if config.hidden_size // config.num_attention_heads % 2:
        raise ValueError(
            f"hidden_size={config.hidden_size} with num_attention_heads={config.num_attention_heads} gives heads of an odd size, which "
            "rotary positions cannot halve"
        )
    for kind in _kinds(config):
        check_rotary(config.rope_parameters[kind].get("rope_type", "default"))


def read_encoder(host: Any) -> Weights:
    """Take a loaded ModernBertForMaskedLM apart; its own layers are given up, so that no weight stays twice.

    Raises:
        ValueError: as `check_encoder`.
    """
    check_encoder(host)
    config, body = host.config, host.model
    embedding = body.embeddings.tok_embeddings.weight.detach()
    head_dim = config.hidden_size // config.num_attention_heads
    like = embedding[:1]
    return Weights(
        layers=list(_layers(body.layers, config.sliding_window, _kinds(config))),
        embedding=embedding,
        norm=_norm(body.final_norm),
        head=joined([host.decoder]),
        rotary=tuple(RotaryTable(partial(body.rotary_emb, layer_type=kind), head_dim, like, torch.float32) for kind in _kinds(config)),
        eps=float(config.norm_eps),
        heads=config.num_attention_heads,
        kv_heads=config.num_attention_heads,
        head_dim=head_dim,
        intermediate=config.intermediate_size,
        embedding_norm=_norm(body.embeddings.norm),
        prediction=Prediction(joined([host.head.dense]), _norm(host.head.norm)),
    )


def _kinds(config: Any) -> list[str]:
    """Return the kinds of layers that there are: one alone has no angles for the other."""
    return [kind for kind in _KINDS if kind in config.layer_types]


def _layers(layers: Any, window: int, kinds: list[str]) -> Iterator[Layer]:
    for index, layer in enumerate(layers):
        slides = layer.attention_type == "sliding_attention"
        yield Layer(
            input_norm=_norm(layer.attn_norm),
            qkv=joined([layer.attn.Wqkv]),
            head_norms=None,
            output=joined([layer.attn.Wo]),
            mlp_norm=_norm(layer.mlp_norm),
            feed_forward=GeluDense(joined([layer.mlp.Wi]), joined([layer.mlp.Wo])),
            rotary=kinds.index(layer.attention_type),
            window=window if slides else None,
        )
        layers[index] = nn.Identity()


def _norm(module: Any) -> Norm:
    if isinstance(module, nn.Identity):
        return UNCHANGED
    return LayerNorm(module.weight.detach(), None if module.bias is None else module.bias.detach(), float(module.eps))
