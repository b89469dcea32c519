"""Drafters on a hub of our own, through the real huggingface_hub: fetched by id on commands, pushed, and every failure one line."""

from __future__ import annotations

import json
from pathlib import Path

import huggingface_hub
import pytest
from hub_server import Hub, serving
from huggingface_hub import constants
from trace_toys import random_model, saved_model

from spot_dlm.cli import main
from spot_dlm.drafters.registry import SHIPPED_MODELS
from spot_dlm.hub import FILES, find_drafter, push_drafter


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with serving() as served:
        monkeypatch.setattr(constants, "ENDPOINT", served.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", served.url + "/{repo_id}/resolve/{revision}/{filename}")
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", "hf_made_up")
        monkeypatch.chdir(tmp_path)
        served.repos["me/linear"] = {p.name: p.read_bytes() for p in SHIPPED_MODELS[1].iterdir()} | {"big.bin": b"0" * 99}
        yield served


def _run(capsys, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(list(arguments))
    return end.value.code or 0, *capsys.readouterr()


def test_commands_take_hub_ids(hub: Hub, capsys) -> None:
    code, said, _ = _run(capsys, "drafter", "show", "me/linear@v1", "--json")
    assert code == 0 and json.loads(said)["kind"] == "linear"
    assert not any("big.bin" in line for line in hub.asked)
    code, said, _ = _run(
        capsys, "generate", "Add 1 and 2.", "--drafter-file", "me/linear", "--json", "--max-new-tokens", "4", "--nodes", "2"
    )
    assert code == 0 and json.loads(said)["settings"]["drafter"] == "linear"


def test_failures_are_one_line(hub: Hub, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repos["me/model"] = {"config.json": b'{"model_type": "llama"}', "model.safetensors": b"0" * 1000}
    hub.repos["me/data"] = {"data.csv": b"1"}
    for place, message in {
        "me/nothing": "no repository me/nothing there, or it is private and you are not logged in",
        "me/linear@v9": "me/linear has no revision 'v9'",
        "me/model": "me/model: is a model of type 'llama', not a drafter",
        "me/data": "me/data: the repository has no config.json, so it is no drafter",
    }.items():
        code, said, error = _run(capsys, "drafter", "show", place)
        last = error.splitlines()[-1]  # after the bars of what was fetched
        assert code == 2 and not said and last.startswith("spot: ") and message in last, error
    assert not any("model.safetensors" in line and "me/model" in line for line in hub.asked)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="offline mode is on"):
        find_drafter("me/other")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ValueError, match="the hub cannot be reached"):
        find_drafter("me/other")


def test_paths_are_not_taken_for_ids(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    assert find_drafter("runs/mine") == Path("runs/mine") and find_drafter(tmp_path / "x") == tmp_path / "x" and not hub.asked


def test_push_and_fetch(hub: Hub, tmp_path: Path, capsys) -> None:
    saved_model(tmp_path / "d", random_model("linear"))
    (tmp_path / "d" / "checkpoint.pt").write_bytes(b"0")
    code, _, error = _run(capsys, "drafter", "push", "d", "--repo", "me/new")
    assert code == 2 and "has no README.md; 'spot drafter save d --out NEW' writes one" in error
    assert _run(capsys, "drafter", "save", "d", "--out", "out")[0] == 0
    code, said, _ = _run(capsys, "drafter", "push", "out", "--repo", "me/new", "--dry-run")
    assert code == 0 and all(name in said for name in FILES) and not hub.asked
    code, said, error = _run(capsys, "drafter", "push", "out", "--repo", "me/new", "--private")
    assert code == 0 and "/me/new/commit/" in said, error
    assert set(hub.repos["me/new"]) == set(FILES) and "me/new" in hub.private
    fetched = find_drafter("me/new")
    assert all((fetched / name).read_bytes() == (tmp_path / "out" / name).read_bytes() for name in FILES)
    with pytest.raises(ValueError, match="exists and is public"):
        push_drafter(tmp_path / "out", "me/linear", private=True)


def test_push_needs_login(hub: Hub, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    assert _run(capsys, "drafter", "save", str(SHIPPED_MODELS[1]), "--out", "out")[0] == 0
    code, _, error = _run(capsys, "drafter", "push", "out", "--repo", "me/new")
    assert code == 2 and "not logged in to the hub; run 'hf auth login' or set HF_TOKEN" in error
    code, _, error = _run(capsys, "drafter", "push", "out", "--repo", "new")
    assert code == 2 and "--repo 'new' must be owner/name" in error
