"""Official arguments become parameters, and what is not offered is an error that says so."""

from typing import Any

import pytest

from spot_dlm.presets import SAMPLERS, official, parse_sampler
from spot_dlm.schedule import Schedule


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_defaults_of_every_sampler_are_valid(sampler: str) -> None:
    params = official(sampler)
    assert params.max_new_tokens >= 128 and params.nodes == "auto"


def test_arguments_of_the_authors() -> None:
    params = official("llada", gen_length=64, block_length=16, steps=32, confidence_eos_eot_inf=True, mask_id=126336)
    assert params.rule.schedule == Schedule("remainder_first", 8) and params.rule.late_ids == (126081, 126348)
    assert official("llada", temperature=0.7, confidence_eos_eot_inf=True).rule.late_ids == (126348,)  # the order of the two differs there
    assert official("sdar", block_length=4, denoising_steps=4).rule.schedule is None
    assert official("fast_dllm_v2", temperature=0).sampling.top_p == 1.0


@pytest.mark.parametrize(
    ("sampler", "arguments", "message"),
    [
        ("magic", {}, "sampler='magic' is unknown; choose one of llada"),
        ("llada", {"remasking": "random"}, "remasking='random' is not offered"),
        ("llada", {"gen_length": 10, "block_length": 4}, "gen_length=10 must be whole blocks of 4"),
        ("llada", {"cfg_scale": 2.0}, "cfg_scale"),
        ("dream", {"alg": "origin"}, "alg='origin' is not offered; choose one of maskgit_plus"),
        ("dream", {"alg_temp": 0.5}, "alg_temp=0.5 is not offered"),
        ("sdar", {"remasking_strategy": "entropy_bounded"}, "remasking_strategy='entropy_bounded' is not offered"),
        ("mdlm", {"steps": 0}, "steps=0 must be at least 1"),
    ],
)
def test_what_is_not_offered(sampler: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        official(sampler, **arguments)


def test_samplers_as_text() -> None:
    assert parse_sampler("llada,steps=32,gen_length=64,block_length=16") == official("llada", steps=32, gen_length=64, block_length=16)
    found = parse_sampler("dream,alg=entropy", temperature=0.5, max_new_tokens=40, top_p=0.9)
    assert (found.max_new_tokens, found.sampling.temperature, found.sampling.top_p) == (40, 0.5, 0.9)
    assert parse_sampler("llada", max_new_tokens=128, top_p=0.9) == official("llada")  # LLaDA has no filters
    for text, message in (("llada,steps", "'steps' must be argument=value"), ("llada,x=1", "x"), ("", "sampler='' is unknown")):
        with pytest.raises(ValueError, match=message):
            parse_sampler(text)
