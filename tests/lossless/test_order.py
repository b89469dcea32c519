"""Learned drafters never change tokens or order: random and extreme weights, every rule, ties, small vocabularies."""

from __future__ import annotations

from dataclasses import replace

import pytest
from reference_decoder import ToyTarget
from toy import SameRows, ToyTargetAdapter, trajectory, unchecked
from trace_toys import Settled, random_model

from spot_dlm.decode import generate
from spot_dlm.drafter_files import OrderModelFile
from spot_dlm.drafters import Chain, Root
from spot_dlm.drafters.order import Order
from spot_dlm.interfaces import DecodeParams
from spot_dlm.rules import parse_rule
from spot_dlm.transition import Sampling, UnmaskRule

RULES = {
    **{text: parse_rule(text) for text in ("standard", "bfloat16", "leftmost=0.9", "k=2", "threshold=0.9", "ltr")},
    "entropy": UnmaskRule(confidence="entropy"),
    "margin": UnmaskRule(confidence="margin"),
    "filtered": UnmaskRule(source="filtered"),
    **{text: parse_rule(text) for text in ("random", "order_temperature=0.3,confidence=margin", "arrival=6")},
}
SAMPLINGS = (Sampling(0.0), Sampling(1.0, seed=3), Sampling(0.7, top_p=0.9, seed=1), Sampling(0.7, top_k=3, seed=2))
BUDGETS = (1, 2, 5, 32)
DRAFTERS = [
    Order(OrderModelFile(random_model(kind, seed, scale), {}), branches)
    for kind, seed, scale, branches in (
        ("order", 0, 0.3, True),
        ("linear", 0, 0.3, True),
        ("order", 1, 1e4, True),
        ("linear", 1, 1e4, False),
    )
]


def toys(length: int) -> dict[str, ToyTargetAdapter]:
    kinds = {
        "settled": Settled(24, length, 1),
        "random": ToyTarget(7, length, 2, 1.5),
        "ties": SameRows(5, length, 3, levels=3),
        "two tokens": SameRows(2, length, 4),
    }
    return {name: ToyTargetAdapter(toy, stop_ids=(1,) if name == "settled" else ()) for name, toy in kinds.items()}


TOYS = {length: toys(length) for length in (4, 16, 32)}


def check(target: ToyTargetAdapter, params: DecodeParams, drafters: list[Order], budgets: tuple[int, ...]) -> int:
    """Compare with standard decoding; return the transitions saved."""
    saved = 0
    standard = generate(target, [0, 1, 0], Root(), params)
    for drafter in drafters:
        for nodes in budgets:
            got = generate(target, [0, 1, 0], drafter, replace(params, nodes=nodes))
            assert trajectory(got) == trajectory(standard), (drafter.name, nodes)
            assert got.counts.transitions == standard.counts.nfe
            saved += got.counts.accepted
    return saved


@pytest.mark.parametrize("rule", RULES)
def test_tokens_and_order_stay(rule: str) -> None:
    """Every toy and sampling at blocks of 4; each drafter is seen with each budget."""
    saved = 0
    with unchecked():
        for number, sampling in enumerate(SAMPLINGS):
            for target in TOYS[4].values():
                params = DecodeParams(RULES[rule], sampling, max_new_tokens=9, sequence=number)
                saved += check(target, params, DRAFTERS, (BUDGETS[number], 8))
    assert saved > 0 or rule in ("k=2", "arrival=6")  # two steps fill such a block, and the second needs no pass of its own


@pytest.mark.parametrize("length", [16, 32])
def test_longer_blocks(length: int) -> None:
    saved = 0
    with unchecked():
        for number, (rule, sampling) in enumerate(zip(("standard", "bfloat16", "entropy", "leftmost=0.9"), SAMPLINGS, strict=True)):
            for name in ("settled", "ties"):
                params = DecodeParams(RULES[rule], sampling, max_new_tokens=length, stop="prefix" if number % 2 else "block")
                saved += check(TOYS[length][name], params, [DRAFTERS[number % 2], DRAFTERS[2 + number % 2]], (3, 32))
    assert saved > 0


@pytest.mark.parametrize("rule", ["random", "order_temperature=0.3,confidence=margin", "arrival=6"])
def test_a_drawn_order_is_left_to_the_chain(rule: str) -> None:
    """A model cannot learn it and the chain knows its noise, so the passes are those of the chain."""
    with unchecked():
        for sampling in SAMPLINGS[:2]:
            params = DecodeParams(RULES[rule], sampling, max_new_tokens=32, nodes=8)
            chain = generate(TOYS[16]["settled"], [0, 1, 0], Chain(), params)
            for drafter in DRAFTERS[:2]:
                assert generate(TOYS[16]["settled"], [0, 1, 0], drafter, params).counts.nfe == chain.counts.nfe


@pytest.mark.parametrize("drafter", DRAFTERS[:2], ids=lambda d: d.name)
def test_with_shape_checks(drafter: Order) -> None:
    for sampling in SAMPLINGS[:3]:
        check(TOYS[4]["random"], DecodeParams(sampling=sampling, max_new_tokens=5), [drafter], (4,))
