"""`spot bench transfer`: a drafter on targets that it was not trained on, beside rivals fitted on those very targets.

Example: `spot bench transfer --model zoo/targets/dream --prompts prompts.jsonl --work transfer --out transfer.json`.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from spot_dlm.bench import passes as bench_passes
from spot_dlm.bench import report
from spot_dlm.bench import transfer as bench
from spot_dlm.bench.bootstrap import PAIRED
from spot_dlm.bench.cells import divergences, pooled
from spot_dlm.cli import options as o
from spot_dlm.cli.bench_show import Markdown, Out, check_files, facts, finish, progress, table, where
from spot_dlm.cli.jsonl import read_prompts
from spot_dlm.cli.show import COMMAND, now_and_then, say, stderr_console
from spot_dlm.drafter_files import OrderModelFile, load_order_model
from spot_dlm.drafters.registry import SHIPPED_MODELS
from spot_dlm.tasks import FAMILY_TASKS, TASKS
from spot_dlm.train import TrainParams

DEFAULT_STEPS = 1500


def transfer(
    model: Annotated[list[str], typer.Option("--model", help="Checkpoint folder or hub id of a target. Repeatable.")],
    work: Annotated[Path, typer.Option("--work", metavar="DIR", help="Folder for what is fitted; a second run continues it.")],
    prompts: Annotated[
        Path | None,
        typer.Option("--prompts", metavar="FILE", help="JSONL prompts to fit on; without it only what DIR holds is compared."),
    ] = None,
    drafter_file: Annotated[
        Path,
        typer.Option("--drafter-file", metavar="DIR|ID", callback=o.located, help="The drafter under test; default: the shipped one."),
    ] = SHIPPED_MODELS[0],
    steps: Annotated[
        int, typer.Option("--steps", help="Training steps of the drafter fitted on each target, from the weights under test; 0: none.")
    ] = DEFAULT_STEPS,
    leave_one_out: Annotated[
        bool, typer.Option("--leave-one-out", help="For each target also train a drafter on the traces of all others.")
    ] = False,
    fit_only: Annotated[bool, typer.Option("--fit-only", help="Fit, compare nothing.")] = False,
    task: Annotated[list[str] | None, typer.Option("--task", help=f"{' | '.join(TASKS)}. Repeatable; default: all families.")] = None,
    split: o.Split = "heldout_values",
    limit: Annotated[int, typer.Option("--limit", help="First so many prompts of each task.")] = 10,
    temperature: Annotated[list[float], typer.Option("--temperature", help="Repeatable.")] = [0.0, 1.0],  # noqa: B006
    nodes: Annotated[list[int], typer.Option("--nodes", help="Rows of one pass. Repeatable.")] = [8, 16],  # noqa: B006
    resolution: Annotated[
        list[str] | None, typer.Option("--resolution", help="Confidences of the decoder: float32 | bfloat16. Repeatable; default: both.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", help="Tokens of an answer; a whole canvas has so many.")] = 64,
    seed: o.Seed = 0,
    audit: Annotated[int, typer.Option("--audit", help="Prompts of each task and setting decoded again with every row evaluated.")] = 0,
    out: Out = None,
    markdown: Markdown = None,
    dtype: o.Dtype = None,
    device: o.Device = None,
    workers: Annotated[int, typer.Option("--workers", help="Processes that record traces.")] = 1,
    threads: o.Threads = None,
    raw: o.Raw = False,
) -> None:
    """Measure a drafter on targets that it was not trained on, beside FreeDave and what is fitted on each of them.

    For each target: Spiffy's graph is calibrated on its traces (spiffy), and a drafter is trained on them (own), from the weights under
    test; with --leave-one-out another one on the traces of all other targets (others). The drafter under test (transferred) sees none
    of them. Acceptance lengths are pooled over the tasks; ratios come with paired 95 % intervals over prompts. Exit code 1 if any answer
    is not that of standard decoding.

    \b
    The last line of stdout is one JSON document:
      cells        target, temperature, resolution, nodes, drafter, acceptance_length, low, high, nfe_reduction, identical, ...
      comparisons  target, temperature, resolution, nodes, rival, transferred, theirs, ratio, low, high
      divergences, provenance, command

    \b
    Examples:
      spot bench transfer --model MODEL --work transfer                                 # against FreeDave, nothing fitted
      spot bench transfer --model MODEL --prompts prompts.jsonl --work transfer         # fits Spiffy and a drafter first
      spot bench transfer --model A --model B --model C --prompts prompts.jsonl --work transfer --leave-one-out --out transfer.json
    """
    grid = bench_passes.Grid(
        tasks=tuple(dict.fromkeys(task or FAMILY_TASKS)),
        split=split,
        limit=limit,
        temperatures=tuple(dict.fromkeys(temperature)),
        nodes=tuple(dict.fromkeys(nodes)),
        resolutions=tuple(dict.fromkeys(resolution or bench_passes.RESOLUTIONS)),
        max_new_tokens=max_new_tokens,
        seed=seed,
        audit=audit,
    )
    for name, value, least in (("steps", steps, 0), ("workers", workers, 1)):
        if value < least:
            raise ValueError(f"--{name} {value} must be at least {least}")
    if leave_one_out and (len(model) < 2 or not steps):
        raise ValueError("--leave-one-out needs two models at least, and --steps above 0")
    check_files(out, markdown, None)
    console, loaded = stderr_console(), load_order_model(drafter_file)
    targets = bench.subjects(model, work)
    rows = [] if prompts is None else _rows(prompts)
    options = o.TargetOptions(dtype, device, threads, raw)
    for subject in targets if rows else ():
        _fit(subject, rows, grid, drafter_file, loaded, steps, workers, options, console)
    if leave_one_out:
        for subject in targets:
            others = [t for t in targets if t is not subject]
            _train(subject.name, bench.OTHERS, [t.traces for t in others], subject.drafter(bench.OTHERS), steps, loaded, console)
    if fit_only:
        print(json.dumps({"work": str(work), "fitted": [t.name for t in targets]}))
        return
    document = _compare(targets, grid, loaded, options, console)
    for title, head, lines in report.transfer_tables(document, intervals=False):
        console.print(Text(title, "bold"), table(head, lines), sep="\n")
    finish(document, out, markdown, None, report.transfer_markdown, lambda _: b"")
    if document["divergences"]:
        raise typer.Exit(1)


def _rows(prompts: Path) -> list[dict[str, Any]]:
    return [{"id": line.id, ("prompt" if isinstance(line.prompt, str) else "prompt_ids"): line.prompt} for line in read_prompts(prompts)]


def _fit(
    subject: bench.Subject,
    rows: Sequence[dict[str, Any]],
    grid: bench_passes.Grid,
    drafter: Path,
    loaded: OrderModelFile,
    steps: int,
    workers: int,
    options: o.TargetOptions,
    console: Console,
) -> None:
    is_due = now_and_then()

    def recorded(done: int, total: int) -> None:
        if is_due(done == total):
            say(console, f"{subject.name}: {done} of {total} sequences recorded")

    target = o.open_target(subject.model, options)
    plan = bench.recording(subject, rows, grid, drafter, options.arguments)
    bench.record_traces(subject, plan, workers, recorded, target, COMMAND.get())
    bench.fit_graph(subject)
    if steps:
        _train(subject.name, bench.OWN, [subject.traces], subject.drafter(bench.OWN), steps, loaded, console)


def _train(name: str, kind: str, traces: list[Path], out: Path, steps: int, initial: OrderModelFile, console: Console) -> None:
    is_due = now_and_then()

    def trained(step: int, row: dict[str, float]) -> None:
        if is_due("score" in row):
            reached = f", {row['acceptance_8']:.3f} steps a pass with 8 nodes" if "score" in row else ""
            say(console, f"{name}, {kind}: step {step} of {steps}{reached}")

    params = replace(TrainParams(), kind=initial.model.config.kind, steps=steps)
    bench.fit_drafter(traces, out, params, initial, trained, COMMAND.get())


def _compare(
    targets: Sequence[bench.Subject], grid: bench_passes.Grid, loaded: OrderModelFile, options: o.TargetOptions, console: Console
) -> dict[str, Any]:
    """Decode everything on every target and return the document."""
    document: dict[str, Any] = {"cells": [], "comparisons": [], "divergences": [], "targets": []}
    for subject in targets:
        target, drafters = o.open_target(subject.model, options), bench.compared(subject, loaded)
        runs: list[bench_passes.Run] = []
        count = sum(len(found) for found in bench_passes.load(target, grid).values())
        with progress(console, f"bench transfer, {subject.name}", bench_passes.count_runs(grid, count, drafters), runs) as advance:

            def seen(run: bench_passes.Run, runs: list[bench_passes.Run] = runs, advance: Any = advance) -> None:
                runs.append(run)
                advance(run.transitions)
                if run.problem:
                    say(console, where(run))

            bench_passes.run(target, grid, drafters, seen)
        found = pooled(runs)
        document["cells"] += [{"target": subject.name} | cell.to_dict() for cell in found]
        document["comparisons"] += bench.comparisons(subject.name, found)
        document["divergences"] += [{"target": subject.name, **row} for row in divergences(runs)]
        about = facts(target, grid.params(0.0, "float32", None, 1), drafters)
        document["targets"].append({"name": subject.name, "model": subject.model, "provenance": about})
    document["intervals"] = PAIRED
    return document | {"tasks": list(grid.tasks), "split": grid.split, "limit": grid.limit, "command": COMMAND.get()}
