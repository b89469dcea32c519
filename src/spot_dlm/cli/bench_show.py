"""What the commands of `spot bench` share: options, files checked first and written last, progress, provenance and tables.

Example: `with progress(console, "bench", 12, runs) as advance: advance(tokens)`.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from spot_dlm import artifacts
from spot_dlm.bench import plot as plots
from spot_dlm.bench import report
from spot_dlm.bench.drafters import Entry
from spot_dlm.bench.passes import Run
from spot_dlm.cli.show import COMMAND, now_and_then, progress_bar, provenance, say
from spot_dlm.interfaces import DecodeParams, Target

_Value = TypeVar("_Value")

Out = Annotated[Path | None, typer.Option("--out", metavar="FILE.json", help="Write the JSON document there, too.")]
Markdown = Annotated[Path | None, typer.Option("--markdown", metavar="FILE.md", help="Write the tables there.")]
Plot = Annotated[Path | None, typer.Option("--plot", metavar="FILE.png", help="Draw the figure there (extra 'bench').")]


def chosen(given: _Value | None, preset: _Value) -> _Value:
    """Return what was given, else the preset's value."""
    return preset if given is None else given


def check_files(out: Path | None, markdown: Path | None, plot: Path | None) -> None:
    """Refuse files that could not be written, or twice the same, before the work."""
    given = [p.absolute() for p in (out, markdown, plot) if p is not None]
    if len(set(given)) < len(given):
        raise ValueError("--out, --markdown and --plot must be different files")
    for path in given:
        report.check_writable(path)
    if plot is not None:
        plots.require_matplotlib()


def where(run: Run) -> str:
    """Return the line that names a run which is not identical."""
    s = run.setting
    kind = "audit, " if run.audit else ""
    place = f"{run.prompt} ({kind}{s.task}, {s.resolution}, block length {s.block_length}, temperature {s.temperature:g}"
    return f"not identical: {place}, {run.drafter}, {run.nodes} nodes): {run.problem}"


@contextmanager
def progress(console: Console, title: str, total: int, done: Sequence[object]) -> Iterator[Callable[[int], None]]:
    """Show a bar on a terminal, a plain line now and then elsewhere; an interruption says how far it came."""
    is_due = now_and_then()
    with progress_bar(console, title, total, shown=console.is_terminal) as advance:

        def step(tokens: int) -> None:
            advance(tokens)
            if not console.is_terminal and is_due(False):
                say(console, f"{title}: {len(done)} of {total} runs")

        try:
            yield step
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"interrupted after {len(done)} of {total} runs; nothing was written") from None


def facts(target: Target, params: DecodeParams, compared: Sequence[Entry]) -> dict[str, Any]:
    """Return the origin of the figures: model, versions, revision, decoding, and what the drafters say of themselves."""
    about = artifacts.provenance(target.spec, COMMAND.get())
    return about | provenance(target, params) | {"drafters": {e.label: dict(e.provenance) for e in compared if e.provenance}}


def shown_tables(document: dict[str, Any]) -> list[Text | Table]:
    """Return the tables for a person: all tasks together where there are several, and the verdict."""
    shown = document["pooled"] or document["cells"]
    parts: list[Text | Table] = []
    for title, head, rows in report.passes_tables(shown, intervals=False):
        parts += [Text(f"transitions per pass, {title}", "bold"), table(head, rows)]
    rows = report.comparison_lines([r for r in document["comparisons"] if r["task"] == shown[0]["task"]])
    if rows:
        parts += [Text("order against the best baseline", "bold"), table(report.COMPARISON_HEAD, rows)]
    count = len(document["divergences"])
    verdict = "all identical to standard decoding" if not count else f"{count} NOT IDENTICAL to standard decoding"
    return [*parts, Text(verdict, "bold")]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return a table of text."""
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in head:
        shown.add_column(name, no_wrap=True)
    for row in rows:
        shown.add_row(*row)
    return shown


def finish(
    document: dict[str, Any],
    out: Path | None,
    markdown: Path | None,
    plot: Path | None,
    text_of: Callable[[dict[str, Any]], str],
    figure_of: Callable[[dict[str, Any]], bytes],
) -> None:
    """Write the files, each whole or not at all, and print the document last, even where a file could not be written."""
    try:
        if out is not None:
            artifacts.write_json(out, document)
        if markdown is not None:
            artifacts.replace_file(markdown, lambda path: path.write_text(text_of(document), "utf-8"))
        if plot is not None:
            artifacts.replace_file(plot, lambda path: path.write_bytes(figure_of(document)))
    finally:
        print(json.dumps(document))
