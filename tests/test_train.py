"""Training on tiny traces: it learns, resumes to the bit, refuses what does not fit, and its validation is real decoding."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from toy import unchecked
from trace_toys import SMALL, random_model, record_toy, saved_model, settled_target, toy_recording

from spot_dlm.checkpoint import interrupted_run
from spot_dlm.decode import generate
from spot_dlm.drafter_files import load_order_model
from spot_dlm.drafters.order import Order
from spot_dlm.order_model import OrderConfig, OrderModel
from spot_dlm.record import Recording, TraceSetting
from spot_dlm.simulate import draft_outcomes, simulate
from spot_dlm.trace_states import TraceStates
from spot_dlm.traces import Traces
from spot_dlm.train import DEFAULTS, TrainParams, split_sequences, train, validation_blocks
from spot_dlm.train_plots import EDGES, measure, report

SETTINGS = [TraceSetting(r, t, block_length=12, max_new_tokens=24) for r in ("standard", "bfloat16") for t in (0.0, 1.0)]
PARAMS = TrainParams(kind="order", steps=12, positions=96, depths=6, eval_every=4)


@pytest.fixture(scope="module")
def recording() -> Recording:
    return toy_recording(6, SETTINGS, seed=1)


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory, recording: Recording) -> Traces:
    with unchecked():
        return record_toy(tmp_path_factory.mktemp("traces") / "t", recording, settled_target())


def run(traces: Traces, out: Path, params: TrainParams = PARAMS, progress: Callable = lambda step, row: None, **more: object) -> dict:
    config = replace(SMALL, kind=params.kind) if params.kind == "order" else OrderConfig(kind="linear")
    return train(traces, out, params, config, progress, **more)


@pytest.mark.parametrize("kind", ["order", "linear"])
def test_loss_falls(tmp_path: Path, traces: Traces, kind: str) -> None:
    """With the run-time shape checks on."""
    rows = []
    params = TrainParams(kind=kind, steps=30, positions=192, depths=6, eval_every=15, adam_lr=0.03)
    about = run(traces, tmp_path / "d", params, lambda step, row: rows.append(row["order_loss"] + row["token_loss"]))
    assert np.mean(rows[-5:]) < np.mean(rows[:5]) - 0.05
    assert [row["step"] for row in about["history"]] == [15, 30] and about["best_step"] in (15, 30)
    assert about["best"]["score"] == max(row["score"] for row in about["history"]) >= 1
    assert json.loads((tmp_path / "d" / "training.json").read_text()) == about
    read = load_order_model(tmp_path / "d")
    assert read.model.config.kind == kind and read.about["training"]["best_step"] == about["best_step"]
    assert (about["params"]["kind"], len(read.about["trace_settings"])) == (kind, 4)


@pytest.mark.parametrize("bfloat16", [False, True])
def test_resumed_equals_uninterrupted(tmp_path: Path, traces: Traces, bfloat16: bool) -> None:
    def stop(step: int, row: dict) -> None:
        if step == 7:
            raise KeyboardInterrupt

    params = replace(PARAMS, bfloat16=bfloat16)
    with unchecked():
        whole = run(traces, tmp_path / "whole", params)
        with pytest.raises(KeyboardInterrupt):
            run(traces, tmp_path / "cut", params, stop)
        assert not (tmp_path / "cut" / "config.json").exists()
        steps, saved = interrupted_run(tmp_path / "cut") or (0, {})
        assert steps == 4 and TrainParams(**saved) == params
        first = []
        resumed = run(traces, tmp_path / "cut", params, lambda step, row: first.append(step))
    assert first == list(range(5, 13)) and resumed["history"] == whole["history"]
    one, other = (load_order_model(tmp_path / name).model.state_dict() for name in ("whole", "cut"))
    assert all(torch.equal(one[k], other[k]) for k in one)
    with unchecked():
        again = run(traces, tmp_path / "whole", params)
    assert {k: v for k, v in again.items() if k != "seconds"} == {k: v for k, v in whole.items() if k != "seconds"}


@pytest.mark.parametrize("kind", ["order", "linear"])
def test_fine_tuning_begins_where_the_drafter_is(tmp_path: Path, traces: Traces, kind: str) -> None:
    """A step of almost no size leaves the weights where they were; the run belongs to them and to no others."""
    params = replace(PARAMS, kind=kind, steps=2, eval_every=2)
    with unchecked():
        run(traces, tmp_path / "first", replace(params, adam_lr=0.05))
        initial = load_order_model(tmp_path / "first")
        still = replace(params, adam_lr=1e-9, muon_lr=1e-9)
        about = run(traces, tmp_path / "tuned", still, initial=initial)
        assert about["initial"] == initial.about["weights_sha256"]
        tuned, before = load_order_model(tmp_path / "tuned").model.state_dict(), initial.model.state_dict()
        assert all(torch.allclose(tuned[k], before[k], atol=1e-5) for k in before if k != "sharpness")
        fresh = OrderModel(initial.model.config).state_dict()
        assert not all(torch.allclose(fresh[k], before[k], atol=1e-3) for k in before)
        with pytest.raises(ValueError, match="belongs to a run with other initial"):
            run(traces, tmp_path / "tuned", still)
        with pytest.raises(ValueError, match="cannot begin as one of kind"):
            run(traces, tmp_path / "other", replace(still, kind="linear" if kind == "order" else "order"), initial=initial)


def test_refusals(tmp_path: Path, traces: Traces) -> None:
    with unchecked():
        run(traces, tmp_path / "d")
        with pytest.raises(ValueError, match=r"other params .steps=12 there, 13 here"):
            run(traces, tmp_path / "d", replace(PARAMS, steps=13))
        changed = replace(traces, manifest={**traces.manifest, "shards": [{"sha256": "other"}]})
        with pytest.raises(ValueError, match="belongs to a run with other traces; give another --out"):
            run(changed, tmp_path / "d")
        checkpoint = tmp_path / "d" / "checkpoint.pt"
        for data in (checkpoint.read_bytes()[:-1000], b"", b"nonsense"):
            checkpoint.write_bytes(data)
            with pytest.raises(ValueError, match=r"checkpoint.pt: damaged .*; delete it to start again"):
                run(traces, tmp_path / "d")
        broken = replace(traces, row={**traces.row, "entropy": traces.row["entropy"] * np.nan})
        with pytest.raises(ValueError, match="the loss is nan at step 0: the traces hold broken numbers"):
            run(broken, tmp_path / "nan")
        one = replace(traces, sequence={**traces.sequence, "prompt": traces.sequence["prompt"] * 0})
        with pytest.raises(ValueError, match="one prompt only"):
            run(one, tmp_path / "one")


@pytest.mark.parametrize("change", [{"steps": 0}, {"positions": 0}, {"adam_lr": 0.0}, {"discount": 20.0}, {"decay": 0.0}])
def test_bad_params(change: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        TrainParams(**change)
    assert all(TrainParams(kind=kind, **more).kind == kind for kind, more in DEFAULTS.items())


def test_split_keeps_prompts_apart(traces: Traces) -> None:
    prompts = traces.sequence["prompt"]
    splits = set()
    for seed in range(4):
        ours, held = split_sequences(traces, seed)
        assert sorted([*ours, *held]) == list(range(len(prompts))) and len(held)
        assert not set(prompts[ours]) & set(prompts[held])
        splits.add(tuple(held))
    assert len(splits) > 1
    states = TraceStates(traces)
    assert set(states.sequence_of_block[validation_blocks(states, 0)]) == set(split_sequences(traces, 0)[1])


@pytest.mark.parametrize("nodes", [2, 8, 32])
def test_simulation_is_decoding(tmp_path: Path, traces: Traces, recording: Recording, nodes: int) -> None:
    """Passes and transitions of every sequence; the linear score reads no effects, so plain traces say all."""
    folder = saved_model(tmp_path / "d", random_model("linear", scale=0.2))
    read, states = load_order_model(folder), TraceStates(traces)
    blocks = np.arange(len(traces.block["index"]))
    with unchecked():
        outcome = simulate(read.model, states, blocks, [nodes])[nodes]
        for number, (p, s) in enumerate(recording.jobs):
            params = replace(recording.settings[s].params(recording.seed, p * len(SETTINGS) + s), nodes=nodes)
            counts = generate(settled_target(), recording.prompts[p]["prompt_ids"], Order(read), params).counts
            at = states.sequence_of_block == number
            assert (outcome.passes[at].sum(), outcome.transitions[at].sum()) == (counts.nfe, counts.transitions), (p, s)
    assert outcome.acceptance_length > 1.2


def test_draft_outcomes_are_decoding(tmp_path: Path) -> None:
    """Where a speculative decoder recorded with its effects, every draft's outcome is the distance to the next state that drafted."""
    folder = saved_model(tmp_path / "d", random_model("order", scale=0.2))
    with unchecked():
        speculative = record_toy(tmp_path / "t", toy_recording(3, SETTINGS, drafter=str(folder), nodes=(8,)), settled_target())
        states = TraceStates(speculative)
        made = draft_outcomes(load_order_model(folder).model, states, states.drafted, [8])[8][0]
    end = states.first_state[states.block_of[states.drafted] + 1]
    for at, state in enumerate(states.drafted.tolist()):
        follows = at + 1 < len(made) and states.drafted[at + 1] < end[at]
        if follows:
            assert made[at] == states.drafted[at + 1] - state, at
        else:
            assert made[at] >= end[at] - 2 - state, at
    assert made.mean() > 1.2


def test_reliability(tmp_path: Path, traces: Traces) -> None:
    """The histogram holds every drafted node once, and its sums are those of the simulation."""
    model, states = random_model("linear", scale=0.2), TraceStates(traces)
    blocks = np.arange(len(traces.block["index"]))
    found = measure(model, states, blocks)
    outcome = simulate(model, states, blocks, [32])[32]
    reach, hits = (sum(b["nodes"] * b[k] for t in found["reach"].values() for b in t) for k in ("predicted", "realised"))
    passes = outcome.passes.sum()
    assert reach == pytest.approx(outcome.expected.sum() - passes) and hits == pytest.approx(outcome.transitions.sum() - passes)
    assert set(found["reach"]) == {"0", "1"} and {b["from"] for t in found["reach"].values() for b in t} <= set(EDGES.tolist())
    assert {(r["family"], r["rule"], r["temperature"]) for r in found["acceptance"]} == {
        (f, s.rule, s.temperature) for f in "ab" for s in SETTINGS
    }
    assert sum(r["blocks"] for r in found["acceptance"]) == len(blocks)


def test_report(tmp_path: Path, traces: Traces, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    with unchecked():
        run(traces, tmp_path, replace(PARAMS, steps=4))
        remarks: list[str] = []
        with monkeypatch.context() as without:
            without.setitem(sys.modules, "matplotlib.figure", None)
            found = report(traces, tmp_path, remarks.append)
        assert len(remarks) == 1 and "matplotlib is not installed" in remarks[0] and not list(tmp_path.glob("*.png"))
        assert json.loads((tmp_path / "training.json").read_text())["reliability"] == found
        report(traces, tmp_path, remarks.append)
    assert len(remarks) == 1 and all((tmp_path / f"{n}.png").read_bytes().startswith(b"\x89PNG") for n in ("loss", "reliability"))
