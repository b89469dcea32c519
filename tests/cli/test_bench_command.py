"""`spot bench`: the last line is one JSON document, options override the preset, divergences fail, bad input is one line."""

import json
from pathlib import Path

import pytest
from cli.broken_targets import Uneven
from cli.conftest import Spot
from toy import unchecked

WORDS = "--task json --limit 1 --max-new-tokens 12 --temperature 1 --nodes 4 --drafter chain --drafter oracle"
SMALL = tuple(WORDS.split(" "))


def test_passes(spot: Spot, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("p.json", "p.md", "p.png")]
    with unchecked():
        outcome = spot("bench", "passes", "--quick", *SMALL, "--out", files[0], "--markdown", files[1], "--plot", files[2])
    document = json.loads(outcome.out.splitlines()[-1])
    assert outcome.code == 0 and document["all_identical"] is True and document["audited"] == 2
    assert {(c["task"], c["resolution"], c["block_length"], c["temperature"], c["nodes"], c["drafter"]) for c in document["cells"]} == {
        ("json", resolution, 16, 1.0, 4, drafter) for resolution in ("float32", "bfloat16") for drafter in ("chain", "oracle")
    }
    for cell in document["cells"]:
        assert cell["identical"] and cell["low"] <= cell["acceptance_length"] <= cell["high"] and cell["nfe_reduction"] >= 1
    facts = document["provenance"]
    assert facts["noise_version"] == 1 and facts["fingerprint"] and facts["rule"] == ["standard", "bfloat16"] and facts["limit"] == 1
    assert document["command"].startswith("spot bench passes --quick --task json")
    assert json.loads(files[0].read_text()) == document
    assert "| chain |" in files[1].read_text() and files[2].read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["p.json", "p.md", "p.png"]
    assert "transitions per pass" in outcome.err and "all identical" in outcome.err


def test_tradeoff(spot: Spot, tmp_path: Path) -> None:
    words = ("--quick", "--task", "rewrite", "--limit", 1, "--max-new-tokens", 32, "--rule", "k=2", "--drafter", "chain")
    with unchecked():
        outcome = spot("bench", "tradeoff", *words, "--out", tmp_path / "t.json")
    document = json.loads(outcome.out.splitlines()[-1])
    assert outcome.code == 0 and json.loads((tmp_path / "t.json").read_text()) == document
    methods = [r["method"] for r in document["rows"]]
    assert methods == ["standard", "k=2", "chain on standard", "threshold=0.9", "chain on threshold=0.9"]
    assert document["rows"][2]["same_answers"] == 1 and "tok/pass" in outcome.err


def test_divergence_fails(spot: Spot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spot_dlm.cli.options.load_target", lambda *_, **__: Uneven(0.25, 9.0))
    outcome = spot("bench", "passes", *SMALL, "--real", "--resolution", "float32", "--temperature", 0)
    document = json.loads(outcome.out.splitlines()[-1])
    assert outcome.code == 1 and document["all_identical"] is False and not all(c["identical"] for c in document["cells"])
    assert document["divergences"][0]["kind"] == "real" and "not identical: json" in outcome.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("passes", "--task", "poetry"), "task='poetry' is unknown"),
        (("passes", "--nodes", "0"), "nodes=0 must be"),
        (("passes", "--drafter", "crystal"), "drafter='crystal' is unknown"),
        (("passes", "--out", "/nowhere/p.json"), "/nowhere/p.json: cannot be written"),
        (("passes", "--out", "x", "--plot", "x"), "must be different files"),
        (("passes", "--graph", "/nowhere/graph.json"), "/nowhere/graph.json: no such file"),
        (("tradeoff", "--limit", "0"), "limit=0 must be at least 1"),
        (("tradeoff", "--drafter", "crystal"), "drafter='crystal' is unknown"),
    ],
)
def test_bad_input(spot: Spot, words: tuple[str, ...], message: str) -> None:
    outcome = spot("bench", *words)
    assert outcome.code == 2 and message in outcome.err and len(outcome.err.strip().splitlines()) == 1 and outcome.out == ""


def test_help(spot: Spot) -> None:
    assert "passes" in spot("bench", "--help").out and "Examples:" in spot("bench", "passes", "--help").out
    assert "Examples:" in spot("bench", "tradeoff", "--help").out
