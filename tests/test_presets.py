"""Official arguments become parameters, and what is not offered is an error that says so."""

import math
from dataclasses import replace
from typing import Any

import pytest
from toy import unchecked

from spot_dlm.presets import SAMPLERS, official, parse_sampler
from spot_dlm.rules import describe, parse_rule
from spot_dlm.schedule import Schedule
from spot_dlm.transition import UnmaskRule


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


def test_orders_that_are_drawn() -> None:
    for sampler in ("llada", "mdlm", "bd3lm"):
        plain = official(sampler)
        assert official(sampler, remasking="random").rule == replace(plain.rule, order_temperature=math.inf)
    late = official("llada", remasking="random", confidence_eos_eot_inf=True, logits_eos_inf=True).rule
    assert late.late_ids == () and late.suppressed_ids == (126081,)  # the confidence that it changes is not looked at
    origin = official("dream", alg="origin", steps=64, alg_temp=0.5, temperature=0.2, top_p=0.95)
    assert origin.rule == UnmaskRule(select="arrival", schedule=Schedule("timesteps", 64)) and origin.sampling.top_p == 0.95
    for alg_temp in (None, 0, 0.0):
        assert official("dream", alg_temp=alg_temp).rule.order_temperature == 0
    drawn = official("dream", alg="topk_margin", alg_temp=0.5, steps=64)
    assert drawn.rule == replace(official("dream", alg="topk_margin", steps=64).rule, order_temperature=0.5)
    for text, params in (
        ("llada,remasking=random", official("llada", remasking="random")),
        ("dream,alg=origin,steps=512", official("dream", alg="origin")),
        ("dream,alg=entropy,alg_temp=0.5", official("dream", alg_temp=0.5)),
        ("dream,alg_temp=none", official("dream")),
    ):
        assert parse_sampler(text) == params
        assert replace(parse_rule(describe(params.rule)), strict=params.rule.strict) == params.rule  # strict has no effect here


@pytest.mark.parametrize(
    ("sampler", "arguments", "message"),
    [
        ("magic", {}, "sampler='magic' is unknown; choose one of llada"),
        ("llada", {"remasking": "high_confidence"}, "remasking='high_confidence' is not offered; choose one of low_confidence, random"),
        ("llada", {"remasking": "random", "threshold": 0.9}, "remasking='random' with threshold=0.9 is not offered"),
        ("bd3lm", {"remasking": "luck"}, "remasking='luck' is not offered"),
        ("mdlm", {"stochastic_transfer": True}, "stochastic_transfer"),
        ("llada", {"gen_length": 10, "block_length": 4}, "gen_length=10 must be whole blocks of 4"),
        ("llada", {"cfg_scale": 2.0}, "cfg_scale"),
        ("llada", {"block_length": 0}, "sampler llada: block_length=0 must be at least 1"),
        ("llada", {"steps": 1.5}, "sampler llada: steps=1.5 must be a whole number"),
        ("sdar", {"denoising_steps": True}, "denoising_steps=True must be a whole number"),
        ("dream", {"top_k": "many"}, "top_k='many' must be a whole number or none"),
        ("bd3lm", {"block_size": -4}, "block_size=-4 must be at least 1"),
        ("dream", {"alg": "p2"}, "alg='p2' is not offered; choose one of maskgit_plus, topk_margin, entropy, origin"),
        ("dream", {"alg_temp": -0.5}, "alg_temp=-0.5 must be 0 .or none., or between 0.0001 and 10000"),
        ("dream", {"alg_temp": math.nan}, "alg_temp=nan must be"),
        ("dream", {"alg": "origin", "alg_temp": 1e9}, "alg_temp=1000000000.0 must be"),
        ("dream", {"alg": "origin", "eps": 0.01}, "eps=0.01 is not offered"),
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
    for text, message in (
        ("llada,steps", "'steps' must be argument=value"),
        ("llada,x=1", "x"),
        ("", "sampler='' is unknown"),
        ("dream,alg_temp=high", "alg_temp='high' must be a number or none"),
    ):
        with unchecked(), pytest.raises(ValueError, match=message):
            parse_sampler(text)
