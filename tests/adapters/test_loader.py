"""Loading a checkpoint folder: every fault is one clear line; text never becomes a special id."""

import json
import unicodedata
from time import perf_counter

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from spot_dlm.state import MASKED
from spot_dlm.targets import load_target
from spot_dlm.targets.text import TextCodec
from tests.tiny_checkpoints import ADDED, CHATML, MASK, SPECIAL, VOCAB, write_sdar, write_tokenizer

UNICODE = "Zażółć gęślą jaźń — 中文 🙂👩\u200d🔬 e\u0301\tTabs\nlines  two spaces \u202eRTL\u202c"


@pytest.fixture
def folder(tmp_path):
    write_sdar(tmp_path / "model", num_hidden_layers=1)
    return tmp_path / "model"


def load(folder, **changes):
    return load_target(str(folder), device="cpu", **changes)


def refused(folder, *texts, **changes):
    """Check that loading fails with one line that holds every text."""
    with pytest.raises(ValueError) as caught:
        load(folder, **changes)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 600, message
    for text in texts:
        assert text in message, message


def change_config(folder, drop=(), **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text("utf-8")) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if k not in drop}), "utf-8")


def change_weights(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


Q = "model.layers.0.self_attn.q_proj.weight"


def test_missing_weight(folder):
    change_weights(folder, lambda w: w.pop(Q))
    refused(folder, "1 missing keys", Q)


def test_missing_head_of_an_untied_model(folder):
    change_weights(folder, lambda w: w.pop("lm_head.weight"))
    refused(folder, "1 missing keys", "lm_head.weight")


def test_unexpected_weight(folder):
    change_weights(folder, lambda w: w.update({"model.layers.0.self_attn.extra.weight": torch.zeros(3)}))
    refused(folder, "1 unexpected keys", "model.layers.0.self_attn.extra.weight")


def test_layer_too_many(folder):
    change_weights(folder, lambda w: w.update({Q.replace("layers.0", "layers.1"): w[Q].clone()}))
    refused(folder, "unexpected keys", "model.layers.1.self_attn.q_proj.weight")


def test_misshapen_weight(folder):
    change_weights(folder, lambda w: w.update({Q: torch.zeros(7, 64)}))
    refused(folder, Q)


def test_config_of_another_size(folder):
    change_config(folder, hidden_size=32)
    refused(folder, "mismatched keys", "lm_head.weight", "64", "32")


@pytest.mark.parametrize("keep", [0, 5, 300, -100])
def test_truncated_weights(folder, keep):
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:keep] if keep >= 0 else data[: len(data) + keep])
    refused(folder, "the weights do not load")


def test_corrupt_weights(folder):
    (folder / "model.safetensors").write_bytes(b"\xff" * 5000)
    refused(folder, "the weights do not load")


@pytest.mark.parametrize("text", ["", '{"architectures": ["SDARFor', "[]", "null", "\ufeff{", '"x"'])
def test_half_written_config(folder, text):
    (folder / "config.json").write_text(text, "utf-8")
    refused(folder, "config.json")


def test_config_that_is_not_text(folder):
    (folder / "config.json").write_bytes(b"\xff\xfe\x00{")
    refused(folder, "config.json cannot be read")


def test_folder_without_weights(folder):
    (folder / "model.safetensors").unlink()
    refused(folder, "no weights (*.safetensors)")


def test_folder_without_config(tmp_path):
    refused(tmp_path, "no config.json there")


@pytest.mark.parametrize("names", [["SomethingForMaskedLM"], [], None])
def test_unknown_architecture(folder, names):
    change_config(folder, architectures=names)
    refused(folder, "is not supported; supported: ", "SDARForCausalLM")


@pytest.mark.parametrize("name", ["", "no such model", "nowhere", "a/b/c", "/no/such/folder", "../x/y"])
def test_neither_folder_nor_hub_id(name):
    refused(name, "neither a folder nor a hub id")


@pytest.mark.parametrize("setting", [("HF_HUB_OFFLINE", True), ("ENDPOINT", "http://127.0.0.1:9")], ids=["offline", "dead"])
def test_hub_id_without_network_fails_fast(monkeypatch, tmp_path, setting):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, *setting)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    began = perf_counter()
    refused("nobody-here/no-such-model", "'nobody-here/no-such-model' is no folder here and could not be fetched from the hub")
    assert perf_counter() - began < 30


def test_stop_ids(folder):
    assert load(folder).spec.stop_ids == {316}
    (folder / "generation_config.json").write_text('{"eos_token_id": [317, 316]}')
    assert load(folder).spec.stop_ids == {317, 316}
    assert load(folder, stop_ids=[5]).spec.stop_ids == {5}
    assert load(folder, stop_ids=[]).spec.stop_ids == set()
    (folder / "generation_config.json").write_text('{"eos_token_id": 317}')
    assert load(folder).spec.stop_ids == {317}
    (folder / "generation_config.json").write_text('{"temperature": 1.0}')
    assert load(folder).spec.stop_ids == {316}
    (folder / "generation_config.json").write_text('{"eos_to')
    refused(folder, "generation_config.json cannot be read")


def test_block_length(folder, tmp_path):
    assert load(folder).spec.block_length == 4
    assert load(folder, block_length=16).spec.block_length == 16
    change_config(folder, block_size=8)
    assert load(folder).spec.block_length == 8
    change_config(folder, drop=["block_size"], block_length=32)
    assert load(folder).spec.block_length == 32
    change_config(folder, drop=["block_length"])
    assert load(folder).spec.block_length == 4
    named = folder.rename(tmp_path / "SDAR-1.7B-Chat-b16")
    assert load(named).spec.block_length == 16
    assert load(named, block_length=2).spec.block_length == 2


def logits(target):
    return target.evaluate(target.prefill(np.arange(4), 4), np.array([[1, MASKED, 2, MASKED]])).packed


def test_sharded_weights(folder):
    expected = logits(load(folder))
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for shard, held in shards.items():
        save_file({n: weights[n] for n in held}, folder / shard, metadata={"format": "pt"})
    where = {n: shard for shard, held in shards.items() for n in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": where}))
    assert torch.equal(logits(load(folder)), expected)
    (folder / "model-00002-of-00002.safetensors").unlink()
    refused(folder, "the weights do not load")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtype(folder, dtype):
    target = load(folder, dtype=dtype)
    assert target.spec.dtype == dtype
    found = logits(target)
    assert found.dtype == torch.float32
    kept = torch.isfinite(found)
    torch.testing.assert_close(found[kept], logits(load(folder))[kept], rtol=0, atol=0.3 if dtype == "bfloat16" else 0.05)


def test_dtype_default_and_unknown(folder):
    change_config(folder, torch_dtype="bfloat16")
    assert load(folder).spec.dtype == "float32", "float32 on a CPU, whatever the checkpoint says"
    refused(folder, "dtype='int8' is unknown", dtype="int8")


def test_without_tokenizer(folder):
    target = load(folder)
    assert target.decode([1, 2]) == ""
    with pytest.raises(ValueError, match="no tokenizer files"):
        target.encode("hello")


def test_mask_id_from_the_tokenizer(folder):
    change_config(folder, drop=["mask_token_id"])
    refused(folder, "mask_token_id 151669 lies outside the vocabulary of 320")
    assert load(folder, mask_token_id=5).spec.mask_token_id == 5
    ids = write_tokenizer(folder)
    assert load(folder).spec.mask_token_id == ids["<|MASK|>"]


def test_broken_tokenizer(folder):
    write_tokenizer(folder)
    (folder / "tokenizer.json").write_text('{"version": "1.0", ')
    refused(folder, "tokenizer files", "cannot be read")


@pytest.fixture(params=["tokenizer.json", "vocab.json"])
def codecs(request, tmp_path):
    """Return (with template, without, ids of the added tokens)."""
    ids = write_tokenizer(tmp_path, request.param)
    return TextCodec.read(tmp_path), TextCodec.read(tmp_path, use_template=False), ids


def test_added_tokens_have_their_ids(codecs):
    codec, _, ids = codecs
    assert {t: codec.id_of(t) for t in ids} == ids
    assert codec.id_of("<|nothing|>") is None
    assert codec.defined_ids == set(range(max(ids.values()) + 1))


def test_chatml(codecs):
    """As Qwen3 renders it: header, text, end of turn, assistant header."""
    codec, plain, ids = codecs
    start, end = ids["<|im_start|>"], ids["<|im_end|>"]
    newline = plain.encode("x\n")[1:]
    expected = [start, *plain.encode("user\nhi"), end, *newline, start, *plain.encode("assistant\n")]
    assert codec.encode("hi") == expected


@pytest.mark.parametrize("special", [*SPECIAL, *ADDED])
def test_a_typed_special_token_stays_text(codecs, special):
    """Every special token, the mask included, with and without the template, alone and inside a word."""
    with_template, plain, ids = codecs
    frame = [i for i in with_template.encode("hi") if i in ids.values()]
    for text in (special, f"Write {special} twice: {special}{special}!", f"a{special}b", f"\n{special}"):
        assert not set(plain.encode(text)) & set(ids.values()), text
        assert [i for i in with_template.encode(text) if i in ids.values()] == frame, text
        assert plain.decode(plain.encode(text)) == text


def test_unicode_round_trip(codecs):
    """The vocab.json layout is Qwen's, which composes characters (NFC) before it encodes."""
    _, plain, _ = codecs
    found = plain.decode(plain.encode(UNICODE))
    assert unicodedata.normalize("NFC", found) == unicodedata.normalize("NFC", UNICODE)


def test_special_ids_are_left_out_of_the_text(codecs):
    _, plain, ids = codecs
    assert plain.decode([*plain.encode("one"), ids["<|im_end|>"], ids["<|MASK|>"]]) == "one"
    assert plain.decode([ids["<think>"], *plain.encode("one")]) == "<think>one", "added, but not marked special, as in Qwen3"


@pytest.mark.parametrize("text", ["", " ", "\n\t"])
def test_empty_prompt(codecs, text):
    for codec in codecs[:2]:
        with pytest.raises(ValueError, match="the prompt is empty"):
            codec.encode(text)


def test_template_from_a_jinja_file(tmp_path):
    write_tokenizer(tmp_path, template=None)
    base = TextCodec.read(tmp_path, use_template=False).encode("hi")
    (tmp_path / "chat_template.jinja").write_text(CHATML, "utf-8")
    chat = TextCodec.read(tmp_path).encode("hi")
    assert len(chat) > len(base) and TextCodec.read(tmp_path, use_template=False).encode("hi") == base


def test_mask_id_is_the_config_s(folder):
    assert (load(folder).spec.mask_token_id, load(folder).spec.vocab_size) == (MASK, VOCAB)


def test_fingerprint_follows_every_bit_of_the_weights_and_the_config(folder):
    first = load(folder).spec.fingerprint
    assert first == load(folder).spec.fingerprint and len(first) == 16
    change_weights(folder, lambda w: w[Q].view(torch.int32)[0, 0].add_(1))
    second = load(folder).spec.fingerprint
    change_config(folder, rope_theta=20000)
    assert len({first, second, load(folder).spec.fingerprint}) == 3


def test_sliding_window_is_refused(folder):
    change_config(folder, use_sliding_window=True, sliding_window=8, max_window_layers=0)
    refused(folder, "sliding-window")


@pytest.mark.parametrize(
    "changes", [{"block_size": 0}, {"block_size": "x"}, {"architectures": 5}, {"eos_token_id": 10**9}, {"mask_token_id": -1}]
)
def test_bad_values_in_the_config(folder, changes):
    change_config(folder, **changes)
    refused(folder)


@pytest.mark.parametrize("template", ["{% bad", "{{ 1/0 }}"])
def test_broken_chat_template(folder, template):
    write_tokenizer(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text("utf-8")) if path.exists() else {}
    path.write_text(json.dumps(config | {"chat_template": template}), "utf-8")
    refused(folder, "chat template")
