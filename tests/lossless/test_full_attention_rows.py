"""Full attention: a canvas's logits have the same bits whatever else is in the pass, and are those of a dense reference."""

from pathlib import Path

import numpy as np
import pytest
import torch
from toy import unchecked

from spot_dlm.state import MASKED
from spot_dlm.targets import full_attention, load_target
from spot_dlm.targets.full_attention import FullAttentionTarget

GOLDEN = Path(__file__).parents[1] / "golden"
FAMILIES = ("llada", "dream", "llada_moe", "a2d")


def load(family: str) -> FullAttentionTarget:
    target = load_target(str(GOLDEN / family), device="cpu", mask_token_id=318, stop_ids=(), block_length=8)
    assert isinstance(target, FullAttentionTarget)
    return target


def canvases(rng: np.random.Generator, count: int, length: int) -> np.ndarray:
    found = rng.integers(0, 300, (count, length))
    found[rng.random((count, length)) < 0.5] = MASKED
    found[:, 0] = MASKED
    return found


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_do_not_depend_on_the_pass(family: str, threads: int) -> None:
    before, rng = torch.get_num_threads(), np.random.default_rng(3)
    torch.set_num_threads(threads)
    try:
        target = load(family)
        for prompt, length, more in ((1, 4, 0), (5, 8, 24), (40, 16, 47), (200, 32, 100), (640, 32, 8)):
            prefix = target.open_canvas(rng.integers(0, 300, prompt), prompt + length + more)
            other = target.open_canvas(rng.integers(0, 300, 9), 30)
            rows = canvases(rng, 9, length)
            with unchecked():
                together, _ = target.evaluate_many([(prefix, rows), (other, canvases(rng, 3, 5))])
                for count in (1, 2, 5):
                    some = target.evaluate(prefix, rows[:count])
                    for i in range(count):
                        assert torch.equal(some.of(i), together.of(i)), (prompt, length, more, count, i)
    finally:
        torch.set_num_threads(before)


def test_chunks_cannot_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    target, rng = load("dream"), np.random.default_rng(4)
    prefix, rows = target.open_canvas(rng.integers(0, 300, 7), 40), canvases(rng, 6, 9)
    whole = target.evaluate(prefix, rows)
    for name, value in (("PASS_TOKENS", 90), ("MAX_SCORES", 2 * 40 * 40 * 4)):
        with monkeypatch.context() as patch:
            patch.setattr(full_attention, name, value)
            found = target.evaluate(prefix, rows)
        assert torch.equal(found.packed, whole.packed) and found.offsets == whole.offsets


def test_a_canvas_without_room_is_an_error() -> None:
    with pytest.raises(ValueError, match="a canvas of 3 tokens has no room after 3"):
        load("llada").open_canvas(np.arange(3), 3)
