"""What the speed benchmark measures: methods (a drafter and its node budget), settings, and the plan that multiplies them.

Knows nothing of clocks. Example: `Plan(tasks=("json",), methods=tuple(methods(["chain"], [4])))`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

from spot_dlm.bench.drafters import SPIFFY, SPIFFY_VARIANTS
from spot_dlm.drafters import DRAFTERS
from spot_dlm.interfaces import DecodeParams, TargetSpec
from spot_dlm.rules import parse_rule
from spot_dlm.tasks import SPLITS, TASKS
from spot_dlm.transition import Sampling

Nodes = int | Literal["auto"]

STANDARD = "root"
INSIDE = "-inside"
"""Ending of a drafter's name that stands for guesses inside the block only (no boundary drafting)."""
NAMES = (*(n for n in DRAFTERS if n != STANDARD), SPIFFY, "order" + INSIDE)


@dataclass(frozen=True)
class Method:
    """A drafter and its node budget."""

    drafter: str
    nodes: Nodes = 1
    boundary: bool = True

    @property
    def label(self) -> str:
        """Name in the rows."""
        return self.drafter + ("" if self.boundary else INSIDE)

    @property
    def family(self) -> str:
        """What it is a variant of."""
        return SPIFFY if self.drafter in SPIFFY_VARIANTS else self.label

    def serves(self, temperature: float) -> bool:
        """Whether it is another method than the coupled one of the same drafter: uncoupled guesses are the same without noise."""
        return temperature > 0 or "published" not in self.drafter


PLAIN = Method(STANDARD)


def methods(names: Sequence[str], nodes: Sequence[Nodes]) -> list[Method]:
    """Return the methods of these drafters at all these budgets; `spiffy` stands for its variants, standard decoding is no method.

    Raises:
        ValueError: for an unknown name.
    """
    found: list[Method] = []
    for name in names:
        if name not in (*NAMES, *DRAFTERS, *(n + INSIDE for n in DRAFTERS)):
            raise ValueError(f"drafter={name!r} is unknown; choose one of {', '.join(NAMES)}")
        for variant in SPIFFY_VARIANTS if name == SPIFFY else (name.removesuffix(INSIDE),):
            found += [Method(variant, n, not name.endswith(INSIDE)) for n in nodes]
    return list(dict.fromkeys(m for m in found if m.drafter != STANDARD))


@dataclass(frozen=True)
class Setting:
    """What is measured together: one line of the result for each method."""

    task: str
    temperature: float
    rule: str
    block_length: int
    batch: int
    prefix: int

    @property
    def weight(self) -> float:
        """Rough work of one run, for the time left."""
        return self.batch * (1 + self.prefix / 1024)


@dataclass(frozen=True)
class Plan:
    """The product of all axes, each measured with all methods.

    Args:
        tasks: whose held-out prompts are decoded.
        methods: what is compared with standard decoding.
        split: of the held-out prompts.
        limit: prompts of each task; whole batches are decoded, at least one.
        temperatures: of the sampling.
        rules: unmask rules.
        block_lengths: tokens of a block; None stands for the target's own.
        batches: prompts that share a pass.
        prefixes: tokens of the prompt, filled up in front with other prompts of the task; 0 adds nothing.
        max_new_tokens: tokens to return at most.
        repeats: timed runs of every method.
        seed: of the noise.

    Raises:
        ValueError: naming the field, the value and what is allowed.
    """

    tasks: tuple[str, ...]
    methods: tuple[Method, ...]
    split: str = "heldout_values"
    limit: int = 4
    temperatures: tuple[float, ...] = (0.0, 1.0)
    rules: tuple[str, ...] = ("standard", "bfloat16")
    block_lengths: tuple[int | None, ...] = (None,)
    batches: tuple[int, ...] = (1, 4, 16)
    prefixes: tuple[int, ...] = (64, 512, 2048)
    max_new_tokens: int = 128
    repeats: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        for name, values, allowed in (("task", self.tasks, TASKS), ("split", (self.split,), SPLITS)):
            for value in values:
                if value not in allowed:
                    raise ValueError(f"{name}={value!r} is unknown; choose one of {', '.join(allowed)}")
        axes: dict[str, Sequence[object]] = {
            "task": self.tasks, "drafter": self.methods, "temperature": self.temperatures, "rule": self.rules,
            "block_length": self.block_lengths, "batch": self.batches, "prefix": self.prefixes,
        }  # fmt: skip
        for name, axis in axes.items():
            if not axis:
                raise ValueError(f"{name} is empty; give at least one")
            if len(set(axis)) < len(axis):
                raise ValueError(f"{name}={list(axis)} names a value twice")
        least = [("limit", self.limit, 1), ("repeats", self.repeats, 1), *(("batch", b, 1) for b in self.batches)]
        for name, number, minimum in [*least, *(("prefix", p, 0) for p in self.prefixes)]:
            if number < minimum:
                raise ValueError(f"{name}={number} must be at least {minimum}")
        for temperature, rule, length, method in product(self.temperatures, self.rules, self.block_lengths, self.methods):
            self._params(temperature, rule, length, method)

    def settings(self, spec: TargetSpec) -> list[Setting]:
        """Return the product of the axes."""
        lengths = [length or spec.block_length for length in self.block_lengths]
        axes = product(lengths, self.batches, self.prefixes, self.rules, self.temperatures, self.tasks)
        return [Setting(task, temperature, rule, length, batch, prefix) for length, batch, prefix, rule, temperature, task in axes]

    def params(self, setting: Setting, method: Method) -> DecodeParams:
        """Return the parameters of a method in a setting."""
        return self._params(setting.temperature, setting.rule, setting.block_length, method)

    def methods_of(self, setting: Setting) -> list[Method]:
        """Return what a setting compares, standard decoding first."""
        return [PLAIN, *(m for m in self.methods if m.serves(setting.temperature))]

    def num_prompts(self, setting: Setting) -> int:
        """Return how many prompts a setting decodes: whole batches, at least one."""
        return max(1, self.limit // setting.batch) * setting.batch

    def num_runs(self, setting: Setting) -> int:
        """Return how many timed runs a setting is."""
        return self.num_prompts(setting) // setting.batch * self.repeats * len(self.methods_of(setting))

    def _params(self, temperature: float, rule: str, length: int | None, method: Method) -> DecodeParams:
        sampling = Sampling(temperature=temperature, seed=self.seed)
        return DecodeParams(parse_rule(rule), sampling, self.max_new_tokens, method.nodes, length, boundary=method.boundary)
