"""`spot trace`: what it says and writes, how it continues, and how it fails."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from cli.conftest import Spot, fork, wait

from spot_dlm.traces import read_traces

SHORT = ("--max-new-tokens", "3", "--temperature", "1")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"prompt {i}", "id": f"p{i}", "family": "ab"[i % 2]}) + "\n" for i in range(66)), "utf-8")
    return path


def test_records_continues_and_says_what_is_there(spot: Spot, prompts: Path, checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "t"
    command = (
        "trace",
        "--model",
        checkpoint,
        "--prompts",
        prompts,
        "--limit",
        3,
        *SHORT,
        "--temperature",
        0,
        "--rule",
        "standard",
        "--rule",
        "bfloat16",
        "--out",
        out,
    )
    dry = spot(*command, "--dry-run")
    assert dry.code == 0 and not out.exists()
    assert json.loads(dry.out) == {"folder": str(out), "sequences": 12} | {
        k: json.loads(dry.out)[k] for k in ("estimated_bytes", "free_bytes")
    }
    done = spot(*command, "--seed", 5)
    report = json.loads(done.out)
    assert done.code == 0 and done.out.count("\n") == 1 and "12 sequences (3 prompts, 4 settings) in 1 shards" in done.err
    assert "12 of 12 sequences" in done.err and "already" not in done.err
    traces = read_traces(out)
    assert report["folder"] == str(out) and report["sequences"] == 12 == len(traces.sequence["blocks"])
    assert report["states"] == len(traces.state["step"]) and report["bytes"] == sum(s["bytes"] for s in traces.manifest["shards"])
    assert [(p["id"], p["family"]) for p in traces.prompts] == [("p0", "a"), ("p1", "b"), ("p2", "a")]
    assert {(s["rule"], s["temperature"]) for s in traces.settings} == {(r, t) for r in ("standard", "bfloat16") for t in (0.0, 1.0)}
    assert traces.manifest["seed"] == 5 and "spot trace" in traces.manifest["command"]
    before = {p.name: p.read_bytes() for p in out.iterdir() if p.suffix == ".npz"}
    again = spot(*command, "--seed", 5)
    assert (
        again.code == 0 and "12 of 12 sequences are recorded already" in again.err and json.loads(again.out)["states"] == report["states"]
    )
    assert before == {p.name: p.read_bytes() for p in out.iterdir() if p.suffix == ".npz"}
    other = spot(*command, "--seed", 6)
    assert other.code == 2 and f"{out}: holds another recording (other seed" in other.err and not other.out


def test_bad_input_is_one_line(spot: Spot, prompts: Path, checkpoint: Path, tmp_path: Path) -> None:
    long, strange, own = tmp_path / "long.jsonl", tmp_path / "strange.jsonl", tmp_path / "own.jsonl"
    long.write_text(json.dumps({"prompt": "a"}) + "\n" + json.dumps({"prompt": "a " * 600, "id": "huge"}) + "\n", "utf-8")
    strange.write_text('{"prompt": "a", "family": 3}\n', "utf-8")
    own.write_text('{"prompt": "a", "temperature": 1}\n', "utf-8")
    full, file = tmp_path / "full", tmp_path / "file"
    full.mkdir()
    (full / "note").write_text("mine", "utf-8")
    file.write_text("mine", "utf-8")
    good = ("--prompts", prompts, "--limit", 1)
    cases = [
        ((*good, "--rule", "k=2"), "traces need one per step"),
        ((*good, "--rule", "threshold=0.9"), "traces need one per step"),
        ((*good, "--temperature", "-1"), "temperature=-1"),
        ((*good, "--top-p", "0"), "top_p=0"),
        ((*good, "--block-length", "0"), "block_length=0"),
        ((*good, "--workers", "0"), "--workers 0"),
        ((*good, "--threads", "0"), "--threads 0"),
        (("--prompts", prompts, "--limit", "0"), "--limit 0"),
        ((), "give --prompts FILE or --task NAME"),
        ((*good, "--task", "json"), "not both"),
        (("--task", "poetry"), "json"),
        (("--prompts", "nowhere.jsonl"), "nowhere.jsonl: No such file"),
        (("--prompts", long), f"{long}:2: prompt of"),
        (("--prompts", strange), f"{strange}:1: family must be a text"),
        (("--prompts", own), f"{own}:1: temperature cannot differ between prompts"),
        ((*good, "--out", full), "not empty and holds no recording"),
        ((*good, "--out", file), f"{file}: "),
        ((*good, "--out", "/proc/nowhere/t"), "/proc/nowhere"),
    ]
    for words, message in cases:
        outcome = spot(
            "trace", "--model", checkpoint, "--max-new-tokens", 3, *words, *(() if "--out" in words else ("--out", tmp_path / "t"))
        )
        last = outcome.err.splitlines()[-1]
        assert outcome.code == 2 and not outcome.out and message in last and last.startswith("spot: "), (words, outcome)
        assert outcome.err.count("\n") <= 2 and "Traceback" not in outcome.err
    assert not (tmp_path / "t").exists() and [p.name for p in full.iterdir()] == ["note"]


def test_too_little_space(spot: Spot, prompts: Path, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    outcome = spot("trace", "--model", checkpoint, "--prompts", prompts, *SHORT, "--out", tmp_path / "t")
    assert outcome.code == 2 and "are needed and" in outcome.err and not (tmp_path / "t").exists()


def test_a_disk_that_fills_up(spot: Spot, prompts: Path, checkpoint: Path, tmp_path: Path) -> None:
    """The shard that does not fit leaves nothing behind; the same command continues."""
    out, err = tmp_path / "t", tmp_path / "stderr"
    words = ["trace", "--model", str(checkpoint), "--prompts", str(prompts), *SHORT, "--out", str(out)]
    stderr = os.open(err, os.O_WRONLY | os.O_CREAT)
    assert wait(fork(words, stderr, stderr, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)))) == 2
    last = err.read_text("utf-8").splitlines()[-1]
    assert "shard-00000.npz" in last and os.strerror(errno.EFBIG) in last and "same command continues" in last
    assert "Traceback" not in err.read_text("utf-8") and {p.name for p in out.iterdir()} == {"plan.json"}
    assert spot(*words).code == 0 and len(read_traces(out).sequence["blocks"]) == 66


def is_gone(group: int) -> bool:
    """Whether no process of the group is left, after a moment for multiprocessing's tracker, which ends by itself."""
    for _ in range(500):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("workers", [1, 2])
def test_ctrl_c_keeps_finished_shards(spot: Spot, checkpoint: Path, tmp_path: Path, workers: int) -> None:
    """Ctrl-C reaches every process of the terminal's group; no process is left, nothing that was finished is lost."""
    out, prompts = tmp_path / "t", tmp_path / "many.jsonl"
    prompts.write_text("".join(json.dumps({"prompt_ids": [1 + i % 50, 2]}) + "\n" for i in range(64 * 12)), "utf-8")
    words = ["trace", "--model", str(checkpoint), "--prompts", str(prompts), *SHORT, "--workers", str(workers), "--out", str(out)]
    code = "from spot_dlm.cli import main; main()"
    child = subprocess.Popen(
        [sys.executable, "-c", code, *words], stderr=subprocess.PIPE, text=True, process_group=0,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    end = time.monotonic() + 300
    while not list(out.glob("shard-*.npz")) and child.poll() is None and time.monotonic() < end:
        time.sleep(0.01)
    os.killpg(child.pid, signal.SIGINT)
    err = child.communicate(timeout=300)[1]
    kept = len(list(out.glob("shard-*.npz")))
    assert child.returncode == 130 and 1 <= kept < 12, err
    assert f"{64 * kept} of 768 sequences recorded and kept" in err.splitlines()[-1] and "Traceback" not in err
    assert is_gone(child.pid)
    assert not list(out.glob(".*")) and not (out / "manifest.json").exists()
