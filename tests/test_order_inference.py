"""The prepared order model computes what the model computes; drafting for many prompts is drafting for each; guesses cross block ends."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from test_order_model import random_inputs
from toy import unchecked
from trace_toys import SMALL, random_model, settled_target

from spot_dlm.decode import generate
from spot_dlm.draft_graph import DraftGraph
from spot_dlm.drafter_files import OrderModelFile
from spot_dlm.drafters.order import Order
from spot_dlm.features import Encoded
from spot_dlm.interfaces import DecodeParams, DraftContext
from spot_dlm.order_inference import FastScorer
from spot_dlm.order_model import OrderConfig, inputs
from spot_dlm.transition import Sampling, UnmaskRule

UNEVEN = OrderConfig(width=20, layers=2, heads=4, hidden=23, rank=5, gate=3, depths=6)


def random_encoded(size: int, looked: int, length: int, seed: int = 0) -> Encoded:
    given = {name: value.numpy() for name, value in random_inputs(size, looked, length, seed)._asdict().items()}
    return Encoded(masked=np.zeros((size, length), np.int8), **given)


@pytest.mark.parametrize("config", [SMALL, UNEVEN, OrderConfig()], ids=["small", "uneven", "full"])
@pytest.mark.parametrize("kind", ["order", "linear"])
@pytest.mark.parametrize(("size", "length", "looked"), [(1, 4, 1), (3, 7, 2), (2, 16, 8), (1, 20, 9), (2, 45, 1)])
@torch.inference_mode()
def test_scores_are_the_models(config: OrderConfig, kind: str, size: int, length: int, looked: int) -> None:
    """Every number that growth takes, of every root of a batch; depths beyond the look-ahead are as its last, but for their number."""
    model = random_model(kind, seed=length, scale=0.05, config=config)
    rng = np.random.default_rng(length)
    encoded, scorer = random_encoded(size, looked, length), FastScorer(model)
    masked = [np.sort(rng.choice(length, int(rng.integers(1, length + 1)), replace=False)) for _ in range(size)]
    depths = [int(rng.integers(looked, looked + 20)) for _ in range(size)]
    tokens = [rng.integers(0, 99, (looked, len(at), 2)) for at in masked]
    for _ in range(2):  # the second run finds the buffers of the first
        found = scorer(encoded, masked, tokens, depths)
    for b, (at, some, wanted, ours) in enumerate(zip(masked, tokens, depths, found, strict=True)):
        which = np.minimum(np.arange(wanted), looked - 1)
        deep = {name: getattr(encoded, name)[:, which] for name in ("linear", "token", "sure")}
        theirs = model(inputs(replace(encoded, **deep)))
        dense = {name: value.numpy()[b] for name, value in theirs._asdict().items() if name != "gate_out"}
        pairs = np.ix_(at, at)
        expected = {
            "base": dense["base"][:, at], "pair": dense["pair"][pairs], "last": dense["last"][pairs], "gate_node": dense["gate_node"],
            "gate_commit": dense["gate_commit"][at], "gate_position": dense["gate_position"][at],
            "p_token": theirs.token.softmax(dim=-1).numpy()[b][:, at, :2],
        }  # fmt: skip
        for name, value in expected.items():
            np.testing.assert_allclose(getattr(ours, name), value, rtol=1e-3, atol=2e-5, err_msg=name)
        assert (ours.tokens == some[which]).all() and (ours.positions == at).all()
        np.testing.assert_array_equal(ours.gate_out, theirs.gate_out.numpy())
        if kind == "order":
            assert ours.moving is not None
            np.testing.assert_allclose(ours.moving.effect, dense["effect"][pairs], rtol=1e-3, atol=2e-5)
            np.testing.assert_allclose(ours.moving.dynamic, dense["dynamic"], rtol=1e-6)
            assert (ours.moving.sure == dense["sure"][:, at]).all() and (ours.moving.known == dense["known"][at]).all()
            assert (ours.moving.known_root, ours.moving.rounded) == (dense["known_root"], dense["rounded"] > 0)
    assert (scorer(encoded, masked, tokens, depths, token_branches=False)[0].p_token[..., 1] == 0).all()


class Asked:
    """Remembers what a drafter was asked for."""

    name = "asked"

    def __init__(self, drafter: Order) -> None:
        self.drafter, self.asked = drafter, []

    def draft(self, context: DraftContext, budget: int) -> DraftGraph:
        self.asked.append(context)
        return self.drafter.draft(context, budget)


def asked_of(drafter: Order) -> list[DraftContext]:
    """What an order drafter is asked while it decodes, under several rules, temperatures and block lengths, without its memory."""
    watched = Asked(drafter)
    cases = [
        (UnmaskRule(), Sampling(), 8),
        (UnmaskRule(resolution="bfloat16"), Sampling(1.0, seed=4), 8),
        (UnmaskRule(), Sampling(0.7, top_p=0.9, seed=4), 4),
        (UnmaskRule(num_per_step=2), Sampling(1.0), 8),
        (UnmaskRule(confidence="entropy"), Sampling(1.0), 12),
    ]
    with unchecked():
        for rule, sampling, length in cases:
            params = DecodeParams(rule, sampling, 3 * length, nodes=7)
            generate(settled_target(seed=length, block_length=length, crosses=True), [1, 2, 3], watched, params)
    return [replace(context, memory={}) for context in watched.asked]


@pytest.mark.parametrize("kind", ["order", "linear"])
def test_drafting_for_many_is_drafting_for_each(kind: str) -> None:
    drafter = Order(OrderModelFile(random_model(kind, seed=3), {}))
    asked = asked_of(drafter)
    budgets = [(1, 2, 3, 5, 32)[i % 5] for i in range(len(asked))]
    alone = [drafter.draft(replace(context, memory={}), budget) for context, budget in zip(asked, budgets, strict=True)]
    together = drafter.draft_many(asked, budgets)
    assert len(asked) > 30 and {len(c.root.canvas) for c in asked} == {4, 8, 12}
    for one, other in zip(alone, together, strict=True):
        assert len(one) == len(other)
        ours, theirs = ({(c.tobytes(), int(s)): r for c, s, r in zip(g.canvases, g.steps, g.reach, strict=True)} for g in (one, other))
        missing = [reach for key, reach in ours.items() if key not in theirs]
        assert len(missing) <= 1 and all(theirs[key] == pytest.approx(reach, abs=1e-4) for key, reach in ours.items() if key in theirs)


@pytest.mark.parametrize("kind", ["order", "linear"])
def test_guesses_cross_the_end_of_the_block(kind: str) -> None:
    """With one position left the complete block is the guess, and the only one; no complete block holds a stop token."""
    drafter = Order(OrderModelFile(random_model(kind, seed=3), {}))
    asked = asked_of(drafter)
    crossed, alone = 0, 0
    for context in asked:
        left, root = len(context.root.masked), context.root
        if context.rule.num_per_step > 1 or left > 3 or not context.crosses:
            continue
        graph = drafter.draft(replace(context, memory={}), 40)
        graph.validate(root, 40, 24, crosses=True)
        complete = graph.canvases[graph.complete]
        assert not np.isin(complete[:, root.masked], list(context.stop_ids)).any()
        crossed += len(complete)
        if left == 1:
            alone += len(graph) > 1
            assert graph.complete[1:].all() and len(drafter.draft(replace(context, memory={}), 2)) == 1
        inside = drafter.draft(replace(context, memory={}, crosses=False), 40)
        assert not inside.complete.any() and (left > 1 or len(inside) == 1)
    assert crossed > 10 and alone > 1
