"""`model.generate(custom_generate=...)` of transformers: the tokens of spot.generate with every drafter; shapes, streams, refusals."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
import torch
import transformers
from tiny_checkpoints import dense_model, sdar_config
from toy import unchecked
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3ForCausalLM, TextIteratorStreamer, TextStreamer

import spot_dlm as spot
from spot_dlm.integrations import generation
from spot_dlm.integrations.custom_generate import write_folder
from spot_dlm.integrations.custom_generate.__main__ import main
from spot_dlm.integrations.streamer import SpotStreamer
from spot_dlm.integrations.transformers import target_of
from spot_dlm.targets.checkpoints import SHIPPED, locate

PROMPT = "To JSON: Anna Berg is 34 years old and lives in Oslo."
SHORT = "Add 47 and 38."
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


@pytest.fixture(scope="module")
def model():
    return Qwen3ForCausalLM.from_pretrained(locate(SHIPPED))


@pytest.fixture(scope="module")
def tokenizer():
    return PreTrainedTokenizerFast.from_pretrained(locate(SHIPPED))


@pytest.fixture(scope="module")
def reference():
    return spot.load_target()


@pytest.fixture(scope="module")
def decode(model, tokenizer, tmp_path_factory):
    folder = str(write_folder(tmp_path_factory.mktemp("decoder") / "d"))

    def run(ids, checked=False, **more):
        given = {"tokenizer": tokenizer, "nodes": 8, "max_new_tokens": 64, "drafter": "chain"} | more
        with nullcontext() if checked else unchecked():
            return model.generate(ids, custom_generate=folder, trust_remote_code=True, **given)

    return run


def _ids(reference, *texts: str) -> torch.Tensor:
    return torch.tensor([reference.encode(text) for text in texts])


@cache
def _alone(reference, text: str = PROMPT, temperature: float = 0.0, **more):
    params = spot.DecodeParams(sampling=spot.Sampling(temperature, seed=3), nodes=1, max_new_tokens=64, **more)
    with unchecked():
        return spot.generate(reference, text, spot.Root(), params)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("drafter", ["root", "chain", "ltr", "order", "linear", "calibrated"])
def test_tokens_and_steps_of_spot_generate(decode, reference, temperature: float, drafter: str) -> None:
    expected = _alone(reference, SHORT, temperature)
    more = {"checked": drafter == "chain" and not temperature, "return_dict_in_generate": True}
    found = decode(_ids(reference, SHORT), drafter=drafter, temperature=temperature, seed=3, **more)
    assert found.sequences[0].tolist() == expected.prompt_ids + expected.token_ids
    assert found.commit_steps == [expected.commit_steps] and found.finish_reasons == [expected.finish_reason]
    assert (found.counts[0].nfe == expected.counts.nfe) == (drafter == "root")
    assert found.counts[0].tokens == len(expected.token_ids)


def test_weights_are_shared_and_the_model_lives_on(reference, tmp_path: Path) -> None:
    model = Qwen3ForCausalLM.from_pretrained(locate(SHIPPED))
    ids = _ids(reference, SHORT)
    before = model(ids).logits
    target = target_of(model)
    layer, weights = model.model.layers[0], target._weights.layers[0]
    storages = {p.untyped_storage().data_ptr() for p in model.parameters()}
    for matrix in (weights.qkv.matrix, weights.output.matrix, weights.feed_forward.gate_up.matrix, weights.feed_forward.down.matrix):
        assert matrix.untyped_storage().data_ptr() in storages
    assert torch.allclose(model(ids).logits, before, atol=1e-5) and target_of(model) is target
    assert (target.spec.fingerprint, target.spec.tokenizer_hash) == (reference.spec.fingerprint, reference.spec.tokenizer_hash)
    model.save_pretrained(tmp_path)
    assert torch.equal(Qwen3ForCausalLM.from_pretrained(tmp_path)(ids).logits, model(ids).logits)
    with torch.no_grad():
        layer.self_attn.o_proj.weight.mul_(0.5)
    changed = target_of(model, family="sdar")  # saving calls the architecture in its config by its class
    assert changed is not target and torch.equal(changed._weights.layers[0].output.matrix, layer.self_attn.o_proj.weight.T)


def test_family_must_be_known_and_fit() -> None:
    config = sdar_config(architectures=["Qwen3ForCausalLM"], mask_token_id=None)
    model = dense_model(config)
    with pytest.raises(ValueError, match=r"say which: family= one of .*sdar"):
        target_of(model)
    with pytest.raises(ValueError, match="family llada runs on LlamaForCausalLM, this is Qwen3ForCausalLM"):
        target_of(model, family="llada")
    target = target_of(model, family="sdar", mask_token_id=318, stop_ids=[317])
    assert (target.spec.mask_token_id, target.spec.block_length, target.spec.stop_ids) == (318, 4, frozenset({317}))
    canvas = np.full((1, 4), -1)
    assert torch.isfinite(target.evaluate(target.prefill(np.arange(4), 4), canvas).packed[:, :318]).all()


def test_llada_renamed_into_llama() -> None:
    """Full attention, no tokenizer: the same tokens from the loaded model as from plain decoding of the target."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, tie_word_embeddings=False, **sizes)).eval()
    target = target_of(model, family="llada", mask_token_id=63, stop_ids=[62])
    params = spot.official("llada", gen_length=16, block_length=8, steps=16)
    expected = spot.generate(target, [1, 2, 3], spot.Root(), params)
    from spot_dlm.integrations.generation import generate

    found = generate(model, torch.tensor([[1, 2, 3]]), family="llada", mask_token_id=63, eos_token_id=62, nodes=4, drafter="chain",
                     sampler="llada,block_length=8,steps=16", max_new_tokens=16)  # fmt: skip
    assert found[0, 3 : 3 + len(expected.token_ids)].tolist() == expected.token_ids


_SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 16,
          "num_attention_heads": 2, "num_key_value_heads": 2, "num_experts_per_tok": 2, "tie_word_embeddings": False}  # fmt: skip
MIXTURES = {
    "sdar_moe": ("Qwen3Moe", {"num_experts": 4, "decoder_sparse_step": 1}),
    "llada2": ("Glm4Moe", {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "use_qk_norm": True,
                           "partial_rotary_factor": 0.5, "n_group": 1, "topk_group": 1}),
}  # fmt: skip


@pytest.mark.parametrize("family", MIXTURES)
def test_mixtures_live_on(family: str, tmp_path: Path) -> None:
    """Experts share their weights too; heads with partial rotary positions are copied."""
    name, more = MIXTURES[family]
    torch.manual_seed(0)
    kind = getattr(transformers, f"{name}ForCausalLM")
    model = kind(getattr(transformers, f"{name}Config")(**_SMALL, **more)).eval()
    ids = torch.arange(8)[None]
    before = model(ids).logits
    target = target_of(model, family=family, mask_token_id=63, stop_ids=[62])
    assert torch.allclose(model(ids).logits, before, atol=1e-6)
    experts = model.model.layers[1].mlp.experts
    assert target._weights.layers[1].feed_forward.experts[0].down.matrix.data_ptr() == experts.down_proj.data_ptr()
    model.save_pretrained(tmp_path)
    assert torch.allclose(kind.from_pretrained(tmp_path)(ids).logits, before, atol=1e-6)


def test_batch_padded_on_the_left(decode, reference, tokenizer) -> None:
    texts = (PROMPT, SHORT)
    tokenizer.padding_side = "left"
    rows = [reference.encode(text) for text in texts]
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    found = decode(ids, attention_mask=mask, temperature=1.0, seed=3, num_return_sequences=2)
    assert found.shape[0] == 4 and torch.equal(found[:, :longest], ids.repeat_interleave(2, 0))
    for number, row in enumerate(found):
        one = _alone(reference, texts[number // 2], 1.0, sequence=number)
        rest = row[longest:].tolist()
        assert rest[: len(one.token_ids)] == one.token_ids and set(rest[len(one.token_ids) :]) <= {0}
    for wrong, message in (
        ({"attention_mask": mask.flip(1)}, "padding must stand on the left"),
        ({}, "give attention_mask"),
        ({"attention_mask": mask[:, 1:]}, "must have the shape of input_ids"),
        ({"attention_mask": mask, "streamer": TextStreamer(tokenizer)}, "streamer= shows one sequence, these are 2"),
    ):
        with pytest.raises(ValueError, match=message):
            decode(ids, **wrong)


REFUSED = {
    "num_beams": 2, "repetition_penalty": 1.3, "stop_strings": ["x"], "min_new_tokens": 3, "output_scores": True, "use_cache": False,
    "logits_processor": [object()], "assistant_model": object(), "no_repeat_ngram_size": 2, "frobnicate": 1, "position_ids": [1],
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_honoured_is_named(decode, reference, name: str) -> None:
    with pytest.raises(ValueError, match=f"cannot honour {name}=") as error:
        decode(_ids(reference, SHORT), **{name: REFUSED[name]})
    assert "\n" not in str(error.value)


def test_generation_config(decode, reference) -> None:
    ids, expected = _ids(reference, SHORT), _alone(reference, SHORT, 1.0)
    config = GenerationConfig(do_sample=True, eos_token_id=0, pad_token_id=0, max_new_tokens=64, num_beams=1)
    assert decode(ids, generation_config=config, seed=3, max_new_tokens=None)[0].tolist() == expected.prompt_ids + expected.token_ids
    other = expected.token_ids[4]  # another end token
    found = decode(ids, temperature=1.0, seed=3, eos_token_id=[0, other])[0, ids.shape[1] :].tolist()
    assert found == expected.token_ids[: expected.token_ids.index(other) + 1]
    with pytest.raises(ValueError, match=r"repetition_penalty=1.3 \(generation config\)"):
        decode(ids, generation_config=GenerationConfig(repetition_penalty=1.3, eos_token_id=0))
    with pytest.raises(ValueError, match=r"do_sample=False contradicts temperature=0.5"):
        decode(ids, do_sample=False, temperature=0.5)
    assert decode(ids, max_length=ids.shape[1] + 5, max_new_tokens=None).shape[1] == ids.shape[1] + 5
    sampler = "sdar,block_length=16,denoising_steps=16"
    for more, message in (
        ({"sampler": sampler, "rule": "ltr"}, "sampler= says what rule='ltr' would"),
        ({"sampler": f"{sampler},temperature=0.5", "temperature": 1.0}, "says what temperature would"),
        ({"sampler": f"{sampler},gen_length=16"}, "says what max_new_tokens would"),
        ({"sampler": spot.DecodeParams()}, "is DecodeParams, which say what max_new_tokens, nodes would"),
        ({"cache_implementation": "static"}, "cannot honour cache_implementation="),
    ):
        with pytest.raises(ValueError, match=message):
            decode(ids, **more)
    params = spot.official("sdar", gen_length=64, block_length=16, denoising_steps=16, temperature=0.0)
    official = spot.generate(reference, SHORT, spot.Root(), params)
    assert decode(ids, sampler=sampler, temperature=0.0)[0].tolist() == official.prompt_ids + official.token_ids


def test_streamers_of_transformers(decode, reference, tokenizer, capsys) -> None:
    ids, expected = _ids(reference, SHORT), _alone(reference, SHORT)
    decode(ids, streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True))
    assert capsys.readouterr().out == expected.text + "\n"
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True, timeout=60)
    thread = Thread(target=decode, args=(ids,), kwargs={"streamer": streamer})
    thread.start()
    pieces = list(streamer)
    thread.join()
    assert "".join(pieces) == expected.text and len([p for p in pieces if p]) > 3


def test_streamer_ends_where_generate_fails(decode, reference, tokenizer) -> None:
    streamer = TextIteratorStreamer(tokenizer, timeout=10)
    with pytest.raises(ValueError, match="num_beams"):
        decode(_ids(reference, SHORT), streamer=streamer, num_beams=3)
    assert "".join(streamer) == ""


class _Pieces(SpotStreamer):
    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.__dict__.setdefault("pieces", []).append((text, stream_end))


def test_own_streamer(decode, reference, tokenizer, capsys) -> None:
    ids, expected = _ids(reference, SHORT), _alone(reference, SHORT)
    streamer = _Pieces(tokenizer, skip_prompt=True)
    decode(ids, streamer=streamer)
    assert "".join(t for t, _ in streamer.pieces) == expected.text and len(streamer.pieces) > 3
    assert [end for _, end in streamer.pieces].count(True) == 1
    view = SpotStreamer(tokenizer, skip_prompt=True, draft=True)
    for _ in range(2):  # it serves again
        decode(ids, streamer=view)
        out, drawn = capsys.readouterr()
        assert out == expected.text + "\n" and "tokens in" in drawn and "passes" in drawn and "Answer" in drawn
    whole = _Pieces(tokenizer)
    whole.put(torch.tensor([[70]]))
    whole.end()
    assert whole.pieces and whole.pieces[-1][1]
    with pytest.raises(ValueError, match="shows one sequence, these are 2"):
        whole.put(torch.zeros(2, 3, dtype=torch.long))


def test_the_module_writes_the_folder(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["custom_generate", "--out", str(tmp_path / "f")])
    assert main() == 0 and capsys.readouterr().out.strip() == str(tmp_path / "f")
    assert sorted(p.name for p in (tmp_path / "f" / "custom_generate").iterdir()) == ["generate.py", "requirements.txt"]
    (tmp_path / "f" / "mine.txt").write_text("x", "utf-8")
    assert main() == 2 and "exists and holds other files" in capsys.readouterr().err


ODD = {
    "a text": ({"input_ids": "hi"}, "input_ids must be a tensor"),
    "booleans": ({"input_ids": torch.ones(1, 4, dtype=torch.bool)}, "must be whole numbers"),
    "additive mask": ({"attention_mask": torch.full((1, 4), -1.0)}, "attention_mask must hold 1 for tokens and 0"),
    "mask of text": ({"attention_mask": "x"}, "attention_mask must be a tensor"),
    "far too many copies": ({"num_return_sequences": 10**9}, "num_return_sequences=1000000000 must be"),
    "no copies": ({"num_return_sequences": -1}, "num_return_sequences=-1 must be"),
    "seed": ({"seed": None}, "seed=None must be a whole number"),
    "drafter": ({"drafter": None}, "drafter=None must be a name or a drafter"),
    "drafter_file": ({"drafter_file": 3}, "drafter_file=3 must be"),
    "block_length": ({"block_length": "x"}, "block_length='x' must be a whole number"),
    "rule": ({"rule": 3}, "rule=3 must be"),
    "temperature": ({"temperature": [1]}, r"temperature=\[1\] must be a number"),
    "end token": ({"eos_token_id": [None]}, "eos_token_id=None must be a token id"),
    "padding": ({"pad_token_id": [1]}, r"pad_token_id=\[1\] must be a token id"),
}


@pytest.mark.parametrize("odd", ODD)
def test_odd_values_are_named(model, tokenizer, odd: str) -> None:
    given, message = ODD[odd]
    with pytest.raises(ValueError, match=message), unchecked():
        generation.generate(model, **{"input_ids": torch.ones(1, 4, dtype=torch.long), "tokenizer": tokenizer, "drafter": "chain"} | given)


def test_narrow_ids_come_back_whole(model, tokenizer, reference) -> None:
    ids = torch.tensor([[i for i in reference.encode(SHORT) if i < 256]])
    more = {"tokenizer": tokenizer, "drafter": "chain", "nodes": 4, "max_new_tokens": 16}
    with unchecked():
        found = [generation.generate(model, rows, **more) for rows in (ids, ids.to(torch.uint8))]
    assert torch.equal(*found)
