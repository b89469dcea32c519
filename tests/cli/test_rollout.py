"""`spot rollout`: files of trajectories that continue, grades, the reader, bad input."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from cli.conftest import Spot
from toy import unchecked

from spot_dlm.rollout import read_rollouts

SHORT = ("--max-new-tokens", 6, "--samples", 2)


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows), "utf-8")
    return path


def lines_of(path: Path) -> list[dict]:
    rows = [json.loads(line) for line in path.open(encoding="utf-8")]
    for row in rows:
        del row["counts"]
        row["settings"] = {k: v for k, v in row["settings"].items() if k not in ("drafter", "nodes")}
    return sorted(rows, key=lambda row: row["sequence"])


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    rows = {"prompt": "a b", "answer": "never"}, {"prompt_ids": [1, 2, 5], "temperature": 0.5, "id": "x"}, {"prompt": "the thing"}
    return write(tmp_path / "p.jsonl", *rows)


def test_drafters_and_batches_write_the_same_lines(spot: Spot, tmp_path: Path, prompts: Path) -> None:
    found = []
    for i, words in enumerate((("--drafter", "root"), ("--drafter", "chain", "--nodes", 4), ("--drafter", "ltr", "--batch", 1))):
        out = tmp_path / f"{i}.jsonl"
        done = spot("rollout", "--prompts", prompts, "--out", out, *SHORT, *words, "--top-p", 0.9, "--raw-logprobs")
        assert done.code == 0 and not done.out
        found.append(lines_of(out))
    assert found[0] == found[1] == found[2] and len(found[0]) == 6
    first = found[0][0]
    assert first["grade"] is False and "grade" not in found[0][2] and len(first["logprobs"]) == len(first["token_ids"])
    assert first["settings"]["temperature"] == 1 and "top-p" in first["settings"]["logprobs"]
    assert all(a >= b for a, b in zip(first["logprobs"], first["raw_logprobs"], strict=True)), "a filter takes nothing from what it keeps"


def test_an_interrupted_run_continues_in_its_folder(spot: Spot, tmp_path: Path, prompts: Path) -> None:
    command = ("rollout", "--prompts", prompts, "--out", tmp_path, *SHORT)
    assert spot(*command).code == 0
    out = tmp_path / "rollouts.jsonl"
    complete = lines_of(out)
    lines = out.read_text("utf-8").splitlines(keepends=True)
    out.write_text("".join(lines[:3]) + lines[3][:200], "utf-8")
    assert len(read_rollouts(tmp_path)) == 3, "a line that is being written is left out"
    again = json.loads(spot(*command, "--json").out)
    assert (again["done"], again["skipped"], again["out"]) == (3, 3, str(out)) and lines_of(out) == complete
    other = spot(*command, "--raw-logprobs")
    assert other.code == 2 and "raw_logprobs is None there" in other.err
    assert spot("generate", "--prompts", prompts, "--out", out, "--max-new-tokens", 6).code == 2


def test_reader(spot: Spot, tmp_path: Path, prompts: Path) -> None:
    assert spot("rollout", "--prompts", prompts, "--out", tmp_path, *SHORT, "--block-length", 4, "--raw-logprobs").code == 0
    rows, found = lines_of(tmp_path / "rollouts.jsonl"), read_rollouts(tmp_path)
    assert len(found) == 6 and found.ids == [1, 1, "x", "x", 3, 3]
    assert found.prompt_index.tolist() == [0, 0, 1, 1, 2, 2] and found.sample_index.tolist() == [0, 1] * 3
    assert found.temperatures.tolist() == [1, 1, 0.5, 0.5, 1, 1]
    assert found.grades[:2].tolist() == [0, 0] and found.grades[2:].isnan().all()
    assert found.raw_logprobs is not None and found.commits.raw_logprobs is not None
    for i, row in enumerate(rows):
        own, ours = found.mask[i], found.commits.mask[i]
        assert found.tokens[i][own].tolist() == row["token_ids"] and found.steps[i][own].tolist() == row["commit_steps"]
        assert found.logprobs[i][own].tolist() == row["logprobs"] and found.raw_logprobs[i][own].tolist() == row["raw_logprobs"]
        assert found.prompt_ids[i][found.prompt_mask[i]].tolist() == row["prompt_ids"]
        assert found.commits.positions[i][ours].tolist() == row["commits"]["positions"]
        assert not found.logprobs[i][~own].any() and (found.steps[i][~own] == -1).all()
        states = list(found.states(i))
        assert [t for s in states for t in s.tokens.tolist()] == row["commits"]["token_ids"]
        mask_id = found.settings["mask_token_id"]
        for state, after in pairwise(states):
            assert (state.canvas[state.positions] == mask_id).all() and len(state.canvas) % 4 == 0
            assert torch.equal(after.canvas[state.positions], state.tokens)
            assert len(state.canvas) == 4 * (state.block + 1)


def test_packaged_prompts_are_graded(spot: Spot, tmp_path: Path) -> None:
    words = ("rollout", "--task", "arithmetic", "--limit", 2, "--samples", 1, "--temperature", 0, "--model", "shipped", "--nodes", 8)
    with unchecked():
        assert spot(*words, "--drafter", "chain", "--out", tmp_path).code == 0
    found = read_rollouts(tmp_path)
    assert found.grades.tolist() == [1, 1] and found.ids == ["arithmetic/heldout_values/0", "arithmetic/heldout_values/1"]
    assert found.logprobs[found.mask].min() > -1 and found.logprobs[found.mask].max() < 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "give --prompts FILE or --task NAME"),
        (("--prompts", "{p}", "--task", "json"), "one of them"),
        (("--prompts", "{p}", "--samples", 0), "--samples 0 must be"),
        (("--task", "poetry"), "task='poetry' is unknown"),
        (("--prompts", "{p}", "--out", "{p}"), "is the file of --prompts"),
        (("--prompts", "{p}", "--sampler", "llada,steps=64,block_length=4"), ":2: temperature is for --sampler to say"),
        (("--prompts", "{bad}"), "check={'kind': 'number'} is not one of"),
        (("--prompts", "{python}"), "needs the prompt as text"),
    ],
)
def test_bad_input_is_one_line(spot: Spot, tmp_path: Path, prompts: Path, words: tuple, message: str) -> None:
    files = {
        "{p}": prompts,
        "{bad}": write(tmp_path / "bad.jsonl", {"prompt": "a", "check": {"kind": "number"}}),
        "{python}": write(tmp_path / "ids.jsonl", {"prompt_ids": [1], "check": {"kind": "python", "tests": []}}),
    }
    given = [files.get(word, word) for word in words]
    refused = spot("rollout", *given, *(() if "--out" in words else ("--out", tmp_path / "out.jsonl")))
    assert refused.code == 2 and message in refused.err and refused.err.count("\n") == 1


def test_other_files_are_no_rollouts(spot: Spot, tmp_path: Path, prompts: Path) -> None:
    assert spot("generate", "--prompts", prompts, "--out", tmp_path / "g.jsonl", "--max-new-tokens", 4).code == 0
    for path, message in ((tmp_path / "g.jsonl", ":1: not a line of spot rollout"), (write(tmp_path / "e.jsonl"), "no rollouts there")):
        with pytest.raises(ValueError, match=message):
            read_rollouts(path)


def test_the_policy_gradient_of_the_docs(spot: Spot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs as it stands there, and the trainer's own forward pass gives the recorded log-probabilities."""
    text = (Path(__file__).parents[2] / "docs" / "rollouts.md").read_text("utf-8")
    command = next(line for line in text.splitlines() if line.startswith("spot rollout --task"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rollouts").mkdir()
    with unchecked():
        assert spot(*command.split()[1:], "--drafter", "chain", "--model", "shipped").code == 0
        code = text.split("```python\n")[1].split("```")[0]
        ratios: list[float] = []
        exec(code.replace("        (-advantage", "        ratios.extend(ratio.tolist())\n        (-advantage"), {"ratios": ratios})
    assert len(ratios) > 50 and max(abs(r - 1) for r in ratios) < 1e-3
