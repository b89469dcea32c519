"""Interruptions as they happen: ctrl-C, a kill, a full disk, a closed pipe, a terminal that goes; nothing finished is lost."""

import json
import os
import pty
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli.conftest import Spot, fork, wait, with_model

COUNT = 24
PATIENCE_S = 400


@pytest.fixture
def command(tmp_path: Path, checkpoint: Path) -> list[str]:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"prompt {i}", "id": f"p{i}"}) + "\n" for i in range(COUNT)), "utf-8")
    words = ["generate", "--prompts", str(prompts), "--max-new-tokens", "24", "--temperature", "1", "--nodes", "4"]
    return with_model(words, checkpoint)


def wait_for_lines(path: Path, number: int, child: "subprocess.Popen[str] | None" = None) -> None:
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end and (child is None or child.poll() is None):
        if path.exists() and path.read_bytes().count(b"\n") >= number:
            return
        time.sleep(0.005)
    raise AssertionError(f"{path} did not get {number} lines: {child.communicate()[1] if child else 'too slow'}")


def heed_ctrl_c() -> None:
    """Undo what a shell does to the processes it starts in the background: they ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def answers(path: Path) -> dict[str, list[int]]:
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    assert len({r["id"] for r in rows}) == len(rows), "a line is there twice"
    return {r["id"]: r["token_ids"] for r in rows}


def test_ctrl_c_and_kill_lose_nothing(spot: Spot, command: list[str], tmp_path: Path) -> None:
    """A new process gets SIGINT, a forked one SIGKILL; the third run completes the file, equal to an undisturbed one."""
    out, whole = tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    words = [*command, "--out", str(out)]
    code = "from spot_dlm.cli import main; main()"
    child = subprocess.Popen([sys.executable, "-c", code, *words], stderr=subprocess.PIPE, text=True, preexec_fn=heed_ctrl_c)
    wait_for_lines(out, 2, child)
    child.send_signal(signal.SIGINT)
    err = child.communicate(timeout=PATIENCE_S)[1]
    done = len(answers(out))
    assert child.returncode == 130 and err.count("\n") == 1
    assert f"{done} of {COUNT} decodes done" in err and "same command" in err and 2 <= done < COUNT

    devnull = os.open(os.devnull, os.O_WRONLY)
    killed = fork(words, devnull, devnull)
    wait_for_lines(out, done + 2)
    os.kill(killed, signal.SIGKILL)
    assert wait(killed) == -signal.SIGKILL
    with out.open("ab") as file:
        file.write(b'{"id": "p9", "sample": 0, "te')
    assert spot(*words).code == 0
    assert spot(*command, "--out", whole).code == 0
    assert answers(out) == answers(whole) and len(answers(out)) == COUNT


def test_interrupted_without_a_file(command: list[str], tmp_path: Path) -> None:
    out, err = tmp_path / "stdout", tmp_path / "stderr"
    child = fork(command, os.open(out, os.O_WRONLY | os.O_CREAT), os.open(err, os.O_WRONLY | os.O_CREAT))
    wait_for_lines(out, 1)
    os.kill(child, signal.SIGINT)
    assert wait(child) == 130
    assert "--out FILE" in err.read_text("utf-8")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_no_space_on_stdout(checkpoint: Path) -> None:
    code = "from spot_dlm.cli import main; main()"
    words = with_model(["generate", "the", "--max-new-tokens", "4", "--nodes", "4"], checkpoint)
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", code, *words], stdout=full, stderr=subprocess.PIPE, text=True, timeout=PATIENCE_S)
    assert done.returncode == 2 and done.stderr == "spot: No space left on device\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_no_space_in_out(spot: Spot, command: list[str]) -> None:
    outcome = spot(*command, "--out", "/dev/full")
    assert outcome.code == 2 and "/dev/full: No space left on device" in outcome.err and outcome.err.count("\n") == 1


def test_disk_fills_in_the_middle_of_a_line(spot: Spot, command: list[str], tmp_path: Path) -> None:
    """The half-written line is taken back, what was finished stays and the next run continues."""
    out, err = tmp_path / "out.jsonl", tmp_path / "stderr"
    words = [*command, "--out", str(out)]
    size = 4000
    stderr = os.open(err, os.O_WRONLY | os.O_CREAT)
    child = fork(words, stderr, stderr, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size)))
    assert wait(child) == 2
    assert "are kept" in err.read_text("utf-8") and err.read_text("utf-8").count("\n") == 1
    kept = answers(out)
    assert kept and out.read_bytes().endswith(b"\n")
    assert spot(*words).code == 0
    assert len(answers(out)) == COUNT and kept.items() <= answers(out).items()


def test_broken_pipe_is_quiet(command: list[str], tmp_path: Path) -> None:
    reader, writer = os.pipe()
    err = tmp_path / "stderr"
    child = fork(command, writer, os.open(err, os.O_WRONLY | os.O_CREAT), lambda: os.close(reader))
    os.close(writer)
    os.read(reader, 100)
    os.close(reader)
    assert wait(child) == 141
    assert err.read_text("utf-8") == ""


def test_closed_pipe_at_a_table(tmp_path: Path) -> None:
    """Rich's own answer to a closed pipe is exit code 1, which would read as not identical."""
    reader, writer = os.pipe()
    os.close(reader)
    err = tmp_path / "stderr"
    child = fork(["info", "--threads", "1"], writer, os.open(err, os.O_WRONLY | os.O_CREAT))
    os.close(writer)
    assert wait(child) == 141
    assert err.read_text("utf-8") == ""


def a_usual_terminal() -> None:
    os.environ["TERM"] = "xterm-256color"
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        os.environ.pop(name, None)


def shown_on(terminal: int) -> bytes:
    """Return all that is written to a terminal until its other end is closed everywhere."""
    shown = b""
    try:
        while piece := os.read(terminal, 4096):
            shown += piece
    except OSError:  # Linux's end of file
        pass
    os.close(terminal)
    return shown


@pytest.mark.parametrize("where", ["file", "terminal", "gone"])
def test_results_with_stderr_on_a_terminal(command: list[str], tmp_path: Path, where: str) -> None:
    """The bar leaves stdout alone, is not shown between results on the same screen, and may lose its terminal."""
    out = tmp_path / "stdout"
    ours, theirs = pty.openpty()
    stdout = theirs if where == "terminal" else os.open(out, os.O_WRONLY | os.O_CREAT)

    def prepare() -> None:
        os.close(ours)
        os.close(theirs)
        a_usual_terminal()

    child = fork(command, stdout, theirs, prepare)
    os.close(theirs)
    if where == "gone":
        os.close(ours)
        assert wait(child) == 0 and len(answers(out)) == COUNT
        return
    shown = shown_on(ours)
    assert wait(child) == 0
    assert (b"decoding" in shown) == (where == "file")
    if where == "terminal":
        out.write_bytes(shown.replace(b"\r\n", b"\n"))
    assert len(answers(out)) == COUNT


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_closed_descriptors(command: list[str], tmp_path: Path, closed: str) -> None:
    code = "from spot_dlm.cli import main; main()"
    words = [sys.executable, "-c", code, *command, "--out", str(tmp_path / "out.jsonl"), "--stats"]
    done = subprocess.run(["sh", "-c", f'"$@" {closed}', "sh", *words], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0 and done.stdout == ""
    assert len(answers(tmp_path / "out.jsonl")) == COUNT
