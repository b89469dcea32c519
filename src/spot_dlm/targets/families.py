"""The table of model families: one row says how a checkpoint becomes a native class, how it attends and how its canvas is cut.

Facts were read in the authors' sources; docs/families.md has them with their references. Knows nothing of weights. Example:
`find_family(config, "Dream-org/Dream-v0-Instruct-7B").shift` is "global".
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from spot_dlm.targets.chat_templates import BERT_CHAT, DREAM, LLADA, LLADA2, QWEN2_5, QWEN3, QWEN3_NOT_THINKING
from spot_dlm.targets.translations import LLADA_KEYS, Config, keep, translate_llada, translate_llada2, translate_llada_moe


@dataclass(frozen=True, kw_only=True)
class Family:
    """One row: the vendor's architecture names, the native transformers class and the decoding contract.

    Args:
        name: what `load_target(family=...)` and results call it.
        hosts: vendor's architecture (the first in config.json) to native class, "Qwen3" for Qwen3Config and Qwen3ForCausalLM.
        host_config: native configuration class where it is another one.
        mask_tokens: texts of the mask, looked up in the tokenizer where config.json has no mask_token_id.
        mask_id: the mask's id where neither says; None: no default.
        stop_ids: end tokens where neither generation_config.json nor config.json says.
        block_length: where config.json and the name say nothing; for "whole" only a guess.
        attention: "block_causal": a position sees the blocks before its own and all of its own; "full": everything.
        shift: which row of logits predicts position i. "none": row i; "global": row i - 1, for position 0 row 0; "block": the same
            inside each block.
        blocks: "grid": blocks count from absolute position 0; "generated": from the end of the prompt; "whole": all new tokens are one.
        needs_seed: a block's first token is the arg-max of the row before it, committed before the block's first step.
        cuts_last_block: on a grid, the last block ends with the last new token.
        hides_padding: a generated padding token is not seen from later blocks and takes no position there.
        rotary_float32: heads are turned in float32 whatever the number format.
        sampler: the authors' sampler (`spot_dlm.presets`) with the arguments that are this family's own, {L} for the length of a block.
        chat_templates: for checkpoints without one; the first counts whose special tokens the tokenizer has.
        translate: raw config.json to the native configuration's fields.
        key_mapping: regular expressions and what they become in the names of tensors, in order.
        named: the row is meant only where this expression finds something in the folder's or repository's name, upper case or lower.
        encoder: the host is a masked language model whose layers may see only their neighbourhood (`encoder_weights`).
        ends_with_padding: the padding token ends a text, too.
    """

    name: str
    hosts: Mapping[str, str]
    host_config: str | None = None
    mask_tokens: tuple[str, ...] = ()
    mask_id: int | None = None
    stop_ids: tuple[int, ...] = ()
    block_length: int
    attention: Literal["block_causal", "full"]
    shift: Literal["none", "global", "block"] = "none"
    blocks: Literal["grid", "generated", "whole"]
    needs_seed: bool = False
    cuts_last_block: bool = False
    hides_padding: bool = False
    rotary_float32: bool = False
    sampler: str
    chat_templates: tuple[str, ...] = ()
    translate: Callable[[Mapping[str, Any]], Config] = keep
    key_mapping: Mapping[str, str] = field(default_factory=dict)
    named: str | None = None
    encoder: bool = False
    ends_with_padding: bool = False

    def host_of(self, config: Mapping[str, Any]) -> tuple[str, str]:
        """Return the names of the native configuration and model class of a raw config.json."""
        host = self.hosts.get(_architecture(config)) or next(iter(self.hosts.values()))
        return self.host_config or f"{host}Config", f"{host}{'ForMaskedLM' if self.encoder else 'ForCausalLM'}"


_A2D = {"A2DQwen3LMHeadModel": "Qwen3", "A2DQwen2LMHeadModel": "Qwen2", "A2DLlamaLMHeadModel": "Llama"}

FAMILIES = (
    Family(
        name="llada", hosts={"LLaDAModelLM": "Llama"}, mask_tokens=("<|mdm_mask|>",), mask_id=126336, stop_ids=(126081,),
        attention="full", blocks="generated", block_length=32, rotary_float32=True, sampler="llada,block_length={L}",
        chat_templates=(LLADA,), translate=translate_llada, key_mapping=LLADA_KEYS,
    ),
    Family(
        name="illada", hosts={"ILLaDAForCausalLM": "Llama"}, mask_tokens=("<[MASK]>",), mask_id=5, stop_ids=(2,),
        attention="full", blocks="generated", block_length=128, sampler="llada,block_length={L}",
    ),
    Family(
        name="llada_moe", hosts={"LLaDAMoEModelLM": "Qwen3Moe"}, mask_id=156895, stop_ids=(156892,),
        attention="full", blocks="generated", block_length=32, sampler="llada,block_length={L}", translate=translate_llada_moe,
    ),
    Family(
        name="llada2", hosts={"LLaDA2MoeModelLM": "Glm4Moe"}, host_config="SarvamMoEConfig", mask_tokens=("<|mask|>",), mask_id=156895,
        stop_ids=(156892,), attention="block_causal", blocks="grid", block_length=32, sampler="llada2,block_length={L},steps={L}",
        chat_templates=(LLADA2,), translate=translate_llada2,
    ),
    Family(
        name="dream_reasoner", hosts={"DreamModel": "Qwen3", "DreamForCausalLM": "Qwen3"}, named="dream-?reasoner", mask_id=151669,
        attention="block_causal", blocks="grid", block_length=32,
        sampler="sdar,block_length={L},denoising_steps={L},temperature=0.0,confidence_threshold=0.9",
    ),
    Family(
        name="dream", hosts={"DreamModel": "Qwen2"}, mask_tokens=("<|mask|>",), mask_id=151666, stop_ids=(151643,),
        attention="full", shift="global", blocks="whole", block_length=128, sampler="dream", chat_templates=(DREAM,),
    ),
    Family(
        name="open-dcoder", hosts={"Qwen2ForCausalLM": "Qwen2"}, named="open-?dcoder", mask_tokens=("<M>", "[MASK]"),
        attention="full", shift="global", blocks="whole", block_length=128, sampler="dream",
    ),
    Family(
        name="sdar", hosts={"SDARForCausalLM": "Qwen3"}, mask_tokens=("<|MASK|>",), mask_id=151669, stop_ids=(151645, 151643),
        attention="block_causal", blocks="grid", block_length=4, sampler="sdar,block_length={L},denoising_steps={L}",
        chat_templates=(QWEN3,),
    ),
    Family(
        name="sdar_moe", hosts={"SDARMoeForCausalLM": "Qwen3Moe"}, mask_tokens=("<|MASK|>",), mask_id=151669, stop_ids=(151645, 151643),
        attention="block_causal", blocks="grid", block_length=4, sampler="sdar,block_length={L},denoising_steps={L}",
        chat_templates=(QWEN3,),
    ),
    Family(
        name="stable_diffcoder", hosts={"StableDiffcoderForCausalLM": "Llama"}, mask_id=5,
        attention="block_causal", blocks="grid", block_length=4, cuts_last_block=True, sampler="llada,block_length={L},threshold=0.95",
    ),
    Family(
        name="fast_dllm_v2", hosts={"Fast_dLLM_QwenForCausalLM": "Qwen2"}, mask_tokens=("|<MASK>|",), mask_id=151665, stop_ids=(151645,),
        attention="block_causal", shift="block", blocks="grid", block_length=32, needs_seed=True, sampler="fast_dllm_v2,block_size={L}",
        chat_templates=(QWEN2_5,),
    ),
    Family(
        name="bd3lm", hosts=_A2D, named="bd3lm", mask_tokens=("<|mask|>",), stop_ids=(151645,),
        attention="block_causal", blocks="generated", block_length=32, hides_padding=True, sampler="bd3lm,block_size={L}",
        chat_templates=(QWEN3_NOT_THINKING, QWEN2_5),
    ),
    Family(
        name="a2d", hosts=_A2D, mask_tokens=("<|mask|>",), stop_ids=(151645,),
        attention="full", blocks="generated", block_length=32, sampler="mdlm,block_size={L}",
        chat_templates=(QWEN3_NOT_THINKING, QWEN2_5),
    ),
    Family(
        name="modernbert", hosts={"ModernBertForMaskedLM": "ModernBert"}, named="chat", encoder=True, mask_tokens=("[MASK]",),
        mask_id=50284, ends_with_padding=True, attention="full", blocks="generated", block_length=32, sampler="mdlm,block_size={L}",
        chat_templates=(BERT_CHAT,),
    ),
)  # fmt: skip


class _Refused(NamedTuple):
    """A kind of checkpoint that is known and not decoded: its architectures or its name, and why."""

    what: str
    architectures: tuple[str, ...]
    named: str | None
    why: str


_REFUSED = (
    _Refused("DiffusionGemma", ("DiffusionGemmaForBlockDiffusion",), None, "it renews random tokens and has no mask"),
    _Refused("LLaDA2.2", (), r"llada-?2[._]2", "it deletes and splits tokens, so a block's length changes while it is decoded"),
    _Refused("DreamOn", (), r"dreamon\b", "it inserts and deletes positions while it decodes"),
    _Refused("WeDLM", ("WeDLMForCausalLM",), None, "its logits depend on the order of the commits through a causal cache"),
    _Refused("a BD3-LM or MDLM of kuleshov-group", ("BD3LM", "MDLM"), None, "its positions unmask in random order"),
    _Refused("Nemotron-Labs-Diffusion", ("NemotronLabsDiffusionModel",), None, "its prefix is causal, its block is not"),
)  # fmt: skip


def find_family(config: Mapping[str, Any], model: str, family: str | None = None) -> Family:
    """Return the row for a raw config.json.

    Args:
        config: the file's contents; its first architecture decides.
        model: folder or hub id, whose last part decides where an architecture has several rows.
        family: name of a row, which then decides alone.

    Raises:
        ValueError: naming the architecture found, and why it is not supported or which ones are.
    """
    if family is not None:
        found = next((row for row in FAMILIES if row.name == family), None)
        if found is None:
            raise ValueError(f"family={family!r} is unknown; choose one of {', '.join(row.name for row in FAMILIES)}")
        return found
    architecture, name = _architecture(config), _last_part(model)
    for refused in _REFUSED:
        if architecture in refused.architectures or _finds(refused.named, name):
            raise ValueError(f"{model}: this is {refused.what} ({architecture}), which is not supported: {refused.why}")
    for row in FAMILIES:
        if architecture in row.hosts and (row.named is None or _finds(row.named, name)):
            return row
    if unnamed := [row for row in FAMILIES if architecture in row.hosts and row.encoder]:
        row = unnamed[0]
        raise ValueError(
            f"{model}: a {architecture} decodes only where it was tuned to: "
            f"its name must have {row.named!r} in it, or give family {row.name!r}"
        )
    if _is_autoregressive(architecture):
        raise ValueError(f"{model}: {architecture} is an autoregressive checkpoint, not a diffusion model")
    known = ", ".join(dict.fromkeys(name for row in FAMILIES if row.named is None for name in row.hosts))
    raise ValueError(f"{model}: architecture {architecture} is not supported; supported: {known}")


def chat_templates(family: Family, model: str) -> tuple[str, ...]:
    """Return the templates for a checkpoint without one; none for a base model, which has "base" in the last part of its name."""
    return () if _finds("base", _last_part(model)) else family.chat_templates


def _last_part(model: str) -> str:
    return model.rstrip("/").rpartition("/")[2]


def _architecture(config: Mapping[str, Any]) -> str:
    stated = config.get("architectures")
    return str(stated[0]) if isinstance(stated, list) and stated else "(none)"


def _finds(expression: str | None, name: str) -> bool:
    return expression is not None and re.search(expression, name, re.IGNORECASE) is not None


def _is_autoregressive(architecture: str) -> bool:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return architecture in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
