"""The decoding loop: draft, one target pass, accept; standard decoding is the same loop with a drafter that guesses nothing.

`decode_pass` is one turn of it, for one prompt or for many that share the pass. Three rungs on top for one prompt: `decode_steps` yields
events, `stream` yields text, `generate` returns one result; `batch` drives many. Observers (progress, canvas, traces) read the
events; the loop knows none of them.

Example: `generate(target, "To JSON: Anna Berg, 34, Oslo.", Chain(), DecodeParams(nodes=8)).text`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from time import perf_counter
from typing import TypeVar, cast

from spot_dlm.budget import Budget
from spot_dlm.draft_graph import DraftGraph
from spot_dlm.interfaces import BatchDrafter, BatchTarget, DecodeParams, DraftContext, Drafter, MaskedLogits, Target
from spot_dlm.sequence import Decoding, Event, Finished, Result
from spot_dlm.stable import StableIds, TextStream
from spot_dlm.stats import Counts
from spot_dlm.tune import budget_for
from spot_dlm.verify import Acceptance, Walk, accept_many

TRIAL_BLOCKS = 4
"""Blocks that a measurement decodes for every budget."""

A = TypeVar("A")
B = TypeVar("B")


def decode_pass(target: Target, drafter: Drafter, budget: Budget, live: Sequence[Decoding]) -> list[list[Event] | Exception]:
    """Take every decoding one pass further, all in one pass of the target; return the events, or what went wrong, of each.

    A failure stays with the decoding that caused it: what fails together is tried again by halves, and nothing has changed by then.
    """
    clocks = [perf_counter()]
    graphs = _draft(drafter, budget, live)
    clocks.append(perf_counter())
    logits = _then(graphs, lambda at: _evaluate(target, [live[i] for i in at]))
    clocks.append(perf_counter())
    accepted = _then(logits, lambda at: accept_many([_walk(live[i], logits[i]) for i in at]))
    _observe(budget, live, accepted)
    clocks.append(perf_counter())
    seconds = [(b - a) / len(live) for a, b in pairwise(clocks)]
    for decoding in live:
        decoding.counts.add_seconds(*seconds)
    return [_take(*outcome) for outcome in zip(live, accepted, logits, strict=True)]


def _take(decoding: Decoding, acceptance: Acceptance | Exception, logits: MaskedLogits | Exception) -> list[Event] | Exception:
    if isinstance(acceptance, Exception):
        return acceptance
    assert isinstance(logits, MaskedLogits)
    try:
        return list(decoding.take(acceptance, logits))
    except Exception as error:
        return error


def _each(together: Callable[[list[A]], Sequence[B | Exception]], items: list[A]) -> list[B | Exception]:
    """Apply a function to all items at once; where that fails, to one half after the other, down to the item that fails alone."""
    try:
        return list(together(items))
    except Exception as error:
        if len(items) == 1:
            return [error]
    half = len(items) // 2  # out here what the failed call held in memory is free again
    return _each(together, items[:half]) + _each(together, items[half:])


def _then(before: Sequence[A | Exception], stage: Callable[[list[int]], Sequence[B | Exception]]) -> list[B | Exception]:
    """Run a stage on the numbers of those that have not failed before; failures are passed on."""
    going = [i for i, outcome in enumerate(before) if not isinstance(outcome, Exception)]
    found = dict(zip(going, _each(stage, going) if going else [], strict=True))
    return [found[i] if not isinstance(outcome, Exception) else outcome for i, outcome in enumerate(before)]


def _draft(drafter: Drafter, budget: Budget, live: Sequence[Decoding]) -> list[DraftGraph | Exception]:
    """Give every decoding the graph of the coming pass; those of `nodes="auto"` share the budget."""
    contexts = [d.context() for d in live]
    free = [i for i, d in enumerate(live) if d.params.nodes == "auto"]
    limits = [1 if d.params.nodes == "auto" else d.params.nodes for d in live]
    asking = [i for i in free if contexts[i] is not None]
    for i, limit in zip(asking, budget.limits([c for i in asking if (c := contexts[i]) is not None]) if asking else [], strict=True):
        limits[i] = limit
    wanted = [i for i, context in enumerate(contexts) if context is not None and limits[i] > 1]

    def draft(at: list[int]) -> list[DraftGraph]:
        asked = [c for i in at if (c := contexts[i]) is not None]
        return _check(live, at, _graphs(drafter, asked, [limits[i] for i in at]), limits)

    graphs: list[DraftGraph | Exception] = [d.graph for d in live]
    for i, graph in zip(wanted, _each(draft, wanted) if wanted else [], strict=True):
        graphs[i] = graph
    shared = [(i, g) for i in free if isinstance(g := graphs[i], DraftGraph)]
    if shared:
        kept = budget.allot([g for _, g in shared], [live[i].prefix.length for i, _ in shared])
        for (i, graph), count in zip(shared, kept, strict=True):
            graphs[i] = graph.first(count)
    for decoding, graph in zip(live, graphs, strict=True):
        decoding.graph = graph if isinstance(graph, DraftGraph) else decoding.graph
    return graphs


def _graphs(drafter: Drafter, contexts: list[DraftContext], limits: list[int]) -> list[DraftGraph]:
    if hasattr(drafter, "draft_many"):  # a BatchDrafter; asking isinstance of a protocol takes longer than many a draft
        return cast(BatchDrafter, drafter).draft_many(contexts, limits)
    return [drafter.draft(context, limit) for context, limit in zip(contexts, limits, strict=True)]


def _check(live: Sequence[Decoding], at: list[int], graphs: list[DraftGraph], limits: list[int]) -> list[DraftGraph]:
    for i, graph in zip(at, graphs, strict=True):
        graph.validate(live[i].state, limits[i], live[i].target.spec.vocab_size, live[i].crosses)
    return graphs


def _evaluate(target: Target, live: list[Decoding]) -> list[MaskedLogits]:
    if hasattr(target, "evaluate_many"):
        return cast(BatchTarget, target).evaluate_many([(d.prefix, d.graph.canvases) for d in live])
    return [target.evaluate(d.prefix, d.graph.canvases) for d in live]


def _walk(decoding: Decoding, logits: MaskedLogits | Exception) -> Walk:
    assert isinstance(logits, MaskedLogits)
    params = decoding.params
    return Walk(decoding.graph, decoding.state, logits.of, params.rule, params.sampling, decoding.noise, decoding.is_last_of_pass)


def _observe(budget: Budget, live: Sequence[Decoding], accepted: Sequence[Acceptance | Exception]) -> None:
    """Tell the budget what became of the graphs that it allotted."""
    pairs = [
        (d.graph, len(a.transitions) - 1)
        for d, a in zip(live, accepted, strict=True)
        if d.params.nodes == "auto" and isinstance(a, Acceptance)
    ]
    if pairs:
        budget.observe([g for g, _ in pairs], [n for _, n in pairs])


def decode_steps(
    target: Target, prompt: str | Sequence[int], drafter: Drafter, params: DecodeParams | None = None, budget: Budget | None = None
) -> Iterator[Event]:
    """Decode one prompt and yield what happens; the last event is `Finished`.

    Args:
        target: the model.
        prompt: user text (encoded with the target's chat template) or token ids.
        drafter: guesses; it decides the number of passes, never the tokens or their order.
        params: rule, sampling, lengths and node budget.
        budget: chooses the nodes of `nodes="auto"`; None takes the one of this target and drafter (`automatic_budget`).

    Raises:
        ValueError: for an empty prompt, one that does not fit the context, NaN logits or a malformed draft graph.
    """
    params = params or DecodeParams()
    clock = perf_counter()
    decoding = Decoding(target, prompt, params)
    if budget is None:
        budget = automatic_budget(target, drafter, decoding.prompt_ids, params)
        clock = perf_counter()  # measuring is not decoding
    events: list[Event] = [decoding.start()]
    while True:
        decoding.counts.total_s += perf_counter() - clock
        yield from events  # what the observer does meanwhile is not decoding time
        if decoding.result is not None:
            return
        clock = perf_counter()
        outcome = decode_pass(target, drafter, budget, [decoding])[0]
        if isinstance(outcome, Exception):
            raise outcome
        events = outcome


def automatic_budget(
    target: Target, drafter: Drafter, prompt_ids: Sequence[int], params: DecodeParams, say: Callable[[str], None] | None = None
) -> Budget:
    """Return the budget of `params.nodes`; where "auto" has not been measured here, decoding a few blocks of this prompt is part of it.

    Args:
        target: the model.
        drafter: the drafter.
        prompt_ids: something typical to decode.
        params: as it will be decoded.
        say: told when a measurement begins, and what goes wrong with keeping it.
    """
    return budget_for(target, drafter, params, trial(target, drafter, prompt_ids, params), say)


def trial(target: Target, drafter: Drafter, prompt_ids: Sequence[int], params: DecodeParams) -> Callable[[int], Counts]:
    """Return the function that decodes a few blocks of a prompt with so many nodes, for measurements."""
    length = params.block_length or target.spec.block_length
    short = replace(params, max_new_tokens=min(params.max_new_tokens, TRIAL_BLOCKS * length), stop="block")
    return lambda nodes: generate(target, prompt_ids, drafter, replace(short, nodes=nodes)).counts


def stream(
    target: Target, prompt: str | Sequence[int], drafter: Drafter, params: DecodeParams | None = None, budget: Budget | None = None
) -> Iterator[str]:
    """Yield text as soon as it is stable: the run of committed positions from the left; the pieces joined are the result's text."""
    params = params or DecodeParams()
    run, text = StableIds(target.spec.stop_ids, params.max_new_tokens), TextStream(target.decode)
    for event in decode_steps(target, prompt, drafter, params, budget):
        piece = "".join(map(text.push, run.take(event)))
        if isinstance(event, Finished):
            piece += text.end()
        if piece:
            yield piece


def generate(
    target: Target, prompt: str | Sequence[int], drafter: Drafter, params: DecodeParams | None = None, budget: Budget | None = None
) -> Result:
    """Decode one prompt and return its result (see `decode_steps`)."""
    for event in decode_steps(target, prompt, drafter, params, budget):
        if isinstance(event, Finished):
            return event.result
    raise AssertionError("decode_steps ended without a result")
