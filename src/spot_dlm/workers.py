"""Numbered pieces of work in several processes that end with this one, however it ends, and leave ctrl-C to it; the folder of a run.

Knows nothing of what the work is. Example: `run_in_processes(prepare, (model,), numbers=[0, 1, 2], workers=2, progress=print)`.
"""

import errno
import fcntl
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from spot_dlm.artifacts import read_json, write_json

Work = Callable[[int, Callable[[], None]], object]
"""Does the piece of a number and calls the second argument for every unit that is done."""

_worker: dict[str, Any] = {}


def run_in_processes(
    prepare: Callable[..., Work], arguments: tuple[Any, ...], numbers: Sequence[int], workers: int, progress: Callable[[int], None]
) -> None:
    """Do all pieces; the first error is raised here, after every process has ended.

    Args:
        prepare: a module's function, called once in every process with `arguments`, returning what does a piece.
        arguments: anything that can be pickled.
        numbers: the pieces.
        workers: processes at most.
        progress: called now and then with the units done.
    """
    context = multiprocessing.get_context("spawn")
    counter = context.Value("q", 0)
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(
        max(1, min(workers, len(numbers))), mp_context=context, initializer=_start, initargs=(prepare, arguments, counter)
    )
    try:
        with _sigint_ignored():
            futures = {pool.submit(_run, n) for n in numbers}
        while futures:
            done, futures = wait(futures, timeout=0.5, return_when=FIRST_EXCEPTION)
            progress(counter.value)
            for future in done:
                future.result()
    except BaseException:
        for process in set(multiprocessing.active_children()) - others:
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _start(prepare: Callable[..., Work], arguments: tuple[Any, ...], counter: Any) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker.update(work=prepare(*arguments), counter=counter)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)


def _run(number: int) -> None:
    def count() -> None:
        with _worker["counter"].get_lock():
            _worker["counter"].value += 1

    _worker["work"](number, count)


@contextmanager
def _sigint_ignored() -> Iterator[None]:
    """Let processes started meanwhile ignore ctrl-C from their first instruction on."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold a lock on an existing file, where the file system has locks.

    Raises:
        ValueError: if another process holds it.
    """
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"{path.parent}: another run is writing there; wait for it or give another folder") from error
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF):
                raise
        yield


@contextmanager
def opened(folder: Path, plan: dict[str, Any], kind: str) -> Iterator[None]:
    """Make the folder this run's, or find that it is, and keep other runs out; `plan` is what identifies the run.

    Raises:
        ValueError: if it holds something else, or another run writes there.
        OSError: if it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "plan.json"
    if path.exists():
        found = read_json(path, plan["format"])
        if differing := ", ".join(k for k in {**plan, **found} if plan.get(k) != found.get(k)):
            raise ValueError(f"{folder}: holds another {kind} (other {differing}, see its plan.json); give another folder")
    elif any(not p.name.endswith(".partial") for p in folder.iterdir()):
        raise ValueError(f"{folder}: is not empty and holds no {kind}; give another folder")
    else:
        write_json(path, plan)
    with exclusive(path):
        try:
            yield
        finally:
            for left in folder.glob(".*.partial"):  # of a process that was killed while it wrote
                with suppress(OSError):
                    left.unlink()
