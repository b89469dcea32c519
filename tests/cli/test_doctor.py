"""`spot doctor`: what a checkpoint is and what is wrong with it, said from config.json, headers and tokenizer files alone."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_checkpoints import MASK, VOCAB, write_sdar, write_tokenizer

from spot_dlm.targets import load_target
from spot_dlm.targets.doctor import diagnose, read_header

GOLDEN = Path(__file__).parents[1] / "golden"
NO_TOKENIZER = "no tokenizer"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_sdar(tmp_path / "model", num_hidden_layers=1)
    write_tokenizer(tmp_path / "model")
    return tmp_path / "model"


def change_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps(config | changes), "utf-8")


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def told(spot, folder: Path, code: int = 1, *more: str) -> dict:
    outcome = spot("doctor", folder, "--json", *more)
    assert outcome.code == code, outcome
    assert not outcome.err and len(outcome.rows) == 1
    return outcome.rows[0]


def only_problem(spot, folder: Path, *texts: str) -> dict:
    """Check that doctor has one problem with every text, and that loading agrees."""
    document = told(spot, folder)
    assert len(document["problems"]) == 1, document["problems"]
    for text in texts:
        assert text in document["problems"][0], document["problems"]
    with pytest.raises(ValueError):
        load_target(str(folder), device="cpu")
    return document


def test_a_checkpoint_without_problems_is_told_as_it_loads(spot, folder: Path) -> None:
    document = told(spot, folder, 0)
    spec = load_target(str(folder), device="cpu").spec
    assert document["problems"] == document["missing"] == document["unexpected"] == document["mismatched"] == []
    assert (document["family"], document["host"], document["recognised"]) == (
        "sdar",
        "Qwen3ForCausalLM",
        "by architecture SDARForCausalLM",
    )
    assert (document["attention"], document["shift"], document["blocks"]) == ("block_causal", "none", "grid")
    assert (document["block_length"], document["block_length_from"]) == (spec.block_length, "config.json (block_size)")
    assert (document["parameters"], document["vocabulary"], document["max_length"]) == (
        spec.num_parameters,
        spec.vocab_size,
        spec.max_length,
    )
    assert document["stored"] == {"F32": spec.num_parameters} and document["memory"]["bfloat16"] == 2 * spec.num_parameters
    assert document["ids"]["mask"] == {"ids": [MASK], "texts": [""], "from": "config.json"}
    assert set(document["ids"]["end"]["ids"]) == spec.stop_ids and document["ids"]["end"]["from"] == "config.json"
    assert document["ids"]["padding"] == {"ids": [260], "texts": ["<|endoftext|>"], "from": "tokenizer (<|endoftext|>)"}
    assert (document["tokenizer"], document["chat_template"]) == ("tokenizer.json", "tokenizer_config.json")


def test_the_table(spot, folder: Path) -> None:
    outcome = spot("doctor", folder)
    assert outcome.code == 0 and not outcome.err
    for text in ("sdar, by architecture", "Qwen3ForCausalLM", "4 from config.json", "stored as F32", "float16", f"{MASK} from config.json"):
        assert text in outcome.out
    assert "no problems: loads and decodes" in outcome.out
    change_weights(folder, lambda w: w.pop("model.norm.weight"))
    outcome = spot("doctor", folder)
    assert outcome.code == 1 and "problem: 1 missing keys in the weights, first model.norm.weight\n" in outcome.out


def test_shipped_and_no_weight_is_read(spot, monkeypatch: pytest.MonkeyPatch) -> None:
    import safetensors

    def never(*_: object, **__: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(safetensors, "safe_open", never)
    monkeypatch.setattr(torch, "load", never)
    assert told(spot, Path("shipped"), 0)["family"] == "sdar"


@pytest.mark.parametrize("name", ["a2d", "dream", "fastdllm_v2", "llada", "llada2", "llada_moe", "sdar"])
def test_tensors_of_every_family_are_those_of_its_native_class(name: str) -> None:
    found = diagnose(str(GOLDEN / name))
    assert found.family and not (found.missing or found.unexpected or found.mismatched)
    assert not [p for p in found.problems if NO_TOKENIZER not in p and "mask" not in p and "end token" not in p]
    target = load_target(str(GOLDEN / name), device="cpu", mask_token_id=318, stop_ids=[317])
    tensors, _ = read_header(GOLDEN / name / "model.safetensors")
    buffers = sum(t.shape[0] for n, t in tensors.items() if n.endswith("expert_bias"))
    assert (found.parameters, found.max_length) == (target.spec.num_parameters + buffers, target.spec.max_length)
    assert (found.block_length, found.blocks) == (target.spec.block_length, target.spec.blocks)


def test_missing_extra_and_reshaped_tensors(spot, folder: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    change_weights(folder, lambda w: w.pop(name))
    assert only_problem(spot, folder, "1 missing keys", name)["missing"] == [name]
    change_weights(folder, lambda w: w.update({name: torch.zeros(64, 64), "model.layers.7.extra": torch.zeros(3)}))
    assert only_problem(spot, folder, "1 unexpected keys", "model.layers.7.extra")["unexpected"] == ["model.layers.7.extra"]
    change_weights(folder, lambda w: (w.pop("model.layers.7.extra"), w.update({name: torch.zeros(32, 64)})))
    assert only_problem(spot, folder, "1 mismatched keys", name)["mismatched"] == [f"{name} [32, 64] instead of [64, 64]"]


@pytest.mark.parametrize("name", ["llada_moe", "llada2"])
def test_a_missing_expert_is_named(tmp_path: Path, name: str) -> None:
    shutil.copytree(GOLDEN / name, tmp_path / "model")
    expert = "model.layers.1.mlp.experts.3.up_proj.weight"
    change_weights(tmp_path / "model", lambda w: w.pop(expert))
    found = diagnose(str(tmp_path / "model"))
    assert found.missing == [expert] and not found.mismatched and any(expert in p for p in found.problems)


def test_truncated_and_damaged_files(spot, folder: Path) -> None:
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1000])
    document = only_problem(spot, folder, "model.safetensors is truncated", str(len(whole)))
    assert document["parameters"] and not document["missing"]  # the header is whole
    for content, text in (
        (whole[:100], "truncated"),
        (b"", "truncated"),
        (whole + b"more", "damaged"),
        (struct.pack("<Q", 2) + b"[]", "damaged"),
        (struct.pack("<Q", 3) + b"\xff{}", "damaged"),
        (struct.pack("<Q", 8) + b'{"a": 1}', "damaged"),
    ):
        file.write_bytes(content)
        only_problem(spot, folder, text)


def test_wrong_vocabulary(spot, folder: Path) -> None:
    change_config(folder, vocab_size=VOCAB + 10)
    assert len(only_problem(spot, folder, "2 mismatched keys", f"vocab_size={VOCAB + 10}", f"the file has {VOCAB}")["mismatched"]) == 2
    change_config(folder, vocab_size=VOCAB, mask_token_id=VOCAB + 5)
    only_problem(spot, folder, f"mask_token_id {VOCAB + 5} lies outside the vocabulary of {VOCAB} (config.json)")
    change_config(folder, mask_token_id=MASK, eos_token_id=[1, -1])
    only_problem(spot, folder, "end token -1 lies outside")


def test_ids_and_their_origins(spot, folder: Path) -> None:
    change_config(folder, mask_token_id=None, block_size=None, pad_token_id=7)
    (folder / "generation_config.json").write_text('{"eos_token_id": [262, 260]}')
    document = told(spot, folder, 0)
    assert document["ids"]["mask"] == {"ids": [263], "texts": ["<|MASK|>"], "from": "tokenizer (<|MASK|>)"}
    assert document["ids"]["end"]["ids"] == [260, 262] and document["ids"]["end"]["from"] == "generation_config.json"
    assert (document["ids"]["padding"]["ids"], document["ids"]["padding"]["from"]) == ([7], "config.json")
    assert document["block_length_from"] == "default of sdar"
    (folder / "generation_config.json").write_text("{")
    only_problem(spot, folder, "generation_config.json cannot be read")


def test_families_that_are_not_decoded(spot, folder: Path, tmp_path: Path) -> None:
    change_config(folder, architectures=["Qwen3ForCausalLM"])
    document = only_problem(spot, folder, "Qwen3ForCausalLM is an autoregressive checkpoint")
    assert document["family"] is None and document["parameters"] and document["tokenizer"]
    assert "not one that is supported" in spot("doctor", folder).out
    change_config(folder, architectures=["WeDLMForCausalLM"])
    only_problem(spot, folder, "this is WeDLM", "causal cache")
    assert told(spot, folder, 0, "--family", "sdar")["recognised"] == "by --family"
    shutil.copytree(folder, tmp_path / "open-dcoder")
    change_config(tmp_path / "open-dcoder", architectures=["Qwen2ForCausalLM"])
    assert "a name that has 'open-?dcoder' in it" in told(spot, tmp_path / "open-dcoder")["recognised"]


def test_no_tokenizer_and_no_safetensors(spot, folder: Path) -> None:
    (folder / "tokenizer.json").rename(folder / "aside")
    assert [NO_TOKENIZER in p for p in told(spot, folder)["problems"]] == [True]
    (folder / "aside").rename(folder / "tokenizer.json")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    document = only_problem(spot, folder, "no safetensors", "never read")
    assert document["parameters"] is None and document["max_length"] == 4096 and not document["missing"]


def test_what_the_host_cannot_do(spot, folder: Path) -> None:
    change_config(folder, hidden_act="gelu")
    only_problem(spot, folder, "hidden_act='gelu'")
    change_config(folder, hidden_act="silu", layer_types=["sliding_attention"], sliding_window=8, use_sliding_window=True)
    only_problem(spot, folder, "sliding-window")


def shard(folder: Path) -> None:
    """Split model.safetensors in two files and an index."""
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    names = sorted(weights)
    files = {f"model-0000{i}-of-00002.safetensors": names[i - 1 :: 2] for i in (1, 2)}
    for file, part in files.items():
        save_file({n: weights[n] for n in part}, folder / file, metadata={"format": "pt"})
    index = {
        "metadata": {"total_size": 4 * sum(w.numel() for w in weights.values())},
        "weight_map": {n: f for f, p in files.items() for n in p},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()


def test_shards(spot, folder: Path) -> None:
    whole = told(spot, folder, 0)
    shard(folder)
    assert told(spot, folder, 0) == whole
    (folder / "model-00002-of-00002.safetensors").unlink()
    document = only_problem(spot, folder, "model-00002-of-00002.safetensors cannot be read")
    assert document["parameters"] == whole["parameters"]  # by the index
    for index in ("{", "{}", '{"weight_map": {"a": "../b"}}', '{"weight_map": {"a": 1}, "metadata": 1}'):
        (folder / "model.safetensors.index.json").write_text(index)
        assert "model.safetensors.index.json" in told(spot, folder)["problems"][0]


def test_foreign_number_formats(spot, folder: Path) -> None:
    change_weights(folder, lambda w: w.update({"lm_head.weight": w["lm_head.weight"].to(torch.float8_e4m3fn)}))
    assert "1 tensors are stored as F8_E4M3" in told(spot, folder)["problems"][0]


def test_a_hub_id_fetches_headers_only(spot, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    tensors, _ = read_header(folder / "model.safetensors")
    here = told(spot, folder, 0)
    cache = tmp_path / "cache"
    shutil.copytree(folder, cache, ignore=shutil.ignore_patterns("*.safetensors"))

    def snapshot(model: str, allow_patterns: list[str]) -> str:
        assert model == "owner/name" and not any("safetensors" in p for p in allow_patterns)
        return str(cache)

    def headers(model: str) -> SimpleNamespace:
        assert model == "owner/name"
        return SimpleNamespace(files_metadata={"model.safetensors": SimpleNamespace(tensors=tensors)})

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    monkeypatch.setattr(huggingface_hub, "get_safetensors_metadata", headers)
    document = told(spot, Path("owner/name"), 0)
    assert {k: v for k, v in document.items() if k not in ("model", "folder")} == {
        k: v for k, v in here.items() if k not in ("model", "folder")
    }

    def fails(_: str) -> None:
        raise OSError("no route\nto the hub")

    monkeypatch.setattr(huggingface_hub, "get_safetensors_metadata", fails)
    assert told(spot, Path("owner/name"))["problems"] == ["the headers of the weights cannot be fetched: no route"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "MODEL"),
        (("/nowhere",), "neither a folder nor a hub id"),
        (("{empty}",), "no config.json"),
        (("{broken}",), "config.json cannot be read"),
        (("shipped", "--family", "nothing"), "family='nothing' is unknown"),
    ],
)
def test_bad_arguments_are_one_line(spot, tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    empty, broken = tmp_path / "empty", tmp_path / "broken"
    empty.mkdir()
    broken.mkdir()
    (broken / "config.json").write_text("{")
    outcome = spot("doctor", *(w.format(empty=empty, broken=broken) for w in words))
    assert (outcome.code, outcome.out) == (2, "") and message in outcome.err and outcome.err.count("\n") == 1
