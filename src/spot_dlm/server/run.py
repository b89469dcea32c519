"""From a target to a server that listens: the socket, the signals, the end.

Example: `serve(target, drafter, Settings(name="shipped"), listen("127.0.0.1", 8000), say=print)`.
"""

import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType

import uvicorn

from spot_dlm.interfaces import Drafter, Target
from spot_dlm.server.app import READER_S, make_app
from spot_dlm.server.engine import Engine
from spot_dlm.server.errors import ApiError
from spot_dlm.server.jobs import Jobs
from spot_dlm.server.metrics import Metrics
from spot_dlm.server.prompts import Prompts
from spot_dlm.server.settings import Settings

_IDLE_S = 30  # of a connection between requests


class _Server(uvicorn.Server):
    """Ends in order at SIGTERM or ctrl-C; a second ctrl-C ends at once."""

    def __init__(self, config: uvicorn.Config, on_exit: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_exit = on_exit

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Take no more requests; let those that run end."""
        if not self.should_exit:
            self._on_exit()
        super().handle_exit(sig, frame)


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 takes a free one.

    Raises:
        OSError: if the address cannot be had.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=256)
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise OSError(f"cannot listen on {host} port {port}: {reason}") from error


def address(listener: socket.socket) -> str:
    """Return where clients find the server."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(target: Target, drafter: Drafter, settings: Settings, listener: socket.socket, say: Callable[[str], None]) -> None:
    """Answer requests until SIGTERM or ctrl-C; those that run then have the seconds of grace.

    Raises:
        ValueError: if the defaults of requests do not fit the target.
    """
    metrics, jobs = Metrics(), Jobs(target.spec, Prompts.of(target), settings, drafter.name)
    try:
        engine = Engine(target, drafter, settings, metrics, say, jobs.default_params)
    except ApiError as error:
        raise ValueError(f"the defaults of requests cannot be used: {error.message}") from error

    def end() -> None:
        engine.drain()
        say(f"ending: {engine.num_pending} answers have {settings.grace_s:g} seconds")

    config = uvicorn.Config(
        make_app(engine, jobs, settings, metrics),
        http="h11", loop="asyncio", ws="none", lifespan="on", access_log=False, log_level="warning", server_header=False,
        proxy_headers=False, timeout_keep_alive=_IDLE_S, timeout_graceful_shutdown=int(settings.grace_s + READER_S), backlog=256,
    )  # fmt: skip
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: None)  # uvicorn raises it again when all is done: that is a good end
    _Server(config, end).run(sockets=[listener])
    say("ended")
