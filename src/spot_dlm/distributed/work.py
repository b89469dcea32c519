"""Numbered pieces of work on a Ray cluster, by Ray Data's actors: the counterpart of `workers.run_in_processes` beyond one machine.

A worker prepares once and does a piece at a time. One that is lost is replaced, and its piece done again. What a piece gives comes
back to the caller, the only one who writes. Knows nothing of what the work is.

Example: `for number, outcome in run_on_ray(prepare, (model,), {0: prompts}, actors=2): ...`.
"""

import logging
import os
import pickle
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from warnings import catch_warnings

Work = Callable[[Any], Any]
"""Does one piece."""

MAX_RETRIES = 3
"""Times that a piece is done again because its worker was lost."""
_MAX_RESTARTS = 16  # of one worker


def run_on_ray(
    prepare: Callable[..., Work],
    arguments: tuple[Any, ...],
    pieces: Mapping[int, Any],
    actors: int,
    num_cpus: int = 1,
    num_gpus: int = 0,
    started: Callable[[str, int], None] = lambda host, pid: None,
) -> Iterator[tuple[int, Any]]:
    """Yield the number and outcome of every piece, each once, as they get ready.

    Args:
        prepare: a module's function, called once in every worker with `arguments`, returning what does a piece.
        arguments: anything that can be pickled.
        pieces: what the work is given, by number.
        actors: workers.
        num_cpus: that each reserves.
        num_gpus: that each reserves, and sees.
        started: told of every worker, by its machine and process id, when its first outcome comes.

    Raises:
        RuntimeError: if a worker cannot do a piece, or too many were lost.
    """
    import ray
    from ray.data import ActorPoolStrategy, DataContext

    context = DataContext.get_current()
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    context.enable_progress_bars = context.print_on_execution_start = False
    context.max_consecutive_actor_init_deaths = MAX_RETRIES
    rows = [{"number": number, "piece": pickle.dumps(piece)} for number, piece in pieces.items()]
    data = ray.data.from_items(rows, override_num_blocks=len(rows))
    with catch_warnings(action="ignore"):  # the two limits have no argument of their own yet
        outcomes = data.map_batches(
            _Worker,
            fn_constructor_args=(prepare, arguments),
            compute=ActorPoolStrategy(size=min(actors, len(rows)), max_tasks_in_flight_per_actor=1),
            batch_size=1,
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            ray_remote_args_fn=lambda: {"max_restarts": _MAX_RESTARTS, "max_task_retries": MAX_RETRIES},
        )
    seen: set[int] = set()
    known: set[tuple[str, int]] = set()
    try:
        for row in outcomes.iter_rows():
            if row["error"]:
                raise RuntimeError(f"worker on {row['host']}: {row['error']}")
            if (worker := (row["host"], row["pid"])) not in known:
                known.add(worker)
                started(*worker)
            if row["number"] not in seen:
                seen.add(row["number"])
                yield row["number"], pickle.loads(row["outcome"])
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except Exception as error:
        if isinstance(error, RuntimeError) and str(error).startswith("worker on "):
            raise
        raise RuntimeError(_told(error)) from error
    if missing := sorted(set(pieces) - seen):
        raise RuntimeError(f"Ray gave no outcome for {len(missing)} pieces of work, the first is {missing[0]}")


def _told(error: Exception) -> str:
    """Return in one line why Ray gives up."""
    from ray.exceptions import OutOfMemoryError, RayActorError, RaySystemError, WorkerCrashedError

    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in causes:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__
    if any(isinstance(c, OutOfMemoryError) for c in causes):
        return "a worker ran out of memory again and again; give fewer --actors to a machine, or a smaller --batch"
    if any(isinstance(c, RayActorError | WorkerCrashedError) for c in causes):
        return (
            f"workers were lost {MAX_RETRIES + 1} times over one shard; where the system kills them they are out of memory: "
            "fewer --actors, a smaller --batch"
        )
    if any(isinstance(c, RaySystemError) for c in causes):
        return "the Ray cluster went away"
    return f"Ray gave up: {type(error).__name__}: {' '.join(str(error).split())[:300]}"


class _Worker:
    """What runs in an actor; errors travel as rows, so that the first one ends the run with its own words."""

    def __init__(self, prepare: Callable[..., Work], arguments: tuple[Any, ...]) -> None:
        self._work: Work | None = None
        try:
            self._work = prepare(*arguments)
        except Exception as error:
            self._error = _line(error)

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[Any]]:
        """Do the piece in a batch of one."""
        outcome, error = b"", ""
        if self._work is None:
            error = self._error
        else:
            try:
                outcome = pickle.dumps(self._work(pickle.loads(batch["piece"][0])))
            except Exception as problem:
                error = _line(problem)
        about = {"number": int(batch["number"][0]), "host": socket.gethostname(), "pid": os.getpid(), "error": error, "outcome": outcome}
        return {key: [value] for key, value in about.items()}


def _line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    words = " ".join(str(error).split()) or type(error).__name__
    return words if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: {words}"
