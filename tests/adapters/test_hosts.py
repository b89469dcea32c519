"""Llama-like hosts whose layers differ: biases, norms, tied or grouped heads, rotary angles, experts and their routers."""

import numpy as np
import pytest
import torch

from spot_dlm.state import MASKED
from tests.tiny_hosts import MASK, build

YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 16}
EXPERTS = {"num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 16}
GROUPED = EXPERTS | {"n_routed_experts": 12, "n_group": 4, "topk_group": 2, "use_qk_norm": True, "routed_scaling_factor": 2.5}
HOSTS = {
    "qwen2": ("Qwen2", {}),
    "llama": ("Llama", {"rope_theta": 5e3}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    "qwen3-biases": ("Qwen3", {"attention_bias": True, "head_dim": 16, "tie_word_embeddings": True}),
    "qwen3-yarn": ("Qwen3", {"head_dim": 16, "rope_parameters": YARN, "max_position_embeddings": 64}),
    "qwen3moe": ("Qwen3Moe", EXPERTS | {"num_experts": 8, "norm_topk_prob": False}),
    "qwen3moe-normalised": ("Qwen3Moe", EXPERTS | {"num_experts": 8, "norm_topk_prob": True, "mlp_only_layers": [0]}),
    "glm4moe-half-rotary": ("Glm4Moe", GROUPED | {"first_k_dense_replace": 1}),
    "glm4moe-plain": ("Glm4Moe", GROUPED | {"norm_topk_prob": False, "first_k_dense_replace": 0, "partial_rotary_factor": 1.0}),
    "glm4moe-biases": ("Glm4Moe", GROUPED | {"attention_bias": True, "use_qk_norm": False, "partial_rotary_factor": 0.25}),
}


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
