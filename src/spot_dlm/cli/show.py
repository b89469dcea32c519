"""What several commands print: the table of counts, the progress bar, the provenance of a result.

Example: `stderr_console().print(stats_table(result.counts))`.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from importlib.metadata import version
from time import monotonic
from typing import IO, Any, cast

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

import spot_dlm
from spot_dlm.interfaces import DecodeParams, Target
from spot_dlm.noise import NOISE_VERSION
from spot_dlm.rules import describe
from spot_dlm.stats import Counts

PLAIN_EVERY_S = 30.0
"""Seconds between two lines of progress where stderr is no terminal."""

COMMAND: ContextVar[str] = ContextVar("COMMAND", default="")  # the command line that runs, for reports


class _Stderr:
    """Stderr, if there is one; what it cannot take (terminal gone, pipe closed) is dropped: remarks never end a run."""

    def __init__(self) -> None:
        self._stream = sys.stderr

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with suppress(OSError, AttributeError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, AttributeError):
            self._stream.flush()


def stderr_console() -> Console:
    """Return the console for progress and remarks."""
    return Console(file=cast(IO[str], _Stderr()))


def one_line(error: BaseException) -> str:
    """Return what went wrong in one line."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return " ".join(str(error).split()) or type(error).__name__


def provenance(target: Target, params: DecodeParams) -> dict[str, Any]:
    """Return what decides the tokens: model, device, versions, rule, sampling, lengths."""
    spec = target.spec
    return {
        "format": 1,
        "spot": spot_dlm.__version__,
        "noise": NOISE_VERSION,
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "model": spec.name,
        "family": spec.family,
        "fingerprint": spec.fingerprint,
        "num_parameters": spec.num_parameters,
        "device": str(spec.device),
        "dtype": spec.dtype,
        "threads": torch.get_num_threads(),
        "rule": describe(params.rule),
        "temperature": params.sampling.temperature,
        "top_k": params.sampling.top_k,
        "top_p": params.sampling.top_p,
        "seed": params.sampling.seed,
        "max_new_tokens": params.max_new_tokens,
        "block_length": params.block_length or spec.block_length,
        "stop": params.stop,
    }


def stats_table(counts: Counts) -> Table:
    """Return the counts of one or many decodes as a table."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    table.add_row("tokens", f"{counts.tokens} in {counts.sequences} sequence{'s' if counts.sequences != 1 else ''}")
    table.add_row("nfe", f"{counts.nfe} decoding passes (+ {counts.nfe_prefill} prefill, {counts.nfe_commit} commit)")
    table.add_row("tpf", f"{counts.tpf:.2f} tokens per decoding pass")
    table.add_row("acceptance length", f"{counts.acceptance_length:.2f} steps per decoding pass")
    depths = [f"{d}: {r / n:.0%}" for d, (r, n) in enumerate(zip(counts.reached, counts.offered, strict=True), 1) if n]
    table.add_row("acceptance by depth", "  ".join(depths) or "nothing drafted")
    table.add_row("seconds", f"{counts.total_s:.2f} ({counts.tokens / max(counts.total_s, 1e-9):.0f} tokens/s)")
    total = max(counts.total_s, 1e-9)
    parts = {"target": counts.target_s, "draft": counts.draft_s, "verify": counts.verify_s}
    parts["other"] = max(0.0, counts.total_s - sum(parts.values()))
    table.add_row("time", "  ".join(f"{k} {v / total:.0%}" for k, v in parts.items()) + f"  (host share {counts.host_share:.0%})")
    return table


@contextmanager
def progress_bar(console: Console, title: str, total: int, completed: int = 0, shown: bool = True) -> Iterator[Callable[[int], None]]:
    """Show a bar on the console; the function it gives advances by one, with so many tokens more. Stdout is left alone."""
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[tokens]} tokens"), TimeRemainingColumn())
    tokens = 0
    bar = Progress(*columns, console=console, disable=not shown, transient=True, redirect_stdout=False, redirect_stderr=False)
    with bar as progress:
        task = progress.add_task(title, total=total, completed=completed, tokens=0)

        def advance(new_tokens: int) -> None:
            nonlocal tokens
            tokens += new_tokens
            progress.update(task, advance=1, tokens=tokens)

        yield advance


@contextmanager
def progress_lines(console: Console, verb: str, done_word: str, unit: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar with rate and time left, or an occasional line where there is no terminal; the first call says what is there already."""
    rate = TextColumn("{task.fields[rate]}")
    columns = (TextColumn(verb), BarColumn(), MofNCompleteColumn(), rate, TimeRemainingColumn())
    shown = console.is_terminal
    bar = Progress(*columns, console=console, disable=not shown, transient=True, redirect_stdout=False, redirect_stderr=False)
    began, first, is_due = monotonic(), -1, now_and_then()
    with bar:
        row = bar.add_task(verb, total=None, rate="")

        def show(done: int, total: int) -> None:
            nonlocal began, first
            now = monotonic()
            if first < 0:
                began, first = now, done
                if done:
                    say(console, f"{done} of {total} {unit} are {done_word} already")
            rate = (done - first) / max(now - began, 1e-9)
            bar.update(row, completed=done, total=total, rate=f"{rate:.1f} {unit}/s" if done > first else "")
            if not shown and done > first and is_due(done == total):
                say(console, f"{done} of {total} {unit}, {rate:.1f} a second, {(total - done) / max(rate, 1e-9):.0f} s left")

        yield show


def now_and_then() -> Callable[[bool], bool]:
    """Return what says whether a line of progress is due: one does every PLAIN_EVERY_S seconds, or where the argument says so."""
    said = monotonic()

    def is_due(at_once: bool = False) -> bool:
        nonlocal said
        due = at_once or monotonic() - said >= PLAIN_EVERY_S
        said = monotonic() if due else said
        return due

    return is_due


def print_facts(facts: Mapping[str, str]) -> None:
    """Print names and what is so of them on stdout, a row each."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for name, text in facts.items():
        table.add_row(name.replace("_", " "), Text(text))
    Console().print(table, highlight=False)


def say(console: Console, message: str) -> None:
    """Print a remark, as it is."""
    console.print(f"spot: {message}", markup=False, highlight=False, soft_wrap=True)
