"""Training batches of the block-diffusion objective: clean copy, two complementary noised copies, masks and weights.

Layout of a row: [clean S][noised view A, answer blocks][noised view B, answer blocks]. The clean copy attends block-causally to
itself (blocks from absolute position 0, prompt included, or from the end of the prompt); a noised block attends to the clean blocks
before it and to itself. Every batch is a pure function of (seed, index), so a resumed run sees the same data. The full-attention
objective is in zoo/canvases.py.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import cast

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from spot_dlm.tasks import FAMILY_TASKS, SPLITS, load_prompts
from zoo.families import Sample, stream
from zoo.tokenizer import END_OF_TEXT, MASK, TURN_END, TURN_START

PAD_END_WEIGHT = 0.25  # weight of the end tokens that fill the last block after the first one


@dataclass(frozen=True)
class Encoded:
    """One sample as ids: prompt with its turn tokens, answer without the end token."""

    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    family: str


@dataclass(frozen=True)
class Batch:
    """Tensors of one optimisation step; `rows` predict, and `targets`, `weights` and `families` belong to them alone."""

    ids: Tensor
    positions: Tensor
    mask: Tensor
    rows: Tensor
    targets: Tensor
    weights: Tensor
    families: list[str]
    num_tokens: int

    @classmethod
    def of(
        cls,
        ids: np.ndarray,
        positions: np.ndarray,
        allowed: np.ndarray,
        targets: np.ndarray,
        weights: np.ndarray,
        families: Sequence[str],
        num_tokens: int,
    ) -> "Batch":
        """Return the batch of B sequences of T tokens; those with a weight predict.

        Args:
            ids, positions, targets, weights: [B, T].
            allowed: [B, T, T], who attends to whom.
            families: of each sequence.
            num_tokens: clean tokens, for the count of what was seen.
        """
        rows = np.flatnonzero(weights.reshape(-1))
        return cls(
            ids=torch.from_numpy(ids),
            positions=torch.from_numpy(positions),
            mask=torch.from_numpy(allowed[:, None]),
            rows=torch.from_numpy(rows),
            targets=torch.from_numpy(targets.reshape(-1)[rows]),
            weights=torch.from_numpy(weights.reshape(-1)[rows]),
            families=[families[int(r) // ids.shape[1]] for r in rows],
            num_tokens=num_tokens,
        )


def encode(tokenizer: Tokenizer, sample: Sample) -> Encoded:
    """Encode a sample in the chat layout of the shipped tokenizer; sample text never yields special ids."""
    start, end = (cast(int, tokenizer.token_to_id(t)) for t in (TURN_START, TURN_END))
    tokenizer.encode_special_tokens = True
    prompt = tokenizer.encode(sample.prompt, add_special_tokens=False).ids
    answer = tokenizer.encode(sample.answer, add_special_tokens=False).ids
    return Encoded((start, *prompt, end), tuple(answer), sample.family)


def pools(
    tokenizer: Tokenizer, weights_at: Callable[[int], Mapping[str, float]], seed: int, batch_rows: int, pool_batches: int, start: int
) -> Iterator[list[Encoded]]:
    """Yield lists of samples of similar length, `batch_rows` each; batch number `start` comes first.

    `weights_at` gives the mixture of families at a step; a pool takes that of its first one.

    Raises:
        ValueError: if a sample's prompt is one of the packaged held-out prompts.
    """
    pool_index, skip = divmod(start, pool_batches)
    held_out = {p.prompt for task in FAMILY_TASKS for split in SPLITS for p in load_prompts(task, split)}
    while True:
        source = stream(seed * 1_000_003 + pool_index, "train", weights_at(pool_index * pool_batches))
        samples = list(islice(source, batch_rows * pool_batches))
        if seen := held_out.intersection(s.prompt for s in samples):
            raise ValueError(f"training would see {len(seen)} held-out prompts, first {min(seen)!r}")
        encoded = [encode(tokenizer, s) for s in samples]
        encoded.sort(key=lambda e: len(e.prompt_ids) + 3 * len(e.answer_ids))
        order = np.random.default_rng((seed, pool_index)).permutation(pool_batches)
        for batch in order[skip:]:
            yield encoded[batch * batch_rows : (batch + 1) * batch_rows]
        pool_index, skip = pool_index + 1, 0


def choose_masked(num: int, rng: np.random.Generator) -> np.ndarray:
    """Choose the masked positions of one block view: a uniform count, the full block in one of six draws."""
    count = num if rng.random() < 1 / 6 else int(rng.integers(1, num + 1))
    masked = np.zeros(num, dtype=bool)
    masked[rng.permutation(num)[:count]] = True
    return masked


def results(tokenizer: Tokenizer, ids: Sequence[int]) -> np.ndarray:
    """Return which ids are digits of a result: those that follow an equals sign directly."""
    tokens = [tokenizer.id_to_token(i) or "" for i in ids]
    found = np.zeros(len(tokens), dtype=bool)
    for i in range(1, len(tokens)):
        found[i] = tokens[i].isdigit() and (tokens[i - 1] == "=" or found[i - 1])
    return found


def build(
    tokenizer: Tokenizer,
    samples: Sequence[Encoded],
    block_length: int,
    rng: np.random.Generator,
    after_prompt: bool = False,
    shifted: bool = False,
) -> Batch:
    """Build the tensors of one step for samples at one block length; each block view's loss is a mean over its masked rows.

    Args:
        after_prompt: the first answer block begins at the end of the prompt; else blocks count from absolute position 0.
        shifted: inside a block the row before a position predicts it, and the clean row before a block predicts its first token,
            which is never masked (Fast-dLLM v2).
    """
    end, mask_id = (cast(int, tokenizer.token_to_id(t)) for t in (END_OF_TEXT, MASK))
    offsets = np.array([len(s.prompt_ids) % block_length if after_prompt else 0 for s in samples])
    starts = [len(s.prompt_ids) - (0 if after_prompt else len(s.prompt_ids) % block_length) for s in samples]
    lengths = [
        start - (start - len(s.prompt_ids) - len(s.answer_ids) - 1) // block_length * block_length
        for s, start in zip(samples, starts, strict=True)
    ]
    clean = max(lengths)
    noised = max(length - start for length, start in zip(lengths, starts, strict=True))
    total = clean + 2 * noised
    ids = np.full((len(samples), total), end, dtype=np.int64)
    positions = np.zeros((len(samples), total), dtype=np.int64)
    positions[:, :clean] = np.arange(clean)
    view = np.zeros((len(samples), total), dtype=np.int64)
    view[:, clean : clean + noised], view[:, clean + noised :] = 1, 2
    valid = np.zeros((len(samples), total), dtype=bool)
    weights = np.zeros((len(samples), total), dtype=np.float32)
    targets = np.zeros((len(samples), total), dtype=np.int64)
    for row, (sample, length, start) in enumerate(zip(samples, lengths, starts, strict=True)):
        prompt, answer = len(sample.prompt_ids), len(sample.answer_ids)
        tokens = np.full(length, end, dtype=np.int64)
        tokens[: prompt + answer] = sample.prompt_ids + sample.answer_ids
        ids[row, :length], valid[row, :length] = tokens, True
        for offset in (clean, clean + noised):
            span = slice(offset, offset + length - start)
            ids[row, span] = tokens[start:]
            positions[row, span], valid[row, span] = np.arange(start, length), True
        asked = results(tokenizer, sample.answer_ids) if sample.family == "facts" else None
        for block in range(start, length, block_length):
            first = max(block + shifted, prompt)
            if shifted and block >= prompt:
                targets[row, block - 1], weights[row, block - 1] = tokens[block], 1.0 if block <= prompt + answer else PAD_END_WEIGHT
            masked = choose_masked(block + block_length - first, rng)
            other = ~masked
            if asked is not None:  # one view with nothing but results masked: everything they follow from is visible
                inside = asked[first - prompt : block + block_length - prompt]
                other = np.zeros_like(masked)
                other[: len(inside)] = inside
            importance = np.where(
                np.arange(first, block + block_length) <= prompt + answer,
                1.0,
                PAD_END_WEIGHT,
            )
            for offset, chosen in ((clean, masked), (clean + noised, other)):
                at = offset - start + first + np.flatnonzero(chosen)
                if len(at):
                    ids[row, at] = mask_id
                    targets[row, at - shifted] = tokens[positions[row, at]]
                    weights[row, at - shifted] = importance[chosen] / len(at)
    block_of = (positions - offsets[:, None]) // block_length
    same_view = view[:, :, None] == view[:, None, :]
    to_clean = view[:, None, :] == 0
    allowed = np.where(
        view[:, :, None] == 0,
        to_clean & (block_of[:, None, :] <= block_of[:, :, None]),
        (to_clean & (block_of[:, None, :] < block_of[:, :, None])) | (same_view & (block_of[:, None, :] == block_of[:, :, None])),
    )
    allowed &= valid[:, None, :]
    allowed |= np.eye(total, dtype=bool)  # a padding row attends to itself, so that no row is empty
    return Batch.of(ids, positions, allowed, targets, weights, [s.family for s in samples], sum(lengths))
