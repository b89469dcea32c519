"""Wall-clock speed: standard decoding, the baselines and SPOT on the same prompts, kernels and batches, interleaved in one process.

Every repetition runs all methods in turn, in an order that rotates, and every answer is compared with standard decoding's. `run` returns
the raw samples; `speed_figures.py` turns them into figures. Seconds mean something only on a quiet machine.

Example: `run(target, Plan(tasks=("json",), methods=(Method("chain", 4),)), {"chain": Chain()})`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from time import perf_counter
from typing import cast

import numpy as np
from jaxtyping import Int64

from spot_dlm.batch import Failed, Request, decode_batch
from spot_dlm.bench.speed_plan import PLAIN, STANDARD, Method, Plan, Setting
from spot_dlm.budget import AutoBudget, Budget, FixedBudget
from spot_dlm.compare import same_order
from spot_dlm.decode import automatic_budget
from spot_dlm.drafters import Root
from spot_dlm.interfaces import BatchTarget, Drafter, MaskedLogits, Prefix, Query, SeededTarget, Target, TargetSpec, WholeCanvasTarget
from spot_dlm.sequence import Finished, Result, check_prompt
from spot_dlm.stats import Counts
from spot_dlm.tasks import load_prompts


@dataclass(frozen=True)
class Sample:
    """One timed run: the prompts of one batch decoded by one method.

    `seconds` is the clock around everything, of which `prefill_s` went to the prompts; `problem` says why it is not what standard decoding
    gives.
    """

    setting: Setting
    method: Method
    unit: int
    repeat: int
    seconds: float
    prefill_s: float
    counts: Counts
    prompt_tokens: int = 0
    problem: str = ""

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by what they were spent on; they add up to `seconds`."""
        counts = self.counts
        known = {"target": counts.target_s - self.prefill_s, "draft": counts.draft_s, "noise_and_walk": counts.verify_s}
        return {"prefill": self.prefill_s} | known | {"host": self.seconds - self.prefill_s - sum(known.values())}


@dataclass
class Clock:
    """Seconds spent on measuring costs for automatic budgets, which are not decoding time."""

    tuning_s: float = 0.0


class Watched:
    """A target that knows how long its prefills took; otherwise the one it wraps."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.prefill_s = 0.0

    @property
    def spec(self) -> TargetSpec:
        """The wrapped target's."""
        return self.target.spec

    def prefill(self, token_ids: Int64[np.ndarray, " P"], block_length: int) -> Prefix:
        """Prefill, timed."""
        clock = perf_counter()
        prefix = self.target.prefill(token_ids, block_length)
        self.prefill_s += perf_counter() - clock
        return prefix

    def open_canvas(self, token_ids: Int64[np.ndarray, " P"], end: int) -> Prefix:
        """Open a canvas; takes no time worth the name."""
        return cast(WholeCanvasTarget, self.target).open_canvas(token_ids, end)

    def seed(self, prefix: Prefix) -> int:
        """Return the seed."""
        return cast(SeededTarget, self.target).seed(prefix)

    def evaluate(self, prefix: Prefix, canvases: Int64[np.ndarray, "N L"]) -> MaskedLogits:
        """Evaluate."""
        return self.target.evaluate(prefix, canvases)

    def evaluate_many(self, queries: Sequence[Query]) -> list[MaskedLogits]:
        """Evaluate together where the target can."""
        if isinstance(self.target, BatchTarget):
            return self.target.evaluate_many(queries)
        return [self.target.evaluate(*query) for query in queries]

    def commit(self, prefix: Prefix, token_ids: Int64[np.ndarray, " L"]) -> int:
        """Commit."""
        return self.target.commit(prefix, token_ids)

    def encode(self, text: str) -> list[int]:
        """Encode."""
        return self.target.encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decode."""
        return self.target.decode(token_ids)


def prompts_of(target: Target, plan: Plan, setting: Setting) -> list[list[int]]:
    """Return the token ids of a setting's prompts, each with as much filler in front as its prefix asks for; checked.

    Prompts are taken again from the first where the task has too few: their noise differs.

    Raises:
        ValueError: if the task has no prompts or one does not fit the target's context.
    """
    texts = [p.prompt for p in load_prompts(setting.task, plan.split)]
    head, tail = _frame(target)
    found = []
    for index in range(plan.num_prompts(setting)):
        own, filler = target.encode(texts[index % len(texts)]), list[int]()
        others = (texts[(index + k) % len(texts)] for k in range(1, setting.prefix + 2))
        while len(own) + len(filler) < setting.prefix:
            ids = target.encode(next(others))
            filler = ids[head : len(ids) - tail] + filler
        found.append(filler[len(filler) - max(0, setting.prefix - len(own)) :] + own)
        try:
            check_prompt(target.spec, found[-1], plan.params(setting, PLAIN))
        except ValueError as error:
            raise ValueError(f"{setting.task}, prefix {setting.prefix}: {error}") from error
    return found


def _frame(target: Target) -> tuple[int, int]:
    """Return how many ids the chat template puts before and after every text."""
    one, two = target.encode("Add 1."), target.encode("7")

    def shared(pairs: Iterator[tuple[int, int]]) -> int:
        return next((i for i, (a, b) in enumerate(pairs) if a != b), 0)

    return shared(zip(one, two, strict=False)), shared(zip(reversed(one), reversed(two), strict=False))


def run(
    target: Target,
    plan: Plan,
    drafters: Mapping[str, Drafter],
    on_sample: Callable[[Sample, float], None] = lambda *_: None,
    clock: Clock | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> list[Sample]:
    """Measure every setting; `on_sample` is called after every timed run, with the share of the work that is done.

    Args:
        target: the model.
        plan: what is measured.
        drafters: by name; methods whose drafter is not there are left out.
        on_sample: sees every sample.
        clock: receives the seconds of tuning.
        say: remarks.

    Raises:
        ValueError: if nothing is left to compare, or a prompt does not fit.
    """
    plan = replace(plan, methods=tuple(m for m in plan.methods if m.drafter in drafters))
    settings = [(s, prompts_of(target, plan, s)) for s in plan.settings(target.spec)]
    total = sum(plan.num_runs(s) * s.weight for s, _ in settings)
    bench = _Bench(Watched(target), plan, {**drafters, STANDARD: Root()}, clock or Clock(), say)
    samples: list[Sample] = []
    done = 0.0
    for setting, prompts in settings:
        for sample in bench.measure(setting, prompts):
            samples.append(sample)
            done += setting.weight
            on_sample(sample, done / total)
    return samples


@dataclass
class _Bench:
    """What all settings share."""

    target: Watched
    plan: Plan
    drafters: Mapping[str, Drafter]
    clock: Clock
    say: Callable[[str], None]
    _warm: set[tuple[int, int, int]] = field(default_factory=set)

    def measure(self, setting: Setting, prompts: list[list[int]]) -> Iterator[Sample]:
        """Run all methods on every batch, as often as the plan repeats, and yield the samples."""
        compared = self.plan.methods_of(setting)
        units = [prompts[i : i + setting.batch] for i in range(0, len(prompts), setting.batch)]
        shape = setting.block_length, setting.batch, setting.prefix
        if shape not in self._warm:  # first calls load and compile
            self._warm.add(shape)
            for method in compared:
                self._decode(setting, method, self.budget(setting, method, prompts[0]), units[0], 0, min(16, self.plan.max_new_tokens))
        budgets = {m: self.budget(setting, m, prompts[0]) for m in compared}
        references: dict[int, list[Result]] = {}
        for turn, (repeat, (unit, batch)) in enumerate(product(range(self.plan.repeats), enumerate(units))):
            shift = turn % len(compared)
            order = [*compared[shift:], *compared[:shift]]  # none always runs after the same one first
            runs = {m: self._decode(setting, m, budgets[m], batch, unit * setting.batch) for m in order}
            reference = references.setdefault(unit, runs[PLAIN][0])
            tokens = sum(map(len, batch))
            for method in order:
                results, seconds, prefill_s = runs[method]
                different = [str(i) for i, (a, b) in enumerate(zip(reference, results, strict=True)) if not same_order(a, b)]
                problem = f"prompts {', '.join(different)} of batch {unit} differ from standard decoding" if different else ""
                counts = sum((r.counts for r in results), Counts())
                yield Sample(setting, method, unit, repeat, seconds, prefill_s, counts, tokens, problem)

    def budget(self, setting: Setting, method: Method, prompt_ids: list[int]) -> Budget:
        """Return a fresh budget: it shares the measured costs with others, not what they have learned."""
        if method.nodes != "auto":
            return FixedBudget(method.nodes)
        began = perf_counter()
        params = self.plan.params(setting, method)
        budget = automatic_budget(self.target.target, self.drafters[method.drafter], prompt_ids, params, self.say)
        self.clock.tuning_s += perf_counter() - began
        return AutoBudget(budget.profile) if isinstance(budget, AutoBudget) else budget

    def _decode(
        self, setting: Setting, method: Method, budget: Budget, batch: list[list[int]], first: int, most: int | None = None
    ) -> tuple[list[Result], float, float]:
        """Decode one batch; return the results, the seconds and those of the prefills."""
        params = self.plan.params(setting, method)
        params = replace(params, max_new_tokens=most or params.max_new_tokens)
        requests = [Request(i, ids, replace(params, sequence=first + i)) for i, ids in enumerate(batch)]
        results: dict[int, Result] = {}
        most_cached = len(batch) * self.target.spec.max_length
        self.target.prefill_s = 0.0
        began = perf_counter()
        for number, event in decode_batch(self.target, requests, self.drafters[method.drafter], budget, len(batch), most_cached):
            if isinstance(event, Finished):
                results[number] = event.result
            elif isinstance(event, Failed):
                raise event.error
        seconds = perf_counter() - began
        return [results[i] for i in range(len(batch))], seconds, self.target.prefill_s
