"""Drafter folders: the fields of speculators, calibrated graphs, every damage one line, what differs is named, cards without inventions."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from trace_toys import change_config, change_weights, random_model, saved_model

import spot_dlm as spot
from spot_dlm.artifacts import file_hash
from spot_dlm.card import read_results
from spot_dlm.cli import main
from spot_dlm.drafter_files import load_fitted, load_graphs, read_config, save_fitted, save_graphs
from spot_dlm.drafters import DRAFTERS
from spot_dlm.drafters.registry import SHIPPED_GRAPH, SHIPPED_MODELS
from spot_dlm.hub import find_drafter
from spot_dlm.rank_graph import read_graphs
from spot_dlm.rules import parse_rule


@pytest.fixture(scope="module")
def target():
    return spot.load_target()


@pytest.fixture(scope="module")
def graphs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("graphs") / "g"
    save_graphs(folder, read_graphs(SHIPPED_GRAPH))
    return folder


@pytest.mark.parametrize("folder", SHIPPED_MODELS, ids=lambda f: f.name)
def test_fields_of_speculators(folder: Path, target) -> None:
    about = json.loads((folder / "config.json").read_text("utf-8"))
    assert about["speculators_model_type"] == f"spot_{folder.name}" and about["speculators_version"]
    inner = about["speculators_config"]
    assert inner["default_proposal_method"] in [m["proposal_type"] for m in inner["proposal_methods"]] and inner["algorithm"] == "spot"
    assert inner["verifier"] == {"name_or_path": "shipped", "architectures": ["SDARForCausalLM"]}
    spec = target.spec
    expected = {"target": spec.fingerprint, "model": spec.model_hash, "tokenizer": spec.tokenizer_hash}
    assert {k: about["hashes"][k] for k in expected} == expected and about["hashes"]["preset"]


def test_first_format_reads_and_is_written_anew(tmp_path: Path) -> None:
    folder = saved_model(tmp_path / "d", random_model("linear"))
    about = json.loads((folder / "config.json").read_text("utf-8"))
    old = {k: v for k, v in about.items() if not k.startswith("speculators") and k not in ("hashes", "kind", "architectures", "model_type")}
    (folder / "config.json").write_text(json.dumps(old | {"format": "spot-drafter/1"}), "utf-8")
    save_fitted(tmp_path / "new", load_fitted(folder))
    new = json.loads((tmp_path / "new" / "config.json").read_text("utf-8"))
    assert new == about and file_hash(tmp_path / "new" / "model.safetensors") == about["weights_sha256"]


def test_graphs_come_back(graphs: Path, target) -> None:
    table, read = read_graphs(SHIPPED_GRAPH), load_graphs(graphs)
    assert read.graphs == table.graphs and read.about["target"] == table.about["target"]
    for name in ("calibrated", "auto"):
        assert spot.build_drafter(name, file=graphs, spec=target.spec).name == "calibrated"
    assert spot.build_drafter("calibrated", graph=graphs).graphs.graphs == table.graphs


def test_auto_is_the_shipped_drafter_on_any_target_and_order_asks(target) -> None:
    other = replace(target.spec, name="other", fingerprint="0" * 16, model_hash="", tokenizer_hash="")
    assert spot.build_drafter("auto", spec=other).name == "order"
    with pytest.raises(ValueError, match="give --transfer"):
        spot.build_drafter("order", spec=other)


def _cut(folder: Path) -> None:
    """A truncated file that config.json was made to describe."""
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    change_config(folder, weights_sha256=file_hash(path))


DAMAGES = {
    "truncated": (_cut, "damaged"),
    "newer": (lambda f: change_config(f, format="spot-drafter/7"), "format spot-drafter/7, of a newer spot-dlm"),
    "another model": (
        lambda f: change_config(f, format=None, speculators_model_type="dflash"),
        "is a model of type 'dflash', not a drafter",
    ),
    "unknown kind": (lambda f: change_config(f, kind="eagle"), "kind 'eagle' in config.json is unknown"),
    "other settings": (lambda f: change_config(f, trace_settings=[{"rule": "ltr"}]), "config.json was changed by hand"),
}
OF_MODELS = {
    "missing tensor": (lambda f: change_weights(f, lambda t: t.pop("linear.pair")), "Missing key.*linear.pair"),
    "extra tensor": (lambda f: change_weights(f, lambda t: t.update(more=torch.zeros(2))), "Unexpected key.*more"),
    "NaN": (lambda f: change_weights(f, lambda t: t["linear.pair"].fill_(float("nan"))), "linear.pair holds numbers that are not finite"),
}
OF_GRAPHS = {
    "missing tensor": (lambda f: change_weights(f, lambda t: t.pop("0.counts")), "lacks 0.counts"),
    "extra tensor": (lambda f: change_weights(f, lambda t: t.update(more=torch.zeros(2))), "has too much: more"),
    "impossible node": (lambda f: change_weights(f, lambda t: t["0.pairs"].fill_(9)), "graph 0: node 0"),
    "no lengths": (lambda f: change_weights(f, lambda t: t["0.lengths"].zero_()), "graph 0"),
}


@pytest.mark.parametrize("damage", [*DAMAGES, *OF_MODELS])
def test_damaged_models(tmp_path: Path, damage: str) -> None:
    _damaged(saved_model(tmp_path / "d", random_model("linear")), *(DAMAGES | OF_MODELS)[damage])


@pytest.mark.parametrize("damage", [*DAMAGES, *OF_GRAPHS])
def test_damaged_graphs(tmp_path: Path, graphs: Path, damage: str) -> None:
    save_graphs(tmp_path / "d", load_graphs(graphs))
    _damaged(tmp_path / "d", *(DAMAGES | OF_GRAPHS)[damage])


def _damaged(folder: Path, act, message: str) -> None:
    load_fitted(folder)
    act(folder)
    with pytest.raises(ValueError, match=message) as error:
        load_fitted(folder)
    assert "\n" not in str(error.value) and str(folder) in str(error.value)


def test_says_which_differs(target) -> None:
    spec, params = target.spec, spot.DecodeParams(rule=parse_rule("threshold=0.9"))
    file = SHIPPED_MODELS[0]
    changes = {
        "target": {"spec": replace(spec, fingerprint="feed", model_hash="cafe", name="mine")},
        "tokenizer": {"spec": replace(spec, fingerprint="feed", tokenizer_hash="beef")},
        "preset": {"spec": spec, "params": params},
    }
    values = {
        "target": (spec.fingerprint, "feed (mine)"),
        "tokenizer": (spec.tokenizer_hash, "beef"),
        "preset": ("standard | bfloat16", "threshold=0.9"),
    }
    for what, given in changes.items():
        with pytest.raises(ValueError, match="give --transfer") as error:
            spot.build_drafter("order", file=file, **given)
        said = str(error.value)
        assert [other for other in changes if f"{other} " in said.partition(";")[0]] == [what] and said.count("it was fitted") == 1
        assert all(value in said for value in values[what])
        assert spot.build_drafter("order", file=file, transfer=True, **given).name == "order"
    assert spot.build_drafter("order", file=file, spec=spec, params=spot.DecodeParams()).name in DRAFTERS


def test_commands_name_the_preset(capsys) -> None:
    words = ("generate", "Add 1 and 2.", "--max-new-tokens", "3", "--rule", "threshold=0.9", "--drafter-file", str(SHIPPED_MODELS[1]))
    code, said, error = _run(capsys, *words)
    assert code == 2 and not said and "preset standard | bfloat16, this one is threshold=0.9" in error and error.count("\n") == 1
    assert _run(capsys, *words, "--transfer")[0] == 0


RESULTS = Path(__file__).parents[2] / "results" / "verify-order.json"


def _run(capsys, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(list(arguments))
    return end.value.code or 0, *capsys.readouterr()


def test_save_writes_a_card_with_measured_figures_only(tmp_path: Path, capsys) -> None:
    out = tmp_path / "o"
    code, said, _ = _run(
        capsys, "drafter", "save", str(SHIPPED_MODELS[0]), "--out", str(out), "--results", str(RESULTS), "--measured", "3 | 4"
    )
    assert code == 0 and said.strip() == str(out)
    card = ModelCard.load(out / "README.md")
    assert card.data.library_name == "spot-dlm" and "spot-order" in card.data.tags and card.data.base_model is None
    row = next(r for r in json.loads(RESULTS.read_text("utf-8"))["rows"] if r["drafter"] == "order" and r["nodes"] == 8)
    assert f"| {row['nfe_reduction']:.2f} |" in card.text and "* 3 | 4" in card.text
    assert read_config(out)["weights_sha256"] in card.text
    assert spot.build_drafter("order", file=out).file.about["training"]
    code, _, error = _run(capsys, "drafter", "save", str(out), "--out", str(out))
    assert code == 2 and "not an empty folder" in error


def test_card_without_results(tmp_path: Path, capsys) -> None:
    folder = saved_model(tmp_path / "d", random_model("linear"))
    assert _run(capsys, "drafter", "save", str(folder), "--out", str(tmp_path / "o"))[0] == 0
    assert "Not measured." in (tmp_path / "o" / "README.md").read_text("utf-8")
    code, _, error = _run(capsys, "drafter", "save", str(folder), "--out", str(tmp_path / "p"), "--results", str(RESULTS))
    assert code == 2 and "was measured on target 3cacde61aa85a2de" in error and not (tmp_path / "p").exists()


def test_results_that_name_no_target_prove_nothing(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text('{"rows": [], "provenance": {}, "command": "x --drafter-file y"}', "utf-8")
    with pytest.raises(ValueError, match="was measured on target None, this drafter was fitted on None"):
        read_results(tmp_path / "r.json", {"kind": "order"})


def test_results_of_another_drafter(tmp_path: Path, capsys) -> None:
    folder = tmp_path / "d"
    save_fitted(folder, load_fitted(SHIPPED_MODELS[1]))
    change_weights(folder, lambda t: t["linear.pair"].mul_(2))
    code, _, error = _run(capsys, "drafter", "save", str(folder), "--out", str(tmp_path / "p"), "--results", str(RESULTS))
    assert code == 2 and "was measured with the shipped drafter" in error


def test_show(graphs: Path, capsys) -> None:
    code, said, _ = _run(capsys, "drafter", "show", str(graphs), "--json")
    facts = json.loads(said)
    assert code == 0 and (facts["kind"], facts["format"], facts["card"]) == ("calibrated", "spot-drafter/2", False)
    assert facts["rules"] == ["standard", "bfloat16"] and facts["hashes"]["target"] == "3cacde61aa85a2de"


WRONG_TYPES = {
    "kind": (["order"], "kind=.*must be a text"),
    "hashes": ([1], "hashes=.*must be an object"),
    "target": (3, "target=3 must be an object"),
    "training": ([1], "training=.*must be an object"),
    "trace_settings": (7, "trace_settings=7 must be a list"),
}


@pytest.mark.parametrize("field", WRONG_TYPES)
def test_wrong_types(tmp_path: Path, field: str) -> None:
    value, message = WRONG_TYPES[field]
    _damaged(saved_model(tmp_path / "d", random_model("linear")), lambda folder: change_config(folder, **{field: value}), message)


def test_odd_files(tmp_path: Path, graphs: Path, target) -> None:
    nested = tmp_path / "nested"
    nested.mkdir()
    (nested / "config.json").write_text("[" * 100_000)
    for text, message in (("[" * 100_000, "cannot be read"), ('{"format": "spot-drafter/' + "9" * 5000 + '"}', "of a newer spot-dlm")):
        (nested / "config.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            load_fitted(nested)
    with pytest.raises(ValueError, match="name of a drafter is empty"):
        find_drafter("")
    document = json.loads(SHIPPED_GRAPH.read_text("utf-8"))
    (tmp_path / "graph.json").write_text(json.dumps(document | {"target": ["x"]}))
    with pytest.raises(ValueError, match=r"target=.*must be an object"):
        spot.build_drafter("calibrated", graph=tmp_path / "graph.json", spec=target.spec)


@pytest.mark.parametrize("made", [False, True])
def test_what_stops_a_save_leaves_nothing(tmp_path: Path, made: bool, monkeypatch, capsys) -> None:
    def stopped(*args: object) -> str:
        raise KeyboardInterrupt

    source, out = saved_model(tmp_path / "d", random_model("linear")), tmp_path / "new" / "out"
    if made:
        out.mkdir(parents=True)
    monkeypatch.setattr(sys.modules["spot_dlm.cli.drafter"], "card", stopped)
    with pytest.raises(SystemExit) as ended:
        main(["drafter", "save", str(source), "--out", str(out)])
    assert ended.value.code == 130 and out.exists() == made and (not made or not list(out.iterdir()))
    monkeypatch.undo()
    with pytest.raises(SystemExit):
        main(["drafter", "save", str(source), "--out", str(out)])
    assert sorted(file.name for file in out.iterdir()) == ["README.md", "config.json", "model.safetensors"]
