"""Print examples of every family: `python -m zoo.families --n 3 --split train`."""

from __future__ import annotations

import argparse
import random

from zoo.families import FAMILIES, SPLITS, sample


def main() -> None:
    """Parse the arguments and print the requested examples."""
    parser = argparse.ArgumentParser(prog="python -m zoo.families")
    parser.add_argument("--n", type=int, default=3, help="examples per family")
    parser.add_argument("--split", choices=SPLITS, default="train")
    parser.add_argument("--family", choices=list(FAMILIES), help="only this family")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for family in [args.family] if args.family else FAMILIES:
        rng = random.Random(f"{args.seed}|{family}")
        for _ in range(args.n):
            drawn = sample(family, rng, args.split)
            print(f"=== {drawn.family} / {drawn.template}")
            print(drawn.prompt)
            print("---")
            print(drawn.answer)
            print()


if __name__ == "__main__":
    main()
