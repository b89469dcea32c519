"""The decoding thread without HTTP: memory that is freed, failures beyond a request, limits, the end."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from weakref import WeakSet

import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from toy import ToyPrefix, unchecked

from server.slow import FAILING, NAN, Slow, alone
from spot_dlm.batch import Batch
from spot_dlm.drafters import Chain
from spot_dlm.interfaces import DecodeParams
from spot_dlm.server.engine import Broken, Done, Ending, Engine, Full, Message, Text
from spot_dlm.server.jobs import Sample
from spot_dlm.server.metrics import Metrics
from spot_dlm.server.settings import Settings


class Watched(Slow):
    """Knows which caches are alive."""

    def __init__(self) -> None:
        super().__init__(0.002)
        self.alive: WeakSet[ToyPrefix] = WeakSet()

    def prefill(self, token_ids: np.ndarray, block_length: int) -> ToyPrefix:
        prefix = super().prefill(token_ids, block_length)
        self.alive.add(prefix)
        return prefix


class Client:
    """Takes the messages of one request."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.over = threading.Event()

    def __call__(self, message: Message) -> None:
        self.messages.append(message)
        if isinstance(message, Done | Broken):
            self.over.set()

    @property
    def text(self) -> str:
        assert self.over.wait(60)
        return "".join(m.text for m in self.messages if isinstance(m, Text))


def sample(prompt: list[int], tokens: int = 40, nodes: int = 4) -> Sample:
    return Sample(prompt, DecodeParams(max_new_tokens=tokens, nodes=nodes, stop="prefix"))


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.002)


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def engine(said: list[str]) -> Iterator[Engine]:
    with unchecked():
        engine = Engine(Watched(), Chain(), Settings("toy", max_requests=2, queue=2, grace_s=0.3), Metrics(), said.append)
        engine.start()
        until(lambda: engine.is_ready)
        yield engine
        engine.stop()
        assert not engine.is_alive


def test_what_is_cancelled_is_freed_and_what_ends_too(engine: Engine) -> None:
    target, clients = engine._target, [Client() for _ in range(3)]
    gc.collect()
    gc.disable()
    try:
        numbers = [engine.submit([sample([5 + i, 6], 900, nodes=1)], client) for i, client in enumerate(clients)]
        until(lambda: len(target.alive) == 2 and clients[1].messages)
        engine.cancel(numbers[0])
        until(lambda: clients[2].messages)
        for number in (*numbers, numbers[0], 10**6):
            engine.cancel(number)
        until(lambda: not target.alive and engine.num_pending == 0)
        last = Client()
        engine.submit([sample([4])], last)
        assert last.text == alone([4], 40)
        until(lambda: not target.alive and engine.num_pending == 0)
    finally:
        gc.enable()


def test_there_is_room_for_so_many(engine: Engine) -> None:
    clients = [Client() for _ in range(4)]
    for client in clients:
        engine.submit([sample([7])], client)
    with pytest.raises(Full) as full:
        engine.submit([sample([8])], Client())
    assert 1 <= full.value.retry_after_s <= 60
    assert [client.text for client in clients] == [alone([7], 40)] * 4
    until(lambda: engine.num_pending == 0)


def test_a_pass_that_fails_as_a_whole_fails_what_is_in_it(engine: Engine, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    first, step = Client(), Batch.step
    engine.submit([sample([5], 900, nodes=1)], first)
    until(lambda: bool(first.messages))

    def fails_once(batch: Batch) -> list:
        monkeypatch.setattr(Batch, "step", step)
        raise MemoryError("no room at all\nfor this")

    monkeypatch.setattr(Batch, "step", fails_once)
    assert first.over.wait(60) and first.messages[-1] == Broken(500, "decoding failed")
    assert any("MemoryError: no room at all for this" in line for line in said)
    again = Client()
    engine.submit([sample([5], 20)], again)
    assert again.text == alone([5], 20) and engine.num_pending == 0 and engine.is_alive
    gc.collect()
    until(lambda: not engine._target.alive)


def test_a_sample_that_fails_takes_its_siblings_along(engine: Engine, said: list[str]) -> None:
    client, beside = Client(), Client()
    engine.submit([sample([5], 900, nodes=1), sample([NAN] * 5, 900)], client)
    engine.submit([sample([6], 30)], beside)
    assert client.over.wait(60) and client.messages[-1] == Broken(500, "decoding failed")
    assert beside.text == alone([6], 30) and any(FAILING[NAN] in line for line in said)
    until(lambda: engine.num_pending == 0)
    assert sum(isinstance(m, Broken) for m in client.messages) == 1


def test_the_end(engine: Engine) -> None:
    short, long = Client(), Client()
    engine.submit([sample([5], 8)], short)
    engine.submit([sample([5], 900, nodes=1)], long)
    until(lambda: bool(long.messages))
    engine.drain()
    with pytest.raises(Ending):
        engine.submit([sample([5])], Client())
    assert short.text == alone([5], 8)
    assert long.over.wait(60) and long.messages[-1] == Broken(503, "the server is being shut down")
    until(lambda: engine.num_pending == 0)


def test_metrics_have_a_registry_of_their_own() -> None:
    assert isinstance(Metrics().registry, CollectorRegistry) and b"spot_tokens_total 0.0" in Metrics().render()


@pytest.mark.parametrize("wrong", [{"max_requests": 0}, {"queue": -1}, {"timeout_s": 0.0}, {"grace_s": -1.0}, {"max_body_bytes": 0}])
def test_settings(wrong: dict) -> None:
    (field,) = wrong
    with pytest.raises(ValueError, match=field):
        Settings("toy", **wrong)
