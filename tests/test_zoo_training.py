"""The recipe: training layout equals inference, views are complementary, a resumed run equals an uninterrupted one, prompts are unseen."""

import argparse
import shutil
from importlib import resources
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from spot_dlm.state import MASKED
from spot_dlm.targets import load_target
from spot_dlm.tasks import FAMILY_TASKS, SPLITS, load_prompts
from zoo import batches, train
from zoo.export import export
from zoo.families import stream
from zoo.model import BlockDiffusionModel, ModelConfig
from zoo.tokenizer import MASK

SHIPPED = Path(str(resources.files("spot_dlm"))) / "shipped" / "target"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(SHIPPED / "tokenizer.json"))


@pytest.fixture(scope="module")
def encoded(tokenizer):
    return [batches.encode(tokenizer, s) for s in islice(stream(3, "train", train.WEIGHTS), 24)]


@pytest.mark.parametrize("block_length", [16, 32])
def test_views_are_complementary_and_cover_the_answer(tokenizer, encoded, block_length):
    batch = batches.build(tokenizer, encoded, block_length, np.random.default_rng(0))
    mask_id = tokenizer.token_to_id(MASK)
    total = batch.ids.shape[1]
    for row, sample in enumerate(encoded):
        prompt, answer = len(sample.prompt_ids), len(sample.answer_ids)
        hidden = np.flatnonzero(batch.ids[row].numpy() == mask_id)
        positions = batch.positions[row].numpy()[hidden]
        length = -(-(prompt + answer + 1) // block_length) * block_length
        assert sorted(positions) == list(range(prompt, length))  # every answer position once, no prompt position
        targets = batch.targets[(batch.rows // total) == row].numpy()
        by_position = dict(zip(positions, targets, strict=True))
        assert [by_position[prompt + i] for i in range(answer)] == list(sample.answer_ids)
    assert torch.isfinite(batch.weights).all() and (batch.weights > 0).all()


def test_training_layout_gives_the_logits_of_inference(tokenizer, encoded, tmp_path):
    """A noised block inside a training row and the same canvas in the decoder's cache give the same logits."""
    config = ModelConfig(hidden_size=32, num_layers=2, num_heads=2, head_dim=16, intermediate_size=48)
    torch.manual_seed(0)
    model = BlockDiffusionModel(config)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    shutil.copy(SHIPPED / "tokenizer.json", tmp_path / "tokenizer.json")
    payload = {"model": model.state_dict(), "step": 0, "tokens_seen": 0, "config": config.to_dict()}
    torch.save(payload, tmp_path / "checkpoint.pt")
    export(tmp_path, tmp_path / "target", 16)
    target = load_target(str(tmp_path / "target"))
    mask_id = tokenizer.token_to_id(MASK)
    compared = 0
    for block_length in (16, 32):
        batch = batches.build(tokenizer, encoded[:6], block_length, np.random.default_rng(1))
        with torch.no_grad():
            logits = model.logits(model.hidden(batch.ids, batch.positions, batch.mask))
        for row, sample in enumerate(encoded[:6]):
            prompt = len(sample.prompt_ids)
            start = prompt // block_length * block_length
            ids, positions = batch.ids[row].numpy(), batch.positions[row].numpy()
            clean = np.flatnonzero((positions >= start) & (np.arange(len(ids)) >= int(batch.positions[row].max()) + 1))
            for offset in range(0, len(clean) - block_length + 1, block_length):
                at = clean[offset : offset + block_length]
                if (ids[at] != mask_id).all() or (np.diff(positions[at]) != 1).any():
                    continue
                first = int(positions[at[0]])
                prefix = target.prefill(ids[:first], block_length)
                canvas = np.where(ids[at] == mask_id, MASKED, ids[at])
                ours = target.evaluate(prefix, canvas[None]).of(0)
                theirs = logits[row, at[ids[at] == mask_id]]
                keep = torch.isfinite(ours)
                assert torch.allclose(ours[keep], theirs[keep], atol=2e-4)
                compared += 1
    assert compared >= 24  # six samples, two views, two block lengths


def _run(folder: Path, steps: int) -> dict[str, torch.Tensor]:
    folder.mkdir(exist_ok=True)
    shutil.copy(SHIPPED / "tokenizer.json", folder / "tokenizer.json")
    defaults = {"muon_lr": 0.02, "adam_lr": 4e-3, "seed": 1, "log_every": 2, "keep_every": 1000}
    args = argparse.Namespace(out=str(folder), steps=steps, batch_rows=2, save_every=2, **defaults)
    train.train(args)
    stored = torch.load(folder / "checkpoint.pt", weights_only=True)
    assert stored["step"] == steps
    return stored["model"]


def test_resumed_training_equals_uninterrupted(tmp_path):
    whole = _run(tmp_path / "whole", 6)
    interrupted = _interrupted(tmp_path / "killed")
    for name, value in whole.items():
        assert torch.equal(value, interrupted[name]), name


def _interrupted(folder: Path) -> dict[str, torch.Tensor]:
    """Run to six steps, but lose the process after the checkpoint at four."""
    real = train.save

    def save(path: Path, payload: dict) -> None:
        real(path, payload)
        if payload["step"] == 4:
            raise KeyboardInterrupt

    train.save = save
    try:
        with pytest.raises(KeyboardInterrupt):
            _run(folder, 6)
    finally:
        train.save = real
    return _run(folder, 6)


@pytest.mark.parametrize("task", FAMILY_TASKS)
def test_packaged_prompts_never_occur_in_training(task):
    packaged = {p.prompt for split in SPLITS for p in load_prompts(task, split)}
    assert len(packaged) == 160
    trained = {s.prompt for s in islice(stream(11, "train", {task: 1.0}), 20_000)}
    assert not packaged & trained
