"""`spot train`: one JSON document, resumption that says so, ctrl-C keeps the checkpoint, bad input is one line."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path

import pytest
from cli.conftest import Spot
from toy import unchecked
from trace_toys import record_toy, settled_target, toy_recording

from spot_dlm import train as training
from spot_dlm.drafter_files import load_order_model
from spot_dlm.record import TraceSetting

SMALL = ("--kind", "linear", "--steps", 6, "--eval-every", 2, "--positions", 64, "--threads", 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = [TraceSetting("standard", t, block_length=8, max_new_tokens=12) for t in (0.0, 1.0)]
    path = tmp_path_factory.mktemp("traces") / "t"
    with unchecked():
        record_toy(path, toy_recording(3, settings), settled_target())
    return path


def test_train(spot: Spot, folder: Path, tmp_path: Path) -> None:
    with unchecked():
        outcome = spot("train", folder, "--out", tmp_path / "d", *SMALL)
    document = json.loads(outcome.out.splitlines()[-1])
    assert outcome.code == 0, outcome.err
    assert document["kind"] == "linear" and document["best_step"] in (2, 4, 6) and document["acceptance_8"] >= 1
    files = ["checkpoint.pt", "config.json", "loss.png", "model.safetensors", "reliability.png", "training.json"]
    assert document["files"] == files and sorted(p.name for p in (tmp_path / "d").iterdir()) == files
    assert load_order_model(tmp_path / "d").about["command"].startswith("spot train ")
    assert json.loads((tmp_path / "d" / "training.json").read_text())["reliability"]["reach"].keys() == {"0", "1"}
    for text in ("linear: 6 steps on", "step 2: order ", "step 6: order ", "N=8: ", "expected"):
        assert text in outcome.err


def test_interrupted_and_continued(spot: Spot, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, steps = training.losses, []

    def losses(*given: object) -> object:
        steps.append(1)
        if len(steps) == 4:
            raise KeyboardInterrupt
        return real(*given)

    words = ("train", folder, "--out", tmp_path / "d", *SMALL)
    with unchecked():
        monkeypatch.setattr(training, "losses", losses)
        stopped = spot(*words, "--bfloat16")
        assert stopped.code == 130 and not stopped.out
        assert "interrupted at step 3 of 6: step 2 is kept; run the same command again to continue" in stopped.err
        other = spot(*words, "--seed", 1)
        assert other.code == 2 and "other params (seed=0 there, 1 here)" in other.err
        done = spot(*words)
    assert done.code == 0 and "continues at step 2 of 6" in done.err and "bfloat16;" in done.err


def test_a_full_disk(spot: Spot, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "checkpoint.pt")

    monkeypatch.setattr(training, "replace_file", full)
    with unchecked():
        outcome = spot("train", folder, "--out", tmp_path / "d", *SMALL)
    assert outcome.code == 2 and "checkpoint.pt: No space left on device" in outcome.err.splitlines()[-1]


def test_bad_input(spot: Spot, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").touch()
    (tmp_path / "file").touch()
    shutil.copytree(folder, tmp_path / "unfinished")
    (tmp_path / "unfinished" / "manifest.json").unlink()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "checkpoint.pt").write_bytes(b"nonsense")
    cases = [
        ((tmp_path / "nowhere", "--out", tmp_path / "d"), "nowhere: no such folder"),
        ((tmp_path / "unfinished", "--out", tmp_path / "d"), "the recording is unfinished"),
        ((folder, "--out", tmp_path / "full"), "is not empty and holds no training"),
        ((folder, "--out", tmp_path / "file"), "is a file"),
        ((folder, "--out", tmp_path / "damaged"), "checkpoint.pt: damaged"),
        ((folder, "--out", "/proc/nowhere"), "/proc/nowhere"),
        ((folder, "--out", tmp_path / "d", "--kind", "tree"), "order, linear"),
        ((folder, "--out", tmp_path / "d", "--steps", 0), "--steps 0"),
        ((folder, "--out", tmp_path / "d", "--positions", 0), "--positions 0"),
        ((folder, "--out", tmp_path / "d", "--eval-every", 0), "--eval-every 0"),
        ((folder, "--out", tmp_path / "d", "--device", "toaster"), "--device toaster"),
    ]
    for words, message in cases:
        with unchecked():
            outcome = spot("train", *words)
        assert outcome.code == 2 and message in outcome.err.splitlines()[-1] and not outcome.out, (words, outcome)
        assert "Traceback" not in outcome.err


def test_help(spot: Spot) -> None:
    assert "  spot train" in spot("train", "--help").out.split("Examples:")[1]
