"""Train the shipped target or one of the transfer targets on program-made families, resumable at any checkpoint.

    python -m zoo.train --recipe shipped --out runs/zoo

Every batch is a pure function of (seed, step); a checkpoint holds weights, both optimizers and the step, so a resumed run equals an
uninterrupted one. zoo/recipes.py has networks, curricula and learning rates.
"""

import argparse
import json
import os
import shutil
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch.nn import functional

from spot_dlm.optimizer import Muon
from zoo import batches, canvases
from zoo import tokenizer as zoo_tokenizer
from zoo.families import stream
from zoo.grow import grow
from zoo.model import BlockDiffusionModel
from zoo.recipes import RECIPES, WEIGHTS, Recipe

SHIPPED = Path(str(resources.files("spot_dlm"))) / "shipped" / "target"

POOL_BATCHES = 16
BALANCE_WEIGHT = 0.01  # of the experts' balancing loss
WARMUP_STEPS = 50
NOT_MUON = ("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight")


def load_tokenizer(path: Path, vocab_size: int, seed: int) -> Tokenizer:
    """Load the run's tokenizer, or train it on 20,000 training samples and store it."""
    if not path.exists():
        texts = (t for s in islice(stream(seed, "train", WEIGHTS), 20_000) for t in (s.prompt, s.answer))
        built = zoo_tokenizer.build(texts, vocab_size)
        built.save(str(path) + ".partial")
        os.replace(str(path) + ".partial", path)
    return Tokenizer.from_file(str(path))


def stage_weights(recipe: Recipe, step: int) -> Mapping[str, float]:
    """Return the mixture of families that a step trains on."""
    return next(weights for start, weights in reversed(recipe.stages) if step >= start)


def learning_rate_factor(recipe: Recipe, step: int) -> float:
    """Return the factor of the learning rates at a step: a short warm-up, then the recipe's schedule."""
    steps, factors = zip(*recipe.schedule, strict=True)
    return min((step + 1) / WARMUP_STEPS, float(np.interp(step, steps, factors)))


def build_batch(recipe: Recipe, tokenizer: Tokenizer, samples: list[batches.Encoded], step: int) -> batches.Batch:
    """Build the tensors of a step, a pure function of its arguments."""
    block_length = recipe.block_lengths[step % len(recipe.block_lengths)]
    rng = np.random.default_rng((recipe.seed, step, 7))
    if recipe.attention == "full":
        return canvases.build(tokenizer, samples, block_length, rng, recipe.shifted)
    return batches.build(tokenizer, samples, block_length, rng, recipe.after_prompt, recipe.shifted)


def initial_model(recipe: Recipe, tokenizer: Tokenizer) -> BlockDiffusionModel:
    """Return the network before its first step: fresh, or grown from the shipped target."""
    torch.manual_seed(recipe.seed)
    model = BlockDiffusionModel(recipe.config)
    if recipe.donor_layers:
        donor = BlockDiffusionModel(RECIPES["shipped"].config)
        donor.load_state_dict(load_file(SHIPPED / "model.safetensors"))
        samples = [batches.encode(tokenizer, s) for s in islice(stream(recipe.seed, "train", WEIGHTS), 64)]
        length = min(len(s.prompt_ids) + len(s.answer_ids) for s in samples)
        probe = torch.tensor([(*s.prompt_ids, *s.answer_ids)[:length] for s in samples])
        grow(model, donor, recipe.donor_layers, probe)
    return model


def save(path: Path, payload: dict[str, Any]) -> None:
    """Write a checkpoint under a temporary name and rename it, so that a partial file never looks complete."""
    temporary = path.with_suffix(".partial")
    torch.save(payload, temporary)
    os.replace(temporary, path)


def train(args: argparse.Namespace) -> None:
    """Run the optimisation until `args.steps`, logging one JSON line every `--log-every` steps."""
    if args.threads:
        torch.set_num_threads(args.threads)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    recipe = replace(RECIPES[args.recipe], batch_rows=args.batch_rows or RECIPES[args.recipe].batch_rows)
    if recipe.donor_layers and not (out / "tokenizer.json").exists():
        shutil.copy(SHIPPED / "tokenizer.json", out / "tokenizer.json")
    tok = load_tokenizer(out / "tokenizer.json", recipe.config.vocab_size, recipe.seed)
    model = initial_model(recipe, tok).to(device)
    print(
        f"{sum(p.numel() for p in model.parameters()):,} parameters on {device}",
        flush=True,
    )
    is_matrix = {n: p.ndim == 2 and not n.endswith(NOT_MUON) for n, p in model.named_parameters()}
    matrices = [p for n, p in model.named_parameters() if is_matrix[n]]
    rest = [p for n, p in model.named_parameters() if not is_matrix[n]]
    optimizers = [
        Muon(matrices, lr=recipe.muon_lr),
        torch.optim.Adam(rest, lr=recipe.adam_lr, betas=(0.9, 0.95)),
    ]
    peaks = [recipe.muon_lr, recipe.adam_lr]
    settings = {"recipe": args.recipe, "batch_rows": recipe.batch_rows}
    step, tokens_seen, seconds = 0, 0, 0.0
    checkpoint = out / "checkpoint.pt"
    if checkpoint.exists():
        stored = torch.load(checkpoint, map_location=device, weights_only=True)
        if stored.get("settings", settings) != settings:
            raise ValueError(f"{checkpoint} was made with {stored['settings']}, not {settings}; use another --out")
        model.load_state_dict(stored["model"])
        for optimizer, state in zip(optimizers, stored["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        step, tokens_seen, seconds = (
            stored["step"],
            stored["tokens_seen"],
            stored["seconds"],
        )
        print(f"resumed at step {step}", flush=True)
    losses: dict[str, list[float]] = defaultdict(list)
    source = batches.pools(tok, partial(stage_weights, recipe), recipe.seed, recipe.batch_rows, POOL_BATCHES, step)
    steps = args.steps or recipe.steps
    began = last = time.perf_counter()
    while step < steps:
        batch = build_batch(recipe, tok, next(source), step)
        factor = learning_rate_factor(recipe, step)
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * factor
        hidden = model.hidden(batch.ids.to(device), batch.positions.to(device), batch.mask.to(device))
        logits = model.logits(hidden.flatten(0, 1)[batch.rows.to(device)])
        token_loss = functional.cross_entropy(logits, batch.targets.to(device), reduction="none")
        weights = batch.weights.to(device)
        loss = (token_loss * weights).sum() / weights.sum()
        if recipe.config.num_experts:
            loss = loss + BALANCE_WEIGHT * model.balance()
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(rest, 1.0)
        for optimizer in optimizers:
            optimizer.step()
        step += 1
        tokens_seen += batch.num_tokens
        if step % 5 == 0:
            values = token_loss.detach().cpu().numpy()
            families = np.array(batch.families)
            for family in set(batch.families):
                losses[family].append(float(values[families == family].mean()))
        if step % args.log_every == 0:
            now = time.perf_counter()
            seconds_now = seconds + now - began
            row = {
                "step": step,
                "tokens": tokens_seen,
                "seconds": round(seconds_now, 1),
                "lr": round(factor, 4),
            }
            row |= {"loss_" + f: round(float(np.mean(v)), 4) for f, v in sorted(losses.items())}
            row["step_s"] = round((now - last) / args.log_every, 3)
            with open(out / "log.jsonl", "a") as log:
                log.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)
            losses.clear()
            last = now
        if step % args.save_every == 0 or step == steps:
            payload = {
                "model": model.state_dict(),
                "optimizers": [o.state_dict() for o in optimizers],
                "step": step,
                "tokens_seen": tokens_seen,
                "seconds": seconds + time.perf_counter() - began,
                "config": recipe.config.to_dict(),
                "settings": settings,
            }
            save(checkpoint, payload)
        if step % args.keep_every == 0 or step == steps:
            kept = {"model": model.state_dict(), "step": step, "tokens_seen": tokens_seen, "config": recipe.config.to_dict()}
            save(out / f"step-{step}.pt", kept)


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="folder for tokenizer, checkpoint and log")
    parser.add_argument("--recipe", choices=RECIPES, default="shipped")
    parser.add_argument("--steps", type=int, help="stop at this step; default: the recipe's last")
    parser.add_argument("--batch-rows", type=int, help="samples of a step; default: the recipe's")
    parser.add_argument("--threads", type=int, help="default: torch's")
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--save-every", type=int, default=100, help="steps between resumable checkpoints")
    parser.add_argument("--keep-every", type=int, default=1000, help="steps between weights that are kept for the accuracy curve")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
