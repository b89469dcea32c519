"""The two plug points, Target and Drafter, what passes between them and the loop, and the validated DecodeParams.

Anything with these methods works in the loop: a new model is a Target, a new way to guess is a Drafter. Knows no implementation.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from spot_dlm.draft_graph import DraftGraph
from spot_dlm.noise import CoupledNoise
from spot_dlm.state import BlockState
from spot_dlm.transition import Sampling, Transition, UnmaskRule

Stop = Literal["block", "prefix", "never"]
Blocks = Literal["grid", "generated", "whole"]
MAX_NODES = 4096
"""Nodes of one prompt's pass at most."""
SAMPLES_PER_PROMPT = 2**32
"""Sample s of prompt p has the noise of sequence p times this plus s, in whatever way the prompts are given."""


@dataclass(frozen=True)
class TargetSpec:
    """What the loop must know of a target: sizes, special ids and limits, and names for provenance."""

    name: str
    family: str
    block_length: int
    vocab_size: int
    mask_token_id: int
    stop_ids: frozenset[int]
    max_length: int
    device: torch.device
    dtype: str
    num_parameters: int
    fingerprint: str = ""
    """Short hash of config and weights, for provenance; empty where there is no checkpoint."""
    crosses: bool = False
    """Whether `evaluate` takes complete canvases: the pass that checks a block's end is also the first of the next block."""
    blocks: Blocks = "grid"
    """Whether blocks count from position 0, from the end of the prompt, or everything new is one block (`layout`)."""
    cuts_last_block: bool = False
    """On a grid: whether the last block ends with the last new token, rather than be filled up."""
    whole_canvas: bool = False
    """Whether passes see the masks of all blocks to come (`WholeCanvasTarget`); mask tokens in a prompt of ids are holes to fill then."""
    cache: str = "exact"
    """What passes over a whole canvas reuse from the beginning of a block: "exact" nothing; "prefix", "dual": see `CachedCanvasTarget`."""
    seeds: bool = False
    """Whether a block begins with the token that the last pass over the block before predicts (`SeededTarget`)."""
    invisible_id: int | None = None
    """A token that is not seen from later blocks and takes no position there (dllm's bd3lm: the padding token)."""
    architecture: str = ""
    """What config.json calls the class of the model, for provenance."""
    model_hash: str = ""
    """Short hash of config and weights without the tokenizer; empty where it is not known."""
    tokenizer_hash: str = ""
    """Short hash of the texts of all ids; empty where there is no tokenizer."""


@dataclass(frozen=True)
class MaskedLogits:
    """Logits of the masked positions of N canvases, packed: rows offsets[i]:offsets[i + 1] belong to canvas i, ascending."""

    packed: Float[Tensor, "M V"]
    offsets: list[int]

    def of(self, row: int) -> Float[Tensor, "m V"]:
        """Return the logits of one canvas."""
        return self.packed[self.offsets[row] : self.offsets[row + 1]]


@runtime_checkable
class Prefix(Protocol):
    """The target's cache of complete blocks; it changes only in `prefill` and `commit`."""

    @property
    def length(self) -> int:
        """Number of cached tokens, a multiple of the block length."""


@runtime_checkable
class Target(Protocol):
    """A diffusion language model that fills one block after the other."""

    @property
    def spec(self) -> TargetSpec:
        """Sizes and special ids."""

    def prefill(self, token_ids: Int64[np.ndarray, " P"], block_length: int) -> Prefix:
        """Cache complete blocks of prompt tokens (possibly none)."""

    def evaluate(self, prefix: Prefix, canvases: Int64[np.ndarray, "N L"]) -> MaskedLogits:
        """Return logits for the masked positions of N states of the block after the prefix, in one pass.

        Where the spec says `crosses`, a canvas without masks stands for the first state of the next block: its L rows are the logits of
        an all-mask block after the prefix and this canvas, and the pass leaves behind what `commit` needs.
        Row i must not depend, to the bit, on the other rows. Ids that must not be generated have logit minus infinity.
        The prefix does not change.
        """

    def commit(self, prefix: Prefix, token_ids: Int64[np.ndarray, " L"]) -> int:
        """Append one complete block to the cache; return the passes it took.

        None (0) if the last `evaluate` on this prefix held the block as a complete canvas (folded commit), else 1.
        """

    def encode(self, text: str) -> list[int]:
        """Return the prompt ids of user text; the text never yields special ids."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of generated ids, special ids left out."""


@runtime_checkable
class WholeCanvasTarget(Target, Protocol):
    """A target whose passes see the masks of all blocks to come; its prefix knows where the canvas ends."""

    def open_canvas(self, token_ids: Int64[np.ndarray, " P"], end: int) -> Prefix:
        """Return the prefix of a canvas of `end` tokens that begins with `token_ids`."""


@runtime_checkable
class SeededTarget(Target, Protocol):
    """A target that predicts the first token of a block itself, greedily, in the pass that caches the block before."""

    def seed(self, prefix: Prefix) -> int:
        """Return the first token of the block after a prefix, which is not empty."""


Query = tuple[Prefix, Int64[np.ndarray, "_ _"]]
"""A prefix and the canvases to evaluate on it."""


@runtime_checkable
class BatchTarget(Target, Protocol):
    """A target that evaluates several prompts in one pass."""

    def evaluate_many(self, queries: Sequence[Query]) -> list[MaskedLogits]:
        """Return what `evaluate` returns for each query, to the bit; lengths of prefixes and blocks may differ."""


@dataclass(frozen=True)
class DraftContext:
    """All that is known before a pass: the last transition (so the certain next state), the logits it was made from, the noise.

    `logits` rows belong to `last.before.masked`; they are stale for `root`, the state after it. `history` holds the block's
    transitions so far, oldest first, `last` included: what every visited state was sure of. `graph` and `evaluated` are the last
    pass with all its nodes, those not taken included: free information about nearby states. `memory` is a dictionary that lives as
    long as the block, for what a drafter wants to keep from pass to pass.
    `crosses` allows complete canvases as guesses (see `Target.evaluate`), except those that hold one of `stop_ids` among the tokens
    committed from the root on: decoding ends there. A complete canvas counts as two nodes of a budget, for it takes two rows of a pass.
    """

    last: Transition
    logits: Float[Tensor, "m V"]
    rule: UnmaskRule
    sampling: Sampling
    noise: CoupledNoise
    history: Sequence[Transition] = ()
    graph: DraftGraph | None = None
    evaluated: MaskedLogits | None = None
    memory: dict[str, Any] = field(default_factory=dict)
    crosses: bool = False
    stop_ids: frozenset[int] = frozenset()

    @property
    def root(self) -> BlockState:
        """The certain next state."""
        return self.last.state


@runtime_checkable
class Drafter(Protocol):
    """Guesses future states; whatever it returns, the decoded tokens and their order stay the same."""

    @property
    def name(self) -> str:
        """Name on the command line and in results."""

    def draft(self, context: DraftContext, budget: int) -> DraftGraph:
        """Return at most `budget` nodes, the root included; best first, so that the first nodes alone are a good graph too."""


@runtime_checkable
class BatchDrafter(Drafter, Protocol):
    """A drafter that drafts for several prompts faster than one after the other."""

    def draft_many(self, contexts: Sequence[DraftContext], budgets: Sequence[int]) -> list[DraftGraph]:
        """Return a graph for every context, as `draft` would up to rounding."""


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True)
class DecodeParams:
    """Everything that decides the tokens (rule, sampling, lengths, stop) plus the node budget, which does not.

    Args:
        rule: which positions a step commits.
        sampling: temperature, filters and seed.
        max_new_tokens: tokens to return at most.
        nodes: rows of one target pass, the certain next state included; 1 is standard decoding; "auto" takes as many as pay, by the
            measured cost of a pass (`budget`).
        block_length: None takes the target's own.
        stop: "block" completes the block that holds the first end token (as official SDAR); "prefix" stops as soon as all
            positions up to it are committed: the same text in fewer steps; "never" decodes max_new_tokens whatever comes (as official
            LLaDA and Dream). The text ends with the first end token in any case.
        sequence: noise key of the sequence; samples of one prompt use different ones.
        boundary: whether guesses may cross the end of a block, where the target can evaluate that.

    Raises:
        ValueError: naming the field, the value and what is allowed.
    """

    rule: UnmaskRule = field(default_factory=UnmaskRule)
    sampling: Sampling = field(default_factory=Sampling)
    max_new_tokens: int = 128
    nodes: int | Literal["auto"] = "auto"
    block_length: int | None = None
    stop: Stop = "block"
    sequence: int = 0
    boundary: bool = True

    def __post_init__(self) -> None:
        if not _is_whole(self.max_new_tokens) or self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens} must be a whole number of at least 1")
        if self.nodes != "auto" and not (_is_whole(self.nodes) and 1 <= self.nodes <= MAX_NODES):
            raise ValueError(f"nodes={self.nodes!r} must be 'auto' or a whole number from 1 (standard decoding) to {MAX_NODES}")
        if self.block_length is not None and self.block_length < 1:
            raise ValueError(f"block_length={self.block_length} must be at least 1")
        if self.stop not in get_args(Stop):
            raise ValueError(f"stop={self.stop!r} is unknown; choose one of {', '.join(get_args(Stop))}")
