"""The recipe: training layout equals inference, views are complementary, a resumed run equals an uninterrupted one, prompts are unseen."""

import argparse
import shutil
from dataclasses import replace
from importlib import resources
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from spot_dlm.interfaces import Target
from spot_dlm.state import MASKED
from spot_dlm.targets import load_target
from spot_dlm.tasks import FAMILY_TASKS, SPLITS, load_prompts
from zoo import batches, train
from zoo.export import export
from zoo.families import stream
from zoo.grow import grow
from zoo.model import BlockDiffusionModel, ModelConfig
from zoo.recipes import RECIPES, WEIGHTS, Recipe
from zoo.tokenizer import MASK

SHIPPED = Path(str(resources.files("spot_dlm"))) / "shipped" / "target"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(SHIPPED / "tokenizer.json"))


@pytest.fixture(scope="module")
def encoded(tokenizer):
    return [batches.encode(tokenizer, s) for s in islice(stream(3, "train", WEIGHTS), 24)]


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


def _tiny(name: str) -> Recipe:
    """Return a recipe with a small network of its kind."""
    recipe = RECIPES[name]
    heads = 4 if recipe.config.num_key_heads else 2
    sizes = {"hidden_size": 16 * heads, "num_heads": heads, "head_dim": 16, "intermediate_size": 48, "num_layers": 2}
    config = replace(recipe.config, **sizes, num_key_heads=2 if recipe.config.num_key_heads else 0)
    return replace(recipe, config=config, donor_layers=())


def _exported(recipe: Recipe, folder: Path) -> tuple[BlockDiffusionModel, Target]:
    """Return a random network and the target that its export is."""
    torch.manual_seed(0)
    model = BlockDiffusionModel(recipe.config)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    shutil.copy(SHIPPED / "tokenizer.json", folder / "tokenizer.json")
    payload = {"model": model.state_dict(), "step": 0, "tokens_seen": 0, "config": recipe.config.to_dict()}
    torch.save(payload, folder / "checkpoint.pt")
    export(folder, folder / f"{recipe.family}-target", recipe.block_lengths[0], family=recipe.family)
    return model, load_target(str(folder / f"{recipe.family}-target"))


BLOCK_CAUSAL = [name for name, recipe in RECIPES.items() if recipe.attention == "block_causal"]
FULL = [name for name in RECIPES if name not in BLOCK_CAUSAL]


@pytest.mark.parametrize("name", BLOCK_CAUSAL)
def test_training_layout_gives_the_logits_of_inference(name, tokenizer, encoded, tmp_path):
    """A noised block inside a training row and the same canvas in the decoder's cache give the same logits."""
    recipe = _tiny(name)
    model, target = _exported(recipe, tmp_path)
    mask_id = tokenizer.token_to_id(MASK)
    compared = seeds = 0
    for step, block_length in enumerate(recipe.block_lengths * (2 // len(recipe.block_lengths))):
        batch = train.build_batch(recipe, tokenizer, encoded[:6], step)
        with torch.no_grad():
            logits = model.logits(model.hidden(batch.ids, batch.positions, batch.mask))
        predicting = {int(r): int(t) for r, t in zip(batch.rows, batch.targets, strict=True)}
        for row, sample in enumerate(encoded[:6]):
            prompt = len(sample.prompt_ids)
            start = prompt if recipe.after_prompt else prompt // block_length * block_length
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
                theirs = logits[row, at[ids[at] == mask_id] - recipe.shifted]
                keep = torch.isfinite(ours)
                assert torch.allclose(ours[keep], theirs[keep], atol=2e-4)
                compared += 1
                answer = [*sample.prompt_ids, *sample.answer_ids]
                for position in positions[at][ids[at] == mask_id]:
                    masked = row * batch.ids.shape[1] + int(at[0]) + int(position) - first - recipe.shifted
                    assert predicting[masked] == (answer[position] if position < len(answer) else 0)
                if recipe.shifted and first >= prompt:
                    assert target.seed(prefix) == int(logits[row, first - 1].argmax())
                    assert predicting[row * batch.ids.shape[1] + first - 1] == (answer[first] if first < len(answer) else 0)
                    seeds += 1
    assert compared >= 20 and seeds >= 6 * recipe.shifted  # six samples, two views each


@pytest.mark.parametrize("name", FULL)
def test_canvases_give_the_logits_of_inference(name, tokenizer, encoded, tmp_path):
    """A view of a full-attention batch and the same canvas of the decoder give the same logits, and hold complementary masks."""
    recipe = _tiny(name)
    model, target = _exported(recipe, tmp_path)
    mask_id = tokenizer.token_to_id(MASK)
    batch = train.build_batch(recipe, tokenizer, encoded[:6], 0)
    with torch.no_grad():
        logits = model.logits(model.hidden(batch.ids, batch.positions, batch.mask))
    predicting = {int(r): int(t) for r, t in zip(batch.rows, batch.targets, strict=True)}
    total = batch.ids.shape[1]
    for index, sample in enumerate(encoded[:6]):
        tokens, ends = [*sample.prompt_ids, *sample.answer_ids], batch.mask[2 * index, 0, 0].sum()
        hidden = [set(np.flatnonzero(batch.ids[2 * index + view].numpy() == mask_id).tolist()) for view in (0, 1)]
        length = recipe.block_lengths[0] or int(ends) - len(sample.prompt_ids)
        current = sorted(hidden[0] ^ hidden[1])
        start = len(sample.prompt_ids) + (current[0] - len(sample.prompt_ids)) // length * length
        assert current == list(range(start, start + length)) and max(hidden[0] | hidden[1]) == int(ends) - 1
        for view in (0, 1):
            ids = batch.ids[2 * index + view].numpy()
            canvas = np.where(ids[start : start + length] == mask_id, MASKED, ids[start : start + length])
            ours = target.evaluate(target.open_canvas(ids[:start], int(ends)), canvas[None]).of(0)
            at = start + np.flatnonzero(canvas == MASKED)
            theirs = logits[2 * index + view, at - recipe.shifted]
            keep = torch.isfinite(ours)
            assert torch.allclose(ours[keep], theirs[keep], atol=2e-4)
            for position in hidden[view]:
                wanted = tokens[position] if position < len(tokens) else 0
                assert predicting[(2 * index + view) * total + position - recipe.shifted] == wanted


@pytest.mark.parametrize("name", [name for name, recipe in RECIPES.items() if recipe.donor_layers])
def test_a_grown_network_begins_where_the_donor_is(name, tokenizer):
    """Wider and deeper networks with norms of heads compute the donor's very function; the others are grown without error."""
    recipe = RECIPES[name]
    model = train.initial_model(recipe, tokenizer)
    donor = train.initial_model(RECIPES["shipped"], tokenizer)
    donor.load_state_dict(load_file(SHIPPED / "model.safetensors"))
    ids = torch.arange(4, 44)[None]
    given = ids, torch.arange(40)[None], torch.ones(1, 1, 40, 40, dtype=torch.bool)
    with torch.no_grad():
        ours, theirs = (m.logits(m.hidden(*given)) for m in (model, donor))
    exact = recipe.config.qk_norm and not recipe.config.num_experts and not recipe.config.num_key_heads
    assert torch.isfinite(ours).all()
    assert torch.allclose(ours, theirs, atol=1e-3) == exact


def test_what_is_wider_and_deeper_begins_exactly(tokenizer):
    donor = train.initial_model(RECIPES["shipped"], tokenizer)
    for weight in donor.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    model = BlockDiffusionModel(ModelConfig(hidden_size=224, num_heads=8, intermediate_size=600, num_layers=5, tied=False))
    ids = torch.arange(4, 44)[None]
    grow(model, donor, (0, 1, None, 2, 3), ids)
    given = ids, torch.arange(40)[None], torch.ones(1, 1, 40, 40, dtype=torch.bool)
    with torch.no_grad():
        ours, theirs = (m.logits(m.hidden(*given)) for m in (model, donor))
    assert torch.allclose(ours, theirs, atol=1e-2 * float(theirs.abs().max()))
    with pytest.raises(ValueError, match="must not be narrower"):
        grow(BlockDiffusionModel(ModelConfig(hidden_size=160, num_heads=5)), donor, (0, 1, 2, 3), ids)
    with pytest.raises(ValueError, match="3 donor layers for a network of 4"):
        grow(BlockDiffusionModel(ModelConfig()), donor, (0, 1, 2), ids)


def _run(folder: Path, steps: int) -> dict[str, torch.Tensor]:
    folder.mkdir(exist_ok=True)
    shutil.copy(SHIPPED / "tokenizer.json", folder / "tokenizer.json")
    defaults = {"recipe": "shipped", "threads": None, "log_every": 2, "keep_every": 1000}
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
