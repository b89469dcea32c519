"""`spot bench speed`: wall-clock speed-up over standard decoding of the baselines and of SPOT, and where the time goes.

Example: `spot bench speed --quick --out speed.json --plot speed.png`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.text import Text

from spot_dlm.bench import speed as bench
from spot_dlm.bench.speed_figures import speed_document, speed_tables
from spot_dlm.bench.speed_plan import INSIDE, NAMES, PLAIN, Method, Plan, methods
from spot_dlm.bench.speed_plot import speed_figure
from spot_dlm.cli import options as o
from spot_dlm.cli.bench_show import Out, Plot, check_files, chosen, facts, finish, table
from spot_dlm.cli.show import COMMAND, now_and_then, progress_bar, say, stderr_console
from spot_dlm.drafters import Calibrated
from spot_dlm.interfaces import Drafter, Target
from spot_dlm.tasks import FAMILY_TASKS, SPLITS, TASKS

BUDGETS: dict[str, list[int | str]] = {
    "chain": [2, 4, 8], "calibrated": [4, 8], "calibrated-published": [4, 8], "linear": [4, 8], "order": [2, 4, 8, 16, "auto"],
    "order" + INSIDE: [4, 8],
}  # fmt: skip
FULL: dict[str, Any] = {
    "task": list(FAMILY_TASKS), "temperature": [0.0, 1.0], "rule": ["standard", "bfloat16"], "batch": [1, 4, 16],
    "prefix": [64, 512, 2048], "limit": 4, "repeats": 3, "max_new_tokens": 64, "drafter": BUDGETS,
}  # fmt: skip
QUICK: dict[str, Any] = FULL | {
    "task": ["json", "rewrite"], "rule": ["bfloat16"], "prefix": [64, 512], "limit": 2, "repeats": 2, "max_new_tokens": 32,
    "drafter": {"chain": [4], "calibrated": [4], "order": [4, "auto"], "order" + INSIDE: [4]},
}  # fmt: skip


def _help(text: str, name: str) -> str:
    def shown(value: Any) -> str:
        return " ".join(f"{v:g}" if isinstance(v, float) else str(v) for v in value) if isinstance(value, list) else str(value)

    full, quick = shown(FULL[name]), shown(QUICK[name])
    return f"{text} Default: {full}" + (f"; quick: {quick}." if quick != full else ".")


def speed(
    model: o.Model = "shipped",
    task: Annotated[list[str] | None, typer.Option("--task", help=_help(f"{' | '.join(TASKS)}. Repeatable.", "task"))] = None,
    split: Annotated[str, typer.Option("--split", help=f"Held-out prompts: {' | '.join(SPLITS)}.")] = "heldout_values",
    limit: Annotated[int | None, typer.Option("--limit", help=_help("Prompts of each task, whole batches, at least one.", "limit"))] = None,
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            "--drafter",
            help=f"{' | '.join(NAMES)}. '{INSIDE}' = no boundary drafting, spiffy = all its variants. Repeatable; default: the strongest.",
        ),
    ] = None,
    nodes: Annotated[
        list[str] | None,
        typer.Option("--nodes", metavar="N|auto", help="Rows of one pass, of every drafter. Repeatable; default: its own."),
    ] = None,
    temperature: Annotated[list[float] | None, typer.Option("--temperature", help=_help("Repeatable.", "temperature"))] = None,
    rule: Annotated[list[str] | None, typer.Option("--rule", help=_help("Unmask rule. Repeatable.", "rule"))] = None,
    batch: Annotated[list[int] | None, typer.Option("--batch", help=_help("Prompts that share a pass. Repeatable.", "batch"))] = None,
    prefix: Annotated[
        list[int] | None,
        typer.Option("--prefix", help=_help("Tokens of a prompt, filled up with others in front; 0 = none. Repeatable.", "prefix")),
    ] = None,
    block_length: Annotated[
        list[int] | None, typer.Option("--block-length", help="Tokens of a block. Repeatable; default: the checkpoint's.")
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option("--max-new-tokens", help=_help("Tokens to return at most.", "max_new_tokens"))
    ] = None,
    repeats: Annotated[int | None, typer.Option("--repeats", help=_help("Timed runs of every method.", "repeats"))] = None,
    seed: o.Seed = 0,
    graph: o.Graph = None,
    drafter_file: o.DrafterFile = None,
    transfer: o.Transfer = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="A small grid (under four minutes with the shipped model); options override it.")
    ] = False,
    out: Out = None,
    plot: Plot = None,
    as_json: o.Json = False,
    dtype: o.Dtype = None,
    device: o.Device = None,
    threads: o.Threads = None,
    raw: o.Raw = False,
    family: o.FamilyName = None,
    cache: o.CacheName = "exact",
) -> None:
    """Measure how much faster than standard decoding every drafter is, on the clock: same prompts, kernels and batches, one process.

    Every repetition runs all methods in turn, in an order that rotates; the first run of each kind is not counted. Every answer is
    compared with standard decoding's in tokens and commit order: exit code 1 if anything is not identical. Use a quiet machine.

    \b
    The last line of stdout is one JSON document:
      rows       task, temperature, rule, block_length, batch, prefix, drafter, nodes, speedup (median of the pairs), low, high
                 (95 %, bootstrap), speedup_decoding (prefill left out), nfe_reduction, nfe_reduction_official (against a decoder
                 with a commit pass per block), share_outside_target, tokens_per_s, standard_tokens_per_s, identical,
                 split (seconds of prefill, target, draft, noise_and_walk, host), roofline (the speed-up if rows and drafting were
                 free; gap_ms says, per pass, what keeps it from that)
      medians    over tasks; best = the fastest budget of its family
      tuning_s   seconds spent on measuring the cost of passes (--nodes auto), not part of any run
      processor, provenance, command

    \b
    Examples:
      spot bench speed --quick
      spot bench speed --task json --drafter order --nodes 4 --nodes auto --batch 1 --batch 16 --prefix 512
      spot bench speed --block-length 4 --drafter order --drafter order-inside --out speed-4.json --plot speed-4.png
    """
    preset = QUICK if quick else FULL
    axes = {"task": task, "temperature": temperature, "rule": rule, "batch": batch, "prefix": prefix}
    values = {name: tuple(dict.fromkeys(given or preset[name])) for name, given in axes.items()}
    plan = Plan(
        tasks=values["task"],
        methods=tuple(_methods(drafter, nodes, preset["drafter"])),
        split=split,
        limit=chosen(limit, preset["limit"]),
        temperatures=values["temperature"],
        rules=values["rule"],
        block_lengths=tuple(dict.fromkeys(block_length)) if block_length else (None,),
        batches=values["batch"],
        prefixes=values["prefix"],
        max_new_tokens=chosen(max_new_tokens, preset["max_new_tokens"]),
        repeats=chosen(repeats, preset["repeats"]),
        seed=seed,
    )
    check_files(out, None, plot)
    console = stderr_console()
    target = o.open_target(model, o.TargetOptions(dtype, device, threads, raw, family=family, cache=cache))
    files = o.DrafterFiles(graph, drafter_file, transfer)
    names = list(dict.fromkeys(m.drafter for m in plan.methods))
    drafters = _drafters(target, plan, names, files, bool(drafter), lambda text: say(console, text))
    clock = bench.Clock()
    samples: list[bench.Sample] = []
    total = sum(plan.num_runs(s) for s in plan.settings(target.spec))
    with _progress(console, total) as advance:

        def seen(sample: bench.Sample, share: float) -> None:
            samples.append(sample)
            advance(sample.counts.tokens, share)
            if sample.problem:
                say(console, f"not identical: {sample.setting}, {sample.method.label}, {sample.method.nodes} nodes: {sample.problem}")

        bench.run(target, plan, drafters, seen, clock, lambda text: say(console, text))
    about = facts(target, plan.params(samples[0].setting, PLAIN), []) | {
        "temperature": list(plan.temperatures), "rule": list(plan.rules), "split": split, "limit": plan.limit, "repeats": plan.repeats,
        "threads": torch.get_num_threads(),
    }  # fmt: skip
    document = speed_document(samples, about, COMMAND.get(), clock.tuning_s)
    if not as_json:
        console.width = console.width if console.is_terminal else 120
        for title, head, lines in speed_tables(document["medians"]):
            console.print(Text(title, "bold"), table(head, lines))
        verdict = "all identical to standard decoding" if document["all_identical"] else "NOT IDENTICAL to standard decoding"
        console.print(Text(f"{verdict}; {document['processor']}, {torch.get_num_threads()} threads", "bold"))
    finish(document, out, None, plot, lambda _: "", speed_figure)
    if not document["all_identical"]:
        raise typer.Exit(1)


def _methods(names: Sequence[str] | None, nodes: Sequence[str] | None, presets: dict[str, list[int | str]]) -> list[Method]:
    """Return the methods: given drafters or the preset's, at given budgets or each drafter's own.

    Raises:
        ValueError: for an unknown drafter or a bad budget.
    """
    found: list[Method] = []
    for name in dict.fromkeys(names or presets):
        own = nodes or presets.get(name) or BUDGETS.get(name) or BUDGETS["calibrated"]
        found += methods([name], [o.parse_nodes(str(n)) for n in dict.fromkeys(own)])
    return list(dict.fromkeys(found))


def _drafters(
    target: Target, plan: Plan, names: Sequence[str], files: o.DrafterFiles, asked: bool, tell: Callable[[str], None]
) -> dict[str, Drafter]:
    """Build the drafters by name; one that was not asked for by name and does not fit is left out with a remark.

    Raises:
        ValueError: for one that was asked for, or if none is left.
    """
    found: dict[str, Drafter] = {}
    tell = o.once(tell)
    for name in names:
        try:
            drafter = o.open_drafter(name, target.spec, files, tell)
            if isinstance(drafter, Calibrated):
                _check_graphs(drafter, target, plan)
        except ValueError as error:
            if asked:
                raise
            tell(f"{name} is left out: {error}")
        else:
            found[name] = drafter
    if not found:
        raise ValueError("no drafter of the list is available")
    return found


def _check_graphs(drafter: Calibrated, target: Target, plan: Plan) -> None:
    """Refuse a calibrated drafter that lacks the graph of a rule, before the work."""
    for setting in plan.settings(target.spec):
        sampled = setting.temperature > 0
        drafter.graphs.find(setting.rule, sampled, drafter.coupled or not sampled, setting.block_length)


@contextmanager
def _progress(console: Console, total: int) -> Iterator[Callable[[int, float], None]]:
    """Show a bar on a terminal, else a line now and then with the time left; an interruption says how far it came."""
    first: tuple[float, float] | None = None  # time and share of the first run: what came before was loading and compiling
    is_due, done = now_and_then(), 0.0
    with progress_bar(console, "bench speed", total, shown=console.is_terminal) as advance:

        def step(tokens: int, share: float) -> None:
            nonlocal first, done
            advance(tokens)
            done, now = share, monotonic()
            first = first or (now, share)
            if not console.is_terminal and share > first[1] and is_due(False):
                left = (now - first[0]) * (1 - share) / (share - first[1])
                say(console, f"bench speed: {share:.0%} done, about {left:.0f} s left")

        try:
            yield step
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"interrupted after {done:.0%} of the work; nothing was written") from None
