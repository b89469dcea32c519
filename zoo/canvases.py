"""Training batches of the full-attention objective: the prompt and a canvas of masks that sees all of itself, two views of every sample.

With blocks a view is a state of semi-autoregressive decoding (blocks before the current one clean, those after it masked); without,
any positions of the canvas are masked. The two views mask complementary parts of the current block, or of the canvas.
"""

from collections.abc import Sequence
from typing import cast

import numpy as np
from tokenizers import Tokenizer

from zoo.batches import PAD_END_WEIGHT, Batch, Encoded, choose_masked, results
from zoo.tokenizer import END_OF_TEXT, MASK

CANVAS_UNIT = 32
SPARE_UNITS = (0, 0, 1, 1, 2)
"""What the answer leaves of the canvas: drawn for each batch, in units."""


def build(tokenizer: Tokenizer, samples: Sequence[Encoded], block_length: int, rng: np.random.Generator, shifted: bool = False) -> Batch:
    """Build the tensors of one step: two rows [prompt][canvas] of each sample; each view's loss is a mean over its masked rows.

    Args:
        block_length: of semi-autoregressive decoding, from the end of the prompt; 0: the canvas is one block.
        shifted: the row before a position predicts it (Dream).
    """
    end, mask_id = (cast(int, tokenizer.token_to_id(t)) for t in (END_OF_TEXT, MASK))
    spare = int(rng.choice(SPARE_UNITS))
    canvases = [(-(-(len(s.answer_ids) + 1) // CANVAS_UNIT) + spare) * CANVAS_UNIT for s in samples]
    total = max(len(s.prompt_ids) + canvas for s, canvas in zip(samples, canvases, strict=True))
    shape = (2 * len(samples), total)
    ids, targets = np.full(shape, end, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    weights, valid = np.zeros(shape, dtype=np.float32), np.zeros(shape, dtype=bool)
    for index, (sample, canvas) in enumerate(zip(samples, canvases, strict=True)):
        prompt, answer = len(sample.prompt_ids), len(sample.answer_ids)
        tokens = np.full(prompt + canvas, end, dtype=np.int64)
        tokens[: prompt + answer] = sample.prompt_ids + sample.answer_ids
        length = block_length or canvas
        start = int(rng.integers(-(-(answer + 1) // length))) * length  # of the current block, inside the canvas
        masked = choose_masked(length, rng)
        asked = results(tokenizer, sample.answer_ids) if sample.family == "facts" else None
        importance = np.where(np.arange(canvas) <= answer, 1.0, PAD_END_WEIGHT)
        for view, chosen in enumerate((masked, ~masked)):
            hidden = np.zeros(canvas, dtype=bool)
            hidden[start : start + length] = chosen
            hidden[start + length :] = True
            if asked is not None and view == 1:  # nothing but results masked: everything they follow from is visible
                hidden[:] = False
                hidden[: len(asked)] = asked
            row, at = 2 * index + view, prompt + np.flatnonzero(hidden)
            ids[row, : len(tokens)], valid[row, : len(tokens)] = tokens, True
            if len(at):
                ids[row, at] = mask_id
                targets[row, at - shifted] = tokens[at]
                weights[row, at - shifted] = importance[hidden] / len(at)
    allowed = np.broadcast_to(valid[:, None, :], (*shape, total)) | np.eye(total, dtype=bool)
    positions = np.broadcast_to(np.arange(total), shape).copy()
    return Batch.of(ids, positions, allowed, targets, weights, [s.family for s in samples for _ in range(2)], int(valid.sum()) // 2)
