"""Bit by bit: a row's logits do not depend on what else is in the pass, the number on which losslessness stands."""

import numpy as np
import pytest
import torch

from spot_dlm.state import MASKED
from spot_dlm.targets import load_target
from tests.tiny_checkpoints import write_sdar

ROWS = (1, 3, 8, 17, 32)
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
    """Rows with different numbers of masked positions, from none to L."""
    canvas = rng.integers(0, 300, (rows, length))
    counts = [length * (row + 1) // rows if row else 0 for row in rng.permutation(rows)]
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
    for blocks in sorted({0, 1, 5, *(-(-tokens // length) for tokens in (33, 64, 100, 300))}):
        prefix = target.prefill(rng.integers(0, 300, blocks * length), length)
        if found := disagreements(target, prefix, rng, length, probes):
            bad[blocks * length] = found
    assert not bad


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("size", ["tiny", "golden", "odd", "hidden-512", "shipped"])
def test_rows_do_not_depend_on_the_pass(targets, size, length):
    assert_invariant(targets[size], length, probes=1 if size in ("hidden-512", "shipped") or length > 8 else 2)


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("length", [1, 5, 16])
@pytest.mark.parametrize("size", ["shipped-size", "hidden-512"])
def test_rows_do_not_depend_on_the_pass_with_two_threads(two_threads, targets, size, length):
    assert_invariant(targets[size], length, probes=1)


@pytest.mark.parametrize("size", ["odd", "shipped", "hidden-512"])
def test_queries_do_not_depend_on_the_pass_with_two_threads(two_threads, targets, size):
    """Prompts and block lengths of several kinds in one pass, against every row alone; keys and values of folded commits too."""
    target, rng = targets[size], np.random.default_rng(1)
    queries = []
    for length, tokens, rows in ((16, 64, 9), (4, 100, 33), (1, 33, 3), (7, 0, 5), (16, 512, 2)):
        prefix = target.prefill(rng.integers(0, 300, -(-tokens // length) * length), length)
        queries.append((prefix, random_canvases(rng, rows, length)))
    together = target.evaluate_many(queries)
    scratch = [dict(prefix.scratch) for prefix, _ in queries]
    for (prefix, canvas), found, left in zip(queries, together, scratch, strict=True):
        for row in range(len(canvas)):
            assert torch.equal(bits(found.of(row)), bits(target.evaluate(prefix, canvas[[row]]).of(0)))
            for name, alone in prefix.scratch.items():
                assert torch.equal(bits(alone), bits(left[name]))


def test_wide_layers_do_not_depend_on_the_pass(tmp_path):
    """Sums over more than 512 inputs, where one product over all of them would round differently with 192 rows or more."""
    write_sdar(tmp_path, hidden_size=1024, intermediate_size=1536, num_hidden_layers=1)
    target, rng = load_target(str(tmp_path), device="cpu"), np.random.default_rng(0)
    prefix, canvas = target.prefill(rng.integers(0, 300, 64), 16), random_canvases(rng, 32, 16)
    found = target.evaluate(prefix, canvas)
    for row in (0, 5, 31):
        assert torch.equal(bits(found.of(row)), bits(target.evaluate(prefix, canvas[[row]]).of(0)))
