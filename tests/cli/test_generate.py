"""`spot generate`: answers, JSON, samples, prompt files, result files that continue."""

import fcntl
import io
import json
import sys
from pathlib import Path

import pytest
from cli.conftest import Spot

SHORT = ("--max-new-tokens", 6, "--nodes", 4)


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows), "utf-8")
    return path


def test_answer_on_stdout_and_stats_on_stderr(spot: Spot) -> None:
    plain = spot("generate", "the thing", *SHORT)
    assert plain.code == 0 and plain.out and not plain.err
    table = spot("generate", "the thing", *SHORT, "--stats", "--watch")
    assert table.out == plain.out
    for word in ("nfe", "tpf", "acceptance by depth", "seconds", "target", "draft", "verify", "host share", "passes"):
        assert word in table.err


def test_json_is_one_document_and_drafters_agree(spot: Spot) -> None:
    documents = {}
    for drafter in ("root", "chain", "chain-published", "ltr"):
        words = ("generate", "a b", *SHORT, "--temperature", 1, "--drafter", drafter, "--json", "-n", 2)
        documents[drafter] = json.loads(spot(*words).out)
    answers = {d: [(r["token_ids"], r["commit_steps"]) for r in doc["results"]] for d, doc in documents.items()}
    assert answers["root"] == answers["chain"] == answers["chain-published"] == answers["ltr"]
    assert answers["root"][0] != answers["root"][1], "samples have noise of their own"
    assert documents["ltr"]["settings"]["drafter"] == "ltr" and documents["ltr"]["settings"]["rule"] == "standard"
    assert documents["ltr"]["settings"]["format"] == 1 and "command" not in documents["ltr"]["settings"]
    assert documents["root"]["counts"]["nfe"] >= documents["chain"]["counts"]["nfe"] > 0


def test_stdin(spot: Spot, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = spot("generate", "in the", *SHORT).out
    for dash in ((), ("-",)):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"in the\n")))
        assert spot("generate", *dash, *SHORT).out == expected
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe")))
    broken = spot("generate", *SHORT)
    assert broken.code == 2 and "UTF-8" in broken.err


def test_prompt_file(spot: Spot, tmp_path: Path) -> None:
    rows = [{"prompt": "a"}, {"prompt": "a", "seed": 5, "id": "x"}, {"prompt_ids": [1, 2], "max_new_tokens": 2, "note": 1}]
    found = spot("generate", "--prompts", write(tmp_path / "p.jsonl", *rows), *SHORT, "--temperature", 1)
    assert found.code == 0 and "ignored keys note" in found.err
    found_rows = sorted(found.rows, key=lambda row: row["sequence"])  # as they finish
    assert [r["id"] for r in found_rows] == [1, "x", 3]
    assert [r["sequence"] for r in found_rows] == [0, 2**32, 2 * 2**32]
    assert len(found_rows[2]["token_ids"]) <= 2 and found_rows[2]["prompt_ids"] == [1, 2]


def test_out_continues_and_repairs(spot: Spot, tmp_path: Path) -> None:
    prompts, out = write(tmp_path / "p.jsonl", *({"prompt": f"n {i}"} for i in range(4))), tmp_path / "out.jsonl"
    command = ("generate", "--prompts", prompts, "--out", out, *SHORT, "--temperature", 1)
    assert spot(*command).code == 0
    complete = out.read_text("utf-8").splitlines(keepends=True)
    assert len(complete) == 4
    out.write_text("".join(complete[:2]) + complete[2][:40], "utf-8")
    again = spot(*command, "--json")
    summary = json.loads(again.out)
    assert (summary["done"], summary["skipped"]) == (2, 2) and "2 of 4" in again.err
    strip = [{k: v for k, v in json.loads(line).items() if k != "counts"} for line in complete]
    assert [{k: v for k, v in json.loads(line).items() if k != "counts"} for line in out.open(encoding="utf-8")] == strip
    assert json.loads(spot(*command, "--json").out)["skipped"] == 4

    other = spot(*command, "--seed", 7)
    assert other.code == 2 and "seed is 0 there, 7 now" in other.err and "--overwrite" in other.err
    write(prompts, *({"prompt": f"m {i}"} for i in range(4)))
    changed = spot(*command)
    assert changed.code == 2 and "another prompt" in changed.err
    assert len(out.read_text("utf-8").splitlines()) == 4, "a refusal changes nothing"
    assert spot(*command, "--seed", 7, "--overwrite").code == 0
    assert [json.loads(line)["settings"]["seed"] for line in out.open(encoding="utf-8")] == [7] * 4
    write(out, "{}")
    assert "not a result line" in spot(*command).err


def test_out_never_harms_other_files(spot: Spot, tmp_path: Path) -> None:
    prompts, out = write(tmp_path / "p.jsonl", {"id": 1, "prompt": "a"}), tmp_path / "out.jsonl"
    command = ("generate", "--prompts", prompts, *SHORT)
    for content in ("a note", '{"id": 1, "prompt": "a"}', '{"name": "x', "{}", "[1"):
        out.write_text(content, "utf-8")
        refused = spot(*command, "--out", out)
        assert refused.code == 2 and f"{out}:1: not a result line of spot" in refused.err and out.read_text("utf-8") == content
    (tmp_path / "link.jsonl").symlink_to(prompts)
    before = prompts.read_bytes()
    for name in ("p.jsonl", "link.jsonl"):
        for more in ((), ("--overwrite",)):
            refused = spot(*command, "--out", tmp_path / name, *more)
            assert refused.code == 2 and "is the file of --prompts" in refused.err and prompts.read_bytes() == before
    for content in ("", "{", '{"id": ', '{"id": "x", "sample": 0, "te'):
        out.write_text(content, "utf-8")
        assert spot(*command, "--out", out).code == 0 and len(out.read_text("utf-8").splitlines()) == 1


def test_out_is_locked(spot: Spot, tmp_path: Path) -> None:
    prompts, out = write(tmp_path / "p.jsonl", {"prompt": "a"}), tmp_path / "out.jsonl"
    command = ("generate", "--prompts", prompts, "--out", out, *SHORT)
    assert spot(*command).code == 0
    before = out.read_bytes()
    with out.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for more in ((), ("--overwrite",)):
            refused = spot(*command, *more)
            assert refused.code == 2 and "another run is writing this file" in refused.err and refused.err.count("\n") == 1
            assert out.read_bytes() == before
    assert spot(*command).code == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": "a"}\n{"prompt": "b', ":2: no complete JSON"),
        ('{"prompt": "a"}\n\n{"prompt": "b"}\n', ":2: the line is empty"),
        ('{"prompt": "a", "id": 1}\n{"prompt": "b", "id": "1"}\n', ":2: id '1' stands on line 1 already"),
        ("[1]\n", ":1: a JSON object"),
        ("{}\n", ":1: exactly one of"),
        ('{"prompt": 3}\n', ":1: prompt must be"),
        ('{"prompt": "a", "temperature": "hot"}\n', ":1: temperature='hot'"),
        ('{"prompt": "a", "temperature": -1}\n', ":1: temperature=-1"),
        ('{"prompt": "a", "max_new_tokens": 0}\n', ":1: max_new_tokens=0"),
        ('{"prompt": "a", "seed": 1.5}\n', ":1: seed=1.5"),
        ('{"prompt": "a", "id": []}\n', ":1: id must"),
        ('{"prompt": "a"}\n{"prompt": " "}\n', ":2: the prompt is empty"),
        ('{"prompt_ids": []}\n', ":1: the prompt is empty"),
        ('{"prompt_ids": [99999]}\n', ":1: prompt ids must lie"),
        ('{"prompt_ids": [true]}\n', ":1: prompt_ids must"),
        ('{"prompt": "\\ud800"}\n', ":1: no valid UTF-8"),
        (b'{"prompt": "\xff"}\n', ":1: no complete JSON"),
        ("", "no prompts"),
    ],
)
def test_bad_prompt_files_are_refused_before_decoding(spot: Spot, tmp_path: Path, content: str | bytes, message: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    refused = spot("generate", "--prompts", path, *SHORT)
    assert refused.code == 2 and not refused.out
    assert message in refused.err and refused.err.count("\n") == 1
