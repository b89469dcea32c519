"""config.json and tensor names of the checkpoints that zoo/export.py writes, in the layouts of the families' own authors.

Facts about the layouts are in docs/families.md. Example: `config_json("dream", config, ids, 0)["model_type"]` is "Dream".
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from zoo.model import ModelConfig


class SpecialIds(NamedTuple):
    """The ids that config.json names."""

    end: int
    mask: int


Document = dict[str, Any]


def _common(config: ModelConfig, ids: SpecialIds) -> Document:
    """Return what every layout but LLaDA's calls by the names of transformers."""
    return {
        "attention_dropout": 0.0,
        "bos_token_id": ids.end,
        "eos_token_id": ids.end,
        "pad_token_id": ids.end,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_positions,
        "max_window_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.key_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": config.rope_theta,
        "sliding_window": None,
        "tie_word_embeddings": config.tied,
        "use_cache": False,
        "use_sliding_window": False,
        "vocab_size": config.vocab_size,
    }


def _sdar(config: ModelConfig, ids: SpecialIds, block_length: int) -> Document:
    own = {"architectures": ["SDARForCausalLM"], "model_type": "sdar", "attention_bias": False, "block_size": block_length}
    return own | _common(config, ids) | {"head_dim": config.head_dim, "mask_token_id": ids.mask}


def _bd3lm(config: ModelConfig, ids: SpecialIds, block_length: int) -> Document:
    own = {"architectures": ["A2DQwen3LMHeadModel"], "model_type": "a2d-qwen3", "attention_bias": False, "block_size": block_length}
    return own | _common(config, ids) | {"head_dim": config.head_dim, "mask_token_id": ids.mask}


def _dream(config: ModelConfig, ids: SpecialIds, _: int) -> Document:
    return {"architectures": ["DreamModel"], "model_type": "Dream"} | _common(config, ids) | {"mask_token_id": ids.mask}


def _fast_dllm_v2(config: ModelConfig, ids: SpecialIds, block_length: int) -> Document:
    own = {"architectures": ["Fast_dLLM_QwenForCausalLM"], "model_type": "Fast_dLLM_Qwen", "bd_size": block_length}
    return own | _common(config, ids) | {"mask_token_id": ids.mask}


def _llada(config: ModelConfig, ids: SpecialIds, _: int) -> Document:
    return {
        "architectures": ["LLaDAModelLM"],
        "model_type": "llada",
        "activation_type": "silu",
        "alibi": False,
        "attention_layer_norm": False,
        "bias_for_layer_norm": False,
        "block_type": "llama",
        "d_model": config.hidden_size,
        "embedding_size": config.vocab_size,
        "eos_token_id": ids.end,
        "include_bias": False,
        "include_qkv_bias": False,
        "input_emb_norm": False,
        "layer_norm_type": "rms",
        "mask_token_id": ids.mask,
        "max_sequence_length": config.max_positions,
        "mlp_hidden_size": config.intermediate_size,
        "multi_query_attention": None,
        "n_heads": config.num_heads,
        "n_kv_heads": config.key_heads,
        "n_layers": config.num_layers,
        "pad_token_id": ids.end,
        "rms_norm_eps": config.rms_norm_eps,
        "rope": True,
        "rope_full_precision": True,
        "rope_theta": config.rope_theta,
        "scale_logits": False,
        "use_cache": False,
        "vocab_size": config.vocab_size,
        "weight_tying": config.tied,
    }


def _llada_moe(config: ModelConfig, ids: SpecialIds, _: int) -> Document:
    common = {k: v for k, v in _common(config, ids).items() if k != "intermediate_size"}
    return {
        "architectures": ["LLaDAMoEModelLM"],
        "model_type": "llada",
        "attention_bias": False,
        "clip_qkv": None,
        "dense_intermediate_size": config.intermediate_size,
        "expert_intermediate_size": config.intermediate_size,
        "head_dim": config.head_dim,
        "mask_token_id": ids.mask,
        "moe_layer_freq": [1] * config.num_layers,
        "moe_router_enable_expert_bias": False,
        "moe_router_score_function": "softmax",
        "norm_topk_prob": None,
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "partial_rotary_factor": 1,
        "qk_layernorm": True,
        "routed_scaling_factor": 1,
        "router_num_group": None,
        "shared_expert_intermediate_size": None,
    } | common


_LAYOUTS: dict[str, Callable[[ModelConfig, SpecialIds, int], Document]] = {
    "sdar": _sdar,
    "bd3lm": _bd3lm,
    "dream": _dream,
    "fast_dllm_v2": _fast_dllm_v2,
    "llada": _llada,
    "llada_moe": _llada_moe,
}


def config_json(family: str, config: ModelConfig, ids: SpecialIds, block_length: int) -> Document:
    """Return config.json in the key names of the family's own checkpoints; `block_length` is written where the family says it there."""
    return _LAYOUTS[family](config, ids, block_length)


_LLADA_NAMES = (
    ("model.embed_tokens.", "model.transformer.wte."),
    ("model.norm.", "model.transformer.ln_f."),
    ("lm_head.", "model.transformer.ff_out."),
    ("model.layers.", "model.transformer.blocks."),
    (".input_layernorm.", ".attn_norm."),
    (".post_attention_layernorm.", ".ff_norm."),
    (".self_attn.o_proj.", ".attn_out."),
    (".self_attn.", "."),
    (".mlp.gate_proj.", ".ff_proj."),
    (".mlp.up_proj.", ".up_proj."),
    (".mlp.down_proj.", ".ff_out."),
)


def checkpoint_tensors(family: str, config: ModelConfig, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the training names' tensors under the family's names; experts one by one."""
    named: dict[str, Tensor] = {}
    for name, value in weights.items():
        if config.num_experts and ".mlp." in name and not name.endswith(".mlp.gate.weight"):
            head, _, kind = name.partition(".mlp.")
            parts = value.chunk(config.num_experts, dim=1 if kind.startswith("down_proj") else 0)
            named |= {f"{head}.mlp.experts.{n}.{kind}": part for n, part in enumerate(parts)}
            continue
        for ours, theirs in _LLADA_NAMES if family == "llada" else ():
            name = name.replace(ours, theirs)
        named[name] = value
    return named
