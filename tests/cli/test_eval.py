"""`spot eval`: paired runs, graded files, the document, the exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli.conftest import Spot
from toy import unchecked

from spot_dlm.bench import accuracy
from spot_dlm.sequence import Result


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows), "utf-8")
    return path


def test_a_task_and_a_file(spot: Spot, tmp_path: Path) -> None:
    person = '{"name": "Anna Berg", "age": 34, "city": "Oslo"}'
    questions = write(
        tmp_path / "q.jsonl",
        {"prompt": "To JSON: Anna Berg is 34 years old and lives in Oslo.", "answer": person},
        {"prompt": "Add 47 and 38.", "check": {"kind": "number", "value": 86}, "family": "sums"},
        {"prompt": "Continue: def read(", "max_new_tokens": 8, "temperature": 1.0},
    )
    words = ("--model", "shipped", "--task", "json", "--task", questions, "--limit", 3, "--drafter", "chain", "--nodes", 8, "--batch", 2)
    with unchecked():
        outcome = spot("eval", *words, "--max-new-tokens", 64, "--out", tmp_path / "e.json")
    document = json.loads(outcome.out.splitlines()[-1])
    assert outcome.code == 0 and document["all_identical"] is True and json.loads((tmp_path / "e.json").read_text()) == document
    rows = {row["task"]: row for row in document["rows"]}
    assert list(rows) == ["json", str(questions), "all"]
    for row in rows.values():
        assert row["same_answers"] == row["same_order"] == 1 and row["nfe_reduction"] > 1.2 and row["seconds_speculative"] > 0
        for key in ("graded", "right", "accuracy", "accuracy_low", "accuracy_high", "tokens"):
            assert row[f"{key}_standard"] == row[f"{key}_speculative"]
    own = rows[str(questions)]
    assert (own["prompts"], own["graded_standard"], own["right_standard"]) == (3, 2, 1)
    assert own["accuracy_low_standard"] < 0.5 == own["accuracy_standard"] < own["accuracy_high_standard"]
    answers = [a for a in document["answers"] if a["task"] == str(questions)]
    assert [a["right"] for a in answers] == [True, False, None] and answers[0]["text"] == person
    facts = document["provenance"]
    assert (facts["drafter"], facts["nodes"], facts["batch"]) == ("chain", 8, 2) and facts["fingerprint"]


def test_another_answer_is_exit_code_1(spot: Spot, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = accuracy._decode

    def broken(target: object, questions: object, drafter: object, budget: object) -> list[Result]:
        found = decode(target, questions, drafter, budget)
        return [Result([5], r.order, r.finish_reason, r.counts, "five", r.prompt_ids) for r in found] if drafter.name != "root" else found

    monkeypatch.setattr(accuracy, "_decode", broken)
    words = ("--model", "shipped", "--task", "arithmetic", "--limit", 2, "--drafter", "chain", "--nodes", 8, "--max-new-tokens", 40)
    with unchecked():
        outcome = spot("eval", *words)
    document = json.loads(outcome.out)
    assert outcome.code == 1 and document["rows"][0]["same_answers"] == 0 and not document["all_identical"]
    assert document["answers"][0]["text_speculative"] == "five" and document["answers"][0]["right_speculative"] is False
    assert "not identical: arithmetic, arithmetic/heldout_values/0" in outcome.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--task", "poetry"), "--task poetry is no file and no task; tasks are json"),
        (("--task", "{plain}"), "no prompt there has an answer or a check"),
        (("--task", "{odd}"), ":1: answer=3 must be a text"),
        (("--task", "{hot}", "--sampler", "llada,steps=64,block_length=4"), ":1: temperature is for --sampler to say"),
        (("--limit", 0), "--limit 0 must be"),
        (("--batch", 0), "--batch 0 must be"),
        (("--out", "/nowhere/e.json"), "/nowhere/e.json: cannot be written"),
    ],
)
def test_bad_input_is_one_line(spot: Spot, tmp_path: Path, words: tuple, message: str) -> None:
    files = {
        "{plain}": write(tmp_path / "plain.jsonl", {"prompt": "a"}),
        "{hot}": write(tmp_path / "hot.jsonl", {"prompt": "a", "answer": "b", "temperature": 1.0}),
        "{odd}": write(tmp_path / "odd.jsonl", {"prompt": "a", "answer": 3}),
    }
    refused = spot("eval", *(files.get(word, word) for word in words))
    assert refused.code == 2 and message in refused.err and refused.err.count("\n") == 1
