"""A Ray cluster to work on: one of this machine's own, or one that runs already; what is wrong with it in one line.

Needs the extra `ray`. Example: `with cluster("local", num_cpus=2): ...`.
"""

import logging
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

LOCAL = "local"
_OBJECT_STORE_BYTES = 256 * 2**20
_CONNECT_S = 5.0
_TMP_CHARACTERS = 40  # of a temporary folder at most: a socket's path has 107, of which Ray needs 60


def check_installed() -> None:
    """Say what to install where Ray is missing.

    Raises:
        ValueError: with the command.
    """
    if find_spec("ray") is None:
        raise ValueError("--ray needs the package ray: pip install 'spot-dlm[ray]'")


@contextmanager
def cluster(address: str, num_cpus: int | None = None) -> Iterator[None]:
    """Connect to a cluster, or start one on this machine and remove all of it at the end.

    Args:
        address: "local", "auto" (the cluster that this machine is a node of) or HOST:PORT of its head.
        num_cpus: of a local cluster, what its workers may reserve together.

    Raises:
        ValueError: if the address is none.
        OSError: if there is no cluster.
    """
    check_address(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # what matters comes as an error of its own
    os.environ.setdefault("RAY_DATA_DISABLE_PROGRESS_BARS", "1")
    import ray

    logging.getLogger("ray").setLevel(logging.CRITICAL)
    common: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
    folder = ""
    try:
        if address == LOCAL:
            own = tempfile.gettempdir() if len(tempfile.gettempdir()) <= _TMP_CHARACTERS else "/tmp"
            folder = tempfile.mkdtemp(prefix="spot-ray-", dir=own)
            common |= {"num_cpus": num_cpus, "include_dashboard": False, "object_store_memory": _OBJECT_STORE_BYTES, "_temp_dir": folder}
        try:
            with _quiet_stderr():
                ray.init(address=address, **common)
        except Exception as error:
            hint = "'ray status' on its head node says more"
            if "AuthToken" in _chain(error):
                hint = "it asks for a token: RAY_AUTH_MODE=token, and the token in ~/.ray/auth_token"
            raise OSError(f"--ray {address}: no Ray cluster there ({_first_line(error)}); {hint}") from error
        logging.getLogger("ray").setLevel(logging.CRITICAL)  # init sets it anew
        try:
            yield
        finally:
            ray.shutdown()
    finally:
        if folder:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _quiet_stderr() -> Iterator[None]:
    """Keep what Ray's libraries print on stderr while they start; what goes wrong is raised."""
    sys.stderr.flush()
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)


def check_address(address: str) -> None:
    """Refuse an address at which nothing answers, before Ray waits for it for long.

    Raises:
        ValueError: if it is no address.
        OSError: if nothing listens there.
    """
    if address in (LOCAL, "auto"):
        return
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isdigit() and "/" not in host):
        raise ValueError(f"--ray {address} must be 'local', 'auto' or HOST:PORT of the head node, run on a node of the cluster")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error) or "no answer"
        raise OSError(
            f"--ray {address}: no Ray cluster there ({reason}); is its head node up, and the port the one of 'ray start'?"
        ) from error


def room(num_cpus: int, num_gpus: int, wanted: int | None) -> int:
    """Return how many workers of so many CPUs and GPUs the cluster is to run: as many as wanted, else as fit.

    Raises:
        ValueError: if so many do not fit, or none.
    """
    import ray

    there = ray.cluster_resources()
    cpus, gpus = there.get("CPU", 0), there.get("GPU", 0)
    fit = int(min(cpus // num_cpus, gpus // num_gpus if num_gpus else cpus))
    each = f"{num_cpus} CPU{'s' if num_cpus > 1 else ''}" + (f" and {num_gpus} GPU" if num_gpus else "")
    if fit < (wanted or 1):
        raise ValueError(f"the Ray cluster has {cpus:g} CPUs and {gpus:g} GPUs: room for {fit} workers of {each}, not for {wanted or 1}")
    return wanted or fit


def num_gpus(device: str | None) -> int:
    """Return how many GPUs a worker takes: one where the device or the cluster says so."""
    import ray

    if device is None:
        return int(ray.cluster_resources().get("GPU", 0) >= 1)
    return int(not device.startswith("cpu"))


def _chain(error: BaseException | None) -> str:
    """Return what an error and all that led to it say."""
    texts: list[str] = []
    while error is not None and len(texts) < 20:
        texts.append(str(error))
        error = error.__cause__ or error.__context__
    return "\n".join(texts)


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:200].rstrip(".")
