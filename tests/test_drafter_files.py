"""Trained drafters on disk: what was written is read; every damage is one clear ValueError."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from trace_toys import change_config, change_weights, random_model, saved_model

from spot_dlm.drafter_files import load_order_model, save_order_model


@pytest.mark.parametrize("kind", ["order", "linear"])
def test_round_trip(tmp_path: Path, kind: str) -> None:
    model = random_model(kind)
    traces = {"target": {"fingerprint": "abc"}, "settings": [{"rule": "standard"}]}
    save_order_model(tmp_path / "d", model, traces, {"steps": 3}, "spot train t")
    read = load_order_model(tmp_path / "d")
    assert read.model.config == model.config and read.target_fingerprint == "abc"
    assert read.about["training"] == {"steps": 3} and read.about["command"] == "spot train t"
    assert read.about["num_parameters"] == model.num_parameters
    ours, theirs = model.state_dict(), read.model.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)
    assert not read.model.training and not any(p.requires_grad for p in read.model.parameters())
    assert sorted(p.name for p in (tmp_path / "d").iterdir()) == ["config.json", "model.safetensors"]


def _cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _flip(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(bytes(data))


DAMAGES = {
    "truncated": (_cut, "not the file that config.json describes"),
    "a flipped byte": (_flip, "not the file that config.json describes"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "missing or not the file"),
    "no config": (lambda f: (f / "config.json").unlink(), "no config.json: the training is unfinished"),
    "half a config": (lambda f: (f / "config.json").write_text('{"format": ', "utf-8"), "damaged or no spot-drafter"),
    "another format": (lambda f: change_config(f, format="spot-graph/1"), "format is 'spot-graph/1'"),
    "other features": (lambda f: change_config(f, features_version=0), "features version 0"),
    "no architecture": (lambda f: change_config(f, architecture=None), "weights do not fit config.json"),
    "another size": (lambda f: change_config(f, architecture={"kind": "order"}), "weights do not fit config.json"),
    "NaN": (lambda f: change_weights(f, lambda t: t["linear.pair"].fill_(float("nan"))), "not finite"),
    "infinity": (lambda f: change_weights(f, lambda t: t["linear.pair"].fill_(float("inf"))), "not finite"),
    "a tensor too few": (lambda f: change_weights(f, lambda t: t.pop("linear.pair")), "weights do not fit config.json"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damages(tmp_path: Path, damage: str) -> None:
    folder = saved_model(tmp_path / "d", random_model("order"))
    act, message = DAMAGES[damage]
    act(folder)
    with pytest.raises(ValueError, match=message) as error:
        load_order_model(folder)
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such folder; train one with 'spot train'"):
        load_order_model(tmp_path / "nowhere")
