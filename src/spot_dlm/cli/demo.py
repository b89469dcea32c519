"""`spot demo`: one held-out prompt of every family, decoded plainly and speculatively with the shipped model.

What `make demo` runs; the exit code says whether all answers and orders are identical.
"""

from contextlib import ExitStack
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from spot_dlm.budget import Budget
from spot_dlm.canvas import Canvas
from spot_dlm.cli import options as o
from spot_dlm.compare import Divergence, Trajectory, first_divergence, refine, standard_trajectory
from spot_dlm.decode import automatic_budget, decode_steps, generate
from spot_dlm.drafters import build_drafter
from spot_dlm.interfaces import DecodeParams, Drafter, Target
from spot_dlm.sequence import Event
from spot_dlm.tasks import FAMILY_TASKS, TaskPrompt, grade, load_prompts

_GRADES = {True: "right", False: "wrong", None: "free text"}


@dataclass(frozen=True)
class _Shown:
    """One prompt's two decodes."""

    task: TaskPrompt
    standard: Trajectory
    speculative: Trajectory
    divergence: Divergence | None
    grade: bool | None
    standard_s: float
    speculative_s: float


def demo(
    drafter: o.DrafterName = o.DEFAULT_DRAFTER,
    nodes: o.Nodes = o.DEFAULT_NODES,
    temperature: o.Temperature = 0.0,
    seed: o.Seed = 0,
    number: Annotated[int, typer.Option("--number", help="Which held-out prompt of every family, from 1.")] = 1,
    threads: o.Threads = None,
) -> None:
    """Decode one held-out prompt of every family plainly and speculatively, and compare: same tokens, same order, fewer passes.

    In the table, rows are the states that a speculative pass evaluates on average.

    \b
    Examples:
      spot demo
      spot demo --nodes 16 --temperature 1 --number 2
    """
    params = o.decode_params(temperature=temperature, seed=seed, nodes=nodes)
    if number < 1:
        raise ValueError(f"--number {number} must be at least 1")
    build_drafter(drafter)  # a bad name shows before the model is loaded
    prompts = [_prompt(name, number) for name in FAMILY_TASKS]
    console = Console()
    target = o.open_target("shipped", o.TargetOptions(threads=threads))
    spec = target.spec

    def say(text: str) -> None:
        console.print(text, highlight=False)

    guess = o.open_drafter(drafter, spec, o.DrafterFiles(), say)
    budget = automatic_budget(target, guess, target.encode(prompts[0].prompt), params, say)  # measured before any time is taken
    generate(target, prompts[0].prompt, guess, replace(params, max_new_tokens=2 * spec.block_length), budget)
    meant = "as many nodes as pay by the measured cost of a pass" if params.nodes == "auto" else f"{params.nodes} nodes"
    console.print(
        f"The shipped model ({spec.num_parameters / 1e6:.1f}M parameters, blocks of {spec.block_length}, {spec.device}), drafter "
        f"{guess.name}, {meant}, temperature {temperature:g}: every prompt plainly, then speculatively.",
        highlight=False,
    )
    shown = []
    for i, prompt in enumerate(prompts):
        shown.append(_compare(target, prompt, guess, params, budget, console if i == 0 and console.is_terminal else None))
        _print(console, shown[-1])
    console.print(_table(shown))
    console.print(_verdict(shown), style="bold", highlight=False)
    if any(s.divergence is not None for s in shown):
        raise typer.Exit(1)


def _prompt(name: str, number: int) -> TaskPrompt:
    found = load_prompts(name, limit=number)
    if len(found) < number:
        raise ValueError(f"--number {number} is too large: {name} has {len(found)} held-out prompts")
    return found[-1]


def _compare(target: Target, prompt: TaskPrompt, drafter: Drafter, params: DecodeParams, budget: Budget, live: Console | None) -> _Shown:
    began = perf_counter()
    standard = standard_trajectory(target, prompt.prompt, params)
    between = perf_counter()
    with ExitStack() as stack:
        canvas = None if live is None else stack.enter_context(Canvas(target, live, f"{prompt.family}, live"))

        def watched(event: Event) -> Event:
            if canvas is not None:
                canvas.show(event)
            return event

        speculative = Trajectory.of(map(watched, decode_steps(target, prompt.prompt, drafter, params, budget)))
    ended = perf_counter()
    divergence = first_divergence(standard, speculative, params.rule)
    if divergence is not None:
        divergence = refine(divergence, target, prompt.prompt, params)
    right = grade(prompt, speculative.result.text)
    return _Shown(prompt, standard, speculative, divergence, right, between - began, ended - between)


def _print(console: Console, shown: _Shown) -> None:
    """Show prompt, answer, grade, passes and whether the two decodes agree."""
    one, two = shown.standard.result.counts, shown.speculative.result.counts
    console.rule(shown.task.family, align="left")
    console.print(shown.task.prompt, style="dim", markup=False, highlight=False)
    console.print(shown.speculative.result.text, markup=False, highlight=False)
    same = "identical" if shown.divergence is None else f"NOT identical: {shown.divergence}"
    console.print(f"→ {_GRADES[shown.grade]}; {one.nfe} passes plainly, {two.nfe} speculatively; {same}", markup=False, highlight=False)


def _table(shown: list[_Shown]) -> Table:
    table = Table(
        box=box.SIMPLE, pad_edge=False, collapse_padding=True, title="decoding passes (nfe), standard and speculative", title_justify="left"
    )
    for title in ("family", "answer", "tokens", "standard", "speculative", "fewer", "rows", "identical"):
        table.add_column(title, justify="left" if title in ("family", "answer") else "right")
    for s in shown:
        one, two = s.standard.result.counts, s.speculative.result.counts
        table.add_row(
            s.task.family, _GRADES[s.grade], str(two.tokens), str(one.nfe), str(two.nfe), f"{one.nfe / two.nfe:.2f}x",
            f"{two.rows / two.nfe:.1f}", "yes" if s.divergence is None else "NO",
        )  # fmt: skip
    return table


def _verdict(shown: list[_Shown]) -> str:
    same = sum(s.divergence is None for s in shown)
    one = sum(s.standard.result.counts.nfe for s in shown)
    two = sum(s.speculative.result.counts.nfe for s in shown)
    seconds = f"{sum(s.standard_s for s in shown):.1f} s plainly, {sum(s.speculative_s for s in shown):.1f} s speculatively"
    if same < len(shown):
        return f"NOT identical: {len(shown) - same} of {len(shown)} answers differ."
    fewer = f"{one} passes became {two} ({one / two:.2f} times fewer; {seconds})"
    return f"Identical tokens and order in {same} of {len(shown)} answers, {fewer}."
