"""Export a training checkpoint in its family's own layout: config.json, model.safetensors, tokenizer files.

python -m zoo.export --run runs/zoo --out src/spot_dlm/shipped/target
python -m zoo.export --run runs/dream --recipe dream --float16 --out zoo/targets/dream
"""

import argparse
import json
import os
import shutil
from pathlib import Path
from typing import cast

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from zoo.layouts import SpecialIds, checkpoint_tensors, config_json
from zoo.model import ModelConfig
from zoo.recipes import RECIPES
from zoo.tokenizer import CHAT_TEMPLATE, END_OF_TEXT, MASK, TURN_END, TURN_START


def export(
    run: Path, out: Path, block_length: int, weights_file: str = "checkpoint.pt", family: str = "sdar", dtype: torch.dtype = torch.float32
) -> None:
    """Write the folder under a temporary name, then move its files into place."""
    stored = torch.load(run / weights_file, map_location="cpu", weights_only=True)
    tokenizer = Tokenizer.from_file(str(run / "tokenizer.json"))
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    config = ModelConfig(**stored["config"])
    ids = SpecialIds(*(cast(int, tokenizer.token_to_id(token)) for token in (END_OF_TEXT, MASK)))
    weights = checkpoint_tensors(family, config, stored["model"])
    contiguous = {name: value.to(dtype).contiguous() for name, value in weights.items()}
    save_file(contiguous, partial / "model.safetensors", metadata={"format": "pt"})
    document = config_json(family, config, ids, block_length)
    document["torch_dtype"] = str(dtype).removeprefix("torch.")
    (partial / "config.json").write_text(json.dumps(document, indent=2) + "\n")
    (partial / "generation_config.json").write_text(json.dumps({"eos_token_id": [ids.end], "pad_token_id": ids.end}, indent=2) + "\n")
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
    parser.add_argument("--recipe", choices=RECIPES, default="shipped", help="what the run trained")
    parser.add_argument("--block-length", type=int, help="block length written to config.json; default: the recipe's first")
    parser.add_argument("--float16", action="store_true", help="round the weights to half the size")
    parser.add_argument("--weights", default="checkpoint.pt", help="file inside the run, e.g. step-3000.pt")
    args = parser.parse_args()
    recipe = RECIPES[args.recipe]
    dtype = torch.float16 if args.float16 else torch.float32
    export(args.run, args.out, args.block_length or recipe.block_lengths[0], args.weights, recipe.family, dtype)


if __name__ == "__main__":
    main()
