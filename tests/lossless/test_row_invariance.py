"""Bit by bit: a row's logits do not depend on what else is in the pass, the number on which losslessness stands."""

import numpy as np
import pytest
import torch

from spot_dlm.state import MASKED
from spot_dlm.targets import load_target
from tests.tiny_checkpoints import write_sdar

ROWS = (1, 2, 3, 4, 5, 8, 16, 32)
LENGTHS = (1, 2, 3, 4, 5, 7, 8, 16, 32)  # odd ones too: their score matrices are not aligned by nature
SIZES = {
    "tiny": {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1},
    "golden": {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32},
    "odd": {"hidden_size": 72, "intermediate_size": 100, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 24},
    "shipped-size": {
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "head_dim": 32,
        "vocab_size": 768,
        "tie_word_embeddings": True,
    },
    "hidden-512": {
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 1024,
        "num_hidden_layers": 1,
    },
}


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    root = tmp_path_factory.mktemp("sizes")
    made = {"shipped": load_target(device="cpu")}
    for seed, (name, changes) in enumerate(SIZES.items()):
        write_sdar(root / name, seed, **changes)
        made[name] = load_target(str(root / name), device="cpu")
    return made


def random_canvases(rng, rows, length):
    """Rows with different numbers of masked positions, from 1 to L."""
    canvas = rng.integers(0, 300, (rows, length))
    counts = [1 + (length - 1) * row // max(1, rows - 1) for row in rng.permutation(rows)]
    for row, count in zip(canvas, counts, strict=True):
        row[rng.permutation(length)[:count]] = MASKED
    return canvas


def bits(tensor):
    return tensor.view(torch.int32)


def disagreements(target, prefix, rng, length, probes):
    """Return the row counts, slots and masked positions at which a probe's logits differ in a bit from those it gets alone."""
    bad = []
    for probe in random_canvases(rng, probes, length):
        alone = target.evaluate(prefix, probe[None]).of(0)
        for rows in ROWS:
            canvas = random_canvases(rng, rows, length)
            slot = rows - 1 if rows % 2 == 0 else int(rng.integers(rows))
            canvas[slot] = probe
            if not torch.equal(bits(target.evaluate(prefix, canvas).of(slot)), bits(alone)):
                bad.append((rows, slot, int((probe == MASKED).sum())))
    return bad


def assert_invariant(target, length, probes):
    rng = np.random.default_rng(length)
    bad = {}
    for blocks in (0, 1, 7, -(-300 // length)):
        prefix = target.prefill(rng.integers(0, 300, blocks * length), length)
        if found := disagreements(target, prefix, rng, length, probes):
            bad[blocks * length] = found
    assert not bad


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("size", ["tiny", "golden", "odd", "hidden-512", "shipped"])
def test_rows_do_not_depend_on_the_pass(targets, size, length):
    assert_invariant(targets[size], length, probes=1 if size in ("hidden-512", "shipped") or length > 8 else 2)


@pytest.mark.parametrize("length", [1, 5, 16])
@pytest.mark.parametrize("size", ["shipped-size", "hidden-512"])
def test_rows_do_not_depend_on_the_pass_with_two_threads(targets, size, length):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert_invariant(targets[size], length, probes=1)
    finally:
        torch.set_num_threads(before)
