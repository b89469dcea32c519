"""The model `spot` of lm-evaluation-harness: many requests in one pass, each with the tokens of standard decoding for its seed.

Importing this module registers the name. Example: `SpotLM(model="JetLM/SDAR-1.7B-Chat", nodes=8)`.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM, CacheHook
from lm_eval.api.registry import register_model
from lm_eval.utils import simple_parse_args_string
from tqdm import tqdm

from spot_dlm import artifacts
from spot_dlm.batch import Aborted, Batch, Failed, Request
from spot_dlm.bench.report import check_writable
from spot_dlm.cli.options import once, open_drafter, open_target
from spot_dlm.cli.show import provenance
from spot_dlm.drafters import build_drafter
from spot_dlm.integrations.lm_eval.answers import Answer, Passes, totals
from spot_dlm.integrations.lm_eval.arguments import Arguments, logger
from spot_dlm.integrations.lm_eval.prompts import Prompts
from spot_dlm.interfaces import SAMPLES_PER_PROMPT, DecodeParams
from spot_dlm.sequence import check_prompt

_BY_TASK = ("rule", "temperature", "top_k", "top_p", "max_new_tokens", "block_length", "stop")
"""What a task has a say in, of the provenance."""
_DEFAULT_DEVICE = "cuda:0"
_NO_LIKELIHOOD = (
    "the model spot answers generate_until only: a diffusion model has no probability of a text from left to right; choose tasks whose "
    "output_type is generate_until, not multiple_choice, loglikelihood or loglikelihood_rolling"
)


@dataclass(frozen=True)
class _Job:
    """One request, encoded and checked."""

    request: Instance
    where: str
    prompt_ids: list[int]
    params: DecodeParams
    answer: Answer


@register_model("spot")
class SpotLM(LM):  # type: ignore[misc]  # the harness has no types
    """A target with a drafter, as a model of the harness.

    Args:
        arguments: those of `Arguments`.

    Attributes:
        passes: what every request took so far.

    Raises:
        ValueError: for an unknown argument or a bad value, naming it.
    """

    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        self._arguments = Arguments.of(arguments)
        self._file = None if self._arguments.passes is None else Path(self._arguments.passes)
        check_writable(self._file)
        files = self._arguments.files
        build_drafter(self._arguments.drafter, graph=files.graph, file=files.file)  # a bad one shows before the target is loaded
        self._say = once(logger.warning)
        self._target = open_target(self._arguments.model, self._arguments.target)
        self._drafter = open_drafter(self._arguments.drafter, self._target.spec, files, self._say)
        self._prompts = Prompts.of(self._target, self._arguments.chat)
        self._device = self._target.spec.device
        self.batch_sizes = {0: self._arguments.together}
        self.passes: list[Passes] = []
        self._params: dict[str, DecodeParams] = {}  # of each task

    @classmethod
    def create_from_arg_obj(cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None) -> "SpotLM":
        """Make the model from `--model_args`, which come before --batch_size and --device; cuda:0 is what the harness says unasked."""
        given = {name: value for name, value in (additional_config or {}).items() if (name, value) != ("device", _DEFAULT_DEVICE)}
        return cls(**given | arg_dict)

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> "SpotLM":
        """Make the model from the text of `--model_args`."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @property
    def tokenizer_name(self) -> str:
        """What tells the harness's caches of prompts apart; it asks only where it applies the chat template, cached prompts or not."""
        self._prompts.begin_chat()
        return f"spot__{self._target.spec.name}__{self._target.spec.fingerprint}".replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Return the chat template, for the results.

        Raises:
            ValueError: for a template by name: there is one.
        """
        if isinstance(chat_template, str):
            raise ValueError(f"--apply_chat_template {chat_template}: the model has one chat template; leave out its name")
        return self._prompts.begin_chat() if chat_template else ""

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return a conversation in the chat template."""
        return self._prompts.render(chat_history, add_generation_prompt)

    def set_cache_hook(self, cache_hook: CacheHook) -> None:
        """Take the hook of --use_cache, which keeps one answer for each prompt.

        Raises:
            ValueError: where samples would differ without the harness knowing it.
        """
        if self._arguments.temperature:
            raise ValueError(
                f"--use_cache with model_args temperature={self._arguments.temperature:g} would give one answer for all samples of a "
                "prompt: give it as --gen_kwargs do_sample=true,temperature=X"
            )
        super().set_cache_hook(cache_hook)

    def loglikelihood(self, requests: list[Instance]) -> NoReturn:
        """Refuse.

        Raises:
            ValueError: always.
        """
        raise ValueError(_NO_LIKELIHOOD)

    def loglikelihood_rolling(self, requests: list[Instance]) -> NoReturn:
        """Refuse.

        Raises:
            ValueError: always.
        """
        raise ValueError(_NO_LIKELIHOOD)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Decode requests; all of them are checked before the first one is decoded.

        Raises:
            ValueError: naming the task and the document of a request that cannot be decoded.
        """
        jobs = self._jobs(requests)
        with tqdm(total=len(jobs), disable=disable_tqdm, desc="Running generate_until requests") as bar:
            self._decode(jobs, bar)
        done = [passes for job in jobs if (passes := job.answer.passes) is not None]
        self.passes += done
        if done:
            sums = totals(done)
            logger.info(
                f"{sums['requests']} requests took {sums['nfe']} passes with drafter {self._drafter.name}, standard decoding takes "
                f"{sums['nfe_standard']} ({sums['nfe_reduction']:.2f} times as many)"
            )
        if self._file is not None:
            artifacts.write_json(self._file, self.get_model_info() | {"requests": [asdict(p) for p in self.passes]})
        return [job.answer.text for job in jobs]

    def get_model_info(self) -> dict[str, Any]:
        """Return what the harness adds to `config` of its results: what decides the answers, and the passes so far."""
        arguments = self._arguments
        facts = {k: v for k, v in provenance(self._target, arguments.params({})).items() if k not in _BY_TASK}
        facts |= {"drafter": self._drafter.name, "nodes": arguments.nodes, "sampler": arguments.sampler, "strict": arguments.strict}
        tasks = dict.fromkeys(p.task for p in self.passes)
        said = {task: provenance(self._target, params) for task, params in self._params.items()}
        return {
            "spot": facts,
            "spot_by_task": {task: {name: about[name] for name in _BY_TASK} for task, about in said.items()},
            "passes": totals(self.passes),
            "passes_by_task": {task: totals([p for p in self.passes if p.task == task]) for task in tasks},
        }

    def _jobs(self, requests: Sequence[Instance]) -> list[_Job]:
        jobs: list[_Job] = []
        seen: Counter[tuple[str, int]] = Counter()
        if requests and self._prompts.is_bare and self._prompts.template:
            self._say("prompts are bare texts, and the model has a chat template: --apply_chat_template puts them in it")
        for request in requests:
            context, asked = request.args[:2]
            task, doc_id = str(request.task_name), int(request.doc_id or 0)
            where = f"task {task}, document {doc_id}"
            try:
                until = asked.get("until") or []
                until = [until] if isinstance(until, str) else list(until)
                key = doc_id * SAMPLES_PER_PROMPT + seen[task, doc_id]
                params = replace(self._arguments.params(asked), sequence=key)
                prompt_ids = self._prompts.encode(context)
                check_prompt(self._target.spec, prompt_ids, params)
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from error
            seen[task, doc_id] += 1
            self._params[task] = params
            jobs.append(_Job(request, where, prompt_ids, params, Answer(self._target, len(prompt_ids), params, until, task, doc_id)))
        return jobs

    def _decode(self, jobs: Sequence[_Job], bar: Any) -> None:
        """Decode jobs, some at a time; one that ends at a stop string leaves the batch."""
        room = self._arguments.together
        batch: Batch[int] = Batch(self._target, self._drafter, max_requests=room, say=self._say)
        ended: set[int] = set()
        coming = iter(range(len(jobs)))
        while len(ended) < len(jobs):
            while batch.num_live + batch.num_waiting < room and (number := next(coming, None)) is not None:
                batch.add(Request(number, jobs[number].prompt_ids, jobs[number].params))
            for number, event in batch.step():
                job = jobs[number]
                if isinstance(event, Failed):
                    raise ValueError(f"{job.where}: {event.error}") from event.error
                if number in ended or isinstance(event, Aborted) or not job.answer.take(event):
                    continue
                ended.add(number)
                batch.abort(number)
                self.cache_hook.add_partial("generate_until", job.request.args, job.answer.text)
                bar.update(1)
