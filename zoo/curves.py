"""Draw the loss and accuracy curves of a run and measure the accuracy of its kept weights.

python -m zoo.curves --run runs/zoo --out results/training.json --picture src/spot_dlm/shipped/target/curves.png
"""

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

import spot_dlm as spot
from spot_dlm.tasks import FAMILY_TASKS, GRADED_TASKS
from zoo.evaluate import accuracy
from zoo.export import export


def accuracy_curve(run: Path, limit: int) -> list[dict[str, Any]]:
    """Return exact answers on held-out values, L = 16, T = 0, for every kept step."""
    rows = []
    for file in sorted(run.glob("step-*.pt"), key=lambda f: int(f.stem.split("-")[1])):
        folder = run / "export" / file.stem
        export(run, folder, 16, file.name)
        target = spot.load_target(str(folder))
        params = spot.DecodeParams(block_length=16)
        row: dict[str, Any] = {"step": int(file.stem.split("-")[1]), "prompts": limit}
        for task in GRADED_TASKS:
            row[task] = accuracy(target, task, "heldout_values", limit, params)["accuracy"]
        print(json.dumps(row), flush=True)
        rows.append(row)
    return rows


def draw(losses: list[dict[str, Any]], accuracies: list[dict[str, Any]], picture: Path) -> None:
    """Draw both curves into one PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    for task in FAMILY_TASKS:
        points = [(r["step"], r["loss_" + task]) for r in losses if "loss_" + task in r]
        left.plot(*zip(*points, strict=True), label=task, linewidth=1)
    for task in GRADED_TASKS:
        right.plot([r["step"] for r in accuracies], [r[task] for r in accuracies], marker="o", label=task)
    left.set(xlabel="step", ylabel="loss of a masked token (nats)", yscale="log", title="training loss")
    right.set(xlabel="step", ylabel="exact answers", ylim=(0, 1.02), title="held-out values, T = 0, L = 16")
    left.legend()
    right.legend()
    figure.savefig(picture, dpi=90)


def main() -> None:
    """Measure, store the figures and draw them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--picture", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=25)
    args = parser.parse_args()
    torch.set_num_threads(1)
    by_step = {}
    for line in (args.run / "log.jsonl").read_text().splitlines():
        row = json.loads(line)
        by_step[row["step"]] = row  # a resumed run repeats the steps after its checkpoint
    losses = [by_step[s] for s in sorted(by_step)]
    accuracies = accuracy_curve(args.run, args.limit)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    document = {"command": shlex.join(["python", "-m", "zoo.curves", *sys.argv[1:]]), "losses": losses, "accuracy": accuracies}
    args.out.write_text(json.dumps(document) + "\n")
    draw(losses, accuracies, args.picture)


if __name__ == "__main__":
    main()
