"""`spot verify`: decode prompts plainly and speculatively and prove that tokens and commit order are identical.

Example: `spot verify --task json --limit 5 --drafter all --nodes 2 --nodes 8 --json`.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from spot_dlm.batch import Failed, Request, decode_batch
from spot_dlm.cli import options as o
from spot_dlm.cli.generate import Job, check_overrides, prepare
from spot_dlm.cli.jsonl import PromptLine, read_prompts
from spot_dlm.cli.prompts import task_lines
from spot_dlm.cli.show import COMMAND, progress_bar, provenance, say, stderr_console
from spot_dlm.compare import Divergence, Trajectory, first_divergence, refine, standard_trajectory
from spot_dlm.drafters import build_drafter
from spot_dlm.interfaces import Drafter, Target
from spot_dlm.presets import SAMPLERS
from spot_dlm.rules import ALLOWED, describe
from spot_dlm.sequence import Finished, Pass
from spot_dlm.stats import Counts
from spot_dlm.tasks import FAMILY_TASKS
from spot_dlm.transition import Transition

DEFAULT_LIMIT = 10
DEFAULT_TEMPERATURES = (0.0, 1.0)


@dataclass(frozen=True)
class Case:
    """One comparison: a prompt under one temperature, rule, drafter and node budget."""

    job: Job
    drafter: str
    nodes: int | str
    standard: Counts
    speculative: Counts
    divergence: Divergence | None

    @property
    def setting(self) -> tuple[float, str, str, int | str]:
        """What a row of the table stands for."""
        params = self.job.params
        return params.sampling.temperature, describe(params.rule), self.drafter, self.nodes


def verify(
    model: o.Model = "shipped",
    family: o.FamilyName = None,
    cache: o.CacheName = "exact",
    drafter: o.DrafterNames = [o.DEFAULT_DRAFTER],  # noqa: B006
    nodes: o.NodesList = [o.DEFAULT_NODES],  # noqa: B006
    graph: o.Graph = None,
    drafter_file: o.DrafterFile = None,
    transfer: o.Transfer = False,
    prompts: o.PromptsFile = None,
    task: Annotated[
        list[str] | None, typer.Option("--task", help="Packaged held-out prompts: a task's name. Repeatable; default: all families.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", help=f"First so many prompts of the file or of each task (default there: {DEFAULT_LIMIT}).")
    ] = None,
    temperature: Annotated[
        list[float] | None, typer.Option("--temperature", help="0 = the most probable token. Repeatable; default: 0 and 1.")
    ] = None,
    rule: Annotated[
        list[str] | None, typer.Option("--rule", help=f"Unmask rule: {ALLOWED}. Repeatable; default: {o.DEFAULT_RULE}.")
    ] = None,
    sampler: Annotated[
        str | None,
        typer.Option(
            "--sampler",
            metavar="NAME[,ARG=VALUE...]",
            help=f"An official sampler ({' | '.join(SAMPLERS)}) by its own arguments, its temperature among them, as in "
            "dream,steps=64,temperature=0.2; instead of --rule, --temperature, --block-length and --stop.",
        ),
    ] = None,
    top_p: o.TopP = 1.0,
    top_k: o.TopK = 0,
    seed: o.Seed = 0,
    max_new_tokens: o.MaxNewTokens = o.MAX_NEW_TOKENS,
    block_length: o.BlockLength = None,
    stop: o.StopAt = "block",
    dtype: o.Dtype = None,
    device: o.Device = None,
    threads: o.Threads = None,
    raw: o.Raw = False,
    strict: o.Strict = 1,
    batch: Annotated[int, typer.Option("--batch", help="Speculative decodes that share the passes; 1 = one after the other.")] = 1,
    as_json: o.Json = False,
) -> None:
    """Prove that speculative decoding gives the tokens and the commit order of standard decoding.

    Every prompt is decoded plainly (drafter root, one node) once per temperature and rule, and speculatively with every drafter and
    node budget, with the same seed; with --batch, the speculative decodes of different prompts share passes. Exit code 1 if any
    divergence is real, not a tie or near-tie (gap below 1e-4).

    With --sampler, standard decoding is what that official sampler does, at its own temperature.

    JSON keys: cases = number of comparisons (prompt x temperature x rule x drafter x nodes), identical = how many of them are,
    divergences = those that are not, nfe_standard and nfe_speculative = decoding passes summed over the cases, nfe_reduction = their
    ratio, seconds_standard and seconds_speculative, rows = the same for every setting, provenance, command.

    \b
    Examples:
      spot verify --limit 2
      spot verify --task json --drafter all --nodes 2 --nodes 8 --temperature 0 --temperature 1 --json
      spot verify --batch 16 --nodes auto --nodes 8
      spot verify --prompts prompts.jsonl --rule standard --rule threshold=0.9 --rule bfloat16
      spot verify --model GSAI-ML/LLaDA-8B-Instruct --sampler llada,steps=64,block_length=32 --limit 2
    """
    grid = [
        o.decode_params(
            temperature=t, top_p=top_p, top_k=top_k, seed=seed, rule=r, max_new_tokens=max_new_tokens, nodes=n,
            block_length=block_length, stop=stop, sampler=sampler,
        )
        for n in nodes for t, r in _settings(temperature, rule, sampler)
    ]  # fmt: skip
    if batch < 1:
        raise ValueError(f"--batch {batch} must be at least 1")
    reference_grid = list(dict.fromkeys(replace(params, nodes=1) for params in grid))
    if limit is not None and limit < 1:
        raise ValueError(f"--limit {limit} must be at least 1")
    names = [d for name in drafter for d in (o.ALL_DRAFTERS if name == "all" else [name])]
    for count in nodes:
        o.check_strict(strict, count)
    files = o.DrafterFiles(graph, drafter_file, transfer)
    for name in drafter if "all" not in drafter else ():
        build_drafter(name, graph=graph, file=drafter_file)  # a bad name or file shows before the target is loaded
    budgets = list(dict.fromkeys(o.parse_nodes(n) for n in nodes))
    console = stderr_console()
    lines = _prompt_lines(prompts, task, limit, console)
    check_overrides(lines, sampler)
    target = o.open_target(model, o.TargetOptions(dtype, device, threads, raw, strict, family, cache))

    remark = o.once(partial(say, console))
    everywhere = [n for n in dict.fromkeys(names) if n in drafter or not o.is_left_out(n, target.spec, files, remark)]
    built = [o.open_drafter(n, target.spec, files, remark, grid) for n in everywhere]
    drafters = list({d.name: d for d in built}.values())
    jobs = [prepare(target, line, params) for line in lines for params in reference_grid]
    jobs = list({(j.line.index, j.params): j for j in jobs}.values())
    cases: list[Case] = []
    try:
        with progress_bar(console, "verifying", len(jobs) * len(drafters) * len(budgets), shown=console.is_terminal) as advance:
            for case in _cases(target, jobs, drafters, budgets, batch, remark):
                cases.append(case)
                advance(case.speculative.tokens)
                if case.divergence is not None:
                    console.print(f"{_name(case)}: {case.divergence}", markup=False, highlight=False, soft_wrap=True)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted after {len(cases)} comparisons, {_identical(cases)} identical") from None
    temperatures = list(dict.fromkeys(params.sampling.temperature for params in reference_grid))
    rules = rule or [describe(reference_grid[0].rule)]
    facts = provenance(target, reference_grid[0]) | {"temperature": temperatures, "rule": rules, "sampler": sampler}
    facts |= {"strict": strict, "raw": raw, "batch": batch}
    report = _report(cases, len(lines)) | {"provenance": facts, "command": COMMAND.get()}
    (console if as_json else Console()).print(_table(report))
    if as_json:
        print(json.dumps(report))
    if any(c.divergence is not None and c.divergence.kind == "real" for c in cases):
        raise typer.Exit(1)


def _settings(temperature: list[float] | None, rule: list[str] | None, sampler: str | None) -> list[tuple[float | None, str]]:
    """Return the pairs of temperature and rule to verify; a sampler says both itself."""
    if sampler is None:
        return list(product(temperature or DEFAULT_TEMPERATURES, rule or [o.DEFAULT_RULE]))
    given: list[tuple[str, list[Any] | None]] = [("--rule", rule), ("--temperature", temperature)]
    for option, values in given:
        if values:
            raise ValueError(f"--sampler says what {option} {values[0]} would: give one of them")
    return [(None, o.DEFAULT_RULE)]


def _prompt_lines(prompts: Path | None, task: list[str] | None, limit: int | None, console: Console) -> list[PromptLine]:
    """Return the prompts of the file, or the first of every task."""
    if prompts is not None:
        if task:
            raise ValueError("give --prompts FILE or --task NAME, not both")
        return read_prompts(prompts, partial(say, console))[:limit]
    return task_lines(task or FAMILY_TASKS, limit=limit or DEFAULT_LIMIT)


def _cases(
    target: Target,
    jobs: list[Job],
    drafters: list[Drafter],
    budgets: list[int | Literal["auto"]],
    batch: int,
    say: Callable[[str], None],
) -> Iterator[Case]:
    """Compare; the standard run of a job serves every drafter and budget."""
    params = [replace(job.params, sequence=job.line.sequence(0)) for job in jobs]
    standard: dict[int, Trajectory] = {}
    for drafter in drafters:
        for nodes in budgets:
            requests = [Request(i, job.prompt_ids, replace(p, nodes=nodes)) for i, (job, p) in enumerate(zip(jobs, params, strict=True))]
            for i, speculative in _trajectories(target, requests, drafter, batch, say):
                if i not in standard:
                    standard[i] = standard_trajectory(target, jobs[i].prompt_ids, params[i])
                divergence = first_divergence(standard[i], speculative, params[i].rule)
                if divergence is not None:
                    divergence = refine(divergence, target, jobs[i].prompt_ids, params[i])
                yield Case(jobs[i], drafter.name, nodes, standard[i].result.counts, speculative.result.counts, divergence)


def _trajectories(
    target: Target, requests: list[Request[int]], drafter: Drafter, batch: int, say: Callable[[str], None]
) -> Iterator[tuple[int, Trajectory]]:
    """Decode speculatively, so many prompts at a time, and yield the number and trajectory of each as it ends."""
    transitions: dict[int, list[Transition]] = {r.id: [] for r in requests}
    for number, event in decode_batch(target, requests, drafter, max_requests=batch, say=say):
        if isinstance(event, Failed):
            raise event.error
        if isinstance(event, Pass):  # not kept itself: it holds the logits of the whole pass
            transitions[number] += event.acceptance.transitions
        elif isinstance(event, Finished):
            yield number, Trajectory(transitions.pop(number), event.result)


def _identical(cases: list[Case]) -> int:
    return sum(c.divergence is None for c in cases)


def _name(case: Case) -> str:
    temperature, rule, drafter, nodes = case.setting
    return f"{case.job.line.id} (temperature {temperature:g}, rule {rule}, {drafter}, {nodes} nodes)"


def _sums(cases: list[Case]) -> dict[str, Any]:
    standard, speculative = sum(c.standard.nfe for c in cases), sum(c.speculative.nfe for c in cases)
    return {
        "cases": len(cases),
        "identical": _identical(cases),
        "nfe_standard": standard,
        "nfe_speculative": speculative,
        "nfe_reduction": standard / speculative if speculative else 0.0,
        "seconds_standard": sum(c.standard.total_s for c in cases),
        "seconds_speculative": sum(c.speculative.total_s for c in cases),
    }


def _report(cases: list[Case], num_prompts: int) -> dict[str, Any]:
    keys = ("temperature", "rule", "drafter", "nodes")
    settings = sorted({c.setting for c in cases}, key=lambda s: (s[0], s[1], s[2], isinstance(s[3], str), str(s[3]).zfill(6)))
    rows = [dict(zip(keys, s, strict=True)) | _sums([c for c in cases if c.setting == s]) for s in settings]
    divergences = [
        {"id": c.job.line.id, **dict(zip(keys, c.setting, strict=True)), **c.divergence.to_dict()} for c in cases if c.divergence
    ]
    return _sums(cases) | {
        "all_identical": not divergences,
        "prompts": num_prompts,
        "divergences": divergences,
        "rows": rows,
    }


def _table(report: dict[str, Any]) -> Table:
    """Return the rows as a table with the verdict below."""
    real = sum(d["kind"] == "real" for d in report["divergences"])
    verdict = "all identical" if report["all_identical"] else f"{len(report['divergences'])} divergences, {real} real"
    caption = f"{report['identical']} of {report['cases']} identical: {verdict}; {report['nfe_reduction']:.2f} times fewer passes"
    table = Table(
        box=box.SIMPLE,
        pad_edge=False,
        collapse_padding=True,
        title="decoding passes (nfe), standard and speculative",
        title_justify="left",
        caption=caption,
        caption_justify="left",
        caption_style="bold",
    )
    for title in ("T", "rule", "drafter", "nodes", "identical", "standard", "speculative", "fewer"):
        table.add_column(title, justify="left" if title in ("rule", "drafter") else "right")
    for row in report["rows"]:
        table.add_row(
            f"{row['temperature']:g}", row["rule"], row["drafter"], str(row["nodes"]), f"{row['identical']}/{row['cases']}",
            str(row["nfe_standard"]), str(row["nfe_speculative"]), f"{row['nfe_reduction']:.2f}x",
        )  # fmt: skip
    return table
