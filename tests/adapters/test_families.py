"""Which row a checkpoint gets, which checkpoints are refused and why, and what is said of a broken one."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from spot_dlm.presets import parse_sampler
from spot_dlm.targets import load_target
from spot_dlm.targets.checkpoints import load_host
from spot_dlm.targets.families import FAMILIES, find_family

GOLDEN = Path(__file__).parents[1] / "golden"
ROWS = {family.name: family for family in FAMILIES}
RECOGNISED = [
    ("LLaDAModelLM", "GSAI-ML/LLaDA-8B-Instruct", "llada"),
    ("LLaDAModelLM", "GSAI-ML/LLaDA-1.5", "llada"),
    ("ILLaDAForCausalLM", "GSAI-ML/iLLaDA-8B-Base", "illada"),
    ("LLaDAMoEModelLM", "inclusionAI/LLaDA-MoE-7B-A1B-Instruct", "llada_moe"),
    ("LLaDA2MoeModelLM", "inclusionAI/LLaDA2.0-mini", "llada2"),
    ("LLaDA2MoeModelLM", "inclusionAI/LLaDA2.1-flash", "llada2"),
    ("DreamModel", "Dream-org/Dream-v0-Instruct-7B", "dream"),
    ("DreamModel", "apple/DiffuCoder-7B-Instruct", "dream"),
    ("DreamModel", "Dream-org/DreamReasoner-8B", "dream_reasoner"),
    ("Qwen2ForCausalLM", "fredzzp/open-dcoder-0.5B", "open-dcoder"),
    ("SDARForCausalLM", "JetLM/SDAR-1.7B-Chat-b16", "sdar"),
    ("SDARMoeForCausalLM", "JetLM/SDAR-30B-A3B-Chat", "sdar_moe"),
    ("StableDiffcoderForCausalLM", "ByteDance-Seed/Stable-DiffCoder-8B-Instruct", "stable_diffcoder"),
    ("Fast_dLLM_QwenForCausalLM", "Efficient-Large-Model/Fast_dLLM_v2_1.5B", "fast_dllm_v2"),
    ("A2DQwen3LMHeadModel", "dllm-hub/Qwen3-0.6B-diffusion-mdlm-v0.1", "a2d"),
    ("A2DQwen2LMHeadModel", "dllm-hub/Qwen2.5-Coder-0.5B-Instruct-diffusion-bd3lm-v0.1", "bd3lm"),
    ("A2DLlamaLMHeadModel", "/models/bd3lm/mine/", "a2d"),
    ("ModernBertForMaskedLM", "dllm-hub/ModernBERT-base-chat-v0.1", "modernbert"),
]
REFUSED = [
    ("DiffusionGemmaForBlockDiffusion", "google/diffusiongemma-26B-A4B-it", "no mask"),
    ("LLaDA2MoeModelLM", "inclusionAI/LLaDA2.2-flash", "deletes and splits"),
    ("DreamModel", "Dream-org/DreamOn-v0-7B", "inserts and deletes"),
    ("WeDLMForCausalLM", "tencent/WeDLM-8B-Instruct", "order of the commits"),
    ("BD3LM", "kuleshov-group/bd3lm-owt-block_size4", "random order"),
    ("MDLM", "kuleshov-group/mdlm-owt", "random order"),
    ("NemotronLabsDiffusionModel", "nvidia/Nemotron-Labs-Diffusion-8B", "causal"),
    ("ModernBertForMaskedLM", "answerdotai/ModernBERT-base", "only where it was tuned to"),
    *((name, "someone/model", "an autoregressive checkpoint, not a diffusion model") for name in
      ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM", "MistralForCausalLM", "Qwen3MoeForCausalLM", "GPT2LMHeadModel")),
    ("LLaMAForDiffusion", "someone/model", "is not supported; supported: LLaDAModelLM"),
]  # fmt: skip


@pytest.mark.parametrize(("architecture", "model", "name"), RECOGNISED)
def test_recognised(architecture, model, name):
    assert find_family({"architectures": [architecture], "model_type": "llada"}, model).name == name


def test_every_row_is_recognised_by_name_or_by_hand():
    assert {name for _, _, name in RECOGNISED} == set(ROWS)
    for name, row in ROWS.items():
        assert find_family({"architectures": ["LlamaForCausalLM"]}, "x", name) is row
    with pytest.raises(ValueError, match=r"family='mdlm' is unknown; choose one of llada, illada, "):
        find_family({}, "x", "mdlm")


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("length", [4, 32])
def test_every_row_names_a_sampler(name, length):
    params = parse_sampler(ROWS[name].sampler.format(L=length))
    assert params.block_length == (None if ROWS[name].blocks == "whole" else length)


@pytest.mark.parametrize(("architecture", "model", "why"), REFUSED)
def test_refused(architecture, model, why):
    with pytest.raises(ValueError, match=why) as caught:
        find_family({"architectures": [architecture]}, model)
    message = str(caught.value)
    assert message.startswith(f"{model}: ") and architecture in message and "\n" not in message and len(message) < 450


def test_native_classes_exist():
    import transformers

    for row in FAMILIES:
        for architecture in row.hosts:
            for name in row.host_of({"architectures": [architecture]}):
                assert hasattr(transformers, name)


@pytest.fixture(params=["llada", "llada2", "llada_moe", "a2d", "fastdllm_v2"])
def folder(request, tmp_path):
    shutil.copytree(GOLDEN / request.param, tmp_path / request.param, ignore=shutil.ignore_patterns("logits.json"))
    return tmp_path / request.param


def refused(folder, *texts, **changes):
    with pytest.raises(ValueError) as caught:
        load_target(str(folder), device="cpu", **({"mask_token_id": 318, "stop_ids": []} | changes))
    message = str(caught.value)
    assert "\n" not in message and len(message) < 600, message
    for text in texts:
        assert text in message, message


def change_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text("utf-8")) | changes
    (folder / "config.json").write_text(json.dumps(config), "utf-8")


def change_weights(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


NORM = "model.layers.1.input_layernorm.weight"
OWN = {"llada": {NORM: "model.transformer.blocks.1.attn_norm.weight", "head": "model.transformer.ff_out.weight"}}


def own_name(folder, name):
    return OWN.get(folder.name, {}).get(name, name)


def test_missing_tensor(folder):
    change_weights(folder, lambda w: w.pop(own_name(folder, NORM)))
    refused(folder, "1 missing keys", NORM)


def test_extra_tensor(folder):
    name = own_name(folder, NORM).replace(".1.", ".7.")
    change_weights(folder, lambda w: w.update({name: torch.ones(64)}))
    refused(folder, "1 unexpected keys", NORM.replace(".1.", ".7."))


def test_truncated_file(folder):
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) * 2 // 3])
    refused(folder, "the weights do not load", "the file is damaged")


def test_wrong_vocabulary_size(folder):
    change_config(folder, vocab_size=352, **({"embedding_size": 352} if folder.name == "llada" else {}))
    refused(folder, "vocab_size=352 in config.json, the file has 320")


def test_mask_id_outside_the_vocabulary(folder):
    refused(folder, "mask_token_id 320 lies outside the vocabulary of 320", mask_token_id=320)
    change_config(folder, mask_token_id=999)
    refused(folder, "mask_token_id 999 lies outside the vocabulary of 320", mask_token_id=None)


@pytest.mark.parametrize("name", ["model.layers.1.mlp.experts.3.down_proj.weight", "model.layers.2.mlp.experts.0.gate_proj.weight"])
@pytest.mark.parametrize("family", ["llada2", "llada_moe"])
def test_missing_expert(tmp_path, family, name):
    shutil.copytree(GOLDEN / family, tmp_path / family)
    change_weights(tmp_path / family, lambda w: w.pop(name))
    refused(tmp_path / family, "1 missing keys", name)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llada", {"alibi": True}),
        ("llada", {"block_type": "sequential"}),
        ("llada_moe", {"moe_router_enable_expert_bias": True}),
        ("llada_moe", {"moe_layer_freq": [0, 1, 1]}),
        ("llada2", {"score_function": "softmax"}),
    ],
)
def test_fields_that_no_host_can_express(family, changes):
    config = json.loads((GOLDEN / family / "config.json").read_text("utf-8")) | changes
    with pytest.raises(ValueError, match=f"{next(iter(changes))}=.* in config.json is not supported, only "):
        load_host(GOLDEN / family, config, ROWS[family], torch.float32)


def test_a_llada_config_without_a_size():
    config = json.loads((GOLDEN / "llada" / "config.json").read_text("utf-8"))
    config.pop("n_layers")
    with pytest.raises(ValueError, match=r"n_layers is missing in config\.json"):
        load_host(GOLDEN / "llada", config, ROWS["llada"], torch.float32)


def test_the_mixture_of_llada_moe_is_never_normalised():
    config = json.loads((GOLDEN / "llada_moe" / "config.json").read_text("utf-8")) | {"norm_topk_prob": True}
    assert ROWS["llada_moe"].translate(config)["norm_topk_prob"] is False


MIXTURE = {"moe_intermediate_size": 32, "intermediate_size": 256, "head_dim": 16, "norm_topk_prob": True}


@pytest.mark.parametrize(
    ("golden", "name", "changes"),
    [
        ("llada2", "llada2", {}),
        ("llada_moe", "sdar_moe", MIXTURE | {"architectures": ["SDARMoeForCausalLM"]}),
        ("a2d", "dream_reasoner", {"architectures": ["DreamModel"]}),
    ],
)
def test_block_causal_families_load(tmp_path, golden, name, changes):
    """Where there is no checkpoint of the authors' layout, another family's of the same layout."""
    folder = tmp_path / ("DreamReasoner-tiny" if name == "dream_reasoner" else "tiny")
    shutil.copytree(GOLDEN / golden, folder)
    change_config(folder, **changes)
    target = load_target(str(folder), device="cpu", mask_token_id=318, stop_ids=[317])
    assert (target.spec.family, target.spec.block_length) == (name, ROWS[name].block_length)
    assert target.spec.max_length == json.loads((folder / "config.json").read_text("utf-8"))["max_position_embeddings"]


def test_a_head_of_its_own_is_used_whatever_the_config_says(tmp_path):
    """A2D configurations say that the head is tied; where the file has another one, it counts."""
    shutil.copytree(GOLDEN / "a2d", tmp_path / "a2d")
    change_weights(tmp_path / "a2d", lambda w: w.update({"lm_head.weight": 2 * w["model.embed_tokens.weight"]}))
    config = json.loads((tmp_path / "a2d" / "config.json").read_text("utf-8"))
    assert config["tie_word_embeddings"]
    host = load_host(tmp_path / "a2d", config, ROWS["a2d"], torch.float32)
    assert torch.equal(host.lm_head.weight, 2 * host.model.embed_tokens.weight)
