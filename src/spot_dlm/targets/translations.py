"""How a vendor's config.json becomes the configuration of a native transformers class, and how its tensors are renamed.

Knows nothing of decoding. Example: `translate_llada(config)["hidden_size"]` is the vendor's d_model.
"""

from collections.abc import Mapping
from typing import Any

Config = dict[str, Any]

_DROPPED = ("auto_map", "architectures", "model_type", "attn_implementation", "torch_dtype", "dtype")

LLADA_KEYS = {
    r"^model\.transformer\.ff_out\.": "lm_head.",
    r"^model\.transformer\.wte\.": "model.embed_tokens.",
    r"^model\.transformer\.ln_f\.": "model.norm.",
    r"^model\.transformer\.blocks\.": "model.layers.",
    r"\.attn_norm\.": ".input_layernorm.",
    r"\.ff_norm\.": ".post_attention_layernorm.",
    r"\.q_proj\.": ".self_attn.q_proj.",
    r"\.k_proj\.": ".self_attn.k_proj.",
    r"\.v_proj\.": ".self_attn.v_proj.",
    r"\.attn_out\.": ".self_attn.o_proj.",
    r"\.ff_proj\.": ".mlp.gate_proj.",
    r"\.up_proj\.": ".mlp.up_proj.",
    r"\.ff_out\.": ".mlp.down_proj.",
}
"""LLaDA's tensor names as Llama's. Every rule that matches applies, in order: the head's ff_out comes before the layers' own."""

_LLADA_FIELDS = {
    "hidden_size": "d_model",
    "intermediate_size": "mlp_hidden_size",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "max_position_embeddings": "max_sequence_length",
    "rms_norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta",
    "tie_word_embeddings": "weight_tying",
    "hidden_act": "activation_type",
    "eos_token_id": "eos_token_id",
    "pad_token_id": "pad_token_id",
}


def require(config: Mapping[str, Any], **allowed: tuple[Any, ...]) -> None:
    """Check fields of which our hosts know only some values; a field that is not there passes.

    Raises:
        ValueError: naming the field, its value and what is allowed.
    """
    for name, values in allowed.items():
        if name in config and config[name] not in values:
            raise ValueError(f"{name}={config[name]!r} in config.json is not supported, only {' or '.join(map(repr, values))}")


def keep(config: Mapping[str, Any]) -> Config:
    """Return the fields of a vendor that names them as the native class does."""
    return {name: value for name, value in config.items() if name not in _DROPPED}


def translate_llada(config: Mapping[str, Any]) -> Config:
    """Return LLaDA's configuration (OLMo names) for Llama.

    Raises:
        ValueError: if a field is missing or has a value that Llama cannot express.
    """
    require(
        config,
        block_type=("llama",),
        layer_norm_type=("rms",),
        rope=(True,),
        alibi=(False,),
        include_bias=(False,),
        include_qkv_bias=(False,),
        bias_for_layer_norm=(False,),
        attention_layer_norm=(False,),
        input_emb_norm=(False,),
        scale_logits=(False,),
        multi_query_attention=(None, False),
    )
    missing = [vendor for vendor in _LLADA_FIELDS.values() if vendor not in config]
    if missing:
        raise ValueError(f"{missing[0]} is missing in config.json")
    own = {native: config[vendor] for native, vendor in _LLADA_FIELDS.items()}
    key_heads = config.get("n_kv_heads") or config["n_heads"]
    return own | {"num_key_value_heads": key_heads, "vocab_size": config.get("embedding_size") or config.get("vocab_size")}


def translate_llada_moe(config: Mapping[str, Any]) -> Config:
    """Return LLaDA-MoE's configuration for Qwen3Moe; the weights of a row's experts never add up to 1, whatever norm_topk_prob says.

    Raises:
        ValueError: if a field has a value that Qwen3Moe cannot express.
    """
    require(
        config,
        moe_router_enable_expert_bias=(False, None),
        moe_router_score_function=("softmax",),
        shared_expert_intermediate_size=(None, 0),
        router_num_group=(None, 0, 1),
        routed_scaling_factor=(None, 1),
        partial_rotary_factor=(None, 1),
        clip_qkv=(None,),
        qk_layernorm=(True,),
    )
    sparse = config.get("moe_layer_freq", 1)
    if set(sparse if isinstance(sparse, list) else [sparse]) != {1}:
        raise ValueError(f"moe_layer_freq={sparse!r} in config.json is not supported, only 1 for every layer")
    if "expert_intermediate_size" not in config:
        raise ValueError("expert_intermediate_size is missing in config.json")
    return keep(config) | {
        "moe_intermediate_size": config["expert_intermediate_size"],
        "intermediate_size": config.get("dense_intermediate_size") or config["expert_intermediate_size"],
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def translate_llada2(config: Mapping[str, Any]) -> Config:
    """Return LLaDA2's configuration for Glm4Moe through Sarvam's, whose tensor names are the same.

    Raises:
        ValueError: if a field has a value that Glm4Moe cannot express.
    """
    require(config, score_function=("sigmoid",), use_bias=(False,), norm_head=(False,), use_sliding_window=(False,), use_qk_norm=(True,))
    return {"partial_rotary_factor": 0.5, "use_qk_norm": True} | keep(config)
