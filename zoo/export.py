"""Export a training checkpoint as an SDAR-layout folder: config.json, model.safetensors, tokenizer files.

python -m zoo.export --run runs/zoo --out src/spot_dlm/shipped/target
"""

import argparse
import json
import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from zoo.model import ModelConfig
from zoo.tokenizer import CHAT_TEMPLATE, END_OF_TEXT, MASK, TURN_END, TURN_START


def sdar_config(config: ModelConfig, tokenizer: Tokenizer, block_length: int) -> dict[str, object]:
    """Return config.json in the key names of SDAR's own checkpoints."""
    return {
        "architectures": ["SDARForCausalLM"],
        "model_type": "sdar",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "block_size": block_length,
        "bos_token_id": tokenizer.token_to_id(END_OF_TEXT),
        "eos_token_id": tokenizer.token_to_id(END_OF_TEXT),
        "pad_token_id": tokenizer.token_to_id(END_OF_TEXT),
        "mask_token_id": tokenizer.token_to_id(MASK),
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_positions,
        "max_window_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": config.rope_theta,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "use_cache": False,
        "use_sliding_window": False,
        "vocab_size": config.vocab_size,
    }


def export(run: Path, out: Path, block_length: int, weights_file: str = "checkpoint.pt") -> None:
    """Write the folder under a temporary name, then move its files into place."""
    stored = torch.load(run / weights_file, map_location="cpu", weights_only=True)
    tokenizer = Tokenizer.from_file(str(run / "tokenizer.json"))
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    weights = {name: value.contiguous() for name, value in stored["model"].items()}
    save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})
    config = sdar_config(ModelConfig(**stored["config"]), tokenizer, block_length)
    (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    end = tokenizer.token_to_id(END_OF_TEXT)
    (partial / "generation_config.json").write_text(json.dumps({"eos_token_id": [end], "pad_token_id": end}, indent=2) + "\n")
    tokenizer.encode_special_tokens = False
    tokenizer.save(str(partial / "tokenizer.json"))
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": [TURN_START, TURN_END, MASK],
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": stored["config"]["max_positions"],
    }
    (partial / "tokenizer_config.json").write_text(json.dumps(described, indent=2) + "\n")
    out.mkdir(parents=True, exist_ok=True)
    for file in partial.iterdir():
        file.chmod(0o644)
        os.replace(file, out / file.name)
    partial.rmdir()
    print(f"step {stored['step']}, {stored['tokens_seen']:,} tokens -> {out}")


def main() -> None:
    """Parse the command line and export."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="folder of zoo.train")
    parser.add_argument("--out", type=Path, required=True, help="folder of the exported checkpoint")
    parser.add_argument("--block-length", type=int, default=16, help="block length written to config.json")
    parser.add_argument("--weights", default="checkpoint.pt", help="file inside the run, e.g. step-3000.pt")
    args = parser.parse_args()
    export(args.run, args.out, args.block_length, args.weights)


if __name__ == "__main__":
    main()
