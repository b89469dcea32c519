"""Tiny traces of a toy target whose stale predictions mostly hold, as a competent model's do."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from toy import ToyPrefix, ToyTargetAdapter

from spot_dlm.artifacts import file_hash
from spot_dlm.drafter_files import save_order_model
from spot_dlm.order_model import OrderConfig, OrderModel
from spot_dlm.record import Recording, TraceSetting, record
from spot_dlm.traces import Traces, read_traces

SMALL = OrderConfig(width=16, layers=1, heads=2, hidden=16, rank=4, gate=4)


class Settled:
    """Logits of a position: a fixed row for its prefix and place, and a smaller one for the canvas."""

    def __init__(self, vocab_size: int, block_length: int, seed: int = 0, jitter: float = 0.7) -> None:
        self.vocab_size, self.block_length, self.seed, self.jitter = vocab_size, block_length, seed, jitter

    def __call__(self, prefix_ids: list, canvas: list) -> dict:
        known = [self.vocab_size if t is None else t for t in canvas]
        fixed = np.random.default_rng([self.seed, len(prefix_ids), *prefix_ids]).standard_normal((len(canvas), self.vocab_size))
        moving = np.random.default_rng([self.seed, 7, len(prefix_ids), *known]).standard_normal((len(canvas), self.vocab_size))
        rows = (3 * fixed + self.jitter * moving).astype(np.float32)
        return {i: rows[i] for i, token in enumerate(canvas) if token is None}


class AnyLength(ToyTargetAdapter):
    """A toy target for blocks of every length."""

    def prefill(self, token_ids: np.ndarray, block_length: int) -> ToyPrefix:
        return ToyPrefix(token_ids, block_length)


def settled_target(vocab_size: int = 24, seed: int = 0, jitter: float = 0.7, block_length: int = 8, crosses: bool = False) -> AnyLength:
    return AnyLength(Settled(vocab_size, block_length, seed, jitter), stop_ids=(0,), crosses=crosses)


def toy_recording(num_prompts: int, settings: Sequence[TraceSetting], seed: int = 0, **more: object) -> Recording:
    rng = np.random.default_rng(5)
    prompts = [{"prompt_ids": rng.integers(1, 5, 3 + i % 4).tolist(), "id": i, "family": "ab"[i % 2]} for i in range(num_prompts)]
    return Recording("toy", prompts, settings, seed, **more)


def record_toy(folder: Path, recording: Recording, target: AnyLength) -> Traces:
    record(recording, folder, target=target)
    return read_traces(folder)


def random_model(kind: str = "order", seed: int = 0, scale: float = 0.3, config: OrderConfig = SMALL) -> OrderModel:
    """A model whose every weight is moved away from its start, so that every term counts."""
    torch.manual_seed(seed)
    model = OrderModel(replace(config, kind=kind))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(scale * torch.randn_like(parameter))
    return model.eval().requires_grad_(False)


def saved_model(folder: Path, model: OrderModel) -> Path:
    save_order_model(folder, model, {}, {})
    return folder


def change_config(folder: Path, **changes: object) -> None:
    """Change fields of a drafter's config.json; None takes one out."""
    about = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps({k: v for k, v in (about | changes).items() if v is not None}), "utf-8")


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change a drafter's weights and make config.json describe them."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    change_config(folder, weights_sha256=file_hash(folder / "model.safetensors"))
