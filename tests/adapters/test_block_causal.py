"""The block-causal adapter against transformers' plain Qwen3 run densely, without a cache, under an explicit 4D mask."""

import itertools

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from spot_dlm.state import MASKED
from spot_dlm.targets import block_causal, forward, load_target
from tests.tiny_checkpoints import MASK, VOCAB, write_sdar, write_tokenizer

SHAPES = {
    "gqa": {},
    "gqa-tied": {"tie_word_embeddings": True, "head_dim": 32},
    "mha": {"num_key_value_heads": 4, "head_dim": 8},
    "mha-tied": {"num_key_value_heads": 4, "tie_word_embeddings": True},
    "mqa": {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 24, "hidden_size": 48},
}
LENGTHS = (1, 2, 4, 5, 8, 16, 32)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Return (adapter, dense model) by shape name."""
    root = tmp_path_factory.mktemp("sdar")
    made = {}
    for seed, (name, changes) in enumerate(SHAPES.items()):
        dense = write_sdar(root / name, seed, **changes)
        made[name] = load_target(str(root / name), device="cpu"), dense
    return made


def tokens(count, seed=0):
    return np.random.default_rng(seed).integers(0, 316, count)


def canvases(rows, length, seed=0):
    """Random canvases with 1 to L masked positions."""
    rng = np.random.default_rng(seed)
    canvas = rng.integers(0, 316, (rows, length))
    for row in range(rows):
        count = length if row == 0 else int(rng.integers(1, length + 1))
        canvas[row, rng.permutation(length)[:count]] = MASKED
    return canvas


@torch.inference_mode()
def dense_logits(dense, ids, length):
    """Return all logits of one dense pass under the block-causal mask."""
    block = torch.arange(len(ids)) // length
    visible = (block[None, :] <= block[:, None])[None, None]
    positions = torch.arange(len(ids))[None]
    return dense(torch.from_numpy(ids)[None], attention_mask=visible, position_ids=positions, use_cache=False).logits[0]


def assert_dense(target, dense, prefix, prompt, canvas, tolerance=1e-5):
    """Compare every masked position of every row with its own dense pass."""
    found = target.evaluate(prefix, canvas)
    assert found.packed.dtype == torch.float32
    assert found.offsets == [0, *np.cumsum((canvas == MASKED).sum(axis=1)).tolist()]
    others = [v for v in range(VOCAB) if v != MASK]
    for row, state in enumerate(canvas):
        ids = np.concatenate((prompt, np.where(state == MASKED, MASK, state)))
        at = len(prompt) + np.flatnonzero(state == MASKED)
        expected = dense_logits(dense, ids, canvas.shape[1])[at]
        assert torch.isneginf(found.of(row)[:, MASK]).all()
        torch.testing.assert_close(found.of(row)[:, others], expected[:, others], rtol=0, atol=tolerance)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("length", LENGTHS)
def test_prefix_cache_is_exact(checkpoints, shape, length):
    """Prefilled and committed blocks, several rows of different fill."""
    target, dense = checkpoints[shape]
    ids = tokens(6 * length)
    prefix = target.prefill(ids[: 3 * length], length)
    for block in range(3, 6):
        assert prefix.length == block * length
        assert_dense(target, dense, prefix, ids[: block * length], canvases(3, length, block))
        target.commit(prefix, ids[block * length : (block + 1) * length])


@pytest.mark.parametrize("shape", ["gqa", "mha"])
@pytest.mark.parametrize("length", LENGTHS)
def test_prompt_lengths_around_a_block(checkpoints, shape, length):
    """The prompt's tail sits in the first generated block: shorter than, equal to and one more than a block."""
    target, dense = checkpoints[shape]
    for size in {max(1, length - 1), length, length + 1}:
        prompt = tokens(size, size)
        full = size // length * length
        prefix = target.prefill(prompt[:full], length)
        assert prefix.length == full
        canvas = np.full((2, length), MASKED)
        canvas[:, : size - full] = prompt[full:]
        canvas[1, -1] = 5
        if (canvas[1] == MASKED).any():
            assert_dense(target, dense, prefix, prompt[:full], canvas)
        else:
            assert_dense(target, dense, prefix, prompt[:full], canvas[:1])


@pytest.mark.parametrize("length", [5, 32, 600])
def test_long_prompt_in_chunks_equals_block_by_block(checkpoints, length):
    """3000 tokens: prefill works in chunks of whole blocks, commit one block at a time."""
    target, dense = checkpoints["gqa"]
    ids = tokens(3000 // length * length)
    chunked = target.prefill(ids, length)
    stepwise = target.prefill(ids[:0], length)
    for start in range(0, len(ids), length):
        target.commit(stepwise, ids[start : start + length])
    assert chunked.length == stepwise.length == len(ids)
    one, other = (prefix.buffer[:, :, :, : len(ids)] for prefix in (chunked, stepwise))
    torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    canvas = canvases(2, length, 1)[:, :length]
    first, second = target.evaluate(chunked, canvas), target.evaluate(stepwise, canvas)
    torch.testing.assert_close(first.packed, second.packed, rtol=0, atol=1e-5)
    assert_dense(target, dense, chunked, ids, canvas[:1])


def test_prefill_refuses_partial_blocks(checkpoints):
    with pytest.raises(ValueError, match="whole blocks of 4, got 6 tokens"):
        checkpoints["gqa"][0].prefill(tokens(6), 4)


def bits(prefix):
    return (prefix.length, None, 0) if prefix.buffer is None else (prefix.length, prefix.buffer.clone(), prefix.buffer.data_ptr())


@pytest.mark.parametrize("blocks", [0, 1, 7])
def test_evaluate_never_changes_the_cache(checkpoints, blocks):
    """Every element of the buffer, unused capacity included, and the buffer itself."""
    target, _ = checkpoints["gqa"]
    ids = tokens(blocks * 8)
    prefix = target.prefill(ids[: max(0, blocks - 1) * 8], 8)
    if blocks:
        target.commit(prefix, ids[-8:])
    before = bits(prefix)
    first = target.evaluate(prefix, canvases(5, 8)).packed
    for rows in (1, 32, 5):
        target.evaluate(prefix, np.concatenate((tokens(8)[None], canvases(rows, 8))))
        again = target.evaluate(prefix, canvases(rows, 8)).packed
    after = bits(prefix)
    assert before[0] == after[0] and before[2] == after[2]
    assert before[1] is None or torch.equal(before[1].view(torch.int32), after[1].view(torch.int32))
    assert torch.equal(first, again)


class _Sizes(TorchDispatchMode):
    """Records the elements of every tensor whose storage an operation made."""

    def __init__(self):
        super().__init__()
        self.made: list[tuple[str, int]] = []
        self.known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {t.untyped_storage().data_ptr() for t in torch.utils._pytree.tree_leaves((args, kwargs)) if torch.is_tensor(t)}
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if torch.is_tensor(tensor) and tensor.untyped_storage().data_ptr() not in given:
                self.made.append((str(func), tensor.untyped_storage().nbytes() // tensor.element_size()))
        return out


@pytest.mark.parametrize("shape", ["gqa", "mha", "gqa-tied"])
def test_the_prefix_is_not_copied(checkpoints, shape):
    """With head_dim above the queries per key head, keys are the largest tensor by far: no new tensor comes near N copies of them."""
    target, _ = checkpoints[shape]
    length, cached = 2, 2048
    prefix = target.prefill(tokens(cached), length)
    key = prefix.padded(0, 0).numel()
    target.evaluate(prefix, canvases(1, length))  # makes the table of rotary angles
    heads = SHAPES[shape].get("num_key_value_heads", 2)
    largest = {}
    for rows in (8, 32):
        with _Sizes() as sizes:
            target.evaluate(prefix, canvases(rows, length))
        largest[rows] = max(size for _, size in sizes.made)
        # The one unavoidable tensor of size N x prefix: a score per query and key, a row's own keys padded to 16.
        scores = rows * 4 * length * (cached + 16)
        assert largest[rows] <= scores, max(sizes.made, key=lambda made: made[1])
        assert scores < rows * key or heads * SHAPES[shape].get("head_dim", 16) <= 4 * length
        same_size = [made for made in sizes.made if made[1] == rows * key]
        assert not same_size


def test_no_new_tensor_of_prefix_key_size_at_all(checkpoints):
    """One query position: scores are small, so any copy of the prefix, even a single one, would show."""
    target, _ = checkpoints["gqa-tied"]
    prefix = target.prefill(tokens(4096 - 1), 1)
    key = prefix.padded(0, 0).numel()
    target.evaluate(prefix, canvases(1, 1))
    with _Sizes() as sizes:
        target.evaluate(prefix, canvases(8, 1))
    scores = 16 * 4 * (4096 + 16)  # 16 rows at least (see BlockCausalTarget), 4 query heads
    assert max(size for _, size in sizes.made) <= max(scores, 16 * VOCAB)
    assert scores < 2.1 * key


def test_mask_and_undefined_ids_are_excluded(tmp_path):
    """Ids past the tokenizer's last one have no text: minus infinity, as the mask; every other logit is finite."""
    write_sdar(tmp_path)
    ids = write_tokenizer(tmp_path)
    config = (tmp_path / "config.json").read_text("utf-8").replace(f'"mask_token_id": {MASK}', f'"mask_token_id": {ids["<|MASK|>"]}')
    (tmp_path / "config.json").write_text(config, "utf-8")
    target = load_target(str(tmp_path), device="cpu")
    defined = max(ids.values()) + 1
    assert defined < VOCAB and target.spec.mask_token_id == ids["<|MASK|>"]
    logits = target.evaluate(target.prefill(tokens(0), 4), canvases(3, 4)).packed
    excluded = {ids["<|MASK|>"], *range(defined, VOCAB)}
    for v in range(VOCAB):
        column = logits[:, v]
        assert torch.isneginf(column).all() if v in excluded else torch.isfinite(column).all(), v


def test_without_tokenizer_only_the_mask_is_excluded(checkpoints):
    logits = checkpoints["gqa"][0].evaluate(checkpoints["gqa"][0].prefill(tokens(0), 4), canvases(3, 4)).packed
    assert torch.isneginf(logits).any(dim=0).nonzero().flatten().tolist() == [MASK]


def test_padded_rows_change_nothing_but_the_shape(checkpoints, tmp_path, monkeypatch):
    """Strict mode evaluates every pass at one row count; a complete canvas counts two."""
    write_sdar(tmp_path)
    padded = load_target(str(tmp_path), device="cpu", padded_rows=16)
    plain, _ = checkpoints["gqa"]
    seen = []

    def run(weights, batch):
        seen.append((len(batch.ids), len(batch.wanted)))
        return forward.run(weights, batch)

    monkeypatch.setattr(block_causal, "run", run)
    for rows, blocks in itertools.product((1, 3, 16), (0, 2)):
        canvas = canvases(rows, 4)
        if rows == 3:
            canvas[1] = 5
        seen.clear()
        found = padded.evaluate(padded.prefill(tokens(4 * blocks), 4), canvas)
        expected = plain.evaluate(plain.prefill(tokens(4 * blocks), 4), canvas)
        assert found.offsets == expected.offsets
        torch.testing.assert_close(found.packed, expected.packed, rtol=0, atol=1e-5)
        assert seen[blocks > 0] == (16 * 4, 16 * 4)
