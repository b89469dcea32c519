"""Guesses that are complete blocks change neither tokens nor order: every drafter and rule against the reference decoder."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from reference_decoder import ToyTarget
from toy import ToyTargetAdapter, reference_of, split_rule, trajectory, unchecked
from trace_toys import Settled, random_model

from lossless.test_calibrated import random_graph
from lossless.test_drafters_never_change_tokens import RULES
from spot_dlm.bench.memo import MemoTarget
from spot_dlm.bench.oracle import Oracle
from spot_dlm.compare import standard_trajectory
from spot_dlm.decode import decode_steps, generate
from spot_dlm.draft_graph import DraftGraph, GraphBuilder
from spot_dlm.drafter_files import OrderModelFile
from spot_dlm.drafters import Calibrated, Chain, LeftToRight, Root
from spot_dlm.drafters.order import Order
from spot_dlm.interfaces import DecodeParams, DraftContext
from spot_dlm.rank_graph import GraphKey, GraphTable
from spot_dlm.rules import describe
from spot_dlm.sequence import BlockFinished, BlockStarted, Pass
from spot_dlm.state import MASKED, BlockState

VOCAB, STOPS = 6, (3, 5)
LENGTHS = (1, 2, 4, 7)
BUDGETS = (2, 3, 5, 8, 16)
MODELS = [Order(OrderModelFile(random_model(kind, seed, 0.3), {})) for kind, seed in (("order", 0), ("linear", 1))]


def case(rule: str, temperature: float, length: int, seed: int, stop: str, stops=STOPS, settled: bool = False, crosses: bool = True):
    """A toy that crosses, the reference's options, a prompt with a tail, and parameters of some blocks."""
    options = dict(RULES[rule], temperature=temperature, seed=seed)
    toy = Settled(VOCAB, length, seed) if settled else ToyTarget(VOCAB, length, seed + 40, 1.5)
    target = ToyTargetAdapter(toy, stop_ids=stops, crosses=crosses)
    return target, options, [0, 3, 2], DecodeParams(*split_rule(options)[:2], max_new_tokens=2 * length + 2, stop=stop, nodes=1)


@dataclass
class Adversarial:
    """Wrong, contradictory, duplicated and ended guesses, complete ones among them, in any order, with edges in any order."""

    seed: int
    name: str = "adversarial"
    drafted: dict[str, int] = field(default_factory=lambda: {"complete": 0, "ended": 0})

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)

    def draft(self, context: DraftContext, budget: int) -> DraftGraph:
        rng, root = self.rng, context.root
        canvases, steps, left = [root.canvas], [root.step], budget - 1
        while rng.random() < 0.9:
            canvas, step = self._guess(context, canvases)
            complete = bool((canvas != MASKED).all())
            if complete and not context.crosses:
                canvas[rng.choice(root.masked)] = MASKED
            left -= 1 + (complete and context.crosses)
            if left < 0:
                break
            canvases.append(canvas)
            steps.append(step)
            self._count(context, canvas)
        count, steps = len(canvases), np.array(steps, dtype=np.int64)
        edges = rng.integers(0, count, (rng.integers(0, 3 * count), 2))
        edges = edges[steps[edges[:, 1]] == steps[edges[:, 0]] + 1]
        reach = rng.choice([0.0, 1.0, -3.0, 1e300, math.inf, math.nan], count)
        return DraftGraph(root.block, np.stack(canvases), steps, reach, rng.permutation(edges))

    def _count(self, context: DraftContext, canvas: np.ndarray) -> None:
        own = canvas[context.root.masked].tolist()
        if MASKED not in own:
            self.drafted["complete"] += 1
            self.drafted["ended"] += not context.stop_ids.isdisjoint(own)

    def _guess(self, context: DraftContext, canvases: list[np.ndarray]) -> tuple[np.ndarray, int]:
        rng, root = self.rng, context.root
        kind, masked = rng.integers(6), root.masked
        some = int(root.step + rng.integers(1, len(masked) + 1))
        if kind == 0:  # a node again, the root included
            return canvases[rng.integers(len(canvases))].copy(), some
        canvas = root.canvas.copy()
        if kind == 1:  # a completion with any tokens, the prompt's and the committed ones wrong too
            return rng.integers(0, VOCAB, len(canvas)), some
        if kind == 2:
            canvas[masked] = rng.integers(0, VOCAB, len(masked))
            return canvas, root.step + len(masked)
        stale = context.last.candidates
        positions = np.flatnonzero(np.isin(stale.positions, masked))
        if kind == 3:  # what would complete the block if the last candidates still held
            canvas[stale.positions[positions]] = stale.tokens[positions]
            return canvas, root.step + (1 if rng.integers(2) else len(masked))
        positions = rng.permutation(positions)[: rng.integers(1, len(positions) + 1)]
        canvas[stale.positions[positions]] = stale.tokens[positions]
        return canvas, root.step + len(positions) if kind == 4 else some


@dataclass
class Omniscient:
    """Knows every state that standard decoding will visit and proposes the next ones, complete ones included."""

    states: dict[tuple, BlockState]
    steps: list[BlockState]
    name: str = "omniscient"

    @classmethod
    def of(cls, target, prompt, params) -> Omniscient:
        passes = [e for e in decode_steps(target, prompt, Root(), replace(params, nodes=1)) if isinstance(e, Pass)]
        transitions = [t for e in passes for t in e.acceptance.transitions]
        return cls({t.before.key: t.state for t in transitions}, [t.before for t in transitions])

    def draft(self, context: DraftContext, budget: int) -> DraftGraph:
        builder, state, node = GraphBuilder(context.root, budget, context.crosses), context.root, 0
        while node is not None and state.key in self.states:
            state = self.states[state.key]
            node = builder.add(node, state, 1.0)
        return builder.build()

    def passes(self, budget: int, last_crossed: set[int]) -> int:
        """Passes that arithmetic allows: all N rows on the way through a block, a complete state taking two, where it may be a guess."""
        in_block: dict[int, int] = {}
        for state in self.steps:
            in_block[state.block] = in_block.get(state.block, 0) + 1
        total, known = 0, False  # is the first transition of the block known when its drafting begins?
        for block, count in in_block.items():
            left = count - 1 if known else count  # transitions that are still to be made
            if not known:
                total, left = total + 1, left - 1  # the pass over the first state alone
            known = False
            while left:
                total += 1
                made = min(left, budget)  # the root's own and one for each guess
                left -= made
                if not left and block in last_crossed and made + 2 <= budget:
                    known = True
        return total


def drafters(rule, rng) -> list:
    table = GraphTable({GraphKey(describe(rule), True, True, 4): random_graph(rng, 60, 7)}, {})
    calibrated = Calibrated(table, bool(rng.integers(2)), bool(rng.integers(2)))
    return [Chain(), Chain(coupled=False), LeftToRight(), calibrated, *MODELS, Adversarial(int(rng.integers(99)))]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", RULES)
def test_the_reference_is_met_across_blocks(rule, temperature, length):
    """Every drafter, budgets in turn, both stop modes, with and without end tokens."""
    rng = np.random.default_rng([length, int(temperature), list(RULES).index(rule)])
    with unchecked():
        for seed, (stop, stops) in enumerate((("block", STOPS), ("prefix", STOPS), ("block", ()))):
            target, options, prompt, params = case(rule, temperature, length, seed, stop, stops, settled=seed == 2)
            reference = reference_of(target, options, prompt, params)
            standard = generate(target, prompt, Root(), params)
            assert trajectory(standard) == trajectory(reference) and standard.counts.nfe == reference.nfe
            oracle, knowing = Oracle.of(standard_trajectory(target, prompt, params)), Omniscient.of(target, prompt, params)
            for number, drafter in enumerate([oracle, knowing, *drafters(params.rule, rng)]):
                nodes = BUDGETS[(number + 2 * seed) % len(BUDGETS)]
                got = generate(target, prompt, drafter, replace(params, nodes=nodes))
                assert trajectory(got) == trajectory(reference), (drafter, nodes)
                assert got.counts.transitions == reference.nfe == got.counts.nfe + got.counts.accepted, (drafter, nodes)
                assert got.counts.nfe_commit == 0  # the next block's first pass brings the last one's cache


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("boundary", [True, False])
def test_passes_are_what_arithmetic_allows(length, boundary):
    """An omniscient drafter needs exactly the passes of its budget; without the boundary it needs one more for every block."""
    with unchecked():
        for rule, seed in (("top", 0), ("top-2", 1), ("threshold", 2)):
            target, _, prompt, params = case(rule, 0.0, length, seed, "block", ())
            params = replace(params, boundary=boundary)
            knowing = Omniscient.of(target, prompt, params)
            blocks = {s.block for s in knowing.steps}
            for nodes in (1, 2, 3, 4, 8, 32):
                got = generate(target, prompt, knowing, replace(params, nodes=nodes))
                assert got.counts.nfe == knowing.passes(nodes, blocks - {max(blocks)} if boundary else set()), (rule, nodes)


def test_adversarial_drafts_are_many_and_at_times_right():
    drafter, accepted, crossed = Adversarial(3), 0, 0
    with unchecked():
        for seed in range(16):
            target, _, prompt, params = case("left-to-right", 0.0, 2 + seed % 3, seed, "block", settled=True)
            for event in decode_steps(target, prompt, drafter, replace(params, nodes=16)):
                if isinstance(event, Pass):
                    accepted += len(event.acceptance.transitions) - 1
                    crossed += len({t.before.block for t in event.acceptance.transitions}) > 1
    found = drafter.drafted, accepted, crossed
    assert drafter.drafted["complete"] > 60 and drafter.drafted["ended"] > 20 and accepted > 10 and crossed > 3, found


@dataclass
class Insistent:
    """Proposes the true completion even where it holds an end token; remembers whether it could."""

    knowing: Omniscient
    ended: int = 0
    name: str = "insistent"

    def draft(self, context: DraftContext, budget: int) -> DraftGraph:
        graph = self.knowing.draft(context, budget)
        self.ended += bool(graph.complete.any() and np.isin(graph.canvases[-1][context.root.masked], STOPS).any())
        return graph


@pytest.mark.parametrize("stop", ["block", "prefix"])
def test_nothing_follows_an_end_token(stop):
    """A right guess of the last block, complete, is not walked into: the loop ends at it."""
    ended = 0
    with unchecked():
        for seed in range(12):
            target, options, prompt, params = case("top", 0.0, 4, seed, stop)
            drafter = Insistent(Omniscient.of(target, prompt, params))
            got = generate(target, prompt, drafter, replace(params, nodes=9))
            assert trajectory(got) == trajectory(reference_of(target, options, prompt, params))
            ended += drafter.ended
    assert ended


@pytest.mark.parametrize("drafter", [Chain(), LeftToRight(), Adversarial(5)], ids=lambda d: d.name)
def test_with_shape_checks(drafter):
    for temperature in (0.0, 1.0):
        target, options, prompt, params = case("top", temperature, 4, 2, "block", (), settled=True)
        got = generate(target, prompt, drafter, replace(params, nodes=6))
        assert trajectory(got) == trajectory(reference_of(target, options, prompt, params))
    table = GraphTable({GraphKey("standard", True, True, 4): random_graph(np.random.default_rng(0), 40, 4)}, {})
    for pruned in (False, True):
        got = generate(target, prompt, Calibrated(table, pruned), replace(params, nodes=6))
        assert trajectory(got) == trajectory(reference_of(target, options, prompt, params))


def test_the_chain_crosses():
    """On a target that ignores the canvas the chain is right to the end of the block and through it."""

    def toy(prefix, canvas):
        rows = np.random.default_rng(len(prefix)).standard_normal((5, VOCAB)).astype(np.float32)
        return {i: rows[i] for i, token in enumerate(canvas) if token is None}

    for temperature in (0.0, 1.0):
        target = ToyTargetAdapter(toy, VOCAB, 5, crosses=True)
        params = DecodeParams(*split_rule({"temperature": temperature})[:2], max_new_tokens=15, nodes=6)
        with unchecked():
            crossing = generate(target, [0] * 5, Chain(), params)
            inside = generate(target, [0] * 5, Chain(), replace(params, boundary=False))
        # five steps a block; the first state alone, its four guesses with the complete one (two rows), and so the first of the next block
        assert crossing.counts.nfe == 4 and inside.counts.nfe == 6 and crossing.counts.transitions == 15


def test_events_of_a_pass_that_ends_a_block():
    target, _, prompt, params = case("top", 0.0, 4, 2, "block", ())
    with unchecked():
        knowing = Omniscient.of(target, prompt, params)
        events = list(decode_steps(target, prompt, knowing, replace(params, nodes=16)))
    kinds = [type(e).__name__ for e in events]
    assert kinds[0] == "BlockStarted" and kinds[-1] == "Finished"
    started = [e.state.block for e in events if isinstance(e, BlockStarted)]
    finished = [e.state.block for e in events if isinstance(e, BlockFinished)]
    assert started == finished == sorted(set(started)) and len(started) == 4
    crossing = [e for e in events if isinstance(e, Pass) and len({t.before.block for t in e.acceptance.transitions}) > 1]
    assert len(crossing) == 2  # the first block ends with its first step: the pass over it is the first of the second block


def test_memo_counts_as_the_target_does():
    """Complete canvases through the memo: the same trajectory and counts, and nothing evaluated but what standard decoding visits."""
    with unchecked():
        for seed, length in enumerate(LENGTHS):
            target, _, prompt, params = case("top", 1.0, length, seed, "block", (), settled=True)
            memo = MemoTarget(target)
            assert memo.spec.crosses
            standard = generate(memo, prompt, Root(), params)
            evaluated = memo.evaluated
            assert evaluated == standard.counts.nfe and standard.counts.nfe_commit == 0
            for drafter in (Chain(), Oracle.of(standard_trajectory(memo, prompt, params)), Adversarial(seed)):
                real, remembered = (generate(t, prompt, replace(drafter), replace(params, nodes=8)) for t in (target, memo))
                assert trajectory(real) == trajectory(remembered) == trajectory(standard)
                kept = ("nfe", "nfe_commit", "drafted", "accepted")
                assert [getattr(real.counts, k) for k in kept] == [getattr(remembered.counts, k) for k in kept]
            assert memo.evaluated == evaluated
    target, *_ = case("top", 0.0, 4, 0, "block", (), crosses=False)
    memo = MemoTarget(target)
    prefix = memo.prefill(np.arange(4), 4)
    assert not memo.spec.crosses and memo.commit(prefix, np.arange(4)) == 1


def test_memo_rows_of_complete_canvases():
    target, *_ = case("top", 0.0, 4, 0, "block", ())
    memo, canvases = MemoTarget(target), np.array([[1, MASKED, 2, 0], [1, 3, 2, 0]])
    prefixes = [t.prefill(np.arange(4), 4) for t in (memo, target)]
    lazy, real = memo.evaluate(prefixes[0], canvases), target.evaluate(prefixes[1], canvases)
    assert lazy.offsets == real.offsets == [0, 1, 5] and lazy.packed.equal(real.packed) and lazy.of(1).equal(real.of(1))
    assert memo.commit(prefixes[0], canvases[1]) == target.commit(prefixes[1], canvases[1]) == 0
    assert memo.commit(prefixes[0], canvases[1]) == target.commit(prefixes[1], canvases[1]) == 1
