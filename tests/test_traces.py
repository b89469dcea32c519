"""Recording: what is written is what standard decoding does, interrupted and parallel recordings are the same bytes, damage is named."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from toy import unchecked

from spot_dlm.artifacts import NOISE_VERSION
from spot_dlm.decode import decode_steps, generate
from spot_dlm.drafters import Root
from spot_dlm.drafters.stale import stale_candidates
from spot_dlm.interfaces import DraftContext, Target
from spot_dlm.noise import CoupledNoise
from spot_dlm.outputs import read_outputs
from spot_dlm.record import Recording, TraceSetting, bytes_per_token, record
from spot_dlm.sequence import BlockStarted, Pass
from spot_dlm.targets import load_target
from spot_dlm.traces import COLUMNS, FORMAT, Traces, read_traces

PROMPTS = [
    {"id": "a", "family": "json", "prompt": "To JSON: Anna Berg is 34 years old and lives in Oslo."},
    {"id": "b", "family": "arithmetic", "prompt": "Add 47 and 38."},
    {"prompt_ids": [5, 6, 7, 8, 9, 10]},
]
SETTINGS = [
    TraceSetting(rule, temperature, block_length=length, max_new_tokens=8)
    for rule, temperature, length in (("standard", 0.0, 16), ("bfloat16", 1.0, 16), ("standard", 1.0, 32), ("confidence=margin", 0.7, 8))
]
MANY = Recording("shipped", [{"prompt_ids": [5 + i % 60, 7]} for i in range(66)], [TraceSetting("standard", 1.0, 1.0, 0, 4, 2)])
"""Two shards, quickly."""


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target()


@pytest.fixture(scope="module", autouse=True)
def fast() -> Iterator[None]:
    with unchecked():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, target: Target) -> Path:
    folder = tmp_path_factory.mktemp("traces") / "few"
    record(Recording("shipped", PROMPTS, SETTINGS, seed=3), folder, target=target, command="spot trace ...")
    return folder


@pytest.fixture(scope="module")
def traces(folder: Path) -> Traces:
    return read_traces(folder)


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory, target: Target) -> Path:
    folder = tmp_path_factory.mktemp("traces") / "many"
    record(MANY, folder, target=target)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def test_tables_fit_together(traces: Traces, folder: Path) -> None:
    sequence, block, state = traces.sequence, traces.block, traces.state
    assert len(sequence["blocks"]) == len(PROMPTS) * len(SETTINGS)
    assert sequence["blocks"].sum() == len(block["index"]) and block["states"].sum() == len(state["step"])
    assert state["rows"].sum() == len(traces.row["fine"]) and traces.offsets("ahead")[-1] == len(traces.ahead["margin"])
    lengths = np.array([s["block_length"] for s in traces.settings])[traces.setting_of_block()]
    assert (block["states"] == lengths - block["tail"]).all(), "every position of a block is committed"
    first = traces.offsets("block")[:-1]
    assert (state["step"][first] == 0).all() and (state["rows"][first] == lengths - block["tail"]).all()
    assert [p["id"] for p in traces.prompts] == ["a", "b", 2] and traces.prompts[0]["family"] == "json"
    assert traces.manifest["target"]["fingerprint"] and traces.manifest["noise_version"] == NOISE_VERSION
    assert traces.manifest["command"] == "spot trace ..."
    entry = traces.manifest["shards"][0]
    data = (folder / entry["file"]).read_bytes()
    assert entry["bytes"] == len(data) and entry["sha256"] == hashlib.sha256(data).hexdigest()


def decodes(traces: Traces) -> Iterator[tuple[int, dict, TraceSetting, int]]:
    """(first block, prompt, setting, noise key) of every recorded sequence."""
    blocks = traces.offsets("sequence")
    for number, (prompt, setting) in enumerate(zip(traces.sequence["prompt"], traces.sequence["setting"], strict=True)):
        yield int(blocks[number]), PROMPTS[prompt], SETTINGS[setting], int(prompt) * len(SETTINGS) + int(setting)


def test_commits_are_those_of_generate(traces: Traces, target: Target) -> None:
    states = traces.offsets("block")
    for number, (first, prompt, setting, key) in enumerate(decodes(traces)):
        result = generate(target, prompt.get("prompt", prompt.get("prompt_ids")), Root(), setting.params(3, key))
        begin, end = states[first], states[first + traces.sequence["blocks"][number]]
        block = np.repeat(traces.block["index"], traces.block["states"])[begin:end]
        state = {k: v[begin:end] for k, v in traces.state.items()}
        position = block * setting.block_length + state["commit_position"]
        recorded = list(zip(position.tolist(), state["commit_token"].tolist(), block.tolist(), state["step"].tolist(), strict=True))
        assert recorded == [(c.position, c.token, c.block, c.step) for c in result.order]
        assert traces.sequence["tokens"][number] == len(result.token_ids)


def test_rows_and_look_ahead_are_those_of_the_stale_drafters(traces: Traces, target: Target) -> None:
    """Stale candidates of every depth over the whole vocabulary: the same tokens wherever they are among the kept ones."""
    rows, ahead = traces.offsets("state"), traces.offsets("ahead")
    same = total = 0
    state = 0
    for _, prompt, setting, key in decodes(traces):
        params = setting.params(3, key)
        noise = CoupledNoise(3, key, params.rule.noise_step)
        for event in decode_steps(target, prompt.get("prompt", prompt.get("prompt_ids")), Root(), params):
            if isinstance(event, BlockStarted):
                history = []
            if not isinstance(event, Pass):
                continue
            transition, logits = event.acceptance.transitions[0], event.acceptance.logits
            history.append(transition)
            at = slice(rows[state], rows[state + 1])
            outputs = read_outputs(transition.before.masked, logits, params.sampling)
            assert (traces.row["position"][at] == transition.before.masked).all()
            assert (traces.row["token"][at] == transition.candidates.tokens).all()
            assert (traces.row["fine"][at] == transition.candidates.fine).all()
            assert (traces.row["logp"][at] == outputs.logp[:, :8]).all() and (traces.row["ids"][at] == outputs.ids[:, :2]).all()
            assert (traces.row["log_rest"][at] == outputs.log_rest).all() and (traces.row["entropy"][at] == outputs.entropy).all()
            left, depths = len(transition.state.masked), int(traces.state["ahead_depths"][state])
            assert depths == (min(left, 16) if params.sampling.temperature > 0 else 0)
            context = DraftContext(transition, logits, params.rule, params.sampling, noise, tuple(history))
            entries = traces.ahead["tokens"][ahead[state] : ahead[state + 1], 0].reshape(depths, left) if depths else None
            kept = outputs.take(np.flatnonzero(transition.before.masked != transition.positions[0])).ids
            for depth, stale in enumerate(stale_candidates(context, depths or min(left, 1), coupled=True)):
                recorded = kept[:, 0] if entries is None else entries[depth]
                inside = (kept == stale.tokens[:, None]).any(1)
                assert (recorded[inside] == stale.tokens[inside]).all()
                same, total = same + int(inside.sum()), total + len(inside)
            state += 1
    assert state == len(traces.state["step"]) and same >= 0.8 * total


class Stop(Exception):
    pass


def test_an_interrupted_recording_resumes_to_the_same_bytes(many: Path, tmp_path: Path, target: Target) -> None:
    def stop(done: int, total: int) -> None:
        if done >= 65:
            raise Stop

    with pytest.raises(Stop):
        record(MANY, tmp_path / "t", progress=stop, target=target)
    assert set(contents(tmp_path / "t")) == {"plan.json", "shard-00000.npz"}
    with pytest.raises(ValueError, match="unfinished"):
        read_traces(tmp_path / "t")
    (tmp_path / "t" / ".shard-00001.npz.7.partial").write_bytes(b"of a killed process")
    seen: list[tuple[int, int]] = []
    record(MANY, tmp_path / "t", progress=lambda *p: seen.append(p), target=target)
    assert contents(tmp_path / "t") == contents(many) and seen == [(64, 66), (65, 66), (66, 66)]


def test_two_workers_record_the_same_bytes(many: Path, tmp_path: Path, target: Target) -> None:
    seen: list[tuple[int, int]] = []
    record(MANY, tmp_path / "t", workers=2, progress=lambda *p: seen.append(p), target=target)
    assert contents(tmp_path / "t") == contents(many)
    assert seen[0] == (0, 66) and seen[-1] == (66, 66) and seen == sorted(seen)


def test_damage_is_one_clear_error(many: Path, tmp_path: Path) -> None:
    def copy(name: str) -> Path:
        (tmp_path / name).mkdir()
        for file, data in contents(many).items():
            (tmp_path / name / file).write_bytes(data)
        return tmp_path / name / "shard-00001.npz"

    shard = copy("truncated")
    shard.write_bytes(shard.read_bytes()[:-10])
    changed = copy("changed")
    data = bytearray(changed.read_bytes())
    data[len(data) // 2] ^= 1
    changed.write_bytes(data)
    copy("missing").unlink()
    for name in ("truncated", "changed", "missing"):
        with pytest.raises(ValueError, match=r"shard-00001\.npz: missing or not the file that the manifest describes"):
            read_traces(tmp_path / name)
    damaged = copy("damaged")
    damaged.write_bytes(b"x" * damaged.stat().st_size)
    with pytest.raises(ValueError, match=r"shard-00001\.npz: damaged"):
        read_traces(tmp_path / "damaged", check=False)
    (copy("no-manifest").parent / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"no manifest\.json: the recording is unfinished"):
        read_traces(tmp_path / "no-manifest")
    with pytest.raises(ValueError, match="no such folder"):
        read_traces(tmp_path / "nowhere")
    manifest = copy("newer").parent / "manifest.json"
    manifest.write_text(manifest.read_text("utf-8").replace(FORMAT, "spot-traces/9"), "utf-8")
    with pytest.raises(ValueError, match="spot-traces/9"):
        read_traces(tmp_path / "newer")


def test_other_folders_are_refused(many: Path, tmp_path: Path, target: Target) -> None:
    before = contents(many)
    other = Recording("shipped", MANY.prompts, MANY.settings, seed=1)
    with pytest.raises(ValueError, match=r"another recording \(other seed, see its plan\.json\)"):
        record(other, many, target=target)
    (tmp_path / "note.txt").write_text("mine", "utf-8")
    with pytest.raises(ValueError, match="not empty and holds no recording"):
        record(MANY, tmp_path, target=target)
    assert contents(many) == before and contents(tmp_path) == {"note.txt": b"mine"}


def test_bad_recordings() -> None:
    for rule in ("k=2", "threshold=0.9"):
        with pytest.raises(ValueError, match="traces need one per step"):
            TraceSetting(rule)
    for rule in ("random", "order_temperature=0.5"):
        with pytest.raises(ValueError, match="draws the order of positions: no model can learn it"):
            TraceSetting(rule)
    with pytest.raises(ValueError, match="temperature"):
        TraceSetting(temperature=-1)
    with pytest.raises(ValueError, match="nothing to record"):
        Recording("shipped", [], SETTINGS)
    with pytest.raises(ValueError, match="nothing to record"):
        Recording("shipped", PROMPTS, [])
    with pytest.raises(ValueError, match="workers=0"):
        record(MANY, Path("/nowhere"), workers=0)


def test_a_prompt_that_does_not_fit_is_named(tmp_path: Path, target: Target) -> None:
    long = Recording("shipped", [{"id": "long one", "prompt_ids": [5] * 100_000}], SETTINGS)
    with pytest.raises(ValueError, match=r"prompt long one: .*context holds"):
        record(long, tmp_path / "t", target=target)
    assert set(contents(tmp_path / "t")) == {"plan.json"}


def test_spread_and_estimate(traces: Traces) -> None:
    spread = Recording("shipped", [{"prompt_ids": [5]}] * 8, SETTINGS, spread=True)
    assert len(spread.jobs) == 8 and sorted(s for _, s in spread.jobs) == [0, 0, 1, 1, 2, 2, 3, 3]
    whole = traces.block["tail"] == 0
    length = np.array([s["block_length"] for s in traces.settings])[traces.setting_of_block()]
    sizes = {t: sum(np.dtype(d).itemsize * math.prod(n) for d, n in columns.values()) for t, columns in COLUMNS.items()}
    assert 500 < bytes_per_token(16, False, 16) < 550 and 5400 < bytes_per_token(32, True, 16) < 5700
    first, rows, ahead = (traces.offsets(t) for t in ("block", "state", "ahead"))
    for block in np.flatnonzero(whole)[:20]:
        begin, end = first[block], first[block + 1]
        actual = sizes["block"] + sizes["state"] * (end - begin)
        actual += sizes["row"] * (rows[end] - rows[begin]) + sizes["ahead"] * (ahead[end] - ahead[begin])
        sampled = traces.settings[traces.setting_of_block()[block]]["temperature"] > 0
        assert bytes_per_token(int(length[block]), sampled, 16) * length[block] == pytest.approx(actual)


def test_manifest_is_plain_json(folder: Path) -> None:
    document = json.loads((folder / "manifest.json").read_text("utf-8"))
    assert document["format"] == FORMAT and document["seed"] == 3
    assert [s["block_length"] for s in document["settings"]] == [16, 16, 32, 8]
