"""`spot tune`: measures once, keeps it, shows it."""

import json
import sys
from pathlib import Path

import pytest
from tiny_checkpoints import write_sdar
from toy import unchecked

from spot_dlm import tune
from spot_dlm.budget import CostProfile
from spot_dlm.cli import main


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(["tune", *arguments])
    out = capsys.readouterr()
    return int(stop.value.code or 0), out.out, out.err


def test_measures_once_keeps_it_and_shows_the_curve(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SPOT_CACHE", str(tmp_path))
    monkeypatch.setattr(tune, "_REPEATS", 1)
    monkeypatch.setattr(tune, "_ROUNDS", 1)
    monkeypatch.setattr(tune, "PREFIXES", (16, 64))
    monkeypatch.setattr(tune, "ROWS", (1, 2, 4))
    monkeypatch.setattr(tune, "TRIED_NODES", (1, 4))
    code, out, _ = run(capsys, "--drafter", "chain", "--json")
    document = json.loads(out)
    assert code == 0 and Path(document["file"]).is_file()
    profile = CostProfile.from_dict(document["profile"])
    assert profile.rows == (1, 2, 4) and profile.prefixes == (16, 64) and profile.cost(4, 16) >= profile.cost(1, 16) > 0
    assert all(b["speedup"] >= 1 and b["nodes"] >= 1 for b in document["budgets"])

    def never(*_: object, **__: object) -> None:
        raise AssertionError("measured a second time")

    monkeypatch.setattr(sys.modules["spot_dlm.cli.tune"], "measure", never)
    code, out, _ = run(capsys, "--drafter", "chain")
    assert code == 0 and "prefix 16" in out and document["file"] in out.replace("\n", "")
    Path(document["file"]).write_text("{")  # damaged: said, and measured again
    code, _, err = run(capsys, "--drafter", "chain")
    assert code == 2 and "measured again" in err


def test_bad_values_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "--drafter", "nothing")
    assert (code, out) == (2, "") and "nothing" in err and err.count("\n") == 1


def small(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setenv("SPOT_CACHE", str(cache))
    for name, value in {"_REPEATS": 1, "_ROUNDS": 1, "PREFIXES": (16,), "ROWS": (1, 2, 4), "TRIED_NODES": (1, 4)}.items():
        monkeypatch.setattr(tune, name, value)


def test_figure_refresh_and_a_model_without_tokenizer(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_sdar(tmp_path, max_position_embeddings=512)
    small(monkeypatch, tmp_path / "cache")
    words = ("--model", str(tmp_path), "--threads", "1", "--temperature", "1", "--top-k", "5")
    with unchecked():
        code, out, err = run(capsys, *words, "--plot", str(tmp_path / "cost.png"))
        assert code == 0 and not err and (tmp_path / "cost.png").read_bytes().startswith(b"\x89PNG")
        assert "drafts of order" in out and "blocks of 4" in out and "kept in" in out
        first, again, refreshed = (json.loads(run(capsys, *words, *more, "--json")[1]) for more in ((), (), ("--refresh",)))
    assert first["profile"] == again["profile"] and not again["measured"] and refreshed["measured"]
    assert refreshed["file"] == first["file"] and refreshed["key"]["filtered"] is True
    assert [d["nodes"] for d in first["drafts"]] == [4] and all(d["steps_per_pass"] >= 1 for d in first["drafts"])


def test_what_cannot_be_kept_is_shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    small(monkeypatch, tmp_path / "cache")
    with unchecked():
        code, out, err = run(capsys, "--drafter", "chain")
    assert code == 0 and "not kept" in out and "cannot be kept" in err and err.count("\n") <= 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--plot", "/nowhere/cost.png"), "/nowhere/cost.png: cannot be written"),
        (("--block-length", "0"), "block_length=0"),
        (("--threads", "0"), "--threads 0"),
        (("--rule", "fast"), "fast"),
        (("--device", "abacus"), "--device abacus cannot be used"),
        (("--model", "/nowhere"), "/nowhere"),
    ],
)
def test_refusals(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str) -> None:
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "") and message in err and err.count("\n") == 1
