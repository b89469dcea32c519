"""What a pass, a draft and the loop cost on this machine: measured once in seconds, kept on disk, the ground of automatic budgets.

A profile belongs to its key: target, device, number type, threads, block length, drafter, torch, processor. A cache that is damaged,
foreign or cannot be written is never fatal. Knows nothing of the loop: who calls gives a function that decodes.

Example: `budget_for(target, drafter, DecodeParams(), run=trial(target, drafter, prompt_ids, params))`.
"""

import hashlib
import json
import os
import platform
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np
import torch

from spot_dlm.artifacts import read_json, write_json
from spot_dlm.budget import AutoBudget, Budget, CostProfile, FixedBudget
from spot_dlm.interfaces import DecodeParams, Drafter, Target, TargetSpec
from spot_dlm.state import MASKED
from spot_dlm.stats import Counts

FORMAT = "spot-cost/3"
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
PREFIXES = (64, 512, 2048)
TRIED_NODES = (1, 2, 4, 8, 16, 32)
DEFAULT_NODES = 8
"""Nodes of `nodes="auto"` for a target without a fingerprint, for which no measurement can be kept."""
_REPEATS, _SECONDS = 15, 1.0  # of a prefix
_ROUNDS, _TRIAL_SECONDS = 3, 2.0  # of decoding
_SLOW_MS = 500.0  # of a pass of one row
_DEARER = 1.5  # passes in decoding at most, by their surroundings; what is above comes from a long prompt
_NEEDED_ROWS, _MANY_ROWS = 4, 16  # measured however long it takes; measured twice only
_budgets: dict[Any, AutoBudget] = {}  # of this process: what a run learns serves the next one

Run = Callable[[int], Counts]
"""Decode something with so many nodes and return its counts."""


def cpu_name() -> str:
    """Return the processor's name, as far as the system tells it."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def profile_key(target: Target, drafter: Drafter, params: DecodeParams) -> dict[str, Any]:
    """Return what a profile depends on; of the sampling, whether tokens are drawn and filtered."""
    spec, sampling = target.spec, params.sampling
    file = getattr(drafter, "file", None) or getattr(drafter, "graphs", None)
    about = json.dumps(getattr(file, "about", {}), sort_keys=True, default=str)
    return {
        "target": spec.fingerprint,
        "family": spec.family,
        "device": torch.cuda.get_device_name(spec.device) if spec.device.type == "cuda" else cpu_name(),
        "dtype": spec.dtype,
        "threads": torch.get_num_threads(),
        "block_length": params.block_length or target.spec.block_length,
        "sampled": sampling.temperature > 0,
        "filtered": sampling.temperature > 0 and (sampling.top_k > 0 or sampling.top_p < 1),
        "drafter": drafter.name,
        "drafter_file": hashlib.sha256(about.encode()).hexdigest()[:16],
        "torch": torch.__version__,
        "spot_dlm": version("spot-dlm"),
    }


def cache_folder() -> Path:
    """Return the folder of measured profiles: $SPOT_CACHE, else spot-dlm in the user's cache."""
    own = os.environ.get("SPOT_CACHE")
    return Path(own or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "spot-dlm").expanduser()


def profile_path(key: dict[str, Any]) -> Path:
    """Return the file of a key."""
    digest = hashlib.sha256(json.dumps([FORMAT, key], sort_keys=True).encode()).hexdigest()[:24]
    return cache_folder() / f"cost-{digest}.json"


def load_profile(key: dict[str, Any], say: Callable[[str], None] = lambda _: None) -> CostProfile | None:
    """Return the kept profile of a key, None if there is none; a damaged file is said and ignored."""
    try:
        path = profile_path(key)
        if not path.is_file():
            return None
        document = read_json(path, FORMAT)
        if document.get("key") != key:
            raise ValueError(f"{path}: belongs to another setting")
        return CostProfile.from_dict(document["profile"])
    except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
        say(f"the kept cost of a pass is not used, it is measured again ({error})")
        return None


def save_profile(key: dict[str, Any], profile: CostProfile, say: Callable[[str], None] = lambda _: None) -> Path | None:
    """Keep a profile; None, and a line, where the cache cannot be written."""
    try:
        path = profile_path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"format": FORMAT, "key": key, "profile": profile.to_dict()})
    except (OSError, RuntimeError) as error:  # RuntimeError: no home folder
        say(f"the measured cost of a pass cannot be kept ({error})")
        return None
    return path


def stages(spec: TargetSpec, block_length: int) -> int:
    """Return the stages of a measurement with drafts, for a progress bar."""
    return len(_prefixes(spec.max_length, block_length)) + 1 + len(TRIED_NODES)


def measure(
    target: Target,
    drafter: Drafter,
    block_length: int | None = None,
    run: Run | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> CostProfile:
    """Measure a target's passes by rows and prefix, and with `run` what the loop and the drafter cost.

    Passes are over random canvases, half masked. Row counts take turns, and so do numbers of nodes; the quickest quarter counts, for
    whatever else the machine does only adds to it. What a slow device does not reach in its time, or has no memory for, is extrapolated;
    where a pass takes half a second, the loop and the drafter are as nothing and not measured.

    Args:
        target: the model.
        drafter: whose drafts `run` makes.
        block_length: None takes the target's own.
        run: decodes something typical with a number of nodes; None leaves the loop's and the drafter's milliseconds at 0.
        progress: called with stages done and all stages.
    """
    spec = target.spec
    length = block_length or spec.block_length
    prefixes = _prefixes(spec.max_length, length)
    total = stages(spec, length) if run else len(prefixes)
    curves: dict[int, tuple[float, ...]] = {}
    is_slow = False
    for done, tokens in enumerate(prefixes):
        progress(done, total)
        try:
            curves[tokens] = _curve(target, tokens, length)
        except (RuntimeError, MemoryError):  # no memory for so long a prefix
            if not curves:
                raise
            break
        if is_slow := curves[tokens][0] > _SLOW_MS:
            break
    progress(len(prefixes), total)
    counts = _decode(run, _clock(target), lambda done: progress(len(prefixes) + done, total)) if run and not is_slow else {}
    progress(total, total)
    host_ms, token_ms = _host_ms(list(counts.values()))
    drafts = {n: c for n, c in counts.items() if c.drafted}
    draft_ms = _rising([1e3 * c.draft_s / c.offered[0] for c in drafts.values()])
    return CostProfile(
        rows=ROWS,
        prefixes=tuple(curves),
        pass_ms=_as_in_decoding(curves, counts),
        host_ms=host_ms,
        token_ms=token_ms,
        draft_ms=tuple(zip(drafts, draft_ms, strict=True)),
        steps_per_pass=tuple((n, c.acceptance_length) for n, c in drafts.items()),
        reached=_reached(drafts),
        drafter=drafter.name,
        device=str(spec.device),
        dtype=spec.dtype,
        threads=torch.get_num_threads(),
        block_length=length,
    )


def budget_for(
    target: Target, drafter: Drafter, params: DecodeParams, run: Run | None = None, say: Callable[[str], None] | None = None
) -> Budget:
    """Return the budget of `params.nodes`: a fixed one, or the automatic one of this target and drafter, measured if it has not been.

    A process keeps automatic budgets, with what they have learned.
    """
    if params.nodes != "auto":
        return FixedBudget(params.nodes)
    if drafter.name == "root":
        return FixedBudget(1)
    if not target.spec.fingerprint:
        return FixedBudget(DEFAULT_NODES)
    tell = say or (lambda _: None)
    key = profile_key(target, drafter, params)
    name = json.dumps(key, sort_keys=True), params.rule, params.boundary
    if name not in _budgets:
        profile = load_profile(key, tell)
        if profile is None:
            tell("measuring what a pass costs here, once: a few seconds (spot tune shows it)")
            profile = measure(target, drafter, params.block_length, run)
            save_profile(key, profile, tell)
        _budgets[name] = AutoBudget(profile)
    return _budgets[name]


def _as_in_decoding(curves: dict[int, tuple[float, ...]], counts: dict[int, Counts]) -> tuple[tuple[float, ...], ...]:
    """Return the curves as decoding meets them: between passes the loop and the drafter use the processor's caches, so passes are dearer.

    The factor, by rows, is what passes took in the runs over what the curve of the shortest prefix says.
    """
    measured = list(curves.values())
    found = sorted((c.rows / c.nfe, 1e3 * c.target_s / (c.nfe + c.nfe_prefill + c.nfe_commit)) for c in counts.values() if c.nfe)
    if not found:
        return tuple(measured)
    rows = [r for r, _ in found]
    factors = [min(_DEARER, max(1.0, took / float(np.interp(r, ROWS, measured[0])))) for r, took in found]
    return tuple(tuple(ms * float(np.interp(r, rows, factors)) for r, ms in zip(ROWS, curve, strict=True)) for curve in measured)


def _prefixes(max_length: int, length: int) -> tuple[int, ...]:
    """Return the prefixes that fit the context, in whole blocks; at least one."""
    room = max(0, max_length // length - 2) * length
    return tuple(sorted({min(p // length * length, room) for p in PREFIXES}))


def _curve(target: Target, tokens: int, length: int) -> tuple[float, ...]:
    """Return the milliseconds of a pass for every number of rows; in proportion from where time or memory are at an end."""
    spec, rng = target.spec, np.random.default_rng(0)
    ids = np.setdiff1d(np.arange(spec.vocab_size), [spec.mask_token_id])
    prefix = target.prefill(rng.choice(ids, tokens), length)
    canvases = rng.choice(ids, (ROWS[-1], length))
    canvases[rng.random(canvases.shape) < 0.5] = MASKED
    canvases[:, -1] = MASKED
    target.evaluate(prefix, canvases[:1])  # whatever is made at the first pass
    seen: dict[int, list[float]] = {}
    clock, began, most = _clock(target), perf_counter(), ROWS[-1]
    for repeat in range(_REPEATS + 1):
        for rows in ROWS if repeat % 2 == 0 else ROWS[::-1]:  # up and down: no small pass follows a large one, as in decoding
            late = perf_counter() - began > _SECONDS
            if rows > most or (repeat > 2 and rows > _MANY_ROWS) or (late and (repeat > 0 or rows > _NEEDED_ROWS)):
                continue
            start = clock()
            try:
                target.evaluate(prefix, canvases[:rows])
            except (RuntimeError, MemoryError):
                if rows == 1:
                    raise
                most = ROWS[ROWS.index(rows) - 1]
                continue
            if repeat == 1:
                seen[rows] = []  # the first was a warm-up for this shape
            seen.setdefault(rows, []).append(1e3 * (clock() - start))
    known = sorted(rows for rows in seen if rows <= most)
    values = [float(np.quantile(seen[rows], 0.25, method="higher")) for rows in known]
    return tuple(float(np.interp(rows, known, values)) * max(1.0, rows / known[-1]) for rows in ROWS)


def _clock(target: Target) -> Callable[[], float]:
    """Return the clock to measure passes by: with one CPU thread its own time, which other programs do not lengthen."""
    return process_time if target.spec.device.type == "cpu" and torch.get_num_threads() == 1 else perf_counter


def _decode(run: Run, clock: Callable[[], float], progress: Callable[[int], None]) -> dict[int, Counts]:
    """Decode with every number of nodes, in turns while there is time; of each keep the quickest, of slow devices one number alone."""

    def decode(nodes: int) -> Counts:
        start, began = clock(), perf_counter()
        counts = run(nodes)
        own = min(1.0, (clock() - start) / (perf_counter() - began))
        return replace(counts, total_s=own * counts.total_s, target_s=own * counts.target_s, draft_s=own * counts.draft_s)

    best = {DEFAULT_NODES: decode(DEFAULT_NODES)}  # loads compiled code, so the next ones are quicker
    if best[DEFAULT_NODES].target_s > _TRIAL_SECONDS:  # little of that was loading
        return best
    began = perf_counter()
    for turn in range(_ROUNDS):
        if turn == 1 and perf_counter() - began > _TRIAL_SECONDS:
            began = perf_counter()  # what the first turn loads and compiles is no reason to have no second one
        for done, nodes in enumerate(TRIED_NODES, 1):
            if turn and perf_counter() - began > _TRIAL_SECONDS:
                break
            progress(done)
            counts = decode(nodes)
            if not turn or counts.total_s < best[nodes].total_s:
                best[nodes] = counts
    return {nodes: best[nodes] for nodes in TRIED_NODES}


def _rising(values: Sequence[float]) -> list[float]:
    """Return the highest curve that never falls and never lies above a value: more nodes cost no less, and noise only adds."""
    return np.minimum.accumulate(np.array(values)[::-1])[::-1].tolist()


def _reached(drafts: dict[int, Counts]) -> tuple[float, ...]:
    """Return the share of walks that arrived at each depth with most nodes, of those that had a guess."""
    counts = drafts[max(drafts)] if drafts else Counts()
    return tuple(reached / counts.offered[0] for reached in counts.reached if reached)


def _host_ms(counts: Sequence[Counts]) -> tuple[float, float]:
    """Return the milliseconds of the loop for each pass and for each step that fit the runs best; (0, 0) without runs."""
    if not counts:
        return 0.0, 0.0
    per_pass = np.array([1e3 * (c.total_s - c.target_s - c.draft_s) / c.nfe for c in counts])
    design = np.array([[1.0, c.acceptance_length] for c in counts])
    host, token = np.linalg.lstsq(design, per_pass, rcond=None)[0].tolist()
    return (host, token) if host > 0 and token > 0 else (max(0.0, float(per_pass.min())), 0.0)
