"""Train the shipped target: block diffusion over program-made families, resumable at any checkpoint.

    python -m zoo.train --out runs/zoo

Every batch is a pure function of (seed, step); a checkpoint holds weights, both optimizers and the step, so a resumed run equals an
uninterrupted one. STAGES and SCHEDULE below are the curriculum and the learning rate.
"""

import argparse
import json
import os
import time
from collections import defaultdict
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch.nn import functional

from zoo import batches
from zoo import tokenizer as zoo_tokenizer
from zoo.families import stream
from zoo.model import BlockDiffusionModel, ModelConfig
from zoo.optimizer import Muon

BLOCK_LENGTHS = (16, 32)
POOL_BATCHES = 16
# Mixture of families from a step on. The drill stage in the middle is there because arithmetic facts stay at chance in the mixture
# (docs/log.md); boundaries are multiples of POOL_BATCHES.
WEIGHTS = {"json": 0.22, "python": 0.22, "arithmetic": 0.32, "rewrite": 0.16, "stdlib": 0.08}
STAGES: tuple[tuple[int, dict[str, float]], ...] = (
    (0, WEIGHTS),
    (3104, {"drill": 0.70, "json": 0.10, "python": 0.06, "rewrite": 0.08, "arithmetic": 0.06}),
    (3504, {"facts": 0.70, "json": 0.10, "python": 0.06, "rewrite": 0.08, "arithmetic": 0.06}),
    (3904, {"facts": 0.10, "json": 0.22, "python": 0.14, "arithmetic": 0.30, "rewrite": 0.17, "stdlib": 0.07}),
    (5200, {"facts": 0.08, "json": 0.18, "python": 0.22, "arithmetic": 0.34, "rewrite": 0.14, "stdlib": 0.04}),
)
# Factor of the learning rates, linear between these steps.
SCHEDULE = ((0, 1.0), (2300, 1.0), (3104, 0.7022), (3904, 0.7022), (5200, 0.2878), (6900, 0.0))
WARMUP_STEPS = 50


def load_tokenizer(path: Path, vocab_size: int, seed: int) -> Tokenizer:
    """Load the run's tokenizer, or train it on 20,000 training samples and store it."""
    if not path.exists():
        texts = (t for s in islice(stream(seed, "train", WEIGHTS), 20_000) for t in (s.prompt, s.answer))
        built = zoo_tokenizer.build(texts, vocab_size)
        built.save(str(path) + ".partial")
        os.replace(str(path) + ".partial", path)
    return Tokenizer.from_file(str(path))


def stage_weights(step: int) -> dict[str, float]:
    """Return the mixture of families that a step trains on."""
    return next(weights for start, weights in reversed(STAGES) if step >= start)


def learning_rate_factor(step: int) -> float:
    """Return the factor of the learning rates at a step: a short warm-up, then SCHEDULE."""
    steps, factors = zip(*SCHEDULE, strict=True)
    return min((step + 1) / WARMUP_STEPS, float(np.interp(step, steps, factors)))


def save(path: Path, payload: dict[str, Any]) -> None:
    """Write a checkpoint under a temporary name and rename it, so that a partial file never looks complete."""
    temporary = path.with_suffix(".partial")
    torch.save(payload, temporary)
    os.replace(temporary, path)


def train(args: argparse.Namespace) -> None:
    """Run the optimisation until `args.steps`, logging one JSON line every `--log-every` steps."""
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)
    config = ModelConfig()
    tok = load_tokenizer(out / "tokenizer.json", config.vocab_size, args.seed)
    model = BlockDiffusionModel(config).to(device)
    print(
        f"{sum(p.numel() for p in model.parameters()):,} parameters on {device}",
        flush=True,
    )
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    rest = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    optimizers = [
        Muon(matrices, lr=args.muon_lr),
        torch.optim.Adam(rest, lr=args.adam_lr, betas=(0.9, 0.95)),
    ]
    peaks = [args.muon_lr, args.adam_lr]
    settings = {"seed": args.seed, "batch_rows": args.batch_rows, "muon_lr": args.muon_lr, "adam_lr": args.adam_lr}
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
    source = batches.pools(tok, stage_weights, args.seed, args.batch_rows, POOL_BATCHES, step)
    began = last = time.perf_counter()
    while step < args.steps:
        block_length = BLOCK_LENGTHS[step % len(BLOCK_LENGTHS)]
        batch = batches.build(tok, next(source), block_length, np.random.default_rng((args.seed, step, 7)))
        factor = learning_rate_factor(step)
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * factor
        hidden = model.hidden(batch.ids.to(device), batch.positions.to(device), batch.mask.to(device))
        logits = model.logits(hidden.flatten(0, 1)[batch.rows.to(device)])
        token_loss = functional.cross_entropy(logits, batch.targets.to(device), reduction="none")
        weights = batch.weights.to(device)
        loss = (token_loss * weights).sum() / weights.sum()
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
        if step % args.save_every == 0 or step == args.steps:
            payload = {
                "model": model.state_dict(),
                "optimizers": [o.state_dict() for o in optimizers],
                "step": step,
                "tokens_seen": tokens_seen,
                "seconds": seconds + time.perf_counter() - began,
                "config": config.to_dict(),
                "settings": settings,
            }
            save(checkpoint, payload)
        if step % args.keep_every == 0 or step == args.steps:
            kept = {"model": model.state_dict(), "step": step, "tokens_seen": tokens_seen, "config": config.to_dict()}
            save(out / f"step-{step}.pt", kept)


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="folder for tokenizer, checkpoint and log")
    parser.add_argument("--steps", type=int, default=SCHEDULE[-1][0], help="stop at this step")
    parser.add_argument("--batch-rows", type=int, default=24)
    parser.add_argument("--muon-lr", type=float, default=0.02)
    parser.add_argument("--adam-lr", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--save-every", type=int, default=100, help="steps between resumable checkpoints")
    parser.add_argument("--keep-every", type=int, default=1000, help="steps between weights that are kept for the accuracy curve")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
