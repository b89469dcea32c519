"""What training reads from traces is what a drafter reads while decoding, to the bit; and the paths are those of the target."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from toy import unchecked
from trace_toys import random_model, record_toy, saved_model, settled_target, toy_recording

from spot_dlm.decode import decode_steps
from spot_dlm.draft_graph import DraftGraph
from spot_dlm.drafter_files import load_order_model
from spot_dlm.drafters import order as order_drafter
from spot_dlm.features import Encoded, encode
from spot_dlm.interfaces import DraftContext
from spot_dlm.live import read_live
from spot_dlm.record import Recording, TraceSetting
from spot_dlm.trace_states import BEST, OTHER, SECOND, TraceStates
from spot_dlm.traces import Traces

DEPTHS = 16
SETTINGS = [
    TraceSetting(rule, temperature, block_length=length, max_new_tokens=2 * length)
    for rule in ("standard", "bfloat16")
    for temperature in (0.0, 1.0)
    for length in (8, 20)
]


class Reader:
    """Drafts nothing and keeps what an order model would read."""

    name = "reader"

    def __init__(self) -> None:
        self.seen: dict[tuple[int, int], Encoded] = {}

    def draft(self, context: DraftContext, budget: int) -> DraftGraph:
        encoded, _ = read_live([context], [min(DEPTHS, len(context.root.masked))])
        self.seen[context.last.before.block, context.last.before.step] = encoded
        return DraftGraph.root_only(context.root)


def state_numbers(traces: Traces) -> dict[tuple[int, int, int], int]:
    """Number of the state of every (sequence, block, step)."""
    blocks = np.repeat(np.arange(len(traces.block["index"])), traces.block["states"])
    sequences = np.repeat(np.arange(len(traces.sequence["blocks"])), traces.sequence["blocks"])
    keys = zip(sequences[blocks].tolist(), traces.block["index"][blocks].tolist(), traces.state["step"].tolist(), strict=True)
    return {key: number for number, key in enumerate(keys)}


def assert_same(live: Encoded, recorded: Encoded, where: object) -> None:
    """Equal, up to the depths that the live one has."""
    for field in fields(Encoded):
        ours, theirs = getattr(live, field.name), getattr(recorded, field.name)
        if field.name in ("linear", "token", "sure"):
            depths = min(ours.shape[1], theirs.shape[1])
            ours, theirs = ours[:, :depths], theirs[:, :depths]
        different = np.argwhere(ours != theirs)
        assert not len(different), (where, field.name, different[:5].tolist(), ours[ours != theirs][:5], theirs[ours != theirs][:5])


def decode_jobs(recording: Recording) -> list[tuple[int, list[int], TraceSetting, int]]:
    return [
        (number, recording.prompts[p]["prompt_ids"], recording.settings[s], p * len(recording.settings) + s)
        for number, (p, s) in enumerate(recording.jobs)
    ]


@pytest.mark.parametrize("vocab_size", [24, 6])
def test_live_states_equal_recorded_ones(tmp_path: Path, vocab_size: int) -> None:
    target, recording = settled_target(vocab_size), toy_recording(2, SETTINGS, seed=3)
    with unchecked():
        traces = record_toy(tmp_path / "t", recording, target)
    states, numbers = TraceStates(traces), state_numbers(traces)
    compared = 0
    for number, prompt, setting, sequence in decode_jobs(recording):
        reader = Reader()
        with unchecked():
            list(decode_steps(target, prompt, reader, replace(setting.params(recording.seed, sequence), nodes=2)))
        for (block, step), live in reader.seen.items():
            state = numbers[number, block, step]
            if step % 3 == 0:
                recorded = encode(states.batch(np.array([state]), DEPTHS)[0], DEPTHS)
                assert_same(live, recorded, (setting, block, step))
                compared += 1
    assert compared > 40


@pytest.mark.parametrize("nodes", [2, 4, 8, 32])
def test_a_drafter_reads_what_it_was_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: int) -> None:
    """With effects: traces recorded by speculative decoding hold what the very drafter read there, at every budget."""
    folder = saved_model(tmp_path / "d", random_model(seed=1))
    target, recording = settled_target(), toy_recording(1, SETTINGS, drafter=str(folder), nodes=(nodes,))
    with unchecked():
        traces = record_toy(tmp_path / "t", recording, target)
    states, numbers = TraceStates(traces), state_numbers(traces)
    seen: list[tuple[int, int, Encoded]] = []

    def reading(contexts: list[DraftContext], depths: list[int], with_effects: bool) -> tuple:
        encoded, tokens = read_live(contexts, depths, with_effects)
        (context,) = contexts
        seen.append((context.last.before.block, context.last.before.step, encoded))
        return encoded, tokens

    monkeypatch.setattr(order_drafter, "read_live", reading)
    drafter = order_drafter.Order(load_order_model(folder))
    drafted, known = 0, 0
    for number, prompt, setting, sequence in decode_jobs(recording):
        seen.clear()
        with unchecked():
            list(decode_steps(target, prompt, drafter, replace(setting.params(recording.seed, sequence), nodes=nodes)))
        for block, step, live in seen:
            recorded = encode(states.batch(np.array([numbers[number, block, step]]), DEPTHS)[0], DEPTHS)
            assert_same(live, recorded, (setting, nodes, block, step))
            drafted, known = drafted + 1, known + int((live.known > 0).any())
    assert drafted == len(states.drafted) > 20 and known > 5


def test_paths(tmp_path: Path) -> None:
    """Positions and tokens are the commits that followed; the kind says which stale token it was."""
    target = settled_target(jitter=2.0)
    with unchecked():
        traces = record_toy(tmp_path / "t", toy_recording(2, SETTINGS), target)
    states = TraceStates(traces)
    commits = np.stack((traces.state["commit_position"], traces.state["commit_token"]), axis=1)
    kinds = set()
    for length in (8, 20):
        indices = states.indices[states.lengths(states.indices) == length][::5]
        batch, paths = states.batch(indices, 6)
        for row, state in enumerate(indices.tolist()):
            end = states.first_state[states.block_of[state] + 1]
            follow = commits[state + 1 : min(end, state + 7)]
            count = int((paths.kind[row] >= 0).sum())
            assert count == len(follow) and (paths.kind[row, count:] == -1).all()
            assert np.array_equal(paths.positions[row, :count], follow[:, 0]) and np.array_equal(paths.tokens[row, :count], follow[:, 1])
            assert (batch.status[row, follow[:, 0]] == 3).all() and batch.status[row, commits[state, 0]] == 2
            for depth, (position, token) in enumerate(follow.tolist()):
                stale = paths.look_ahead[row, depth, position].tolist()
                kind = BEST if token == stale[0] else SECOND if token == stale[1] else OTHER
                assert paths.kind[row, depth] == kind
                kinds.add(kind)
    assert kinds == {BEST, SECOND, OTHER}
