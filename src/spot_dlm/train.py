"""Train an order model on traces: teacher-forced paths, cross-entropy, best checkpoint by held-out acceptance (spot train).

From a state at step t the model predicts the positions committed at t+1, t+2, ... given those before, up to the first token that is
neither the best nor the second-best stale one (method.md section 6). Every step draws its batch from (seed, step), so a resumed run
equals an uninterrupted one. Knows nothing of the command line.

Example: `train(read_traces(folder), Path("drafter"), TrainParams(steps=2000))`.
"""

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from spot_dlm.artifacts import replace_file
from spot_dlm.checkpoint import copy_weights, resume
from spot_dlm.drafter_files import OrderModelFile, save_order_model
from spot_dlm.features import encode
from spot_dlm.optimizer import Muon
from spot_dlm.order_model import Kind, Layer, OrderConfig, OrderModel, inputs, path_scores
from spot_dlm.simulate import draft_outcomes
from spot_dlm.trace_states import OTHER, Paths, TraceStates
from spot_dlm.traces import Traces

VALIDATION_SHARE = 0.04
MAX_VALIDATION_BLOCKS = 480
SHARPNESS = (0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0, 1.05, 1.1, 1.15, 1.2, 1.3, 1.4, 1.5, 1.7)
BUDGETS = (8, 32)
"""Budgets at which a checkpoint is judged."""
DEFAULTS: dict[Kind, dict[str, Any]] = {"order": {}, "linear": {"steps": 600, "adam_lr": 0.02, "eval_every": 100}}
"""Where a kind's training differs from the defaults of TrainParams."""


@dataclass(frozen=True)
class TrainParams:
    """How an order model is trained; all of it, and the traces, decide the result.

    Args:
        kind: "order" or "linear".
        steps: optimizer steps.
        positions: block positions in a batch (a batch holds states of one block length).
        depths: transitions predicted from every state.
        discount: weight of each further depth.
        token_weight: weight of the token loss.
        drafted_share: share of the batches made of states at which a speculative recorder drafted (where there are any).
        jitter: standard deviation of the noise on the network's inputs (features are about one), against learning blocks by heart;
            the linear score and effects stay exact.
        dropout: share of every layer's outputs left out.
        muon_lr, adam_lr: learning rates of matrices and of the rest.
        decay: share of the steps with falling rate at the end.
        eval_every: steps between two evaluations, which also write the checkpoint.
        bfloat16: multiply in bfloat16 (faster where the processor has it); the linear score and the loss stay float32.
        seed: of the weights and batches.

    Raises:
        ValueError: naming the field, the value and what is allowed.
    """

    kind: Kind = "order"
    steps: int = 4200
    positions: int = 6144
    depths: int = 16
    discount: float = 0.93
    token_weight: float = 0.5
    drafted_share: float = 0.6
    dropout: float = 0.15
    jitter: float = 0.05
    muon_lr: float = 0.02
    adam_lr: float = 2e-3
    decay: float = 0.65
    eval_every: int = 300
    bfloat16: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "positions", "depths", "eval_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("discount", "token_weight", "drafted_share", "muon_lr", "adam_lr"):
            if not 0 < getattr(self, name) <= 10:
                raise ValueError(f"{name}={getattr(self, name)} must be above 0 and at most 10")
        if not 0 <= self.jitter <= 10:
            raise ValueError(f"jitter={self.jitter} must be between 0 and 10")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout} must be at least 0 and below 1")
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay={self.decay} must be above 0 and at most 1")

    def rate(self, step: int) -> float:
        """Return the share of the full learning rate: a short rise, constant, a linear fall to zero."""
        rise = min(100, max(1, self.steps // 20))
        fall = int(self.decay * self.steps)
        return min(1.0, (step + 1) / rise, (self.steps - step) / max(1, fall))


@dataclass
class History:
    """What happened: one row per evaluation."""

    rows: list[dict[str, float]] = field(default_factory=list)

    @property
    def best(self) -> float:
        """Highest held-out score so far."""
        return max((r["score"] for r in self.rows), default=float("-inf"))


def split_sequences(traces: Traces, seed: int) -> tuple[Int64[np.ndarray, " a"], Int64[np.ndarray, " b"]]:
    """Return (training, validation) sequences; all sequences of a prompt (of an id) are on one side, whatever folder they come from.

    Raises:
        ValueError: if there are too few prompts to hold any back.
    """
    first: dict[str, int] = {}
    number = np.array([first.setdefault(str(p["id"]), n) for n, p in enumerate(traces.prompts)])
    prompts = number[traces.sequence["prompt"]]
    distinct = np.unique(prompts)
    if len(distinct) < 2:
        raise ValueError("the traces hold one prompt only; training needs at least 2, one of them held back")
    shuffled = np.random.default_rng([seed, 1]).permutation(distinct)
    held = shuffled[: max(1, round(VALIDATION_SHARE * len(distinct)))]
    inside = np.isin(prompts, held)
    return np.flatnonzero(~inside), np.flatnonzero(inside)


def validation_blocks(states: TraceStates, seed: int) -> Int64[np.ndarray, " n"]:
    """Return the blocks on which checkpoints are judged: MAX_VALIDATION_BLOCKS at most of the validation sequences."""
    blocks = np.flatnonzero(np.isin(states.sequence_of_block, split_sequences(states.traces, seed)[1]))
    return np.sort(np.random.default_rng([seed, 3]).permutation(blocks)[:MAX_VALIDATION_BLOCKS])


class Batches:
    """Batches of training states as a pure function of (seed, step)."""

    def __init__(self, states: TraceStates, sequences: Int64[np.ndarray, " k"], params: TrainParams) -> None:
        self.states, self.params = states, params
        indices = states.of_sequences(sequences)
        if not len(indices):
            raise ValueError("the traces hold no state with two masked positions after it; record longer answers or larger blocks")
        drafted = np.isin(indices, states.drafted)
        self.groups: list[tuple[int, Int64[np.ndarray, " n"]]] = []
        shares: list[float] = []
        for members, share in ((indices[drafted], params.drafted_share), (indices[~drafted], 1 - params.drafted_share)):
            lengths = states.lengths(members) if len(members) else members
            for length in np.unique(lengths):
                self.groups.append((int(length), members[lengths == length]))
                shares.append(share * length * len(self.groups[-1][1]) / max(1, lengths.sum()))
        self.shares = np.array(shares) / sum(shares)

    def at(self, step: int) -> Int64[np.ndarray, " B"]:
        """Return the states of one step."""
        rng = np.random.default_rng([self.params.seed, 2, step])
        length, members = self.groups[rng.choice(len(self.groups), p=self.shares)]
        return np.sort(rng.choice(members, max(1, self.params.positions // length)))


def losses(model: OrderModel, states: TraceStates, indices: Int64[np.ndarray, " B"], params: TrainParams) -> tuple[Tensor, Tensor]:
    """Return the order loss and the token loss of a batch (nats per transition, deeper ones discounted)."""
    batch, paths = states.batch(indices, params.depths)
    encoded = encode(batch, params.depths)
    device = next(model.parameters()).device
    given = inputs(encoded, device)
    given = given._replace(positions=given.positions + params.jitter * torch.randn_like(given.positions))
    with torch.autocast(device.type, torch.bfloat16, enabled=params.bfloat16):
        scores = model(given)
    path = torch.from_numpy(paths.positions).to(device)
    total, remaining = path_scores(scores, path, torch.from_numpy(encoded.masked > 0).to(device))
    logp = total.masked_fill(~remaining, -torch.inf).log_softmax(dim=-1)
    kinds = torch.from_numpy(paths.kind.astype(np.int64)).to(device)
    weight = torch.from_numpy(path_weights(paths, params.discount)).to(device)
    order = -logp.gather(-1, path[..., None])[..., 0]
    order = torch.where(weight > 0, order, 0.0)
    at_path = scores.token.gather(2, path[..., None, None].expand(-1, -1, 1, 3))[:, :, 0]
    token = torch.nn.functional.cross_entropy(at_path.flatten(0, 1), kinds.clamp(min=0).flatten(), reduction="none").view_as(weight)
    norm = weight.sum().clamp(min=1e-9)
    return (order * weight).sum() / norm, (token * weight).sum() / norm


def path_weights(paths: Paths, discount: float) -> Float[np.ndarray, "B D"]:
    """Return the weight of each depth: 0 beyond the block and after the first miss."""
    missed = np.cumsum(paths.kind == OTHER, axis=1) - (paths.kind == OTHER) > 0
    depth = discount ** np.arange(paths.kind.shape[1], dtype=np.float32)
    return np.where((paths.kind >= 0) & ~missed, depth[None], np.float32(0)).astype(np.float32)


def build_optimizers(model: OrderModel, params: TrainParams) -> list[torch.optim.Optimizer]:
    """Return Muon for the transformer's matrices and Adam for the rest."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and name.startswith("layers.") and "distance" not in name]
    rest = [p for p in model.parameters() if all(p is not m for m in matrices)]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.Adam(rest, lr=params.adam_lr, betas=(0.9, 0.99))]
    if matrices:
        optimizers.append(Muon(matrices, lr=params.muon_lr, weight_decay=0.05))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["full_lr"] = group["lr"]
    return optimizers


def judged_states(states: TraceStates, blocks: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " k"]:
    """Return the states of held-out blocks where a speculative recorder drafted, or all of them in plainly decoded traces."""
    inside = np.isin(states.block_of[states.indices], blocks)
    drafted = np.isin(states.indices, states.drafted)
    return states.indices[inside & drafted] if (inside & drafted).any() else states.indices[inside]


def calibrate(model: OrderModel, states: TraceStates, indices: Int64[np.ndarray, " k"]) -> list[float]:
    """Set the model's sharpness so that on held-out states, by budget and setting, as many transitions are expected as are made.

    A network that knows its training blocks is too sure elsewhere. Exact and rounded confidences have a factor each.
    """
    model.eval()
    setting = states.setting_of_block[states.block_of[indices]]
    for kind in (0, 1):
        groups = [setting == number for number in np.unique(setting) if states.rounded[number] == kind]
        if not groups:
            continue
        of_kind = np.flatnonzero(np.any(groups, axis=0))
        error: dict[float, float] = {}
        for factor in SHARPNESS:
            model.sharpness[kind] = factor
            outcomes = draft_outcomes(model, states, indices[of_kind], BUDGETS).values()
            inside = [at[of_kind] for at in groups]
            error[factor] = sum(abs(np.log(expected[at].mean() / made[at].mean())) for made, expected in outcomes for at in inside)
        model.sharpness[kind] = min(error, key=lambda f: error[f])
    return [round(f, 3) for f in model.sharpness.tolist()]


def evaluate(model: OrderModel, states: TraceStates, blocks: Int64[np.ndarray, " n"]) -> dict[str, float]:
    """Return held-out transitions per draft, made and expected; `score` is the geometric mean over BUDGETS and the recorded settings.

    Judged at the states where a speculative recorder drafted, or at every state of plainly decoded traces.
    """
    model.eval()
    indices = judged_states(states, blocks)
    setting = states.setting_of_block[states.block_of[indices]]
    row: dict[str, float] = {}
    logs = []
    for budget, (made, expected) in draft_outcomes(model, states, indices, BUDGETS).items():
        row[f"acceptance_{budget}"], row[f"expected_{budget}"] = float(made.mean()), float(expected.mean())
        for number in np.unique(setting):
            length = float(made[setting == number].mean())
            row[f"acceptance_{budget}_setting_{number}"] = length
            logs.append(np.log(length))
    model.train()
    return row | {"score": float(np.exp(np.mean(logs)))}


def train(
    traces: Traces,
    out: Path,
    params: TrainParams,
    config: OrderConfig | None = None,
    progress: Callable[[int, dict[str, float]], None] = lambda step, row: None,
    command: str = "",
    device: torch.device | str = "cpu",
    initial: OrderModelFile | None = None,
) -> dict[str, Any]:
    """Train, resuming an interrupted run in `out`, and write the drafter: its best checkpoint, training.json and the weights' config.

    Args:
        traces: finished traces.
        out: folder of the drafter.
        params: how.
        config: sizes of the model.
        progress: called after every step with the losses, and with the evaluation where there was one.
        command: for the provenance.
        device: of the model.
        initial: the drafter to begin with (fine-tuning), instead of fresh weights; it gives the sizes, too.

    Returns:
        What training.json holds: parameters, history, best step.

    Raises:
        ValueError: if `out` holds a run with other parameters or other traces, the traces are too small, or `initial` is another kind.
    """
    if initial is not None:
        if initial.model.config.kind != params.kind:
            raise ValueError(f"a drafter of kind {params.kind!r} cannot begin as one of kind {initial.model.config.kind!r}")
        config = initial.model.config
    config = config or OrderConfig(kind=params.kind)
    states = TraceStates(traces)
    batches = Batches(states, split_sequences(traces, params.seed)[0], params)
    blocks = validation_blocks(states, params.seed)
    torch.manual_seed(params.seed)
    model = OrderModel(config).to(device)
    if initial is not None:
        model.load_state_dict(initial.model.state_dict())
        model.sharpness.fill_(1.0)
    for layer in model.modules():
        if isinstance(layer, Layer):
            layer.dropout = params.dropout
    optimizers = build_optimizers(model, params)
    identity: dict[str, Any] = {"params": asdict(params), "config": asdict(config), "traces": traces_id(traces)}
    identity["initial"] = None if initial is None else initial.about.get("weights_sha256")
    out.mkdir(parents=True, exist_ok=True)
    checkpoint = out / "checkpoint.pt"
    step, history, best, seconds = 0, History(), copy_weights(model), 0.0
    if checkpoint.exists():
        step, history.rows, best, seconds = resume(checkpoint, identity, model, optimizers)
    clock = time.perf_counter()
    sums = np.zeros(3)
    while step < params.steps:
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["full_lr"] * params.rate(step)
            optimizer.zero_grad(set_to_none=True)
        torch.manual_seed(hash((params.seed, step)) % 2**63)
        order, token = losses(model, states, batches.at(step), params)
        loss = order + params.token_weight * token
        if not torch.isfinite(loss):
            raise ValueError(f"the loss is {loss.item()} at step {step}: the traces hold broken numbers or the learning rate is too high")
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        step += 1
        sums += (order.item(), token.item(), 1)
        row = {"order_loss": order.item(), "token_loss": token.item()}
        if step % params.eval_every == 0 or step == params.steps:
            means = (sums[:2] / sums[2]).tolist()
            row = {"step": step, "order_loss": means[0], "token_loss": means[1], **evaluate(model, states, blocks)}
            sums[:] = 0
            if row["score"] > history.best:
                best = copy_weights(model)
            history.rows.append(row)
            elapsed = seconds + time.perf_counter() - clock
            state = {"step": step, "history": history.rows, "seconds": elapsed, "identity": json.dumps(identity)}
            tensors = {"model": model.state_dict(), "best": best, "optimizers": [o.state_dict() for o in optimizers]}
            replace_file(checkpoint, partial(torch.save, state | tensors))
        progress(step, row)
    model.load_state_dict(best)
    sharpness = calibrate(model, states, judged_states(states, blocks))
    best_row = max(history.rows, key=lambda r: r["score"])
    about = {
        **identity,
        "command": command,
        "seconds": round(seconds + time.perf_counter() - clock, 1),
        "training_states": sum(len(m) for _, m in batches.groups),
        "validation_blocks": len(blocks),
        "best_step": best_row["step"],
        "best": best_row,
        "sharpness": sharpness,
        "calibrated": evaluate(model, states, blocks),
        "history": history.rows,
    }
    save_order_model(out, model, traces.manifest, {k: v for k, v in about.items() if k != "history"}, command)
    replace_file(out / "training.json", lambda partial: partial.write_text(json.dumps(about, indent=1) + "\n", "utf-8"))
    return about


def traces_id(traces: Traces) -> str:
    """Return a hash of the shards' hashes."""
    return hashlib.sha256("".join(s["sha256"] for s in traces.manifest["shards"]).encode()).hexdigest()[:16]
