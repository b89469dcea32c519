"""`spot bench transfer`: fits what is missing, compares with what was fitted, a second run fits nothing again, bad input is one line."""

import json
import shutil
from importlib import resources
from pathlib import Path

import pytest
import torch
from cli.conftest import Spot
from safetensors.torch import load_file, save_file
from toy import unchecked

from spot_dlm import train as training
from spot_dlm.bench import transfer
from spot_dlm.bench.passes import Grid
from spot_dlm.tasks import load_prompts

SHIPPED = Path(str(resources.files("spot_dlm"))) / "shipped"
GRID = ("--task", "json", "--limit", 2, "--temperature", 1, "--nodes", 4, "--resolution", "float32", "--max-new-tokens", 16)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two targets: the shipped one's weights with a little noise."""
    folders = []
    for number, name in enumerate(("one", "two")):
        folder = tmp_path_factory.mktemp("models") / name
        shutil.copytree(SHIPPED / "target", folder)
        torch.manual_seed(number)
        weights = load_file(folder / "model.safetensors")
        save_file({k: v + 0.01 * torch.randn_like(v) for k, v in weights.items()}, folder / "model.safetensors", {"format": "pt"})
        folders.append(folder)
    return folders


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "p.jsonl"
    rows = [{"id": p.id, "prompt": p.prompt} for task in ("json", "python") for p in load_prompts(task, "heldout_templates", 3)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_transfer(spot: Spot, models: list[Path], prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["bench", "transfer", *(w for m in models for w in ("--model", m)), "--work", tmp_path / "w", *GRID]
    words += ["--drafter-file", SHIPPED / "linear", "--steps", 2, "--prompts", prompts, "--leave-one-out"]
    with unchecked():
        outcome = spot(*words, "--out", tmp_path / "t.json", "--markdown", tmp_path / "t.md")
    assert outcome.code == 0, outcome.err
    document = json.loads(outcome.out.splitlines()[-1])
    assert json.loads((tmp_path / "t.json").read_text()) == document and "| one | 4 |" in (tmp_path / "t.md").read_text()
    assert [t["name"] for t in document["targets"]] == ["one", "two"] and document["divergences"] == []
    labels = {c["drafter"] for c in document["cells"] if c["drafter"] == c["family"]}
    assert labels == {"chain", "chain-published", "spiffy", "transferred", "own", "others", "oracle"}
    assert all(c["identical"] and c["target"] in ("one", "two") for c in document["cells"])
    rows = document["comparisons"]
    assert {(r["target"], r["rival"]) for r in rows} == {(t, r) for t in ("one", "two") for r in transfer.RIVALS}
    for row in rows:
        assert row["ratio"] == pytest.approx(row["transferred"] / row["theirs"]) and row["low"] <= row["ratio"] <= row["high"]
    one, two = (json.loads((tmp_path / "w" / n / "others" / "config.json").read_text()) for n in ("one", "two"))
    fingerprints = [t["provenance"]["fingerprint"] for t in document["targets"]]
    assert [one["target"]["fingerprint"], two["target"]["fingerprint"]] == fingerprints[::-1]  # each was trained on the other's traces
    assert "transferred over others" in outcome.err

    monkeypatch.setattr(training, "losses", None)  # nothing is trained again
    with unchecked():
        again = spot(*words)
        fewer = spot("bench", "transfer", "--model", models[0], "--work", tmp_path / "none", *GRID)
    assert json.loads(again.out.splitlines()[-1])["cells"] == document["cells"]
    left = json.loads(fewer.out.splitlines()[-1])
    assert fewer.code == 0 and {r["rival"] for r in left["comparisons"]} == {"freedave"} and not (tmp_path / "none").exists()


def test_plan_of_the_traces() -> None:
    """Every prompt in one setting, each setting of the grid in turn, by the rules of its resolutions."""
    (subject,) = transfer.subjects(["folder/dream/"], Path("work"))
    assert subject.name == "dream" and subject.traces == Path("work/dream/traces")
    plan = transfer.recording(subject, [{"id": str(n), "prompt": "x"} for n in range(8)], Grid(max_new_tokens=64), Path("drafter"))
    assert [(s.rule, s.temperature, s.max_new_tokens) for s in plan.settings] == [
        (rule, temperature, 64) for rule in ("standard", "bfloat16") for temperature in (0.0, 1.0)
    ]
    assert plan.spread and sorted(s for _, s in plan.jobs) == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "a/x", "--model", "b/x"], "two models are called 'x'"),
        (["--model", "shipped", "--leave-one-out"], "--leave-one-out needs two models"),
        (["--model", "shipped", "--steps", -1], "--steps -1 must be at least 0"),
        (["--model", "shipped", "--drafter-file", "nowhere"], "nowhere: no such folder"),
        (["--model", "shipped", "--prompts", "nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_bad_input(spot: Spot, tmp_path: Path, words: list, message: str) -> None:
    outcome = spot("bench", "transfer", *words, "--work", tmp_path / "w", *GRID)
    assert outcome.code != 0 and message in outcome.err and "Traceback" not in outcome.err and not outcome.out
