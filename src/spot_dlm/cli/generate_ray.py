"""`spot generate --ray`: a prompt file in shards, each decoded by one worker and written here, whole or not at all.

A folder holds one run: plan.json says what identifies it, shard-00000.jsonl and so on are result files as `spot generate --out` writes
them, manifest.json comes last. Workers write nothing.

Example: `generate_on_ray(sharded, Path("results"), Place("local", 2, 1, None), console)`.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from io import StringIO
from itertools import product
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from rich.console import Console

from spot_dlm import artifacts
from spot_dlm.cli import options as o
from spot_dlm.cli.generate import Run, prepare
from spot_dlm.cli.jsonl import PromptLine, ResultFile, result_line
from spot_dlm.cli.on_ray import Place, absolute, here
from spot_dlm.cli.show import COMMAND, progress_lines, provenance, say, stats_table
from spot_dlm.distributed.work import Work, run_on_ray
from spot_dlm.interfaces import DecodeParams, Target
from spot_dlm.stats import Counts
from spot_dlm.workers import opened

PLAN = "spot-generate-plan/1"
FORMAT = "spot-generate/1"
_OF_A_MACHINE = ("device", "dtype", "threads", "model")
"""Settings in which workers may differ from this process, though not from each other (the model's name apart)."""


@dataclass(frozen=True)
class Sharded:
    """What is decoded, how, and in shards of how many prompts."""

    lines: Sequence[PromptLine]
    params: DecodeParams
    model: str
    options: o.TargetOptions
    drafter: str
    files: o.DrafterFiles
    samples: int
    batch: int
    shard_size: int

    @property
    def num_shards(self) -> int:
        """Files of the whole run."""
        return -(-len(self.lines) // self.shard_size)

    def shard(self, number: int) -> Sequence[PromptLine]:
        """Return the prompts of one shard."""
        return self.lines[number * self.shard_size : (number + 1) * self.shard_size]

    def num_decodes(self, numbers: Sequence[int]) -> int:
        """Return how many results some shards have."""
        return self.samples * sum(len(self.shard(n)) for n in numbers)

    def settings(self, target: Target, drafter: str) -> dict[str, Any]:
        """Return the settings that every result line carries."""
        more = {"drafter": drafter, "nodes": self.params.nodes, "raw": self.options.raw, "strict": self.options.strict}
        return provenance(target, self.params) | more

    def plan(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Return what identifies the run: a folder holds one plan only."""
        rows = "".join(json.dumps([line.id, line.prompt, line.overrides]) + "\n" for line in self.lines)
        return {
            "format": PLAN,
            **{k: v for k, v in settings.items() if k not in ("format", *_OF_A_MACHINE)},
            "model": self.model,
            "device": self.options.device,
            "dtype": self.options.dtype,
            "drafter_sha256": _hashes(self.files),
            "samples": self.samples,
            "shard_size": self.shard_size,
            "num_prompts": len(self.lines),
            "prompts_sha256": hashlib.sha256(rows.encode("utf-8", "surrogatepass")).hexdigest(),
        }


@dataclass
class Outcome:
    """What a worker gives back of a shard."""

    rows: list[dict[str, Any]]
    failed: list[str]
    counts: Counts
    settings: dict[str, Any]


def shard_path(folder: Path, number: int) -> Path:
    """Return the file of a shard."""
    return folder / f"shard-{number:05d}.jsonl"


def _hashes(files: o.DrafterFiles) -> list[str]:
    """Return the hashes of the drafter's files; each may be a folder of several."""
    places = [place for place in (files.graph, files.file) if place is not None]
    parts = [sorted(p for p in at.iterdir() if p.suffix in (".json", ".safetensors")) if at.is_dir() else [at] for at in places]
    return [artifacts.file_hash(path) for part in parts for path in part]


def _prepare(sharded: Sharded, threads: int, expected: dict[str, Any], hashes: list[str]) -> Work:
    """Return what decodes a shard in a worker, once it is sure to have the same model, drafter and versions as the run."""
    torch.set_num_threads(threads)
    target = o.open_target(sharded.model, sharded.options)
    drafter = o.open_drafter(sharded.drafter, target.spec, sharded.files, lambda _: None, [sharded.params])
    if _hashes(sharded.files) != hashes:
        raise ValueError(f"{sharded.files.file or sharded.files.graph}: not the drafter that the run began with")
    settings = sharded.settings(target, drafter.name)
    if differing := _differing(settings, expected, _OF_A_MACHINE):
        raise ValueError(f"{differing} where the run began; every machine needs the same")
    silent = Console(file=StringIO())

    def work(lines: Sequence[PromptLine]) -> Outcome:
        run = Run(target, drafter, None, sharded.samples, sharded.batch, silent, watch=False, quiet=True)
        rows = run.all([prepare(target, line, sharded.params) for line in lines], as_lines=False)
        return Outcome(rows, run.failed, run.counts, settings)

    return work


def _differing(found: dict[str, Any], wanted: dict[str, Any], besides: Sequence[str] = ()) -> str:
    keys = [k for k in {**wanted, **found} if k not in besides and wanted.get(k) != found.get(k)]
    return ", ".join(f"{k} is {found.get(k)!r} there, {wanted.get(k)!r}" for k in keys)


def generate_on_ray(sharded: Sharded, folder: Path, place: Place, console: Console, stats: bool = False) -> None:
    """Decode the shards that the folder lacks, check that every result is there once, and write the manifest.

    Raises:
        ValueError: for a prompt that cannot be decoded, before any worker starts; if the folder holds another run.
        OSError: if the folder cannot be written; what is finished stays.
        RuntimeError: if a worker cannot decode, or too many were lost.
    """
    began = monotonic()
    target = o.open_target(sharded.model, _driver_options(sharded.options))
    drafter = o.open_drafter(sharded.drafter, target.spec, sharded.files, partial(say, console), [sharded.params])
    for line in sharded.lines:
        prepare(target, line, sharded.params)
    settings = sharded.settings(target, drafter.name)
    del target
    with opened(folder, sharded.plan(settings), "run"):
        run = _Writing(sharded, folder, place, console, settings)
        try:
            run.all()
        except KeyboardInterrupt:
            done = sharded.num_decodes([n for n in range(sharded.num_shards) if shard_path(folder, n).exists()])
            total = sharded.num_decodes(range(sharded.num_shards))
            raise KeyboardInterrupt(
                f"interrupted: {done} of {total} decodes done and kept; run the same command again to continue"
            ) from None
        if stats:
            console.print(stats_table(run.counts))
        if run.failed:
            raise ValueError(
                f"{len(run.failed)} decodes failed, the first {run.failed[0]}; their shards are kept as *.incomplete.jsonl "
                "and decoded again by the same command"
            )
        about = run.check()
        artifacts.write_json(folder / "manifest.json", {"format": FORMAT, "command": COMMAND.get(), **about})
    total = sharded.num_decodes(range(sharded.num_shards))
    say(console, f"{total} of {total} results in {sharded.num_shards} shards: each once, none missing")
    summary = {"out": str(folder), "prompts": len(sharded.lines), "results": total, "shards": sharded.num_shards}
    print(json.dumps(summary | {"new": run.num_new, "seconds": round(monotonic() - began, 3)}))


def _driver_options(options: o.TargetOptions) -> o.TargetOptions:
    """Return how this process loads the model: to read prompts, on the CPU, whatever the workers have."""
    return replace(options, device="cpu")


@dataclass
class _Writing:
    """The one process that writes a run's folder."""

    sharded: Sharded
    folder: Path
    place: Place
    console: Console
    expected: dict[str, Any]
    failed: list[str] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)
    num_new: int = 0
    settings: dict[str, Any] | None = None

    def all(self) -> None:
        """Write every missing shard."""
        sharded, numbers = self.sharded, range(self.sharded.num_shards)
        missing = [n for n in numbers if not shard_path(self.folder, n).exists()]
        done, total = sharded.num_decodes(numbers) - sharded.num_decodes(missing), sharded.num_decodes(numbers)
        for number in sorted(set(numbers) - set(missing))[:1]:
            self.settings = self._settings_of(number)
        with progress_lines(self.console, "decoding", "finished", "decodes") as show:
            show(done, total)
            for number, outcome in self._outcomes(missing) if missing else ():
                self._keep(number, outcome)
                done += len(outcome.rows) if not outcome.failed else 0
                show(done, total)

    def _outcomes(self, missing: Sequence[int]) -> Iterator[tuple[int, Outcome]]:
        sharded, place = self.sharded, self.place
        files = absolute(sharded.files)
        options = replace(sharded.options, threads=place.threads)
        sent = replace(sharded, lines=[], model=here(sharded.model), options=options, files=files)
        pieces = {n: list(sharded.shard(n)) for n in missing}
        arguments = (sent, place.threads, self.expected, _hashes(files))
        with place.workers(self.console, len(missing)) as (actors, cpus, gpus):
            yield from run_on_ray(_prepare, arguments, pieces, actors, cpus, gpus, self._met)

    def _met(self, host: str, pid: int) -> None:
        if self.console.is_terminal:
            say(self.console, f"worker {pid} on {host} works")

    def _keep(self, number: int, outcome: Outcome) -> None:
        """Write one shard under its name, or aside if a decode failed."""
        self.settings = self.settings or outcome.settings
        if differing := _differing(outcome.settings, self.settings, ("model",)):
            raise ValueError(f"a worker's {differing} in the shards before; every machine needs the same (--device, --dtype)")
        path, aside = shard_path(self.folder, number), self.folder / f"shard-{number:05d}.incomplete.jsonl"
        try:
            data = b"".join(result_line(row, outcome.settings) for row in outcome.rows)
            artifacts.replace_file(aside if outcome.failed else path, lambda partial: partial.write_bytes(data))
            if not outcome.failed:
                aside.unlink(missing_ok=True)
        except OSError as error:
            reason = f"{error.strerror or error} (finished shards are kept; the same command continues)"
            raise OSError(error.errno, reason, str(path)) from error
        for failure in outcome.failed:
            say(self.console, failure)
        self.failed += outcome.failed
        self.counts = self.counts + outcome.counts
        self.num_new += len(outcome.rows)

    def _settings_of(self, number: int) -> dict[str, Any]:
        """Return the settings of a shard that is there."""
        path = shard_path(self.folder, number)
        try:
            with path.open("rb") as file:
                return dict(json.loads(file.readline())["settings"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}: damaged; remove it, and the same command decodes it again") from error

    def check(self) -> dict[str, Any]:
        """Read every shard and return the manifest.

        Raises:
            ValueError: if a result is missing, twice or another one's.
        """
        shards = []
        for number in range(self.sharded.num_shards):
            path, lines = shard_path(self.folder, number), self.sharded.shard(number)
            wanted = {(str(line.id), sample) for line, sample in product(lines, range(self.sharded.samples))}
            with ResultFile(path, self.settings or {}) as file:
                whole = all(file.is_finished(line, sample) for line, sample in product(lines, range(self.sharded.samples)))
                if not whole or set(file.finished) != wanted or path.read_bytes().count(b"\n") != len(wanted):
                    raise ValueError(f"{path}: results are missing, or there twice; remove it, and the same command decodes it again")
            entry = {"file": path.name, "results": len(wanted), "bytes": path.stat().st_size, "sha256": artifacts.file_hash(path)}
            shards.append(entry)
        return {"settings": self.settings, "results": sum(s["results"] for s in shards), "shards": shards}
