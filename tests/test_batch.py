"""Many prompts in one pass: every request's tokens and order are those it has alone, and what goes wrong stays with its request."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakSet

import numpy as np
import pytest
import torch
from toy import ToyPrefix, unchecked
from trace_toys import AnyLength, Settled

from spot_dlm.batch import Aborted, Batch, Failed, Request, decode_batch
from spot_dlm.budget import AutoBudget, CostProfile
from spot_dlm.compare import same_order
from spot_dlm.decode import generate
from spot_dlm.draft_graph import DraftGraph
from spot_dlm.drafters import Chain
from spot_dlm.interfaces import BatchDrafter, BatchTarget, DecodeParams, DraftContext, MaskedLogits
from spot_dlm.rules import parse_rule
from spot_dlm.sequence import BlockFinished, BlockStarted, Finished, Pass, Result
from spot_dlm.transition import Sampling

VOCAB = 24
NAN, HEAVY, UNCOMMITTED = 23, 22, 21  # first tokens of prompts that the target fails on; it never generates them
RAISES, MALFORMED = 1001, 1002  # seeds of requests that the drafter fails on
PROFILE = CostProfile(rows=(1, 64), prefixes=(0,), pass_ms=((1.0, 3.0),), host_ms=0.1, draft_ms=((2, 0.1), (32, 0.3)))
OUT_OF_MEMORY = "CUDA out of memory\n  tried to allocate 2 GiB"


class Plain(AnyLength):
    """A target that fails on some prompts, and knows which caches are alive."""

    def __init__(self, crosses: bool = True) -> None:
        super().__init__(Settled(VOCAB, 8, seed=3), stop_ids=(0,), max_length=256, crosses=crosses)
        self.alive: WeakSet[ToyPrefix] = WeakSet()
        self.num_committed = 0

    def encode(self, text: str) -> list[int]:
        if text == "@":
            raise RuntimeError("the chat template is broken")
        return super().encode(text)

    def prefill(self, token_ids: np.ndarray, block_length: int) -> ToyPrefix:
        prefix = super().prefill(token_ids, block_length)
        self.alive.add(prefix)
        return prefix

    def evaluate(self, prefix: ToyPrefix, canvases: np.ndarray) -> MaskedLogits:
        if prefix.ids[:1] == (HEAVY,):
            raise RuntimeError(OUT_OF_MEMORY)
        exact = super().evaluate(prefix, canvases)
        packed = exact.packed.clone()
        packed[:, [NAN, HEAVY, UNCOMMITTED]] = -torch.inf
        if prefix.ids[:1] == (NAN,) and prefix.length > 8:
            packed[-1, 3] = torch.nan
        return MaskedLogits(packed, exact.offsets)

    def commit(self, prefix: ToyPrefix, token_ids: np.ndarray) -> int:
        if prefix.ids[:1] == (UNCOMMITTED,):
            raise OSError("the cache is gone")
        self.num_committed += 1
        return super().commit(prefix, token_ids)


class Together(Plain):
    """The same, several prompts in one pass."""

    def __init__(self, crosses: bool = True) -> None:
        super().__init__(crosses)
        self.passes: list[list[int]] = []  # cached tokens of the prompts of each pass

    def evaluate_many(self, queries: Sequence[tuple[ToyPrefix, np.ndarray]]) -> list[MaskedLogits]:
        self.passes.append([prefix.length for prefix, _ in queries])
        return [self.evaluate(*query) for query in queries]


@dataclass(frozen=True)
class Fickle(Chain):
    """A chain that raises for one request and gives a malformed graph for another."""

    def draft(self, context: DraftContext, budget: int) -> DraftGraph:
        if context.sampling.seed == RAISES:
            raise KeyError("no draft\nfor this one")
        graph = super().draft(context, budget)
        return replace(graph, block=graph.block + 1) if context.sampling.seed == MALFORMED else graph


class FickleTogether(Fickle):
    """The same for several prompts at once: a failure spoils the whole call."""

    def draft_many(self, contexts: Sequence[DraftContext], budgets: Sequence[int]) -> list[DraftGraph]:
        return [self.draft(context, budget) for context, budget in zip(contexts, budgets, strict=True)]


def request(name: str, prompt: Sequence[int] | str, **more: Any) -> Request[str]:
    drawn = {key: more.pop(key) for key in ("temperature", "seed", "top_k", "top_p") if key in more}
    rule = parse_rule(more.pop("rule", "standard"))
    return Request(name, prompt, DecodeParams(rule, Sampling(**drawn), **{"nodes": 6, "max_new_tokens": 20} | more))


def mixed(count: int = 32) -> list[Request[str]]:
    """Requests that differ in everything a request can say."""
    rng = np.random.default_rng(11)
    rules = ("standard", "bfloat16", "threshold=0.3", "k=2", "ltr", "leftmost=0.4")
    out = []
    for i in range(count):
        prompt = rng.integers(1, 20, (1, 3, 8, 13, 16, 30)[i % 6]).tolist()
        more = {"temperature": (0.0, 1.0, 0.7)[i % 3], "seed": i % 5, "sequence": i // 2, "rule": rules[i % 5 if i % 7 else 5]}
        more |= {"max_new_tokens": int(rng.integers(1, 40)), "stop": ("block", "prefix")[i % 2], "nodes": (1, 4, 9, "auto")[i % 4]}
        more |= {"block_length": (None, 4, 8, 16, 1)[i % 5], "boundary": i % 6 != 1, "top_k": 4 * (i % 9 == 4)}
        out.append(request(f"r{i}", prompt if i % 8 else "text", **more))
    return out


FAILING = {
    "nan": (request("nan", [NAN] + [2] * 7, max_new_tokens=30), "NaN or infinite logits"),
    "heavy": (request("heavy", [HEAVY] + [2] * 7), "out of memory"),
    "uncommitted": (request("uncommitted", [UNCOMMITTED] + [2] * 7, max_new_tokens=30), "the cache is gone"),
    "empty": (request("empty", []), "the prompt is empty"),
    "no text": (request("no text", ""), "the prompt is empty"),
    "too long": (request("too long", [1] * 250), "the target's context holds 256"),
    "no such id": (request("no such id", [VOCAB]), "prompt ids must lie in 0..23"),
    "template": (request("template", "@"), "the chat template is broken"),
    "drafter": (request("drafter", [1, 2], seed=RAISES), "no draft"),
    "graph": (request("graph", [1, 2], seed=MALFORMED), "node 0 must be the certain next state"),
}
ABORTED = "aborted"


def auto() -> AutoBudget:
    return AutoBudget(PROFILE)


def alone(target: Plain, requests: Iterable[Request[str]]) -> dict[str, Result]:
    return {r.id: generate(target, r.prompt, Fickle(), r.params, auto()) for r in requests}


@dataclass
class Log:
    """The events of every request."""

    of: dict[str, list] = field(default_factory=dict)

    def add(self, told: Iterable[tuple[str, Any]]) -> None:
        for name, event in told:
            self.of.setdefault(name, []).append(event)

    @property
    def results(self) -> dict[str, Result]:
        return {name: events[-1].result for name, events in self.of.items() if isinstance(events[-1], Finished)}


def assert_same(found: dict[str, Result], expected: dict[str, Result]) -> None:
    assert found.keys() == expected.keys()
    for name, result in found.items():
        assert same_order(result, expected[name]), name
        assert result.text == expected[name].text and result.commit_steps == expected[name].commit_steps, name
        assert result.counts.transitions == expected[name].counts.transitions and result.counts.blocks == expected[name].counts.blocks, name


def assert_in_order(request: Request[str], events: list, length: int) -> None:
    """The events of one finished request tell one story: blocks one after the other, passes numbered, nothing after the end."""
    result = events[-1].result
    passes = [e for e in events if isinstance(e, Pass)]
    started = [e.start for e in events if isinstance(e, BlockStarted)]
    finished = [e.start for e in events if isinstance(e, BlockFinished)]
    assert isinstance(events[0], BlockStarted) and sum(isinstance(e, Finished) for e in events) == 1
    assert [p.number for p in passes] == list(range(result.counts.nfe))
    assert [c for p in passes for c in p.committed] == result.order
    assert started == finished == list(range(started[0], started[-1] + length, length)) and len(finished) == result.counts.blocks
    open_blocks = 0
    for event in events:
        open_blocks += isinstance(event, BlockStarted) - isinstance(event, BlockFinished)
        assert open_blocks in (0, 1)


@pytest.fixture(scope="module")
def expected() -> dict[str, Result]:
    with unchecked():
        return alone(Plain(), mixed())


@pytest.mark.parametrize("max_requests", [1, 3, 16])
@pytest.mark.parametrize("make", [Plain, Together])
def test_mixed_batch_equals_serial_runs(make: type[Plain], max_requests: int, expected: dict[str, Result]) -> None:
    """32 requests that differ in everything, ten that fail and one that is aborted in the middle."""
    target, drafter, requests = make(), FickleTogether() if make is Together else Fickle(), mixed()
    assert isinstance(drafter, BatchDrafter) == isinstance(target, BatchTarget) == (make is Together)
    for i, (bad, _) in enumerate(FAILING.values()):
        requests.insert(3 * i, bad)
    requests.insert(9, request(ABORTED, [5] * 9, max_new_tokens=40, nodes=1))
    log, refused, most = Log(), {}, 0
    with unchecked():
        batch: Batch[str] = Batch(target, drafter, auto(), max_requests)
        for r in requests:
            try:
                batch.add(r)
            except (ValueError, RuntimeError) as error:
                refused[r.id] = Failed(error)
        while not batch.is_idle:
            log.add(batch.step())
            most = max(most, batch.num_live)
            assert len(target.alive) == batch.num_live
            if len(log.of.get(ABORTED, [])) == 4:
                assert batch.abort(ABORTED) and not batch.abort(ABORTED)
                assert len(target.alive) == batch.num_live, "an abort frees the cache at once"
    assert most == min(max_requests, 36) and not batch.num_waiting
    assert_same(log.results, expected)
    for r in mixed():
        assert_in_order(r, log.of[r.id], r.params.block_length or 8)
    for name, (_, message) in FAILING.items():
        last = refused.get(name) or log.of[name][-1]
        assert message in str(last.error) and sum(isinstance(e, Failed) for e in log.of.get(name, [last])) == 1, name
    assert isinstance(log.of[ABORTED][-1], Aborted) and sum(isinstance(e, Aborted) for e in log.of[ABORTED]) == 1
    if isinstance(target, BatchTarget):
        assert max(map(len, target.passes)) == most


@pytest.mark.parametrize("make", [Plain, Together])
def test_decode_batch_equals_serial_runs_and_failures_stay_alone(make: type[Plain], expected: dict[str, Result]) -> None:
    requests = [*mixed()]
    for i, (bad, _) in enumerate(FAILING.values()):
        requests.insert(2 * i, bad)
    target, log, began = make(), Log(), time.perf_counter()
    with unchecked():
        log.add(decode_batch(target, iter(requests), Fickle(), auto(), max_requests=8))
    seconds = time.perf_counter() - began
    assert_same(log.results, expected)
    failed = {name: events[-1] for name, events in log.of.items() if isinstance(events[-1], Failed)}
    assert failed.keys() == FAILING.keys()
    assert all(sum(isinstance(e, Failed) for e in log.of[name]) == 1 for name in failed)
    assert "in evaluate" in failed["heavy"].error.__notes__[0], "where it happened is not lost"
    assert not target.alive, "errors that are kept hold no caches"
    counts = [r.counts for r in log.results.values()]
    total = sum(c.total_s for c in counts)
    assert sum(c.target_s + c.draft_s + c.verify_s for c in counts) <= total and 0.5 * seconds < total <= seconds


def test_a_pass_that_fails_with_one_request_in_it() -> None:
    """Only the culprit fails, the pass is repeated without it, and nobody's tokens change."""
    target, requests = Together(), [request(f"r{i}", [1 + i, 2, 3]) for i in range(15)]
    expected = alone(target, requests)
    target.passes.clear()
    log = Log()
    log.add(decode_batch(target, [*requests[:6], FAILING["heavy"][0], *requests[6:]], Chain(), auto()))
    assert_same(log.results, expected)
    (failed,) = [events[-1] for events in log.of.values() if isinstance(events[-1], Failed)]
    assert str(failed.error) == OUT_OF_MEMORY
    first = target.passes[: [len(p) for p in target.passes[1:]].index(15) + 1]
    assert len(first[0]) == 16 and len(first) <= 1 + 2 * 4, "halves find the culprit in few passes"


def test_memory_of_a_failed_pass_is_free_before_it_is_repeated() -> None:
    """As where a device is out of memory: the frames of the failed call must not hold what it had allocated."""
    held: WeakSet[ToyPrefix] = WeakSet()

    class Greedy(Together):
        def evaluate_many(self, queries: Sequence[tuple[ToyPrefix, np.ndarray]]) -> list[MaskedLogits]:
            assert not held
            if len(queries) > 2:
                buffers = ToyPrefix([], 8)
                held.add(buffers)
                raise RuntimeError("out of memory")
            return super().evaluate_many(queries)

    requests = [request(f"r{i}", [1 + i, 2, 3], max_new_tokens=9) for i in range(5)]
    gc.disable()
    try:
        log = Log()
        log.add(decode_batch(Greedy(), requests, Chain(), auto()))
    finally:
        gc.enable()
    assert_same(log.results, alone(Plain(), requests))


def test_a_target_that_fails_in_prefill() -> None:
    class Unready(Together):
        def prefill(self, token_ids: np.ndarray, block_length: int) -> ToyPrefix:
            prefix = super().prefill(token_ids, block_length)
            if prefix.ids[:1] == (HEAVY,):
                raise RuntimeError("no room for this one")
            return prefix

    target, log = Unready(), Log()
    requests = [request(f"r{i}", [1 + i] * 9) for i in range(3)]
    log.add(decode_batch(target, [FAILING["heavy"][0], *requests, replace(FAILING["heavy"][0], id="again")], Chain(), auto()))
    assert [str(log.of[name][0].error) for name in ("heavy", "again")] == ["no room for this one"] * 2
    assert_same(log.results, alone(Plain(), requests))
    assert not target.alive


def test_requests_join_later() -> None:
    target, requests = Together(), mixed(12)
    batch: Batch[str] = Batch(target, Chain(), auto(), max_requests=8)
    log, waiting = Log(), list(requests)
    assert batch.is_idle and batch.step() == []
    with unchecked():
        while waiting or not batch.is_idle:
            if waiting:
                batch.add(waiting.pop(0))
            log.add(batch.step())
    with unchecked():
        assert_same(log.results, alone(target, requests))
    assert len({len(p) for p in target.passes}) > 3, "the number of requests in a pass changed"


def test_cached_tokens_are_bounded_and_a_giant_is_decoded_alone() -> None:
    """A request counts with all the tokens it may come to hold; first come, first served."""
    target = Together()
    small = [request(f"s{i}", [1 + i] * 8, max_new_tokens=8, nodes=1) for i in range(6)]
    giant = request("giant", [9] * 70, max_new_tokens=50, nodes=1)
    requests = [*small[:3], giant, *small[3:]]
    batch: Batch[str] = Batch(target, Chain(), None, max_requests=16, max_cached_tokens=40)
    for r in requests:
        batch.add(r)
    log, seen = Log(), []
    with unchecked():
        while not batch.is_idle:
            log.add(batch.step())
            seen.append({name for name in log.of if not isinstance(log.of[name][-1], Finished)})
    assert_same(log.results, alone(target, requests))
    assert max(map(len, seen)) == 2, "two of 16 tokens fit in 40"
    assert all(live == {"giant"} for live in seen if "giant" in live)
    assert list(log.of) == [r.id for r in requests]


def test_ids_that_are_known_are_refused() -> None:
    batch: Batch[str] = Batch(Together(), Chain(), None, max_requests=1)
    one, two = request("a", [1, 2]), request("b", [3])
    batch.add(one)
    batch.add(two)
    log = Log()
    log.add(batch.step())
    for again in (one, two):
        with pytest.raises(ValueError, match=f"'{again.id}' is being decoded already"):
            batch.add(again)
    assert (batch.num_live, batch.num_waiting) == (1, 1)
    while not batch.is_idle:
        log.add(batch.step())
    assert_same(log.results, alone(Plain(), [one, two]))
    batch.add(one)  # ended, so the id is free
    assert not batch.abort("c") and batch.abort("a") and batch.is_idle is False
    assert batch.step() == [("a", Aborted())] and batch.is_idle
    told = list(decode_batch(Together(), [one, one, two], Chain()))
    assert [name for name, event in told if isinstance(event, Failed)] == ["a"]
    assert sorted(name for name, event in told if isinstance(event, Finished)) == ["a", "b"]


@pytest.mark.parametrize("limits", [{"max_requests": 0}, {"max_cached_tokens": 0}])
def test_bad_limits(limits: dict[str, int]) -> None:
    (name,) = limits
    with pytest.raises(ValueError, match=f"{name}=0 must be at least 1"):
        Batch(Plain(), Chain(), **limits)
    with pytest.raises(ValueError, match=f"{name}=0 must be at least 1"):
        next(decode_batch(Plain(), [], Chain(), **limits))


@pytest.mark.parametrize("where", ["evaluate", "commit", "prefill"])
def test_ctrl_c_passes_through(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    target = Together()
    events = decode_batch(target, mixed(), Chain(), auto(), max_requests=5)
    for _ in range(20):
        next(events)

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(target, where, interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(events)
    assert next(events, None) is None
    del events
    gc.collect()
    assert not target.alive


def test_closing_early_frees_everything_and_takes_no_more_requests() -> None:
    target, taken = Together(), []

    def source() -> Iterable[Request[str]]:
        for r in mixed():
            taken.append(r)
            yield r

    gc.disable()
    try:
        events = decode_batch(target, source(), Chain(), auto(), max_requests=5)
        for _ in range(30):
            next(events)
        assert 0 < len(target.alive) <= 5 and len(taken) < 32, "requests are taken as there is room"
        events.close()
        assert not target.alive
        del events
        assert len(taken) < 32
    finally:
        gc.enable()


def test_nothing_grows_over_many_requests() -> None:
    """300 requests, some that fail: never more caches than live requests, and no cycles that wait for the garbage collector."""
    target, most = Together(), 0
    bad = [r for r, _ in FAILING.values()]
    many = (replace(bad[i % 10] if i % 6 == 5 else request("", [1 + i % 4, 2], max_new_tokens=10), id=str(i)) for i in range(300))
    gc.collect()
    gc.disable()
    try:
        with unchecked():
            for _, event in decode_batch(target, many, Fickle(), auto(), max_requests=4):
                most = max(most, len(target.alive))
                if isinstance(event, Finished | Failed):
                    last = event  # kept, as an observer may
        assert most <= 4 and not target.alive and last is not None
    finally:
        gc.enable()


def test_passes_are_shared_and_the_time_too() -> None:
    """As many passes as the longest request needs; total seconds are shared, so they add up to the time that went by."""

    class Slow(Together):
        def evaluate_many(self, queries: Sequence[tuple[ToyPrefix, np.ndarray]]) -> list[MaskedLogits]:
            time.sleep(0.005)
            return super().evaluate_many(queries)

    target, requests = Slow(), [request(f"r{i}", [1 + i, 2], nodes=1, max_new_tokens=6 * (i + 1)) for i in range(4)]
    began = time.perf_counter()
    log = Log()
    with unchecked():
        log.add(decode_batch(target, requests, Chain(), auto()))
    seconds = time.perf_counter() - began
    counts = [r.counts for r in log.results.values()]
    assert len(target.passes) == max(c.nfe for c in counts)
    assert 0.9 * seconds < sum(c.total_s for c in counts) <= seconds
    assert 0.005 * len(target.passes) <= sum(c.target_s for c in counts) <= sum(c.total_s for c in counts)


def test_a_budget_is_made_only_for_requests_that_ask_and_off_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring decodes the first asking prompt; one that fails there fails alone, and the next is measured."""
    asked = []

    def measured(target: Plain, drafter: Chain, prompt_ids: list[int], params: DecodeParams, say: Callable | None) -> AutoBudget:
        time.sleep(0.5)
        if say:
            say("measuring")
        asked.append(prompt_ids)
        generate(target, prompt_ids, drafter, replace(params, nodes=2))
        return auto()

    monkeypatch.setattr("spot_dlm.batch.automatic_budget", measured)
    fixed, free = request("fixed", [1, 2], nodes=3), [request(f"free{i}", [3 + i, 4], nodes="auto") for i in range(2)]
    assert len(list(decode_batch(Together(), [fixed], Chain()))) > 2 and not asked
    log, began = Log(), time.perf_counter()
    log.add(decode_batch(Together(), [fixed, *free], Chain()))
    seconds = time.perf_counter() - began
    assert asked == [[3, 4]] and len(log.results) == 3
    assert sum(r.counts.total_s for r in log.results.values()) <= seconds - 0.5
    asked.clear()
    log = Log()
    heavy = replace(FAILING["heavy"][0], params=free[0].params)
    log.add(decode_batch(Together(), [heavy, *free], Chain()))
    assert asked == [heavy.prompt, [3, 4]] and len(log.results) == 2 and str(log.of["heavy"][-1].error) == OUT_OF_MEMORY
    asked.clear()
    log, said = Log(), []
    log.add(decode_batch(Together(), [heavy], Chain(), say=said.append))
    assert asked == [heavy.prompt] and said[0] == "measuring" and isinstance(log.of["heavy"][-1], Failed)
    assert said[1:] == ["the cost of a pass could not be measured (CUDA out of memory tried to allocate 2 GiB)"]
