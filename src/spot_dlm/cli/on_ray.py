"""What the commands that work on Ray share: the option's check, the cluster and its workers, the shards of a recording.

Imports nothing of Ray before it is used. Example: `with Place("local", 2, 1, None).workers(console) as (actors, cpus, gpus): ...`.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from os import cpu_count
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from spot_dlm.cli.options import DrafterFiles
from spot_dlm.cli.show import say
from spot_dlm.distributed.cluster import LOCAL, check_address, check_installed, cluster, num_gpus, room
from spot_dlm.distributed.work import Work, run_on_ray
from spot_dlm.record import Recording, shard_columns
from spot_dlm.targets import load_target
from spot_dlm.traces import Columns

SHARD_SIZE = 64
"""Prompts of a shard."""


def check_ray(ray: str | None, counts: Mapping[str, int | None]) -> None:
    """Refuse, before anything is loaded, what cannot be: no Ray, no cluster, counts below 1 or without --ray.

    Raises:
        ValueError: naming the option.
        OSError: if there is no cluster at the address.
    """
    for name, value in counts.items():
        if value is not None and ray is None:
            raise ValueError(f"{name} {value} needs --ray")
        if value is not None and value < 1:
            raise ValueError(f"{name} {value} must be at least 1")
    if ray is not None:
        check_installed()
        check_address(ray)


@dataclass(frozen=True)
class Place:
    """Where the workers run: address, how many (None: as many as fit), CPU threads of each, device of their models."""

    address: str
    actors: int | None
    threads: int
    device: str | None

    @contextmanager
    def workers(self, console: Console, pieces: int) -> Iterator[tuple[int, int, int]]:
        """Open the cluster; give the workers, at most one a piece, and the CPUs and GPUs of each.

        Raises:
            ValueError: if they do not fit.
            OSError: if there is no cluster.
        """
        fit = max(1, (cpu_count() or 1) // self.threads) if self.actors is None else self.actors
        with cluster(self.address, fit * self.threads if self.address == LOCAL else None):
            gpus = num_gpus(self.device)
            count = min(pieces, room(self.threads, gpus, self.actors))
            each = f"{self.threads} CPU{'s' if self.threads > 1 else ''}" + (f" and {gpus} GPU" if gpus else "")
            say(console, f"{count} worker{'s' if count > 1 else ''} on Ray ({self.address}), {each} each")
            yield count, self.threads, gpus


def here(model: str) -> str:
    """Return a folder's absolute path, which workers know it by; other names as they are."""
    return str(Path(model).expanduser().resolve()) if Path(model).expanduser().is_dir() else model


def absolute(files: DrafterFiles) -> DrafterFiles:
    """Return a drafter's files by the paths that workers know them by."""
    graph, file = (None if path is None else path.expanduser().resolve() for path in (files.graph, files.file))
    return replace(files, graph=graph, file=file)


def shards_on_ray(
    recording: Recording, fingerprint: str, place: Place, console: Console, numbers: Sequence[int]
) -> Iterator[tuple[int, Columns]]:
    """Record shards on Ray and give each back as it gets ready.

    Raises:
        RuntimeError: if a worker cannot record, or too many were lost.
    """
    folder = None if recording.drafter is None else here(recording.drafter)
    sent = replace(recording, model=here(recording.model), drafter=folder)
    with place.workers(console, len(numbers)) as (actors, cpus, gpus):
        yield from run_on_ray(
            _prepare, (sent, place.threads, recording.drafter_hash, fingerprint), {n: n for n in numbers}, actors, cpus, gpus
        )


def _prepare(recording: Recording, threads: int, drafter: str, fingerprint: str) -> Work:
    """Return what records a shard in a worker."""
    torch.set_num_threads(threads)
    if recording.drafter_hash != drafter:
        raise ValueError(f"{recording.drafter}: not the drafter that the run began with")
    target: Any = load_target(recording.model, **recording.load_options)
    if target.spec.fingerprint != fingerprint:
        raise ValueError(f"{recording.model}: not the model that the run began with; every machine needs the same")

    def work(number: int) -> Columns:
        return shard_columns(target, recording, number)

    return work
