"""Exact trajectories for reinforcement learning: every commit with its step and its log-probability under the target (docs/rollouts.md).

A commit's log-probability is taken from the logits on which F committed it: those of the accepted node, so they are those of standard
decoding to the bit wherever a row's logits do not depend on the rest of the pass. Files are read back as padded tensors. Knows nothing of
prompts files and graders.

Example: `for id, rollout in decode_rollouts(target, [Request("a", "Add 47 and 38.", params)], drafter): rollout.logprobs`.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor

from spot_dlm.batch import MAX_REQUESTS, Failed, Id, Request, decode_batch
from spot_dlm.budget import Budget
from spot_dlm.confidence import measure
from spot_dlm.interfaces import SAMPLES_PER_PROMPT, DecodeParams, Drafter, Target, TargetSpec
from spot_dlm.layout import Layout
from spot_dlm.sequence import Event, Finished, Pass, Result
from spot_dlm.transition import Sampling, Transition, UnmaskRule, filter_logits, temper

FORMAT = "spot-rollouts/1"
FILE_NAME = "rollouts.jsonl"
"""Of a file that is named by its folder."""
LOGPROBS = "log-softmax of logits / temperature after suppressed ids, top-k and top-p; of the logits as they are at temperature 0"
"""What `logprobs` are, said in every file."""
RAW_LOGPROBS = "log-softmax of the logits as they are"

V = TypeVar("V")


def token_logprobs(
    logits: Float[Tensor, "k V"], tokens: Int64[np.ndarray, " k"], rule: UnmaskRule, sampling: Sampling
) -> Float32[np.ndarray, " k"]:
    """Return every row's log-probability of its token, as `LOGPROBS` says, precise where the probability rounds to 1.

    Rows are independent of each other to the bit on a CPU.
    """
    logits = logits.to(torch.float32).contiguous()
    if sampling.temperature > 0:
        if rule.suppressed_ids:
            logits = logits.index_fill(1, torch.tensor(rule.suppressed_ids, device=logits.device), -torch.inf)
        logits = filter_logits(temper(logits, sampling.temperature), sampling.top_k, sampling.top_p)
    count, drawn = len(tokens), torch.tensor(tokens, device=logits.device)
    if count == 1:  # a lone row would be summed in another order
        logits, drawn = logits.repeat(2, 1), drawn.repeat(2)
    return np.asarray(measure(logits, drawn, "probability")[0][:count].cpu().numpy(), dtype=np.float32)


def commit_logprobs(
    transition: Transition, logits: Float[Tensor, "m V"], rule: UnmaskRule, sampling: Sampling
) -> Float32[np.ndarray, " k"]:
    """Return the log-probability of every token that a transition committed; `logits` rows belong to `transition.before.masked`."""
    rows = np.searchsorted(transition.before.masked, transition.positions)
    return token_logprobs(logits[torch.from_numpy(rows).to(logits.device)], transition.tokens, rule, sampling)


@dataclass(frozen=True)
class Rollout:
    """One decoded sample with the log-probability of every commit, in the order of `result.order`.

    A seed (step -1 of its block) is no draw: its log-probability is 0. `ends[b]` is where the canvas of block b ends, its states' last
    position plus one.
    """

    result: Result
    logprobs: list[float]
    raw_logprobs: list[float] | None
    ends: dict[int, int]

    @property
    def steps(self) -> list[int]:
        """The global number of every commit's transition, from 0, as in `Result.commit_steps`."""
        number: dict[tuple[int, int], int] = {}
        return [number.setdefault((c.block, c.step), len(number)) for c in self.result.order]

    @property
    def by_token(self) -> list[int]:
        """For every returned token the place of its commit in the order."""
        first = len(self.result.prompt_ids)
        own = sorted((c.position, place) for place, c in enumerate(self.result.order) if c.position >= first)
        return [place for _, place in own[: len(self.result.token_ids)]]

    def row(self) -> dict[str, Any]:
        """Return what a line of a file holds of it, besides text, token ids, commit steps and finish reason."""
        order = self.result.order
        commits: dict[str, Any] = {
            "positions": [c.position for c in order],
            "token_ids": [c.token for c in order],
            "steps": self.steps,
            "blocks": [c.block for c in order],
            "block_steps": [c.step for c in order],
            "logprobs": self.logprobs,
        }
        row: dict[str, Any] = {"prompt_ids": self.result.prompt_ids, "logprobs": [self.logprobs[i] for i in self.by_token]}
        if self.raw_logprobs is not None:
            row["raw_logprobs"] = [self.raw_logprobs[i] for i in self.by_token]
            commits["raw_logprobs"] = self.raw_logprobs
        return row | {"commits": commits, "block_ends": [[block, end] for block, end in self.ends.items()]}


class Recording:
    """Collects the log-probabilities of one decoded prompt from its events.

    Args:
        spec: of the target.
        params: with which the prompt is decoded.
        raw: whether to keep `RAW_LOGPROBS`, too.

    Raises:
        ValueError: for raw log-probabilities of a target whose blocks begin with a seed: its logits are not known.
    """

    def __init__(self, spec: TargetSpec, params: DecodeParams, raw: bool = False) -> None:
        if raw and spec.seeds:
            raise ValueError(f"raw log-probabilities are not known for {spec.name}: it predicts the first token of every block itself")
        self._spec, self._params, self._raw = spec, params, raw
        self._known: dict[int, tuple[float, float]] = {}  # of every position, as each is committed once

    def see(self, event: Event) -> Rollout | None:
        """Take an event; return the rollout with the last one."""
        if isinstance(event, Pass):
            self._record(event)
        return self._finish(event.result) if isinstance(event, Finished) else None

    def _record(self, event: Pass) -> None:
        commits, acceptance = iter(event.committed), event.acceptance
        for transition, node in zip(acceptance.transitions, acceptance.nodes, strict=True):
            logits = event.logits.of(node)
            logprobs = commit_logprobs(transition, logits, self._params.rule, self._params.sampling).tolist()
            raw = commit_logprobs(transition, logits, self._params.rule, Sampling()).tolist() if self._raw else logprobs
            for pair in zip(logprobs, raw, strict=True):
                self._known[next(commits).position] = pair

    def _finish(self, result: Result) -> Rollout:
        pairs = [self._known[c.position] if c.step >= 0 else (0.0, 0.0) for c in result.order]
        layout = Layout.of(self._spec, len(result.prompt_ids), self._params)
        blocks = dict.fromkeys(c.block for c in result.order)
        ends = {block: layout.end if self._spec.whole_canvas else layout.span(block)[1] for block in blocks}
        return Rollout(result, [p for p, _ in pairs], [p for _, p in pairs] if self._raw else None, ends)


def decode_rollouts(
    target: Target,
    requests: Iterable[Request[Id]],
    drafter: Drafter,
    raw: bool = False,
    budget: Budget | None = None,
    max_requests: int = MAX_REQUESTS,
) -> Iterator[tuple[Id, Rollout | Failed]]:
    """Decode requests together and yield the rollout of each as it ends, or what went wrong; `raw` keeps `RAW_LOGPROBS`, too.

    Samples of one prompt need different `DecodeParams.sequence`.

    Raises:
        ValueError: for an id of a request that is being decoded, and for raw log-probabilities that are not known (see `Recording`).
    """
    live: dict[Id, Recording] = {}

    def begun() -> Iterator[Request[Id]]:
        for request in requests:
            if request.id in live:
                raise ValueError(f"request {request.id!r} is being decoded already")
            live[request.id] = Recording(target.spec, request.params, raw)
            yield request

    for request_id, event in decode_batch(target, begun(), drafter, budget, max_requests):
        if isinstance(event, Failed):
            del live[request_id]
            yield request_id, event
        elif (rollout := live[request_id].see(event)) is not None:
            del live[request_id]
            yield request_id, rollout


@dataclass(frozen=True)
class Visited:
    """A state of standard decoding and what was committed there: the whole sequence so far up to its block's end, masks as the mask id."""

    canvas: Int64[Tensor, " S"]
    positions: Int64[Tensor, " k"]
    tokens: Int64[Tensor, " k"]
    logprobs: Float32[Tensor, " k"]
    block: int
    step: int


@dataclass(frozen=True)
class Commits:
    """All commits of N samples in their order, those after the end token included; padded where `mask` is false.

    `positions` count from the beginning of the prompt, `steps` from 0 in the sample, `block_steps` in the block (-1: a seed).
    """

    positions: Int64[Tensor, "N C"]
    tokens: Int64[Tensor, "N C"]
    steps: Int64[Tensor, "N C"]
    blocks: Int64[Tensor, "N C"]
    block_steps: Int64[Tensor, "N C"]
    logprobs: Float32[Tensor, "N C"]
    raw_logprobs: Float32[Tensor, "N C"] | None
    mask: Bool[Tensor, "N C"]


@dataclass(frozen=True)
class Rollouts:
    """N samples of a file by prompt and sample, padded on the right with 0 (`steps`: -1) where `mask` or `prompt_mask` is false.

    Attributes:
        tokens: the answers, up to the first end token.
        logprobs: of each token when it was committed (see `LOGPROBS`).
        raw_logprobs: the same as in `RAW_LOGPROBS`, where the file has them.
        steps: the global number, from 0, of the transition that committed each token.
        prompt_ids: the prompts as encoded.
        ids: the prompts' names.
        prompt_index: the prompts' numbers in their file.
        sample_index: the samples' numbers of their prompt.
        temperatures: with which they were decoded.
        grades: 1 right, 0 wrong, NaN where no program can say.
        commits: the whole trajectories.
        settings: what made the file.
    """

    tokens: Int64[Tensor, "N T"]
    mask: Bool[Tensor, "N T"]
    logprobs: Float32[Tensor, "N T"]
    raw_logprobs: Float32[Tensor, "N T"] | None
    steps: Int64[Tensor, "N T"]
    prompt_ids: Int64[Tensor, "N P"]
    prompt_mask: Bool[Tensor, "N P"]
    ids: list[str | int]
    prompt_index: Int64[Tensor, " N"]
    sample_index: Int64[Tensor, " N"]
    temperatures: Float32[Tensor, " N"]
    grades: Float32[Tensor, " N"]
    texts: list[str]
    finish_reasons: list[str]
    commits: Commits
    settings: dict[str, Any]
    block_ends: list[dict[int, int]]

    def __len__(self) -> int:
        return len(self.ids)

    def states(self, sample: int) -> Iterator[Visited]:
        """Yield the states that a sample went through with what was committed there; seeds are in the canvas, they are not drawn."""
        c, count = self.commits, int(self.commits.mask[sample].sum())
        prompt = self.prompt_ids[sample][self.prompt_mask[sample]]
        canvas = torch.full((max(self.block_ends[sample].values(), default=0),), self.settings["mask_token_id"], dtype=torch.int64)
        canvas[: len(prompt)] = prompt
        positions, tokens, logprobs = (x[sample, :count] for x in (c.positions, c.tokens, c.logprobs))
        for at in _runs(c.steps[sample, :count].tolist()):
            block, step = int(c.blocks[sample, at.start]), int(c.block_steps[sample, at.start])
            if step >= 0:
                yield Visited(canvas[: self.block_ends[sample][block]].clone(), positions[at], tokens[at], logprobs[at], block, step)
            canvas[positions[at]] = tokens[at]


def _runs(numbers: Sequence[int]) -> list[slice]:
    """Return the stretches of equal numbers."""
    starts = [i for i in range(len(numbers)) if i == 0 or numbers[i] != numbers[i - 1]]
    return [slice(a, b) for a, b in zip(starts, [*starts[1:], len(numbers)], strict=True)]


def read_rollouts(path: Path | str) -> Rollouts:
    """Read a file of `spot rollout`, or the one in a folder; a last line that is still being written is left out.

    Raises:
        ValueError: naming the line that is no rollout, or was made with other settings than the first one.
        OSError: if the file cannot be read.
    """
    path = Path(path)
    path = path / FILE_NAME if path.is_dir() else path
    *lines, _ = path.read_bytes().split(b"\n")
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            found = row["settings"].get("rollouts")
            if found != FORMAT:
                raise ValueError(f"the format is {found!r}, this version reads {FORMAT!r}")
            if rows and row["settings"] != rows[0]["settings"]:
                raise ValueError("made with other settings than the first line")
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}:{number}: not a line of spot rollout ({error})") from error
        rows.append(row)
    if not rows:
        raise ValueError(f"{path}: no rollouts there")
    try:
        return _rollouts(sorted(rows, key=lambda row: row["sequence"]))
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: a line is damaged ({error})") from error


def _rollouts(rows: list[dict[str, Any]]) -> Rollouts:
    settings = rows[0]["settings"]
    raw = settings["raw_logprobs"] is not None
    commits = [row["commits"] for row in rows]
    temperatures = [row.get("overrides", {}).get("temperature", settings["temperature"]) for row in rows]
    grades = [torch.nan if row.get("grade") is None else float(row["grade"]) for row in rows]

    def whole(values: list[list[int]], fill: int = 0) -> Int64[Tensor, "N W"]:
        return _padded(values, fill, torch.int64)

    def real(values: list[list[float]]) -> Float32[Tensor, "N W"]:
        return _padded(values, 0.0, torch.float32)

    def mask(values: list[list[Any]]) -> Bool[Tensor, "N W"]:
        return _padded([[True] * len(v) for v in values], False, torch.bool)

    return Rollouts(
        whole([row["token_ids"] for row in rows]),
        mask([row["token_ids"] for row in rows]),
        real([row["logprobs"] for row in rows]),
        real([row["raw_logprobs"] for row in rows]) if raw else None,
        whole([row["commit_steps"] for row in rows], -1),
        whole([row["prompt_ids"] for row in rows]),
        mask([row["prompt_ids"] for row in rows]),
        [row["id"] for row in rows],
        torch.tensor([row["sequence"] // SAMPLES_PER_PROMPT for row in rows], dtype=torch.int64),
        torch.tensor([row["sample"] for row in rows], dtype=torch.int64),
        torch.tensor(temperatures, dtype=torch.float32),
        torch.tensor(grades, dtype=torch.float32),
        [row["text"] for row in rows],
        [row["finish_reason"] for row in rows],
        Commits(
            whole([c["positions"] for c in commits]),
            whole([c["token_ids"] for c in commits]),
            whole([c["steps"] for c in commits], -1),
            whole([c["blocks"] for c in commits]),
            whole([c["block_steps"] for c in commits]),
            real([c["logprobs"] for c in commits]),
            real([c["raw_logprobs"] for c in commits]) if raw else None,
            mask([c["positions"] for c in commits]),
        ),
        settings,
        [dict(row["block_ends"]) for row in rows],
    )


def _padded(values: list[list[V]], fill: V, dtype: torch.dtype) -> Tensor:
    width = max(map(len, values))
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in values], dtype=dtype).reshape(len(values), width)
