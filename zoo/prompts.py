"""Write the packaged held-out prompts: for each family 100 of unseen values and 60 of unseen templates, never seen in training.

python -m zoo.prompts --out src/spot_dlm/shipped/prompts
"""

import argparse
import json
import os
from pathlib import Path

from zoo.families import FAMILIES, Split, heldout

COUNTS: tuple[tuple[Split, int], ...] = (("heldout_values", 100), ("heldout_templates", 60))


def main() -> None:
    """Write one JSONL file per family and split."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=20)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for family in FAMILIES:
        for split, count in COUNTS:
            rows = [
                {
                    "id": f"{family}/{split}/{number}",
                    "family": family,
                    "prompt": sample.prompt,
                    "answer": sample.answer,
                    "check": sample.check,
                }
                for number, sample in enumerate(heldout(family, split, count, args.seed))
            ]
            path = args.out / f"{family}.{split}.jsonl"
            partial = path.with_suffix(".partial")
            partial.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
            os.replace(partial, path)
            print(f"{path}: {len(rows)} prompts")


if __name__ == "__main__":
    main()
