"""Official samplers as parameters: each function takes the arguments of the authors' own function and returns what decodes alike here.

What differs all the same is listed in docs/families.md ("Deviations"). Where the authors draw the order of positions, so do we, with
keyed noise. Knows nothing of targets.

Example: `official("llada", gen_length=128, block_length=32, steps=128)`.
"""

import math
from collections.abc import Callable
from inspect import signature
from typing import Any, get_args, get_origin, get_type_hints

from spot_dlm.confidence import Confidence
from spot_dlm.interfaces import DecodeParams, Stop
from spot_dlm.schedule import Schedule
from spot_dlm.transition import MAX_TEMPERATURE, MIN_TEMPERATURE, Sampling, Select, UnmaskRule

Real = float | int
_UNUSED = {"mask_id", "eos_id", "pad_id", "stop_token", "stopping_criteria_idx", "right_shift_logits", "use_block_cache"}
"""Arguments that are the target's here (`load_target`)."""


def llada(
    *,
    gen_length: int = 128,
    block_length: int = 128,
    steps: int = 128,
    temperature: Real = 0.0,
    remasking: str = "low_confidence",
    threshold: Real | None = None,
    logits_eos_inf: bool = False,
    confidence_eos_eot_inf: bool = False,
    eos_eot_ids: tuple[int, int] = (126081, 126348),
) -> DecodeParams:
    """LLaDA, generate.py; `threshold` is that of Fast-dLLM v1's generate.py without its caches.

    Raises:
        ValueError: for another remasking than low_confidence and random, for random with a threshold, and for lengths that the official
            code refuses.
    """
    order_temperature = _order_temperature(remasking)
    if order_temperature and threshold is not None:
        raise ValueError(f"remasking='random' with threshold={threshold} is not offered: that threshold would be one for random numbers")
    if gen_length % block_length or steps % (gen_length // block_length):
        raise ValueError(f"gen_length={gen_length} must be whole blocks of {block_length}, and steps={steps} divide among them")
    late = eos_eot_ids if temperature == 0 else eos_eot_ids[1:]
    rule = UnmaskRule(
        select="top" if threshold is None else "threshold",
        threshold=0.9 if threshold is None else float(threshold),
        strict=False,
        schedule=Schedule("remainder_first", steps * block_length // gen_length) if threshold is None else None,
        late_ids=late if confidence_eos_eot_inf and not order_temperature else (),  # a random order does not look at confidences
        suppressed_ids=eos_eot_ids[:1] if logits_eos_inf else (),
        order_temperature=order_temperature,
    )
    return DecodeParams(rule, Sampling(float(temperature)), gen_length, block_length=block_length, stop="never")


def mdlm(
    *, max_new_tokens: int = 128, block_size: int = 32, steps: int = 128, temperature: Real = 0.0, remasking: str = "low_confidence"
) -> DecodeParams:
    """dllm, MDLMSampler (core/samplers/mdlm.py)."""
    return _dllm(max_new_tokens, block_size, steps, temperature, remasking, "never")


def bd3lm(
    *,
    max_new_tokens: int = 128,
    block_size: int = 32,
    steps: int = 128,
    steps_per_block: int | None = None,
    temperature: Real = 0.0,
    remasking: str = "low_confidence",
) -> DecodeParams:
    """dllm, BD3LMSampler (core/samplers/bd3lm.py)."""
    blocks = -(-max_new_tokens // block_size)
    steps = steps if steps_per_block is None else steps_per_block * blocks
    return _dllm(max_new_tokens, block_size, steps, temperature, remasking, "block")


def _dllm(max_new_tokens: int, block_size: int, steps: int, temperature: Real, remasking: str, stop: Stop) -> DecodeParams:
    blocks = -(-max_new_tokens // block_size)
    rule = UnmaskRule(schedule=Schedule("half_even", -(-steps // blocks)), order_temperature=_order_temperature(remasking))
    return DecodeParams(rule, Sampling(float(temperature)), max_new_tokens, block_length=block_size, stop=stop)


def dream(
    *,
    max_new_tokens: int = 512,
    steps: int = 512,
    temperature: Real = 0.0,
    top_p: Real | None = None,
    top_k: int | None = None,
    alg: str = "entropy",
    alg_temp: Real | None = None,
    eps: Real = 1e-3,
) -> DecodeParams:
    """Dream, diffusion_generate (generation_utils.py); filters apply at temperature 0 too, `alg_temp` not to "origin".

    Raises:
        ValueError: for an unknown alg, an alg_temp that is none, and another eps.
    """
    confidences: dict[str, Confidence] = {"maskgit_plus": "probability", "topk_margin": "margin", "entropy": "entropy"}
    if alg not in (*confidences, "origin"):
        raise ValueError(f"alg={alg!r} is not offered; choose one of {', '.join(confidences)}, origin")
    drawn = alg_temp or 0.0
    if not isinstance(drawn, Real) or not (drawn == 0 or MIN_TEMPERATURE <= drawn <= MAX_TEMPERATURE):
        raise ValueError(f"alg_temp={alg_temp!r} must be 0 (or none), or between {MIN_TEMPERATURE:g} and {MAX_TEMPERATURE:g}")
    _require("eps", eps, 1e-3)
    schedule = Schedule("timesteps", steps)
    if alg == "origin":
        rule = UnmaskRule(select="arrival", schedule=schedule)
    else:
        rule = UnmaskRule(confidence=confidences[alg], source="filtered", schedule=schedule, order_temperature=float(drawn))
    return DecodeParams(rule, _sampling(temperature, top_p, top_k), max_new_tokens, stop="never")


def sdar(
    *,
    gen_length: int = 128,
    block_length: int = 8,
    denoising_steps: int = 8,
    temperature: Real = 1.0,
    top_k: int = 0,
    top_p: Real = 1.0,
    remasking_strategy: str = "low_confidence_dynamic",
    confidence_threshold: Real = 0.85,
) -> DecodeParams:
    """SDAR and TraDo, block_diffusion_generate (generate.py); temperature 0 as in FreeDave's branch for them.

    Raises:
        ValueError: for remasking_strategy="entropy_bounded", which the official code cannot run either.
    """
    select: dict[str, Select] = {"low_confidence_static": "top", "low_confidence_dynamic": "threshold", "sequential": "left_to_right"}
    if remasking_strategy not in select:
        raise ValueError(f"remasking_strategy={remasking_strategy!r} is not offered; choose one of {', '.join(select)}")
    rule = UnmaskRule(
        select=select[remasking_strategy],
        threshold=float(confidence_threshold),
        source="filtered",
        schedule=None if denoising_steps == block_length else Schedule("remainder_first_of_block", denoising_steps),
    )
    return DecodeParams(rule, _sampling(temperature, top_p, top_k), gen_length, block_length=block_length)


def llada2(
    *,
    gen_length: int = 2048,
    block_length: int = 32,
    steps: int = 32,
    temperature: Real = 0.0,
    top_p: Real | None = None,
    top_k: int | None = None,
    eos_early_stop: bool = False,
    minimal_topk: int = 1,
    threshold: Real = 0.95,
) -> DecodeParams:
    """LLaDA2.0, generate (modeling_llada2_moe.py l.1272-1441); 2.1 with its editing off."""
    steps = min(steps, gen_length // minimal_topk)
    rule = UnmaskRule(
        select="threshold",
        threshold=float(threshold),
        source="raw" if temperature == 0 else "filtered",
        schedule=None if steps >= block_length else Schedule("remainder_first_of_block", steps),
    )
    sampling = _sampling(temperature, top_p, top_k)
    stop: Stop = "prefix" if eos_early_stop else "block"
    return DecodeParams(rule, sampling, gen_length, block_length=block_length, stop=stop)


def fast_dllm_v2(
    *,
    max_new_tokens: int = 128,
    block_size: int = 32,
    small_block_size: int = 8,
    threshold: Real = 1.0,
    temperature: Real = 0.0,
    top_p: Real = 0.95,
    steps: int | None = None,
) -> DecodeParams:
    """Fast-dLLM v2, generate (modeling file of Fast_dLLM_v2_7B, l.652-771)."""
    rule = UnmaskRule(
        select="threshold",
        threshold=float(threshold),
        source="raw" if temperature == 0 else "filtered",
        span=0 if small_block_size == block_size else small_block_size,
    )
    sampling = Sampling(float(temperature), top_p=1.0 if temperature == 0 else float(top_p))
    return DecodeParams(rule, sampling, max_new_tokens, block_length=block_size, stop="prefix")


def _order_temperature(remasking: str) -> float:
    """Return what draws the order: nothing, or equal chances for all positions."""
    if remasking not in ("low_confidence", "random"):
        raise ValueError(f"remasking={remasking!r} is not offered; choose one of low_confidence, random")
    return math.inf if remasking == "random" else 0.0


def _sampling(temperature: Real, top_p: Real | None, top_k: int | None) -> Sampling:
    return Sampling(float(temperature), top_k or 0, 1.0 if top_p is None else float(top_p))


SAMPLERS: dict[str, Callable[..., DecodeParams]] = {
    "llada": llada, "mdlm": mdlm, "bd3lm": bd3lm, "dream": dream, "sdar": sdar, "llada2": llada2, "fast_dllm_v2": fast_dllm_v2,
}  # fmt: skip


def official(sampler: str, **arguments: Any) -> DecodeParams:
    """Return the parameters for a sampler's own arguments; those that say which ids are special are the target's (`load_target`).

    Raises:
        ValueError: for an unknown sampler or argument, and for one that is of another kind or a length below 1.
    """
    if sampler not in SAMPLERS:
        raise ValueError(f"sampler={sampler!r} is unknown; choose one of {', '.join(SAMPLERS)}")
    given = {name: value for name, value in arguments.items() if name not in _UNUSED}
    hints = get_type_hints(SAMPLERS[sampler])
    for name in given.keys() & hints.keys():
        _check_kind(sampler, name, given[name], hints[name])
    try:
        return SAMPLERS[sampler](**given)
    except TypeError as error:
        raise ValueError(f"sampler {sampler}: {str(error).rpartition('() ')[2]}") from error


def _check_kind(sampler: str, name: str, value: object, hint: Any) -> None:
    kinds = get_args(hint) or (hint,)
    if get_origin(hint) is not tuple and type(value) not in kinds:
        names = " or ".join(
            {int: "a whole number", float: "a number", bool: "true or false", str: "a word"}.get(k, "none")
            for k in kinds
            if k is not int or float not in kinds
        )
        raise ValueError(f"sampler {sampler}: {name}={value!r} must be {names}")
    if type(value) is int and float not in kinds and name != "top_k" and value < 1:
        raise ValueError(f"sampler {sampler}: {name}={value} must be at least 1")


def parse_sampler(text: str, **common: Any) -> DecodeParams:
    """Return the parameters of "NAME[,argument=value...]", as the command line writes it.

    Args:
        text: a sampler and its own arguments, as in "llada,steps=64,block_length=32".
        common: temperature, top_p, top_k and max_new_tokens, where the text does not say them and the sampler knows them.

    Raises:
        ValueError: for an unknown sampler or argument, naming it.
    """
    name, *pairs = (part.strip() for part in text.split(","))
    arguments: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not equals:
            raise ValueError(f"sampler={text!r}: {pair!r} must be argument=value")
        arguments[key] = _value(value)
    known = signature(SAMPLERS[name]).parameters if name in SAMPLERS else {}
    for key, value in common.items():
        own = "gen_length" if key == "max_new_tokens" and "gen_length" in known else key
        if own in known:
            arguments.setdefault(own, value)
    return official(name, **arguments)


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False, "none": None}.get(text.lower(), text)


def _require(name: str, value: object, allowed: object) -> None:
    if value != allowed:
        raise ValueError(f"{name}={value!r} is not offered, only {allowed!r}")
