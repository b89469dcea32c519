"""Accuracy against speed: standard decoding, the lossy rules that commit several positions at once, and speculation on top of either.

All methods run on the same prompts, seeds and target, interleaved in one process; every row is evaluated truly. Seconds are medians over
the repeats, so they mean something only on a quiet machine.

Example: `run(target, Plan(tasks=("json",), limit=2), print)`.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from spot_dlm.bench.bootstrap import accuracy
from spot_dlm.compare import same_order
from spot_dlm.decode import generate
from spot_dlm.drafters import Root, build_drafter
from spot_dlm.interfaces import DecodeParams, Drafter, Target
from spot_dlm.rules import parse_rule
from spot_dlm.sequence import Result, check_prompt
from spot_dlm.tasks import SPLITS, TASKS, TaskPrompt, grade, load_prompts
from spot_dlm.transition import Sampling

LOSSY_RULES = ("k=2", "k=4", "k=8", "threshold=0.9", "threshold=0.7")
STANDARD = "standard"
ALL_TASKS = "all"


@dataclass(frozen=True)
class Method:
    """A rule and how its states are guessed; drafter None evaluates one state per pass."""

    rule: str
    drafter: str | None = None

    @property
    def label(self) -> str:
        """Name in tables."""
        return self.rule if self.drafter is None else f"{self.drafter} on {self.rule}"


@dataclass(frozen=True)
class Plan:
    """What is measured.

    Args:
        base: drafter on standard decoding; None leaves it out.
        on_threshold: drafter on top of `threshold=0.9`; None leaves it out.
        repeats: timed runs of every method and prompt.

    Raises:
        ValueError: naming the field, the value and what is allowed.
    """

    tasks: tuple[str, ...] = ("json", "python", "arithmetic", "rewrite")
    split: str = "heldout_values"
    limit: int = 10
    temperatures: tuple[float, ...] = (0.0,)
    rules: tuple[str, ...] = LOSSY_RULES
    nodes: int = 8
    base: str | None = "chain"
    on_threshold: str | None = "chain"
    block_length: int | None = None
    max_new_tokens: int = 128
    seed: int = 0
    repeats: int = 3

    def __post_init__(self) -> None:
        for name, values, allowed in (("task", self.tasks, TASKS), ("split", (self.split,), SPLITS)):
            for value in values:
                if value not in allowed:
                    raise ValueError(f"{name}={value!r} is unknown; choose one of {', '.join(allowed)}")
        for name, axis in (("task", self.tasks), ("temperature", self.temperatures)):
            if not axis:
                raise ValueError(f"{name} is empty; give at least one")
        for name in ("limit", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for drafter in (self.base, self.on_threshold):
            if drafter is not None:
                build_drafter(drafter)
        for method, temperature in product(self.methods, self.temperatures):
            self.params(method, temperature)

    @property
    def methods(self) -> tuple[Method, ...]:
        """Standard decoding first, then the lossy rules, then speculation."""
        found = [Method(STANDARD), *(Method(r) for r in self.rules if r != STANDARD)]
        found += [] if self.base is None else [Method(STANDARD, self.base)]
        if self.on_threshold is not None:
            found += [m for m in (Method("threshold=0.9"),) if m not in found] + [Method("threshold=0.9", self.on_threshold)]
        return tuple(found)

    def params(self, method: Method, temperature: float) -> DecodeParams:
        """Return the parameters of a method."""
        sampling = Sampling(temperature=temperature, seed=self.seed)
        nodes = 1 if method.drafter is None else self.nodes
        return DecodeParams(parse_rule(method.rule), sampling, self.max_new_tokens, nodes, self.block_length)


@dataclass(frozen=True)
class Answer:
    """One prompt decoded by one method: seconds of every repeat, and whether it is what its own rule gives without speculation."""

    task: str
    temperature: float
    method: Method
    prompt: str
    result: Result
    seconds: tuple[float, ...]
    is_right: bool | None
    same_answer: bool
    identical: bool


def count_answers(plan: Plan) -> int:
    """Return how many answers a plan is: prompts x temperatures x methods."""
    return len(plan.methods) * len(plan.temperatures) * sum(len(load_prompts(task, plan.split, plan.limit)) for task in plan.tasks)


def run(target: Target, plan: Plan, on_answer: Callable[[Answer], None] = lambda _: None) -> list[Answer]:
    """Decode everything; `on_answer` is called once for every prompt, temperature and method.

    Raises:
        ValueError: if a prompt does not fit the target's context.
    """
    prompts = [(task, i, p) for task in plan.tasks for i, p in enumerate(load_prompts(task, plan.split, plan.limit))]
    for _, _, prompt in prompts:
        try:
            check_prompt(target.spec, target.encode(prompt.prompt), plan.params(Method(STANDARD), 0.0))
        except ValueError as error:
            raise ValueError(f"{prompt.id}: {error}") from error
    drafters: dict[str | None, Drafter] = {None: Root()}
    drafters |= {name: build_drafter(name) for name in (plan.base, plan.on_threshold) if name is not None}
    for method in plan.methods:  # first calls load and compile
        warm_up = replace(plan.params(method, max(plan.temperatures)), max_new_tokens=min(plan.max_new_tokens, 16))
        generate(target, prompts[0][2].prompt, drafters[method.drafter], warm_up)
    answers: list[Answer] = []
    for task, index, prompt in prompts:
        for temperature in plan.temperatures:
            for answer in _answers(target, plan, drafters, task, index, prompt, temperature):
                answers.append(answer)
                on_answer(answer)
    return answers


def _answers(
    target: Target, plan: Plan, drafters: dict[str | None, Drafter], task: str, index: int, prompt: TaskPrompt, temperature: float
) -> list[Answer]:
    """Decode one prompt by all methods in turn, as often as the plan repeats."""
    results: dict[Method, Result] = {}
    seconds: dict[Method, list[float]] = {m: [] for m in plan.methods}
    for repeat in range(plan.repeats):
        shift = repeat % len(plan.methods)
        for method in (*plan.methods[shift:], *plan.methods[:shift]):  # no method always runs after the same one first
            params = replace(plan.params(method, temperature), sequence=index)
            results[method] = generate(target, prompt.prompt, drafters[method.drafter], params)
            seconds[method].append(results[method].counts.total_s)
    graded = {text: grade(prompt, text) for text in {r.text for r in results.values()}}
    standard = results[Method(STANDARD)]
    return [
        Answer(
            task, temperature, method, prompt.id, result, tuple(seconds[method]), graded[result.text],
            result.token_ids == standard.token_ids, same_order(result, results[Method(method.rule)]),
        )
        for method, result in ((m, results[m]) for m in plan.methods)
    ]  # fmt: skip


def rows(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """Return one row per task, temperature and method, and those of all tasks together where there are several."""
    found = _rows(answers)
    if len({a.task for a in answers}) > 1:
        found += _rows([replace(a, task=ALL_TASKS) for a in answers])
    return found


def _rows(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    groups: dict[tuple[str, float, Method], list[Answer]] = {}
    for answer in answers:
        groups.setdefault((answer.task, answer.temperature, answer.method), []).append(answer)
    found = []
    for (task, temperature, method), group in groups.items():
        plain = groups[task, temperature, Method(STANDARD)]
        tokens, nfe = (sum(getattr(a.result.counts, field) for a in group) for field in ("tokens", "nfe"))
        found.append(
            {
                "task": task,
                "temperature": temperature,
                "method": method.label,
                "rule": method.rule,
                "drafter": method.drafter,
                "prompts": len(group),
                **accuracy([a.is_right for a in group]),
                "same_answers": sum(a.same_answer for a in group) / len(group),
                "identical_to_rule": all(a.identical for a in group),
                "tokens": tokens,
                "nfe": nfe,
                "tokens_per_pass": tokens / nfe,
                "seconds": _seconds(group),
                "seconds_per_token": _seconds(group) / tokens,
                "speed_up": _speed_up(plain, group),
            }
        )
    return found


def _totals(group: Sequence[Answer]) -> list[float]:
    """Return the seconds of all prompts, once for every repeat."""
    return [sum(repeat) for repeat in zip(*(a.seconds for a in group), strict=True)]


def _seconds(group: Sequence[Answer]) -> float:
    return statistics.median(_totals(group))


def _speed_up(plain: Sequence[Answer], group: Sequence[Answer]) -> float:
    """Return the median over the repeats of the ratio within a repeat, where both ran under the same conditions."""
    return statistics.median(a / b for a, b in zip(_totals(plain), _totals(group), strict=True))
