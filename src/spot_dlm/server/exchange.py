"""One request on its way through the engine: its messages, as they come, in the server's event loop.

Example: `async for message in exchange: ...` and `exchange.close()` however it ends.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

from spot_dlm.server.engine import Broken, Done, Ending, Engine, Full, Message
from spot_dlm.server.errors import ApiError
from spot_dlm.server.jobs import Job

_MOST_UNREAD = 4096
"""Messages of a request that wait to be sent; passes that are shown have some kilobytes."""


class Exchange:
    """The messages of a job, up to the end of its last sample.

    Args:
        engine: what decodes it.
        job: the request.
        deadline: time of the running event loop at which it is dropped.

    Raises:
        ApiError: 429 if the queue is full, 503 if the server ends.
    """

    def __init__(self, engine: Engine, job: Job, deadline: float) -> None:
        self._engine, self._deadline, self._open = engine, deadline, len(job.samples)
        self._messages: asyncio.Queue[Message] = asyncio.Queue()
        self._is_late = False  # messages were left out
        self._loop = asyncio.get_running_loop()
        try:
            self._number = engine.submit(job.samples, self._post)
        except Full as error:
            text = f"the queue is full; try again in {error.retry_after_s} seconds"
            raise ApiError(429, text, code="queue_full", retry_after_s=error.retry_after_s) from None
        except Ending:
            raise ApiError(503, "the server is being shut down", code="shutting_down", retry_after_s=10) from None

    def _post(self, message: Message) -> None:
        """Take a message from the engine's thread."""
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._put, message)

    def _put(self, message: Message) -> None:
        """Keep a message, unless the client leaves far too many unread: then the request is dropped."""
        if self._is_late:
            return
        if self._messages.qsize() < _MOST_UNREAD:
            self._messages.put_nowait(message)
        else:
            self._is_late = True
            self._engine.cancel(self._number)

    async def __aiter__(self) -> AsyncIterator[Message]:
        """Yield what comes.

        Raises:
            ApiError: 408 if it is read too slowly, 500 if it cannot be decoded, 503 if the server ends, 504 if it takes too long.
        """
        while self._open:
            if self._is_late and self._messages.empty():
                raise ApiError(408, "the answer was read too slowly", code="timeout")
            try:
                async with asyncio.timeout_at(self._deadline):
                    message = await self._messages.get()
            except TimeoutError:
                raise ApiError(504, "the answer took longer than this server allows", code="timeout") from None
            if isinstance(message, Broken):
                self._open = 0
                code = "decoding_failed" if message.status == 500 else "shutting_down"
                raise ApiError(message.status, message.reason, code=code, retry_after_s=0 if message.status == 500 else 10)
            self._open -= isinstance(message, Done)
            yield message

    def close(self) -> None:
        """Free what the job holds, if it has not ended."""
        if self._open:
            self._open = 0
            self._engine.cancel(self._number)
