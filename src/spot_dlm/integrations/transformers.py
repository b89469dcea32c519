"""A model that transformers has loaded, as a target: its own weights, not a second copy of them, and its own special ids.

The model lives on: where weights are joined for our forward pass, its parameters become parts of the joined matrices.

Example: `spot.generate(target_of(model, tokenizer, family="sdar"), "Add 47 and 38.", spot.build_drafter("chain"))`.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from spot_dlm.interfaces import Target
from spot_dlm.targets.checkpoints import attention_problems, fingerprint
from spot_dlm.targets.families import FAMILIES, Family, chat_templates, find_family
from spot_dlm.targets.loader import build_target
from spot_dlm.targets.text import TextCodec

_targets: WeakKeyDictionary[Any, tuple[tuple[Any, ...], tuple[Any, ...], Target]] = WeakKeyDictionary()


def target_of(
    model: Any,
    tokenizer: Any = None,
    *,
    family: str | None = None,
    stop_ids: Iterable[int] | None = None,
    block_length: int | None = None,
    mask_token_id: int | None = None,
    right_shift: bool = False,
    use_template: bool = True,
) -> Target:
    """Return a loaded causal language model of transformers as a target; the same one again as long as its weights stay as they are.

    Args:
        model: a native class: LlamaForCausalLM, Qwen2..., Qwen3..., Qwen3Moe..., Glm4MoeForCausalLM.
        tokenizer: a fast tokenizer; default: the files in the folder that the model was loaded from, else token ids only. Ids without a
            text are never generated, so tokens may differ without it.
        family: a row of the family table (docs/families.md); default: by the architecture in the model's config and its name.
        stop_ids: end tokens; default: those of the model's generation config, else the family's.
        block_length: tokens of a block; default: the config's, else the family's.
        mask_token_id: default: the config's, else the tokenizer's, else the family's.
        right_shift: logits of an A2D checkpoint predict the next position.
        use_template: wrap text prompts in the chat template.

    Raises:
        ValueError: if it is no model of the family's class, spread over devices, quantised, or its special ids are not known.
    """
    stops = None if stop_ids is None else frozenset(stop_ids)
    key = (id(tokenizer), family, stops, block_length, mask_token_id, right_shift, use_template)
    known = _targets.get(model)
    if known is not None and known[:2] == (key, _stamp(model)):
        return known[2]
    name = str(getattr(model, "name_or_path", "") or type(model).__name__)
    config = dict(model.config.to_dict())
    config["architectures"] = list(getattr(model.config, "architectures", None) or [type(model).__name__])
    row = _family(config, name, family, model)
    _check(model, row, name)
    folder = _folder(name)
    codec = _codec(tokenizer, folder, use_template, row, name)
    weights = folder is not None and any(folder.glob("*.safetensors"))
    hashes = (fingerprint(folder), fingerprint(folder, with_tokenizer=False)) if weights and folder is not None else (_hash(model),) * 2
    target = build_target(
        model,
        config,
        row,
        codec,
        name=name,
        end_ids=_end_ids(model, config, row) if stops is None else stops,
        hashes=hashes,
        block_length=block_length,
        mask_token_id=mask_token_id,
        right_shift=right_shift,
        shared=True,
    )
    if not getattr(model, "_spot_saves_whole", False):
        model.register_state_dict_post_hook(_make_contiguous)  # safetensors cannot write parts of a matrix
        model._spot_saves_whole = True
    _targets[model] = (key, _stamp(model), target)
    return target


def _stamp(model: Any) -> tuple[Any, ...]:
    """Return what changes when weights are replaced or written to."""
    return tuple((p.data_ptr(), p._version, p.dtype) for p in model.parameters())


def _make_contiguous(module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and not value.is_contiguous():
            state[name] = value.contiguous()


def _family(config: dict[str, Any], name: str, family: str | None, model: Any) -> Family:
    try:
        return find_family(config, name, family)
    except ValueError as error:
        if family is not None:
            raise
        fitting = [row.name for row in FAMILIES if type(model).__name__ in _classes(row)]
        raise ValueError(f"{error}; if it is one, say which: family= one of {', '.join(fitting) or 'docs/families.md'}") from error


def _classes(row: Family) -> set[str]:
    return {f"{host}For{'MaskedLM' if row.encoder else 'CausalLM'}" for host in row.hosts.values()}


def _check(model: Any, row: Family, name: str) -> None:
    """Refuse a model whose weights cannot be shared.

    Raises:
        ValueError: saying why.
    """
    if type(model).__name__ not in _classes(row):
        wanted = " or ".join(sorted(_classes(row)))
        raise ValueError(f"{name}: family {row.name} runs on {wanted}, this is {type(model).__name__} (merge adapters first)")
    if row.encoder:
        raise ValueError(f"{name}: weights of family {row.name} cannot be shared yet; spot_dlm.load_target({name!r}) loads them")
    if getattr(model, "quantization_method", None) is not None or getattr(model, "is_quantized", False):
        raise ValueError(f"{name}: is quantised, which is not supported; load it in float32, bfloat16 or float16")
    devices, kinds = {str(p.device) for p in model.parameters()}, {p.dtype for p in model.parameters()}
    if len(devices) > 1 or "meta" in devices:
        raise ValueError(f"{name}: its weights lie on {', '.join(sorted(devices))}; one device is needed (load it without device_map)")
    if len(kinds) > 1:
        raise ValueError(f"{name}: its weights have several number formats ({', '.join(sorted(map(str, kinds)))}); one is needed")
    for problem in attention_problems(model, row):
        raise ValueError(f"{name}: {problem}")


def _folder(name: str) -> Path | None:
    """Return the folder that a model was loaded from, of a hub id that of the local cache; nothing is fetched."""
    if (Path(name) / "config.json").is_file():
        return Path(name)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except Exception:  # no id, or not in the cache
        return None


def _codec(tokenizer: Any, folder: Path | None, use_template: bool, row: Family, name: str) -> TextCodec | None:
    if tokenizer is None:
        return None if folder is None else TextCodec.read(folder, use_template, chat_templates(row, name))
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(f"{name}: needs a fast tokenizer, this is {type(tokenizer).__name__}")
    return TextCodec(tokenizer, use_template)


def _end_ids(model: Any, config: dict[str, Any], row: Family) -> frozenset[int]:
    stated = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if stated is None:
        stated = config.get("eos_token_id")
    found = row.stop_ids if stated is None else stated if isinstance(stated, list | tuple) else [stated]
    return frozenset(int(i) for i in found)


def _hash(model: Any) -> str:
    """Return a hash of samples of the weights, for a model without files."""
    digest = hashlib.sha256()
    for name, weight in model.named_parameters():
        digest.update(f"{name} {tuple(weight.shape)}".encode())
        digest.update(weight.detach().reshape(-1)[:256].float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]
