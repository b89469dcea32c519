"""From a request's body to what is decoded: prompts as ids, parameters, stop strings, all checked against the target.

Example: `Jobs(target.spec, Prompts.of(target), settings, "order").chat(body).samples[0].params`.
"""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from spot_dlm import __version__
from spot_dlm.interfaces import SAMPLES_PER_PROMPT, DecodeParams, TargetSpec
from spot_dlm.presets import parse_sampler
from spot_dlm.rules import parse_rule
from spot_dlm.sequence import check_prompt
from spot_dlm.server.errors import ApiError
from spot_dlm.server.prompts import Prompts
from spot_dlm.server.schema import Asked, read_chat, read_completion
from spot_dlm.server.settings import Settings
from spot_dlm.transition import Sampling

T = TypeVar("T")

_LONGEST_BLOCK, _MOST_STEPS = 256, 4096


@dataclass(frozen=True)
class Sample:
    """One sequence to decode."""

    prompt_ids: list[int]
    params: DecodeParams
    stops: tuple[str, ...] = ()
    wants_order: bool = False
    wants_passes: bool = False


@dataclass(frozen=True)
class Job:
    """One request: its samples in the order of the choices, and how it is answered."""

    kind: Literal["chat", "completion"]
    samples: tuple[Sample, ...]
    num_prompt_tokens: int
    seed: int
    stream: bool
    include_usage: bool


class Jobs:
    """Reads requests; not thread-safe.

    Args:
        spec: the target's.
        prompts: encodes texts.
        settings: limits and defaults.
        drafter: the name of the server's drafter.
    """

    def __init__(self, spec: TargetSpec, prompts: Prompts, settings: Settings, drafter: str) -> None:
        self._spec, self._prompts, self._settings, self._drafter = spec, prompts, settings, drafter

    @property
    def fingerprint(self) -> str:
        """What makes the answers, for clients: version and weights."""
        return f"spot-{__version__}-{self._spec.fingerprint}"

    @property
    def default_params(self) -> DecodeParams:
        """The parameters of a request that says none.

        Raises:
            ApiError: if the server's defaults do not fit together or the target.
        """
        return self._params(Asked(model=self._settings.name), 0)

    def chat(self, body: bytes) -> Job:
        """Return the job of a chat request.

        Raises:
            ApiError: 400 or 404, naming what is wrong.
        """
        asked = read_chat(body)
        return self._job("chat", asked, lambda: [self._prompts.chat(asked.conversation)], 1)

    def completion(self, body: bytes) -> Job:
        """Return the job of a completion request.

        Raises:
            ApiError: 400 or 404, naming what is wrong.
        """
        asked = read_completion(body)
        prompts = asked.prompts
        return self._job("completion", asked, lambda: [self._prompts.bare(p) if isinstance(p, str) else p for p in prompts], len(prompts))

    def _job(self, kind: Literal["chat", "completion"], asked: Asked, encode: Callable[[], list[list[int]]], num_prompts: int) -> Job:
        """Check everything that costs little first."""
        if asked.model != self._settings.name:
            raise ApiError(404, f"this server has one model, {self._settings.name!r}", "model", "model_not_found")
        count, most = asked.n or 1, min(self._settings.max_samples, self._settings.capacity)
        if count * num_prompts > most:
            field = "n" if count > most else "prompt"
            raise ApiError(400, f"{field}: a request may ask for {most} answers, prompts times n; got {count * num_prompts}", field)
        seed = secrets.randbits(32) if asked.seed is None else asked.seed
        params, stops = self._params(asked, seed), tuple(asked.stops)
        prompts, own = encode(), asked.own
        for ids in prompts:
            self._check(ids, params)
        samples = tuple(
            Sample(ids, replace(params, sequence=number * SAMPLES_PER_PROMPT + i), stops, bool(own.return_order), bool(own.return_passes))
            for number, ids in enumerate(prompts)
            for i in range(count)
        )
        usage = bool(asked.stream_options and asked.stream_options.include_usage)
        return Job(kind, samples, sum(map(len, prompts)), seed, bool(asked.stream), usage)

    def _params(self, asked: Asked, seed: int) -> DecodeParams:
        """Return the parameters; text after the first end token is not wanted, so decoding ends there (`stop="prefix"`)."""
        own, defaults = asked.own, self._settings.defaults
        if own.rule is not None and own.sampler is not None:
            raise ApiError(400, "spot.sampler: spot.rule says what it would; give one of them", "spot.sampler")
        sampler = own.sampler if own.sampler is not None else defaults.sampler if own.rule is None else None
        if sampler is None:
            sampling = _checked(
                "temperature",
                lambda: Sampling(
                    _or(asked.temperature, defaults.temperature or 0.0),
                    _or(own.top_k, defaults.top_k),
                    _or(asked.top_p, defaults.top_p),
                    seed,
                ),
            )
            rule = _checked("spot.rule", lambda: parse_rule(_or(own.rule, defaults.rule)))
            chosen = DecodeParams(rule, sampling, _or(asked.max_tokens, defaults.max_tokens), block_length=defaults.block_length)
        else:
            chosen = self._sampler(sampler, asked, seed)
        chosen = replace(chosen, stop="prefix", nodes=self._nodes(asked))
        self._check_rule(chosen, "spot.sampler" if sampler is not None else "spot.rule")
        return chosen

    def _sampler(self, text: str, asked: Asked, seed: int) -> DecodeParams:
        """Return an official sampler's parameters; what the request says and the sampler does otherwise, or not at all, is refused."""
        defaults = self._settings.defaults
        said = {"temperature": asked.temperature, "top_p": asked.top_p, "top_k": asked.own.top_k, "max_new_tokens": asked.max_tokens}
        common = {name: value for name, value in said.items() if value is not None}
        if asked.temperature is None and defaults.temperature is not None:
            common["temperature"] = defaults.temperature
        chosen = _checked("spot.sampler", lambda: parse_sampler(text, **{"max_new_tokens": defaults.max_tokens} | common))
        sampling = chosen.sampling
        found = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
        found["max_new_tokens"] = chosen.max_new_tokens
        for name, value in said.items():
            draws = name not in ("top_p", "top_k") or sampling.temperature > 0
            if value is not None and value != found[name] and draws:
                field = {"top_k": "spot.top_k", "max_new_tokens": "max_tokens"}.get(name, name)
                raise ApiError(400, f"{field}: the sampler {text.partition(',')[0]!r} says {found[name]:g} or does not know it", field)
        return replace(chosen, sampling=replace(sampling, seed=seed))

    def _nodes(self, asked: Asked) -> int | Literal["auto"]:
        own, settings = asked.own, self._settings
        nodes = settings.defaults.nodes if own.nodes is None else own.nodes
        known = dict.fromkeys(("auto", self._drafter, "root"))
        if own.drafter is not None and own.drafter not in known:
            raise ApiError(400, f"spot.drafter: this server has {', '.join(known)}", "spot.drafter")
        fixed = isinstance(nodes, int) and not isinstance(nodes, bool) and 1 <= nodes <= settings.max_nodes
        if not fixed and (nodes != "auto" or settings.needs_fixed_nodes):
            alternative = "" if settings.needs_fixed_nodes else ' or "auto"'
            raise ApiError(400, f"spot.nodes: must be a whole number from 1 to {settings.max_nodes}{alternative}", "spot.nodes")
        return 1 if own.drafter == "root" else nodes

    def _check_rule(self, params: DecodeParams, field: str) -> None:
        """Refuse numbers that no decoding needs and that cost memory or time."""
        rule, spec, steps = params.rule, self._spec, 1 if params.rule.schedule is None else params.rule.schedule.steps
        whole = (rule.num_per_step, rule.span, steps, params.block_length or 1, params.sampling.top_k, *rule.late_ids, *rule.suppressed_ids)
        if not all(isinstance(number, int) and not isinstance(number, bool) for number in whole):
            raise ApiError(400, f"{field}: lengths, steps and ids must be whole numbers", field)
        longest = max(_LONGEST_BLOCK, spec.block_length, self._settings.defaults.block_length or 0)
        if params.block_length is not None and params.block_length > longest:
            raise ApiError(400, f"{field}: a block may have {longest} tokens", field)
        if max(rule.num_per_step, rule.span) > spec.max_length or steps > _MOST_STEPS:
            raise ApiError(400, f"{field}: more positions than the context holds, or more than {_MOST_STEPS} steps", field)
        if not all(0 <= i < spec.vocab_size for i in (*rule.late_ids, *rule.suppressed_ids)):
            raise ApiError(400, f"{field}: token ids lie in 0..{spec.vocab_size - 1}", field)

    def _check(self, prompt_ids: Sequence[int], params: DecodeParams) -> None:
        try:
            check_prompt(self._spec, prompt_ids, params)
        except ValueError as error:
            code = "context_length_exceeded" if "context holds" in str(error) else None
            raise ApiError(400, str(error).replace("max_new_tokens", "max_tokens"), code=code) from None


def _or(value: T | None, default: T) -> T:
    return default if value is None else value


def _checked(field: str, make: Callable[[], T]) -> T:
    try:
        return make()
    except ApiError:
        raise
    except Exception as error:  # a sampler's own arithmetic raises whatever it likes
        words = str(error) if isinstance(error, ValueError) else "is no such thing"
        raise ApiError(400, f"{field}: {words}", field) from None
