"""Llama-like hosts whose layers differ: biases, no norms of queries and keys, tied or grouped heads, other rotary angles."""

import copy

import numpy as np
import pytest
import torch

from spot_dlm.interfaces import TargetSpec
from spot_dlm.state import MASKED
from spot_dlm.targets.block_causal import BlockCausalTarget
from spot_dlm.targets.weights import read_weights

SMALL = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-3,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 16}
HOSTS = {
    "qwen2": ("Qwen2", {}),
    "llama": ("Llama", {"rope_theta": 5e3}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    "qwen3-biases": ("Qwen3", {"attention_bias": True, "head_dim": 16, "tie_word_embeddings": True}),
    "qwen3-yarn": ("Qwen3", {"head_dim": 16, "rope_parameters": YARN, "max_position_embeddings": 64}),
}
MASK = 95


def build(kind, changes):
    """Return (adapter, dense host) with lively random weights, biases included."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**(SMALL | changes))
    config._attn_implementation = "sdpa"
    host = getattr(transformers, f"{kind}ForCausalLM")(config).eval().requires_grad_(False)
    for weight in host.parameters():
        weight.normal_(0, weight.shape[-1] ** -0.5) if weight.ndim == 2 else weight.uniform_(0.5, 1.5)
    spec = TargetSpec("host", kind, 4, SMALL["vocab_size"], MASK, frozenset(), 64, torch.device("cpu"), "float32", 0, crosses=True)
    return BlockCausalTarget(read_weights(copy.deepcopy(host)), spec, None), host


@pytest.mark.parametrize("name", HOSTS)
@torch.inference_mode()
def test_logits_are_the_host_s(name):
    target, host = build(*HOSTS[name])
    ids = np.random.default_rng(0).integers(0, MASK, 24)
    prefix = target.prefill(ids[:16], 4)
    target.evaluate(prefix, ids[None, 16:20])
    assert target.commit(prefix, ids[16:20]) == 0
    canvas = np.where([False, True, False, True], MASKED, ids[20:])
    block = torch.arange(24) // 4
    visible = (block[None, :] <= block[:, None])[None, None]
    dense = np.where(np.arange(24) < 20, ids, np.append(ids[:20], np.where(canvas == MASKED, MASK, canvas)))
    out = host(torch.from_numpy(dense)[None], attention_mask=visible, position_ids=torch.arange(24)[None], use_cache=False)
    found = target.evaluate(prefix, canvas[None]).packed
    torch.testing.assert_close(found[:, :MASK], out.logits[0, [21, 23], :MASK], rtol=0, atol=1e-4)


def test_unsupported_hosts_are_refused():
    with pytest.raises(ValueError, match="hidden_act='gelu'"):
        build("Qwen3", {"hidden_act": "gelu", "head_dim": 16})
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    with pytest.raises(ValueError, match="rope_type='dynamic'"):
        build("Llama", {"rope_parameters": dynamic})
