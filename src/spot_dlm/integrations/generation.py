"""`generate` of a loaded transformers model by spot-dlm: transformers' arguments and shapes outside, our loop inside.

Arguments that a diffusion language model cannot honour are errors that name them. Knows nothing of how transformers finds this function.

Example: `generate(model, input_ids=ids, tokenizer=tokenizer, family="sdar", max_new_tokens=64)`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from transformers.utils.generic import ModelOutput

from spot_dlm.batch import Failed, Request, decode_batch
from spot_dlm.drafters import build_drafter
from spot_dlm.hub import find_drafter
from spot_dlm.integrations.transformers import target_of
from spot_dlm.interfaces import DecodeParams, Drafter, Target
from spot_dlm.presets import parse_sampler
from spot_dlm.rules import parse_rule
from spot_dlm.sequence import Event, Finished, Result
from spot_dlm.stable import StableIds
from spot_dlm.stats import Counts
from spot_dlm.transition import Sampling, UnmaskRule

_CONFIG = ("max_new_tokens", "max_length", "do_sample", "temperature", "top_p", "top_k", "eos_token_id", "pad_token_id",
           "num_return_sequences", "return_dict_in_generate")  # fmt: skip
_FREE = {"bos_token_id", "transformers_version", "_from_model_config", "cache_implementation", "cache_config"}
"""Fields of a generation config that decide nothing here: there is always a prompt, and the cache is our own."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "use_cache": (True,), "num_beams": (1,), "num_beam_groups": (1,), "repetition_penalty": (1,), "length_penalty": (1,), "typical_p": (1,),
    "early_stopping": (False,), "no_repeat_ngram_size": (0,), "encoder_no_repeat_ngram_size": (0,), "encoder_repetition_penalty": (1,),
    "min_length": (0,), "min_new_tokens": (0,), "diversity_penalty": (0,), "epsilon_cutoff": (0,), "eta_cutoff": (0,), "min_p": (0,),
    "renormalize_logits": (False,), "remove_invalid_values": (False,), "token_healing": (False,), "guidance_scale": (1,),
    "output_scores": (False,), "output_logits": (False,), "output_attentions": (False,), "output_hidden_states": (False,),
    "num_assistant_tokens": (20,), "num_assistant_tokens_schedule": ("constant",), "assistant_confidence_threshold": (0.4,),
    "assistant_lookbehind": (10,), "target_lookbehind": (10,), "is_assistant": (False,), "disable_compile": (False,),
    "synced_gpus": (False,), "logits_processor": ([],), "stopping_criteria": ([],),
}  # fmt: skip
"""Values of arguments that ask for nothing."""
_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_MAX_ROWS = 2**16


@dataclass
class SpotGenerateOutput(ModelOutput):
    """What `return_dict_in_generate=True` gives.

    Args:
        sequences: prompts and new tokens, one row for each returned sequence, padded on the right.
        counts: passes, drafted and accepted nodes and seconds of each row.
        finish_reasons: "stop" or "length".
        commit_steps: for every new token the number of the step that committed it.
    """

    sequences: Any = None
    counts: list[Counts] | None = None
    finish_reasons: list[str] | None = None
    commit_steps: list[list[int]] | None = None


def generate(
    model: Any,
    inputs: Any = None,
    generation_config: Any = None,
    streamer: Any = None,
    *,
    input_ids: Any = None,
    attention_mask: Any = None,
    tokenizer: Any = None,
    family: str | None = None,
    drafter: str | Drafter = "auto",
    drafter_file: str | Path | None = None,
    transfer: bool = False,
    nodes: int | Literal["auto"] = "auto",
    rule: str | UnmaskRule | None = None,
    sampler: str | DecodeParams | None = None,
    seed: int = 0,
    block_length: int | None = None,
    stop: str | None = None,
    mask_token_id: int | None = None,
    right_shift: bool = False,
    **more: Any,
) -> Any:
    """Decode token ids as `model.generate` does, in its shapes: prompts followed by new tokens.

    Args:
        model: a native causal language model (`target_of`).
        inputs: prompts [B, P], or `input_ids`; rows of a batch may be padded on the left where `attention_mask` says so.
        generation_config: default: the model's own; of it and of the arguments, those in docs/huggingface.md are honoured.
        streamer: gets the prompt, then each token as soon as it is stable; one sequence only.
        input_ids: see `inputs`.
        attention_mask: 1 for tokens, 0 for padding.
        tokenizer: see `target_of`.
        family: see `target_of`.
        drafter: name or object; decides the number of passes, never the tokens.
        drafter_file: folder or hub id of a fitted drafter.
        transfer: use one that was fitted for another target.
        nodes: rows of a pass.
        rule: unmask rule.
        sampler: an official sampler with its arguments, or DecodeParams; instead of rule, block_length and stop.
        seed: of the noise; row i of the result has the noise key of sequence i.
        block_length: tokens of a block.
        stop: "block", "prefix" or "never".
        mask_token_id: see `target_of`.
        right_shift: see `target_of`.
        more: the other arguments of transformers' generate.

    Raises:
        ValueError: naming the argument that is wrong or cannot be honoured.
    """
    try:
        checks: tuple[tuple[str, Any, Any, str], ...] = (
            ("seed", seed, int, "a whole number"), ("drafter", drafter, str | Drafter, "a name or a drafter"),
            ("drafter_file", drafter_file, str | Path | None, "a folder or hub id"), ("rule", rule, str | UnmaskRule | None, "a rule"),
            ("sampler", sampler, str | DecodeParams | None, "a text or DecodeParams"), ("family", family, str | None, "a text"),
            ("block_length", block_length, int | None, "a whole number"), ("mask_token_id", mask_token_id, int | None, "a whole number"),
        )  # fmt: skip
        for name, value, kinds, what in checks:
            if not isinstance(value, kinds) or type(value) is bool:
                raise ValueError(f"{name}={_short(value)} must be {what}")
        config = _settings(model, generation_config, more)
        prompts, given = _prompts(inputs, input_ids, attention_mask, config)
        stops = config.get("eos_token_id")
        stop_ids = None if stops is None else [_id("eos_token_id", i) for i in (stops if isinstance(stops, list | tuple) else [stops])]
        config["pad_token_id"] = None if config.get("pad_token_id") is None else _id("pad_token_id", config["pad_token_id"])
        target = target_of(
            model, tokenizer, family=family, stop_ids=stop_ids, block_length=block_length, mask_token_id=mask_token_id,
            right_shift=right_shift,
        )  # fmt: skip
        params = _params(config, given.shape[1], sampler, rule, stop, seed, nodes, block_length)
        guess = _drafter(drafter, drafter_file, target, transfer, params)
        copies = _copies(config.get("num_return_sequences", 1), len(prompts))
        if streamer is not None and copies * len(prompts) > 1:
            raise ValueError(f"streamer= shows one sequence, these are {copies * len(prompts)}; decode them one by one")
        requests = [
            Request(number, prompts[number // copies], replace(params, sequence=params.sequence + number))
            for number in range(copies * len(prompts))
        ]
        results = _decode(target, requests, guess, _Stream(streamer, given, target, params))
    finally:
        if streamer is not None:
            streamer.end()
    sequences = _joined(results, given.repeat_interleave(copies, dim=0), config)
    if not config.get("return_dict_in_generate"):
        return sequences
    return SpotGenerateOutput(sequences, [r.counts for r in results], [r.finish_reason for r in results], [r.commit_steps for r in results])


def _settings(model: Any, generation_config: Any, more: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that are honoured, arguments before the generation config.

    Raises:
        ValueError: naming every other one that asks for something.
    """
    base = generation_config if generation_config is not None else getattr(model, "generation_config", None)
    stated = {k: v for k, v in ({} if base is None else base.to_dict()).items() if v is not None}
    explicit = {k: v for k, v in more.items() if v is not None}
    merged = stated | explicit
    refused = [
        f"{k}={_short(v)}" + ("" if k in explicit else " (generation config)")
        for k, v in merged.items()
        if k not in _CONFIG
        and (k in explicit or k not in _FREE)
        and not any((type(v) is not bool and v == n) or v is n for n in _NEUTRAL.get(k, ()))
    ]
    if refused:
        raise ValueError(
            f"spot-dlm cannot honour {', '.join(refused)}: it decodes a diffusion language model exactly; "
            "leave them out or give their neutral values"
        )
    found = {k: v for k, v in merged.items() if k in _CONFIG}
    if "max_length" in explicit and "max_new_tokens" not in explicit:
        found.pop("max_new_tokens", None)
    if found.get("do_sample") is False and explicit.get("temperature") and "do_sample" in explicit:
        raise ValueError(f"do_sample=False contradicts temperature={explicit['temperature']}; leave one out")
    if "temperature" not in explicit and not found.get("do_sample"):
        found.pop("temperature", None)  # greedy, or what the sampler says
        found = {k: v for k, v in found.items() if k not in ("top_p", "top_k") or k in explicit}
    elif "temperature" not in explicit:
        found.setdefault("temperature", 1.0)
    return found | {"explicit": sorted(explicit)}


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 40 else f"{text[:40]}..."


def _prompts(inputs: Any, input_ids: Any, attention_mask: Any, config: dict[str, Any]) -> tuple[list[list[int]], Any]:
    """Return the tokens of every row without padding, and the rows as they were given.

    Raises:
        ValueError: if there are none, or padding is not on the left.
    """
    if (inputs is None) == (input_ids is None):
        raise ValueError("give the prompt as inputs= or input_ids=, one of them")
    rows = _tensor("input_ids", inputs if input_ids is None else input_ids)
    if rows.ndim != 2 or rows.dtype not in _WHOLE or not rows.shape[1] or not len(rows):
        raise ValueError(f"input_ids must be whole numbers of shape [rows, tokens], not {rows.dtype} {list(rows.shape)}")
    rows = rows if rows.dtype in _WHOLE[:2] else rows.long()  # new tokens may not fit into less
    if attention_mask is None:
        pad = config.get("pad_token_id")
        if len(rows) > 1 and pad is not None and bool((rows[:, 0] == pad).any()):
            raise ValueError(f"a row begins with the padding token {pad}: give attention_mask, which says what is padding")
        return rows.tolist(), rows
    said = _tensor("attention_mask", attention_mask).to(rows.device)
    mask = said == 1
    if mask.shape != rows.shape:
        raise ValueError(f"attention_mask must have the shape of input_ids {list(rows.shape)}, not {list(mask.shape)}")
    if not bool((mask | (said == 0)).all()):
        raise ValueError("attention_mask must hold 1 for tokens and 0 for padding, nothing else")
    if bool((mask[:, :-1] & ~mask[:, 1:]).any()) or not bool(mask[:, -1].all()):
        raise ValueError("padding must stand on the left of every row (tokenizer.padding_side='left')")
    return [row[own].tolist() for row, own in zip(rows, mask, strict=True)], rows


def _tensor(name: str, value: Any) -> Any:
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:  # whatever torch raises for what is no array
        raise ValueError(f"{name} must be a tensor of shape [rows, tokens], not {_short(value)}: {_short(str(error))}") from error


def _id(name: str, value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name}={_short(value)} must be a token id") from error


def _copies(value: Any, num_prompts: int) -> int:
    """Return how many sequences each prompt gets.

    Raises:
        ValueError: if that is no whole number, or they are too many.
    """
    if type(value) is not int or not 1 <= value * num_prompts <= _MAX_ROWS:
        raise ValueError(
            f"num_return_sequences={_short(value)} must be a whole number of at least 1, with at most {_MAX_ROWS} sequences for all "
            f"prompts ({num_prompts} here)"
        )
    return value


def _params(
    config: dict[str, Any], prompt: int, sampler: str | DecodeParams | None, rule: str | UnmaskRule | None, stop: str | None, seed: int,
    nodes: int | Literal["auto"], block_length: int | None,
) -> DecodeParams:  # fmt: skip
    length = config.get("max_new_tokens")
    if length is None and config.get("max_length") is not None:
        length = int(config["max_length"]) - prompt
        if length < 1:
            raise ValueError(f"max_length={config['max_length']} leaves no room after a prompt of {prompt} tokens; give max_new_tokens")
    drawn: dict[str, Any] = {}
    for name, kind in (("temperature", float), ("top_p", float), ("top_k", int)):
        if config.get(name) is not None:
            try:
                drawn[name] = kind(config[name])
            except (TypeError, ValueError) as error:
                raise ValueError(f"{name}={_short(config[name])} must be a number") from error
    if sampler is None:
        chosen = parse_rule(rule) if isinstance(rule, str) else rule or UnmaskRule()
        known: dict[str, Any] = {"max_new_tokens": length, "stop": stop, "block_length": block_length}
        known = {k: v for k, v in known.items() if v is not None}
        return DecodeParams(rule=chosen, sampling=Sampling(seed=seed, **drawn), nodes=nodes, **known)
    for name, value in (("rule", rule), ("block_length", block_length), ("stop", stop)):
        if value is not None:
            raise ValueError(f"sampler= says what {name}={value!r} would: give one of them")
    said = set(config["explicit"]) & {"temperature", "top_p", "top_k", "do_sample", "max_new_tokens", "max_length"}
    if isinstance(sampler, DecodeParams):
        said |= {name for name, given in (("seed", seed != 0), ("nodes", nodes != "auto")) if given}
        if said:
            raise ValueError(f"sampler= is DecodeParams, which say what {', '.join(sorted(said))} would: give one of them")
        return sampler
    named = {pair.partition("=")[0].strip() for pair in sampler.split(",")[1:]}
    twice = (named & said) | ({"max_new_tokens"} & said if "gen_length" in named else set())
    if twice:
        raise ValueError(f"sampler={sampler!r} says what {', '.join(sorted(twice))} would: give one of them")
    found = parse_sampler(sampler, **drawn, **({} if length is None else {"max_new_tokens": length}))
    return replace(found, sampling=replace(found.sampling, seed=seed), nodes=nodes)


def _drafter(
    drafter: str | Drafter, file: str | Path | None, target: Target, transfer: bool, params: DecodeParams
) -> Drafter:  # fmt: skip
    if not isinstance(drafter, str):
        if file is not None:
            raise ValueError("drafter_file= needs the name of its drafter, not an object: give drafter='auto'")
        return drafter
    folder = None if file is None else find_drafter(file)
    return build_drafter(drafter, file=folder, spec=target.spec, transfer=transfer, params=params)


class _Stream:
    """Passes stable tokens on to a streamer, and whole events to one that wants to see them (`observe`)."""

    def __init__(self, streamer: Any, given: Any, target: Target, params: DecodeParams) -> None:
        self._streamer, self._run, self._count = streamer, StableIds(target.spec.stop_ids, params.max_new_tokens), 0
        if streamer is not None:
            if hasattr(streamer, "watch"):
                streamer.watch(target)
            streamer.put(given.cpu())

    def show(self, event: Event) -> None:
        """Pass on what an event made stable; the last one brings the end token, too."""
        if self._streamer is None:
            return
        if hasattr(self._streamer, "observe"):
            self._streamer.observe(event)
        new = self._run.take(event)
        self._count += len(new)
        if isinstance(event, Finished):
            new = new + event.result.token_ids[self._count :]
        for token in new:
            self._streamer.put(torch.tensor([token]))


def _decode(target: Target, requests: Sequence[Request[int]], drafter: Drafter, stream: _Stream) -> list[Result]:
    """Decode all rows in shared passes.

    Raises:
        ValueError: or whatever else stopped a row.
    """
    results: dict[int, Result] = {}
    for number, event in decode_batch(target, requests, drafter):
        if isinstance(event, Failed):
            raise event.error
        stream.show(event)
        if isinstance(event, Finished):
            results[number] = event.result
    return [results[number] for number in range(len(requests))]


def _joined(results: Sequence[Result], given: Any, config: dict[str, Any]) -> Any:
    """Return prompts and new tokens as one tensor, padded on the right."""
    longest = max(len(r.token_ids) for r in results)
    pad, stops = config.get("pad_token_id"), config.get("eos_token_id")
    if pad is None:
        pad = 0 if stops is None else stops[0] if isinstance(stops, list | tuple) else stops
    new = [[*r.token_ids, *[int(pad)] * (longest - len(r.token_ids))] for r in results]
    return torch.cat((given, torch.tensor(new, dtype=given.dtype, device=given.device)), dim=1)
