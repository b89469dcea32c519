"""Write the packaged held-out prompts: for each family 100 of unseen values and 60 of unseen templates, never seen in training.

python -m zoo.prompts --out src/spot_dlm/shipped/prompts
python -m zoo.prompts --train 160 --seed 7 --out prompts.jsonl     # 160 training prompts of each family in one file, for 'spot trace'
"""

import argparse
import json
import os
from collections.abc import Iterable
from pathlib import Path

from zoo.families import FAMILIES, Sample, Split, heldout

COUNTS: tuple[tuple[Split, int], ...] = (("heldout_values", 100), ("heldout_templates", 60))


def write(path: Path, samples: Iterable[tuple[str, Sample]]) -> None:
    """Write (id, sample) pairs as one JSONL file, whole or not at all."""
    rows = [
        {"id": name, "family": sample.family, "prompt": sample.prompt, "answer": sample.answer, "check": sample.check}
        for name, sample in samples
    ]
    partial = path.with_suffix(".partial")
    partial.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    os.replace(partial, path)
    print(f"{path}: {len(rows)} prompts")


def main() -> None:
    """Write one JSONL file per family and split, or one of training prompts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--train", type=int, help="write so many training prompts of each family to the file --out instead")
    parser.add_argument("--seed", type=int, default=20)
    args = parser.parse_args()
    if args.train is not None:
        drawn = {family: heldout(family, "train", args.train, args.seed) for family in FAMILIES}
        write(args.out, [(f"{f}/train/{args.seed}/{n}", samples[n]) for n in range(args.train) for f, samples in drawn.items()])
        return
    args.out.mkdir(parents=True, exist_ok=True)
    for family in FAMILIES:
        for split, count in COUNTS:
            samples = heldout(family, split, count, args.seed)
            write(args.out / f"{family}.{split}.jsonl", ((f"{family}/{split}/{n}", sample) for n, sample in enumerate(samples)))


if __name__ == "__main__":
    main()
