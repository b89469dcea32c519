"""How alike two targets are: the share of prompts with the same answer, and of those how alike the orders are in which they were committed.

    python -m zoo.alike --model zoo/targets/dream --model zoo/targets/llada --out results/alike.json

Standard decoding at T = 0; orders are compared by Spearman's rank correlation of the tokens' commit steps.
"""

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

import spot_dlm as spot
from spot_dlm.tasks import FAMILY_TASKS, load_prompts


def answers(model: str, params: spot.DecodeParams, limit: int) -> list[spot.Result]:
    """Return the results of the first held-out prompts of every family, plainly decoded (by the chain drafter, which is faster)."""
    target = spot.load_target(model)
    return [spot.generate(target, p.prompt, spot.Chain(), params) for task in FAMILY_TASKS for p in load_prompts(task, limit=limit)]


def correlation(one: list[int], other: list[int]) -> float:
    """Return Spearman's rank correlation of two lists without repetitions."""
    first, second = (np.argsort(np.argsort(steps)) for steps in (one, other))
    return float(np.corrcoef(first, second)[0, 1])


def main() -> None:
    """Compare each model with the first and print the JSON document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", required=True, help="repeatable")
    parser.add_argument("--against", default="shipped")
    parser.add_argument("--limit", type=int, default=20, help="prompts of each family")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    params = spot.DecodeParams(max_new_tokens=args.max_new_tokens)
    first = answers(args.against, params, args.limit)
    rows: list[dict[str, Any]] = []
    for model in args.model:
        found = answers(model, params, args.limit)
        same = [(a, b) for a, b in zip(first, found, strict=True) if a.token_ids == b.token_ids]
        orders = [correlation(a.commit_steps, b.commit_steps) for a, b in same if len(a.token_ids) > 2]
        rows.append({"model": model, "prompts": len(first), "same_answers": len(same), "order_correlation": float(np.mean(orders))})
        print(json.dumps(rows[-1]), flush=True)
    document = {"command": shlex.join(["python", "-m", "zoo.alike", *sys.argv[1:]]), "against": args.against, "rows": rows}
    if args.out:
        args.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
