"""Calibration counts what a hand-made trace says, selections are nested, files are checked, and the command says what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from toy import unchecked
from trace_toys import record_toy, settled_target, toy_recording

from spot_dlm.calibrate import Formulas, accepted, all_formulas, build_graph, calibrate, per_pass
from spot_dlm.cli import main
from spot_dlm.drafters import CALIBRATED, build_drafter
from spot_dlm.rank_graph import GraphKey, GraphTable, RankGraph, read_graphs, write_graphs
from spot_dlm.record import TraceSetting
from spot_dlm.traces import COLUMNS, Columns, Traces

FINE = [{0: -0.1, 1: -0.5, 2: -0.3, 3: -0.7}, {1: -0.4, 2: -0.2, 3: -0.6}, {1: -0.2, 3: -0.1}, {1: -0.1}]
"""Confidence of each masked position in the four states of a block of 4, which commits 0, 2, 3, 1."""
COMMITS = [(0, 10), (2, 12), (3, 23), (1, 99)]
SECOND = {0: 20, 1: 21, 2: 22, 3: 23}


def hand_made(temperature: float, rule: str = "standard") -> Traces:
    """Best tokens 10, 11, 12, 13; second best 20 to 23, but from the second state on 23 is the best of position 3."""
    columns = Columns()
    columns.add("sequence", prompt=0, setting=0, blocks=1, tokens=4)
    columns.add("block", index=0, tail=0, states=4)
    for step, (fine, (position, token)) in enumerate(zip(FINE, COMMITS, strict=True)):
        best = {p: 10 + p for p in fine} | ({3: 23} if step and 3 in fine else {})
        columns.add(
            "row",
            position=list(fine),
            logp=[[f] + [-9.0] * 7 for f in fine.values()],
            ids=[[best[p], SECOND[p]] for p in fine],
            log_rest=[-1.0] * len(fine),
            entropy=[1.0] * len(fine),
            fine=list(fine.values()),
            token=[best[p] for p in fine],
            known=[0.0] * len(fine),
        )
        left = [p for p in fine if p != position]
        depths = len(left) if temperature else 0
        for depth in range(depths):  # at every later step position 1 is what the noise makes surest, and position 3 draws 23 after one step
            tokens = [[23 if p == 3 and depth else 10 + p, SECOND[p] if depth == 0 else 50] for p in left]
            values = [[-0.01 if p == 1 else fine[p], -5.0] for p in left]
            columns.add("ahead", tokens=tokens, fine=values, margin=[1.0] * len(left))
        columns.add(
            "state", step=step, rows=len(fine), ahead_depths=depths, effect_rows=0, commit_position=position, commit_token=token
        )  # fmt: skip
    arrays = columns.arrays()
    tables = {t: {c: arrays[f"{t}_{c}"] for c in cs} for t, cs in COLUMNS.items()}
    setting = {"rule": rule, "temperature": temperature, "block_length": 4}
    return Traces({"settings": [setting], "prompts": [{"id": 0, "family": ""}], "seed": 3}, **tables)


def test_formulas_by_hand() -> None:
    """From the first state the root has 2, 1, 3 by confidence and commits 2 (1st), then 3 with its second token (3rd), then is complete."""
    (key, formulas), *more = all_formulas(hand_made(0.0), 3)
    assert key == GraphKey("standard", False, True, 4) and not more
    assert formulas.codes.tolist() == [[0, 5, -1], [2, -1, -1]]  # the second state: 1 then 3 by confidence, 3 is committed
    graph = calibrate(hand_made(0.0)).graphs[key]
    assert set(graph.nodes) == {((1, 1),), ((1, 1), (3, 2)), ((2, 1),)} and graph.counts == (1, 1, 1) and graph.states == 2
    assert graph.nodes[0] == ((1, 1),) and graph.edges.tolist() == sorted(
        [[0, 1], [1, graph.nodes.index(((1, 1), (3, 2))) + 1], [0, graph.nodes.index(((2, 1),)) + 1]]
    )


def test_coupled_and_published_by_hand() -> None:
    """Coupled: position 1 is always surest, so 2 is second and 3 third, whose token after one step is the best one (j = 1)."""
    found = dict(all_formulas(hand_made(1.0), 3))
    coupled, published = found[GraphKey("standard", True, True, 4)], found[GraphKey("standard", True, False, 4)]
    assert coupled.codes.tolist() == [[2, 4, -1], [3, -1, -1]]
    assert published.codes.tolist() == [[0, 5, -1], [2, -1, -1]]
    assert list(dict(all_formulas(hand_made(0.5, "ltr"), 3))) == [GraphKey("ltr", True, c, 4) for c in (True, False)]


def random_formulas(seed: int, states: int = 400, depth: int = 6) -> Formulas:
    """Paths that mostly follow the ranks."""
    rng = np.random.default_rng(seed)
    codes = np.argsort(np.arange(10) + rng.gumbel(size=(states, 10)) * 0.8, axis=1)[:, :depth] * 2 + (rng.random((states, depth)) < 0.1)
    return Formulas(np.where(np.arange(depth) < rng.integers(0, depth + 1, states)[:, None], codes, -1))


@pytest.mark.parametrize("selection", ["reach", "count"])
def test_smaller_graphs_are_prefixes(selection) -> None:
    formulas = random_formulas(1)
    large = build_graph(formulas, 60, selection)
    assert len(large) == 60
    for nodes in (1, 3, 7, 15, 31):
        assert build_graph(formulas, nodes, selection) == large.first(nodes)
    needed = accepted(formulas, large)
    known = {frozenset(node) for node in large.nodes[:15]}
    for codes, need, length in zip(formulas.codes.tolist(), needed.tolist(), formulas.lengths.tolist(), strict=True):
        pairs = [(c // 2 + 1, c % 2 + 1) for c in codes]
        run = 0
        while run < length and frozenset(pairs[: run + 1]) in known:
            run += 1
        assert sum(n < 16 for n in need) == run


def test_counts_are_those_of_sets_and_reach_pays() -> None:
    """A set's count adds up its orders; what is chosen for reach is accepted at least as often."""
    formulas = Formulas(np.array([[0, 2], [2, 0], [2, 0], [4, -1]]))
    graph = build_graph(formulas, 9)
    assert dict(zip(graph.nodes, graph.counts, strict=True)) == {((2, 1),): 2, ((2, 1), (1, 1)): 3, ((1, 1),): 1, ((3, 1),): 1}
    for seed in range(5):
        formulas = random_formulas(seed)
        reach, count = (accepted(formulas, build_graph(formulas, 31, s)) for s in ("reach", "count"))
        assert all(per_pass(reach, n) >= per_pass(count, n) - 1e-9 for n in (2, 4, 8, 16, 32))
        assert per_pass(reach, 1) == 1.0


def graph_document() -> dict:
    row = {"rule": "standard", "sampled": False, "coupled": True, "block_length": 16, "states": 9}
    return {"format": "spot-graph/1", "graphs": [row | {"nodes": [[[1, 1]], [[1, 1], [2, 2]]], "counts": [5, 4]}]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nodes": [[[1, 1]], [[2, 1], [3, 1]]]}, "not connected"),
        ({"nodes": [[[1, 1]], [[1, 1]]]}, "stands there already"),
        ({"nodes": [[[0, 1]], [[1, 1]]]}, "ranks are"),
        ({"nodes": [[[1, 3]], [[1, 1]]]}, "ranks are"),
        ({"nodes": [[[1, 1]], [[1, 1], [1, 2]]]}, "names a position twice"),
        ({"nodes": [[[1, 1]], []]}, "is the root"),
        ({"nodes": [[[1, 1]], [[1, "x"]]]}, "whole number"),
        ({"nodes": [[[1, 1]], [5]]}, "list of pairs"),
        ({"nodes": "none"}, "type list"),
        ({"counts": [5]}, "2 nodes but 1 counts"),
        ({"counts": [5, 10]}, "counts must lie between"),
        ({"states": 1.5}, "whole number"),
        ({"block_length": 0}, "at least 1"),
        ({"sampled": 1}, "type bool"),
    ],
)
def test_damaged_graphs(tmp_path: Path, change: dict, message: str) -> None:
    path, document = tmp_path / "graph.json", graph_document()
    path.write_text(json.dumps(document))
    assert len(next(iter(read_graphs(path).graphs.values()))) == 2
    document["graphs"][0] |= change
    path.write_text(json.dumps(document))
    with pytest.raises(ValueError, match=message) as error:
        read_graphs(path)
    assert "\n" not in str(error.value) and str(path) in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"format": "spot-graph/1"}',
        '{"format": "spot-graph/1", "graphs": [{}]}',
        '{"format": "spot-graph/1", "graphs": [7]}',
    ],
)
def test_damaged_files(tmp_path: Path, text: str) -> None:
    path = tmp_path / "graph.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"graph\.json"):
        read_graphs(path)
    with pytest.raises(ValueError, match="no such file"):
        build_drafter("calibrated", graph=tmp_path / "none.json")


def test_round_trip_and_the_shipped_graph(tmp_path: Path) -> None:
    table = GraphTable({GraphKey("standard", True, False, 8): build_graph(random_formulas(2), 20)}, {"seed": 1})
    write_graphs(tmp_path / "g.json", table)
    assert read_graphs(tmp_path / "g.json") == table
    for name in CALIBRATED:
        drafter = build_drafter(name)
        assert drafter.name == name and all(len(g) >= 31 for g in drafter.graphs.graphs.values())
    rules = {key.rule for key in drafter.graphs.graphs}
    assert rules == {"standard", "bfloat16"} and drafter.graphs.about["target"]["name"] == "shipped"


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("traces")
    settings = [TraceSetting("standard", t, block_length=8, max_new_tokens=16) for t in (0.0, 1.0)]
    with unchecked():
        record_toy(folder, toy_recording(6, settings), settled_target())
    return folder


def run(*words: object) -> int:
    with pytest.raises(SystemExit) as stop:
        main([str(w) for w in words])
    return int(stop.value.code or 0)


def test_command(traces: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out, picture = tmp_path / "graph.json", tmp_path / "graph.png"
    assert run("calibrate", traces, "--out", out, "--nodes", 40, "--picture", picture, "--json") == 0
    report = json.loads(capfd.readouterr().out)
    assert [(g["sampled"], g["coupled"]) for g in report["graphs"]] == [(False, True), (True, True), (True, False)]
    for row in report["graphs"]:
        assert row["per_pass"]["2"] > 1.2 and sorted(row["per_pass"].values()) == list(row["per_pass"].values())
    assert picture.read_bytes().startswith(b"\x89PNG")
    about = read_graphs(out).about
    assert about["command"].startswith("spot calibrate") and about["prompts"] == 6
    assert run("calibrate", traces, "--out", out, "--nodes", 3, "--limit-prompts", 2, "--selection", "count") == 0  # replaces a graph file
    assert "N=4" in capfd.readouterr().out and all(len(g) <= 3 for g in read_graphs(out).graphs.values())


def test_command_errors(traces: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out, foreign = tmp_path / "graph.json", tmp_path / "notes.json"
    foreign.write_text("{}")
    (tmp_path / "half").mkdir()
    for words, message in (
        ((tmp_path / "none", "--out", out), "no such folder"),
        ((tmp_path / "half", "--out", out), "unfinished"),
        ((traces, "--out", out, "--nodes", 0), "--nodes 0 must be at least 1"),
        ((traces, "--out", out, "--depth", 0), "--depth 0"),
        ((traces, "--out", out, "--limit-prompts", 0), "--limit-prompts 0"),
        ((traces, "--out", out, "--selection", "best"), "--selection best is unknown"),
        ((traces, "--out", out, "--picture", tmp_path / "g.txt"), "must end with"),
        ((traces, "--out", foreign), "no graph file"),
        ((traces, "--out", tmp_path / "no" / "g.json"), "folder does not exist"),
        ((traces,), "--out"),
    ):
        assert run("calibrate", *words) == 2
        captured = capfd.readouterr()
        assert message in captured.err and captured.err.count("\n") == 1 and not captured.out
    assert not out.exists() and foreign.read_text() == "{}"
    with pytest.raises(ValueError, match="nodes=0 must be at least 1"):
        calibrate(hand_made(0.0), nodes=0)


def test_equal_graphs_are_equal() -> None:
    assert RankGraph((((1, 1),),), (2,), 3).first(1) == RankGraph((((1, 1),),), (2,), 3)
