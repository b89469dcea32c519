"""The command `spot` and its subcommands. Answers go to stdout, progress and errors to stderr.

`main` turns what a user can cause (bad values, missing files, a full disk, an operation the device lacks, ctrl-C) into one line and an
exit code; SPOT_DEBUG=1 shows the traceback. Exit codes: 0 done, 1 not identical or (doctor) problems found, 2 bad input or a run that
cannot go on, 130 interrupted, 141 the reader of stdout went away.

Example: `main(["info", "--json"])`.
"""

import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated

import typer

from spot_dlm import __version__
from spot_dlm.cli.analyze import analyze
from spot_dlm.cli.bench import app as bench
from spot_dlm.cli.calibrate import calibrate
from spot_dlm.cli.demo import demo
from spot_dlm.cli.doctor import doctor
from spot_dlm.cli.drafter import app as drafter
from spot_dlm.cli.evaluate import evaluate
from spot_dlm.cli.generate import generate
from spot_dlm.cli.info import info
from spot_dlm.cli.rollout import rollout
from spot_dlm.cli.serve import serve
from spot_dlm.cli.show import COMMAND, one_line
from spot_dlm.cli.trace import trace
from spot_dlm.cli.train import train
from spot_dlm.cli.tune import tune
from spot_dlm.cli.verify import verify

app = typer.Typer(
    name="spot",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _command, _summary in (
    (generate, "Decode prompts and print the answers."),
    (verify, "Prove that speculation changes neither tokens nor order."),
    (evaluate, "Grade standard and speculative decoding on the same prompts."),
    (rollout, "Sample exact trajectories with log-probabilities, for reinforcement learning."),
    (info, "Show what a model is and what will be used."),
    (doctor, "Say whether a checkpoint will load and decode, without its weights."),
    (serve, "Serve a model over HTTP, in OpenAI's shape."),
    (demo, "Decode one prompt of every family both ways and compare."),
    (tune, "Measure what a pass costs here, for --nodes auto."),
    (trace, "Record standard decoding as traces."),
    (calibrate, "Calibrate draft graphs on traces."),
    (train, "Train a drafter on traces."),
    (analyze, "Measure on traces what is known in advance: tokens, order, ties."),
):
    app.command("eval" if _command is evaluate else None, short_help=_summary)(_command)
app.add_typer(drafter, name="drafter", short_help="Show, save and publish fitted drafters.")
app.add_typer(bench, name="bench", short_help="Measure passes saved, and accuracy against speed.")


def _print_version(wanted: bool) -> bool:
    if wanted:
        typer.echo(f"spot-dlm {__version__}")
        raise typer.Exit
    return wanted


@app.callback()
def _spot(
    version: Annotated[bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)] = False,
) -> None:
    """Lossless speculative decoding for diffusion language models: the same tokens in fewer passes.

    \b
    Examples:
      spot demo
      spot generate "To JSON: Anna Berg, 34, lives in Oslo." --stats
      spot verify --task json --limit 5
      spot info --model JetLM/SDAR-1.7B-Chat
    """


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit; see the module for the exit codes."""
    debug = os.environ.get("SPOT_DEBUG", "") not in ("", "0")
    try:
        code = _run(list(sys.argv[1:] if arguments is None else arguments))
        print(end="", flush=True)
    except (BrokenPipeError, SystemExit):  # rich exits where stdout's reader is gone; nothing else does here
        code = 141
        _silence_stdout()
    except KeyboardInterrupt as stop:
        code = 130
        _say(str(stop) or "interrupted")
    except Exception as error:  # exit code 1 means "not identical", so nothing else may end with it
        if debug:
            raise
        code = 2
        expected = isinstance(error, (ValueError, OSError, RuntimeError, MemoryError))
        _say(one_line(error) if expected else f"{type(error).__name__}: {one_line(error)} (SPOT_DEBUG=1 shows where)")
    if code:
        _silence_stdout()
    sys.exit(code)


def _run(arguments: list[str]) -> int:
    """Run one command without typer's own error output; usage errors become ValueError."""
    COMMAND.set(shlex.join(["spot", *arguments]))
    command = typer.main.get_command(app)
    try:
        with command.make_context("spot", arguments or ["--help"]) as context:
            command.invoke(context)
    except typer.Exit as done:
        return done.exit_code
    except Exception as error:
        if not hasattr(error, "format_message"):  # click's exceptions, which newer typer versions carry inside
            raise
        failed = getattr(error, "ctx", None)
        where = failed.command_path if failed is not None else "spot"
        raise ValueError(f"{error.format_message().rstrip('.')} (see '{where} --help')") from error
    return 0


def _say(message: str) -> None:
    if sys.stderr is not None:
        with suppress(OSError):
            print(f"spot: {message}", file=sys.stderr, flush=True)


def _silence_stdout() -> None:
    """Point stdout at nothing if it cannot be flushed, so that the interpreter does not complain when it exits."""
    try:
        print(end="", flush=True)
    except (OSError, ValueError):
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
