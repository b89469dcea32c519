"""One prompt being decoded: its events, its result, and the bookkeeping between passes that every driver of the loop shares.

A `Decoding` knows its state, cache and draft graph; `take` advances it by what one pass proved. Knows nothing of drafters, budgets and
of the other prompts that share a pass.

Example: `decoding = Decoding(target, "Add 47 and 38.", params); decoding.start()`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Literal

import numpy as np
from jaxtyping import Int64

from spot_dlm.draft_graph import DraftGraph
from spot_dlm.interfaces import DecodeParams, DraftContext, MaskedLogits, Prefix, Target, TargetSpec
from spot_dlm.noise import CoupledNoise
from spot_dlm.state import BlockState
from spot_dlm.stats import Counts
from spot_dlm.transition import Transition
from spot_dlm.verify import Acceptance

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Committed:
    """One position receiving its token: absolute position, token, block, step inside the block and decoding pass."""

    position: int
    token: int
    block: int
    step: int
    decode_pass: int


@dataclass(frozen=True)
class BlockStarted:
    """A block begins; `start` is its absolute position and `state` its canvas with the prompt's tail."""

    state: BlockState
    start: int


@dataclass(frozen=True)
class Pass:
    """One decoding pass: the graph that was evaluated, what was accepted of it, and the logits of all its nodes.

    Its transitions may go on into the next block, whose `BlockStarted` then follows this event.
    """

    graph: DraftGraph
    acceptance: Acceptance
    committed: list[Committed]
    number: int
    logits: MaskedLogits


@dataclass(frozen=True)
class BlockFinished:
    """A block ended with `state` (complete, or final by `stop="prefix"`); its text is stable from here on."""

    state: BlockState
    start: int


@dataclass(frozen=True)
class Result:
    """The decoded sequence: ids up to the first end token (included) or the length limit, in text and in commit order."""

    token_ids: list[int]
    order: list[Committed]
    finish_reason: FinishReason
    counts: Counts
    text: str
    prompt_ids: list[int]

    @property
    def commit_steps(self) -> list[int]:
        """For every returned token the global number of the transition that committed it, from 0."""
        first = len(self.prompt_ids)
        number: dict[tuple[int, int], int] = {}
        at = {c.position: number.setdefault((c.block, c.step), len(number)) for c in self.order}
        return [at[first + i] for i in range(len(self.token_ids))]


@dataclass(frozen=True)
class Finished:
    """The last event."""

    result: Result


Event = BlockStarted | Pass | BlockFinished | Finished


def check_prompt(spec: TargetSpec, prompt_ids: Sequence[int], params: DecodeParams) -> int:
    """Check that a prompt can be decoded; return the tokens that its cache may come to hold.

    Raises:
        ValueError: with the numbers, if it is empty, has ids out of range, or exceeds the context once rounded up to whole blocks.
    """
    length = params.block_length or spec.block_length
    if not prompt_ids:
        raise ValueError("the prompt is empty; give at least one token")
    if min(prompt_ids) < 0 or max(prompt_ids) >= spec.vocab_size:
        raise ValueError(f"prompt ids must lie in 0..{spec.vocab_size - 1}")
    total = -(-(len(prompt_ids) + params.max_new_tokens) // length) * length
    if total > spec.max_length:
        raise ValueError(
            f"prompt of {len(prompt_ids)} tokens + max_new_tokens={params.max_new_tokens}, rounded up to blocks of {length}, is {total}; "
            f"the target's context holds {spec.max_length}"
        )
    return total


@dataclass
class Decoding:
    """The mutable bookkeeping of one decoded prompt.

    Attributes:
        state: the certain next state, root of `graph`; a complete block where the coming pass is the first of the next one.
        graph: what the coming pass evaluates.
        result: set once decoding has ended.

    Raises:
        ValueError: for an empty prompt or one that does not fit the context.
    """

    target: Target
    prompt: str | Sequence[int]
    params: DecodeParams
    counts: Counts = field(default_factory=lambda: Counts(sequences=1))
    result: Result | None = None

    def __post_init__(self) -> None:
        target, params = self.target, self.params
        self.prompt_ids = target.encode(self.prompt) if isinstance(self.prompt, str) else [int(i) for i in self.prompt]
        self.num_cached = check_prompt(target.spec, self.prompt_ids, params)
        self._length = params.block_length or target.spec.block_length
        self._last_block = (len(self.prompt_ids) + params.max_new_tokens - 1) // self._length
        noise = CoupledNoise(params.sampling.seed, params.sequence, params.rule.noise_step, target.spec.device)
        self.noise = noise
        self._generated: list[int] = []
        self._order: list[Committed] = []
        self._history: list[Transition] = []
        self._memory: dict[str, Any] = {}
        self._last: Pass | None = None

    def start(self) -> BlockStarted:
        """Prefill the prompt's whole blocks and begin the first block."""
        whole = len(self.prompt_ids) // self._length * self._length
        clock = perf_counter()
        self.prefix: Prefix = self.target.prefill(np.array(self.prompt_ids[:whole], dtype=np.int64), self._length)
        self.counts.nfe_prefill = int(whole > 0)
        self.counts.target_s += perf_counter() - clock
        self.state = BlockState.initial(whole // self._length, self.prompt_ids[whole:], self._length)
        self.graph = DraftGraph.root_only(self.state)
        return BlockStarted(self.state, whole)

    @property
    def crosses(self) -> bool:
        """Whether guesses may be complete blocks: decoding goes on after this one, unless a guess ends it."""
        may = self.target.spec.crosses and self.params.boundary and self.state.block < self._last_block
        return may and not self._has_stop(self.state)

    def context(self) -> DraftContext | None:
        """Return what a drafter may know; None where nothing is known of the state, at the beginning of a block."""
        if not self._history or self._last is None or self.state.is_complete:
            return None
        last, before = self._history[-1], self._last
        seen = before.graph.block == last.before.block
        graph, evaluated = (before.graph, before.logits) if seen else (None, None)
        known = (self.params.rule, self.params.sampling, self.noise, tuple(self._history), graph, evaluated, self._memory)
        return DraftContext(last, before.acceptance.logits, *known, crosses=self.crosses, stop_ids=self.target.spec.stop_ids)

    def ends(self, state: BlockState) -> bool:
        """Whether decoding ends with this state."""
        if state.is_complete:
            return state.block == self._last_block or self._has_stop(state)
        return self.params.stop == "prefix" and self._has_stop(state, int(state.masked[0]))

    def _has_stop(self, state: BlockState, end: int | None = None) -> bool:
        """Whether a generated position before `end` holds an end token."""
        own = state.canvas[max(0, len(self.prompt_ids) - state.block * self._length) : end]
        return not self.target.spec.stop_ids.isdisjoint(own.tolist())

    def take(self, acceptance: Acceptance, logits: MaskedLogits) -> Iterator[Event]:
        """Advance by one pass: record its commits, append finished blocks to the cache, and end where decoding ends.

        Raises:
            RuntimeError: if the target let the mask token be committed.
        """
        self.counts.count_pass(self.graph.depths[1:].tolist(), len(acceptance.transitions) - 1, int(self.graph.rows.sum()))
        commits = [c for t in acceptance.transitions for c in self._record(t)]
        self._last = Pass(self.graph, acceptance, commits, self.counts.nfe - 1, logits)
        yield self._last
        finished = [self.state.canvas] if self.state.is_complete else []
        self.state = acceptance.state
        for transition in acceptance.transitions:
            state = transition.state
            if state.is_complete or (state is self.state and self.ends(state)):
                yield self._finish_block(state)
                finished.append(state.canvas)
                if not self.ends(state):
                    yield BlockStarted(state.decoded, state.decoded.block * self._length)
        if self.ends(self.state):
            self.result = self._result()
            yield Finished(self.result)
            return
        self._commit(finished)
        if self.state.is_complete:
            self._history = []
            self.state = self.state if self.target.spec.crosses else self.state.decoded
        else:
            self._history = [t for t in [*self._history, *acceptance.transitions] if t.before.block == self.state.block]
        if len(self._history) <= len(acceptance.transitions):
            self._memory = {}
        self.graph = DraftGraph.root_only(self.state)

    def _commit(self, finished: list[Int64[np.ndarray, " L"]]) -> None:
        """Append finished blocks to the cache; the last one waits for the next pass if that can fold it in."""
        waits = self.state.is_complete and self.target.spec.crosses
        clock = perf_counter()
        for canvas in finished[: -1 if waits else None]:
            self.counts.nfe_commit += self.target.commit(self.prefix, canvas)
        self.counts.target_s += perf_counter() - clock

    def _finish_block(self, state: BlockState) -> BlockFinished:
        start = state.block * self._length
        own = max(0, len(self.prompt_ids) - start)
        self._generated += state.canvas[own : None if state.is_complete else state.masked[0]].tolist()
        self.counts.blocks += 1
        return BlockFinished(state, start)

    def _record(self, transition: Transition) -> list[Committed]:
        """Append a transition's commits to the order; the mask token never leaves the decoder."""
        state, start = transition.before, transition.before.block * self._length
        if self.target.spec.mask_token_id in transition.tokens:
            raise RuntimeError(f"the mask token was committed in block {state.block}, step {state.step}: the target must exclude it")
        pairs = zip(transition.positions.tolist(), transition.tokens.tolist(), strict=True)
        commits = [Committed(start + p, t, state.block, state.step, self.counts.nfe - 1) for p, t in pairs]
        self._order += commits
        return commits

    def _result(self) -> Result:
        """Trim to the first end token (included) or to the length limit."""
        limit = self.params.max_new_tokens
        stop = next((i for i, token in enumerate(self._generated) if token in self.target.spec.stop_ids), limit)
        reason: FinishReason = "stop" if stop < limit else "length"
        ids = self._generated[: min(stop + 1, limit)]
        self.counts.tokens = len(ids)
        return Result(ids, self._order, reason, self.counts, self.target.decode(ids), self.prompt_ids)
