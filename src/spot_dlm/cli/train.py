"""`spot train`: train a drafter on traces, with progress, held-out acceptance and resumption.

Example: `spot train traces --out drafter --kind linear`.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from time import monotonic, perf_counter
from typing import Annotated, Any, get_args

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from spot_dlm import train as training
from spot_dlm.checkpoint import interrupted_run
from spot_dlm.cli import options as o
from spot_dlm.cli.show import COMMAND, now_and_then, say, stderr_console
from spot_dlm.drafter_files import OrderModelFile, load_order_model
from spot_dlm.order_model import Kind
from spot_dlm.traces import join_traces, read_traces
from spot_dlm.train_plots import report
from spot_dlm.workers import exclusive

_DEFAULT_STEPS = ", ".join(f"{training.DEFAULTS[k].get('steps', training.TrainParams.steps)} for {k}" for k in get_args(Kind))


def train(
    traces: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Folders of finished traces ('spot trace').")],
    out: Annotated[Path, typer.Option("--out", metavar="DRAFTER", help="Folder of the drafter; a second run continues it.")],
    start: Annotated[
        Path | None,
        typer.Option(
            "--from", metavar="DIR|ID", callback=o.located, help="Begin with the weights of this drafter (fine-tuning), not with none."
        ),
    ] = None,
    kind: Annotated[str, typer.Option("--kind", help="'order': the network; 'linear': one weight per feature.")] = "order",
    steps: Annotated[int | None, typer.Option("--steps", help=f"Optimizer steps; default: {_DEFAULT_STEPS}.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the weights, the batches and the split.")] = 0,
    positions: Annotated[
        int, typer.Option("--positions", help="Block positions in a batch; fewer need less memory.")
    ] = training.TrainParams.positions,
    bfloat16: Annotated[
        bool | None, typer.Option("--bfloat16/--no-bfloat16", help="Multiply in bfloat16; default: whichever is faster here.")
    ] = None,
    eval_every: Annotated[int | None, typer.Option("--eval-every", help="Steps between two evaluations, which also save the run.")] = None,
    device: o.Device = None,
    threads: Annotated[int | None, typer.Option("--threads", help="CPU threads; default: torch's.")] = None,
) -> None:
    """Train a drafter on traces and keep the checkpoint with the best held-out acceptance.

    A share of the prompts is held back. The evaluation counts, without the target, how many steps a pass would have advanced on them
    (realised) and how many the drafter promised (expected), with 8 and 32 nodes. DRAFTER gets config.json, model.safetensors,
    training.json and two figures. The last line on stdout is one JSON document. The same command continues after an interruption.

    A drafter for use is trained twice: on plain traces, then on traces that the first drafter recorded, which show what a decoder
    learns from the nodes of its passes ('spot trace --drafter-file').

    \b
    Examples:
      spot train traces --out first --steps 1000
      spot trace --prompts prompts.jsonl --drafter-file first --out more && spot train more --out drafter
      spot train traces --out linear --kind linear
      spot train traces --out mine --from drafter --steps 1500
    """
    if kind not in get_args(Kind):
        raise ValueError(f"--kind {kind} is unknown; choose one of {', '.join(get_args(Kind))}")
    for name, value in (("steps", steps), ("positions", positions), ("eval-every", eval_every), ("threads", threads)):
        if value is not None and value < 1:
            raise ValueError(f"--{name} {value} must be at least 1")
    if threads is not None:
        torch.set_num_threads(threads)
    console, place = stderr_console(), _device(device)
    initial = None if start is None else load_order_model(start)
    recorded = join_traces([read_traces(folder) for folder in dict.fromkeys(traces)])
    saved = _saved_run(out)
    chosen: dict[str, Any] = training.DEFAULTS[kind] | {"kind": kind, "seed": seed, "positions": positions}  # type: ignore[index]
    chosen |= {k: v for k, v in (("steps", steps), ("eval_every", eval_every)) if v is not None}
    if bfloat16 is None:
        bfloat16 = bool(saved[1]["bfloat16"]) if saved else kind == "order" and bfloat16_is_faster(place)
    params = training.TrainParams(**chosen, bfloat16=bfloat16)
    done = saved[0] if saved else 0
    state = f"continues at step {done} of {params.steps}" if done else f"{params.steps} steps"
    say(console, f"{kind}: {state} on {place}, {'bfloat16' if bfloat16 else 'float32'}; {len(recorded.sequence['prompt'])} sequences")
    about = _train(recorded, out, params, place, done, console, initial)
    about |= {"reliability": report(recorded, out, lambda remark: say(console, remark))}
    best, files = about["best"], sorted(p.name for p in out.iterdir() if not p.name.startswith("."))
    lengths = {k: round(best[k], 4) for budget in training.BUDGETS for k in (f"acceptance_{budget}", f"expected_{budget}")}
    config = json.loads((out / "config.json").read_text("utf-8"))
    summary = {"folder": str(out), "kind": kind, "best_step": int(about["best_step"]), "score": round(best["score"], 4), **lengths}
    print(json.dumps(summary | {"num_parameters": config["num_parameters"], "seconds": about["seconds"], "files": files}))


def _device(name: str | None) -> str:
    """Return the device to train on, an accelerator if there is one."""
    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    o.check_device(name)
    return name


def bfloat16_is_faster(device: str = "cpu") -> bool:
    """Return whether a matrix product of 4096 x 128 x 512 takes less time in bfloat16 than in float32 on the device."""
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        left, right = (torch.ones(shape, dtype=dtype, device=device) for shape in ((4096, 128), (128, 512)))
        best = float("inf")
        for _ in range(8):  # the first ones choose kernels
            clock = perf_counter()
            (left @ right)[0, 0].item()
            best = min(best, perf_counter() - clock)
        seconds[dtype] = best
    return seconds[torch.bfloat16] < seconds[torch.float32]


def _saved_run(out: Path) -> tuple[int, dict[str, Any]] | None:
    """Return the run that the folder holds, refusing a folder that holds something else."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out}: is a file; --out is a folder")
    saved = interrupted_run(out)
    if saved is None and out.exists() and any(not p.name.endswith((".partial", ".lock")) for p in out.iterdir()):
        raise ValueError(f"{out}: is not empty and holds no training to continue; give another --out")
    known = {f.name for f in fields(training.TrainParams)}
    if saved and not known <= set(saved[1]):
        raise ValueError(f"{out}: holds a run of another version of spot; give another --out")
    return saved


def _train(
    recorded: Any, out: Path, params: training.TrainParams, device: str, done: int, console: Console, initial: OrderModelFile | None
) -> dict[str, Any]:
    reached = saved = done
    out.mkdir(parents=True, exist_ok=True)
    lock = out / ".lock"
    lock.touch()
    try:
        with exclusive(lock), _progress(console, params.steps, done) as show:

            def progress(step: int, row: dict[str, float]) -> None:
                nonlocal reached, saved
                reached = step
                saved = step if "score" in row else saved
                show(step, row)

            about = training.train(recorded, out, params, progress=progress, command=COMMAND.get(), device=device, initial=initial)
    except KeyboardInterrupt:
        kept = f"step {saved} is kept; run the same command again to continue" if saved else "no checkpoint yet"
        raise KeyboardInterrupt(f"interrupted at step {reached} of {params.steps}: {kept}") from None
    except OSError as error:
        reason = f"{error.strerror or error} (step {saved} is kept; the same command continues)" if saved else error.strerror or str(error)
        raise OSError(error.errno, reason, str(error.filename or out)) from error
    lock.unlink(missing_ok=True)
    return about


@contextmanager
def _progress(console: Console, total: int, first: int) -> Iterator[Callable[[int, dict[str, float]], None]]:
    """Show a bar with losses, rate and time left, or an occasional line where there is no terminal; evaluations get a line of their own."""
    losses, rate = TextColumn("{task.fields[losses]}"), TextColumn("{task.fields[rate]}")
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), losses, rate, TimeRemainingColumn())
    shown = console.is_terminal
    bar = Progress(*columns, console=console, disable=not shown, transient=True, redirect_stdout=False, redirect_stderr=False)
    began, counted, is_due = monotonic(), first, now_and_then()
    with bar:
        task = bar.add_task("training", total=total, completed=first, losses="", rate="")

        def show(step: int, row: dict[str, float]) -> None:
            nonlocal began, counted
            if counted == first:  # the first step pays for loading and compiling: the rate is that of the others
                began, counted = monotonic(), step
            speed = (step - counted) / max(monotonic() - began, 1e-9)
            text = f"order {row['order_loss']:.3f}, token {row['token_loss']:.3f}"
            bar.update(task, completed=step, losses=text, rate=f"{speed:.1f} steps/s")
            due = is_due("score" in row)
            if "score" in row:
                lengths = "; ".join(
                    f"N={n}: {row[f'acceptance_{n}']:.3f} steps a pass, expected {row[f'expected_{n}']:.3f}" for n in training.BUDGETS
                )
                say(console, f"step {step}: {text}; {lengths}")
            elif due and not shown and step > counted:
                say(console, f"step {step} of {total}: {text}, {speed:.1f} steps/s, {(total - step) / max(speed, 1e-9):.0f} s left")

        yield show
