"""Complete canvases and batches: folded commits, the block after a canvas, several queries in one pass."""

import numpy as np
import pytest
import torch

from spot_dlm.interfaces import BatchTarget
from spot_dlm.state import MASKED
from spot_dlm.targets import adapter, block_causal, load_target
from tests.tiny_checkpoints import MASK, VOCAB, write_sdar

SHAPES = {
    "gqa": {},
    "mha": {"num_key_value_heads": 4, "head_dim": 8, "tie_word_embeddings": True},
    "mqa": {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 24, "hidden_size": 48, "num_hidden_layers": 3},
    "one-layer": {"num_hidden_layers": 1},
}
LENGTHS = (1, 4, 7, 16, 32)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Return (adapter, dense model) by shape name."""
    root = tmp_path_factory.mktemp("crossing")
    return {
        name: (lambda dense, name=name: (load_target(str(root / name), device="cpu"), dense))(write_sdar(root / name, seed, **changes))
        for seed, (name, changes) in enumerate(SHAPES.items())
    }


def tokens(count, seed=0):
    return np.random.default_rng(seed).integers(0, 316, count)


def canvases(rows, length, seed=0, complete=0.3):
    """Random canvases, some of them complete."""
    rng = np.random.default_rng(seed)
    canvas = rng.integers(0, 316, (rows, length))
    for row in canvas:
        if rng.random() > complete:
            row[rng.permutation(length)[: int(rng.integers(1, length + 1))]] = MASKED
    return canvas


def same(one, other):
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


def cached(prefix):
    return prefix.buffer[:, :, :, : prefix.length]


@torch.inference_mode()
def dense_after(dense, prompt, canvas):
    """Return the logits of an all-mask block after prompt and canvas, by one dense pass under the block-causal mask."""
    length = len(canvas)
    ids = np.concatenate((prompt, canvas, np.full(length, MASK)))
    block = torch.arange(len(ids)) // length
    visible = (block[None, :] <= block[:, None])[None, None]
    out = dense(torch.from_numpy(ids)[None], attention_mask=visible, position_ids=torch.arange(len(ids))[None], use_cache=False)
    return out.logits[0, -length:]


def test_the_adapter_says_what_it_can(checkpoints):
    target, _ = checkpoints["gqa"]
    assert target.spec.crosses and isinstance(target, BatchTarget)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("length", LENGTHS)
def test_a_complete_canvas_gives_the_next_block_s_logits(checkpoints, shape, length):
    """Against the dense model, next to incomplete canvases and another complete one, which keep theirs."""
    target, dense = checkpoints[shape]
    others = [v for v in range(VOCAB) if v != MASK]
    for blocks in (0, 3):
        prompt = tokens(blocks * length, 1)
        prefix = target.prefill(prompt, length)
        canvas = canvases(5, length, 2, complete=0)
        canvas[[1, 4]] = tokens(2 * length, 3).reshape(2, length)
        found = target.evaluate(prefix, canvas)
        counts = (canvas == MASKED).sum(axis=1)
        assert found.offsets == [0, *np.cumsum(np.where(counts == 0, length, counts)).tolist()]
        for row in (1, 4):
            expected = dense_after(dense, prompt, canvas[row])
            torch.testing.assert_close(found.of(row)[:, others], expected[:, others], rtol=0, atol=1e-5)
            assert torch.isneginf(found.of(row)[:, MASK]).all()
        alone = target.evaluate(prefix, canvas[[0]])
        assert same(found.of(0), alone.of(0))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("length", LENGTHS)
def test_a_folded_commit_has_the_bits_of_a_commit_pass(checkpoints, shape, length):
    """Block after block, whatever else was in the pass."""
    target, _ = checkpoints[shape]
    folded, separate = (target.prefill(tokens(2 * length), length) for _ in range(2))
    for seed in range(4):
        canvas = canvases(1 + 4 * seed, length, seed)
        canvas[seed] = tokens(length, 50 + seed)
        target.evaluate(folded, canvas)
        assert target.commit(folded, canvas[seed]) == 0
        assert target.commit(separate, canvas[seed]) == 1
        assert folded.length == separate.length == (3 + seed) * length
        assert same(cached(folded), cached(separate))


def test_a_commit_without_its_canvas_takes_a_pass(checkpoints):
    """The scratch holds the last evaluation only, and nothing after a commit."""
    target, _ = checkpoints["gqa"]
    block, other = tokens(4, 1), tokens(4, 2)
    masked = np.array([[1, MASKED, 2, 3]])
    prefix = target.prefill(tokens(8), 4)
    target.evaluate(prefix, np.stack((block, masked[0])))
    assert len(prefix.scratch) == 1
    assert target.commit(prefix, other) == 1 and not prefix.scratch
    assert target.commit(prefix, block) == 1
    target.evaluate(prefix, block[None])
    target.evaluate(prefix, masked)
    assert not prefix.scratch and target.commit(prefix, block) == 1
    target.evaluate(prefix, np.stack((block, other)))
    assert target.commit(prefix, other) == 0 and not prefix.scratch
    assert target.commit(prefix, other) == 1


def test_equal_canvases_are_one_segment(checkpoints, monkeypatch):
    """They cost no tokens, and every one of them has its logits."""
    target, _ = checkpoints["gqa"]
    sizes = []
    packed = block_causal.pack
    monkeypatch.setattr(block_causal, "pack", lambda *a, **k: sizes.append(packed(*a, **k)) or sizes[-1])
    prefix = target.prefill(tokens(8), 4)
    block, masked = tokens(4, 1), np.array([1, MASKED, 2, MASKED])
    found = target.evaluate(prefix, np.stack((block, masked, block, masked, block)))
    assert len(sizes[-1].ids) == 3 * 4 and found.offsets == [0, 4, 6, 10, 12, 16]
    assert same(found.of(0), found.of(2)) and same(found.of(0), found.of(4)) and same(found.of(1), found.of(3))


def mixed_queries(target, seed):
    """Queries of different prefix lengths, block lengths and numbers of rows."""
    rng = np.random.default_rng(seed)
    made = []
    for blocks, length, rows in zip(rng.permutation([0, 1, 5, 33]), rng.permutation(LENGTHS), rng.permutation([1, 2, 5, 33]), strict=False):
        made.append((target.prefill(tokens(blocks * length, seed), int(length)), canvases(rows, int(length), seed + int(rows))))
    return made


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(3))
def test_a_query_does_not_depend_on_the_others(checkpoints, shape, seed):
    """Logits and the keys and values left for the commit."""
    target, _ = checkpoints[shape]
    queries = mixed_queries(target, seed)
    together = target.evaluate_many(queries)
    scratch = [dict(prefix.scratch) for prefix, _ in queries]
    for (prefix, canvas), found, left in zip(queries, together, scratch, strict=True):
        alone = target.evaluate(prefix, canvas)
        assert alone.offsets == found.offsets and same(alone.packed, found.packed)
        assert left.keys() == prefix.scratch.keys() == {c.tobytes() for c in canvas if (c != MASKED).all()}
        assert all(same(left[name], prefix.scratch[name]) for name in left)


@pytest.mark.parametrize("limit", ["PASS_TOKENS", "MAX_SCORES", "_HEAD_BYTES"])
def test_chunks_cannot_be_seen(checkpoints, monkeypatch, limit):
    """Passes of a few canvases, few scores or few rows of the head: the same bits, the same scratch."""
    target, _ = checkpoints["gqa"]
    queries = mixed_queries(target, 7)
    whole = target.evaluate_many(queries)
    scratch = [dict(prefix.scratch) for prefix, _ in queries]
    module = adapter if limit == "_HEAD_BYTES" else block_causal
    monkeypatch.setattr(module, limit, {"PASS_TOKENS": 40, "MAX_SCORES": 4 * 500, "_HEAD_BYTES": 1}[limit])
    calls = []
    run = block_causal.run
    monkeypatch.setattr(block_causal, "run", lambda *a: calls.append(1) or run(*a))
    parts = target.evaluate_many(queries)
    assert len(calls) == 1 if limit == "_HEAD_BYTES" else len(calls) > 4
    for (prefix, _), one, other, left in zip(queries, whole, parts, scratch, strict=True):
        assert one.offsets == other.offsets and same(one.packed, other.packed)
        assert left.keys() == prefix.scratch.keys() and all(same(left[k], prefix.scratch[k]) for k in left)


def test_no_queries(checkpoints):
    assert checkpoints["gqa"][0].evaluate_many([]) == []
