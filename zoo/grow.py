"""Begin a network of another shape with the weights of a trained one: wider, deeper, fewer key heads, no norms of heads, experts.

What can be kept exactly is (Net2Net, Chen et al. 2016): new hidden units, heads and layers write nothing at first. The rest is near:
norms of heads become their mean factor, key heads the mean of their group (Ainslie et al. 2023), experts random parts of the dense layer
(sparse upcycling, Komatsuzaki et al. 2023).
"""

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor

from zoo.model import MLP, Attention, BlockDiffusionModel, Experts, Layer, ModelConfig, RMSNorm


@torch.no_grad()
def grow(model: BlockDiffusionModel, donor: BlockDiffusionModel, layers: tuple[int | None, ...], probe: Tensor) -> None:
    """Overwrite `model`'s fresh weights with the donor's.

    Args:
        model: a fresh network; at least as wide as the donor in every dimension but the key heads'.
        donor: a trained one with norms of heads, as many key heads as queries and a tied head.
        layers: the donor's layer for each of the model's; None: it stays fresh, which adds nothing to the residual.
        probe: ids [B, S] on which the mean size of the donor's heads is measured.

    Raises:
        ValueError: if the number of layers differs or a dimension is too small.
    """
    new, old = model.config, donor.config
    if len(layers) != new.num_layers:
        raise ValueError(f"{len(layers)} donor layers for a network of {new.num_layers}")
    if new.hidden_size < old.hidden_size or new.num_heads < old.num_heads or new.head_dim != old.head_dim:
        raise ValueError(f"{new} cannot begin as {old}: it must not be narrower")
    sizes = _sizes_of_heads(donor, probe)
    model.model.embed_tokens.weight.zero_()
    _place(model.model.embed_tokens.weight, donor.model.embed_tokens.weight)
    if not new.tied:
        _place(model.lm_head.weight, donor.model.embed_tokens.weight)
    _place_norm(model.model.norm, donor.model.norm)
    for layer, source in zip(model.model.layers, layers, strict=True):
        if source is not None:
            _grow_layer(cast(Layer, layer), cast(Layer, donor.model.layers[source]), new, sizes[source])


def _grow_layer(layer: Layer, source: Layer, config: ModelConfig, sizes: Mapping[str, Tensor]) -> None:
    _place_norm(layer.input_layernorm, source.input_layernorm)
    _place_norm(layer.post_attention_layernorm, source.post_attention_layernorm)
    _grow_attention(layer.self_attn, source.self_attn, config, sizes)
    if isinstance(layer.mlp, Experts):
        _split(layer.mlp, cast(MLP, source.mlp), config)
        return
    for name in ("gate_proj", "up_proj", "down_proj"):
        _place(getattr(layer.mlp, name).weight, getattr(source.mlp, name).weight)


def _grow_attention(attention: Attention, source: Attention, config: ModelConfig, sizes: Mapping[str, Tensor]) -> None:
    for kind in ("q", "k"):
        weight = getattr(source, f"{kind}_proj").weight
        norm: RMSNorm = getattr(source, f"{kind}_norm")
        if config.qk_norm:
            getattr(attention, f"{kind}_norm").weight.copy_(norm.weight)
        else:
            factor = norm.weight[None] / sizes[kind][:, None]  # [heads, head_dim]
            weight = weight * factor.reshape(-1, 1)
        _place(getattr(attention, f"{kind}_proj").weight, weight if kind == "q" else _mean_of_groups(weight, config))
    _place(attention.v_proj.weight, _mean_of_groups(source.v_proj.weight, config))
    _place(attention.o_proj.weight, source.o_proj.weight)


def _mean_of_groups(weight: Tensor, config: ModelConfig) -> Tensor:
    """Return key or value weights [heads * head_dim, d] with one head for each group of queries."""
    if config.key_heads == config.num_heads:
        return weight
    heads = weight.unflatten(0, (config.key_heads, config.num_heads // config.key_heads, config.head_dim))
    return heads.mean(1).flatten(0, 1)


def _split(experts: Experts, dense: MLP, config: ModelConfig) -> None:
    """Give every expert a random part of the dense layer, scaled so that the sum is the dense output on average."""
    width = dense.gate_proj.weight.shape[0]
    scale = config.num_experts * width / (config.experts_per_token * config.intermediate_size)
    units = torch.cat([torch.randperm(width)[: config.intermediate_size] for _ in range(config.num_experts)])
    _place(experts.gate_proj.weight, dense.gate_proj.weight[units])
    _place(experts.up_proj.weight, dense.up_proj.weight[units])
    _place(experts.down_proj.weight, dense.down_proj.weight[:, units] * scale)


def _place(weight: Tensor, source: Tensor) -> None:
    """Copy into the upper left corner."""
    weight[: source.shape[0], : source.shape[1]] = source


def _place_norm(norm: RMSNorm, source: RMSNorm) -> None:
    """Copy a norm's weights; over more dimensions that are zero the mean square is smaller, which they make good."""
    size = source.weight.shape[0]
    norm.weight[:size] = source.weight * (size / norm.weight.shape[0]) ** 0.5


def _sizes_of_heads(donor: BlockDiffusionModel, probe: Tensor) -> list[dict[str, Tensor]]:
    """Return the root mean square of every query and key head of every layer on the probe, each [heads]."""
    sizes: list[dict[str, Tensor]] = [{} for _ in donor.model.layers]
    hooks = [
        getattr(layer.self_attn, f"{kind}_norm").register_forward_pre_hook(
            lambda _module, inputs, kept=kept, kind=kind: kept.__setitem__(kind, inputs[0].square().mean(dim=(0, 1, 3)).sqrt())
        )
        for layer, kept in zip(donor.model.layers, sizes, strict=True)
        for kind in ("q", "k")
    ]
    length = probe.shape[1]
    donor.hidden(probe, torch.arange(length).expand_as(probe), torch.ones(1, 1, length, length, dtype=torch.bool))
    for hook in hooks:
        hook.remove()
    return sizes
