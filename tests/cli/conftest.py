"""A tiny random checkpoint and ways to run the command: in this process, and in a forked or a new one."""

import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from tiny_checkpoints import VOCAB, write_sdar, write_tokenizer

from spot_dlm.cli import main


@dataclass(frozen=True)
class Outcome:
    """What a command did."""

    code: int
    out: str
    err: str

    @property
    def rows(self) -> list[dict]:
        return [json.loads(line) for line in self.out.splitlines()]


Spot = Callable[..., Outcome]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    write_sdar(folder, max_position_embeddings=512, vocab_size=VOCAB)
    write_tokenizer(folder)
    return folder


@pytest.fixture
def spot(capfd: pytest.CaptureFixture[str], checkpoint: Path) -> Spot:
    """Run a command in this process; commands that decode get the tiny checkpoint unless --model is given."""

    def run(*arguments: str | Path | int | float) -> Outcome:
        words = with_model([str(a) for a in arguments], checkpoint)
        capfd.readouterr()
        with pytest.raises(SystemExit) as stop:
            main(words)
        out, err = capfd.readouterr()
        return Outcome(int(stop.value.code or 0), out, err)

    return run


def with_model(words: list[str], checkpoint: Path) -> list[str]:
    """Add the tiny checkpoint to a command that decodes."""
    if words and words[0] in ("generate", "rollout", "verify", "eval", "info") and "--model" not in words and "--help" not in words:
        return [*words, "--model", str(checkpoint), *([] if "--threads" in words else ["--threads", "1"])]
    return words


def fork(words: list[str], stdout: int, stderr: int, prepare: Callable[[], None] = lambda: None) -> int:
    """Run a command in a forked process, whose libraries are loaded already; return its process id."""
    child = os.fork()
    if child:
        return child
    code = 70
    try:
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        prepare()
        main(words)
    except SystemExit as stop:
        code = int(stop.code or 0)
    finally:
        os._exit(code)


def wait(child: int) -> int:
    """Return the exit code of a forked process, minus the signal's number where one killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
