"""`spot verify` and `spot demo`: identity is proven, broken targets are reported and fail."""

import json
import shlex
import shutil
from pathlib import Path

import pytest
from cli.broken_targets import Uneven
from cli.conftest import Spot
from toy import unchecked

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "the"}\n{"prompt": "in a", "id": "two"}\n{"prompt": "never"}\n', "utf-8")
    return path


def test_identical(spot: Spot, prompts: Path) -> None:
    words = ("verify", "--prompts", prompts, "--limit", 2, "--max-new-tokens", 6, "--drafter", "all", "--nodes", 2, "--nodes", 4)
    with unchecked():
        outcome = spot(*words, "--rule", "standard", "--rule", "threshold=0.3", "--json")
    report = json.loads(outcome.out)
    assert outcome.code == 0 and report["cases"] == report["identical"] == 2 * 2 * 2 * 3 * 2
    assert report["divergences"] == [] and report["all_identical"] is True and report["prompts"] == 2
    assert report["nfe_standard"] / report["nfe_speculative"] == report["nfe_reduction"] >= 1
    assert len(report["rows"]) == 2 * 2 * 3 * 2 and sum(r["nfe_standard"] for r in report["rows"]) == report["nfe_standard"]
    assert report["provenance"]["rule"] == ["standard", "threshold=0.3"] and report["provenance"]["threads"] == 1
    assert shlex.split(report["command"])[:4] == ["spot", "verify", "--prompts", str(prompts)] and report["provenance"]["format"] == 1
    table = spot("verify", "--prompts", prompts, "--limit", 1, "--max-new-tokens", 4, "--temperature", 0)
    assert table.code == 0 and "all identical" in table.out


@pytest.mark.parametrize(("step", "later", "kind", "code"), [(0.25, 9.0, "real", 1), (1e-5, 1e-2, "near-tie", 0), (0.0, 1e-2, "tie", 0)])
def test_broken_target(spot: Spot, prompts: Path, monkeypatch: pytest.MonkeyPatch, step: float, later: float, kind: str, code: int) -> None:
    monkeypatch.setattr("spot_dlm.cli.options.load_target", lambda *_, **__: Uneven(step, later))
    outcome = spot("verify", "--prompts", prompts, "--max-new-tokens", 12, "--temperature", 0, "--json")
    report = json.loads(outcome.out)
    assert outcome.code == code and report["cases"] == 3 and report["identical"] < 3
    first = report["divergences"][0]
    assert first["kind"] == kind and {"id", "block", "step", "standard", "speculative", "gap", "drafter", "nodes"} <= set(first)
    assert f"{kind}\n" in outcome.err and "position" in outcome.err
    assert "divergences" in spot("verify", "--prompts", prompts, "--max-new-tokens", 12, "--temperature", 0).out


@pytest.mark.parametrize(
    ("folder", "family", "sampler", "temperature"),
    [
        ("llada", None, "llada,steps=16,gen_length=16,block_length=8", 0.0),
        ("dream", None, "dream,steps=12,max_new_tokens=12,temperature=0.5", 0.5),
        ("a2d", "bd3lm", "bd3lm,steps=12,max_new_tokens=12,block_size=4", 0.0),
        ("sdar", None, "sdar,gen_length=10", 1.0),
    ],
)
def test_official_samplers(spot: Spot, tmp_path: Path, folder: str, family: str | None, sampler: str, temperature: float) -> None:
    """Both are at the sampler's own temperature; the row of the table is the one asked for."""
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt_ids": [5, 6, 7]}\n{"prompt_ids": [9]}\n', "utf-8")
    config = json.loads((GOLDEN / folder / "config.json").read_text("utf-8"))
    shutil.copytree(GOLDEN / folder, tmp_path / folder)
    (tmp_path / folder / "config.json").write_text(json.dumps(config | {"mask_token_id": 318}), "utf-8")
    where = ("--model", tmp_path / folder, *(("--family", family) if family else ()))
    with unchecked():
        outcome = spot("verify", *where, "--sampler", sampler, "--prompts", path, "--drafter", "chain", "--nodes", 4, "--json")
        report = json.loads(outcome.out)
        made = json.loads(spot("generate", *where, "--sampler", sampler, "--prompts", path, "--drafter", "root", "--json").out)
    assert outcome.code == 0 and report["cases"] == report["identical"] == 2 and report["nfe_standard"] == made["counts"]["nfe"]
    facts = report["provenance"]
    assert (facts["sampler"], facts["temperature"], facts["family"]) == (sampler, [temperature], family or folder)
    assert made["settings"]["temperature"] == temperature and [made["settings"]["rule"]] == facts["rule"]


def test_packaged_prompts_and_demo(spot: Spot) -> None:
    words = ("verify", "--model", "shipped", "--task", "json", "--limit", 1, "--max-new-tokens", 16)
    with unchecked():
        report = json.loads(spot(*words, "--json").out)
        demo = spot("demo")
    assert report["cases"] == report["identical"] == 2
    assert demo.code == 0
    assert "Identical tokens and order in 5 of 5" in demo.out and "passes plainly" in demo.out
