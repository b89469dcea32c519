"""Record standard decoding as traces: sharded, resumable, by several processes (spot trace).

Every prompt is decoded in every setting, or (spread) in one setting each, in turn. A shard is a fixed share of the work; what is
already there is not recorded again. Knows nothing of the command line and of training.

Example: `record(Recording("shipped", prompts, settings), Path("traces"), workers=2)`.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from spot_dlm.artifacts import file_hash, provenance
from spot_dlm.decode import decode_steps
from spot_dlm.drafter_files import WEIGHTS, load_order_model
from spot_dlm.drafters import Root
from spot_dlm.drafters.order import Order
from spot_dlm.effects import Effects
from spot_dlm.features import remember, select_effects
from spot_dlm.interfaces import DecodeParams, Drafter, Target
from spot_dlm.lookahead import look_ahead
from spot_dlm.noise import CoupledNoise
from spot_dlm.outputs import read_outputs
from spot_dlm.rules import parse_rule
from spot_dlm.sequence import BlockFinished, BlockStarted, Finished, Pass
from spot_dlm.targets import load_target
from spot_dlm.traces import COLUMNS, NUM_LOGP, Columns, shard_path, write_manifest, write_shard
from spot_dlm.transition import Sampling, Transition
from spot_dlm.workers import Work, opened, run_in_processes

PLAN = "spot-trace-plan/1"
SEQUENCES_PER_SHARD = 64


def bytes_per_token(block_length: int, sampled: bool, max_depth: int) -> float:
    """Return the size of a trace per token of a whole block: 505 (L = 16) and 969 (L = 32) at T = 0, 2055 and 5504 at T > 0.

    Exact but for the files' headers: every step writes its masked positions and, where tokens are sampled, its look-ahead.
    """
    size = {t: sum(np.dtype(kind).itemsize * math.prod(shape) for kind, shape in columns.values()) for t, columns in COLUMNS.items()}
    rows = block_length * (block_length + 1) / 2
    ahead = sum(min(left, max_depth) * left for left in range(block_length)) if sampled else 0
    return (rows * size["row"] + ahead * size["ahead"] + size["block"]) / block_length + size["state"]


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
        if rule.num_per_step > 1 or rule.schedule or rule.select == "threshold":
            raise ValueError(f"rule={self.rule!r} commits several positions per step; traces need one per step")
        if rule.draws_order:
            raise ValueError(f"rule={self.rule!r} draws the order of positions: no model can learn it, and the drafter 'chain' knows it")
        self.params(0, 0)

    def params(self, seed: int, sequence: int) -> DecodeParams:
        """Return the decoding parameters of standard decoding."""
        sampling = Sampling(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, seed=seed)
        return DecodeParams(parse_rule(self.rule), sampling, self.max_new_tokens, 1, self.block_length, sequence=sequence, boundary=False)


@dataclass(frozen=True)
class Recording:
    """What is to be recorded; `prompts` are rows with `prompt` or `prompt_ids`, optionally `id` and `family`.

    With `drafter` (a folder of 'spot train') speculative decoding records the same trajectories and, at the states where it drafted, the
    effects that its passes have shown; the budgets in `nodes` take turns.
    """

    model: str
    prompts: Sequence[dict[str, Any]]
    settings: Sequence[TraceSetting]
    seed: int = 0
    spread: bool = False
    max_depth: int = 16
    load_options: dict[str, Any] = field(default_factory=dict)
    drafter: str | None = None
    nodes: tuple[int, ...] = (8, 16, 32)

    def __post_init__(self) -> None:
        if not self.prompts:
            raise ValueError("prompts: nothing to record")
        if not self.settings:
            raise ValueError("settings: nothing to record")
        if self.max_depth < 1:
            raise ValueError(f"max_depth={self.max_depth} must be at least 1")

    @property
    def drafter_hash(self) -> str:
        """Hash of the drafter's weights; empty where there is none."""
        return file_hash(Path(self.drafter) / WEIGHTS) if self.drafter else ""

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

    def shard_jobs(self, number: int) -> list[tuple[int, int]]:
        """Return the jobs of one shard."""
        return self.jobs[number * SEQUENCES_PER_SHARD : (number + 1) * SEQUENCES_PER_SHARD]

    def estimated_bytes(self, block_length: int, folder: Path | None = None) -> int:
        """Return the size of what `folder` lacks if every sequence had half its tokens (the shipped model's have a third).

        `block_length` is the target's own, for settings that leave it open.
        """
        numbers = range(self.num_shards) if folder is None else self.missing(folder)
        jobs = [self.settings[s] for n in numbers for _, s in self.shard_jobs(n)]
        each = {s: bytes_per_token(s.block_length or block_length, s.temperature > 0, self.max_depth) for s in self.settings}
        return round(sum(s.max_new_tokens / 2 * each[s] for s in jobs))

    def missing(self, folder: Path) -> list[int]:
        """Return the shards that are not in the folder."""
        return [n for n in range(self.num_shards) if not shard_path(folder, n).exists()]

    def plan(self, spec_fingerprint: str) -> dict[str, Any]:
        """Return what identifies the recording: a folder holds one plan only."""
        texts = "".join(repr(p.get("prompt", p.get("prompt_ids"))) for p in self.prompts)
        return {
            "format": PLAN,
            "model": self.model,
            "fingerprint": spec_fingerprint,
            "settings": [asdict(s) for s in self.settings],
            "seed": self.seed,
            "spread": self.spread,
            "max_depth": self.max_depth,
            "prompts": [{"id": p.get("id", i), "family": p.get("family", "")} for i, p in enumerate(self.prompts)],
            "prompts_hash": hashlib.sha256(texts.encode()).hexdigest(),
            **({"drafter": self.drafter, "drafter_sha256": self.drafter_hash, "nodes": list(self.nodes)} if self.drafter else {}),
            **({"load_options": self.load_options} if self.load_options else {}),
        }


def record_sequence(
    columns: Columns, target: Target, prompt: str | list[int], params: DecodeParams, max_depth: int, drafter: Drafter | None = None
) -> int:
    """Decode one prompt and append its blocks, states, rows and look-ahead; return the number of blocks.

    With a drafter (and `params.nodes`) the trajectory is the same and the states at which it drafted carry the effects seen so far.
    """
    noise = CoupledNoise(params.sampling.seed, params.sequence, params.rule.noise_step, target.spec.device)
    blocks = states = tail = 0
    memory: dict[str, Any] = {}
    for event in decode_steps(target, prompt, drafter or Root(), params):
        if isinstance(event, BlockStarted):
            tail, states, memory = len(event.state.canvas) - len(event.state.masked), 0, {}
        elif isinstance(event, Pass):
            transitions = event.acceptance.transitions
            before = transitions[-1].before
            effects = Effects.empty(len(before.canvas))
            if event.graph.block == before.block:  # else the pass was over the end of the block before
                effects = remember(memory, event.graph, event.logits, before.canvas, len(transitions))
            for transition, node in zip(transitions, event.acceptance.nodes, strict=True):
                seen = effects if drafter is not None and transition is transitions[-1] else None
                _record_state(columns, transition, event.logits.of(node), params, noise, max_depth, seen)
            states += len(transitions)
        elif isinstance(event, BlockFinished):
            columns.add("block", index=event.state.block, tail=tail, states=states)
            blocks += 1
        elif isinstance(event, Finished):
            columns.parts.setdefault("_tokens", []).append(np.array([len(event.result.token_ids)]))
    return blocks


def _record_state(
    columns: Columns,
    transition: Transition,
    logits: Float[Tensor, "m V"],
    params: DecodeParams,
    noise: CoupledNoise,
    max_depth: int,
    effects: Effects | None,
) -> None:
    before, candidates = transition.before, transition.candidates
    outputs = read_outputs(before.masked, logits, params.sampling)
    logp = outputs.logp[:, :NUM_LOGP]
    if logp.shape[1] < NUM_LOGP:
        logp = np.pad(logp, ((0, 0), (0, NUM_LOGP - logp.shape[1])), constant_values=-80.0)
    at = np.flatnonzero(before.masked != transition.positions[0])
    remaining = len(at)
    depths = min(remaining, max_depth) if params.sampling.temperature > 0 else 0
    tokens = outputs.ids[at, 0]
    if depths:
        rows = outputs.take(at)
        stale = logits[torch.from_numpy(at).to(logits.device)]
        ahead = look_ahead(rows, transition.state, params.rule, params.sampling, noise, depths, candidates.fine[at], stale)
        columns.add("ahead", tokens=ahead.tokens, fine=ahead.fine, margin=ahead.margin)
        tokens = ahead.tokens[0, :, 0]
    known = np.zeros(len(before.masked), dtype=np.float32)
    drafted = effects is not None and remaining > 1
    if effects is not None and drafted:
        value, near = select_effects(effects, transition, tokens)
        known = near[0, before.masked]
        columns.add("effect", value=value[0][np.ix_(before.masked, before.masked)].reshape(-1))
    columns.add(
        "row",
        position=before.masked,
        logp=logp,
        ids=outputs.ids[:, [0, min(1, outputs.ids.shape[1] - 1)]],
        log_rest=outputs.log_rest,
        entropy=outputs.entropy,
        fine=candidates.fine,
        token=candidates.tokens,
        known=known,
    )
    columns.add(
        "state",
        step=before.step,
        rows=len(before.masked),
        ahead_depths=depths,
        effect_rows=len(before.masked) if drafted else 0,
        commit_position=transition.positions[0],
        commit_token=transition.tokens[0],
    )


def record_shard(target: Target, recording: Recording, folder: Path, number: int, finished: Callable[[], None] = lambda: None) -> int:
    """Record one shard whole or not at all, telling of every finished sequence; return how many."""
    keep_shard(folder, number, shard_columns(target, recording, number, finished))
    return len(recording.shard_jobs(number))


def shard_columns(target: Target, recording: Recording, number: int, finished: Callable[[], None] = lambda: None) -> Columns:
    """Return what a shard holds, telling of every finished sequence."""
    columns, jobs = Columns(), recording.shard_jobs(number)
    drafter = Order(load_order_model(Path(recording.drafter))) if recording.drafter else None
    for prompt_number, setting_number in jobs:
        row, setting = recording.prompts[prompt_number], recording.settings[setting_number]
        prompt = row["prompt"] if "prompt" in row else row["prompt_ids"]
        sequence = prompt_number * len(recording.settings) + setting_number
        try:
            params = setting.params(recording.seed, sequence)
            if drafter is not None:
                params = replace(params, nodes=recording.nodes[prompt_number % len(recording.nodes)])
            blocks = record_sequence(columns, target, prompt, params, recording.max_depth, drafter)
        except ValueError as error:
            raise ValueError(f"prompt {row.get('id', prompt_number)}: {error}") from error
        tokens = int(columns.parts.pop("_tokens")[0][0])
        columns.add("sequence", prompt=prompt_number, setting=setting_number, blocks=blocks, tokens=tokens)
        finished()
    return columns


def keep_shard(folder: Path, number: int, columns: Columns) -> None:
    """Write one shard whole or not at all."""
    try:
        write_shard(folder, number, columns)
    except OSError as error:
        reason = f"{error.strerror or error} (finished shards are kept; the same command continues)"
        raise OSError(error.errno, reason, str(shard_path(folder, number))) from error


def _prepare(recording: Recording, folder: Path, threads: int) -> Work:
    """Return what records a shard in a process of its own."""
    torch.set_num_threads(threads)
    return partial(record_shard, load_target(recording.model, **recording.load_options), recording, folder)


def record(
    recording: Recording,
    folder: Path,
    workers: int = 1,
    threads: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
    command: str = "",
    target: Target | None = None,
    elsewhere: Callable[[Sequence[int]], Iterable[tuple[int, Columns]]] | None = None,
) -> dict[str, Any]:
    """Record what is missing and write the manifest last; return it.

    Args:
        recording: what.
        folder: where; it is made if needed, and may hold an interrupted recording of the same plan.
        workers: processes, each with its own target.
        threads: torch threads of each.
        progress: called with sequences done and all sequences.
        command: for the provenance.
        target: the recording's, if it is loaded already.
        elsewhere: records shards on other machines and gives each back as it gets ready; this process only writes.

    Raises:
        ValueError: if the folder holds another recording, or a prompt cannot be decoded.
        OSError: if the folder cannot be written or the disk is full; finished shards stay.
    """
    if workers < 1:
        raise ValueError(f"workers={workers} must be at least 1")
    if threads < 1:
        raise ValueError(f"threads={threads} must be at least 1")
    target = target or load_target(recording.model, **recording.load_options)
    plan = recording.plan(target.spec.fingerprint)
    total = len(recording.jobs)
    with opened(folder, plan, "recording"):
        missing = recording.missing(folder)
        before = total - sum(len(recording.shard_jobs(n)) for n in missing)
        progress(before, total)
        if elsewhere is not None and missing:
            done = before
            for number, columns in elsewhere(missing):
                keep_shard(folder, number, columns)
                progress(done := done + len(recording.shard_jobs(number)), total)
        elif workers > 1 and len(missing) > 1:
            run_in_processes(_prepare, (recording, folder, threads), missing, workers, lambda done: progress(before + done, total))
        elif missing:
            torch.set_num_threads(threads)
            numbers = count(before + 1)
            for number in missing:
                record_shard(target, recording, folder, number, lambda: progress(next(numbers), total))
        about = provenance(target.spec, command)
        about |= {
            k: plan[k]
            for k in ("settings", "prompts", "prompts_hash", "seed", "spread", "max_depth", "drafter", "drafter_sha256", "nodes")
            if k in plan
        }
        for setting in about["settings"]:
            setting["block_length"] = setting["block_length"] or target.spec.block_length
        return write_manifest(folder, about, recording.num_shards)
