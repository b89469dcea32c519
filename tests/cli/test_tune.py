"""`spot tune`: measures once, keeps it, shows it."""

import json
import sys
from pathlib import Path

import pytest

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
