"""The thread that decodes: requests join and leave one batch between passes; everything else talks to it through a queue.

A request's text is that of its samples decoded alone, whatever else runs (`batch`). What goes wrong stays with its request.
Knows nothing of HTTP.

Example: `engine.start(); engine.submit(job.samples, print)`.
"""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from queue import Empty, SimpleQueue
from typing import Any

import torch

from spot_dlm.batch import Aborted, Batch, BatchEvent, Failed, Request
from spot_dlm.budget import Budget
from spot_dlm.decode import automatic_budget, generate
from spot_dlm.interfaces import DecodeParams, Drafter, Target
from spot_dlm.sequence import Pass
from spot_dlm.server.jobs import Sample
from spot_dlm.server.metrics import Metrics
from spot_dlm.server.settings import Settings
from spot_dlm.server.track import Ended, Track
from spot_dlm.server.watch import Watch
from spot_dlm.transition import Sampling

_LONGEST_WAIT_S, _JOIN_S = 60, 20.0
_FADING = 0.9  # of what was known of the seconds of a sample, when another one ends


@dataclass(frozen=True)
class Text:
    """More text of a sample."""

    index: int
    text: str


@dataclass(frozen=True)
class Seen:
    """What an event shows to somebody who watches a sample (`watch`)."""

    index: int
    document: dict[str, Any]


@dataclass(frozen=True)
class Done:
    """The last message of a sample that was decoded."""

    index: int
    ended: Ended


@dataclass(frozen=True)
class Broken:
    """The last message of a request that is not decoded any further, for a reason that may be told to clients."""

    status: int
    reason: str


Message = Text | Seen | Done | Broken
Listener = Callable[[Message], None]


class Full(Exception):
    """The queue is full; `retry_after_s` is when to try again."""

    def __init__(self, retry_after_s: int) -> None:
        super().__init__("the queue is full")
        self.retry_after_s = retry_after_s


class Ending(Exception):
    """The server takes no more requests."""


@dataclass
class _Live:
    """A request that waits or runs."""

    listener: Listener
    tracks: dict[int, Track]
    watches: dict[int, Watch]
    began: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class _Join:
    number: int
    samples: Sequence[Sample]
    listener: Listener


@dataclass(frozen=True)
class _Leave:
    number: int


class Engine:
    """Owns the target, and the batch; all its methods may be called from any thread.

    Args:
        target: the model.
        drafter: guesses for all requests.
        settings: limits.
        metrics: what is counted.
        say: told what an operator should know, in one line.
        typical: parameters to measure with; None takes the library's defaults.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        settings: Settings,
        metrics: Metrics,
        say: Callable[[str], None],
        typical: DecodeParams | None = None,
    ) -> None:
        self._target, self._drafter, self._settings, self._metrics, self._say = target, drafter, settings, metrics, say
        self._params = typical or DecodeParams()
        self._inbox: SimpleQueue[_Join | _Leave | None] = SimpleQueue()
        self._numbers, self._lock = count(), threading.Lock()
        self._pending = 0  # samples that wait or run, and those on their way here
        self._sample_s = 1.0  # of a sample, in passes that it shares
        self._until = float("inf")  # the time at which what still runs is ended
        self._stopped = False
        self._live: dict[int, _Live] = {}
        self._num_threads = torch.get_num_threads()
        self._budget: Budget | None = None
        self.is_ready = False
        self._thread = threading.Thread(target=self._run, name="spot-engine", daemon=True)

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def num_pending(self) -> int:
        """Samples that wait or run."""
        return self._pending

    @property
    def is_ending(self) -> bool:
        """Whether no more requests are taken."""
        return self._until < float("inf")

    def start(self) -> None:
        """Begin: compile what is compiled at the first use, measure what passes cost, then decode."""
        self._thread.start()

    def submit(self, samples: Sequence[Sample], listener: Listener) -> int:
        """Queue a request; return its number. The listener is called in this thread, and must not wait.

        Raises:
            Full: if there is no room in the queue.
            Ending: if the server is being shut down, or the thread has ended.
        """
        if self.is_ending or not self.is_alive:
            raise Ending
        with self._lock:
            if self._pending + len(samples) > self._settings.capacity:
                raise Full(min(_LONGEST_WAIT_S, 1 + int(self._sample_s * self._pending / self._settings.max_requests)))
            self._pending += len(samples)
        number = next(self._numbers)
        self._inbox.put(_Join(number, samples, listener))
        return number

    def cancel(self, number: int) -> None:
        """Drop a request, free what it holds; nothing happens if it has ended."""
        self._inbox.put(_Leave(number))

    def drain(self) -> None:
        """Take no more requests, and end what still runs after the seconds of grace; may be called in a signal handler."""
        self._until = min(self._until, time.monotonic() + self._settings.grace_s)
        self._inbox.put(None)

    def stop(self) -> None:
        """End the thread after the pass that runs."""
        self._until, self._stopped = 0.0, True
        self._inbox.put(None)
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        torch.set_num_threads(self._num_threads)
        self._warm_up()
        self._batch = self._new_batch()
        self.is_ready = True
        while not self._stopped:
            self._receive()
            if time.monotonic() >= self._until:
                self._end_all(503, "the server is being shut down")
            try:
                is_busy = self._batch.num_live + self._batch.num_waiting > 0
                for (number, index), event in self._batch.step():
                    self._tell(number, index, event)
            except Exception as error:
                self._say(f"a pass failed, and the requests in it: {_line(error)}")
                self._end_all(500, "decoding failed")
                self._batch = self._new_batch()
            else:
                self._metrics.batch_passes.inc(is_busy)
            self._metrics.running.set(self._batch.num_live)
            self._metrics.waiting.set(self._batch.num_waiting)
        self._end_all(503, "the server is being shut down")

    def _new_batch(self) -> Batch[tuple[int, int]]:
        limits = self._settings.max_requests, self._settings.max_cached_tokens
        return Batch(self._target, self._drafter, self._budget, *limits, say=self._say)

    def _warm_up(self) -> None:
        """Decode a few blocks in each way that has code of its own; what fails here fails again, and is told, in a request."""
        settings, prompt = self._settings, self._typical_prompt()
        length = self._params.block_length or self._target.spec.block_length
        nodes = settings.max_nodes if settings.needs_fixed_nodes else 4
        short = replace(self._params, max_new_tokens=min(2 * length, 64), nodes=nodes)
        try:
            if not settings.needs_fixed_nodes:
                self._budget = automatic_budget(self._target, self._drafter, prompt, replace(self._params, nodes="auto"), self._say)
            for sampling in (Sampling(), Sampling(1.0), Sampling(1.0, top_p=0.9)):
                generate(self._target, prompt, self._drafter, replace(short, sampling=sampling))
        except Exception as error:
            self._say(f"the first decoding failed: {_line(error)}")

    def _typical_prompt(self) -> list[int]:
        """Return a prompt to measure with; any token where the model takes no text."""
        spec = self._target.spec
        with suppress(Exception):
            return self._target.encode("Write a few lines about the sea.")
        return [next(i for i in range(spec.vocab_size) if i not in spec.stop_ids | {spec.mask_token_id})]

    def _receive(self) -> None:
        """Take what has come; wait for something where there is nothing to do."""
        wait = self._batch.is_idle and not self._stopped
        with suppress(Empty):
            while True:
                item = self._inbox.get(block=wait, timeout=self._patience())
                wait = False
                if isinstance(item, _Join):
                    self._join(item)
                elif isinstance(item, _Leave):
                    self._leave(item.number, "cancelled")

    def _patience(self) -> float | None:
        return max(0.0, self._until - time.monotonic()) if self.is_ending and self._live else None

    def _join(self, item: _Join) -> None:
        try:
            tracks = {index: Track(self._target, sample) for index, sample in enumerate(item.samples)}
            watches = {i: Watch(self._target, len(s.prompt_ids)) for i, s in enumerate(item.samples) if s.wants_passes}
            self._live[item.number] = _Live(item.listener, tracks, watches)
            for index, sample in enumerate(item.samples):
                self._batch.add(Request((item.number, index), sample.prompt_ids, sample.params))
        except Exception as error:
            self._break(item.number, 500, "decoding failed", error)

    def _leave(self, number: int, outcome: str) -> None:
        """Forget a request; its samples leave the batch."""
        live = self._live.pop(number, None)
        for index in live.tracks if live else ():
            self._batch.abort((number, index))
            self._count(outcome)

    def _count(self, outcome: str) -> None:
        with self._lock:
            self._pending -= 1
        self._metrics.samples.labels(outcome).inc()

    def _break(self, number: int, status: int, reason: str, error: Exception | None = None) -> None:
        live = self._live.get(number)
        if live is None:
            return
        if error is not None:
            self._say(f"request {number} failed: {_line(error)}")
        self._leave(number, "failed")
        live.listener(Broken(status, reason))

    def _end_all(self, status: int, reason: str) -> None:
        if self._live:
            self._say(f"{len(self._live)} requests were ended: {reason}")
        for number in list(self._live):
            self._break(number, status, reason)

    def _tell(self, number: int, index: int, event: BatchEvent) -> None:
        """Hand on what an event brings to its request, if that still is."""
        live = self._live.get(number)
        track = live.tracks.get(index) if live else None
        if live is None or track is None or isinstance(event, Aborted):
            return
        if isinstance(event, Failed):
            return self._break(number, 500, "decoding failed", event.error)
        if isinstance(event, Pass):
            self._count_pass(event)
        try:
            seen = live.watches[index].take(event) if index in live.watches else None
            text = track.take(event)
        except Exception as error:  # a tokenizer's
            return self._break(number, 500, "decoding failed", error)
        if seen:
            live.listener(Seen(index, seen))
        if text:
            live.listener(Text(index, text))
        if track.ended is not None:
            self._finish(number, index, live, track.ended)

    def _finish(self, number: int, index: int, live: _Live, ended: Ended) -> None:
        self._batch.abort((number, index))  # ended by a stop string, it would go on
        del live.tracks[index]
        if not live.tracks:
            del self._live[number]
        self._count(ended.finish_reason)
        self._metrics.tokens.inc(ended.num_tokens)
        self._sample_s = _FADING * self._sample_s + (1 - _FADING) * (time.monotonic() - live.began)
        live.listener(Done(index, ended))

    def _count_pass(self, event: Pass) -> None:
        steps = len(event.acceptance.transitions)
        self._metrics.passes.inc()
        self._metrics.steps.inc(steps)
        self._metrics.accepted.inc(steps - 1)
        self._metrics.drafted.inc(len(event.graph) - 1)


def _line(error: Exception) -> str:
    """Return one line for the operator."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
