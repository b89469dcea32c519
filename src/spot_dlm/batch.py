"""Many prompts in one pass: requests join when there is room and leave when they end, each with its own parameters.

A request's tokens and order are those it has alone: its noise is keyed by its own seed and sequence, its rows do not depend on others
(`interfaces.Target.evaluate`). What goes wrong stays with the request that caused it. Cached tokens of all live requests are
bounded. Knows nothing of files and servers; not thread-safe.

Example: `for id, event in decode_batch(target, [Request("a", "Add 47 and 38.")], drafter): ...`.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from traceback import format_exception
from typing import Generic, TypeVar

from spot_dlm.budget import Budget, FixedBudget
from spot_dlm.decode import automatic_budget, decode_pass
from spot_dlm.interfaces import DecodeParams, Drafter, Target
from spot_dlm.sequence import Decoding, Event

Id = TypeVar("Id", bound=Hashable)

MAX_REQUESTS = 16
MAX_CACHED_TOKENS = 2**16
"""Tokens that the caches of all live requests may hold; in bytes, times 2 x layers x key/value heads x head size x bytes of a number."""


@dataclass(frozen=True)
class Request(Generic[Id]):
    """A prompt (user text or token ids) with its parameters; `id` names it in the events."""

    id: Id
    prompt: str | Sequence[int]
    params: DecodeParams = field(default_factory=DecodeParams)


@dataclass(frozen=True)
class Failed:
    """The last event of a request that could not be decoded, or no further; the others go on. Where it happened is a note of the error."""

    error: Exception


@dataclass(frozen=True)
class Aborted:
    """The last event of a request that was aborted."""


BatchEvent = Event | Failed | Aborted


class Batch(Generic[Id]):
    """Requests that share the target's passes.

    Args:
        target: the model.
        drafter: guesses for all requests.
        budget: chooses the nodes of requests with `nodes="auto"`; None takes the one of this target and drafter.
        max_requests: most requests in one pass.
        max_cached_tokens: most tokens that the caches of live requests may come to hold (prompt + max_new_tokens, whole blocks); a
            request that needs more is decoded alone.
        say: told when the cost of a pass is measured, and what goes wrong with keeping it.

    Raises:
        ValueError: for limits below 1.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        budget: Budget | None = None,
        max_requests: int = MAX_REQUESTS,
        max_cached_tokens: int = MAX_CACHED_TOKENS,
        say: Callable[[str], None] | None = None,
    ) -> None:
        if max_requests < 1:
            raise ValueError(f"max_requests={max_requests} must be at least 1")
        if max_cached_tokens < 1:
            raise ValueError(f"max_cached_tokens={max_cached_tokens} must be at least 1")
        self._target, self._drafter = target, drafter
        self._budget, self._say = budget, say
        self._max_requests, self._max_cached_tokens = max_requests, max_cached_tokens
        self._waiting: deque[tuple[Id, Decoding]] = deque()
        self._live: dict[Id, Decoding] = {}
        self._told: list[tuple[Id, BatchEvent]] = []

    @property
    def num_live(self) -> int:
        """Requests that take part in the next pass."""
        return len(self._live)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for room."""
        return len(self._waiting)

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to decode and nothing to tell."""
        return not (self._live or self._waiting or self._told)

    def add(self, request: Request[Id]) -> None:
        """Check a request and queue it; it joins the first pass that has room for it.

        Raises:
            ValueError: if a request of that id waits or is live, the prompt is empty or does not fit the context.
        """
        if request.id in self._live or any(known == request.id for known, _ in self._waiting):
            raise ValueError(f"request {request.id!r} is being decoded already")
        self._waiting.append((request.id, Decoding(self._target, request.prompt, request.params)))

    def abort(self, request_id: Id) -> bool:
        """Drop a request and free its cache; its last event, `Aborted`, comes with the next step. False if it is not known."""
        waiting = [(known, d) for known, d in self._waiting if known != request_id]
        found = self._live.pop(request_id, None) is not None or len(waiting) < len(self._waiting)
        self._waiting = deque(waiting)
        if found:
            self._told.append((request_id, Aborted()))
        return found

    def step(self) -> list[tuple[Id, BatchEvent]]:
        """Let requests join, take one pass, let requests leave; return what happened, in order for each request."""
        events, self._told = self._told, []
        events += self._admit()
        if not self._live:
            return events
        ids, live = list(self._live), list(self._live.values())
        clock = perf_counter()
        outcomes = decode_pass(self._target, self._drafter, self._budget or FixedBudget(1), live)
        share = (perf_counter() - clock) / len(live)
        for request_id, decoding, outcome in zip(ids, live, outcomes, strict=True):
            decoding.counts.total_s += share
            events += [(request_id, e) for e in ([_failed(outcome)] if isinstance(outcome, Exception) else outcome)]
            if isinstance(outcome, Exception) or decoding.result is not None:
                del self._live[request_id]
        return events

    def _admit(self) -> list[tuple[Id, BatchEvent]]:
        """Start requests, first come first served, while there is room."""
        events: list[tuple[Id, BatchEvent]] = []
        cached = sum(d.num_cached for d in self._live.values())
        while self._waiting and len(self._live) < self._max_requests:
            request_id, decoding = self._waiting[0]
            if self._live and cached + decoding.num_cached > self._max_cached_tokens:
                break
            self._waiting.popleft()
            outcome = _start(decoding)
            if isinstance(outcome, Exception):
                events.append((request_id, _failed(outcome)))
                continue
            events.append((request_id, outcome))
            self._live[request_id] = decoding
            cached += decoding.num_cached
            if self._budget is None and decoding.params.nodes == "auto":
                self._measure(decoding)
        return events

    def _measure(self, decoding: Decoding) -> None:
        """Make the budget; a prompt that cannot be decoded fails in its own pass, and the next one is tried."""
        try:
            self._budget = automatic_budget(self._target, self._drafter, decoding.prompt_ids, decoding.params, self._say)
        except Exception as error:
            if self._say is not None:
                self._say(f"the cost of a pass could not be measured ({' '.join(str(error).split())})")


def _start(decoding: Decoding) -> Event | Exception:
    clock = perf_counter()
    try:
        return decoding.start()
    except Exception as error:
        return error
    finally:
        decoding.counts.total_s += perf_counter() - clock


def _failed(error: Exception) -> Failed:
    """Wrap an error; its traceback becomes a note, for its frames would hold the caches of all requests of the pass."""
    error.add_note("".join(format_exception(error)).rstrip())
    error.__context__ = error.__cause__ = None
    return Failed(error.with_traceback(None))


def decode_batch(
    target: Target,
    requests: Iterable[Request[Id]],
    drafter: Drafter,
    budget: Budget | None = None,
    max_requests: int = MAX_REQUESTS,
    max_cached_tokens: int = MAX_CACHED_TOKENS,
    say: Callable[[str], None] | None = None,
) -> Iterator[tuple[Id, Event | Failed]]:
    """Decode requests together and yield (id, event) as it happens; the last event of each is `Finished` or `Failed`.

    Requests are taken from the iterable when there is room, so it may be long. Ids must differ. Arguments as in `Batch`.
    """
    batch: Batch[Id] = Batch(target, drafter, budget, max_requests, max_cached_tokens, say)
    source = iter(requests)
    more = True
    while more or not batch.is_idle:
        while more and batch.num_live + batch.num_waiting < max_requests:
            request = next(source, None)
            if request is None:
                more = False
                break
            try:
                batch.add(request)
            except Exception as error:
                yield request.id, Failed(error.with_traceback(None))
        for request_id, event in batch.step():
            if not isinstance(event, Aborted):
                yield request_id, event
