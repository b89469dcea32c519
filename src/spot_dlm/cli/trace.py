"""`spot trace`: record standard decoding of many prompts as traces, the food of `spot calibrate`, `spot train` and `spot analyze`.

Example: `spot trace --prompts prompts.jsonl --temperature 0 --temperature 1 --workers 2 --out traces`.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from time import monotonic
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console

from spot_dlm.cli import options as o
from spot_dlm.cli.generate import prepare
from spot_dlm.cli.jsonl import KNOWN, PromptLine, read_prompts
from spot_dlm.cli.on_ray import Place, check_ray, shards_on_ray
from spot_dlm.cli.show import COMMAND, progress_lines, say, stderr_console
from spot_dlm.drafter_files import load_order_model
from spot_dlm.interfaces import Target
from spot_dlm.record import Recording, TraceSetting, record
from spot_dlm.tasks import load_prompts
from spot_dlm.traces import Columns, shard_path

ASK_BYTES = 2 * 10**9
"""Estimates above it are confirmed on a terminal."""


def trace(
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder of the traces; a second run continues it.")],
    prompts: o.PromptsFile = None,
    task: Annotated[list[str] | None, typer.Option("--task", help="Packaged held-out prompts: a task's name. Repeatable.")] = None,
    limit: Annotated[int | None, typer.Option("--limit", help="First so many prompts of the file or of each task.")] = None,
    model: o.Model = "shipped",
    family: o.FamilyName = None,
    cache: o.CacheName = "exact",
    temperature: o.Temperatures = [0.0, 1.0],  # noqa: B006
    rule: o.Rules = [o.DEFAULT_RULE],  # noqa: B006
    block_length: Annotated[
        list[int] | None, typer.Option("--block-length", help="Tokens of a block; default: the checkpoint's. Repeatable.")
    ] = None,
    top_p: o.TopP = 1.0,
    top_k: o.TopK = 0,
    max_new_tokens: o.MaxNewTokens = o.MAX_NEW_TOKENS,
    seed: o.Seed = 0,
    spread: Annotated[bool, typer.Option("--spread", help="Decode every prompt in one setting only, in turn, not in all of them.")] = False,
    drafter_file: Annotated[
        Path | None,
        typer.Option(
            "--drafter-file",
            metavar="DIR|ID",
            callback=o.located,
            help="Record by speculative decoding with this drafter ('spot train'): same steps, "
            "and what its passes show of the effects of commits, which training makes use of.",
        ),
    ] = None,
    nodes: Annotated[list[int], typer.Option("--nodes", help="Its budgets, in turn. Repeatable.")] = [8, 16, 32],  # noqa: B006
    workers: Annotated[int, typer.Option("--workers", help="Processes, each with its own copy of the model.")] = 1,
    threads: Annotated[int, typer.Option("--threads", help="CPU threads of each process.")] = 1,
    dtype: o.Dtype = None,
    device: o.Device = None,
    raw: o.Raw = False,
    ray: o.RayAddress = None,
    actors: o.Actors = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before a large recording.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, say how much it would be, record nothing.")] = False,
) -> None:
    """Record standard decoding: every prompt in every combination of temperature, rule and block length.

    Traces hold, for every step, a summary of each masked position's distribution (never whole logits), what was committed, and at
    temperatures above 0 the tokens that the known noise of later steps would draw. The last line on stdout is one JSON document.

    The same command continues after an interruption: finished shards (64 sequences each) are kept.

    With --drafter-file a trained drafter decodes speculatively: the steps are the same, by the promise of this program.

    \b
    Examples:
      spot trace --prompts prompts.jsonl --temperature 0 --temperature 1 --rule standard --rule bfloat16 --out traces
      spot trace --task json --task python --block-length 16 --block-length 32 --spread --workers 2 --out traces
      spot trace --prompts prompts.jsonl --out traces --dry-run
      spot trace --prompts prompts.jsonl --out traces --ray local --actors 2
    """
    lengths: list[int | None] = [*block_length] if block_length else [None]
    settings = [
        TraceSetting(r, t, top_p, top_k, length, max_new_tokens) for r, t, length in dict.fromkeys(product(rule, temperature, lengths))
    ]
    for name, value in (("limit", limit), ("workers", workers)):
        if value is not None and value < 1:
            raise ValueError(f"--{name} {value} must be at least 1")
    check_ray(ray, {"--actors": actors})
    if ray is not None and workers > 1:
        raise ValueError(f"--workers {workers} are processes of this machine: with --ray give --actors")
    if min(nodes) < 2:
        raise ValueError(f"--nodes {min(nodes)} must be at least 2")
    if drafter_file is not None:
        load_order_model(drafter_file)
    console = stderr_console()
    lines, families = _prompt_lines(prompts, task, limit, console)
    options = o.TargetOptions(dtype, device, threads, raw, family=family, cache=cache)
    target = o.open_target(model, options)
    if drafter_file is not None and load_order_model(drafter_file).target_fingerprint != target.spec.fingerprint:
        say(console, "the drafter of --drafter-file was trained on another model: fewer of its guesses will come true")
    for line in lines:
        for length in {s.block_length for s in settings}:
            prepare(target, line, o.decode_params(max_new_tokens=max_new_tokens, block_length=length))
    recording = Recording(
        model, [_row(line, of) for line, of in zip(lines, families, strict=True)], settings, seed, spread,
        load_options=options.arguments,
        drafter=None if drafter_file is None else str(drafter_file), nodes=tuple(nodes),
    )  # fmt: skip
    needed, free = recording.estimated_bytes(target.spec.block_length, out), _free_bytes(out)
    total = len(recording.jobs)
    say(
        console,
        f"{total} sequences ({len(lines)} prompts, {len(settings)} settings{', one each' if spread else ''}) in "
        f"{recording.num_shards} shards, {f'about {_size(needed)} to write' if needed else 'all there'}; {_size(free)} free",
    )
    if dry_run:
        print(json.dumps({"folder": str(out), "sequences": total, "estimated_bytes": needed, "free_bytes": free}))
        return
    if needed > free:
        raise ValueError(f"{out}: about {_size(needed)} are needed and {_size(free)} are free; free some, or record fewer prompts")
    if needed > ASK_BYTES and not yes and console.is_terminal and not typer.confirm("Record?", default=True, err=True):
        raise KeyboardInterrupt("nothing recorded")
    elsewhere = (
        None if ray is None else partial(shards_on_ray, recording, target.spec.fingerprint, Place(ray, actors, threads, device), console)
    )
    _record(recording, out, workers, threads, target, console, elsewhere)


def _record(
    recording: Recording,
    out: Path,
    workers: int,
    threads: int,
    target: Target,
    console: Console,
    elsewhere: Callable[[Sequence[int]], Iterator[tuple[int, Columns]]] | None,
) -> None:
    began, reached = monotonic(), 0
    try:
        with progress_lines(console, "recording", "recorded", "sequences") as show:

            def progress(done: int, total: int) -> None:
                nonlocal reached
                reached = done
                show(done, total)

            manifest = record(recording, out, workers, threads, progress, COMMAND.get(), target, elsewhere)
    except KeyboardInterrupt:
        kept = len(recording.jobs) - sum(len(recording.shard_jobs(n)) for n in recording.missing(out))
        raise KeyboardInterrupt(
            f"interrupted: {kept} of {len(recording.jobs)} sequences recorded and kept; run the same command again to continue"
        ) from None
    states = 0
    for number in range(recording.num_shards):
        with np.load(shard_path(out, number), allow_pickle=False) as shard:
            states += int(shard["block_states"].sum(dtype=np.int64))
    summary = {"folder": str(out), "sequences": reached, "states": states, "bytes": sum(s["bytes"] for s in manifest["shards"])}
    print(json.dumps(summary | {"seconds": round(monotonic() - began, 3)}))


def _prompt_lines(prompts: Path | None, task: list[str] | None, limit: int | None, console: Console) -> tuple[list[PromptLine], list[str]]:
    """Return the prompts of the file, or the tasks', and their families."""
    if (prompts is None) == (not task):
        raise ValueError("give --prompts FILE or --task NAME" + (", not both" if task else ""))
    if prompts is None:
        found = [p for name in dict.fromkeys(task or []) for p in load_prompts(name, limit=limit)]
        return [PromptLine(p.id, i, p.prompt, f"prompt {p.id}", {}) for i, p in enumerate(found)], [p.family for p in found]
    lines = read_prompts(prompts)
    rows = [json.loads(text) for text in prompts.read_bytes().split(b"\n") if text]
    for line, row in zip(lines, rows, strict=True):
        if line.overrides:
            raise ValueError(f"{line.where}: {', '.join(line.overrides)} cannot differ between prompts of a trace; use the options")
        if not isinstance(row.get("family", ""), str):
            raise ValueError(f"{line.where}: family must be a text")
    if unknown := sorted({k for row in rows for k in row} - {*KNOWN, "family"}):
        say(console, f"{prompts}: ignored keys {', '.join(unknown)}; known are id, prompt, prompt_ids, family")
    return lines[:limit], [row.get("family", "") for row in rows][:limit]


def _row(line: PromptLine, family: str) -> dict[str, Any]:
    key = "prompt" if isinstance(line.prompt, str) else "prompt_ids"
    return {"id": line.id, "family": family, key: line.prompt}


def _free_bytes(folder: Path) -> int:
    """Return the free space where the folder is or will be."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{max(count, 1e5) / 1e6:.1f} MB"
