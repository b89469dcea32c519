"""Benches: the memo target is the real one, the oracle bounds the chain, figures and intervals are what they say, divergences show."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cli.broken_targets import Uneven
from toy import SameRows, ToyTargetAdapter, unchecked

from spot_dlm.bench import passes, report, tradeoff
from spot_dlm.bench.bootstrap import accuracy, interval, ratio_interval, resample_counts, resampled_ratio, wilson
from spot_dlm.bench.cells import Cell, cells, comparisons, pooled
from spot_dlm.bench.drafters import FAMILIES, Entry, entries, in_order
from spot_dlm.bench.memo import MemoTarget
from spot_dlm.bench.oracle import Oracle
from spot_dlm.bench.passes import Grid, Run, Setting
from spot_dlm.bench.plot import passes_figure, tradeoff_figure
from spot_dlm.compare import first_divergence, standard_trajectory, trajectory
from spot_dlm.drafters import Chain, LeftToRight
from spot_dlm.interfaces import DecodeParams, Target
from spot_dlm.rules import parse_rule
from spot_dlm.state import MASKED
from spot_dlm.targets import load_target
from spot_dlm.tasks import load_prompts
from spot_dlm.transition import Sampling

PROMPTS = [load_prompts("json", limit=1)[0].prompt, load_prompts("python", limit=1)[0].prompt]


@pytest.fixture(scope="module")
def shipped() -> Target:
    return load_target()


def params(temperature: float, nodes: int = 8, rule: str = "standard", length: int = 24) -> DecodeParams:
    return DecodeParams(parse_rule(rule), Sampling(temperature=temperature), length, nodes)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_memo_target_is_the_real_one(shipped: Target, temperature: float) -> None:
    memo = MemoTarget(shipped)
    with unchecked():
        standard = standard_trajectory(shipped, PROMPTS[0], params(temperature))
        assert first_divergence(standard, standard_trajectory(memo, PROMPTS[0], params(temperature)), params(temperature).rule) is None
        evaluated = memo.evaluated
        assert evaluated == standard.result.counts.nfe
        for drafter in (Chain(), LeftToRight(), Oracle.of(standard)):
            real = trajectory(shipped, PROMPTS[0], drafter, params(temperature))
            remembered = trajectory(memo, PROMPTS[0], drafter, params(temperature))
            assert first_divergence(real, remembered, params(temperature).rule) is None
            assert (real.result.counts.nfe, real.result.counts.drafted) == (remembered.result.counts.nfe, remembered.result.counts.drafted)
    assert memo.evaluated == evaluated  # nothing but standard decoding's states was ever evaluated


def test_memo_rows_packed_and_unseen() -> None:
    toy = ToyTargetAdapter(SameRows(5, 4))
    memo = MemoTarget(toy)
    canvases = np.array([[1, MASKED, 2, MASKED], [1, 3, 2, MASKED]])
    prefixes = [t.prefill(np.arange(4), 4) for t in (memo, toy)]
    lazy, real = memo.evaluate(prefixes[0], canvases), toy.evaluate(prefixes[1], canvases)
    assert lazy.packed.equal(real.packed) and lazy.offsets == real.offsets and lazy.of(1).equal(real.of(1))
    assert memo.evaluated == 2 and prefixes[0].length == prefixes[1].length == 4
    unread = memo.evaluate(prefixes[0], np.full((1, 4), MASKED))
    memo.commit(prefixes[0], np.array([1, 2, 3, 4]))
    assert prefixes[0].length == 8
    with pytest.raises(RuntimeError, match="prefix had changed"):
        unread.of(0)


@pytest.mark.parametrize("rule", ["standard", "bfloat16", "k=2"])
def test_oracle_bounds_the_chains(shipped: Target, rule: str) -> None:
    for temperature in (0.0, 1.0):
        with unchecked():
            memo, chosen = MemoTarget(shipped), params(temperature, rule=rule)
            standard = standard_trajectory(memo, PROMPTS[0], chosen)
            runs = [trajectory(memo, PROMPTS[0], d, chosen) for d in (Oracle.of(standard), Chain(), LeftToRight())]
        assert all(first_divergence(standard, r, chosen.rule) is None for r in runs)
        assert runs[0].result.counts.nfe == min(r.result.counts.nfe for r in runs) < standard.result.counts.nfe


def test_oracle_of_another_prompt_is_harmless(shipped: Target) -> None:
    with unchecked():
        wrong = Oracle.of(standard_trajectory(shipped, PROMPTS[1], params(0.0)))
        standard = standard_trajectory(shipped, PROMPTS[0], params(0.0))
        assert first_divergence(standard, trajectory(shipped, PROMPTS[0], wrong, params(0.0)), params(0.0).rule) is None


def test_bootstrap() -> None:
    counts = resample_counts(7)
    assert (counts.sum(axis=1) == 7).all() and (resample_counts(7) == counts).all()
    rng = np.random.default_rng(1)
    numerator, denominator = rng.integers(10, 30, 40), rng.integers(5, 10, 40)
    low, high = ratio_interval(numerator, denominator)
    assert low < numerator.sum() / denominator.sum() < high
    naive = [numerator[i].sum() / denominator[i].sum() for i in (rng.integers(0, 40, 40) for _ in range(2000))]
    assert np.allclose((low, high), np.quantile(naive, [0.025, 0.975]), atol=0.02)
    assert ratio_interval(np.array([6]), np.array([3])) == (2.0, 2.0)
    better = resampled_ratio(numerator + denominator, denominator) - resampled_ratio(numerator, denominator)
    assert np.allclose(interval(better), 1.0)  # paired: the noise of the prompts cancels
    with pytest.raises(ValueError, match="at least 1"):
        resample_counts(0)


def run_of(task: str, prompt: str, drafter: str, nfe: int, family: str = "", problem: str = "") -> Run:
    setting = Setting(task, "float32", 16, 0.0)
    return Run(setting, prompt, drafter, family or drafter, 8, 20, nfe, 20, 7 * nfe, 2.5 * nfe, problem=problem)


def test_cells_comparisons_and_best_variants() -> None:
    table = {"chain": (10, 10), "calibrated": (8, 10), "calibrated-pruned": (8, 8), "linear": (6, 6), "order": (5, 5), "oracle": (4, 4)}
    runs = [
        run_of("json", f"p{i}", name, nfe, "spiffy" if name.startswith("cal") else "")
        for name, both in table.items()
        for i, nfe in enumerate(both)
    ]
    runs.append(replace(run_of("json", "p0", "order", 5, problem="block 0, step 3"), audit=True))
    found = {c.drafter: c for c in cells(runs)}
    assert found["spiffy"].variant == "calibrated-pruned" and found["spiffy"].acceptance_length == 40 / 16
    row = found["order"].to_dict()
    assert row["acceptance_length"] == row["low"] == row["high"] == row["nfe_reduction"] == 4.0 and row["prompts"] == 2
    assert row["identical"] is False and found["chain"].to_dict()["identical"] is True
    assert row["expected_acceptance_length"] == 2.5
    (comparison,) = comparisons(list(found.values()))
    assert comparison["best_baseline"] == "spiffy" and comparison["difference"] == comparison["low"] == 1.5
    assert comparison["oracle_share"] == 0.8 and comparison["linear"]["ratio"] == pytest.approx(1.2)
    assert comparisons([found["chain"], found["oracle"]]) == []
    both = pooled([*runs[:2], replace(runs[0], setting=replace(runs[0].setting, task="python"))])
    assert [(c.setting.task, len(c.runs)) for c in both] == [("all", 3)] and isinstance(both[0], Cell)


def test_a_broken_target_is_not_identical() -> None:
    grid = Grid(limit=1, temperatures=(0.0,), nodes=(2, 4), resolutions=("float32",), max_new_tokens=12)
    compared = entries(["root", "chain"])[0]
    with unchecked():
        audited = passes.run(Uneven(0.25, 9.0), grid, compared)
        real = passes.run(Uneven(0.25, 9.0), replace(grid, real=True), compared)
        whole = passes.run(Uneven(0.25), grid, compared)
    assert [(r.drafter, r.nodes) for r in audited if r.problem] == [("chain", 4)] and audited[-1].audit
    assert [(r.drafter, r.nodes, "real" in r.problem) for r in real if r.problem] == [("chain", 2, True), ("chain", 4, True)]
    assert len(whole) == passes.count_runs(grid, 1, compared) == 5 and not any(r.problem for r in whole)


def test_run_reports_every_prompt(shipped: Target) -> None:
    grid = Grid(("rewrite",), limit=1, temperatures=(1.0,), nodes=(4,), max_new_tokens=8, block_lengths=(16, 32))
    seen: list[Run] = []
    with unchecked():
        runs = passes.run(shipped, grid, entries(["chain", "oracle"])[0], seen.append)
    assert seen == runs and len(runs) == passes.count_runs(grid, 1, entries(["chain", "oracle"])[0]) == 2 * 2 * 3
    assert not any(r.problem for r in runs) and {r.setting.block_length for r in runs} == {16, 32}
    document = {"cells": [c.to_dict() for c in cells(runs)], "pooled": [], "comparisons": [], "command": "x", "intervals": "y"}
    assert "| chain | " in report.passes_markdown(document) and passes_figure(document).startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tasks": ("poetry",)}, "task='poetry' is unknown"),
        ({"tasks": ()}, "task is empty"),
        ({"nodes": (0,)}, "nodes=0 must be"),
        ({"nodes": ()}, "nodes is empty"),
        ({"nodes": (2, 2)}, "names a value twice"),
        ({"resolutions": ("float8",)}, "resolution='float8' is unknown"),
        ({"split": "training"}, "split='training' is unknown"),
        ({"temperatures": (-1.0,)}, "temperature=-1"),
        ({"limit": 0}, "limit=0 must be at least 1"),
        ({"audit": -1}, "audit=-1"),
    ],
)
def test_bad_grids(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Grid(**change)


def test_bad_drafters_and_prompts(shipped: Target) -> None:
    with pytest.raises(ValueError, match="drafter='crystal' is unknown; choose one of root"):
        entries(["crystal"])
    with pytest.raises(ValueError, match=r"graph|version"):
        entries(["spiffy"], [Path("/nowhere/graph.json")])
    found, missing = entries([*FAMILIES, "chain"], optional=True)
    assert {"root", "chain", "oracle"} <= {e.label for e in found} and all("left out" in remark for remark in missing)
    assert in_order(["x", "oracle", "root", "x"]) == ["root", "oracle", "x"]
    only_sampled = [Entry("x", "x", lambda *_: Chain(), only_sampled=True)]
    with pytest.raises(ValueError, match="no drafter"):
        passes.run(shipped, Grid(), only_sampled)
    with pytest.raises(ValueError, match="context holds"):
        passes.run(shipped, Grid(max_new_tokens=5000), entries(["chain"])[0])


def test_files_are_checked_first(tmp_path: Path) -> None:
    report.check_writable(None)
    report.check_writable(tmp_path / "new.json")
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="not a regular file"):
        report.check_writable(tmp_path)
    with pytest.raises(ValueError, match="cannot be written"):
        report.check_writable(tmp_path / "missing" / "new.json")


def test_tradeoff(shipped: Target) -> None:
    plan = tradeoff.Plan(("json", "rewrite"), limit=1, rules=("k=4", "threshold=0.9"), max_new_tokens=32, repeats=2)
    with unchecked():
        answers = tradeoff.run(shipped, plan)
    assert len(answers) == tradeoff.count_answers(plan) == 2 * 5
    rows = {r["method"]: r for r in tradeoff.rows(answers) if r["task"] == "all"}
    assert list(rows) == ["standard", "k=4", "threshold=0.9", "chain on standard", "chain on threshold=0.9"]
    assert rows["standard"]["speed_up"] == 1 and rows["standard"]["same_answers"] == 1 and rows["standard"]["prompts"] == 2
    assert rows["chain on standard"]["same_answers"] == 1 and rows["chain on standard"]["accuracy"] == rows["standard"]["accuracy"]
    assert all(r["identical_to_rule"] for r in rows.values())
    assert rows["k=4"]["tokens_per_pass"] > rows["chain on standard"]["tokens_per_pass"] > rows["standard"]["tokens_per_pass"]
    document = {"rows": list(rows.values()), "command": "x"}
    assert "chain on standard" in report.tradeoff_markdown(document) and tradeoff_figure(document).startswith(b"\x89PNG")


def test_wilson_and_bad_plans() -> None:
    low, high = wilson(8, 10)
    assert (low, high) == (pytest.approx(0.4902, abs=1e-3), pytest.approx(0.9433, abs=1e-3))
    assert wilson(0, 5)[0] == 0 and wilson(5, 5)[1] == 1
    assert accuracy([True, None, False]) == {
        "graded": 2, "right": 1, "accuracy": 0.5, **dict(zip(("accuracy_low", "accuracy_high"), wilson(1, 2), strict=True))
    }  # fmt: skip
    assert accuracy([None]) == {"graded": 0, "right": 0, "accuracy": None, "accuracy_low": None, "accuracy_high": None}
    for change, message in [
        ({"tasks": ("poetry",)}, "task='poetry'"), ({"temperatures": ()}, "temperature is empty"), ({"repeats": 0}, "repeats=0"),
        ({"base": "crystal"}, "drafter='crystal'"), ({"rules": ("k=x",)}, "k=x"), ({"nodes": 0}, "nodes=0"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=message):
            tradeoff.Plan(**change)
