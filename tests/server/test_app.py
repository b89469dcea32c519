"""The routes without a server: mistakes of our own, and a decoding thread that is not there."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from server.slow import Slow
from spot_dlm.drafters import Root
from spot_dlm.server.app import make_app
from spot_dlm.server.engine import Engine
from spot_dlm.server.jobs import Jobs
from spot_dlm.server.metrics import Metrics
from spot_dlm.server.prompts import Prompts
from spot_dlm.server.settings import Settings


class Mistaken(Jobs):
    def completion(self, body: bytes) -> Any:
        raise RuntimeError("the file /secret/path was not there")


def send(method: str, path: str, jobs: type[Jobs] = Jobs, **more: Any) -> httpx.Response:
    target, settings, metrics = Slow(), Settings("toy"), Metrics()
    engine = Engine(target, Root(), settings, metrics, print)
    app = make_app(engine, jobs(target.spec, Prompts.of(target), settings, "root"), settings, metrics)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=transport, base_url="http://toy") as client:
            return await client.request(method, path, **more)

    return asyncio.run(ask())


def test_a_mistake_of_ours_tells_nothing() -> None:
    answer = send("POST", "/v1/completions", Mistaken, json={"model": "toy", "prompt": [1]})
    assert answer.status_code == 500 and answer.json()["error"]["type"] == "server_error"
    assert "secret" not in answer.text and "Traceback" not in answer.text


def test_without_the_thread_nothing_is_well() -> None:
    assert send("GET", "/health").status_code == 503 and send("GET", "/ready").json() == {"status": "starting"}
    answer = send("POST", "/v1/completions", json={"model": "toy", "prompt": [1]})
    assert answer.status_code == 503 and answer.headers["retry-after"] == "10"


def test_passes_are_shown_in_streams_only() -> None:
    answer = send("POST", "/v1/completions", json={"model": "toy", "prompt": [1], "spot": {"return_passes": True}})
    assert answer.status_code == 400 and answer.json()["error"]["message"] == "spot.return_passes: only with stream"


@pytest.mark.parametrize("path", ["/page", "/v1", "/v1/", "/docs", "/metrics/x", "/v1/completions/"])
def test_other_addresses(path: str) -> None:
    answer = send("GET", path)
    assert answer.status_code == 404 and answer.json()["error"]["message"] == "there is nothing at this address"
