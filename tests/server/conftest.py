"""A server in a forked process, whose libraries are loaded already, and clients for it."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import jaxtyping
import openai
import pytest
from cli.conftest import fork, wait

from spot_dlm.budget import CostProfile

PATIENCE_S = 120
KEY = "not-checked"
PROFILE = CostProfile((1, 4, 64), (0, 512), ((2.0, 3.0, 16.0), (2.5, 4.0, 24.0)), host_ms=0.3, draft_ms=((2, 0.2), (32, 0.6)))


@dataclass
class Running:
    """A server that runs."""

    pid: int
    url: str
    log: Path

    def client(self, **more: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", **{"api_key": KEY, "max_retries": 0, "timeout": PATIENCE_S} | more)

    def post(self, path: str, document: Any = None, **more: Any) -> httpx.Response:
        body = {"json": document} if document is not None else {}
        return httpx.post(f"{self.url}{path}", timeout=PATIENCE_S, **body | more)

    def get(self, path: str, **more: Any) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=PATIENCE_S, **more)

    def metric(self, name: str) -> float:
        """A value of /metrics, 0 where it is not there yet."""
        rows = [line.rpartition(" ") for line in self.get("/metrics").text.splitlines()]
        return next((float(value) for key, _, value in rows if key == name), 0.0)

    def wait_until(self, holds: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < end, f"{what}; {self.log.read_text('utf-8')}"
            time.sleep(0.02)

    @property
    def is_idle(self) -> bool:
        return self.metric("spot_samples_running") == self.metric("spot_samples_waiting") == 0

    def end(self, with_signal: int = signal.SIGTERM) -> int:
        os.kill(self.pid, with_signal)
        return wait(self.pid)


Start = Callable[..., Running]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Start servers on free ports; what still runs at the end of the module is killed."""
    started: list[Running] = []

    def run(*words: str | Path | int | float, prepare: Callable[[], None] = lambda: None) -> Running:
        def ready() -> None:
            import spot_dlm.tune

            spot_dlm.tune.measure = lambda *_, **__: PROFILE
            jaxtyping.config.update("jaxtyping_disable", True)
            prepare()

        log = tmp_path_factory.mktemp("server") / "stderr"
        quiet = os.open(os.devnull, os.O_WRONLY)
        pid = fork(["serve", "--port", "0", *map(str, words)], quiet, os.open(log, os.O_WRONLY | os.O_CREAT), ready)
        server = Running(pid, "", log)
        started.append(server)
        server.wait_until(lambda: "/v1" in log.read_text("utf-8") or os.waitpid(pid, os.WNOHANG) != (0, 0), "it did not start")
        server.url = re.search(r"on (http://\S+)/v1", log.read_text("utf-8"))[1]
        server.wait_until(lambda: _answers(server), "it did not get ready")
        return server

    yield run
    for server in started:
        try:
            os.kill(server.pid, signal.SIGKILL)
            os.waitpid(server.pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass


def _answers(server: Running) -> bool:
    try:
        return server.get("/ready").status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture(scope="module")
def server(start: Start) -> Running:
    """The shipped model with its drafter."""
    return start("--max-new-tokens", 24, "--batch", 8, "--queue", 200)
