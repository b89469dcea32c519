"""The speed benchmark: prompts of the right length, every method in turn, figures that add up, divergences that show."""

import importlib
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from cli.broken_targets import Uneven
from toy import SameRows, ToyTargetAdapter, unchecked

from spot_dlm.bench import speed, speed_figures, speed_plot
from spot_dlm.bench.speed import Clock, Sample, prompts_of
from spot_dlm.bench.speed_plan import PLAIN, Method, Plan, Setting, methods
from spot_dlm.budget import AutoBudget, CostProfile
from spot_dlm.drafters import Chain, LeftToRight
from spot_dlm.stats import Counts
from spot_dlm.targets import load_target
from spot_dlm.tasks import load_prompts

SETTING = Setting("json", 0.0, "standard", 8, 1, 64)
SMALL = Plan(("json",), (Method("chain", 4),), limit=1, batches=(1,), prefixes=(0,), max_new_tokens=12, repeats=1, rules=("standard",))


def test_prompts_have_as_many_tokens_as_asked() -> None:
    target = load_target()
    texts = [p.prompt for p in load_prompts("json", limit=3)]
    own = [target.encode(t) for t in texts]
    assert prompts_of(target, replace(SMALL, limit=3), replace(SETTING, prefix=0)) == own
    short, full = (prompts_of(target, replace(SMALL, limit=2), replace(SETTING, batch=2, prefix=p)) for p in (4, 300))
    assert short == own[:2]  # a prompt that is longer already stays as it is
    assert [len(ids) for ids in full] == [300, 300] and full[0][-len(own[0]) :] == own[0]
    filler = full[0][: 300 - len(own[0])]
    assert target.decode(filler).endswith(texts[1]) or texts[1] in target.decode(filler)
    assert not target.spec.stop_ids & set(filler) and target.spec.mask_token_id not in filler
    with pytest.raises(ValueError, match="json, prefix 5000: prompt of 5000 tokens"):
        prompts_of(target, SMALL, replace(SETTING, prefix=5000))
    many = prompts_of(target, SMALL, replace(SETTING, batch=101, prefix=0))
    assert len(many) == 101 and many[100] == many[0]


def test_every_method_runs_in_turn_and_is_compared() -> None:
    chosen = (Method("chain", 4), Method("chain", 4, boundary=False), Method("chain", "auto"), Method("ltr", 2))
    plan = replace(SMALL, methods=chosen, limit=2, batches=(1, 2), temperatures=(1.0,), repeats=2, prefixes=(100,))
    clock, seen = Clock(), []
    with unchecked():
        target = ToyTargetAdapter(SameRows(12, 8))
        drafters = {"chain": Chain(), "ltr": LeftToRight()}
        samples = speed.run(target, plan, drafters, lambda sample, share: seen.append((sample, share)), clock)
        without = speed.run(target, replace(SMALL, methods=chosen, temperatures=(0.0,)), {"ltr": LeftToRight()})
    assert [s for s, _ in seen] == samples and len(samples) == sum(plan.num_runs(s) for s in plan.settings(target.spec))
    assert seen[-1][1] == pytest.approx(1) and all(a[1] < b[1] for a, b in pairwise(seen))
    assert clock.tuning_s > 0 and not any(s.problem for s in samples)
    assert all(sum(s.parts.values()) == pytest.approx(s.seconds) and min(s.parts.values()) >= 0 for s in samples)
    here = [s for s in samples if s.setting == replace(SETTING, temperature=1.0, prefix=100)]
    assert [s.method for s in here[:5]] == [PLAIN, *chosen] and [s.method for s in here[5:10]] == [*chosen, PLAIN]
    assert {(s.unit, s.repeat) for s in here} == {(u, r) for u in range(2) for r in range(2)}
    assert {s.counts.sequences for s in samples} == {1, 2} and all(s.prompt_tokens == 100 * s.setting.batch for s in here)
    assert {s.method for s in without} == {PLAIN, Method("ltr", 2)}


def test_a_broken_target_is_not_identical() -> None:
    with unchecked():
        samples = speed.run(Uneven(0.25, 9.0), replace(SMALL, temperatures=(0.0,)), {"chain": Chain()})
    document = speed_figures.speed_document(samples, {}, "x")
    assert document["all_identical"] is False and [r["identical"] for r in document["rows"]] == [True, False]
    assert document["problems"][0]["drafter"] == "chain" and "differ from standard" in document["problems"][0]["problem"]
    assert "NOT IDENTICAL" in str(speed_figures.speed_tables(document["medians"]))


def counts(nfe: int, target: float, draft: float, walk: float) -> Counts:
    return Counts(nfe=nfe, rows=3 * nfe, transitions=20, blocks=2, tokens=18, sequences=1, target_s=target, draft_s=draft, verify_s=walk)


def sample(task: str, method: Method, repeat: int, seconds: float, found: Counts, unit: int = 0) -> Sample:
    return Sample(replace(SETTING, task=task), method, unit, repeat, seconds, 1.0, found, 64)


def test_figures_add_up() -> None:
    fast, slow, auto = Method("order", 4), Method("order", 8), Method("order", "auto")
    samples = []
    for task, factor in (("json", 1.0), ("rewrite", 1.2)):
        for repeat, noise in enumerate((1.0, 1.1, 3.0)):
            samples.append(sample(task, PLAIN, repeat, 11 * noise, counts(20, 9 * noise, 0.0, 1 * noise)))
            samples.append(sample(task, fast, repeat, 5.5 * factor * noise, counts(8, 4 * noise, 0.5, 0.5)))
            samples.append(sample(task, slow, repeat, 8 * factor * noise, counts(5, 6 * noise, 0.5, 0.5)))
            samples.append(sample(task, auto, repeat, 4 * factor * noise, counts(8, 3 * noise, 0.5, 0.25)))
    document = speed_figures.speed_document(samples, {"a": 1}, "cmd", 2.5)
    found = {(r["task"], r["drafter"], r["nodes"]): r for r in document["rows"]}
    assert len(found) == 8 and document["all_identical"] and document["tuning_s"] == 2.5 and document["processor"]
    row = found["json", "order", 4]
    assert row["speedup"] == row["low"] == row["high"] == pytest.approx(2) and row["pairs"] == 3 and row["prompts"] == 1
    assert row["nfe_reduction"] == 2.5 and row["nfe_reduction_official"] == 22 / 8 and row["rows_per_pass"] == 3
    assert row["seconds"] == pytest.approx(5.5 * 1.1) and sum(row["split"].values()) == pytest.approx(row["seconds"])
    assert row["split"]["target"] == pytest.approx(4.4 - 1) and row["share_outside_target"] == pytest.approx(1 - 3.4 / 5.05)
    assert row["tokens_per_s"] == pytest.approx(18 / 6.05) and row["standard_tokens_per_s"] == pytest.approx(18 / 12.1)
    roof = row["roofline"]
    assert roof["speedup"] == 2.5 and roof["standard_ms_per_pass"] == pytest.approx(1e3 * 11.1 / 20)
    assert sum(roof["gap_ms"].values()) == pytest.approx(roof["ms_per_pass"] - roof["standard_ms_per_pass"])
    assert row["speedup_decoding"] == pytest.approx(11.1 / 5.05)
    standard = found["json", "root", 1]
    assert standard["speedup"] == standard["nfe_reduction"] == 1 and standard["roofline"]["gap_ms"]["rows"] == 0
    medians = {r["nodes"]: r for r in document["medians"]}
    assert set(medians) == {4, 8, "auto"} and [medians[n]["best"] for n in (4, 8, "auto")] == [True, False, True]
    assert medians[4]["speedup"] == pytest.approx((2 + 2 / 1.2) / 2) and medians[4]["lowest"] == pytest.approx(2 / 1.2)
    tables = speed_figures.speed_tables(document["medians"])
    assert len(tables) == 2 and [len(line) for _, head, lines in tables for line in lines] == [len(t[1]) for t in tables for _ in t[2]]
    assert speed_plot.speed_figure(document).startswith(b"\x89PNG")


def test_median_interval() -> None:
    values = np.random.default_rng(0).normal(2, 0.3, 31)
    low, high = speed_figures.median_interval(values)
    assert low < np.median(values) < high and values.min() < low and high < values.max()
    naive = np.median(np.random.default_rng(1).choice(values, (4000, 31)), axis=1)
    assert np.allclose((low, high), np.quantile(naive, [0.025, 0.975]), atol=0.05)
    assert speed_figures.median_interval(np.array([2.0])) == (2.0, 2.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tasks": ("poetry",)}, "task='poetry' is unknown"),
        ({"split": "training"}, "split='training' is unknown"),
        ({"methods": ()}, "drafter is empty"),
        ({"batches": (0,)}, "batch=0 must be at least 1"),
        ({"prefixes": (-1,)}, "prefix=-1 must be at least 0"),
        ({"prefixes": (64, 64)}, "names a value twice"),
        ({"repeats": 0}, "repeats=0 must be at least 1"),
        ({"rules": ("k=x",)}, "k=x"),
        ({"methods": (Method("chain", 0),)}, "nodes=0"),
    ],
)
def test_bad_plans(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **change)


def test_methods() -> None:
    found = methods(["spiffy", "order", "order-inside", "root"], [4, "auto"])
    assert [m.label for m in found[::2]][-2:] == ["order", "order-inside"] and {m.family for m in found[:8]} == {"spiffy"}
    assert len(found) == 12 and [m.serves(0.0) for m in found].count(False) == 4 and all(m.serves(1.0) for m in found)
    with pytest.raises(ValueError, match="drafter='crystal' is unknown; choose one of order"):
        methods(["crystal"], [4])


@pytest.fixture
def known_costs(monkeypatch: pytest.MonkeyPatch) -> CostProfile:
    """Automatic budgets without measurements."""
    profile = CostProfile((1, 64), (0,), ((1.0, 4.0),), draft_ms=((4, 0.1),), steps_per_pass=((4, 2.0),))
    monkeypatch.setattr("spot_dlm.tune.measure", lambda *_, **__: profile)
    return profile


def test_automatic_budgets_are_fresh(known_costs: CostProfile) -> None:
    plan = replace(SMALL, methods=(Method("chain", "auto"),), rules=("standard", "bfloat16"), temperatures=(0.0,))
    target = load_target()
    bench = speed._Bench(speed.Watched(target), plan, {"chain": Chain()}, Clock(), lambda _: None)
    with unchecked():
        budgets = [bench.budget(s, plan.methods[0], [5, 6, 7]) for s in plan.settings(target.spec)[:2]]
    assert all(isinstance(b, AutoBudget) and b.profile == budgets[0].profile for b in budgets) and budgets[0] is not budgets[1]


@pytest.mark.usefixtures("known_costs")
def test_accelerator_script(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    accelerator = importlib.import_module("accelerator")
    with unchecked():
        document = accelerator.main(["--tiny", "--device", "cpu", "--out", str(tmp_path / "a.json"), "--skip", "identity"])
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == json.loads((tmp_path / "a.json").read_text()) == document
    assert document["sections"] == dict.fromkeys(("cost", "loop", "acceptance", "predicted", "speed"), "done") | {"identity": "skipped"}
    kinds = {f["section"]: f["kind"] for f in document["figures"] if f["kind"] != "not in this version"}
    assert kinds == {
        "cost": "measured, random weights", "loop": "measured, random weights", "acceptance": "measured, trained",
        "predicted": "predicted", "speed": "measured, trained",
    }  # fmt: skip
    assert [f["model"] for f in document["figures"] if f["kind"] == "not in this version"] == ["LLaDA-8B-shaped"]
    assert all(f["ms"] > 0 for f in document["figures"] if "ms" in f) and all(f.get("identical", True) for f in document["figures"])


def test_growth_script(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    root = Path(__file__).parents[1]
    monkeypatch.syspath_prepend(str(root / "benchmarks"))
    growth = importlib.import_module("growth")
    monkeypatch.setattr(growth, "QUICK_AXES", {"nodes": (1, 2, 4), "batch": (1, 2)})
    with unchecked():
        growth.main(["--quick", "--out", str(tmp_path / "g.json"), "--plot", str(tmp_path / "g.png")])
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document == json.loads((tmp_path / "g.json").read_text()) and (tmp_path / "g.png").read_bytes().startswith(b"\x89PNG")
    assert [(r["axis"], r["value"], r["rows"]) for r in document["rows"]] == [
        ("nodes", 1, 1), ("nodes", 2, 2), ("nodes", 4, 4), ("batch", 1, 8), ("batch", 2, 16),
    ]  # fmt: skip
    assert all(sum(r[f"{p}_ms"] for p in growth.PARTS[:-1]) == pytest.approx(r["total_ms"], rel=0.5) for r in document["rows"])
    assert set(document["exponents"]) == {"nodes", "batch"} and "| nodes | 1 to 4 |" in growth.growth_table(document)
    assert growth.exponent([1, 2, 4, 8], [5, 5, 10, 20]) == pytest.approx(1) and growth.exponent([1, 2], [0, 0]) is None
    text = (root / "docs" / "performance.md").read_text("utf-8")
    assert text == growth.filled(text)  # the tables are those of the committed results
    monkeypatch.setattr(growth, "ROOT", tmp_path)
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "growth.json").write_text(json.dumps(document))
    assert growth.filled("a\n<!-- growth -->\nold\n<!-- /growth -->\nb") == (
        f"a\n<!-- growth -->\n{growth.growth_table(document)}\n<!-- /growth -->\nb"
    )
