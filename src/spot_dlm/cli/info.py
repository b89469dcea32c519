"""`spot info`: what a checkpoint is, what will be used with it, and whether its rows are independent to the bit.

Example: `spot info --model JetLM/SDAR-1.7B-Chat --json`.
"""

import json
from inspect import signature
from typing import Any

import torch

import spot_dlm
from spot_dlm.cli import options as o
from spot_dlm.cli.show import print_facts
from spot_dlm.compare import rows_are_independent
from spot_dlm.drafters import build_drafter
from spot_dlm.interfaces import Target, TargetSpec
from spot_dlm.presets import SAMPLERS
from spot_dlm.targets.adapter import Adapter
from spot_dlm.targets.families import FAMILIES


def info(
    model: o.Model = "shipped",
    family: o.FamilyName = None,
    cache: o.CacheName = "exact",
    dtype: o.Dtype = None,
    device: o.Device = None,
    threads: o.Threads = None,
    strict: o.Strict = 1,
    as_json: o.Json = False,
) -> None:
    """Show what a model is and what will be used, and check that its rows do not depend on each other.

    The check evaluates random canvases alone and together with others, after no, one and several blocks: only where the logits are
    the same to the bit is speculative decoding exact without --strict.

    The preset is the official sampler of the model's family with its arguments, as --sampler takes it.

    \b
    Examples:
      spot info
      spot info --model ./my-checkpoint --dtype bfloat16 --json
    """
    target = o.open_target(model, o.TargetOptions(dtype, device, threads, strict=strict, family=family, cache=cache))
    facts = _facts(target)
    if as_json:
        print(json.dumps(facts))
        return
    print_facts({name: _text(value) for name, value in facts.items()})


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} ({_text(v)})" if isinstance(v, dict) else f"{k} {_text(v)}" for k, v in value.items())
    if isinstance(value, list | tuple):
        return " ".join(map(str, value)) or "none"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _facts(target: Target) -> dict[str, Any]:
    assert isinstance(target, Adapter)
    spec = target.spec
    return {
        "model": spec.name,
        "family": spec.family,
        "parameters": spec.num_parameters,
        "sizes": target.sizes,
        "vocabulary": spec.vocab_size,
        "block_length": spec.block_length,
        "context": spec.max_length,
        "mask_token": {str(spec.mask_token_id): repr(target.token_text(spec.mask_token_id))},
        "end_tokens": {str(i): repr(target.token_text(i)) for i in sorted(spec.stop_ids)},
        "dtype": spec.dtype,
        "device": str(spec.device),
        "threads": torch.get_num_threads(),
        "default": {
            "drafter": build_drafter(o.DEFAULT_DRAFTER, spec=spec).name,
            "nodes": o.DEFAULT_NODES,
            "rule": o.DEFAULT_RULE,
            "max_new_tokens": o.MAX_NEW_TOKENS,
        },
        "preset": _preset(spec),
        "drafts_across_blocks": spec.crosses,
        "rows_independent": rows_are_independent(target),
        "versions": {"spot": spot_dlm.__version__, "torch": torch.__version__},
    }


def _preset(spec: TargetSpec) -> dict[str, Any]:
    """Return the official sampler of a target's family with all its arguments, and what of it is the target's."""
    row = next(row for row in FAMILIES if row.name == spec.family)
    name, *pairs = row.sampler.format(L=spec.block_length).split(",")
    own = {key: json.loads(value) for key, _, value in (pair.partition("=") for pair in pairs)}
    arguments = {key: parameter.default for key, parameter in signature(SAMPLERS[name]).parameters.items()} | own
    return {
        "family": row.name,
        "sampler": name,
        "arguments": {key: value for key, value in arguments.items() if value is not None},
        "block_length": spec.block_length,
        "stop_ids": sorted(spec.stop_ids),
        "mask_token_id": spec.mask_token_id,
    }
