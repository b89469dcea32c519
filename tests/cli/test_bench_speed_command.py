"""`spot bench speed`: the last line is one JSON document, options override the preset, divergences fail, bad input is one line."""

import json
from pathlib import Path

import pytest
from cli.broken_targets import Uneven
from cli.conftest import Spot
from toy import unchecked

from spot_dlm.budget import CostProfile

SMALL = ("--task", "json", "--limit", 1, "--max-new-tokens", 12, "--rule", "standard", "--temperature", 1, "--repeats", 1, "--prefix", 0)


def test_speed(spot: Spot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spot_dlm.tune.measure", lambda *_, **__: CostProfile((1, 64), (0,), ((1.0, 4.0),)))
    files = [tmp_path / name for name in ("s.json", "s.png")]
    chosen = ("--drafter", "chain", "--drafter", "chain-inside", "--nodes", 4, "--nodes", "auto", "--batch", 2)
    with unchecked():
        outcome = spot("bench", "speed", "--quick", *SMALL, *chosen, "--out", files[0], "--plot", files[1])
    document = json.loads(outcome.out.splitlines()[-1])
    assert outcome.code == 0 and document["all_identical"] is True and json.loads(files[0].read_text()) == document
    methods = {("root", 1), *((d, n) for d in ("chain", "chain-inside") for n in (4, "auto"))}
    assert {(r["batch"], r["drafter"], r["nodes"]) for r in document["rows"]} == {(2, *method) for method in methods}
    for row in document["rows"]:
        assert row["low"] <= row["speedup"] <= row["high"] and row["nfe_reduction"] >= 1 and row["identical"] is True
        assert set(row["split"]) == {"prefill", "target", "draft", "noise_and_walk", "host"} and row["tokens_per_s"] > 0
    facts = document["provenance"]
    assert facts["threads"] == 1 and facts["fingerprint"] and document["processor"] and document["command"].startswith("spot bench speed")
    assert files[1].read_bytes().startswith(b"\x89PNG") and "milliseconds per pass" in outcome.err and "all identical" in outcome.err


def test_divergence_fails(spot: Spot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spot_dlm.cli.options.load_target", lambda *_, **__: Uneven(0.25, 9.0))
    with unchecked():
        outcome = spot("bench", "speed", *SMALL, "--temperature", 0, "--drafter", "chain", "--nodes", 4, "--batch", 1, "--json")
    document = json.loads(outcome.out)
    assert outcome.code == 1 and document["all_identical"] is False and "not identical: Setting(task='json'" in outcome.err
    assert "milliseconds" not in outcome.err


def test_what_does_not_belong_to_the_model_is_left_out(spot: Spot, checkpoint: Path) -> None:
    words = ("--model", checkpoint, *SMALL, "--batch", 1, "--block-length", 4, "--threads", 1)
    with unchecked():
        outcome = spot("bench", "speed", "--quick", *words)
    assert outcome.code == 0 and "order is left out" in outcome.err and "calibrated is left out" in outcome.err
    assert {r["drafter"] for r in json.loads(outcome.out.splitlines()[-1])["rows"]} == {"root", "chain"}
    asked = spot("bench", "speed", *words, "--drafter", "order")
    assert asked.code == 2 and "fitted on target" in asked.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--task", "poetry"), "task='poetry' is unknown"),
        (("--nodes", "0"), "--nodes 0 must be"),
        (("--drafter", "crystal"), "drafter='crystal' is unknown"),
        (("--out", "/nowhere/s.json"), "/nowhere/s.json: cannot be written"),
        (("--batch", "0"), "batch=0 must be at least 1"),
        (("--task", "json", "--prefix", "5000"), "the target's context holds 4096"),
        (("--rule", "k=2", "--drafter", "calibrated"), "k=2"),
    ],
)
def test_bad_input(spot: Spot, words: tuple[str, ...], message: str) -> None:
    outcome = spot("bench", "speed", *words)
    assert outcome.code == 2 and message in outcome.err and len(outcome.err.strip().splitlines()) == 1 and outcome.out == ""


def test_help(spot: Spot) -> None:
    assert "Examples:" in spot("bench", "speed", "--help").out and "speed" in spot("bench", "--help").out
