"""`spot bench`: acceptance length at equal budgets (`passes`), accuracy against speed (`tradeoff`), seconds (`speed`, `bench_speed.py`).

Example: `spot bench passes --quick --task json --out passes.json --plot passes.png`.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

from spot_dlm.bench import passes as bench_passes
from spot_dlm.bench import plot as plots
from spot_dlm.bench import report
from spot_dlm.bench import tradeoff as bench_tradeoff
from spot_dlm.bench.cells import passes_document
from spot_dlm.bench.drafters import FAMILIES, entries
from spot_dlm.cli import options as o
from spot_dlm.cli.bench_show import Markdown, Out, Plot, check_files, chosen, facts, finish, progress, shown_tables, table, where
from spot_dlm.cli.bench_speed import speed
from spot_dlm.cli.bench_transfer import transfer
from spot_dlm.cli.show import COMMAND, say, stderr_console
from spot_dlm.drafters import DRAFTERS
from spot_dlm.tasks import FAMILY_TASKS, GRADED_TASKS, TASKS

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
app.command("speed", short_help="Wall-clock speed-up of every drafter, and where the time goes.")(speed)
app.command("transfer", short_help="A drafter on targets that it was not trained on.")(transfer)

FULL: dict[str, Any] = {"limit": 20, "temperature": [0.0, 1.0], "nodes": [2, 4, 8, 16, 32], "max_new_tokens": o.MAX_NEW_TOKENS}
QUICK: dict[str, Any] = {"limit": 2, "temperature": [0.0, 1.0], "nodes": [4, 8, 16, 32], "max_new_tokens": 32}
TRADEOFF_FULL: dict[str, Any] = {"limit": 50, "temperature": [0.0], "repeats": 3, "max_new_tokens": o.MAX_NEW_TOKENS}
TRADEOFF_QUICK: dict[str, Any] = {"limit": 5, "temperature": [0.0], "repeats": 1, "max_new_tokens": o.MAX_NEW_TOKENS}


def _help(text: str, full: object, quick: object) -> str:
    def shown(value: object) -> str:
        return " ".join(f"{v:g}" for v in value) if isinstance(value, list) else str(value)

    return f"{text} Default: {shown(full)}; quick: {shown(quick)}." if full != quick else f"{text} Default: {shown(full)}."


Quick = Annotated[bool, typer.Option("--quick", help="A small grid (under three minutes with the shipped model); options override it.")]


@app.callback()
def _bench() -> None:
    """Measure: passes saved by every drafter, and what lossy decoding costs in accuracy."""


@app.command("passes", short_help="Acceptance length of every drafter at equal node budgets.")
def passes(
    model: o.Model = "shipped",
    task: Annotated[list[str] | None, typer.Option("--task", help=f"{' | '.join(TASKS)}. Repeatable; default: all families.")] = None,
    split: o.Split = "heldout_values",
    limit: Annotated[
        int | None, typer.Option("--limit", help=_help("First so many prompts of each task.", FULL["limit"], QUICK["limit"]))
    ] = None,
    temperature: Annotated[
        list[float] | None, typer.Option("--temperature", help=_help("Repeatable.", FULL["temperature"], QUICK["temperature"]))
    ] = None,
    nodes: Annotated[
        list[int] | None, typer.Option("--nodes", help=_help("Rows of one pass. Repeatable.", FULL["nodes"], QUICK["nodes"]))
    ] = None,
    resolution: Annotated[
        list[str] | None, typer.Option("--resolution", help="Confidences of the decoder: float32 | bfloat16. Repeatable; default: both.")
    ] = None,
    drafter: Annotated[
        list[str] | None, typer.Option("--drafter", help=f"{' | '.join(FAMILIES)}. Repeatable; default: all that are available.")
    ] = None,
    graph: Annotated[
        list[Path] | None,
        typer.Option(
            "--graph",
            metavar="FILE|ID",
            callback=o.located,
            help="Calibrated graphs for spiffy: a file, folder or hub id. Repeatable; default: the shipped ones.",
        ),
    ] = None,
    block_length: Annotated[
        list[int] | None, typer.Option("--block-length", help="Tokens of a block. Repeatable; default: the checkpoint's.")
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option("--max-new-tokens", help=_help("Tokens to return at most.", FULL["max_new_tokens"], QUICK["max_new_tokens"])),
    ] = None,
    seed: o.Seed = 0,
    audit: Annotated[int, typer.Option("--audit", help="Prompts of each task and setting decoded again with every row evaluated.")] = 1,
    real: Annotated[bool, typer.Option("--real", help="Evaluate every row of every pass, remember none (slow).")] = False,
    quick: Quick = False,
    out: Out = None,
    markdown: Markdown = None,
    plot: Plot = None,
    dtype: o.Dtype = None,
    device: o.Device = None,
    threads: o.Threads = None,
    raw: o.Raw = False,
    family: o.FamilyName = None,
    cache: o.CacheName = "exact",
) -> None:
    """Measure the acceptance length (transitions per decoding pass) of every drafter at equal node budgets.

    Every prompt is decoded plainly and with every drafter and budget, at both resolutions of the confidence and at every temperature, and
    compared in tokens and commit order. States are evaluated once and remembered, because the walk reads only states of standard
    decoding; --audit runs some prompts again without that, --real all of them. Exit code 1 if anything is not identical.

    \b
    The last line of stdout is one JSON document:
      cells        task, resolution, block_length, temperature, nodes, drafter, acceptance_length, low, high (95 %, bootstrap over
                   prompts), nfe_reduction, identical, expected_acceptance_length (what the drafter expected), ...
      pooled       the same over the prompts of all tasks
      comparisons  order against the best baseline: difference, low, high, ratio, oracle_share
      divergences, provenance, command

    \b
    Examples:
      spot bench passes --quick
      spot bench passes --task json --drafter chain --drafter order --nodes 8 --limit 50 --out passes.json --plot passes.png
      spot bench passes --quick --task humaneval --max-new-tokens 32 --block-length 16 --block-length 32
    """
    preset = QUICK if quick else FULL
    grid = bench_passes.Grid(
        tasks=tuple(dict.fromkeys(task or FAMILY_TASKS)),
        split=split,
        limit=chosen(limit, preset["limit"]),
        temperatures=tuple(dict.fromkeys(temperature or preset["temperature"])),
        nodes=tuple(dict.fromkeys(nodes or preset["nodes"])),
        resolutions=tuple(dict.fromkeys(resolution or bench_passes.RESOLUTIONS)),
        block_lengths=tuple(dict.fromkeys(block_length)) if block_length else (None,),
        max_new_tokens=chosen(max_new_tokens, preset["max_new_tokens"]),
        seed=seed,
        audit=audit,
        real=real,
    )
    check_files(out, markdown, plot)
    console = stderr_console()
    compared, missing = entries(drafter or FAMILIES, graph or [], optional=drafter is None)
    for remark in missing:
        say(console, remark)
    target = o.open_target(model, o.TargetOptions(dtype, device, threads, raw, family=family, cache=cache))
    num_prompts = sum(len(prompts) for prompts in bench_passes.load(target, grid).values())
    runs: list[bench_passes.Run] = []

    def seen(run: bench_passes.Run) -> None:
        runs.append(run)
        advance(run.transitions)
        if run.problem:
            say(console, where(run))

    with progress(console, "bench passes", bench_passes.count_runs(grid, num_prompts, compared), runs) as advance:
        bench_passes.run(target, grid, compared, seen)
    about = facts(target, grid.params(0.0, "float32", grid.block_lengths[0], 1), compared) | {
        "temperature": list(grid.temperatures), "rule": [bench_passes.RESOLUTIONS[r] for r in grid.resolutions],
        "block_length": sorted({r.setting.block_length for r in runs}), "split": split, "limit": grid.limit, "audit": audit, "real": real,
    }  # fmt: skip
    document = passes_document(runs, about, COMMAND.get())
    console.print(*shown_tables(document), sep="\n")
    finish(document, out, markdown, plot, report.passes_markdown, plots.passes_figure)
    if document["divergences"]:
        raise typer.Exit(1)


@app.command("tradeoff", short_help="Accuracy and speed of lossy rules and of speculation.")
def tradeoff(
    model: o.Model = "shipped",
    task: Annotated[
        list[str] | None, typer.Option("--task", help=f"{' | '.join(TASKS)}. Repeatable; default: {' '.join(GRADED_TASKS)}.")
    ] = None,
    split: o.Split = "heldout_values",
    limit: Annotated[
        int | None,
        typer.Option("--limit", help=_help("First so many prompts of each task.", TRADEOFF_FULL["limit"], TRADEOFF_QUICK["limit"])),
    ] = None,
    temperature: o.Temperatures = [0.0],  # noqa: B006
    rule: Annotated[
        list[str] | None,
        typer.Option("--rule", help=f"Lossy rules beside standard decoding. Repeatable; default: {' '.join(bench_tradeoff.LOSSY_RULES)}."),
    ] = None,
    nodes: Annotated[int, typer.Option("--nodes", help="Rows of one pass of the speculative methods.")] = 8,
    drafter: Annotated[
        str | None, typer.Option("--drafter", help=f"On standard decoding: {' | '.join(DRAFTERS)}. Default: order, else chain.")
    ] = None,
    threshold_drafter: Annotated[str, typer.Option("--threshold-drafter", help="On top of threshold=0.9.")] = "chain",
    repeats: Annotated[
        int | None, typer.Option("--repeats", help=_help("Timed runs of everything.", TRADEOFF_FULL["repeats"], TRADEOFF_QUICK["repeats"]))
    ] = None,
    block_length: o.BlockLength = None,
    max_new_tokens: o.MaxNewTokens = o.MAX_NEW_TOKENS,
    seed: o.Seed = 0,
    quick: Quick = False,
    out: Out = None,
    markdown: Markdown = None,
    plot: Plot = None,
    dtype: o.Dtype = None,
    device: o.Device = None,
    threads: o.Threads = None,
    raw: o.Raw = False,
    family: o.FamilyName = None,
    cache: o.CacheName = "exact",
) -> None:
    """Measure accuracy and speed of standard decoding, of rules that commit several positions at once, and of speculation.

    Several positions per step save passes but change answers; speculation saves passes and changes nothing. All methods run interleaved
    on the same prompts; seconds are medians and mean something on a quiet machine only. Exit code 1 if speculation changed anything.

    \b
    The last line of stdout is one JSON document; its rows hold task ("all" = all together), temperature, method, rule, drafter, accuracy
    (null where no program can grade), accuracy_low and _high (95 %), same_answers (share identical to standard decoding),
    identical_to_rule, tokens_per_pass, seconds, speed_up, ...

    \b
    Examples:
      spot bench tradeoff --quick
      spot bench tradeoff --task json --task python --limit 100 --out tradeoff.json --plot tradeoff.png
    """
    preset = TRADEOFF_QUICK if quick else TRADEOFF_FULL
    plan = bench_tradeoff.Plan(
        tasks=tuple(dict.fromkeys(task or GRADED_TASKS)),
        split=split,
        limit=chosen(limit, preset["limit"]),
        temperatures=tuple(dict.fromkeys(temperature)),
        rules=tuple(dict.fromkeys(rule or bench_tradeoff.LOSSY_RULES)),
        nodes=nodes,
        base=drafter or ("order" if "order" in DRAFTERS else "chain"),
        on_threshold=threshold_drafter,
        block_length=block_length,
        max_new_tokens=max_new_tokens,
        seed=seed,
        repeats=chosen(repeats, preset["repeats"]),
    )
    check_files(out, markdown, plot)
    console = stderr_console()
    target = o.open_target(model, o.TargetOptions(dtype, device, threads, raw, family=family, cache=cache))
    answers: list[bench_tradeoff.Answer] = []

    def seen(answer: bench_tradeoff.Answer) -> None:
        answers.append(answer)
        advance(answer.result.counts.tokens)
        if not answer.identical:
            place = f"{answer.prompt} (temperature {answer.temperature:g})"
            say(console, f"not identical: {place}: {answer.method.label} differs from its rule without guesses")

    with progress(console, "bench tradeoff", bench_tradeoff.count_answers(plan), answers) as advance:
        bench_tradeoff.run(target, plan, seen)
    params = plan.params(bench_tradeoff.Method(bench_tradeoff.STANDARD), 0.0)
    about = facts(target, params, entries(list(filter(None, (plan.base, plan.on_threshold))))[0]) | {
        "temperature": list(plan.temperatures), "rule": [m.rule for m in plan.methods], "nodes": nodes, "split": split,
        "limit": plan.limit, "repeats": plan.repeats,
    }  # fmt: skip
    document: dict[str, Any] = {"rows": bench_tradeoff.rows(answers), "provenance": about, "command": COMMAND.get()}
    shown = [r for r in document["rows"] if r["task"] == document["rows"][-1]["task"]]
    console.print(table(report.TRADEOFF_HEAD, report.tradeoff_lines(shown, intervals=False)))
    finish(document, out, markdown, plot, report.tradeoff_markdown, plots.tradeoff_figure)
    if not all(row["identical_to_rule"] for row in document["rows"]):
        raise typer.Exit(1)
