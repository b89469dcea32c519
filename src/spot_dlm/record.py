"""Record standard decoding as traces: sharded, resumable, by several processes (spot trace).

Every prompt is decoded in every setting, or (spread) in one setting each, in turn. A shard is a fixed share of the work; what is
already there is not recorded again. Knows nothing of the command line and of training.

Example: `record(Recording("shipped", prompts, settings), Path("traces"), workers=2)`.
"""

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from spot_dlm.artifacts import provenance, read_json, write_json
from spot_dlm.decode import BlockFinished, BlockStarted, Finished, Pass, decode_steps
from spot_dlm.drafters import Root
from spot_dlm.interfaces import DecodeParams, Target
from spot_dlm.lookahead import look_ahead
from spot_dlm.noise import CoupledNoise
from spot_dlm.outputs import read_outputs
from spot_dlm.rules import parse_rule
from spot_dlm.targets import load_target
from spot_dlm.traces import NUM_LOGP, Columns, shard_path, write_manifest, write_shard
from spot_dlm.transition import Sampling

PLAN = "spot-trace-plan/1"
SEQUENCES_PER_SHARD = 64
BYTES_PER_TOKEN = {True: 5500, False: 1600}
"""Measured size of a trace per generated token (L = 16 and 32 mixed), sampled or not: an estimate before recording."""


@dataclass(frozen=True)
class TraceSetting:
    """How a prompt is decoded for a trace.

    Raises:
        ValueError: naming the field; the rule must commit one position per step.
    """

    rule: str = "standard"
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    block_length: int | None = None
    max_new_tokens: int = 128

    def __post_init__(self) -> None:
        rule = parse_rule(self.rule)
        if rule.num_per_step > 1 or rule.select == "threshold":
            raise ValueError(f"rule={self.rule!r} commits several positions per step; traces need one per step")
        self.params(0, 0)

    def params(self, seed: int, sequence: int) -> DecodeParams:
        """Return the decoding parameters of standard decoding."""
        sampling = Sampling(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, seed=seed)
        return DecodeParams(
            rule=parse_rule(self.rule),
            sampling=sampling,
            max_new_tokens=self.max_new_tokens,
            nodes=1,
            block_length=self.block_length,
            sequence=sequence,
        )


@dataclass(frozen=True)
class Recording:
    """What is to be recorded; `prompts` are rows with `prompt` or `prompt_ids`, optionally `id` and `family`."""

    model: str
    prompts: Sequence[dict[str, Any]]
    settings: Sequence[TraceSetting]
    seed: int = 0
    spread: bool = False
    max_depth: int = 16
    load_options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.prompts:
            raise ValueError("prompts: nothing to record")
        if not self.settings:
            raise ValueError("settings: nothing to record")
        if self.max_depth < 1:
            raise ValueError(f"max_depth={self.max_depth} must be at least 1")

    @cached_property
    def jobs(self) -> list[tuple[int, int]]:
        """(prompt, setting) of every sequence, in recording order."""
        count = len(self.settings)
        if self.spread:
            return [(p, (p + p // count) % count) for p in range(len(self.prompts))]
        return [(p, s) for p in range(len(self.prompts)) for s in range(count)]

    @property
    def num_shards(self) -> int:
        """Files that the recording will have."""
        return -(-len(self.jobs) // SEQUENCES_PER_SHARD)

    @property
    def estimated_bytes(self) -> int:
        """Size on disk if every sequence had half its tokens."""
        settings = [self.settings[s] for _, s in self.jobs]
        return sum(BYTES_PER_TOKEN[s.temperature > 0] * s.max_new_tokens // 2 for s in settings)

    def plan(self, spec_fingerprint: str) -> dict[str, Any]:
        """Return what identifies the recording: a folder holds one plan only."""
        return {
            "format": PLAN,
            "model": self.model,
            "fingerprint": spec_fingerprint,
            "settings": [asdict(s) for s in self.settings],
            "seed": self.seed,
            "spread": self.spread,
            "max_depth": self.max_depth,
            "prompts": [{"id": p.get("id", i), "family": p.get("family", "")} for i, p in enumerate(self.prompts)],
            "prompts_hash": _hash_prompts(self.prompts),
        }


def _hash_prompts(prompts: Sequence[dict[str, Any]]) -> str:
    import hashlib

    digest = hashlib.sha256()
    for row in prompts:
        digest.update(repr(row.get("prompt", row.get("prompt_ids"))).encode())
    return digest.hexdigest()


def record_sequence(columns: Columns, target: Target, prompt: str | list[int], params: DecodeParams, max_depth: int) -> int:
    """Decode one prompt plainly and append its blocks, states, rows and look-ahead; return the number of blocks."""
    noise = CoupledNoise(params.sampling.seed, params.sequence, params.rule.noise_step, target.spec.device)
    blocks = states = tail = 0
    for event in decode_steps(target, prompt, Root(), params):
        if isinstance(event, BlockStarted):
            tail, states = len(event.state.canvas) - len(event.state.masked), 0
        elif isinstance(event, Pass):
            states += 1
            _record_state(columns, event, params, noise, max_depth)
        elif isinstance(event, BlockFinished):
            columns.add("block", index=event.state.block, tail=tail, states=states)
            blocks += 1
        elif isinstance(event, Finished):
            columns.parts.setdefault("_tokens", []).append(np.array([len(event.result.token_ids)]))
    return blocks


def _record_state(columns: Columns, event: Pass, params: DecodeParams, noise: CoupledNoise, max_depth: int) -> None:
    transition = event.acceptance.transitions[0]
    before, candidates = transition.before, transition.candidates
    outputs = read_outputs(before.masked, event.acceptance.logits, params.sampling)
    logp = outputs.logp[:, :NUM_LOGP]
    if logp.shape[1] < NUM_LOGP:
        logp = np.pad(logp, ((0, 0), (0, NUM_LOGP - logp.shape[1])), constant_values=-80.0)
    columns.add(
        "row",
        position=before.masked,
        logp=logp,
        ids=outputs.ids[:, [0, min(1, outputs.ids.shape[1] - 1)]],
        log_rest=outputs.log_rest,
        entropy=outputs.entropy,
        fine=candidates.fine,
        token=candidates.tokens,
    )
    remaining = len(before.masked) - 1
    depths = min(remaining, max_depth) if params.sampling.temperature > 0 else 0
    if depths:
        at = np.flatnonzero(before.masked != transition.positions[0])
        rows = outputs.take(at)
        ahead = look_ahead(rows, transition.state, params.rule, params.sampling, noise, depths, candidates.fine[at])
        columns.add("ahead", tokens=ahead.tokens, fine=ahead.fine, margin=ahead.margin)
    columns.add(
        "state",
        step=before.step,
        rows=len(before.masked),
        ahead_depths=depths,
        commit_position=transition.positions[0],
        commit_token=transition.tokens[0],
    )


def record_shard(target: Target, recording: Recording, folder: Path, number: int) -> int:
    """Record one shard; return its number of sequences."""
    jobs = recording.jobs[number * SEQUENCES_PER_SHARD : (number + 1) * SEQUENCES_PER_SHARD]
    columns = Columns()
    for prompt_number, setting_number in jobs:
        row, setting = recording.prompts[prompt_number], recording.settings[setting_number]
        prompt = row["prompt"] if "prompt" in row else row["prompt_ids"]
        sequence = prompt_number * len(recording.settings) + setting_number
        blocks = record_sequence(columns, target, prompt, setting.params(recording.seed, sequence), recording.max_depth)
        tokens = int(columns.parts.pop("_tokens")[0][0])
        columns.add("sequence", prompt=prompt_number, setting=setting_number, blocks=blocks, tokens=tokens)
    write_shard(folder, number, columns)
    return len(jobs)


_worker: dict[str, Any] = {}


def _start_worker(recording: Recording, folder: Path, threads: int) -> None:
    torch.set_num_threads(threads)
    _worker.update(target=load_target(recording.model, **recording.load_options), recording=recording, folder=folder)


def _run_shard(number: int) -> int:
    return record_shard(_worker["target"], _worker["recording"], _worker["folder"], number)


def record(
    recording: Recording,
    folder: Path,
    workers: int = 1,
    threads: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
    command: str = "",
) -> dict[str, Any]:
    """Record what is missing and write the manifest last; return it.

    Args:
        recording: what.
        folder: where; it is made if needed, and may hold an interrupted recording of the same plan.
        workers: processes, each with its own target.
        threads: torch threads of each.
        progress: called with sequences done and all sequences.
        command: for the provenance.

    Raises:
        ValueError: if the folder holds another recording, or a prompt cannot be decoded.
    """
    if workers < 1:
        raise ValueError(f"workers={workers} must be at least 1")
    target = load_target(recording.model, **recording.load_options)
    plan = recording.plan(target.spec.fingerprint)
    folder.mkdir(parents=True, exist_ok=True)
    plan_path = folder / "plan.json"
    if plan_path.exists():
        if read_json(plan_path, PLAN) != plan:
            raise ValueError(f"{folder}: holds another recording (see its plan.json); give another folder or the same options")
    elif any(folder.iterdir()):
        raise ValueError(f"{folder}: is not empty and holds no recording; give another folder")
    else:
        write_json(plan_path, plan)
    missing = [n for n in range(recording.num_shards) if not shard_path(folder, n).exists()]
    total = len(recording.jobs)
    done = total - sum(len(recording.jobs[n * SEQUENCES_PER_SHARD : (n + 1) * SEQUENCES_PER_SHARD]) for n in missing)
    progress(done, total)
    if workers == 1 or len(missing) == 1:
        torch.set_num_threads(threads)
        for number in missing:
            done += record_shard(target, recording, folder, number)
            progress(done, total)
    elif missing:
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker, initargs=(recording, folder, threads))
        try:
            for finished in as_completed([pool.submit(_run_shard, n) for n in missing]):
                done += finished.result()
                progress(done, total)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    about = provenance(target.spec, command) | {k: plan[k] for k in ("settings", "prompts", "prompts_hash", "seed", "spread", "max_depth")}
    for setting in about["settings"]:
        setting["block_length"] = setting["block_length"] or target.spec.block_length
    return write_manifest(folder, about, recording.num_shards)
