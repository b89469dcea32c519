"""Effects of commits: the nearest observation of every position, read alike from host and device, complete blocks skipped."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from spot_dlm import effects as effects_module
from spot_dlm.draft_graph import DraftGraph, GraphBuilder
from spot_dlm.effects import Effects, sureness_of, sureness_of_row
from spot_dlm.interfaces import MaskedLogits
from spot_dlm.state import BlockState


def random_pass(root: BlockState, seed: int, size: int = 11) -> tuple[DraftGraph, MaskedLogits]:
    """A random graph, complete blocks included, and logits of all its rows."""
    rng = np.random.default_rng(seed)
    builder = GraphBuilder(root, budget=12, crosses=True)
    for _ in range(30):
        parent = int(rng.choice([len(builder.states) - 1, rng.integers(0, len(builder.states))]))
        state = builder.states[parent]
        if len(state.masked):
            builder.add(parent, state.commit(rng.choice(state.masked, 1), rng.integers(0, 2, 1)), 0.5)
    graph = builder.build()
    counts = [int((c == -1).sum()) or len(c) for c in graph.canvases]
    packed = torch.from_numpy(rng.normal(0, 4, (sum(counts), size)).astype(np.float32))
    return graph, MaskedLogits(packed, [0, *np.cumsum(counts).tolist()])


def expected(graph: DraftGraph, logits: MaskedLogits, canvas: np.ndarray) -> dict[int, tuple[int, int, np.ndarray]]:
    """Of every position the nearest observation: distance, token and changes."""
    found: dict[int, tuple[int, int, np.ndarray]] = {}
    for parent, child in graph.edges.tolist():
        before, after = graph.canvases[parent], graph.canvases[child]
        if (after != -1).all():
            continue
        open_ = (after == -1) & (canvas == -1)
        j = int(np.flatnonzero((before == -1) & (after != -1))[0])
        apart = int((before != canvas).sum())
        if canvas[j] == -1 and (j not in found or apart < found[j][0]):
            change, sure = np.zeros(len(canvas)), []
            for node, content in ((parent, before), (child, after)):
                exact = logits.of(node).double().softmax(-1)
                dense = np.zeros(len(canvas))
                dense[content == -1] = -torch.log(exact.sum(-1) - exact.amax(-1)).numpy()
                sure.append(dense)
            change[open_] = (sure[1] - sure[0])[open_]
            found[j] = (apart, int(after[j]), change)
    return found


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_the_nearest_observation_wins(seed: int, on_device: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pass after pass from one root; a later observation replaces an earlier one only where it is nearer by then."""
    if on_device:  # what logits elsewhere than in the host's memory go through

        def as_elsewhere(packed, canvases, edges, canvas, advanced, offsets, value, token, distance) -> None:
            nearest = effects_module._nearest(canvases, edges, canvas, advanced, distance)
            effects_module._observe(sureness_of(torch.from_numpy(packed)), nearest, canvases, canvas, offsets, value, token)

        monkeypatch.setattr(effects_module, "_observe_rows", as_elsewhere)
    root = BlockState(1, np.array([7, -1, -1, 5, -1, -1, -1]), 2)
    memory, known, complete = Effects.empty(7), {}, 0
    for number in range(3):
        graph, logits = random_pass(root, 10 * seed + number)
        complete += int(graph.complete.sum())
        path = [n for n in range(len(graph)) if not graph.complete[n]]
        arrived = graph.canvases[path[number % len(path)]]
        memory.observe(graph, logits, arrived, advanced=number)
        known = {j: (apart + number, token, change) for j, (apart, token, change) in known.items()}
        known |= {j: new for j, new in expected(graph, logits, arrived).items() if j not in known or new[0] < known[j][0]}
        assert sorted(known) == np.flatnonzero(memory.known > 0).tolist()
        for j, (apart, token, change) in known.items():
            assert memory.distance[j] == apart and memory.token[j] == token
            np.testing.assert_allclose(memory.value[j], change, rtol=1e-4, atol=1e-4)
            assert memory.known[j] == np.float32(1 / (1 + 0.1 * apart))
    assert complete and known
    tokens = memory.token.copy()
    tokens[1] += 1
    value, near = memory.of(tokens)
    assert near[1] == 0 and not value[1].any() and (near[2:] == memory.known[2:]).all() and (value[2:] == memory.value[2:]).all()


def test_a_root_alone_shows_nothing_and_time_passes() -> None:
    root = BlockState(0, np.array([-1, -1, -1]), 0)
    graph, logits = random_pass(root, 0)
    memory = Effects.empty(3)
    memory.observe(graph, logits, root.canvas, advanced=1)
    seen = memory.distance.copy()
    memory.observe(DraftGraph.root_only(root), MaskedLogits(torch.zeros(3, 5), [0, 3]), root.canvas, advanced=4)
    assert (memory.distance[seen < 9] == seen[seen < 9] + 4).all() and (seen < 9).any()


def test_sureness_keeps_its_digits() -> None:
    """Where p1 rounds to 1, where tokens tie and where one token is all that is possible."""
    logits = torch.full((4, 70), -torch.inf)
    logits[0, [3, 69]] = torch.tensor([1.0, -20.0])
    logits[1, [69, 3]] = torch.tensor([1.0, -21.0])
    logits[2, 1:3] = 4.0
    logits[3, 5] = -3.0
    on_device = sureness_of(logits)
    rows = np.array([sureness_of_row(row) for row in logits.numpy()])
    np.testing.assert_allclose(rows, on_device, rtol=1e-6)
    np.testing.assert_allclose(rows, [21, 22, np.log(2), 40], rtol=1e-5)
