"""Measure exact answers on the held-out prompts under standard decoding at T = 0, and write the accuracy table.

    python -m zoo.evaluate --model shipped --out results/accuracy.json
    python -m zoo.evaluate --model zoo/targets/dream --model zoo/targets/llada --max-new-tokens 96 --out results/accuracy-targets.json

Decodes with the chain drafter: the answers are those of standard decoding, in fewer passes.
"""

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

import spot_dlm as spot
from spot_dlm.tasks import GRADED_TASKS, SPLITS, grade, load_prompts


def accuracy(target: spot.Target, task: str, split: str, limit: int, params: spot.DecodeParams, examples: int = 0) -> dict[str, Any]:
    """Return the share of right answers of one task and split, and the first wrong ones."""
    right, graded, wrong = 0, 0, []
    for prompt in load_prompts(task, split, limit):
        text = spot.generate(target, prompt.prompt, spot.Chain(), params).text
        verdict = grade(prompt, text)
        graded += verdict is not None
        right += bool(verdict)
        if verdict is False:
            wrong.append({"prompt": prompt.prompt, "expected": prompt.answer, "answer": text})
    length = params.block_length or target.spec.block_length
    row = {"model": target.spec.name, "task": task, "split": split, "block_length": length, "prompts": graded, "right": right}
    return row | {"accuracy": round(right / graded, 4), "wrong": wrong[:examples]}


def main() -> None:
    """Evaluate the requested tasks and print one line each; the last line of stdout is the JSON document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", help="repeatable; default: shipped")
    parser.add_argument("--out", type=Path, help="JSON file")
    parser.add_argument("--task", action="append", choices=GRADED_TASKS, help="repeatable; default: all")
    parser.add_argument("--split", action="append", choices=SPLITS, help="repeatable; default: both")
    parser.add_argument("--block-length", action="append", type=int, help="repeatable; default: 16 and 32 for shipped, else the model's")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="a whole canvas has so many tokens")
    parser.add_argument("--limit", type=int, default=100)
    parser.add_argument("--examples", type=int, default=0, help="wrong answers to keep for each row")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows, fingerprints = [], {}
    for model in args.model or ["shipped"]:
        target = spot.load_target(model)
        fingerprints[model] = target.spec.fingerprint
        for block_length in args.block_length or ((16, 32) if model == "shipped" else (None,)):
            params = spot.DecodeParams(max_new_tokens=args.max_new_tokens, block_length=block_length)
            for task in args.task or GRADED_TASKS:
                for split in args.split or SPLITS:
                    row = accuracy(target, task, split, args.limit, params, args.examples)
                    print(f"{model} L={row['block_length']} {task} {split}: {row['right']}/{row['prompts']}", flush=True)
                    rows.append(row)
    document = {
        "command": shlex.join(["python", "-m", "zoo.evaluate", *sys.argv[1:]]),
        "fingerprints": fingerprints,
        "torch": torch.__version__,
        "temperature": 0,
        "rows": rows,
    }
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
