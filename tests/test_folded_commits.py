"""The loop on a target that crosses: no pass is spent on a cache, guesses reach into the next block, and nothing else changes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from toy import ToyPrefix, reference_of, trajectory, unchecked
from trace_toys import AnyLength, Settled

from spot_dlm.decode import decode_steps, generate, stream
from spot_dlm.draft_graph import DraftGraph, GraphBuilder
from spot_dlm.drafters import Chain, Root
from spot_dlm.interfaces import DecodeParams, DraftContext
from spot_dlm.sequence import BlockFinished, BlockStarted, Event, Finished, Pass
from spot_dlm.state import BlockState
from spot_dlm.transition import Sampling, UnmaskRule

VOCAB = 9
PROMPTS = {"none cached": [1, 2], "whole": [1, 2, 3, 4], "two blocks": [5] * 8, "tail of one": [1] * 5, "tail of all but one": [2] * 7}


class Watched(AnyLength):
    """Notes what every pass evaluates after how many cached tokens, and what is committed."""

    def __init__(self, length: int = 4, stops: tuple[int, ...] = (), seed: int = 0, crosses: bool = True) -> None:
        super().__init__(Settled(VOCAB, length, seed, jitter=0.5), stop_ids=stops, crosses=crosses)
        self.passes: list[tuple[int, list]] = []
        self.commits: list[tuple[int, list[int]]] = []

    def evaluate(self, prefix: ToyPrefix, canvases):
        self.passes.append((prefix.length, canvases.tolist()))
        return super().evaluate(prefix, canvases)

    def commit(self, prefix: ToyPrefix, token_ids) -> int:
        self.commits.append((prefix.length, token_ids.tolist()))
        return super().commit(prefix, token_ids)


@dataclass
class Knowing:
    """Proposes the states that standard decoding will visit, to the end of the block and, where that may be, with the complete one."""

    states: dict[tuple, BlockState]
    name: str = "knowing"

    @classmethod
    def of(cls, target: Watched, prompt: list[int], params: DecodeParams) -> Knowing:
        passes = [e for e in decode_steps(target, prompt, Root(), replace(params, nodes=1)) if isinstance(e, Pass)]
        return cls({t.before.key: t.state for e in passes for t in e.acceptance.transitions})

    def draft(self, context: DraftContext, budget: int) -> DraftGraph:
        builder, state, node = GraphBuilder(context.root, budget, context.crosses), context.root, 0
        while node is not None and state.key in self.states:
            state = self.states[state.key]
            node = builder.add(node, state, 1.0)
        return builder.build()


def params_of(temperature: float = 1.0, tokens: int = 14, nodes: int = 1, **more) -> DecodeParams:
    return DecodeParams(sampling=Sampling(temperature, seed=3), max_new_tokens=tokens, nodes=nodes, **more)


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
@pytest.mark.parametrize("length", [1, 3, 4])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_standard_decoding_spends_no_pass_on_the_cache(prompt: list[int], length: int, temperature: float) -> None:
    """The same trajectory with and without folded commits, as the reference has it; only the passes for the cache are gone."""
    params = params_of(temperature)
    folded, plain = Watched(length), Watched(length, crosses=False)
    with unchecked():
        ours, theirs = generate(folded, prompt, Root(), params), generate(plain, prompt, Root(), params)
    expected = reference_of(folded, {"temperature": temperature, "seed": 3}, prompt, params)
    assert trajectory(ours) == trajectory(theirs) == trajectory(expected)
    blocks = -(-(len(prompt) + 14) // length) - len(prompt) // length
    for counts in (ours.counts, theirs.counts):
        assert counts.nfe == counts.transitions == blocks * length - len(prompt) % length and counts.blocks == blocks
        assert counts.nfe_prefill == (len(prompt) >= length) and counts.nfe_official == counts.nfe + blocks
    assert (ours.counts.nfe_commit, theirs.counts.nfe_commit) == (0, blocks - 1)
    assert len(folded.passes) == ours.counts.nfe and ours.counts.rows == ours.counts.nfe + blocks - 1
    cached = plain.commits[: None if length > 1 else -1]  # a block of one is decoded by the pass that would cache the one before
    assert folded.commits == cached, "every block is cached once, in order, if a pass comes after it"
    assert all(len(canvases) == 1 for _, canvases in folded.passes)
    complete = [(after, canvas) for after, (canvas,) in folded.passes if min(canvas) >= 0]
    assert complete == plain.commits, "each block is evaluated complete, on the cache without it, in the next block's first pass"


@pytest.mark.parametrize("rule", [{}, {"num_per_step": 3}, {"select": "threshold", "threshold": 0.5}, {"select": "left_to_right"}])
@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
def test_drafts_across_blocks_change_nothing_but_the_passes(prompt: list[int], rule: dict) -> None:
    for length in (1, 4):
        for stop, stops in (("block", (2, 3)), ("prefix", (2, 3)), ("block", ())):
            params = replace(params_of(0.0, stop=stop), rule=UnmaskRule(**rule))
            target = Watched(length, stops)
            with unchecked():
                expected = generate(target, prompt, Root(), params)
                knowing = Knowing.of(target, prompt, params)
                for drafter in (Chain(), knowing):
                    for nodes in (3, 12):
                        target.commits.clear()
                        got = generate(target, prompt, drafter, replace(params, nodes=nodes))
                        assert trajectory(got) == trajectory(expected), (length, stop, nodes)
                        assert got.counts.nfe_commit == 0 and got.counts.blocks == expected.counts.blocks
                        assert got.counts.transitions == expected.counts.transitions == got.counts.nfe + got.counts.accepted
                        assert got.counts.nfe_official == expected.counts.nfe_official
                        assert got.counts.blocks - 2 <= len(target.commits) <= got.counts.blocks - 1


def test_blocks_of_four_need_fewer_than_half_of_the_official_passes() -> None:
    """Inside a block speculation ends at two passes of five; across blocks it goes on."""
    target, params = Watched(4), params_of(0.0, tokens=64)
    prompt = PROMPTS["tail of one"]
    with unchecked():
        knowing = Knowing.of(target, prompt, params)
        across = generate(target, prompt, knowing, replace(params, nodes=8)).counts
        inside = generate(target, prompt, knowing, replace(params, nodes=8, boundary=False)).counts
    blocks, steps = 17, 4 * 17 - 1
    assert across.nfe_official == inside.nfe_official == steps + blocks
    assert inside.nfe == 2 * blocks, "each block's first pass has nothing to draft from"
    assert across.nfe == blocks + 1 < across.nfe_official / 4, "only the very first block's has not"


@pytest.mark.parametrize("nodes", [1, 5, 12])
@pytest.mark.parametrize("length", [1, 3, 4])
def test_events_tell_one_story(length: int, nodes: int) -> None:
    """A pass that goes into the next block is told first, then the block's end, then the next one's beginning."""
    target, params = Watched(length), params_of(0.0, nodes=nodes)
    for prompt in PROMPTS.values():
        with unchecked():
            events: list[Event] = list(decode_steps(target, prompt, Knowing.of(target, prompt, params), params))
        kinds = [type(e) for e in events]
        assert kinds[0] is BlockStarted and kinds[-1] is Finished and kinds[-2] is BlockFinished and kinds.count(Finished) == 1
        assert {(a, b) for a, b in pairwise(kinds) if b is BlockStarted} <= {(BlockFinished, BlockStarted)}
        assert {a for a, b in pairwise(kinds) if b is BlockFinished} <= {Pass, BlockStarted}
        committed: dict[int, int] = {}
        following = len(prompt) // length * length
        for event in events:
            if isinstance(event, Pass):
                assert event.graph.block * length <= event.committed[0].position
                committed |= {c.position: c.token for c in event.committed}
            elif isinstance(event, BlockStarted):
                assert event.start == following == event.state.block * length and event.state.step == 0
                tail = prompt[following:]
                assert event.state.canvas.tolist() == tail + [-1] * (length - len(tail))
            elif isinstance(event, BlockFinished):
                assert event.start == following and event.state.is_complete
                own = range(max(following, len(prompt)), following + length)
                assert event.state.canvas.tolist()[max(0, len(prompt) - following) :] == [committed[p] for p in own]
                following += length
        walks = [[t.before.block for t in e.acceptance.transitions] for e in events if isinstance(e, Pass)]
        assert any(len(set(w)) > 1 for w in walks) == (length > 1 and nodes > length)
        assert all(b - a in (0, 1) for w in walks for a, b in pairwise(w))


@pytest.mark.parametrize("stop", ["block", "prefix"])
@pytest.mark.parametrize("length", [1, 3, 4])
def test_streamed_text_is_stable_and_whole(length: int, stop: str) -> None:
    """The pieces joined are the text, whatever the drafter; no piece is taken back, and none comes later than its block."""
    for seed in range(3):
        target = Watched(length, (1, 2), seed)
        for prompt in PROMPTS.values():
            params = params_of(0.0, stop=stop)
            with unchecked():
                expected = generate(target, prompt, Root(), params).text
                for drafter in (Root(), Chain(), Knowing.of(target, prompt, params)):
                    assert "".join(stream(target, prompt, drafter, replace(params, nodes=9))) == expected


def test_an_end_token_in_a_completion_ends_decoding() -> None:
    """Found as the last commit of a block: no pass goes beyond it, no block after it begins, and it is not cached."""
    ended = 0
    for seed in range(30):
        target = Watched(4, (1, 2), seed)
        params = params_of(0.0, tokens=40)
        with unchecked():
            knowing = Knowing.of(target, [3, 3], params)
            events = list(decode_steps(target, [3, 3], knowing, replace(params, nodes=12)))
        result = events[-1].result
        last = result.order[-1]
        if result.finish_reason == "length":
            continue
        ended += last.token in (1, 2)
        assert result.token_ids[-1] in (1, 2) and not {1, 2} & set(result.token_ids[:-1])
        stop_block = (2 + len(result.token_ids) - 1) // 4
        assert last.block == stop_block == max(e.state.block for e in events if isinstance(e, BlockStarted))
        assert result.counts.blocks == stop_block + 1
        assert all(e.acceptance.transitions[-1].before.block <= stop_block for e in events if isinstance(e, Pass))
    assert ended > 3


@pytest.mark.parametrize("nodes", [1, 9])
def test_stop_prefix_ends_inside_a_block_entered_by_a_guess(nodes: int) -> None:
    """The prefix up to the end token is committed by the very pass that crosses: its block ends unfinished, and that is told."""
    seen = 0
    for seed in range(40):
        target, params = Watched(4, (1, 2), seed), params_of(0.0, tokens=40, nodes=nodes, stop="prefix")
        params = replace(params, rule=UnmaskRule(select="left_to_right"))
        with unchecked():
            events = list(decode_steps(target, [3, 3, 3], Knowing.of(target, [3, 3, 3], params), params))
        result, (finished,) = events[-1].result, [e for e in events[-2:] if isinstance(e, BlockFinished)]
        final = [e for e in events if isinstance(e, Pass)][-1].acceptance.transitions
        assert result.counts.transitions == len(result.order)
        if result.finish_reason == "stop" and not finished.state.is_complete:
            assert len(result.order) == len(result.token_ids), "left to right, nothing is committed behind the end token"
            seen += len({t.before.block for t in final}) > 1
    assert (seen > 0) == (nodes > 1)


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 9])
def test_no_guess_crosses_the_end_of_the_last_block(tokens: int) -> None:
    asked: list[tuple[int, bool]] = []

    class Asked(Chain):
        def draft(self, context: DraftContext, budget: int) -> DraftGraph:
            asked.append((context.root.block, context.crosses))
            return super().draft(context, budget)

    for prompt in PROMPTS.values():
        asked.clear()
        target, params = Watched(4), params_of(tokens=tokens, nodes=6)
        with unchecked():
            result = generate(target, prompt, Asked(), params)
        last = (len(prompt) + tokens - 1) // 4
        assert len(result.token_ids) == tokens and all(crosses == (block < last) for block, crosses in asked)
        assert all(cached <= 4 * last for cached, _ in target.passes) and len(target.commits) <= last - len(prompt) // 4
        asked.clear()
        with unchecked():
            generate(target, prompt, Asked(), replace(params, boundary=False))
        assert not any(crosses for _, crosses in asked)
