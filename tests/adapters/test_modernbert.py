"""ModernBERT chat models against transformers' own ModernBertForMaskedLM, on tiny random checkpoints in its layout.

No trajectory of the authors' decoder was recorded for this family; its sampler is mdlm, whose goldens are A2D's.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from toy import trajectory, unchecked

from spot_dlm import presets
from spot_dlm.batch import Request, decode_batch
from spot_dlm.decode import generate
from spot_dlm.drafters import Chain, LeftToRight, Root
from spot_dlm.interfaces import DecodeParams
from spot_dlm.sequence import Finished
from spot_dlm.state import MASKED
from spot_dlm.targets import load_target
from spot_dlm.targets.chat_templates import BERT_CHAT
from spot_dlm.targets.doctor import diagnose
from tests.lossless.test_drafters_never_change_tokens import Adversarial

VOCAB, MASK, PAD, SEP = 320, 318, 317, 316
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 4, "num_attention_heads": 3,
    "local_attention": 16, "pad_token_id": PAD, "eos_token_id": SEP, "bos_token_id": 315, "cls_token_id": 315, "sep_token_id": SEP,
    "max_position_embeddings": 256,
}  # fmt: skip


def build(folder: Path, **changes: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    host = transformers.ModernBertForMaskedLM(transformers.ModernBertConfig(**(SIZES | changes))).eval().requires_grad_(False)
    for weight in host.parameters():
        weight.normal_(0, 2 * weight.shape[-1] ** -0.5) if weight.ndim > 1 else weight.uniform_(0.5, 1.5)
    host.save_pretrained(folder)
    return host


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    folder = tmp_path_factory.mktemp("hub") / "ModernBERT-tiny-chat"
    return str(folder), build(folder)


@pytest.fixture(scope="module")
def target(tiny: tuple[str, Any]) -> Any:
    return load_target(tiny[0], device="cpu", mask_token_id=MASK)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(("prompt", "end"), [(0, 1), (1, 9), (9, 17), (31, 40), (50, 90)])
def test_logits_are_the_host_s(tiny: tuple[str, Any], target: Any, attention: str, prompt: int, end: int) -> None:
    """Canvases shorter and longer than the window of 8 positions to either side."""
    host = tiny[1]
    host.set_attn_implementation(attention)
    rng = np.random.default_rng(prompt)
    ids = rng.integers(0, 300, end)
    canvas = np.where(rng.random(end - prompt) < 0.5, MASKED, ids[prompt:])
    canvas[-1] = MASKED
    found = target.evaluate(target.open_canvas(ids[:prompt], end), canvas[None]).packed
    dense = np.concatenate((ids[:prompt], np.where(canvas == MASKED, MASK, canvas)))
    logits = host(torch.from_numpy(dense)[None]).logits[0, prompt:][torch.from_numpy(canvas == MASKED)]
    allowed = [i for i in range(VOCAB) if i != MASK]
    torch.testing.assert_close(found[:, allowed], logits[:, allowed], rtol=0, atol=2e-4)


def test_the_window_is_seen(tiny: tuple[str, Any], tmp_path: Path) -> None:
    """The same weights with a wider window give other logits, on canvases longer than it alone."""
    folder = tmp_path / "wide-chat"
    build(folder, local_attention=128)
    narrow, wide = (load_target(str(f), device="cpu", mask_token_id=MASK) for f in (tiny[0], folder))
    for end, same in ((9, True), (60, False)):
        rows = [t.evaluate(t.open_canvas(np.arange(4), end), np.full((1, end - 4), MASKED)).packed for t in (narrow, wide)]
        assert torch.equal(*rows) is same


@pytest.mark.parametrize("changes", [{"attention_bias": True, "mlp_bias": True, "norm_bias": True}, {"decoder_bias": False}])
def test_biases(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = tmp_path / "biased-chat"
    host = build(folder, **changes)
    target = load_target(str(folder), device="cpu", mask_token_id=MASK)
    found = target.evaluate(target.open_canvas(np.arange(5), 30), np.full((1, 25), MASKED)).packed
    logits = host(torch.tensor([[*range(5), *25 * [MASK]]])).logits[0, 5:]
    torch.testing.assert_close(found[:, :MASK], logits[:, :MASK], rtol=0, atol=2e-4)


def test_rows_do_not_depend_on_the_pass(target: Any) -> None:
    """To the bit: alone, among others of the same query, and beside another query."""
    rng = np.random.default_rng(3)
    for prompt, length in ((3, 1), (5, 32), (7, 45)):
        prefix = target.open_canvas(rng.integers(0, 300, prompt), prompt + length)
        canvases = np.where(rng.random((13, length)) < 0.6, MASKED, rng.integers(0, 300, (13, length)))
        canvases[:, 0] = MASKED
        other = (target.open_canvas(np.arange(2), 11), np.full((3, 9), MASKED))
        together = target.evaluate(prefix, canvases)
        beside = target.evaluate_many([other, (prefix, canvases[[4, 7]])])[1]
        for row in (0, 4, 7, 12):
            assert torch.equal(together.of(row), target.evaluate(prefix, canvases[[row]]).of(0))
        assert torch.equal(beside.of(0), together.of(4)) and torch.equal(beside.of(1), together.of(7))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_drafter_changes_a_token(target: Any, temperature: float) -> None:
    params = presets.official("mdlm", max_new_tokens=40, block_size=16, steps=32, temperature=temperature)
    with unchecked():
        for prompt in ([5], [3, 9, 27, 81, 243, 7, 21]):
            standard = trajectory(generate(target, prompt, Root(), params))
            for drafter in (Chain(), LeftToRight(), Adversarial(2)):
                drafted = generate(target, prompt, drafter, replace(params, nodes=6))
                assert trajectory(drafted) == standard, drafter
            for _, event in decode_batch(target, [Request(i, prompt, replace(params, nodes=3)) for i in range(2)], Chain()):
                if isinstance(event, Finished):
                    assert trajectory(event.result) == standard


def test_the_padding_token_ends_a_text(target: Any) -> None:
    assert target.spec.stop_ids == {PAD, SEP}


def test_an_encoder_that_was_not_tuned_to_chat_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "ModernBERT-base"
    build(folder)
    with pytest.raises(ValueError, match=r"tuned to.*'chat'.*family 'modernbert'"):
        load_target(str(folder))
    assert load_target(str(folder), family="modernbert", mask_token_id=MASK).spec.family == "modernbert"


def test_caches_are_refused(tiny: tuple[str, Any]) -> None:
    with pytest.raises(ValueError, match="cache='dual' is not offered for family modernbert"):
        load_target(tiny[0], mask_token_id=MASK, cache="dual")


def test_other_activations_and_lost_tensors_are_refused(tiny: tuple[str, Any], tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "relu-chat"
    build(folder, hidden_activation="relu")
    with pytest.raises(ValueError, match="hidden_activation='relu'"):
        load_target(str(folder), mask_token_id=MASK)
    assert any("hidden_activation='relu'" in problem for problem in diagnose(str(folder)).problems)
    lost = tmp_path / "lost-chat"
    lost.mkdir()
    (lost / "config.json").write_text((Path(tiny[0]) / "config.json").read_text())
    tensors = load_file(f"{tiny[0]}/model.safetensors")
    save_file({k: v for k, v in tensors.items() if k != "model.layers.2.mlp.Wi.weight"}, lost / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"1 missing keys.*model\.layers\.2\.mlp\.Wi\.weight"):
        load_target(str(lost), mask_token_id=MASK)


def test_doctor_reads_it(tiny: tuple[str, Any]) -> None:
    told = diagnose(tiny[0])
    assert told.host == "ModernBertForMaskedLM" and told.attention == "full"
    assert json.dumps(told.to_dict())
    assert [p for p in told.problems if "no tokenizer" not in p] == [
        "mask_token_id 50284 lies outside the vocabulary of 320 (default of modernbert)"
    ]


def test_the_template_is_dllm_s() -> None:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    template = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(BERT_CHAT)
    turns = [{"role": "user", "content": " Hi "}, {"role": "assistant", "content": "Yes"}, {"role": "user", "content": "Why?"}]
    said = template.render(messages=turns, add_generation_prompt=True)
    assert said == "[Question]\nHi\n[/Question]\n\n[Answer]\nYes\n[/Answer]\n\n[Question]\nWhy?\n[/Question]\n\n[Answer]\n"


@pytest.mark.parametrize("kinds", [["full_attention"], ["full_attention"] * 3, ["sliding_attention"] * 3], ids=["one", "global", "local"])
def test_layers_of_one_kind(tmp_path: Path, kinds: list[str]) -> None:
    folder = tmp_path / "ModernBERT-tiny-chat"
    build(folder, num_hidden_layers=len(kinds), layer_types=kinds)
    target = load_target(str(folder), device="cpu", mask_token_id=MASK)
    params = DecodeParams(max_new_tokens=8, nodes=4)
    with unchecked():
        assert generate(target, [5, 6, 7], Chain(), params).token_ids == generate(target, [5, 6, 7], Root(), params).token_ids


def test_heads_of_an_odd_size(tmp_path: Path) -> None:
    folder = tmp_path / "ModernBERT-tiny-chat"
    build(folder, hidden_size=35, num_attention_heads=5)
    with pytest.raises(ValueError, match="hidden_size=35 with num_attention_heads=5 gives heads of an odd size"):
        load_target(str(folder), device="cpu", mask_token_id=MASK)
