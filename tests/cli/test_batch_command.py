"""`spot generate --batch` and `spot verify --batch`: never another answer, failures named, runs that continue."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli.conftest import Spot
from toy import ToyPrefix, unchecked
from trace_toys import AnyLength, Settled

from spot_dlm.interfaces import MaskedLogits

SECONDS = ("total_s", "target_s", "draft_s", "verify_s", "host_share")
BAD, BROKEN = 23, 22  # first tokens of prompts whose logits are NaN, and on which a pass raises


class Moody(AnyLength):
    """A toy whose answers end after different lengths, and that fails on some prompts."""

    def __init__(self) -> None:
        super().__init__(Settled(24, 4, seed=5, jitter=1.5), stop_ids=range(0, 4), max_length=256, crosses=True)

    def evaluate(self, prefix: ToyPrefix, canvases: np.ndarray) -> MaskedLogits:
        if prefix.ids[:1] == (BROKEN,):
            raise RuntimeError("the device\n  is gone")
        exact = super().evaluate(prefix, canvases)
        packed = exact.packed.clone()
        if prefix.ids[:1] == (BAD,):
            packed[:] = torch.nan
        return MaskedLogits(packed, exact.offsets)

    def evaluate_many(self, queries: list[tuple[ToyPrefix, np.ndarray]]) -> list[MaskedLogits]:
        return [self.evaluate(*query) for query in queries]


@pytest.fixture
def moody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spot_dlm.cli.options.load_target", lambda *_, **__: Moody())


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def timeless(row: dict) -> dict:
    return row | {"counts": {key: value for key, value in row["counts"].items() if key not in SECONDS}}


def read(path: Path) -> dict[tuple, dict]:
    rows = [timeless(json.loads(line)) for line in path.read_text("utf-8").splitlines()]
    found = {(row["id"], row["sample"]): row for row in rows}
    assert len(found) == len(rows), "a line is there twice"
    return found


def mixed_prompts(count: int = 12) -> list[dict]:
    rng = random.Random(1)
    rows: list[dict] = []
    for i in range(count):
        row: dict = {"prompt_ids": [rng.randrange(4, 20) for _ in range(rng.randrange(1, 11))], "id": f"p{i}"}
        rows.append(row | rng.choice([{}, {"seed": i}, {"temperature": 0}, {"max_new_tokens": 5 + i}]))
    return rows


@pytest.mark.parametrize("nodes", [("--nodes", 5), ()])
def test_rows_are_those_of_one_after_the_other(spot: Spot, moody: None, tmp_path: Path, nodes: tuple) -> None:
    prompts = write(tmp_path / "p.jsonl", mixed_prompts())
    command = ("generate", "--prompts", prompts, "--temperature", 1, "--max-new-tokens", 30, "-n", 2, *nodes)
    with unchecked():
        files = {batch: tmp_path / f"{batch}.jsonl" for batch in (1, 4, "auto")}
        for batch, out in files.items():
            done = spot(*command, "--batch", batch, "--out", out)
            assert done.code == 0 and not done.out and not done.err
        printed = spot(*command)
    rows = {batch: read(out) for batch, out in files.items()}
    assert len(rows[1]) == 24 and list(rows[1]) == [(f"p{i}", sample) for i in range(12) for sample in range(2)]
    if not nodes:  # the counts depend on what the budget has learned by then
        rows = {batch: {key: row | {"counts": 0} for key, row in found.items()} for batch, found in rows.items()}
    assert rows[1] == rows[4] == rows["auto"]
    assert list(rows[4]) != list(rows[1]), "written as they finish"
    texts = {(row["id"], row["sample"]): row["token_ids"] for row in printed.rows}
    assert texts == {key: row["token_ids"] for key, row in rows[1].items()}


def test_the_shipped_model_in_a_batch(spot: Spot, tmp_path: Path) -> None:
    prompts = write(tmp_path / "p.jsonl", [{"prompt": f"Add {i} and {i + 40}."} for i in range(11, 16)])
    with unchecked():
        for batch in (1, 4):
            words = ("--prompts", prompts, "--batch", batch, "--nodes", 4, "--max-new-tokens", 20, "--out", tmp_path / f"{batch}")
            assert spot("generate", "--model", "shipped", *words).code == 0
    assert read(tmp_path / "1") == read(tmp_path / "4") and len(read(tmp_path / "1")) == 5


def test_a_run_continues_with_another_batch(spot: Spot, moody: None, tmp_path: Path) -> None:
    prompts, out, whole = write(tmp_path / "p.jsonl", mixed_prompts()), tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    command = ("generate", "--prompts", prompts, "--temperature", 1, "--nodes", 4)
    with unchecked():
        assert spot(*command, "--out", whole, "--batch", 1).code == 0
        assert spot(*command, "--out", out, "--batch", 5).code == 0
        lines = out.read_text("utf-8").splitlines(keepends=True)
        out.write_text("".join(lines[:6]) + lines[6][:50], "utf-8")
        again = spot(*command, "--out", out, "--batch", 3, "--json")
    summary = json.loads(again.out)
    assert again.code == 0 and (summary["done"], summary["skipped"]) == (6, 6) and summary["settings"]["nodes"] == 4
    assert read(out) == read(whole)


def test_an_interrupted_batch_continues(spot: Spot, moody: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle of a pass: what is written stays, the rest is decoded by the next run."""
    prompts, out, whole = write(tmp_path / "p.jsonl", mixed_prompts()), tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    command = ("generate", "--prompts", prompts, "--temperature", 1, "--nodes", 4)
    passes = 0

    def interrupted(*_: Any) -> list[MaskedLogits]:
        nonlocal passes
        passes += 1
        if passes == 12:
            raise KeyboardInterrupt
        return exact(*_)

    with unchecked():
        assert spot(*command, "--out", whole).code == 0
        exact = Moody.evaluate_many
        monkeypatch.setattr(Moody, "evaluate_many", interrupted)
        stopped = spot(*command, "--out", out, "--batch", 4)
        done = len(read(out))
        assert stopped.code == 130 and f"interrupted: {done} of 12 decodes done and kept" in stopped.err and 0 < done < 12
        assert spot(*command, "--out", out, "--batch", 2).code == 0
    assert read(out) == read(whole)


def test_failures_are_named_and_the_others_finish(spot: Spot, moody: None, tmp_path: Path) -> None:
    rows = mixed_prompts(6)
    rows[1] = {"prompt_ids": [BAD] * 5, "id": "bad"}
    rows[4] = {"prompt_ids": [BROKEN] * 5, "id": "broken"}
    prompts, out = write(tmp_path / "p.jsonl", rows), tmp_path / "out.jsonl"
    command = ("generate", "--prompts", prompts, "--out", out, "--nodes", 3)
    with unchecked():
        found = spot(*command, "--batch", 4, "--stats")
        lines = found.err.splitlines()
        assert found.code == 2 and sorted(key[0] for key in read(out)) == ["p0", "p2", "p3", "p5"]
        assert sum(line.startswith("spot: ") for line in lines) == 3 and any("nfe" in line for line in lines)
        assert any(line.startswith(f"spot: {prompts}:2: the target gave NaN") for line in lines)
        assert f"spot: {prompts}:5: the device is gone" in lines
        assert lines[-1].startswith(f"spot: 2 of 6 decodes failed: {prompts}:")
        again = spot(*command, "--json")
        assert again.code == 2 and json.loads(again.out)["skipped"] == 4 and "2 of 2 decodes failed" in again.err
        write(prompts, [row for row in rows if row["id"] != "bad"])
        other = spot("generate", "--prompts", prompts, "--json", "--nodes", 3)
        document = json.loads(other.out)
        assert other.code == 2 and [row["id"] for row in document["results"]] == ["p0", "p2", "p3", "p5"]
        write(prompts, [rows[4]])
        single = spot("generate", "--prompts", prompts)
    assert single.code == 2 and not single.out and single.err == f"spot: {prompts}:1: the device is gone\n"


def test_where_a_failure_happened_is_shown_on_demand(spot: Spot, moody: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = write(tmp_path / "p.jsonl", [{"prompt_ids": [BROKEN] * 5}])
    monkeypatch.setenv("SPOT_DEBUG", "1")
    with pytest.raises(ValueError, match=":1: the device is gone") as caught:
        spot("generate", "--prompts", prompts)
    assert isinstance(caught.value.__cause__, RuntimeError) and "in evaluate" in caught.value.__cause__.__notes__[0]


def test_samples_are_printed_in_order(spot: Spot, moody: None, tmp_path: Path) -> None:
    """They end in another order than they began."""
    prompts = write(tmp_path / "p.jsonl", [{"prompt_ids": [9, 9, 9]}])
    words = ("--temperature", 1.5, "--max-new-tokens", 40, "-n", 8)
    with unchecked():
        lines = spot("generate", "--prompts", prompts, *words).rows
        document = json.loads(spot("generate", "--prompts", prompts, *words, "--json").out)
        as_text, one_by_one = (spot("generate", "yyy", *words, "--batch", batch) for batch in ("auto", 1))
    assert [row["sample"] for row in lines] != list(range(8)) == [row["sample"] for row in document["results"]]
    assert {row["sample"]: row["text"] for row in lines} == {row["sample"]: row["text"] for row in document["results"]}
    assert as_text.out == one_by_one.out and len(as_text.out.split("\n\n")) == 8


def test_watch_shows_one_decode_at_a_time(spot: Spot, tmp_path: Path) -> None:
    prompts = write(tmp_path / "p.jsonl", [{"prompt": f"n {i}"} for i in range(3)])
    command = ("generate", "--prompts", prompts, "--max-new-tokens", 8)
    with unchecked():
        plain = spot(*command)
        for more in ((), ("--batch", 1)):
            watched = spot(*command, "--watch", *more)
            assert watched.code == 0
            assert [row["id"] for row in watched.rows] == [1, 2, 3]
            assert {row["id"]: row["token_ids"] for row in watched.rows} == {row["id"]: row["token_ids"] for row in plain.rows}
            titles = [watched.err.index(f"{i} · sample 0") for i in (1, 2, 3)]
            assert titles == sorted(titles) and watched.err.count("passes") == 3
    refused = spot(*command, "--watch", "--batch", 2)
    assert refused.code == 2 and refused.err.count("\n") == 1


def test_verify_in_batches(spot: Spot, tmp_path: Path) -> None:
    prompts = write(tmp_path / "p.jsonl", [{"prompt": f"the {word}"} for word in ("a", "in", "never", "a a a a a")])
    command = ("verify", "--prompts", prompts, "--max-new-tokens", 9, "--rule", "standard", "--rule", "k=2", "--json")
    with unchecked():
        found = spot(*command, "--batch", 4, "--nodes", "auto", "--nodes", 8)
        serial = json.loads(spot(*command, "--nodes", 8).out)
    report = json.loads(found.out)
    assert found.code == 0 and report["cases"] == report["identical"] == 4 * 2 * 2 * 2 and report["provenance"]["batch"] == 4
    assert sorted(str(row["nodes"]) for row in report["rows"]) == ["8"] * 4 + ["auto"] * 4
    fixed = [row for row in report["rows"] if row["nodes"] == 8]
    kept = ("temperature", "rule", "drafter", "nodes", "cases", "identical", "nfe_standard", "nfe_speculative")
    assert [[row[key] for key in kept] for row in fixed] == [[row[key] for key in kept] for row in serial["rows"]]
    assert "auto" in found.err and "all identical" in found.err
