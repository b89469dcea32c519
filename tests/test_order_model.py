"""The order model: its size, its start, and that the sum over a path is the one that growth forms node by node."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
import torch
from toy import unchecked
from trace_toys import SMALL, random_model

from spot_dlm.features import NUM_LINEAR, NUM_POSITION, NUM_TOKEN
from spot_dlm.growth import Moving, OrderScores, grow
from spot_dlm.order_model import MAX_PARAMETERS, Inputs, OrderConfig, OrderModel, path_scores
from spot_dlm.state import BlockState


def random_inputs(size: int, depths: int, length: int, seed: int = 0, known: bool = True) -> Inputs:
    rng = np.random.default_rng(seed)
    shapes = (size, length, NUM_POSITION), (size, depths, length, NUM_LINEAR), (size, depths, length, NUM_TOKEN)
    dense = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    sure = rng.exponential(2, (size, depths, length)).astype(np.float32)
    effect = rng.standard_normal((size, length, length)).astype(np.float32) * known
    near = rng.random((size, length)).astype(np.float32) * known, rng.random(size).astype(np.float32) * known
    rounded = (rng.random(size) < 0.5).astype(np.float32)
    return Inputs(*(torch.from_numpy(np.asarray(a, np.float32)) for a in (*dense, sure, effect, *near, rounded)))


def test_size() -> None:
    model = OrderModel(OrderConfig())
    assert model.num_parameters == sum(p.numel() for p in model.parameters()) <= MAX_PARAMETERS == 620_000
    with pytest.raises(ValueError, match=r"would have \d+ parameters, at most 620000"):
        OrderModel(OrderConfig(hidden=520))


@pytest.mark.parametrize(
    ("change", "message"),
    [({"kind": "tree"}, "kind='tree'"), ({"layers": 0}, "layers=0"), ({"width": 1.5}, "width=1.5"), ({"heads": 7}, "multiple of heads=7")],
)
def test_bad_configs(change: dict, message: str) -> None:
    with unchecked(), pytest.raises(ValueError, match=message):
        replace(OrderConfig(), **change)


@torch.inference_mode()
def test_untrained_network_is_the_linear_score() -> None:
    """Where no effect is known; every head starts with a factor of zero."""
    torch.manual_seed(0)
    network, linear = OrderModel(replace(SMALL, kind="order")), OrderModel(replace(SMALL, kind="linear"))
    given = random_inputs(3, 5, 7, known=False)
    path = torch.tensor([[0, 3, 1, 2, 6], [6, 5, 4, 3, 2], [1, 2, 3, 4, 5]])
    masked = torch.ones(3, 7, dtype=torch.bool)
    ours, theirs = network(given), linear(given)
    assert torch.equal(ours.token, theirs.token)
    one, remaining = path_scores(ours, path, masked)
    other, _ = path_scores(theirs, path, masked)
    assert torch.allclose(one[remaining], other[remaining], atol=1e-6)


def compact(scores, row: int, masked: np.ndarray) -> OrderScores:
    """What growth takes, of one root."""
    at = np.ix_(masked, masked)
    s = {name: value.numpy() for name, value in scores._asdict().items()}
    depths, count = len(s["base"][row]), len(masked)
    tokens = np.stack((np.zeros((depths, count), np.int64), np.full((depths, count), -1)), axis=-1)
    moving = Moving(
        np.ascontiguousarray(s["sure"][row][:, masked]), s["effect"][row][at], s["known"][row][masked], float(s["known_root"][row]),
        s["dynamic"][row], bool(s["rounded"][row]),
    )  # fmt: skip
    return OrderScores(
        masked, tokens, np.ones((depths, count, 2), np.float32), np.ascontiguousarray(s["base"][row][:, masked]), s["pair"][row][at],
        s["last"][row][at], s["gate_node"][row], s["gate_commit"][row][masked], s["gate_position"][row][masked], s["gate_out"], moving,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["order", "linear"])
@pytest.mark.parametrize("commits", [2, 3])
@torch.inference_mode()
def test_path_scores_are_what_growth_sums(kind: str, commits: int) -> None:
    """With certain tokens and room for all states, a node's reach sums path probabilities over the orders that lead to it.

    Beyond two commits only without `last`: a node merged of several orders keeps the last commit of the likeliest.
    """
    model, length, masked = random_model(kind, seed=2, scale=0.05), 6, np.array([0, 2, 3, 5])
    scores = model(random_inputs(2, 3, length, seed=4))
    if commits > 2:
        scores = scores._replace(last=torch.zeros_like(scores.last))
    root = BlockState(0, np.where(np.isin(np.arange(length), masked), -1, 9), 2)
    inside = torch.zeros(2, length, dtype=torch.bool)
    inside[:, masked] = True
    for row in range(2):
        graph = grow(root, compact(scores, row, masked), 64)
        sets = [tuple(np.flatnonzero((canvas != -1) & (root.canvas == -1)).tolist()) for canvas in graph.canvases]
        reach = dict(zip(sets, graph.reach.tolist(), strict=True))
        assert len(reach) == len(graph) > 8
        expected: dict[tuple, float] = {}
        for order in permutations(masked.tolist(), commits):
            total, remaining = path_scores(scores, torch.tensor([order] * 2), inside)
            chance = total.double().masked_fill(~remaining, -torch.inf).softmax(-1)[row]
            product = float(np.prod([chance[d, i] for d, i in enumerate(order)]))
            expected[tuple(sorted(order))] = expected.get(tuple(sorted(order)), 0.0) + product
        assert sum(expected.values()) == pytest.approx(1)
        for state, value in expected.items():
            assert reach.get(state, 0.0) == pytest.approx(value, rel=1e-4, abs=1e-6), (kind, row, state)


@torch.inference_mode()
def test_rows_are_independent_and_committed_positions_take_no_part() -> None:
    model, given = random_model(seed=3), random_inputs(4, 5, 9, seed=1)
    whole = model(given)
    for row in range(4):
        alone = model(Inputs(*(value[row : row + 1] for value in given)))
        for name in ("base", "pair", "last", "gate_commit", "gate_position", "token"):
            assert torch.allclose(getattr(whole, name)[row], getattr(alone, name)[0], atol=1e-5), name
    masked = torch.zeros(4, 9, dtype=torch.bool)
    masked[:, [1, 4, 8]] = True
    path = torch.tensor([[4, 8]] * 4)
    total, remaining = path_scores(whole, path, masked)
    noise = {"base": whole.base.masked_fill(~masked[:, None], 1e3), "pair": whole.pair.masked_fill(~masked[..., None], 1e3)}
    other, same = path_scores(whole._replace(**noise), path, masked)
    assert torch.equal(remaining, same) and torch.equal(total[remaining], other[remaining])
    assert remaining.sum(-1).tolist() == [[3, 2]] * 4


@pytest.mark.parametrize("length", [4, 8, 16, 32, 64])
@torch.inference_mode()
def test_block_lengths(length: int) -> None:
    scores = OrderModel(OrderConfig())(random_inputs(2, 40, length))
    assert scores.base.shape == (2, 40, length) and scores.token.shape == (2, 40, length, 3)
    assert all(torch.isfinite(value).all() for value in scores)
