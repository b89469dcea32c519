"""`spot tune`: measure what a pass costs by its rows on this machine, keep it for `--nodes auto`, and show the curve.

Example: `spot tune --refresh --threads 2 --plot cost.png`.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from spot_dlm.bench.plot import png
from spot_dlm.budget import MOST_NODES, CostProfile
from spot_dlm.cli import options as o
from spot_dlm.cli.bench_show import check_files
from spot_dlm.cli.show import COMMAND, progress_bar, say, stderr_console
from spot_dlm.decode import trial
from spot_dlm.drafters import build_drafter
from spot_dlm.interfaces import DecodeParams, Drafter, Target
from spot_dlm.tune import load_profile, measure, profile_key, profile_path, save_profile, stages

_PROMPT = "To JSON: Anna Berg is 34 years old and lives in Oslo."
_SURE = (1.0, 0.95, 0.9, 0.8, 0.7, 0.5)
_BAR = 24


def tune(
    model: o.Model = "shipped",
    family: o.FamilyName = None,
    cache: o.CacheName = "exact",
    drafter: o.DrafterName = o.DEFAULT_DRAFTER,
    graph: o.Graph = None,
    drafter_file: o.DrafterFile = None,
    transfer: o.Transfer = False,
    prompt: Annotated[str, typer.Option("--prompt", help="Something typical to decode, to measure drafts and the loop on.")] = _PROMPT,
    temperature: o.Temperature = 0.0,
    rule: o.Rule = o.DEFAULT_RULE,
    top_p: o.TopP = 1.0,
    top_k: o.TopK = 0,
    block_length: o.BlockLength = None,
    dtype: o.Dtype = None,
    device: o.Device = None,
    threads: o.Threads = None,
    raw: o.Raw = False,
    refresh: Annotated[bool, typer.Option("--refresh", help="Measure again, even where it is known.")] = False,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Draw the curves as PNG (needs matplotlib).")] = None,
    as_json: o.Json = False,
) -> None:
    """Measure what a pass costs by its rows, keep it, and show the curve.

    --nodes auto evaluates as many guesses as pay by this curve. Without this command the first decode measures it, in a few seconds. It
    is kept in $SPOT_CACHE (default: spot-dlm in the user's cache) for this model, device, number type, threads, block length, drafter
    and kind of sampling. Measure on a machine that is otherwise idle; --refresh after it has changed.

    JSON keys: profile = milliseconds of a pass by prefix and rows, of a draft by nodes, of the loop for each pass (host_ms) and each
    step (token_ms); budgets = the best number of nodes for a chain of guesses that are right so often, and how many times standard
    decoding it is; drafts = the same for the measured drafts; key, file, measured, command.

    \b
    Examples:
      spot tune
      spot tune --threads 2 --refresh --plot cost.png
      spot tune --model ./my-checkpoint --dtype bfloat16 --drafter chain --json
    """
    params = o.decode_params(temperature=temperature, top_p=top_p, top_k=top_k, rule=rule, block_length=block_length)
    check_files(None, None, plot)
    build_drafter(drafter, graph=graph, file=drafter_file)  # a bad name or file shows before the target is loaded
    console = stderr_console()
    target = o.open_target(model, o.TargetOptions(dtype, device, threads, raw, family=family, cache=cache))
    guess = o.open_drafter(drafter, target.spec, o.DrafterFiles(graph, drafter_file, transfer), lambda text: say(console, text))
    key = profile_key(target, guess, params)
    profile = None if refresh else load_profile(key, lambda text: say(console, text))
    document: dict[str, Any] = {"measured": profile is None, "file": str(profile_path(key))}
    if profile is None:
        profile = _measured(console, target, guess, prompt, params)
        if save_profile(key, profile, lambda text: say(console, text)) is None:
            document["file"] = None
    budgets = [_budget(profile, sure, prefix) for sure in _SURE for prefix in profile.prefixes]
    document |= {"profile": profile.to_dict(), "budgets": budgets, "drafts": _drafts(profile), "key": key, "command": COMMAND.get()}
    if plot is not None:
        plot.write_bytes(_figure(profile))
    if as_json:
        print(json.dumps(document))
    else:
        _show(Console(), profile, document)


def _measured(console: Console, target: Target, drafter: Drafter, prompt: str, params: DecodeParams) -> CostProfile:
    length = params.block_length or target.spec.block_length
    try:
        ids = target.encode(prompt)
    except ValueError:  # a checkpoint without tokenizer
        ids = [i for i in range(min(32, target.spec.vocab_size)) if i != target.spec.mask_token_id]
    run, last = trial(target, drafter, ids, params), 0
    with progress_bar(console, "measuring", stages(target.spec, length), shown=console.is_terminal) as advance:

        def progress(done: int, _: int) -> None:
            nonlocal last
            for _ in range(done - last):
                advance(0)
            last = max(last, done)

        return measure(target, drafter, params.block_length, run, progress)


def _speedups(profile: CostProfile, prefix: int, nodes: list[int], steps: list[float]) -> list[float]:
    """Return how many times standard decoding is with so many nodes, if they give so many steps of a pass."""
    curve = profile.between(profile.curves(max(nodes)), prefix)
    plain = curve[0] + profile.host_ms + profile.token_ms
    return [
        s * float(plain) / float(curve[n - 1] + profile.host_ms + profile.token_ms * s + (profile.drafting(n) if n > 1 else 0))
        for n, s in zip(nodes, steps, strict=True)
    ]


def _budget(profile: CostProfile, sure: float, prefix: int) -> dict[str, Any]:
    """Return the number of nodes that is best for a chain whose every guess is right with that probability."""
    nodes = list(range(2, MOST_NODES + 1))
    rates = _speedups(profile, prefix, nodes, [sum(sure**d for d in range(n)) for n in nodes])
    best = int(np.argmax(rates))
    chosen, speedup = (nodes[best], rates[best]) if rates[best] > 1 else (1, 1.0)
    return {"sure": sure, "prefix": prefix, "nodes": chosen, "speedup": speedup}


def _drafts(profile: CostProfile) -> list[dict[str, Any]]:
    """Return what the measured drafts cost, gave and are worth after the shortest prefix."""
    nodes, steps = [n for n, _ in profile.steps_per_pass], [s for _, s in profile.steps_per_pass]
    speedups = _speedups(profile, profile.prefixes[0], nodes, steps) if nodes else []
    return [
        {"nodes": n, "ms": profile.drafting(n), "steps_per_pass": s, "speedup": x} for n, s, x in zip(nodes, steps, speedups, strict=True)
    ]


def _show(console: Console, profile: CostProfile, document: dict[str, Any]) -> None:
    threads = f"{profile.threads} thread{'s' if profile.threads > 1 else ''}"
    console.print(f"milliseconds of a pass by rows ({profile.device}, {profile.dtype}, {threads}, blocks of {profile.block_length}),")
    console.print("and in brackets how many passes of one row that is")
    table = Table(box=box.SIMPLE, pad_edge=False, collapse_padding=True)
    table.add_column("rows", justify="right")
    for prefix in profile.prefixes:
        table.add_column(f"prefix {prefix}", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    dearest = profile.pass_ms[0][-1]
    for i, rows in enumerate(profile.rows):
        costs = [f"{curve[i]:.1f} ({curve[i] / curve[0]:.1f})" for curve in profile.pass_ms]
        table.add_row(str(rows), *costs, "#" * max(1, round(_BAR * profile.pass_ms[0][i] / dearest)))
    console.print(table)
    console.print(f"the loop takes {profile.host_ms:.2f} ms a pass and {profile.token_ms:.2f} ms a step")
    if document["drafts"]:
        console.print(f"drafts of {profile.drafter} while the prompt was decoded:")
        console.print(_drafts_table(document["drafts"]))
    console.print("best nodes of a chain whose guesses are right so often (times standard decoding):")
    console.print(_budgets_table(profile, document["budgets"]))
    console.print(f"kept in {document['file']}" if document["file"] else "not kept", soft_wrap=True)


def _drafts_table(drafts: list[dict[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False, collapse_padding=True)
    for name in ("nodes", "ms a draft", "steps a pass", "times standard"):
        table.add_column(name, justify="right")
    for d in drafts:
        table.add_row(str(d["nodes"]), f"{d['ms']:.2f}", f"{d['steps_per_pass']:.2f}", f"{d['speedup']:.2f}x")
    return table


def _budgets_table(profile: CostProfile, budgets: list[dict[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False, collapse_padding=True)
    table.add_column("right", justify="right")
    for prefix in profile.prefixes:
        table.add_column(f"prefix {prefix}", justify="right")
    for sure in _SURE:
        table.add_row(f"{sure:.0%}", *(f"{c['nodes']} ({c['speedup']:.2f}x)" for c in budgets if c["sure"] == sure))
    return table


def _figure(profile: CostProfile) -> bytes:
    """Draw milliseconds by rows, and what a chain gains by nodes, for every prefix."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    costs, gains = figure.subplots(1, 2)
    for number, (prefix, curve) in enumerate(zip(profile.prefixes, profile.pass_ms, strict=True)):
        costs.plot(profile.rows, curve, marker="o", markersize=3, color=f"C{number}", label=f"prefix {prefix}")
    nodes = list(range(1, MOST_NODES + 1))
    for number, sure in enumerate(_SURE):
        steps = [sum(sure**d for d in range(n)) for n in nodes]
        gains.plot(nodes, _speedups(profile, profile.prefixes[0], nodes, steps), color=f"C{number}", label=f"{sure:.0%} right")
    gains.axhline(1, color="#999999", linewidth=0.8)
    for panel, x, y in ((costs, "rows of a pass", "milliseconds"), (gains, f"nodes (prefix {profile.prefixes[0]})", "times standard")):
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter("{x:.0f}")
        panel.set_xlabel(x)
        panel.set_ylabel(y)
        panel.grid(alpha=0.25)
        panel.legend(frameon=False, fontsize=8)
    costs.set_ylim(bottom=0)
    return png(figure)
