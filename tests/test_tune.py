"""Measuring what passes cost, on a target with a clock of its own, and keeping it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from spot_dlm import tune
from spot_dlm.budget import AutoBudget, CostProfile, FixedBudget
from spot_dlm.drafters import Chain
from spot_dlm.interfaces import DecodeParams, MaskedLogits, TargetSpec
from spot_dlm.stats import Counts
from spot_dlm.transition import Sampling, UnmaskRule


@dataclass
class Clock:
    """Seconds of the wall, and those of them that belong to this process."""

    wall: float = 0.0
    own: float = 0.0

    def spend(self, ms: float, share: float = 1.0) -> None:
        self.wall += ms / share / 1e3
        self.own += ms / 1e3


@dataclass
class Cached:
    length: int


@dataclass
class Timed:
    """A target whose passes take `cost(rows, prefix)` milliseconds of a clock."""

    clock: Clock
    cost: Callable[[int, int], float]
    max_length: int = 4096
    fingerprint: str = "abc"
    share: Callable[[int], float] = lambda number: 1.0
    passes: list[tuple[int, int]] = field(default_factory=list)

    @property
    def spec(self) -> TargetSpec:
        known = ("timed", "toy", 16, 50, 49, frozenset({1}), self.max_length, torch.device("cpu"), "float32", 1)
        return TargetSpec(*known, fingerprint=self.fingerprint)

    def prefill(self, token_ids: np.ndarray, block_length: int) -> Cached:
        assert len(token_ids) % block_length == 0 and 49 not in token_ids
        if len(token_ids) > max(0, self.max_length - 2 * block_length):
            raise RuntimeError("no room")
        return Cached(len(token_ids))

    def evaluate(self, prefix: Cached, canvases: np.ndarray) -> MaskedLogits:
        assert 49 not in canvases and (canvases < 0).any(axis=1).all()
        self.passes.append((len(canvases), prefix.length))
        self.clock.spend(self.cost(len(canvases), prefix.length), self.share(len(self.passes)))
        return MaskedLogits(torch.zeros(1, 50), [0, 1])

    def commit(self, prefix: Cached, token_ids: np.ndarray) -> int:
        return 1

    def encode(self, text: str) -> list[int]:
        return [2, 3]

    def decode(self, token_ids: Sequence[int]) -> str:
        return ""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(tune, "perf_counter", lambda: clock.wall)
    monkeypatch.setattr(tune, "process_time", lambda: clock.own)
    return clock


def ramp(rows: int, prefix: int) -> float:
    return 2.0 + 0.5 * rows + prefix / 512


def trial(clock: Clock, share: float = 1.0, steps: Callable[[int], float] = lambda nodes: 1 + 0.5 * np.log2(nodes)) -> tune.Run:
    """Decodes of 60 steps: the loop takes 0.2 ms a pass and 0.1 ms a step, a draft 0.3 ms and 0.01 ms a node."""

    def run(nodes: int) -> Counts:
        passes = round(60 / steps(nodes))
        counts = Counts(nfe=passes, blocks=4, transitions=60, rows=passes * nodes, sequences=1)
        drafted = passes - 4 if nodes > 1 else 0
        counts.drafted, counts.offered, counts.reached = drafted * (nodes - 1), [drafted] * (nodes > 1), [drafted // 2] * (nodes > 1)
        target, draft, loop = passes * (2 + 0.5 * nodes), drafted * (0.3 + 0.01 * nodes), 0.2 * passes + 0.1 * 60
        counts.target_s, counts.draft_s, counts.total_s = (ms / share / 1e3 for ms in (target, draft, target + draft + loop))
        clock.spend(target + draft + loop, share)
        return counts

    return run


def test_what_is_measured(clock: Clock) -> None:
    target = Timed(clock, ramp)
    stages: list[tuple[int, int]] = []
    profile = tune.measure(target, Chain(), None, trial(clock), lambda *at: stages.append(at))
    assert profile.rows == tune.ROWS and profile.prefixes == tune.PREFIXES
    for prefix in profile.prefixes:
        assert [profile.cost(r, prefix) for r in (1, 5, 64)] == pytest.approx([ramp(r, prefix) for r in (1, 5, 64)], rel=0.03)
    assert (profile.host_ms, profile.token_ms) == pytest.approx((0.2, 0.1), rel=0.01)
    assert dict(profile.draft_ms) == pytest.approx({n: 0.3 + 0.01 * n for n in tune.TRIED_NODES if n > 1})
    assert [n for n, _ in profile.steps_per_pass] == [n for n, _ in profile.draft_ms] and profile.reached == pytest.approx((0.5,), rel=0.2)
    assert (profile.drafter, profile.device, profile.dtype, profile.threads, profile.block_length) == ("chain", "cpu", "float32", 1, 16)
    assert stages[0][0] == 0 and stages[-1][0] == stages[-1][1] == tune.stages(target.spec, 16)
    assert [a for a, _ in stages] == sorted(a for a, _ in stages) or tune._ROUNDS > 1
    assert clock.wall < 6


def test_without_decoding(clock: Clock) -> None:
    profile = tune.measure(Timed(clock, ramp), Chain(), 8)
    assert (profile.host_ms, profile.token_ms, profile.draft_ms, profile.steps_per_pass, profile.block_length) == (0.0, 0.0, (), (), 8)


def test_other_programs_hardly_matter(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = tune.measure(Timed(clock, ramp), Chain(), None, trial(clock))
    busy = tune.measure(Timed(clock, ramp, share=lambda n: 0.2 if n % 3 else 1.0), Chain(), None, trial(clock, share=0.4))
    assert np.array(busy.pass_ms) == pytest.approx(np.array(quiet.pass_ms), rel=0.03)
    assert busy.host_ms == pytest.approx(quiet.host_ms) and dict(busy.draft_ms) == pytest.approx(dict(quiet.draft_ms))
    monkeypatch.setattr(tune.torch, "get_num_threads", lambda: 2)  # several threads are measured by the wall
    spikes = tune.measure(Timed(clock, ramp, share=lambda n: 1.0 if n % 7 else 0.2), Chain())
    assert np.array(spikes.pass_ms)[:2, :8] == pytest.approx(np.array(quiet.pass_ms)[:2, :8], rel=0.03)


def test_passes_are_dearer_in_decoding(clock: Clock) -> None:
    """Where the runs' passes took longer than the measured ones, the curve is theirs, up to half as much again."""
    profile = tune.measure(Timed(clock, lambda rows, prefix: (2 + 0.5 * rows) / 1.2), Chain(), None, trial(clock))
    assert [profile.cost(r, 64) for r in (1, 8, 32)] == pytest.approx([2.5, 6, 18], rel=0.03)
    profile = tune.measure(Timed(clock, lambda rows, prefix: (2 + 0.5 * rows) / 9), Chain(), None, trial(clock))
    assert profile.cost(1, 64) == pytest.approx(2.5 / 6, rel=0.03)


def test_slow_devices_are_measured_briefly(clock: Clock) -> None:
    target = Timed(clock, lambda rows, prefix: 2000.0 + 1000 * rows)

    def run(nodes: int) -> Counts:
        raise AssertionError("decoding would take minutes")

    profile = tune.measure(target, Chain(), None, run)
    assert clock.wall < 30 and profile.prefixes == (64,)
    assert [profile.cost(r, 64) for r in (1, 2, 4, 64)] == pytest.approx([3000, 4000, 6000, 96000])


def test_slow_decoding_is_tried_once(clock: Clock) -> None:
    tried: list[int] = []

    def run(nodes: int) -> Counts:
        tried.append(nodes)
        counts = trial(clock)(nodes)
        return replace(counts, total_s=99.0, target_s=90.0)

    profile = tune.measure(Timed(clock, ramp), Chain(), None, run)
    assert tried == [tune.DEFAULT_NODES] and [n for n, _ in profile.draft_ms] == tried


def test_what_does_not_fit_the_memory_is_extrapolated(clock: Clock) -> None:
    def cost(rows: int, prefix: int) -> float:
        if rows * (prefix + 64) > 64 * 128:
            raise torch.OutOfMemoryError("no memory")
        return ramp(rows, prefix)

    profile = tune.measure(Timed(clock, cost), Chain())
    assert profile.prefixes == (64, 512, 2048)
    assert profile.cost(64, 64) == pytest.approx(ramp(64, 64)) and profile.cost(64, 2048) == pytest.approx(64 / 3 * ramp(3, 2048))

    class Short(Timed):
        def prefill(self, token_ids: np.ndarray, block_length: int) -> Cached:
            if len(token_ids) > 100:
                raise RuntimeError("CUDA error: out of memory")
            return super().prefill(token_ids, block_length)

    assert tune.measure(Short(clock, ramp), Chain()).prefixes == (64,)

    def none(rows: int, prefix: int) -> float:
        raise RuntimeError("no kernel")

    with pytest.raises(RuntimeError, match="no kernel"):
        tune.measure(Timed(clock, none), Chain())


@pytest.mark.parametrize(("max_length", "expected"), [(4096, (64, 512, 2048)), (600, (64, 512, 560)), (100, (64,)), (40, (0,)), (16, (0,))])
def test_prefixes_fit_the_context(clock: Clock, max_length: int, expected: tuple[int, ...]) -> None:
    assert tune.measure(Timed(clock, ramp, max_length), Chain()).prefixes == expected


# --- the cache --------------------------------------------------------------------------------------------------------------------

PROFILE = CostProfile((1, 4), (64,), ((1.0, 2.0),), drafter="chain")
PARAMS = DecodeParams()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tune, "_budgets", {})
    monkeypatch.setenv("SPOT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_kept_and_found_again(cache: Path) -> None:
    key = tune.profile_key(Timed(Clock(), ramp), Chain(), PARAMS)
    assert tune.load_profile(key) is None
    path = tune.save_profile(key, PROFILE)
    assert path is not None and path.parent == cache and tune.load_profile(key) == PROFILE
    assert [p.name for p in cache.iterdir()] == [path.name], "no partial files"
    assert json.loads(path.read_text())["key"] == key


@dataclass(frozen=True)
class Fitted(Chain):
    """A drafter that comes from a file."""

    file: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(about={"weights_sha256": "abc"}))


def test_a_key_for_everything_that_changes_the_cost() -> None:
    target = Timed(Clock(), ramp)
    keys = [
        tune.profile_key(target, Chain(), PARAMS),
        tune.profile_key(replace(target, fingerprint="def"), Chain(), PARAMS),
        tune.profile_key(target, Chain(coupled=False), PARAMS),
        tune.profile_key(target, Fitted(), PARAMS),
        tune.profile_key(target, Chain(), replace(PARAMS, block_length=8)),
        tune.profile_key(target, Chain(), replace(PARAMS, sampling=Sampling(temperature=1.0))),
        tune.profile_key(target, Chain(), replace(PARAMS, sampling=Sampling(temperature=1.0, top_p=0.9))),
    ]
    paths = {tune.profile_path(key) for key in keys}
    assert len(paths) == len(keys)
    assert tune.profile_key(target, Chain(), replace(PARAMS, max_new_tokens=7, rule=UnmaskRule(num_per_step=2))) == keys[0]
    assert {"threads", "device", "dtype", "torch"} <= keys[0].keys()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": "other"}', '{"format": "FORMAT", "key": 1, "profile": {}}', "KEY", "\x00\xff"])
def test_a_damaged_cache_is_said_and_not_used(cache: Path, text: str) -> None:
    key = tune.profile_key(Timed(Clock(), ramp), Chain(), PARAMS)
    path = tune.save_profile(key, PROFILE)
    assert path is not None
    broken = json.dumps({"format": tune.FORMAT, "key": key, "profile": {"rows": [1]}})
    path.write_text(broken if text == "KEY" else text.replace("FORMAT", tune.FORMAT), "latin-1")
    said: list[str] = []
    assert tune.load_profile(key, said.append) is None
    assert len(said) == 1 and "measured again" in said[0] and "\n" not in said[0]
    assert tune.save_profile(key, PROFILE) == path and tune.load_profile(key) == PROFILE


def test_a_cache_that_cannot_be_written_is_said(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.write_text("a file where the folder should be")
    key, said = tune.profile_key(Timed(Clock(), ramp), Chain(), PARAMS), []
    assert tune.load_profile(key, said.append) is None and tune.save_profile(key, PROFILE, said.append) is None
    assert said and "cannot be kept" in said[-1]
    monkeypatch.delenv("SPOT_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "expanduser", lambda self: (_ for _ in ()).throw(RuntimeError("Could not determine home directory.")))
    assert tune.load_profile(key, said.append) is None and tune.save_profile(key, PROFILE, said.append) is None
    assert "home directory" in said[-1]


def test_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SPOT_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/her")
    assert tune.cache_folder() == Path("/home/her/.cache/spot-dlm")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert tune.cache_folder() == Path("/cache/spot-dlm")
    monkeypatch.setenv("SPOT_CACHE", "~/own")
    assert tune.cache_folder() == Path("/home/her/own")


def test_budget_for(cache: Path, clock: Clock) -> None:
    target, said = Timed(clock, ramp), []
    assert tune.budget_for(target, Chain(), replace(PARAMS, nodes=3)) == FixedBudget(3)
    assert tune.budget_for(replace(target, fingerprint=""), Chain(), PARAMS, say=said.append) == FixedBudget(tune.DEFAULT_NODES)
    assert not target.passes and not said
    budget = tune.budget_for(target, Chain(), PARAMS, trial(clock), said.append)
    assert isinstance(budget, AutoBudget) and budget.profile.steps_per_pass and len(said) == 1 and "measuring" in said[0]
    measured = len(target.passes)
    assert tune.budget_for(target, Chain(), PARAMS, trial(clock), said.append) is budget, "what was learned is kept"
    other = tune.budget_for(target, Chain(), replace(PARAMS, rule=UnmaskRule(num_per_step=2)), say=said.append)
    assert isinstance(other, AutoBudget) and other is not budget and other.profile == budget.profile
    tune._budgets.clear()  # another process
    again = tune.budget_for(target, Chain(), PARAMS, trial(clock), said.append)
    assert isinstance(again, AutoBudget) and again is not budget and again.profile == budget.profile
    assert len(target.passes) == measured and len(said) == 1
    assert os.listdir(cache) == [tune.profile_path(tune.profile_key(target, Chain(), PARAMS)).name]


def test_one_slow_draft_does_not_make_all_drafts_slow() -> None:
    """A first draft that was compiled, or a busy moment: the curve stays at what the others took."""
    assert tune._rising([450.0, 0.7, 0.8, 0.75, 0.9]) == [0.7, 0.7, 0.75, 0.75, 0.9]
