"""Checkpoints without a chat template: the family's own stands in, base models and unknown ones refuse text that is not to be bare."""

import json
import shutil
from pathlib import Path

import pytest
from toy import unchecked

from spot_dlm.targets import load_target
from spot_dlm.targets.doctor import diagnose
from spot_dlm.targets.families import FAMILIES, chat_templates
from spot_dlm.targets.text import TextCodec
from tests.tiny_checkpoints import CHATML, write_tokenizer

GOLDEN = Path(__file__).parents[1] / "golden"
ROWS = {family.name: family for family in FAMILIES}
TURNS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")
QWEN3 = "<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\n"
QWEN2_5 = f"<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n{QWEN3}"
EXPECTED = {
    "llada": (
        ("<|startoftext|>", "<|endoftext|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|startoftext|><|start_header_id|>user<|end_header_id|>\n\nHi there<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "llada2": (
        ("<role>", "</role>", "<|role_end|>"),
        "<role>SYSTEM</role>detailed thinking off<|role_end|><role>HUMAN</role>Hi there<|role_end|><role>ASSISTANT</role>",
    ),
    "dream": (TURNS, f"<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{QWEN3}"),
    "sdar": (TURNS, QWEN3),
    "fastdllm_v2": (TURNS, QWEN2_5),
    "a2d": (TURNS, f"{QWEN3}<think>\n\n</think>\n\n"),
}
NO_TEMPLATE = "the checkpoint has no chat template and none is known for it"


def write(folder: Path, golden: str, special: tuple[str, ...], template: str | None = None) -> Path:
    shutil.copytree(GOLDEN / golden, folder, ignore=shutil.ignore_patterns("*s.json"))
    ids = write_tokenizer(folder, template=template, special=special)
    config = json.loads((folder / "config.json").read_text("utf-8")) | {"mask_token_id": 318, "eos_token_id": 317}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    assert max(ids.values()) < 318
    return folder


def text_of(folder: Path, prompt: str = "Hi there", **options: bool) -> str:
    target = load_target(str(folder), device="cpu", **options)
    return "".join(target.token_text(i) for i in target.encode(prompt))


@pytest.mark.parametrize("golden", EXPECTED)
def test_the_family_s_template_stands_in(tmp_path: Path, golden: str) -> None:
    special, expected = EXPECTED[golden]
    folder = write(tmp_path / "Tiny-Instruct", golden, special)
    target = load_target(str(folder), device="cpu")
    ids = target.encode("Hi there")
    assert "".join(target.token_text(i) for i in ids) == expected
    known = {target.token_text(i) for i in ids}
    assert {token for token in special if token in expected} <= known, "each special token is one id"
    typed = target.encode(f"a {special[0]} b")
    assert sum(target.token_text(i) == special[0] for i in typed) == expected.count(special[0]), "typed ones stay text"
    assert text_of(folder, use_template=False) == "Hi there"
    assert diagnose(str(folder)).chat_template == f"default of {target.spec.family}"


def test_spaces_around_text_as_the_authors(tmp_path: Path) -> None:
    """LLaDA's template strips them, the others keep them."""
    special, expected = EXPECTED["llada"]
    assert text_of(write(tmp_path / "a", "llada", special), " Hi there\n") == expected
    assert text_of(write(tmp_path / "b", "sdar", TURNS), " Hi there\n") == QWEN3.replace("Hi there", " Hi there\n")


@pytest.mark.parametrize(
    ("name", "golden", "special"),
    [
        ("LLaDA-8B-Base", "llada", EXPECTED["llada"][0]),
        ("Dream-v0-Base-7B", "dream", TURNS),
        ("my-base-model", "sdar", TURNS),
        ("LLaDA-MoE-7B-A1B-Instruct", "llada_moe", TURNS),  # no template known
        ("LLaDA-8B-Instruct", "llada", TURNS),  # not LLaDA's special tokens
        ("LLaDA2.0-mini", "llada2", TURNS),
    ],
)
def test_text_is_refused_where_no_template_is_known(tmp_path: Path, name: str, golden: str, special: tuple[str, ...]) -> None:
    folder = write(tmp_path / name, golden, special)
    target = load_target(str(folder), device="cpu")
    with pytest.raises(ValueError, match=rf"{NO_TEMPLATE} .*--raw \(use_template=False\)") as caught:
        target.encode("Hi there")
    assert "\n" not in str(caught.value)
    assert text_of(folder, use_template=False) == "Hi there"
    told = diagnose(str(folder))
    assert told.chat_template is None and told.problems == []


def test_a_template_of_its_own_counts_whatever_the_name(tmp_path: Path) -> None:
    for name in ("LLaDA-8B-Base", "LLaDA-8B-Instruct"):
        folder = write(tmp_path / name, "llada", (*EXPECTED["llada"][0], *TURNS[1:]), template=CHATML)
        assert text_of(folder) == QWEN3
        assert diagnose(str(folder)).chat_template == "tokenizer_config.json"


def test_the_first_template_that_fits(tmp_path: Path) -> None:
    """A2D's Qwen2 tokenizers have no thinking tokens: no empty thought, but Qwen2.5's system turn."""
    folder = write(tmp_path / "Qwen2.5-Coder", "a2d", TURNS)
    tokenizer = (folder / "tokenizer.json").read_text("utf-8")
    (folder / "tokenizer.json").write_text(tokenizer.replace("<think>", "<other>").replace("</think>", "</other>"), "utf-8")
    assert text_of(folder) == QWEN2_5


@pytest.mark.parametrize("name", ROWS)
def test_only_the_last_part_of_a_name_makes_a_base_model(name: str) -> None:
    assert chat_templates(ROWS[name], "/data/base/some-Chat") == ROWS[name].chat_templates
    assert chat_templates(ROWS[name], "owner/some-8B-Base/") == ()


HALF, MARK = "\ud800", "\N{OBJECT REPLACEMENT CHARACTER}spot-content-9\N{OBJECT REPLACEMENT CHARACTER}"
NO_CONVERSATIONS = {
    "none": ([], "must be a list of messages"),
    "text": ("hi", "must be a list of messages"),
    "no message": (["hi"], "message 0 must have texts"),
    "no content": ([{"role": "user", "content": "a"}, {"role": "user", "content": None}], "message 1 must have texts"),
    "a token as role": ([{"role": TURNS[2], "content": "a"}], "role .* holds a special token"),
    "a mark as role": ([{"role": MARK, "content": f"a {TURNS[2]}"}], "role .* holds a special token"),
    "half a character": ([{"role": "user", "content": HALF}], "half of a surrogate pair"),
    "half a character and a token": ([{"role": "user", "content": HALF + TURNS[2]}], "half of a surrogate pair"),
}


def test_what_is_no_conversation(tmp_path: Path) -> None:
    codec = TextCodec.read(write(tmp_path / "Tiny-Instruct", "sdar", TURNS, CHATML))
    assert codec is not None
    for turns, message in NO_CONVERSATIONS.values():
        with pytest.raises(ValueError, match=message), unchecked():
            codec.encode_chat(turns)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must be a text, not NoneType"), unchecked():
        codec.encode(None)  # type: ignore[arg-type]
    typed = codec.encode_chat([{"role": "user", "content": f"{TURNS[2]}{MARK}"}])
    assert codec.id_of(TURNS[2]) is not None and typed.count(codec.id_of(TURNS[2]) or 0) == 1, "the template's own alone"


def test_a_template_that_changes_contents(tmp_path: Path) -> None:
    shouting = "{% for m in messages %}{{ m['content'] | upper }}<|im_end|>{% endfor %}"
    codec = TextCodec.read(write(tmp_path / "Tiny-Instruct", "sdar", TURNS, shouting))
    assert codec is not None and codec.encode("a")
    with pytest.raises(ValueError, match="the chat template changes contents"):
        codec.encode(f"a {TURNS[2]}")
