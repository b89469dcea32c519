"""One pass of every family's weights against logits of the authors' own models (tests/golden, README.md there says how they were made)."""

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from spot_dlm.targets.checkpoints import load_host, read_json
from spot_dlm.targets.families import find_family
from spot_dlm.targets.forward import run
from spot_dlm.targets.packing import Group, Packed
from spot_dlm.targets.prefix_cache import PrefixCache
from spot_dlm.targets.products import least_rows, linear
from spot_dlm.targets.weights import read_weights

GOLDEN = Path(__file__).parents[1] / "golden"
FAMILIES = ("a2d", "dream", "fastdllm_v2", "llada", "llada2", "llada_moe", "sdar")  # rows and folders
TOLERANCE = {("llada", 1): 2e-4}
"""1e-4 elsewhere. Here rounding alone is larger: the authors' logits are 1.0e-4 from those in float64, transformers' own float32 1.5e-4."""
ITEMS = {folder: json.loads((GOLDEN / folder / "logits.json").read_text("utf-8"))["items"] for folder in FAMILIES}
CASES = [(folder, at) for folder, items in ITEMS.items() for at in range(len(items))]


@cache
def weights_of(folder):
    config = read_json(GOLDEN / folder / "config.json", folder)
    family = find_family(config, folder)
    assert family.name.replace("_", "") == folder.replace("_", "")
    return read_weights(load_host(GOLDEN / folder, config, family, torch.float32), family.rotary_float32)


def block_length(folder, item):
    """Return the block length of a block-causal item, None for full attention."""
    return 32 if folder == "fastdllm_v2" else item.get("block_length", item.get("block_size"))


@torch.inference_mode()
def logits(weights, ids, positions, visible):
    """Run a whole sequence as one segment."""
    count, least = len(ids), least_rows(weights.device)
    group = Group(PrefixCache(count), 0, 1, count, visible=visible)
    hidden, _ = run(weights, Packed(ids, positions, np.arange(count), [group]).padded(least, least))
    return linear(hidden, weights.head)[:count].numpy()


@pytest.mark.parametrize(("folder", "at"), CASES)
def test_logits_are_the_authors(folder, at):
    """Left pads, which nothing sees, are left out; positions and blocks count them as the item says."""
    item = ITEMS[folder][at]
    first, ids = item.get("first_row", 0), np.array(item["input_ids"])
    columns = np.arange(len(ids))
    positions = np.array(item.get("position_ids") or columns)
    length, visible = block_length(folder, item), None
    if length is not None:
        blocks = torch.from_numpy(columns[first:] // length)
        visible = blocks <= blocks[:, None]
    found = logits(weights_of(folder), ids[first:], positions[first:], visible)
    expected = np.array(item["logits"])
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() < TOLERANCE.get((folder, at), 1e-4)
    assert (found.argmax(axis=1) == expected.argmax(axis=1)).all()
