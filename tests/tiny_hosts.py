"""Tiny native hosts with lively random weights and the block-causal adapter on them, without a checkpoint."""

import copy
from typing import Any

import torch

from spot_dlm.interfaces import TargetSpec
from spot_dlm.targets.block_causal import BlockCausalTarget
from spot_dlm.targets.weights import read_weights

VOCAB, MASK = 96, 95
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-3,
}


def build(kind: str, changes: dict[str, Any]) -> tuple[BlockCausalTarget, Any]:
    """Return the adapter and the dense host, "Qwen3" for Qwen3ForCausalLM, biases included."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**(SMALL | changes))
    config._attn_implementation, config._experts_implementation = "sdpa", "eager"
    host = getattr(transformers, f"{kind}ForCausalLM")(config).eval().requires_grad_(False)
    for weight in host.parameters():
        weight.normal_(0, weight.shape[-1] ** -0.5) if weight.ndim > 1 else weight.uniform_(0.5, 1.5)
    for name, buffer in host.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.uniform_(-0.2, 0.2)
    spec = TargetSpec(
        "host", kind, 4, config.vocab_size, config.vocab_size - 1, frozenset(), 64, torch.device("cpu"), "float32", 0, crosses=True
    )
    return BlockCausalTarget(read_weights(copy.deepcopy(host)), spec, None), host
