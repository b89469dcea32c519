"""`spot analyze`: its table, its files and its errors; the numbers are tested in tests/test_analyze.py."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli.conftest import Spot
from toy import unchecked


@pytest.fixture(autouse=True)
def fast() -> Iterator[None]:
    with unchecked():
        yield


@pytest.fixture
def traces(spot: Spot, checkpoint: Path, tmp_path: Path) -> Path:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"p {i}", "family": "ab"[i % 2]}) + "\n" for i in range(4)), "utf-8")
    words = ("--prompts", prompts, "--temperature", 0, "--temperature", 1, "--max-new-tokens", 6, "--block-length", 4, "--block-length", 8)
    assert spot("trace", "--model", checkpoint, *words, "--out", tmp_path / "t").code == 0
    return tmp_path / "t"


def test_table_document_and_figure(spot: Spot, traces: Path, tmp_path: Path) -> None:
    out, plot = tmp_path / "a.json", tmp_path / "a.png"
    outcome = spot("analyze", traces, "--out", out, "--plot", plot)
    assert outcome.code == 0 and outcome.out.count("\n") == 1
    document = json.loads(out.read_text("utf-8"))
    assert json.loads(outcome.out) == {"out": str(out), "plot": str(plot)} | {
        k: document[k] for k in ("sequences", "look_aheads", "pooled")
    }
    assert document["format"] == "spot-analysis/1" and document["traces"]["target"]["family"] == "sdar" and document["command"]
    assert len(document["settings"]) == 4 and len(document["cells"]) == 8 and document["sequences"] == 16
    assert sum(c["states"] for c in document["cells"]) == sum(s["states"] for s in document["settings"]) == document["pooled"]["states"]
    assert "left to right" in outcome.err and "equal" in outcome.err and max(map(len, outcome.err.splitlines())) <= 80
    assert plot.read_bytes().startswith(b"\x89PNG") and plot.stat().st_size > 10_000
    alone = spot("analyze", traces)
    assert alone.code == 0 and json.loads(alone.out)["pooled"] == document["pooled"]


def test_bad_input_is_one_line(spot: Spot, traces: Path, tmp_path: Path) -> None:
    unfinished = tmp_path / "unfinished"
    unfinished.mkdir()
    for words, message in (
        ((tmp_path / "nowhere",), "no such folder"),
        ((unfinished,), "unfinished"),
        ((), "DIR"),
        ((traces, "--out", "/nowhere/a.json"), "/nowhere/a.json: no such folder"),
        ((traces, "--plot", "/nowhere/a.png"), "/nowhere/a.png: no such folder"),
    ):
        outcome = spot("analyze", *words)
        assert outcome.code == 2 and not outcome.out and message in outcome.err and outcome.err.count("\n") == 1
    shard = traces / "shard-00000.npz"
    shard.write_bytes(shard.read_bytes()[:-1])
    damaged = spot("analyze", traces)
    assert damaged.code == 2 and "shard-00000.npz: missing or not the file" in damaged.err and damaged.err.count("\n") == 1
