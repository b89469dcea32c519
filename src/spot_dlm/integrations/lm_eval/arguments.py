"""What `--model_args` may say, and what a request of the harness asks for, as parameters of decoding.

Names and meanings are those of the options of `spot generate`. Example: `Arguments.of({"nodes": 8}).params({"until": ["Q:"]})`.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, get_args, get_type_hints

from lm_eval.models.utils import normalize_gen_kwargs

from spot_dlm.batch import MAX_REQUESTS
from spot_dlm.cli import options as o
from spot_dlm.hub import find_drafter
from spot_dlm.interfaces import DecodeParams
from spot_dlm.presets import parse_sampler

logger = logging.getLogger("lm_eval.models.spot")  # of the harness, which shows remarks of its own only
_say_once = o.once(logger.warning)

_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_ASKED = ("until", *_LENGTHS, "do_sample", "temperature", "top_p", "top_k", "num_beams")
_KINDS = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}


@dataclass(frozen=True)
class Arguments:
    """The model arguments; each stands for the option of that name of `spot generate`, except the last five.

    Args:
        chat: wrap a prompt in the chat template as a user's message, as `spot generate` does; instead of --apply_chat_template.
        max_gen_toks: tokens at most, where a task does not say.
        batch_size: requests that share a pass; "auto" is 16.
        max_batch_size: at most so many, where it is "auto".
        passes: file for the passes that each request took.

    Raises:
        ValueError: naming the argument, the value and what is allowed.
    """

    model: str = "shipped"
    family: str | None = None
    cache: str = "exact"
    drafter: str = o.DEFAULT_DRAFTER
    nodes: int | str = o.DEFAULT_NODES
    graph: str | None = None
    drafter_file: str | None = None
    transfer: bool = False
    rule: str = o.DEFAULT_RULE
    sampler: str | None = None
    block_length: int | None = None
    stop: str = "block"
    temperature: float | None = None
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    dtype: str | None = None
    device: str | None = None
    threads: int | None = None
    strict: int = 1
    chat: bool = False
    max_gen_toks: int = 256
    batch_size: int | str = "auto"
    max_batch_size: int | None = None
    passes: str | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "Arguments":
        """Read what the harness's command made of `--model_args`; `pretrained` is another name of `model`."""
        given = {name: value for name, value in given.items() if value is not None}
        if "pretrained" in given:
            if "model" in given:
                raise ValueError(f"model_args: model={given['model']} and pretrained={given['pretrained']} are the same argument: give one")
            given["model"] = given.pop("pretrained")
        known = [f.name for f in fields(cls)]
        unknown = [name for name in given if name not in known]
        if unknown:
            raise ValueError(f"model_args: {', '.join(unknown)} unknown; the model spot knows {', '.join(known)}")
        hints = get_type_hints(cls)
        arguments = cls(**{name: _kind(name, value, hints[name]) for name, value in given.items()})
        o.check_strict(arguments.strict, str(arguments.nodes))
        for name in ("max_gen_toks", "max_batch_size"):
            value = getattr(arguments, name)
            if value is not None and value < 1:
                raise ValueError(f"model_args: {name}={value} must be at least 1")
        arguments.params({})
        assert arguments.together
        return arguments

    @property
    def together(self) -> int:
        """Requests that share a pass."""
        size = str(self.batch_size)
        if size == "auto" or size.startswith("auto:"):
            return min(MAX_REQUESTS, self.max_batch_size or MAX_REQUESTS)
        if not size.isdigit() or int(size) < 1:
            raise ValueError(f"batch_size={size} must be 'auto' or a whole number of at least 1")
        return int(size)

    @property
    def target(self) -> o.TargetOptions:
        """How the target is loaded; prompts are encoded by the harness's rules (`prompts`)."""
        return o.TargetOptions(self.dtype, self.device, self.threads, False, self.strict, self.family, self.cache)

    @property
    def files(self) -> o.DrafterFiles:
        """Files of the drafter, fetched where they are hub ids."""
        graph, file = (None if name is None else find_drafter(name) for name in (self.graph, self.drafter_file))
        return o.DrafterFiles(graph, file, self.transfer)

    def params(self, asked: Mapping[str, Any]) -> DecodeParams:
        """Return the parameters for the `generation_kwargs` of a request, which come before the model arguments.

        Raises:
            ValueError: for what is not offered.
        """
        unknown = [name for name in asked if name not in _ASKED]
        if unknown or asked.get("num_beams", 1) != 1:
            what = ", ".join(unknown) or f"num_beams={asked['num_beams']}"
            raise ValueError(f"generation_kwargs: {what} not offered by the model spot, which knows {', '.join(_ASKED[:-1])}")
        length = int(normalize_gen_kwargs(dict(asked), self.max_gen_toks)["max_gen_toks"])
        top_p, top_k = float(asked.get("top_p", self.top_p)), int(asked.get("top_k", self.top_k))
        temperature = self._temperature(asked)
        if self.sampler is None:
            return o.decode_params(
                temperature=temperature, top_p=top_p, top_k=top_k, seed=self.seed, rule=self.rule, max_new_tokens=length,
                nodes=str(self.nodes), block_length=self.block_length, stop=self.stop,
            )  # fmt: skip
        own = parse_sampler(self.sampler, max_new_tokens=length)
        says_temperature = "temperature=" in self.sampler.replace(" ", "")
        params = o.decode_params(
            temperature=None if says_temperature else temperature, top_p=top_p, top_k=top_k, seed=self.seed, rule=self.rule,
            max_new_tokens=length, nodes=str(self.nodes), block_length=self.block_length, stop=self.stop, sampler=self.sampler,
        )  # fmt: skip
        if own.max_new_tokens != length and any(name in asked for name in _LENGTHS):
            _say_once(f"the sampler's length of {own.max_new_tokens} tokens is used; the task says {length}")
        return params

    def _temperature(self, asked: Mapping[str, Any]) -> float | None:
        """Return the temperature: the task's, else that of the model arguments; None where nobody says it (0, or the sampler's own)."""
        said = asked.get("temperature")
        if asked.get("do_sample") is False:
            said = 0.0
        elif said is None and asked.get("do_sample"):
            said = 1.0 if self.temperature is None else self.temperature
        if said is None:
            return self.temperature
        if not isinstance(said, int | float) or not math.isfinite(said):
            raise ValueError(f"generation_kwargs: temperature={said!r} must be a number")
        if self.temperature is not None and said != self.temperature:
            _say_once(
                f"the task's temperature {said:g} is used, not temperature={self.temperature:g} of model_args; "
                "--gen_kwargs do_sample=true,temperature=X comes before both"
            )
        return float(said)


def _kind(name: str, value: Any, hint: Any) -> Any:
    """Return a value in its argument's type; the harness makes numbers of what looks like one."""
    kinds = [kind for kind in get_args(hint) or (hint,) if kind is not type(None)]
    if type(value) in kinds:
        return value
    if float in kinds and type(value) is int:
        return float(value)
    if str in kinds and type(value) in (int, float):
        return str(value)
    raise ValueError(f"model_args: {name}={value!r} must be {' or '.join(_KINDS[kind] for kind in kinds)}")
