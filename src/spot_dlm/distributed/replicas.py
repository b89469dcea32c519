"""The server as Ray Serve replicas behind one address: each has its own target and engine; a lost one is replaced.

The wire format is that of `spot serve`, for every replica runs its app. A board, one small actor, knows the counts of all replicas, so
that /metrics shows them all whichever replica answers, and tells them to drain.

Example: `serve_on_ray(prepare, (model,), settings, Replicas(2), "127.0.0.1", 8000, print)`.
"""

import logging
import pickle
import re
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Metric, generate_latest

from spot_dlm.interfaces import Drafter, Target
from spot_dlm.server.app import READER_S, make_app
from spot_dlm.server.engine import Engine
from spot_dlm.server.errors import ApiError
from spot_dlm.server.jobs import Jobs
from spot_dlm.server.metrics import Metrics
from spot_dlm.server.prompts import Prompts
from spot_dlm.server.settings import Settings

NAME = "spot"
REPORT_S = 1.0
"""Seconds between two reports of a replica to the board."""
_FORGET_S = 10.0
_LOOK_S = 5.0
_MARK = "spot-replica: "
_EXTRA_REQUESTS = 256  # beyond what an app takes at once, so that it is the app that refuses, with a 429

Prepare = Callable[..., tuple[Target, Drafter]]


@dataclass(frozen=True)
class Replicas:
    """How many replicas, and what each reserves."""

    count: int
    num_cpus: int = 1
    num_gpus: int = 0


class Board:
    """What replicas have last said, and whether they are to drain."""

    def __init__(self) -> None:
        self._said: dict[str, tuple[float, bytes]] = {}
        self._draining = False

    def report(self, name: str, counts: bytes) -> tuple[dict[str, bytes], bool]:
        """Take a replica's counts; return those of all that live, and whether to drain."""
        now = time.monotonic()
        self._said[name] = now, counts
        self._said = {k: v for k, v in self._said.items() if now - v[0] < _FORGET_S}
        return {k: v[1] for k, v in self._said.items()}, self._draining

    def drain(self) -> None:
        """Tell every replica, at its next report."""
        self._draining = True


def collected(registry: CollectorRegistry) -> bytes:
    """Return the counts of a registry in a form that travels."""
    return pickle.dumps([(m.name, m.documentation, m.type, [(s.name, s.labels, s.value) for s in m.samples]) for m in registry.collect()])


def rendered(counts: dict[str, bytes]) -> bytes:
    """Return the counts of several replicas in Prometheus' text format, each sample with the label `replica`."""
    metrics: dict[str, Metric] = {}
    for replica, data in sorted(counts.items()):
        for name, words, kind, samples in pickle.loads(data):
            metric = metrics.setdefault(name, Metric(name, words, kind))
            for sample, labels, value in samples:
                metric.add_sample(sample, {**labels, "replica": replica}, value)
    registry = CollectorRegistry()
    registry.register(_Collected(metrics.values()))
    return generate_latest(registry)


class _Collected:
    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = list(metrics)

    def collect(self) -> Iterator[Metric]:
        yield from self._metrics


class Replica:
    """One target with its engine and app; Serve sends requests once the engine has warmed up."""

    def __init__(self, prepare: Prepare, arguments: tuple[Any, ...], settings: Settings, board: Any) -> None:
        from ray import serve

        self._name, self._board = str(serve.get_replica_context().replica_id.unique_id), board
        try:
            target, drafter = prepare(*arguments)
            self._metrics, jobs = Metrics(), Jobs(target.spec, Prompts.of(target), settings, drafter.name)
            self._engine = Engine(target, drafter, settings, self._metrics, logging.getLogger("ray.serve").warning, jobs.default_params)
        except ApiError as error:
            raise RuntimeError(f"{_MARK}the defaults of requests cannot be used: {error.message}") from None
        except Exception as error:
            raise RuntimeError(f"{_MARK}{' '.join(str(error).split()) or type(error).__name__}") from None
        self._all: dict[str, bytes] = {}
        self._app = make_app(self._engine, jobs, settings, self._metrics, self._render, warm=True)
        threading.Thread(target=self._report, name="spot-report", daemon=True).start()

    def __serve_build_asgi_app__(self) -> Any:
        return self._app

    async def check_health(self) -> None:
        """Let Serve replace the replica once its engine has ended on its own."""
        if self._engine.is_ready and not self._engine.is_alive and not self._engine.is_ending:
            raise RuntimeError("the engine has ended")

    def _render(self) -> bytes:
        return rendered(self._all | {self._name: collected(self._metrics.registry)})

    def _report(self) -> None:
        """Exchange counts with the board, while it is there."""
        import ray

        while True:
            try:
                self._all, drain = ray.get(self._board.report.remote(self._name, collected(self._metrics.registry)), timeout=_FORGET_S)
            except Exception:  # the board went with the command that started the server: this replica shows its own counts
                self._all = {}
                return
            if drain and not self._engine.is_ending:
                self._engine.drain()
            time.sleep(REPORT_S)


def serve_on_ray(
    prepare: Prepare, arguments: tuple[Any, ...], settings: Settings, replicas: Replicas, host: str, port: int, say: Callable[[str], None]
) -> None:
    """Deploy on the cluster that this process is connected to, and stay until SIGTERM or ctrl-C; then drain and remove everything.

    Raises:
        ValueError: if a replica cannot load what it is to serve.
        RuntimeError: if the cluster serves something under this name already, or its server listens elsewhere.
    """
    import ray
    from ray import serve

    stop = threading.Event()
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop.set())
    for name in ("ray", "ray.serve"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    there = serve.status()
    if there.applications:
        raise RuntimeError(f"the Ray cluster serves {', '.join(there.applications)} already; 'serve shutdown' there ends it")
    remote: Any = ray.remote(Board)
    board = remote.options(num_cpus=0).remote()
    serve.start(http_options={"host": host, "port": port}, logging_config={"enable_access_log": False, "log_level": "WARNING"})
    deployment: Any = serve.deployment(
        serve.ingress()(Replica),
        name=NAME,
        num_replicas=replicas.count,
        ray_actor_options={"num_cpus": replicas.num_cpus, "num_gpus": replicas.num_gpus},
        max_ongoing_requests=settings.capacity + _EXTRA_REQUESTS,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=settings.grace_s + READER_S,
        health_check_period_s=5,
        max_constructor_retry_count=2,
    )
    try:
        _deploy(deployment.bind(prepare, arguments, settings, board), stop)
        if not stop.is_set():
            say(f"serving {settings.name} on http://{f'[{host}]' if ':' in host else host}:{port}/v1")
        running = replicas.count
        while not stop.wait(_LOOK_S):
            now = _num_running()
            if now != running:
                say(f"{now} of {replicas.count} replicas run")
            running = now
        say(f"ending: running answers have {settings.grace_s:g} seconds")
        ray.get(board.drain.remote())
        time.sleep(2 * REPORT_S)
        serve.delete(NAME)
    finally:
        serve.shutdown()
    say("ended")


def _deploy(application: Any, stop: threading.Event) -> None:
    """Start the replicas and wait until all of them run.

    Raises:
        ValueError: with the words of the one that cannot.
    """
    from ray import serve
    from ray.serve.api import RunTarget

    serve.run_many([RunTarget(application, name=NAME)], wait_for_applications_running=False)
    while not stop.wait(0.2):
        found = serve.status().applications.get(NAME)
        status = "" if found is None else str(found.status.value)
        if status == "RUNNING":
            return
        if found is not None and status in ("DEPLOY_FAILED", "UNHEALTHY"):
            words = "\n".join([found.message, *(d.message for d in found.deployments.values())])
            told = re.search(re.escape(_MARK) + r"([^\n]+)", words)
            raise ValueError(f"a replica cannot start: {told[1] if told else ' '.join(words.split())[:300]}")


def _num_running() -> int:
    from ray import serve

    found = serve.status().applications.get(NAME)
    states: list[tuple[Any, int]] = [] if found is None else [pair for d in found.deployments.values() for pair in d.replica_states.items()]
    return sum(count for state, count in states if getattr(state, "value", state) == "RUNNING")
