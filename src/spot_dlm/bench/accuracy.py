"""Standard and speculative decoding of the same prompts with the same noise, side by side: right answers, equal answers, passes, seconds.

Both run in one process, in turns, group by group, so seconds compare as well as the machine is quiet. Knows nothing of files and tables.

Example: `rows(run(target, questions, drafter))[-1]["same_answers"]` is 1.0.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from spot_dlm.batch import Failed, Request, decode_batch
from spot_dlm.bench.bootstrap import accuracy
from spot_dlm.budget import Budget, FixedBudget
from spot_dlm.compare import same_order
from spot_dlm.decode import automatic_budget, generate
from spot_dlm.drafters import Root
from spot_dlm.interfaces import DecodeParams, Drafter, Target
from spot_dlm.sequence import Finished, Result
from spot_dlm.tasks import TaskPrompt, grade

ALL = "all"
_WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class Question:
    """A prompt of a source (a task, a file), encoded, with its own parameters; `task` grades its answers, None leaves them ungraded."""

    source: str
    id: str
    prompt_ids: list[int]
    params: DecodeParams
    task: TaskPrompt | None


@dataclass(frozen=True)
class Pair:
    """Both answers to a question, and whether each is right (None where no program can say)."""

    question: Question
    standard: Result
    speculative: Result
    standard_right: bool | None
    speculative_right: bool | None

    @property
    def same_answer(self) -> bool:
        """Whether both have the same tokens."""
        return self.standard.token_ids == self.speculative.token_ids

    @property
    def same_order(self) -> bool:
        """Whether these were committed in the same steps, too, and both end alike."""
        return same_order(self.standard, self.speculative)


def run(
    target: Target,
    questions: Sequence[Question],
    drafter: Drafter,
    batch: int = 1,
    on_pair: Callable[[Pair], None] = lambda _: None,
    say: Callable[[str], None] | None = None,
) -> list[Pair]:
    """Decode every question both ways, `batch` of them in a pass; `on_pair` is told of each as it is there.

    Raises:
        ValueError: naming the question that could not be decoded.
    """
    budget = automatic_budget(target, drafter, questions[0].prompt_ids, questions[0].params, say)
    for guess, nodes in ((Root(), 1), (drafter, questions[0].params.nodes)):  # first calls load and compile
        params = replace(questions[0].params, nodes=nodes, max_new_tokens=min(questions[0].params.max_new_tokens, _WARM_UP_TOKENS))
        generate(target, questions[0].prompt_ids, guess, params, budget)
    pairs: list[Pair] = []
    for start in range(0, len(questions), batch):
        group = questions[start : start + batch]
        plain = [replace(q, params=replace(q.params, nodes=1)) for q in group]
        if start // batch % 2:  # neither way always runs first
            speculative = _decode(target, group, drafter, budget)
            standard = _decode(target, plain, Root(), FixedBudget(1))
        else:
            standard = _decode(target, plain, Root(), FixedBudget(1))
            speculative = _decode(target, group, drafter, budget)
        for question, one, two in zip(group, standard, speculative, strict=True):
            pairs.append(_pair(question, one, two))
            on_pair(pairs[-1])
    return pairs


def _decode(target: Target, questions: Sequence[Question], drafter: Drafter, budget: Budget) -> list[Result]:
    requests = [Request(i, q.prompt_ids, q.params) for i, q in enumerate(questions)]
    found: dict[int, Result] = {}
    for number, event in decode_batch(target, requests, drafter, budget, max_requests=len(requests)):
        if isinstance(event, Failed):
            raise ValueError(f"{questions[number].id}: {event.error}") from event.error
        if isinstance(event, Finished):
            found[number] = event.result
    return [found[i] for i in range(len(questions))]


def _pair(question: Question, standard: Result, speculative: Result) -> Pair:
    texts = standard.text, speculative.text
    verdicts = {text: None if question.task is None else grade(question.task, text) for text in set(texts)}
    return Pair(question, standard, speculative, *(verdicts[text] for text in texts))


def rows(pairs: Iterable[Pair]) -> list[dict[str, object]]:
    """Return one row for every source, and that of all together where there are several."""
    pairs = list(pairs)
    groups: dict[str, list[Pair]] = {}
    for pair in pairs:
        groups.setdefault(pair.question.source, []).append(pair)
    return [_row(*group) for group in groups.items()] + ([_row(ALL, pairs)] if len(groups) > 1 else [])


def _row(source: str, pairs: list[Pair]) -> dict[str, object]:
    row: dict[str, object] = {"task": source, "prompts": len(pairs)}
    passes, seconds = {}, {}
    for way in ("standard", "speculative"):
        results: list[Result] = [getattr(p, way) for p in pairs]
        passes[way] = sum(r.counts.nfe for r in results)
        seconds[way] = sum(r.counts.total_s for r in results)
        row |= {f"{key}_{way}": value for key, value in accuracy([getattr(p, f"{way}_right") for p in pairs]).items()}
        row |= {f"tokens_{way}": sum(r.counts.tokens for r in results), f"nfe_{way}": passes[way], f"seconds_{way}": seconds[way]}
    return row | {
        "same_answers": sum(p.same_answer for p in pairs) / len(pairs),
        "same_order": sum(p.same_order for p in pairs) / len(pairs),
        "nfe_reduction": passes["standard"] / passes["speculative"],
        "speed_up": seconds["standard"] / seconds["speculative"],
    }
