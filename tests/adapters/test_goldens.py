"""Every trajectory that the authors' own decoders left on tiny checkpoints: same tokens, same order, same number of passes.

The folder is the suite's own, or the one that SPOT_GOLDENS names (further cases of the same kind).
"""

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toy import trajectory, unchecked

from spot_dlm import presets
from spot_dlm.batch import Request, decode_batch
from spot_dlm.bench.memo import MemoTarget
from spot_dlm.decode import generate
from spot_dlm.drafters import Chain, LeftToRight, Root
from spot_dlm.interfaces import DecodeParams
from spot_dlm.sequence import BlockFinished, BlockStarted, Finished, Pass, Result
from spot_dlm.targets import load_target
from spot_dlm.targets.loader import LoadedTarget
from tests.lossless.test_drafters_never_change_tokens import Adversarial

FOLDER = Path(os.environ.get("SPOT_GOLDENS") or Path(__file__).parents[1] / "golden")
SAMPLERS = {"gsai": "llada", "fastdllm_v1": "llada", "trado": "sdar", "fastdllm_v2": "fast_dllm_v2"}
MASK_ID = 318


def cases() -> Iterator[Any]:
    for file in sorted(FOLDER.glob("*/cases.json")):
        for case in json.loads(file.read_text("utf-8"))["cases"]:
            yield pytest.param(file.parent.name, case, id=case["id"])


@cache
def load(folder: str, bd3lm: bool, shift: bool, pad: int | None, stops: tuple[int, ...]) -> LoadedTarget:
    family = "bd3lm" if bd3lm else None
    path = str(FOLDER / folder)
    return load_target(
        path, family=family, device="cpu", mask_token_id=MASK_ID, stop_ids=stops, pad_token_id=pad, right_shift=shift, block_length=32
    )


def target_of(folder: str, case: dict[str, Any]) -> LoadedTarget:
    settings = case["settings"]
    stops = [settings.get("eos_id"), settings.get("stop_token"), *(settings.get("stopping_criteria_idx") or ())]
    bd3lm = case["sampler"] == "bd3lm"
    known = tuple(i for i in stops if i is not None and i < 320) if case["sampler"] != "mdlm" else ()
    return load(folder, bd3lm, bool(settings.get("right_shift_logits")), settings.get("pad_id") if bd3lm else None, known)


def params_of(case: dict[str, Any], num_prompt: int) -> DecodeParams:
    arguments = dict(case["settings"])
    if case["sampler"] in ("gsai", "fastdllm_v1"):
        arguments["eos_eot_ids"] = (317, 316)
    if case["sampler"] == "fastdllm_v2":  # so many blocks, the one with the prompt's tail among them
        size = arguments["block_size"]
        arguments["max_new_tokens"] = (num_prompt // size + arguments["max_new_tokens"] // size) * size - num_prompt
    return presets.official(SAMPLERS.get(case["sampler"], case["sampler"]), **arguments)


def official_steps(case: dict[str, Any], ahead: int) -> list[dict[int, int]]:
    """What each denoising pass committed, at positions that do not count what is put in front of the prompt."""
    passes = [dict(zip(f["pos"], f["tok"], strict=True)) for f in case["forwards"] if f["kind"] == "denoise"]
    return [{position - ahead: token for position, token in committed.items()} for committed in passes]


def our_steps(result: Result) -> list[dict[int, int]]:
    steps: dict[tuple[int, int], dict[int, int]] = {}
    for commit in result.order:
        if commit.step >= 0:
            steps.setdefault((commit.block, commit.step), {})[commit.position] = commit.token
    return list(steps.values())


@pytest.mark.parametrize(("folder", "case"), list(cases()))
def test_decoding_follows_the_official_decoder(folder: str, case: dict[str, Any]) -> None:
    if "rows" in case:
        pytest.skip("deviation: an official batch shares one schedule and one canvas; here every prompt has its own (docs/families.md)")
    if case["quality"].get("overwrites"):
        pytest.skip("deviation: the official decoder overwrites committed positions (docs/families.md)")
    if case["quality"].get("degenerate_tie"):
        pytest.skip("undecidable: every row is equal up to rounding")
    prompt, hidden = case["prompt"], (case.get("attention_mask") or [1]).count(0)
    ahead = hidden if case["sampler"] != "bd3lm" else -(-len(prompt) % case["settings"]["block_size"])
    target = target_of(folder, case)
    params = params_of(case, len(prompt) - hidden)
    with unchecked():
        result = generate(target, prompt[hidden:], Root(), params)
        expected = official_steps(case, ahead if hidden else -ahead)
        official, ours = [step for step in expected if step], our_steps(result)
        if case["settings"].get("confidence_eos_eot_inf"):  # end tokens tie at 0, and topk leaves open which goes first
            tied = next((i for i, step in enumerate(official) if {316, 317} & set(step.values())), len(official))
            assert tied >= 3
            official, ours = official[:tied], ours[:tied]
        assert ours == official
        assert result.counts.nfe + result.counts.idle == len(expected)
        for drafter, nodes in ((Chain(), 6), (LeftToRight(), 3)):
            drafted = generate(target, prompt[hidden:], drafter, replace(params, nodes=nodes))
            assert trajectory(drafted) == trajectory(result), drafter


OF_EACH = {
    "llada": ("llada", {"gen_length": 16, "block_length": 8, "steps": 10}),
    "llada, random": ("llada", {"gen_length": 16, "block_length": 8, "steps": 10, "remasking": "random"}),
    "llada_moe": ("llada", {"gen_length": 16, "block_length": 8, "steps": 16, "threshold": 0.3}),
    "dream": ("dream", {"max_new_tokens": 12, "steps": 9, "alg": "topk_margin", "top_p": 0.9}),
    "dream, origin": ("dream", {"max_new_tokens": 12, "steps": 16, "alg": "origin", "top_p": 0.9}),
    "dream, alg_temp": ("dream", {"max_new_tokens": 12, "steps": 9, "alg": "entropy", "alg_temp": 0.2}),
    "sdar": ("sdar", {"gen_length": 14, "block_length": 4, "denoising_steps": 3, "remasking_strategy": "low_confidence_static"}),
    "llada2": ("llada2", {"gen_length": 20, "block_length": 8, "threshold": 0.5}),
    "fastdllm_v2": ("fast_dllm_v2", {"max_new_tokens": 50, "threshold": 0.6}),
    "a2d": ("mdlm", {"max_new_tokens": 18, "block_size": 8, "steps": 14}),
    "bd3lm": ("bd3lm", {"max_new_tokens": 18, "block_size": 8, "steps": 14}),
    "bd3lm, random": ("bd3lm", {"max_new_tokens": 18, "block_size": 8, "steps": 14, "remasking": "random"}),
}


@pytest.mark.parametrize("family", OF_EACH)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_drafter_changes_a_token(family: str, temperature: float) -> None:
    """Every family and preset: the chains, a hostile drafter and batches give the tokens and the order of standard decoding."""
    sampler, arguments = OF_EACH[family]
    folder = str(Path(__file__).parents[1] / "golden" / ("a2d" if "bd3lm" in family else family.partition(",")[0]))
    name = "bd3lm" if "bd3lm" in family else None
    target = load_target(folder, family=name, device="cpu", mask_token_id=MASK_ID, stop_ids=(), pad_token_id=316, block_length=32)
    params = presets.official(sampler, temperature=temperature, **arguments)
    prompts = [[7, 9, 300, 12, 44][:size] for size in (1, 4, 5)]
    with unchecked():
        standard = [generate(target, p, Root(), replace(params, nodes=1, sequence=i)) for i, p in enumerate(prompts)]
        for drafter in (Chain(), Chain(coupled=False), LeftToRight(), Adversarial(3)):
            for i, prompt in enumerate(prompts):
                found = generate(target, prompt, drafter, replace(params, nodes=5, sequence=i))
                assert trajectory(found) == trajectory(standard[i]), (drafter, prompt)
            memo = MemoTarget(target)
            assert trajectory(generate(memo, prompts[2], drafter, replace(params, nodes=4, sequence=2))) == trajectory(standard[2])
            requests = [Request(i, p, replace(params, nodes=3, sequence=i)) for i, p in enumerate(prompts)]
            for number, event in decode_batch(target, requests, drafter):
                assert isinstance(event, Finished | BlockStarted | BlockFinished | Pass), event
                if isinstance(event, Finished):
                    assert trajectory(event.result) == trajectory(standard[number])


def llada_with_holes(target: LoadedTarget, prompt: list[int], gen_length: int, block_length: int, steps: int) -> list[dict[int, int]]:
    """LLaDA's loop, written from its description: every masked position up to the block's end competes, those of the prompt too."""
    canvas, made = np.array(prompt + gen_length * [MASK_ID]), []
    for block in range(gen_length // block_length):
        end = len(prompt) + (block + 1) * block_length
        per_block = steps // (gen_length // block_length)
        base, more = divmod(int((canvas[end - block_length : end] == MASK_ID).sum()), per_block)
        for step in range(per_block):
            masked = np.flatnonzero(canvas == MASK_ID)
            prefix = target.open_canvas(canvas[:0], len(canvas))
            confidence, tokens = target.evaluate(prefix, np.where(canvas == MASK_ID, -1, canvas)[None]).packed.softmax(-1).max(-1)
            among = [i for i in range(len(masked)) if masked[i] < end]
            best = sorted(among, key=lambda i: (-float(confidence[i]), i))[: base + (step < more)]
            made.append({int(masked[i]): int(tokens[i]) for i in best})
            canvas[list(made[-1])] = list(made[-1].values())
    return made


@pytest.mark.parametrize(
    "prompt", [[5, MASK_ID, 9, MASK_ID, 12, 7], [MASK_ID, 1, 2], [1, 2, MASK_ID], [7, 8, MASK_ID, MASK_ID, MASK_ID, 9]]
)
def test_masks_in_a_prompt_compete_and_may_stay(prompt: list[int]) -> None:
    target = load_target(str(Path(__file__).parents[1] / "golden" / "llada"), device="cpu", mask_token_id=MASK_ID, stop_ids=())
    params = presets.official("llada", gen_length=16, block_length=8, steps=12)
    with unchecked():
        expected = llada_with_holes(target, prompt, 16, 8, 12)
        standard = generate(target, prompt, Root(), replace(params, nodes=1))
        assert our_steps(standard) == [step for step in expected if step]
        for drafter in (Chain(), Adversarial(5)):
            assert trajectory(generate(target, prompt, drafter, replace(params, nodes=5))) == trajectory(standard)
