"""Tiny random checkpoints in SDAR's on-disk layout, written by tests; the weights come from transformers' own Qwen3 class."""

import json
from pathlib import Path
from typing import Any

import torch

VOCAB, MASK, STOP = 320, 318, 317


def sdar_config(**changes: Any) -> dict[str, Any]:
    """Return a raw config.json with the keys that SDAR checkpoints carry, remote-code keys included."""
    config = {
        "architectures": ["SDARForCausalLM"],
        "auto_map": {"AutoConfig": "configuration_sdar.SDARConfig", "AutoModelForCausalLM": "modeling_sdar.SDARForCausalLM"},
        "attention_bias": False,
        "attn_implementation": "flex_attention",
        "block_size": 4,
        "bos_token_id": 316,
        "eos_token_id": 316,
        "mask_token_id": MASK,
        "fuse_cross_entropy": True,
        "head_dim": 16,
        "hidden_act": "silu",
        "hidden_size": 64,
        "intermediate_size": 128,
        "max_position_embeddings": 4096,
        "model_type": "sdar",
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "use_cache": False,
        "use_sliding_window": False,
        "vocab_size": VOCAB,
    }
    return config | changes


def host_config(config: dict[str, Any]) -> Any:
    """Return the native Qwen3 configuration of a raw one."""
    from transformers import Qwen3Config

    dropped = ("auto_map", "architectures", "model_type", "attn_implementation", "torch_dtype")
    return Qwen3Config(**{k: v for k, v in config.items() if k not in dropped})


def dense_model(config: dict[str, Any], seed: int = 0) -> Any:
    """Return transformers' plain Qwen3 (SDPA attention) with random weights that make attention and logits lively."""
    from transformers import Qwen3ForCausalLM

    native = host_config(config)
    native._attn_implementation = "sdpa"
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(native).eval().requires_grad_(False)
    for name, weight in model.named_parameters():
        if weight.ndim == 2:
            weight.normal_(0, weight.shape[-1] ** -0.5)
        elif name.endswith(("q_norm.weight", "k_norm.weight")):
            weight.uniform_(0.7, 1.3)
        else:
            weight.uniform_(0.5, 1.5)
    return model


def write_sdar(folder: Path, seed: int = 0, **changes: Any) -> Any:
    """Write config.json and model.safetensors, and return the dense model they hold."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    config = sdar_config(**changes)
    model = dense_model(config, seed)
    weights = {k: v.contiguous() for k, v in model.state_dict().items()}
    if config["tie_word_embeddings"]:
        weights.pop("lm_head.weight")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1), "utf-8")
    return model


CHATML = (
    "{%- if messages[0].role == 'system' %}\n    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}\n{%- endif %}\n"
    "{%- for message in messages %}\n    {%- if message.role in ('user', 'assistant') %}\n"
    "        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}\n    {%- endif %}\n{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n' }}\n"
    "    {%- if enable_thinking is defined and enable_thinking is false %}\n"
    "        {{- '<think>\\n\\n</think>\\n\\n' }}\n    {%- endif %}\n{%- endif %}"
)
"""The Qwen3 ChatML template that SDAR checkpoints carry, its tool branches left out."""

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|MASK|>")
ADDED = ("<think>", "</think>")  # added tokens that are not marked special, as in Qwen3


def write_tokenizer(
    folder: Path, layout: str = "tokenizer.json", template: str | None = CHATML, special: tuple[str, ...] = SPECIAL
) -> dict[str, int]:
    """Write byte-level BPE tokenizer files with a few merges, added tokens from id 260 on, later ids undefined; return the added ids.

    Args:
        folder: the checkpoint.
        layout: "tokenizer.json", or "vocab.json" for vocab.json + merges.txt (Qwen's other layout).
        template: chat template, None for a base model.
        special: special tokens.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: i for i, character in enumerate(alphabet)}
    merges = [("t", "h"), ("th", "e"), ("\u0120", "a"), ("i", "n")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    first = len(vocab)
    ids = {text: first + i for i, text in enumerate((*special, *ADDED))}
    config: dict[str, Any] = {
        "tokenizer_class": "Qwen2Tokenizer",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "added_tokens_decoder": {
            str(i): {"content": text, "special": text in special, "lstrip": False, "rstrip": False, "normalized": False}
            for text, i in ids.items()
        },
    }
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    if layout == "vocab.json":
        (folder / "vocab.json").write_text(json.dumps(vocab), "utf-8")
        (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges), "utf-8")
        return ids
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in ADDED])
    tokenizer.save(str(folder / "tokenizer.json"))
    return ids
