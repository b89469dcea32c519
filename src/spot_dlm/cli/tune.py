"""`spot tune`: measure what a pass costs by its rows on this machine, keep it for `--nodes auto`, and show the curve.

Example: `spot tune --refresh --threads 2`.
"""

import json
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from spot_dlm.budget import CostProfile
from spot_dlm.cli import options as o
from spot_dlm.cli.show import COMMAND, progress_bar, stderr_console
from spot_dlm.decode import trial
from spot_dlm.drafters import build_drafter
from spot_dlm.interfaces import Target
from spot_dlm.tune import load_profile, measure, profile_key, profile_path, save_profile

_PROMPT = "To JSON: Anna Berg is 34 years old and lives in Oslo."
_SURE = (1.0, 0.9, 0.7, 0.5)
_MOST = 32


def tune(
    model: o.Model = "shipped",
    drafter: o.DrafterName = o.DEFAULT_DRAFTER,
    graph: o.Graph = None,
    drafter_file: o.DrafterFile = None,
    transfer: o.Transfer = False,
    prompt: Annotated[str, typer.Option("--prompt", help="Something typical to decode, to measure drafts and the loop on.")] = _PROMPT,
    temperature: o.Temperature = 0.0,
    rule: o.Rule = o.DEFAULT_RULE,
    block_length: o.BlockLength = None,
    dtype: o.Dtype = None,
    device: o.Device = None,
    threads: o.Threads = None,
    raw: o.Raw = False,
    refresh: Annotated[bool, typer.Option("--refresh", help="Measure again, even where it is known.")] = False,
    as_json: o.Json = False,
) -> None:
    """Measure what a pass costs by its rows, keep it, and show the curve.

    --nodes auto evaluates as many guesses as pay by this curve. Without this command the first decode measures it. It is kept in
    $SPOT_CACHE (default: spot-dlm in the user's cache) for this model, device, number type, threads, block length and drafter.

    \b
    Examples:
      spot tune
      spot tune --threads 2 --refresh
      spot tune --model ./my-checkpoint --dtype bfloat16 --json
    """
    params = o.decode_params(temperature=temperature, rule=rule, block_length=block_length)
    build_drafter(drafter, graph=graph, file=drafter_file)  # a bad name or file shows before the target is loaded
    console = stderr_console()
    target = o.open_target(model, o.TargetOptions(dtype, device, threads, raw))

    def say(text: str) -> None:
        console.print(f"spot: {text}", highlight=False, markup=False, soft_wrap=True)

    guess = o.open_drafter(drafter, target.spec, o.DrafterFiles(graph, drafter_file, transfer), say)
    key = profile_key(target, guess, params)
    profile = None if refresh else load_profile(key, say)
    path = profile_path(key)
    if profile is None:
        run = trial(target, guess, _prompt_ids(target, prompt), params)
        with progress_bar(console, "measuring", 9, shown=console.is_terminal) as advance:
            profile = measure(target, guess, block_length, run, lambda done, total: advance(0) if done else None)
        saved = save_profile(key, profile, say)
        path = path if saved is None else saved
    document = {"profile": profile.to_dict(), "budgets": _budgets(profile), "key": key, "file": str(path), "command": COMMAND.get()}
    if as_json:
        print(json.dumps(document))
        return
    _show(Console(), profile, document)


def _prompt_ids(target: Target, prompt: str) -> list[int]:
    try:
        return target.encode(prompt)
    except ValueError:  # a checkpoint without tokenizer
        return [i for i in range(min(32, target.spec.vocab_size)) if i != target.spec.mask_token_id]


def _budgets(profile: CostProfile) -> list[dict[str, Any]]:
    """Return, for guesses that are right so often, the number of nodes in a chain that is fastest, and how much faster."""
    rows = []
    for sure in _SURE:
        for prefix in profile.prefixes:
            plain = 1 / (profile.cost(1, prefix) + profile.host_ms + profile.token_ms)
            rates = {n: _rate(profile, sure, n, prefix) / plain for n in range(2, _MOST + 1)}
            best = max(rates, key=lambda n: rates[n])
            nodes, speedup = (best, rates[best]) if rates[best] > 1 else (1, 1.0)
            rows.append({"sure": sure, "prefix": prefix, "nodes": nodes, "speedup": speedup})
    return rows


def _rate(profile: CostProfile, sure: float, nodes: int, prefix: int) -> float:
    """Return steps per millisecond of a chain whose every guess is right with that probability."""
    steps = sum(sure**d for d in range(nodes))
    return steps / (profile.cost(nodes, prefix) + profile.host_ms + profile.token_ms * steps + profile.drafting(nodes))


def _show(console: Console, profile: CostProfile, document: dict[str, Any]) -> None:
    where = f"{profile.device}, {profile.dtype}, {profile.threads} threads, blocks of {profile.block_length}"
    table = Table(box=box.SIMPLE, pad_edge=False, title=f"milliseconds of a pass by rows ({where})", title_justify="left")
    table.add_column("rows", justify="right")
    for prefix in profile.prefixes:
        table.add_column(f"prefix {prefix}", justify="right")
    table.add_column("of one row", justify="left")
    base = profile.pass_ms[0][0]
    for i, rows in enumerate(profile.rows):
        ratio = profile.pass_ms[0][i] / base
        bar = "#" * min(30, round(2 * ratio))
        table.add_row(str(rows), *(f"{curve[i]:.2f}" for curve in profile.pass_ms), f"{ratio:5.2f} {bar}")
    console.print(table)
    drafts = "  ".join(f"{n}: {ms:.2f}" for n, ms in profile.draft_ms)
    console.print(f"loop: {profile.host_ms:.2f} ms a pass and {profile.token_ms:.2f} ms a step")
    console.print(f"a draft of {profile.drafter} by nodes, ms: {drafts or 'none'}")
    console.print("a chain whose every guess is right with probability p is fastest with (nodes, times standard decoding):")
    for sure in _SURE:
        found = [b for b in document["budgets"] if b["sure"] == sure]
        console.print(f"  p = {sure:.1f}: " + "   ".join(f"prefix {b['prefix']}: {b['nodes']} ({b['speedup']:.2f}x)" for b in found))
    console.print(f"kept in {document['file']}", soft_wrap=True)
