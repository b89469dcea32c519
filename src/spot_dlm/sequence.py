"""One prompt being decoded: its events, its result, and the bookkeeping between passes that every driver of the loop shares.

A `Decoding` knows its state, cache and draft graph; `take` advances it by what one pass proved. Knows nothing of drafters, budgets and
of the other prompts that share a pass.

Example: `decoding = Decoding(target, "Add 47 and 38.", params); decoding.start()`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Literal, cast

import numpy as np
from jaxtyping import Int64

from spot_dlm.draft_graph import DraftGraph
from spot_dlm.interfaces import DecodeParams, DraftContext, MaskedLogits, Prefix, SeededTarget, Target, TargetSpec, WholeCanvasTarget
from spot_dlm.layout import Layout
from spot_dlm.noise import CoupledNoise
from spot_dlm.state import MASKED, BlockState
from spot_dlm.stats import Counts
from spot_dlm.transition import Transition
from spot_dlm.verify import Acceptance

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Committed:
    """One position receiving its token: absolute position, token, block, step inside the block (-1: a seed) and decoding pass."""

    position: int
    token: int
    block: int
    step: int
    decode_pass: int


@dataclass(frozen=True)
class BlockStarted:
    """A block begins; `start` is its absolute position and `state` its canvas with the prompt's tail, `committed` its seed, if any.

    `num_prompt` are the tokens of the prompt.
    """

    state: BlockState
    start: int
    committed: tuple[Committed, ...] = ()
    num_prompt: int = 0


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


def check_prompt(spec: TargetSpec, prompt_ids: Sequence[int], params: DecodeParams) -> Layout:
    """Check that a prompt can be decoded; return where its blocks lie.

    Raises:
        ValueError: with the numbers, if it is empty, has ids out of range, or exceeds the context once rounded up to whole blocks.
    """
    if not prompt_ids:
        raise ValueError("the prompt is empty; give at least one token")
    if min(prompt_ids) < 0 or max(prompt_ids) >= spec.vocab_size:
        raise ValueError(f"prompt ids must lie in 0..{spec.vocab_size - 1}")
    layout = Layout.of(spec, len(prompt_ids), params)
    if layout.end > spec.max_length:
        raise ValueError(
            f"prompt of {len(prompt_ids)} tokens + max_new_tokens={params.max_new_tokens}, rounded up to blocks of {layout.length}, is "
            f"{layout.end}; the target's context holds {spec.max_length}"
        )
    return layout


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
        self.layout = check_prompt(target.spec, self.prompt_ids, params)
        self.num_cached = self.layout.end
        noise = CoupledNoise(params.sampling.seed, params.sequence, params.rule.noise_step, target.spec.device)
        self.noise = noise
        self._tokens = np.full(self.layout.end, MASKED, dtype=np.int64)  # of the prompt and of finished blocks
        self._tokens[: len(self.prompt_ids)] = self.prompt_ids
        if target.spec.whole_canvas:
            self._tokens[self._tokens == target.spec.mask_token_id] = MASKED
        self._starts: dict[int, int] = {}  # of blocks that begin before their span, with positions that are still masked there
        self._order: list[Committed] = []
        self._history: list[Transition] = []
        self._memory: dict[str, Any] = {}
        self._last: Pass | None = None

    def start(self) -> BlockStarted:
        """Prefill the prompt's whole blocks and begin the first block."""
        first = self._start_of(self.layout.index)
        clock = perf_counter()
        if self.target.spec.whole_canvas:
            whole = cast(WholeCanvasTarget, self.target)
            self.prefix: Prefix = whole.open_canvas(self._tokens[:first], self.layout.end)
            self.counts.nfe_prefill = int(self.target.spec.cache != "exact")
        else:
            self.prefix = self.target.prefill(self._tokens[:first], self.layout.length)
            self.counts.nfe_prefill = int(first > 0)
        self.counts.target_s += perf_counter() - clock
        return self._begin(self.layout.index)

    def _start_of(self, block: int) -> int:
        """Return where a block's canvas begins: with its span, or with the first position before it that is still masked."""
        if block not in self._starts:
            start, _ = self.layout.span(block)
            holes = self._tokens[:start] == MASKED if self.target.spec.whole_canvas else np.zeros(0, dtype=np.bool_)
            left = np.flatnonzero(holes)
            self._starts[block] = int(left[0]) if len(left) else start
        return self._starts[block]

    def _begin(self, block: int) -> BlockStarted:
        """Make the first state of a block the root of the coming pass."""
        (start, stop), begin = self.layout.span(block), self._start_of(block)
        canvas, seeds = self._tokens[begin:stop].copy(), []
        if self.target.spec.seeds and canvas[0] == MASKED and begin > 0:
            canvas[0] = cast(SeededTarget, self.target).seed(self.prefix)
            seeds.append(Committed(begin, int(canvas[0]), block, -1, self.counts.nfe - 1))
            self._order += seeds
        counted = canvas if self.target.spec.blocks == "whole" else canvas[start - begin :]
        self.state = BlockState(block, canvas, 0, int((counted == MASKED).sum()))
        self.graph = DraftGraph.root_only(self.state)
        self._history = []
        return BlockStarted(self.state, begin, tuple(seeds), len(self.prompt_ids))

    @property
    def crosses(self) -> bool:
        """Whether guesses may be complete blocks: decoding goes on after this one, unless a guess ends it."""
        return self.params.boundary and self._folds(self.state) and not self._has_stop(self.state)

    def _folds(self, state: BlockState) -> bool:
        """Whether the pass after the completion of a state's block can be the first of the next block, and one that is alike."""
        spec, (start, stop) = self.target.spec, self.layout.span(state.block + 1)
        alike = state.block < self.layout.last and stop - start == len(state.canvas)
        return spec.crosses and alike and spec.invisible_id not in state.canvas

    def context(self) -> DraftContext | None:
        """Return what a drafter may know; None where nothing is known of the state, at the beginning of a block."""
        if not self._history or self._last is None or self.state.is_complete:
            return None
        last, before = self._history[-1], self._last
        seen = before.graph.block == last.before.block
        graph, evaluated = (before.graph, before.logits) if seen else (None, None)
        known = (self.params.rule, self.params.sampling, self.noise, tuple(self._history), graph, evaluated, self._memory)
        stops = frozenset() if self.params.stop == "never" else self.target.spec.stop_ids
        if self.target.spec.invisible_id is not None:
            stops |= {self.target.spec.invisible_id}
        return DraftContext(last, before.acceptance.logits, *known, crosses=self.crosses, stop_ids=stops)

    def ends(self, state: BlockState) -> bool:
        """Whether decoding ends with this state."""
        if state.is_complete or self.params.rule.is_over(state):
            return state.block == self.layout.last or self._has_stop(state)
        return self.params.stop == "prefix" and self._has_stop(state, int(state.masked[0]))

    def is_last_of_pass(self, state: BlockState) -> bool:
        """Whether no pass that has begun can go on from this state."""
        if state.is_complete:
            return self.ends(state) or not self._folds(state)
        return self.ends(state) or self.params.rule.is_over(state)

    def _has_stop(self, state: BlockState, end: int | None = None) -> bool:
        """Whether decoding stops at end tokens and a generated position before `end` holds one."""
        if self.params.stop == "never":
            return False
        own = state.canvas[max(0, len(self.prompt_ids) - self._start_of(state.block)) : end]
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
            if state.is_complete or (state is self.state and self.is_last_of_pass(state)):
                yield self._finish_block(state)
                finished.append(state.canvas if state.is_complete else state.canvas[: state.masked[0]])
                if state is not self.state or (state.is_complete and not self.is_last_of_pass(state)):
                    yield BlockStarted(state.decoded, self._start_of(state.decoded.block))
        if self.ends(self.state):
            self.result = self._result()
            yield Finished(self.result)
            return
        waits = self.state.is_complete and self._folds(self.state)
        self._commit(finished[:-1] if waits else finished)
        if waits or not self.is_last_of_pass(self.state):
            self._history = [t for t in [*self._history, *acceptance.transitions] if t.before.block == self.state.block and not waits]
            self.graph = DraftGraph.root_only(self.state)
        else:
            yield self._begin(self.state.block + 1)
        if len(self._history) <= len(acceptance.transitions):
            self._memory = {}

    def _commit(self, finished: list[Int64[np.ndarray, " L"]]) -> None:
        """Append finished blocks to the cache, of one that leaves positions masked what stands before them."""
        clock = perf_counter()
        for canvas in filter(len, finished):
            self.counts.nfe_commit += self.target.commit(self.prefix, canvas)
        self.counts.target_s += perf_counter() - clock

    def _finish_block(self, state: BlockState) -> BlockFinished:
        start = self._start_of(state.block)
        self._tokens[start : start + len(state.canvas)] = state.canvas
        self.counts.blocks += 1
        self.counts.idle += self.params.rule.idle(state)
        return BlockFinished(state, start)

    def _record(self, transition: Transition) -> list[Committed]:
        """Append a transition's commits to the order; the mask token never leaves the decoder."""
        state = transition.before
        start = self._start_of(state.block)
        if self.target.spec.mask_token_id in transition.tokens:
            raise RuntimeError(f"the mask token was committed in block {state.block}, step {state.step}: the target must exclude it")
        pairs = zip(transition.positions.tolist(), transition.tokens.tolist(), strict=True)
        commits = [Committed(start + p, t, state.block, state.step, self.counts.nfe - 1) for p, t in pairs]
        self._order += commits
        return commits

    def _result(self) -> Result:
        """Trim to the first end token (included) or to the length limit."""
        limit, first = self.params.max_new_tokens, len(self.prompt_ids)
        own = self._tokens[first : first + limit]
        generated = own[own != MASKED].tolist()
        stop = next((i for i, token in enumerate(generated) if token in self.target.spec.stop_ids), limit)
        reason: FinishReason = "stop" if stop < limit else "length"
        ids = generated[: stop + 1]
        self.counts.tokens = len(ids)
        return Result(ids, self._order, reason, self.counts, self.target.decode(ids), self.prompt_ids)
