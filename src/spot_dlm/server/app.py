"""The routes of the server, in OpenAI's shape, with health, readiness and metrics.

Requests are read in one thread of their own and decoded in the engine's; the event loop only waits.

Example: `make_app(engine, jobs, settings, metrics)`.
"""

import asyncio
import hmac
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from spot_dlm import __version__
from spot_dlm.server.engine import Done, Engine, Seen, Text
from spot_dlm.server.errors import ApiError
from spot_dlm.server.exchange import Exchange
from spot_dlm.server.jobs import Job, Jobs
from spot_dlm.server.metrics import Metrics
from spot_dlm.server.page import add_page
from spot_dlm.server.responses import Answer, failure
from spot_dlm.server.settings import Settings
from spot_dlm.server.track import Ended

T = TypeVar("T")

BODY_S = 30.0
"""Seconds that a client has to send a body."""
READER_S = 30.0
"""Seconds beyond a request's limit that a client has to read its answer."""
_LOOK_S = 0.05  # at an engine that warms up
_DRAINED_BYTES = 64 * 2**20  # of a body that is too large: read, so that the client can read why
_EXTRA_REQUESTS = 64  # that are being read or refused, besides those that wait or run


class _Gone(Exception):
    """The client has closed the connection."""


def make_app(
    engine: Engine, jobs: Jobs, settings: Settings, metrics: Metrics, render: Callable[[], bytes] | None = None, warm: bool = False
) -> FastAPI:
    """Return the application; it starts and stops the engine.

    Args:
        engine: what decodes.
        jobs: reads requests.
        settings: limits.
        metrics: what is counted.
        render: gives the text of /metrics, where it is more than these counts.
        warm: whether it starts up only once the engine has warmed up.
    """
    service = _Service(engine, jobs, settings, metrics, render or metrics.render)

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        engine.start()
        while warm and engine.is_alive and not engine.is_ready:
            await asyncio.sleep(_LOOK_S)
        yield
        await asyncio.to_thread(engine.stop)
        service.close()

    app = FastAPI(title="spot", version=__version__, docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False, lifespan=life)
    app.add_exception_handler(HTTPException, _refused)
    app.add_exception_handler(Exception, _failed)
    app.add_api_route("/v1/chat/completions", service.answering(jobs.chat, "chat"), methods=["POST"])
    app.add_api_route("/v1/completions", service.answering(jobs.completion, "completions"), methods=["POST"])
    app.add_api_route("/v1/models", service.guarded(service.models), methods=["GET"])
    app.add_api_route("/v1/models/{name:path}", service.guarded(service.model), methods=["GET"])
    app.add_api_route("/metrics", service.guarded(service.show_metrics), methods=["GET"])
    app.add_api_route("/health", service.health, methods=["GET"])
    app.add_api_route("/ready", service.ready, methods=["GET"])
    add_page(app)
    return app


async def _refused(_: Request, error: Exception) -> Response:
    """Answer what has no route."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    words = {404: "there is nothing at this address", 405: "this address does not take this method"}
    return _document(ApiError(status, words.get(status, "the request cannot be answered")).body, status)


async def _failed(_: Request, error: Exception) -> Response:
    return _document(ApiError(500, "the server made a mistake").body, 500)


def _document(document: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    content = json.dumps(document, ensure_ascii=False).encode("utf-8", "replace")
    return Response(content, status, headers, media_type="application/json")


class _Service:
    def __init__(self, engine: Engine, jobs: Jobs, settings: Settings, metrics: Metrics, render: Callable[[], bytes]) -> None:
        self._engine, self._settings, self._metrics, self._render = engine, settings, metrics, render
        self._reading = ThreadPoolExecutor(1, "spot-reader")  # one thread: a tokenizer must not be shared
        self._num_open, self._most_open = 0, settings.capacity + _EXTRA_REQUESTS
        self._created = int(time.time())
        self._fingerprint = jobs.fingerprint

    def close(self) -> None:
        """End the reading thread."""
        self._reading.shutdown(wait=False, cancel_futures=True)

    def answering(self, read: Callable[[bytes], Job], route: str) -> Callable[[Request], Awaitable[Response]]:
        """Return the route that reads a body, decodes and answers."""

        async def answer(request: Request) -> Response:
            began = asyncio.get_running_loop().time()
            try:
                response = await self._answer(request, read, began, lambda status: self._count(route, status, began))
            except ApiError as error:
                self._count(route, error.status, began)
                return _document(error.body, error.status, error.headers)
            except (_Gone, ClientDisconnect):
                self._count(route, 499, began)
                return Response(status_code=499)
            return response

        return answer

    def guarded(self, handler: Callable[[Request], Response]) -> Callable[[Request], Awaitable[Response]]:
        """Return a route that asks for the key."""

        async def answer(request: Request) -> Response:
            try:
                self._check_key(request)
                return handler(request)
            except ApiError as error:
                return _document(error.body, error.status, error.headers)

        return answer

    def models(self, _: Request) -> Response:
        """List the model."""
        return _document({"object": "list", "data": [self._model()]})

    def model(self, request: Request) -> Response:
        """Describe the model."""
        if request.path_params["name"] != self._settings.name:
            raise ApiError(404, f"this server has one model, {self._settings.name!r}", "model", "model_not_found")
        return _document(self._model())

    def show_metrics(self, _: Request) -> Response:
        """Return the counts."""
        return Response(self._render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def health(self) -> Response:
        """Say whether the engine's thread is alive."""
        alive = self._engine.is_alive
        return _document({"status": "ok" if alive else "the engine has ended"}, 200 if alive else 503)

    async def ready(self) -> Response:
        """Say whether requests are decoded at once."""
        engine = self._engine
        status = "ending" if engine.is_ending else "ready" if engine.is_ready and engine.is_alive else "starting"
        return _document({"status": status}, 200 if status == "ready" else 503)

    def _model(self) -> dict[str, Any]:
        return {"id": self._settings.name, "object": "model", "created": self._created, "owned_by": "spot-dlm"}

    def _count(self, route: str, status: int, began: float) -> None:
        self._metrics.responses.labels(route, str(status)).inc()
        if status == 200:
            self._metrics.seconds.observe(asyncio.get_running_loop().time() - began)

    def _check_key(self, request: Request) -> None:
        """Compare the key in constant time."""
        wanted = self._settings.api_key.encode()
        given = next((value for name, value in request.headers.raw if name == b"authorization"), b"")
        if wanted and not hmac.compare_digest(given, b"Bearer " + wanted):
            raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")

    async def _answer(self, request: Request, read: Callable[[bytes], Job], began: float, count: Callable[[int], None]) -> Response:
        self._check_key(request)
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise ApiError(415, "content-type: must be application/json")
        if self._num_open >= self._most_open:
            raise ApiError(429, "too many requests at once", code="queue_full", retry_after_s=1)
        self._num_open += 1
        try:
            body = await _read_body(request, self._settings.max_body_bytes)
            job = await asyncio.get_running_loop().run_in_executor(self._reading, read, body)
            del body
            exchange = Exchange(self._engine, job, began + self._settings.timeout_s)
            self._metrics.prompt_tokens.inc(job.num_prompt_tokens)
            answer = Answer(job, self._settings.name, self._fingerprint)
            if job.stream:
                events = self._events(exchange, answer, len(job.samples), began)
                return _EventStream(events, exchange, began + self._settings.timeout_s + READER_S, count)
            try:
                document = await _unless_gone(self._collect(exchange, answer, len(job.samples), began), request.receive)
            finally:
                exchange.close()
            count(200)
            return _document(document)
        finally:
            self._num_open -= 1

    async def _collect(self, exchange: Exchange, answer: Answer, samples: int, began: float) -> dict[str, Any]:
        texts, ended = [""] * samples, dict[int, Ended]()
        async for message in exchange:
            if isinstance(message, Text):
                self._saw_text(not any(texts), began)
                texts[message.index] += message.text
            elif isinstance(message, Done):
                ended[message.index] = message.ended
        return answer.whole(texts, [ended[i] for i in range(samples)])

    async def _events(self, exchange: Exchange, answer: Answer, samples: int, began: float) -> AsyncIterator[bytes]:
        ended: dict[int, Ended] = {}
        first = True
        for data in answer.begin():
            yield data
        try:
            async for message in exchange:
                if isinstance(message, Text):
                    self._saw_text(first, began)
                    first = False
                    yield answer.text(message.index, message.text)
                elif isinstance(message, Seen):
                    yield answer.seen(message.index, message.document)
                elif isinstance(message, Done):
                    ended[message.index] = message.ended
                    yield answer.end(message.index, message.ended)
        except ApiError as error:
            yield failure(error)
            return
        for data in answer.close([ended[i] for i in range(samples)]):
            yield data

    def _saw_text(self, first: bool, began: float) -> None:
        if first:
            self._metrics.first_text.observe(asyncio.get_running_loop().time() - began)


class _EventStream(Response):
    """A stream of events; whatever ends it frees what its request holds."""

    def __init__(self, events: AsyncIterator[bytes], exchange: Exchange, deadline: float, count: Callable[[int], None]) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events, self._exchange, self._deadline, self._count = events, exchange, deadline, count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send what comes, until the client leaves or has not read it in time."""
        status = 499
        try:
            async with asyncio.timeout_at(self._deadline):
                await _unless_gone(self._send(send), receive)
            status = 200
        except (_Gone, TimeoutError):
            pass  # the connection is closed, for the response is not complete
        finally:
            self._exchange.close()
            self._count(status)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for data in self._events:
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _unless_gone(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    """Return what the work returns; once the client has left it is given up.

    Raises:
        _Gone: if the client has left.
    """
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise _Gone
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _read_body(request: Request, most: int) -> bytes:
    """Read a body of bounded size in bounded time.

    Raises:
        ApiError: 413 if it is too large, 408 if it does not come.
    """
    refusal = ApiError(413, f"the body may have {most} bytes", code="request_too_large")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared[:20]) > _DRAINED_BYTES:
        raise refusal
    parts, size = list[bytes](), 0
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                size += len(part)
                if size > _DRAINED_BYTES:
                    break
                if size <= most:
                    parts.append(part)
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {BODY_S:g} seconds") from None
    if size > most:
        raise refusal
    return b"".join(parts)
