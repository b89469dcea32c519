"""Whatever a drafter proposes, tokens, order and finish reason stay those of standard decoding (method.md, section 4)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from reference_decoder import ToyTarget
from toy import NEVER, ToyTargetAdapter, split_rule, trajectory, unchecked

from spot_dlm.decode import decode_steps, generate
from spot_dlm.draft_graph import DraftGraph, GraphBuilder
from spot_dlm.drafters import Chain, LeftToRight, Root
from spot_dlm.interfaces import DecodeParams, DraftContext
from spot_dlm.schedule import Schedule
from spot_dlm.sequence import Finished, Pass
from spot_dlm.state import MASKED, BlockState
from spot_dlm.transition import Sampling, UnmaskRule

VOCAB, LENGTH = 6, 5
RULES = {
    "top": {},
    "top-2": {"num_per_step": 2, "confidence": "margin"},
    "top-bf16": {"resolution": "bfloat16", "confidence": "max_probability"},
    "top-entropy-stale-noise": {"confidence": "entropy", "noise_step": False},
    "top-tempered": {"source": "tempered", "confidence": "probability", "top_k": 3},
    "threshold": {"select": "threshold", "threshold": 0.55},
    "threshold-entropy": {
        "select": "threshold",
        "confidence": "entropy",
        "threshold": -1.1,
        "strict": False,
        "source": "filtered",
        "top_p": 0.9,
    },
    "threshold-bf16": {"select": "threshold", "threshold": 0.5, "resolution": "bfloat16", "confidence": "max_probability"},
    "threshold-margin": {"select": "threshold", "threshold": 0.3, "confidence": "margin", "top_k": 4, "top_p": 0.9},
    "left-to-right": {"select": "left_to_right"},
    "left-to-right-3": {"select": "left_to_right", "num_per_step": 3, "noise_step": False},
    "leftmost-above": {"select": "leftmost_above", "threshold": 0.5},
    "leftmost-above-margin": {"select": "leftmost_above", "threshold": 0.4, "confidence": "margin", "resolution": "bfloat16"},
    "leftmost-above-entropy": {"select": "leftmost_above", "threshold": -1.0, "confidence": "entropy", "strict": False},
    "remainder-first": {"schedule": Schedule("remainder_first", 3)},
    "timesteps": {"schedule": Schedule("timesteps", 4), "confidence": "margin"},
    "threshold-schedule": {"select": "threshold", "threshold": 0.5, "schedule": Schedule("remainder_first_of_block", 3)},
    "half-even-left-to-right": {"select": "left_to_right", "schedule": Schedule("half_even", 2)},
    "random": {"order_temperature": math.inf},
    "random-remainder-first": {"order_temperature": math.inf, "schedule": Schedule("remainder_first", 3), "noise_step": False},
    "drawn-suppressed-bf16": {"order_temperature": 0.5, "suppressed_ids": (1,), "resolution": "bfloat16"},
    "drawn-timesteps": {
        "order_temperature": 0.4,
        "confidence": "entropy",
        "source": "filtered",
        "top_p": 0.9,
        "schedule": Schedule("timesteps", 4),
    },
    "arrival-filtered": {"select": "arrival", "schedule": Schedule("timesteps", 3), "top_k": 3, "noise_step": False},
    "threshold-span-late": {"select": "threshold", "threshold": 0.4, "span": 2, "late_ids": (1,), "suppressed_ids": (2,)},
}
BUDGETS = (1, 2, 4, 8, 16)


@dataclass
class Adversarial:
    """Wrong, contradictory and duplicated guesses in a well-formed graph."""

    seed: int
    name: str = "adversarial"
    num_drafted: int = 0

    def __post_init__(self):
        self.rng = np.random.default_rng(self.seed)

    def draft(self, context: DraftContext, budget: int) -> DraftGraph:
        rng, root = self.rng, context.root
        canvases, steps = [root.canvas], [root.step]
        for _ in range(rng.integers(0, budget)):
            canvas, step = self._guess(context, canvases)
            if (canvas != MASKED).all():
                canvas[rng.integers(len(canvas))] = MASKED
            canvases.append(canvas)
            steps.append(step)
        count = len(canvases)
        self.num_drafted += count - 1
        reach = rng.choice([0.0, 1.0, -3.0, 1e300, 1e-300, math.inf, math.nan], count)
        steps = np.array(steps, dtype=np.int64)
        edges = rng.integers(0, count, (rng.integers(0, 5), 2))
        edges = edges[steps[edges[:, 1]] == steps[edges[:, 0]] + 1]
        return DraftGraph(root.block, np.stack(canvases), steps, reach, edges)

    def _guess(self, context, canvases):
        rng, root = self.rng, context.root
        kind = rng.integers(6)
        if kind == 0:  # anything at all
            return rng.integers(MASKED, VOCAB, len(root.canvas)), self._step(root)
        if kind == 1:  # a node again, the root included
            return canvases[rng.integers(len(canvases))].copy(), self._step(root)
        canvas = root.canvas.copy()
        if kind == 2:  # contradicts the root
            canvas[rng.integers(len(canvas))] = rng.integers(MASKED, VOCAB)
            return canvas, root.step + 1
        stale = dict(zip(context.last.candidates.positions.tolist(), context.last.candidates.tokens.tolist(), strict=True))
        for position in rng.permutation(root.masked)[: rng.integers(1, 4)].tolist():  # a random, at times true, continuation
            canvas[position] = stale[position] if rng.integers(2) else rng.integers(VOCAB)
        return canvas, root.step + 1 if kind < 5 else self._step(root)

    def _step(self, root):
        return int(root.step + self.rng.integers(1, len(root.masked) + 1))


@dataclass
class Omniscient:
    """Knows every state that standard decoding will visit and proposes the next ones."""

    states: dict[tuple, BlockState]
    name: str = "omniscient"

    @classmethod
    def of(cls, target, prompt, params):
        passes = [e for e in decode_steps(target, prompt, Root(), params) if isinstance(e, Pass)]
        steps = [t for e in passes for t in e.acceptance.transitions]
        return cls({t.before.key: t.state for t in steps}), [t.before.block for t in steps]

    def draft(self, context: DraftContext, budget: int) -> DraftGraph:
        builder, state, node = GraphBuilder(context.root, budget), context.root, 0
        while node is not None and state.key in self.states:
            state = self.states[state.key]
            node = builder.add(node, state, 1.0)
        return builder.build()


def case(rule, temperature, seed=0, stop="block", stops=(), tokens=9, nodes=1):
    options = dict(RULES[rule], temperature=temperature, seed=seed)
    target = ToyTargetAdapter(ToyTarget(VOCAB, LENGTH, seed + 40, 1.5), stop_ids=stops)
    return target, [0, 1, 2], DecodeParams(*split_rule(options)[:2], max_new_tokens=tokens, stop=stop, nodes=nodes)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", RULES)
def test_every_drafter_gives_the_tokens_of_root(rule, temperature):
    """Five drafters, five budgets, two stop modes; an omniscient drafter must need exactly the passes that arithmetic allows."""
    for seed, stop in ((0, "block"), (1, "prefix")):
        target, prompt, params = case(rule, temperature, seed, stop, (3,))
        with unchecked():
            standard = generate(target, prompt, Root(), params)
            expected = trajectory(standard)
            omniscient, blocks = Omniscient.of(target, prompt, params)
            for nodes in BUDGETS:
                at = replace(params, nodes=nodes)
                for drafter in (Root(), Chain(), Chain(coupled=False), LeftToRight(), Adversarial(seed), Adversarial(7), omniscient):
                    got = generate(target, prompt, drafter, at)
                    counts = got.counts
                    assert trajectory(got) == expected, (drafter, nodes)
                    assert counts.transitions == standard.counts.nfe == counts.nfe + counts.accepted, (drafter, nodes)
                    assert got.order == [
                        replace(c, decode_pass=ours.decode_pass) for c, ours in zip(standard.order, got.order, strict=True)
                    ]
                    assert (counts.nfe_prefill, counts.nfe_commit) == (standard.counts.nfe_prefill, standard.counts.nfe_commit)
                    if nodes == 1 or drafter == Root():
                        assert counts.nfe == standard.counts.nfe and counts.drafted == 0
                # first pass of a block: the root of its first state alone; then `nodes` transitions a pass
                assert counts.nfe == sum(1 + math.ceil((blocks.count(b) - 1) / nodes) for b in set(blocks)), nodes


def test_adversarial_drafts_are_well_formed_and_many():
    """The drafter above would prove nothing if it drafted nothing or never guessed right by luck."""
    drafter, accepted = Adversarial(3), 0
    with unchecked():
        for seed in range(6):
            target, prompt, params = case("left-to-right", 0.0, seed, tokens=17, nodes=16)
            accepted += generate(target, prompt, drafter, params).counts.accepted
    assert drafter.num_drafted > 300 and accepted > 5


@pytest.mark.parametrize("drafter", [Chain(), Chain(coupled=False), LeftToRight(), Adversarial(1)], ids=lambda d: d.name)
def test_with_shape_checks(drafter):
    target, prompt, params = case("top", 1.0, nodes=4)
    assert trajectory(generate(target, prompt, drafter, params)) == trajectory(generate(target, prompt, Root(), params))


def test_drafters_save_passes():
    """On a target that ignores the canvas, the coupled chain is always right and left-to-right is where the order is."""

    def toy(prefix, canvas):
        rows = np.random.default_rng(5).standard_normal((LENGTH, VOCAB)).astype(np.float32)
        return {i: rows[i] for i, token in enumerate(canvas) if token is None}

    target = ToyTargetAdapter(toy, VOCAB, LENGTH)
    for temperature, order, drafter in ((0.0, "top", Chain()), (1.0, "top", Chain()), (1.0, "left_to_right", LeftToRight())):
        params = DecodeParams(UnmaskRule(select=order), Sampling(temperature), 10, nodes=8)
        with unchecked():
            result = generate(target, [0] * LENGTH, drafter, params)
        assert result.counts.transitions == 10 and result.counts.nfe == 4 and result.counts.acceptance_length == 2.5
        assert result.counts.reached == [2, 2, 2] and result.counts.offered == [2, 2, 2]
    for temperature in (0.0, 1.0):  # an order that is drawn is known ahead of time
        for options in ({"order_temperature": math.inf}, {"order_temperature": 0.3, "confidence": "margin"}):
            params = DecodeParams(UnmaskRule(**options), Sampling(temperature), 10, nodes=8)
            with unchecked():
                result = generate(target, [0] * LENGTH, Chain(), params)
            assert result.counts.nfe == 4 and result.counts.reached == result.counts.offered == [2, 2, 2], options
        params = DecodeParams(UnmaskRule(select="arrival", schedule=Schedule("timesteps", 9)), Sampling(temperature, seed=2), 10, nodes=8)
        with unchecked():
            result = generate(target, [0] * LENGTH, Chain(), params)
        assert result.counts.transitions + result.counts.idle == 18 and result.counts.nfe == 4 < result.counts.transitions
    uncoupled = generate(target, [0] * LENGTH, Chain(coupled=False), replace(params, rule=UnmaskRule()))
    assert uncoupled.counts.nfe > 4


# ------------------------------------------------------------------------------------------------------ malformed graphs


def graph_of(root: BlockState, **changes) -> DraftGraph:
    """A good two-node graph with some fields replaced, past the shape checks of the test run."""
    child = root.commit(root.masked[:1], np.array([0]))
    good = DraftGraph(
        root.block,
        np.stack([root.canvas, child.canvas]),
        np.array([root.step, child.step]),
        np.ones(2),
        np.array([[0, 1]]),
    )
    graph = object.__new__(DraftGraph)
    graph.__dict__.update({k: v for k, v in vars(good).items() if k != "index"})
    graph.__dict__.update({k: v(getattr(good, k)) for k, v in changes.items()})
    return graph


@dataclass
class Malformed:
    changes: dict
    name: str = "malformed"
    seen: list = field(default_factory=list)

    def draft(self, context: DraftContext, budget: int) -> DraftGraph:
        self.seen.append(context.root)
        if len(context.root.masked) < 2:
            return DraftGraph.root_only(context.root)
        return graph_of(context.root, **self.changes)


def resized(count):
    return {k: (lambda a, count=count: np.repeat(a[-1:], count, 0)) for k in ("canvases", "steps", "reach")}


def edited(row, column, value):
    def change(canvases):
        canvases = canvases.copy()
        canvases[row, column] = value
        return canvases

    return change


MALFORMED = {
    "narrow": ({"canvases": lambda a: a[:, :-1]}, r"canvases must be int64 of shape \[N, 5\]"),
    "flat": ({"canvases": lambda a: a[0]}, "canvases must be int64"),
    "float canvases": ({"canvases": lambda a: a.astype(np.float64)}, "canvases must be int64.*float64"),
    "int32 canvases": ({"canvases": lambda a: a.astype(np.int32)}, "canvases must be int64.*int32"),
    "too many nodes": (resized(5), "5 nodes, the budget allows 1 to 4"),
    "no nodes": (resized(0), "0 nodes, the budget allows 1 to 4"),
    "steps too short": ({"steps": lambda a: a[:1]}, r"steps must .*shape \[2\]"),
    "reach too long": ({"reach": lambda a: np.ones(3)}, r"reach must .*shape \[2\]"),
    "float steps": ({"steps": lambda a: a + 0.5}, "steps must be int64"),
    "a guess at the root's step": ({"steps": lambda a: a * 0 + a[0]}, "a guess must be 1 to"),
    "a guess before the root": ({"steps": lambda a: np.array([a[0], a[0] - 1])}, "a guess must be 1 to"),
    "an absurd step": ({"steps": lambda a: np.array([a[0], 2**62])}, "a guess must be 1 to"),
    "edge backwards": ({"edges": lambda a: a[:, ::-1]}, "next step"),
    "edge to itself": ({"edges": lambda a: np.array([[1, 1]])}, "next step"),
    "float edges": ({"edges": lambda a: a.astype(np.float64)}, "edges must be int64"),
    "another block": ({"block": lambda b: b + 1}, "node 0 must be the certain next state"),
    "root's step": ({"steps": lambda a: a + 1}, "node 0 must be the certain next state"),
    "root not first": ({k: (lambda a: a[::-1]) for k in ("canvases", "steps")}, "node 0 must be the certain next state"),
    "token too high": ({"canvases": edited(1, 4, VOCAB)}, r"token ids must lie in 0\.\.5"),
    "token too low": ({"canvases": edited(1, 4, -2)}, r"token ids must lie in 0\.\.5"),
    "complete": ({"canvases": edited(1, slice(None), 0)}, "a complete block takes no node"),
    "edge too high": ({"edges": lambda a: a + 1}, r"edges must .*0\.\.1"),
    "edge below 0": ({"edges": lambda a: a - 1}, r"edges must .*0\.\.1"),
    "edges of three": ({"edges": lambda a: np.zeros((1, 3), np.int64)}, "edges must"),
    "flat edges": ({"edges": lambda a: a[0]}, "edges must"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_graphs_are_refused(name):
    changes, message = MALFORMED[name]
    target, _, params = case("top", 0.0, nodes=4)
    drafter = Malformed(changes)
    before = None
    with unchecked(), pytest.raises(ValueError, match=message):
        before = target.evaluated_rows
        generate(target, [0] * LENGTH, drafter, params)
    assert len(drafter.seen) == 1 and target.evaluated_rows == before + 1  # the target never saw it


def test_the_unchanged_graph_is_accepted():
    target, prompt, params = case("top", 0.0, nodes=4)
    assert trajectory(generate(target, prompt, Malformed({}), params)) == trajectory(generate(target, prompt, Root(), params))


# ------------------------------------------------------------------------------------------------------------ bad targets


def spoiled(position, step, row):
    """A toy whose logits at `position` are `row` once `step` tokens are committed in the block."""

    def toy(prefix, canvas):
        rows = ToyTarget(VOCAB, LENGTH, 3, 1.0)(prefix, canvas)
        if sum(t is not None for t in canvas) == step and position in rows:
            rows[position] = np.array(row, np.float32)
        return rows

    return ToyTargetAdapter(toy, VOCAB, LENGTH, mask_token_id=NEVER)


BAD_ROWS = {
    "one nan": [0, math.nan, 0, 0, 1, 2],
    "all nan": [math.nan] * 6,
    "plus infinity": [0, 1, 2, math.inf, 0, 0],
    "two plus infinities": [0, math.inf, 2, math.inf, 0, 0],
    "nan and infinities": [-math.inf, math.inf, math.nan, 0, 0, 0],
    "nothing allowed": [-math.inf] * 6,
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("bad", BAD_ROWS)
def test_bad_logits_are_named(bad, rule):
    """For every rule, at both temperatures, in the first state, in a lone row and in a drafted node that the walk reaches."""
    for temperature in (0.0, 1.0):
        options = dict(RULES[rule], temperature=temperature)
        params = DecodeParams(*split_rule(options)[:2], max_new_tokens=5, nodes=4)
        with unchecked():
            for drafter in (Root(), Chain()):
                with pytest.raises(ValueError, match=r"NaN or infinite logits \(block position 2\)"):
                    generate(spoiled(2, 0, BAD_ROWS[bad]), [0] * LENGTH, drafter, params)
            with pytest.raises(ValueError, match=r"NaN or infinite logits \(block position 4\)"):
                generate(spoiled(4, 4, BAD_ROWS[bad]), [0] * 4, Root(), params)


def test_bad_logits_of_a_node_that_is_not_reached_do_no_harm():
    """Only visited states count: a wrong guess may lead the target anywhere."""
    target, prompt, params = case("top", 0.0, nodes=8)
    expected = trajectory(generate(target, prompt, Root(), params))
    true_rows = set(target._rows)
    plain = target._logits
    target._logits = lambda prefix, canvas: plain(prefix, canvas) * (1 if (prefix.ids, canvas.tobytes()) in true_rows else np.nan)
    with unchecked():
        assert trajectory(generate(target, prompt, Adversarial(2), params)) == expected


@pytest.mark.parametrize("drafter", [Root(), Chain()])
def test_a_target_that_emits_the_mask_token_is_refused(drafter):
    options = {"temperature": 1.0}
    params = DecodeParams(*split_rule(options)[:2], max_new_tokens=20, nodes=4)
    target = ToyTargetAdapter(ToyTarget(VOCAB, LENGTH, 3, 1.0), mask_token_id=2)
    with unchecked(), pytest.raises(RuntimeError, match=r"mask token was committed in block \d+, step \d+"):
        generate(target, [0] * LENGTH, drafter, params)


# ------------------------------------------------------------------------------------------------------------- validation


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: UnmaskRule(select="best"), "select='best' is unknown; choose one of top, threshold"),
        (lambda: UnmaskRule(confidence="p"), "confidence='p' is unknown"),
        (lambda: UnmaskRule(source="logits"), "source='logits' is unknown"),
        (lambda: UnmaskRule(resolution="float16"), "resolution='float16' is unknown"),
        (lambda: UnmaskRule(num_per_step=0), "num_per_step=0 must be at least 1"),
        (lambda: UnmaskRule(select="threshold", num_per_step=2), "num_per_step=2 has no meaning"),
        (lambda: UnmaskRule(select="leftmost_above", num_per_step=3), "num_per_step=3 has no meaning"),
        (lambda: UnmaskRule(threshold=math.nan), "threshold=nan must be finite"),
        (lambda: UnmaskRule(threshold=math.inf), "threshold=inf must be finite"),
        (lambda: UnmaskRule(noise_step=False), "noise_step=False would change the law"),
        (lambda: UnmaskRule(select="threshold", noise_step=False), "noise_step=False would change the law"),
        (lambda: UnmaskRule(order_temperature=-0.5), "order_temperature=-0.5 must be 0 .by confidence., infinite .random. or between"),
        (lambda: UnmaskRule(order_temperature=1e-6), "order_temperature=1e-06 must be"),
        (lambda: UnmaskRule(order_temperature=math.nan), "order_temperature=nan must be"),
        (
            lambda: UnmaskRule(select="threshold", order_temperature=math.inf),
            "order_temperature=inf has no meaning with select='threshold'",
        ),
        (lambda: UnmaskRule(select="left_to_right", order_temperature=1.0), "order_temperature=1 has no meaning"),
        (lambda: UnmaskRule(order_temperature=0.5, late_ids=(1,)), "late_ids have no meaning with order_temperature=0.5"),
        (lambda: UnmaskRule(order_temperature=0.5, noise_step=False), "noise_step=False would change the law"),
        (lambda: UnmaskRule(select="arrival"), "select='arrival' draws a position's time from the schedule 'timesteps'"),
        (lambda: UnmaskRule(select="arrival", schedule=Schedule("half_even", 3)), "give that one"),
        (lambda: UnmaskRule(select="arrival", schedule=Schedule("timesteps", 3), span=2), "a schedule says how many"),
        (lambda: Sampling(temperature=-0.1), "temperature=-0.1 must be 0 or between"),
        (lambda: Sampling(temperature=1e-30), "temperature=1e-30 must be"),
        (lambda: Sampling(temperature=1e39), r"temperature=1e\+39 must be"),
        (lambda: Sampling(temperature=math.nan), "temperature=nan"),
        (lambda: UnmaskRule(select="threshold", threshold=90), "threshold=90 can never decide"),
        (lambda: UnmaskRule(select="threshold", confidence="entropy"), "threshold=0.9 can never decide"),
        (lambda: Sampling(temperature=math.inf), "temperature=inf"),
        (lambda: Sampling(top_k=-1), "top_k=-1 must be at least 0"),
        (lambda: Sampling(top_p=0.0), "top_p=0.0 must be above 0"),
        (lambda: Sampling(top_p=1.1), "top_p=1.1"),
        (lambda: Sampling(top_p=math.nan), "top_p=nan"),
        (lambda: DecodeParams(max_new_tokens=0), "max_new_tokens=0 must be a whole number of at least 1"),
        (lambda: DecodeParams(nodes=0), "nodes=0 must be .auto. or a whole number from 1"),
        (lambda: DecodeParams(block_length=0), "block_length=0 must be at least 1"),
        (lambda: DecodeParams(stop="eos"), "stop='eos' is unknown; choose one of block, prefix"),
    ],
)
def test_parameters_are_validated_at_construction(make, message):
    with unchecked(), pytest.raises(ValueError, match=message):
        make()


def test_what_may_leave_the_step_out_of_the_noise():
    for confidence in ("max_probability", "margin", "entropy"):
        UnmaskRule(confidence=confidence, noise_step=False)
    UnmaskRule(select="left_to_right", noise_step=False)
    UnmaskRule(order_temperature=math.inf, noise_step=False)
    UnmaskRule(order_temperature=0.5, confidence="margin", noise_step=False)
    UnmaskRule(select="arrival", schedule=Schedule("timesteps", 3), noise_step=False)


@pytest.mark.parametrize(
    "prompt, tokens, message",
    [
        ([], 5, "the prompt is empty"),
        ("", 5, "the prompt is empty"),
        ([0, VOCAB], 5, r"prompt ids must lie in 0\.\.5"),
        ([-1], 5, r"prompt ids must lie in 0\.\.5"),
        ([0] * 17, 4, "prompt of 17 tokens .* blocks of 5, is 25; .* context holds 20"),
        ([0], 20, "is 25; .* context holds 20"),
        ([0] * 30, 1, "context holds 20"),
    ],
)
def test_prompts_are_validated(prompt, tokens, message):
    target = ToyTargetAdapter(ToyTarget(VOCAB, LENGTH), max_length=20)
    with pytest.raises(ValueError, match=message):
        generate(target, prompt, Root(), DecodeParams(max_new_tokens=tokens))
    assert target.evaluated_rows == 0


def test_the_context_may_be_filled_to_the_last_token():
    target = ToyTargetAdapter(ToyTarget(VOCAB, LENGTH), max_length=20)
    assert len(generate(target, [0] * 17, Root(), DecodeParams(max_new_tokens=3)).token_ids) == 3


def test_events_describe_the_whole_run():
    """The last event is the result, pass numbers count up, and every commit appears in exactly one pass."""
    target, prompt, params = case("top", 1.0, nodes=4)
    events = list(decode_steps(target, prompt, Chain(), params))
    passes = [e for e in events if isinstance(e, Pass)]
    result = events[-1].result
    assert isinstance(events[-1], Finished) and [p.number for p in passes] == list(range(result.counts.nfe))
    assert [c for p in passes for c in p.committed] == result.order
    assert all(c.decode_pass == p.number for p in passes for c in p.committed)
    assert len(result.commit_steps) == len(result.token_ids) == 9
    masked = [len(t.before.masked) for p in passes for t in p.acceptance.transitions]
    assert all(m > 0 for m in masked)
