"""The decoding loop: draft, one target pass, accept; standard decoding is the same loop with a drafter that guesses nothing.

Three rungs: `decode_steps` yields events, `stream` yields text, `generate` returns one result. Observers (progress, canvas, traces)
read the events; the loop knows none of them.

Example: `generate(target, "To JSON: Anna Berg, 34, Oslo.", Chain(), DecodeParams(nodes=8)).text`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any, Literal

import numpy as np

from spot_dlm.draft_graph import DraftGraph
from spot_dlm.interfaces import DecodeParams, DraftContext, Drafter, MaskedLogits, Prefix, Target, TargetSpec
from spot_dlm.noise import CoupledNoise
from spot_dlm.state import BlockState
from spot_dlm.stats import Counts
from spot_dlm.transition import Transition, denoise
from spot_dlm.verify import Acceptance, accept

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
    """One decoding pass: the graph that was evaluated, what was accepted of it, and the logits of all its nodes."""

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


@dataclass
class _Sequence:
    """The mutable bookkeeping of one decoded sequence."""

    target: Target
    params: DecodeParams
    prompt_ids: list[int]
    block_length: int
    noise: CoupledNoise
    generated: list[int] = field(default_factory=list)
    order: list[Committed] = field(default_factory=list)
    counts: Counts = field(default_factory=lambda: Counts(sequences=1))

    def is_final(self, state: BlockState) -> bool:
        """Whether the block ends with this state: complete, or all positions up to the first end token committed."""
        if state.is_complete:
            return True
        if self.params.stop == "block":
            return False
        known = state.canvas[: state.masked[0]]
        start = state.block * self.block_length
        return any(int(token) in self.target.spec.stop_ids and start + i >= len(self.prompt_ids) for i, token in enumerate(known))

    def record(self, transition: Transition, decode_pass: int) -> list[Committed]:
        """Append a transition's commits to the order; the mask token never leaves the decoder."""
        state, start = transition.before, transition.before.block * self.block_length
        if self.target.spec.mask_token_id in transition.tokens:
            raise RuntimeError(f"the mask token was committed in block {state.block}, step {state.step}: the target must exclude it")
        pairs = zip(transition.positions.tolist(), transition.tokens.tolist(), strict=True)
        commits = [Committed(start + p, t, state.block, state.step, decode_pass) for p, t in pairs]
        self.order += commits
        return commits

    def first_stop(self) -> int | None:
        """Index of the first end token among the generated tokens."""
        return next((i for i, token in enumerate(self.generated) if token in self.target.spec.stop_ids), None)

    def result(self) -> Result:
        """Trim to the first end token (included) or to the length limit."""
        stop, limit = self.first_stop(), self.params.max_new_tokens
        reason: FinishReason = "stop" if stop is not None and stop < limit else "length"
        ids = self.generated[: stop + 1 if stop is not None and stop < limit else limit]
        self.counts.tokens = len(ids)
        return Result(ids, self.order, reason, self.counts, self.target.decode(ids), self.prompt_ids)


def check_prompt(spec: TargetSpec, prompt_ids: Sequence[int], params: DecodeParams) -> None:
    """Check that a prompt can be decoded: not empty, ids in range, within the context once rounded up to whole blocks.

    Raises:
        ValueError: with the numbers.
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


def decode_steps(target: Target, prompt: str | Sequence[int], drafter: Drafter, params: DecodeParams | None = None) -> Iterator[Event]:
    """Decode one prompt and yield what happens; the last event is `Finished`.

    Args:
        target: the model.
        prompt: user text (encoded with the target's chat template) or token ids.
        drafter: guesses; it decides the number of passes, never the tokens or their order.
        params: rule, sampling, lengths and node budget.

    Raises:
        ValueError: for an empty prompt, one that does not fit the context, NaN logits or a malformed draft graph.
    """
    params = params or DecodeParams()
    clock = perf_counter()
    ids = target.encode(prompt) if isinstance(prompt, str) else [int(i) for i in prompt]
    check_prompt(target.spec, ids, params)
    noise = CoupledNoise(params.sampling.seed, params.sequence, params.rule.noise_step, target.spec.device)
    seq = _Sequence(target, params, ids, params.block_length or target.spec.block_length, noise)
    for event in _decode_blocks(seq, drafter):
        seq.counts.total_s += perf_counter() - clock
        yield event  # what the observer does meanwhile is not decoding time
        clock = perf_counter()
    seq.counts.total_s += perf_counter() - clock
    yield Finished(seq.result())


def _decode_blocks(seq: _Sequence, drafter: Drafter) -> Iterator[BlockStarted | Pass | BlockFinished]:
    """Prefill the prompt's whole blocks, then decode block after block until an end token or the limit."""
    target, length, counts = seq.target, seq.block_length, seq.counts
    num_prefilled = len(seq.prompt_ids) // length * length
    clock = perf_counter()
    prefix = target.prefill(np.array(seq.prompt_ids[:num_prefilled], dtype=np.int64), length)
    counts.nfe_prefill = int(num_prefilled > 0)
    counts.target_s += perf_counter() - clock
    tail = seq.prompt_ids[num_prefilled:]
    last_block = (len(seq.prompt_ids) + seq.params.max_new_tokens - 1) // length
    for block in range(num_prefilled // length, last_block + 1):
        state = BlockState.initial(block, tail, length)
        yield BlockStarted(state, block * length)
        for event in _decode_block(seq, prefix, state, drafter):
            state = event.acceptance.state
            yield event
        seq.generated += state.canvas[len(tail) : None if state.is_complete else state.masked[0]].tolist()
        tail = []
        yield BlockFinished(state, block * length)
        if seq.first_stop() is not None or block == last_block:
            return
        clock = perf_counter()
        target.commit(prefix, state.canvas)
        counts.nfe_commit += 1
        counts.target_s += perf_counter() - clock


def _decode_block(seq: _Sequence, prefix: Prefix, state: BlockState, drafter: Drafter) -> Iterator[Pass]:
    """Decode one block: every pass evaluates a graph rooted at the certain next state and accepts a path of it."""
    params, spec, counts = seq.params, seq.target.spec, seq.counts
    step = partial(denoise, rule=params.rule, sampling=params.sampling, noise=seq.noise)
    graph = DraftGraph.root_only(state)
    history: list[Transition] = []
    memory: dict[str, Any] = {}
    while True:
        clock = perf_counter()
        logits = seq.target.evaluate(prefix, graph.canvases)
        evaluated = perf_counter()
        acceptance = accept(graph, state, logits.of, step, seq.is_final)
        state = acceptance.state
        verified = perf_counter()
        counts.target_s += evaluated - clock
        counts.verify_s += verified - evaluated
        counts.count_pass(graph.depths[1:].tolist(), len(acceptance.transitions) - 1)
        commits = [c for t in acceptance.transitions for c in seq.record(t, counts.nfe - 1)]
        yield Pass(graph, acceptance, commits, counts.nfe - 1, logits)
        if seq.is_final(state):
            return
        clock = perf_counter()
        history += acceptance.transitions
        known = (params.rule, params.sampling, seq.noise, tuple(history), graph, logits, memory)
        context = DraftContext(history[-1], acceptance.logits, *known)
        graph = drafter.draft(context, params.nodes)
        graph.validate(state, params.nodes, spec.vocab_size)
        counts.draft_s += perf_counter() - clock


def stream(target: Target, prompt: str | Sequence[int], drafter: Drafter, params: DecodeParams | None = None) -> Iterator[str]:
    """Yield text as soon as it is stable: the run of committed positions from the left; the pieces joined are the result's text."""
    params = params or DecodeParams()
    tokens: dict[int, int] = {}
    ids: list[int] = []
    following, done = -1, ""
    for event in decode_steps(target, prompt, drafter, params):
        if isinstance(event, BlockStarted) and following < 0:
            following = event.start + int(event.state.masked[0])
        elif isinstance(event, Pass):
            tokens |= {c.position: c.token for c in event.committed}
            while tokens.get(following, -1) not in target.spec.stop_ids | {-1} and len(ids) < params.max_new_tokens:
                ids.append(tokens[following])
                following += 1
            text = target.decode(ids).rstrip("\N{REPLACEMENT CHARACTER}")  # a character whose bytes are not all there yet
            if len(text) > len(done) and text.startswith(done):
                yield text[len(done) :]
                done = text
        elif isinstance(event, Finished):
            yield event.result.text[len(done) :]


def generate(target: Target, prompt: str | Sequence[int], drafter: Drafter, params: DecodeParams | None = None) -> Result:
    """Decode one prompt and return its result (see `decode_steps`)."""
    for event in decode_steps(target, prompt, drafter, params):
        if isinstance(event, Finished):
            return event.result
    raise AssertionError("decode_steps ended without a result")
