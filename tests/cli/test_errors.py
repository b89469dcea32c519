"""Bad input gives one line on stderr and exit code 2; help and version."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from cli.broken_targets import Uneven
from cli.conftest import Spot
from tiny_checkpoints import VOCAB, write_sdar, write_tokenizer

from spot_dlm import __version__
from spot_dlm.interfaces import DecodeParams


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["generate", "a", "--nodes", "0"], "--nodes 0 must be 'auto' or a whole number from 1"),
        (["generate", "a", "--nodes", "many"], "--nodes many must be 'auto'"),
        (["generate", "a", "--nodes", "-1"], "--nodes -1 must be 'auto'"),
        (["generate", "a", "--nodes", "2.5"], "--nodes 2.5 must be 'auto'"),
        (["generate", "a", "--batch", "0"], "--batch 0 must be 'auto' or a whole number from 1"),
        (["generate", "a", "--batch", "all"], "--batch all must be 'auto'"),
        (["generate", "a", "--batch", "-2"], "--batch -2 must be 'auto'"),
        (["generate", "a", "--batch", "1e1"], "--batch 1e1 must be 'auto'"),
        (["generate", "a", "--batch", "4", "--watch"], "--watch shows one decode at a time; leave out --batch 4"),
        (["generate", "a", "--temperature", "-1"], "temperature=-1"),
        (["generate", "a", "--temperature", "warm"], "--temperature"),
        (["generate", "a", "--top-p", "0"], "top_p=0"),
        (["generate", "a", "--top-k", "-1"], "top_k=-1"),
        (["generate", "a", "--max-new-tokens", "0"], "max_new_tokens=0"),
        (["generate", "a", "--block-length", "0"], "block_length=0"),
        (["generate", "a", "--stop", "later"], "block, prefix, never"),
        (["generate", "a", "--drafter", "magic"], "root, chain"),
        (["generate", "a", "--rule", "fast"], "allowed"),
        (["generate", "a", "-n", "0"], "-n 0"),
        (["generate", "a", "--strict", "0"], "--strict 0"),
        (["generate", "a", "--strict", "4", "--nodes", "8"], "--strict 4 is below --nodes 8: larger passes would not have the same shape"),
        (["verify", "--limit", "1", "--strict", "4", "--nodes", "2", "--nodes", "16"], "--strict 4 is below --nodes 16"),
        (["generate", "a", "--strict", "4"], "--strict 4 needs a --nodes of so many rows or fewer, not auto"),
        (["generate", "a", "--device", "toaster"], "--device toaster"),
        (["generate", "a", "--dtype", "int3"], "float32"),
        (["generate", "a", "--overwrite"], "--out"),
        (["generate", "a", "--prompts", "p.jsonl"], "not both"),
        (["generate", "--prompts", "nowhere.jsonl"], "nowhere.jsonl: No such file"),
        (["generate", "a", "--out", "/nowhere/x"], "/nowhere/x: No such file"),
        (["generate", ""], "empty"),
        (["generate", " "], "empty"),
        (["generate", "a " * 600], "context holds 512"),
        (["generate", "a", "--model", "no such model"], "neither a folder"),
        (["generate", "a", "--speed"], "--speed"),
        (["generate", "a", "b"], "b"),
        (["verify", "--limit", "0"], "--limit 0"),
        (["verify", "--task", "poetry"], "json"),
        (["verify", "--nodes", "0"], "--nodes 0 must be"),
        (["verify", "--nodes", "4", "--nodes", "few"], "--nodes few must be"),
        (["verify", "--batch", "0"], "--batch 0 must be at least 1"),
        (["verify", "--batch", "auto"], "--batch"),
        (["verify", "--sampler", "magic"], "sampler='magic' is unknown; choose one of llada"),
        (["verify", "--sampler", "llada,steps"], "'steps' must be argument=value"),
        (["verify", "--sampler", "llada", "--rule", "ltr"], "--sampler says what --rule ltr would: give one of them"),
        (["verify", "--sampler", "llada", "--rule", "standard"], "--sampler says what --rule standard would: give one of them"),
        (["verify", "--sampler", "llada", "--temperature", "0"], "--sampler says what --temperature 0.0 would: give one of them"),
        (["verify", "--sampler", "llada", "--block-length", "8"], "--sampler says what --block-length 8 would: give one of them"),
        (["verify", "--sampler", "llada", "--stop", "never"], "--sampler says what --stop never would: give one of them"),
        (["generate", "a", "--sampler", "llada", "--rule", "ltr"], "--sampler says what --rule ltr would: give one of them"),
        (["generate", "a", "--sampler", "llada,temperature=1", "--temperature", "0.5"], "--sampler says what --temperature 0.5 would"),
        (["generate", "a", "--family", "mdlm"], "family='mdlm' is unknown; choose one of llada, "),
        (["verify", "--family", "mdlm"], "family='mdlm' is unknown; choose one of llada, "),
        (["info", "--family", "mdlm"], "family='mdlm' is unknown; choose one of llada, "),
        (["tune", "--family", "mdlm"], "family='mdlm' is unknown; choose one of llada, "),
        (["trace", "--task", "json", "--out", "x", "--family", "mdlm"], "family='mdlm' is unknown; choose one of llada, "),
        (["doctor", "shipped", "--family", "mdlm"], "family='mdlm' is unknown; choose one of llada, "),
        (["demo", "--nodes", "none"], "--nodes none must be"),
        (["verify", "--drafter", "magic"], "root, chain"),
        (["verify", "--task", "json", "--prompts", "p.jsonl"], "not both"),
        (["info", "--threads", "0"], "--threads 0"),
        (["demo", "--number", "0"], "--number 0"),
        (["sing"], "sing"),
    ],
)
def test_one_line_and_exit_code_2(spot: Spot, words: list[str], message: str) -> None:
    outcome = spot(*words)
    assert outcome.code == 2 and not outcome.out
    assert message in outcome.err and outcome.err.startswith("spot: ") and outcome.err.count("\n") == 1


def test_damaged_checkpoints(spot: Spot, tmp_path: Path, checkpoint: Path) -> None:
    cases: dict[str, tuple[Path, str]] = {}
    for name in ("empty", "no-weights", "shapes", "half"):
        cases[name] = (tmp_path / name, "")
    cases["empty"][0].mkdir()
    shutil.copytree(checkpoint, tmp_path / "no-weights", ignore=shutil.ignore_patterns("*.safetensors"))
    shutil.copytree(checkpoint, tmp_path / "half")
    weights = tmp_path / "half" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    shutil.copytree(checkpoint, tmp_path / "shapes")
    config = json.loads((checkpoint / "config.json").read_text("utf-8"))
    (tmp_path / "shapes" / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}), "utf-8")
    for name, (folder, _) in cases.items():
        outcome = spot("generate", "a", "--model", folder)
        assert outcome.code == 2 and outcome.err.count("\n") == 1 and name in outcome.err and "Traceback" not in outcome.err


def test_without_tokenizer_ids_still_work(spot: Spot, tmp_path: Path) -> None:
    write_sdar(tmp_path / "bare")
    refused = spot("generate", "a", "--model", tmp_path / "bare")
    assert refused.code == 2 and "no tokenizer" in refused.err
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt_ids": [1, 2, 3]}\n', "utf-8")
    done = spot("generate", "--prompts", prompts, "--model", tmp_path / "bare", "--max-new-tokens", 4)
    assert done.code == 0 and len(done.rows[0]["token_ids"]) == 4


@pytest.mark.parametrize("name", ["temperature", "max_new_tokens"])
def test_an_official_sampler_is_the_same_for_all_prompts(spot: Spot, tmp_path: Path, name: str) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text(json.dumps({"prompt": "a", "seed": 3}) + "\n" + json.dumps({"prompt": "a", name: 1}) + "\n", "utf-8")
    for command in ("generate", "verify"):
        refused = spot(command, "--prompts", prompts, "--sampler", "llada")
        assert refused.code == 2 and f":2: {name} is for --sampler to say" in refused.err and refused.err.count("\n") == 1


def test_base_models_take_bare_prompts(spot: Spot, tmp_path: Path) -> None:
    write_sdar(tmp_path / "SDAR-Base", vocab_size=VOCAB)
    write_tokenizer(tmp_path / "SDAR-Base", template=None)
    words = ("generate", "the", "--model", tmp_path / "SDAR-Base", "--max-new-tokens", 4, "--nodes", 2)
    refused = spot(*words)
    assert refused.code == 2 and "no chat template" in refused.err and "--raw" in refused.err and refused.err.count("\n") == 1
    assert spot(*words, "--raw").code == 0


def test_a_target_that_fails(spot: Spot, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch raises RuntimeError, often over several lines."""

    class Failing(Uneven):
        def evaluate(self, *_: Any) -> Any:
            raise RuntimeError("not implemented\n  for 'Half'")

    monkeypatch.setattr("spot_dlm.cli.options.load_target", lambda *_, **__: Failing(0.0))
    outcome = spot("generate", "a")
    assert outcome.code == 2 and outcome.err == "spot: the prompt: not implemented for 'Half'\n"


def test_debug_shows_the_traceback(spot: Spot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPOT_DEBUG", "1")
    with pytest.raises(ValueError, match="--nodes 0"):
        spot("generate", "a", "--nodes", 0)


def test_help_and_version(spot: Spot) -> None:
    assert spot("--version").out == f"spot-dlm {__version__}\n"
    assert "generate" in spot().out
    for command in ("generate", "verify", "info", "demo", "trace", "train", "calibrate", "analyze"):
        text = spot(command, "--help").out
        options = set(re.findall(r"--[a-z-]+", text.split("Options:")[1]))
        examples = re.findall(rf"spot {command} ?[^&\n]*", text.split("Examples:")[1].split("Options:")[0])
        assert examples and set(re.findall(r"--[a-z-]+", " ".join(examples))) <= options, command


@pytest.mark.parametrize(("command", "size"), [("generate", "16"), ("verify", "1")])
def test_help_says_what_auto_and_batch_mean(spot: Spot, command: str, size: str) -> None:
    words = " ".join(spot(command, "--help").out.split())
    nodes = re.search(r"--nodes N\|auto (.*?) --", words)
    assert nodes and "1 = standard decoding; auto = as many as pay" in nodes[1] and "[default: auto]" in nodes[1]
    assert f"[default: {size if command == 'verify' else 'auto'}]" in words.split("--batch")[-1] and f"{size}" in words.split("--batch")[-1]


def test_info(spot: Spot, tmp_path: Path) -> None:
    ids = write_tokenizer(tmp_path)
    write_sdar(tmp_path, max_position_embeddings=512, vocab_size=VOCAB, mask_token_id=ids["<|MASK|>"])
    facts = json.loads(spot("info", "--model", tmp_path, "--json").out)
    assert facts["family"] == "sdar" and facts["rows_independent"] is True and facts["context"] == 512
    assert facts["mask_token"] == {str(ids["<|MASK|>"]): "'<|MASK|>'"}
    assert facts["sizes"]["layers"] == 2 and facts["default"]["nodes"] == DecodeParams().nodes
    assert facts["preset"] == {
        "family": "sdar",
        "sampler": "sdar",
        "arguments": {"gen_length": 128, "block_length": 4, "denoising_steps": 4, "temperature": 1.0, "top_k": 0, "top_p": 1.0,
                      "remasking_strategy": "low_confidence_dynamic", "confidence_threshold": 0.85},
        "block_length": 4,
        "stop_ids": [316],
        "mask_token_id": ids["<|MASK|>"],
    }  # fmt: skip
    table = spot("info").out
    assert "sampler sdar" in " ".join(table.split()) and "stop_ids 316" in " ".join(table.split())
    assert "rows independent" in table and "yes" in table
