"""What traces say about the two premises: the tokens of later steps are known in advance, their order is not (method.md; spot analyze).

A state's stale distributions are compared with what standard decoding did next: at look-ahead k with the k-th commit after the certain
one, the k - 1 commits between them being known (teacher-forced). Knows nothing of targets and of how scorers are made.

Example: `analyze(read_traces(Path("traces")))["pooled"]["token"]["1"]["best"]`.
"""

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, no_type_check

import numpy as np
import torch
from jaxtyping import Bool, Float32, Int8, Int16, Int64
from numba import njit

from spot_dlm.features import MASKED, StateBatch, encode
from spot_dlm.order_model import OrderModel, inputs, path_scores
from spot_dlm.trace_states import BEST, SECOND, Paths, TraceStates
from spot_dlm.traces import Traces

FORMAT = "spot-analysis/1"
LOOK_AHEADS = (1, 2, 4, 8)
GAPS = {"gap_below_1e-3": 1e-3, "gap_below_1e-5": 1e-5}
_BATCH = 4096

Scorer = Callable[[StateBatch, Paths], Float32[np.ndarray, "B D L"]]
"""An order model: scores of every position at every depth, higher first, knowing the commits of the path before that depth."""


def scorer_of(model: OrderModel) -> Scorer:
    """Return a trained order model as a scorer."""

    @torch.inference_mode()
    def score(batch: StateBatch, paths: Paths) -> Float32[np.ndarray, "B D L"]:
        encoded = encode(batch, paths.positions.shape[1])
        total, _ = path_scores(model(inputs(encoded)), torch.from_numpy(paths.positions), torch.from_numpy(encoded.masked > 0))
        return total.numpy()

    return score


@dataclass(frozen=True)
class Findings:
    """Of every state with two masked positions or more, in K look-aheads; -1 where the block is over (or no choice was left).

    `kind` says what the committed token was among the stale ones, `places` (one array per predictor) at which place, from 0, the
    predictor named the committed position. `equal` tells whether the two best ranks of the state's own step are the same number,
    `gap` is the difference of the two best unrounded ones.
    """

    states: Int64[np.ndarray, " n"]
    kind: Int8[np.ndarray, "n K"]
    places: dict[str, Int16[np.ndarray, "n K"]]
    equal: Bool[np.ndarray, " n"]
    gap: Float32[np.ndarray, " n"]

    def take(self, at: Bool[np.ndarray, " n"]) -> "Findings":
        """Return the chosen states' part."""
        return Findings(self.states[at], self.kind[at], {k: v[at] for k, v in self.places.items()}, self.equal[at], self.gap[at])


def find(
    traces: Traces, scorers: dict[str, Scorer] | None = None, progress: Callable[[int, int], None] = lambda done, total: None
) -> Findings:
    """Look at every state.

    Args:
        traces: finished traces.
        scorers: order models by name, beside the predictors "rule" (the rule's own order of the stale, coupled confidences, its
            resolution and ties included) and "left_to_right".
        progress: called with states done and all states.
    """
    source = TraceStates(traces)
    states = np.flatnonzero(traces.state["rows"] >= 2)
    names = ("rule", "left_to_right", *(scorers or {}))
    kind = np.full((len(states), len(LOOK_AHEADS)), -1, np.int8)
    places = {name: np.full(kind.shape, -1, np.int16) for name in names}
    looks = np.array(LOOK_AHEADS) - 1
    lengths, done = source.lengths(states), 0
    for length in np.unique(lengths):
        of_length = np.flatnonzero(lengths == length)
        for begin in range(0, len(of_length), _BATCH):
            at = of_length[begin : begin + _BATCH]
            batch, paths = source.batch(states[at], max(LOOK_AHEADS))
            kind[at] = paths.kind[:, looks]
            ranks = {"rule": batch.ahead_rank, "left_to_right": _left_to_right(batch.ahead_rank.shape)}
            ranks |= {name: _checked(scorer(batch, paths), batch, name) for name, scorer in (scorers or {}).items()}
            for name, rank in ranks.items():
                places[name][at] = _places(rank, batch.status == MASKED, paths.positions, paths.kind, looks)
            done += len(at)
            progress(done, len(states))
    equal, gap = _two_best(states, source.rows, source.row_rank, traces.row["fine"])
    return Findings(states, kind, places, equal, gap)


def _left_to_right(shape: tuple[int, ...]) -> Float32[np.ndarray, "B D L"]:
    return np.ascontiguousarray(np.broadcast_to(-np.arange(shape[-1], dtype=np.float32), shape))


def _checked(scores: np.ndarray, batch: StateBatch, name: str) -> Float32[np.ndarray, "B D L"]:
    if scores.shape != batch.ahead_rank.shape or np.isnan(scores).any():
        raise ValueError(f"scorer {name!r}: scores must be numbers of shape {list(batch.ahead_rank.shape)}, got {list(scores.shape)}")
    return np.ascontiguousarray(scores, dtype=np.float32)


@njit(cache=True)
@no_type_check
def _places(rank, masked, positions, kind, looks):
    """Place of the committed position among the remaining ones, ties to the lower; -1 without a choice between two."""
    out = np.full((len(rank), len(looks)), -1, np.int16)
    for b in range(len(rank)):
        left = masked[b].copy()
        depth = 0
        for k in range(len(looks)):
            while depth < looks[k] and kind[b, depth] >= 0:
                left[positions[b, depth]] = False
                depth += 1
            if depth < looks[k] or kind[b, depth] < 0 or left.sum() < 2:
                break
            true, place = positions[b, depth], 0
            for p in range(len(left)):
                if left[p] and p != true:
                    ahead, own = rank[b, depth, p], rank[b, depth, true]
                    place += ahead > own or (ahead == own and p < true)
            out[b, k] = place
    return out


@njit(cache=True)
@no_type_check
def _two_best(states, rows, rank, fine):
    """Whether the two best ranks of a state are equal, and the gap of its two best unrounded values."""
    equal, gap = np.empty(len(states), np.bool_), np.empty(len(states), np.float32)
    for i in range(len(states)):
        r1 = r2 = f1 = f2 = np.float32(-np.inf)
        for r in range(rows[states[i]], rows[states[i] + 1]):
            r1, r2 = max(r1, rank[r]), max(r2, min(r1, rank[r]))
            f1, f2 = max(f1, fine[r]), max(f2, min(f1, fine[r]))
        equal[i], gap[i] = r1 == r2, f1 - f2
    return equal, gap


def analyze(
    traces: Traces, scorers: dict[str, Scorer] | None = None, progress: Callable[[int, int], None] = lambda done, total: None
) -> dict[str, Any]:
    """Return both findings: pooled, by setting (rule, temperature, block length), and by family and setting.

    Every share comes with its number of cases `n`. `token[k]`: at look-ahead k the stale token (at T > 0 the one that the noise of that
    step draws) is the committed one, or among the two best. `order[predictor][k]`: the predictor's first, first two, first three
    choices hold the next position. `next_rank`: how often the next commit stood at place 1, 2, ... of the rule's stale order. `ties`:
    how often the two best ranks of a step are equal at the rule's resolution, or differ by less than so much before rounding.
    """
    findings = find(traces, scorers, progress)
    blocks = np.repeat(np.arange(len(traces.block["index"])), traces.block["states"])[findings.states]
    sequences = np.repeat(np.arange(len(traces.sequence["blocks"])), traces.sequence["blocks"])[blocks]
    families = [p.get("family", "") for p in traces.prompts]
    keys = [(s["rule"], s["temperature"], s["block_length"]) for s in traces.settings]
    family_names, key_names = list(dict.fromkeys(families)), list(dict.fromkeys(keys))
    family = np.array([family_names.index(f) for f in families])[traces.sequence["prompt"][sequences]]
    setting = np.array([key_names.index(k) for k in keys])[traces.sequence["setting"][sequences]]

    def cell(at: np.ndarray, key: tuple[Any, ...], **more: Any) -> dict[str, Any]:
        return more | dict(zip(("rule", "temperature", "block_length"), key, strict=True)) | summary(findings.take(at))

    document: dict[str, Any] = {"format": FORMAT, "look_aheads": list(LOOK_AHEADS), "sequences": len(traces.sequence["blocks"])}
    document["pooled"] = summary(findings)
    document["settings"] = [cell(at, key) for i, key in enumerate(key_names) if (at := setting == i).any()]
    document["cells"] = [
        cell(at, key, family=name)
        for f, name in enumerate(family_names)
        for i, key in enumerate(key_names)
        if (at := (family == f) & (setting == i)).any()
    ]
    return document


def summary(findings: Findings) -> dict[str, Any]:
    """Return the shares of a set of states."""
    kinds, names = findings.kind, [str(k) for k in LOOK_AHEADS]
    token = {
        name: _shares(kinds[:, k] >= 0, best=kinds[:, k] == BEST, two_best=(kinds[:, k] == BEST) | (kinds[:, k] == SECOND))
        for k, name in enumerate(names)
    }
    order = {
        predictor: {name: _shares(places[:, k] >= 0, **{f"top{n}": places[:, k] < n for n in (1, 2, 3)}) for k, name in enumerate(names)}
        for predictor, places in findings.places.items()
    }
    first = findings.places["rule"][:, 0]
    everything = np.ones(len(findings.states), dtype=bool)
    below = {name: findings.gap < limit for name, limit in GAPS.items()}
    return {
        "states": len(findings.states),
        "token": token,
        "order": order,
        "next_rank": np.bincount(first[first >= 0]).tolist(),
        "ties": _shares(everything, equal=findings.equal, **below),
    }


def _shares(cases: np.ndarray, **hits: np.ndarray) -> dict[str, Any]:
    count = int(cases.sum())
    return {"n": count} | {k: round(float((v & cases).sum() / count), 6) if count else None for k, v in hits.items()}


def figure(document: dict[str, Any]) -> bytes:
    """Draw the findings as a PNG of four panels.

    Raises:
        ValueError: if matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("a figure needs matplotlib: pip install 'spot-dlm[bench]'") from error
    looks, pooled = [str(k) for k in document["look_aheads"]], document["pooled"]
    drawing = Figure(figsize=(11, 8.5), layout="constrained")
    FigureCanvasAgg(drawing)
    (tokens, order), (ranks, ties) = drawing.subplots(2, 2)
    settings = document["settings"]
    labels = [f"{s['rule']}, T={s['temperature']:g}, L={s['block_length']}" for s in settings]
    for entry, label in zip(settings, labels, strict=True):
        tokens.plot(looks, [_percent(entry["token"][k]["best"]) for k in looks], marker="o", markersize=4, linewidth=1.2, label=label)
    tokens.set(title="Stale token is the committed one", xlabel="look-ahead (commits)", ylabel="positions, %")
    tokens.legend(fontsize=7)
    for predictor, entry in pooled["order"].items():
        (line,) = order.plot(looks, [_percent(entry[k]["top1"]) for k in looks], marker="o", label=f"{predictor.replace('_', ' ')}, first")
        top3 = [_percent(entry[k]["top3"]) for k in looks]
        order.plot(looks, top3, marker=".", linestyle=":", color=line.get_color(), label=f"{predictor.replace('_', ' ')}, first three")
    order.set(title="Next position is among the predicted (all settings)", xlabel="look-ahead (commits)", ylabel="steps, %", ylim=(0, 101))
    order.legend(fontsize=7)
    rules = list(dict.fromkeys(s["rule"] for s in settings))
    for i, rule in enumerate(rules):
        counts = np.zeros(10)
        for entry in (s for s in settings if s["rule"] == rule):
            for place, number in enumerate(entry["next_rank"]):
                counts[min(place, 9)] += number
        width = 0.8 / len(rules)
        ranks.bar(np.arange(10) + (i - (len(rules) - 1) / 2) * width, 100 * counts / max(counts.sum(), 1), width, label=rule)
    ranks.set_xticks(range(10), [*(str(n) for n in range(1, 10)), "10+"])
    ranks.set(title="Place of the next commit in the stale order", xlabel="place (1 = most confident)", ylabel="steps, %")
    ranks.legend(fontsize=7)
    for i, (key, label) in enumerate(
        (("equal", "equal at the rule's resolution"), ("gap_below_1e-3", "gap < 1e-3"), ("gap_below_1e-5", "gap < 1e-5"))
    ):
        shares = [_percent(s["ties"][key]) for s in settings]
        ties.barh(np.arange(len(settings)) + (i - 1) * 0.26, shares, 0.26, label=label)
    ties.set_yticks(range(len(settings)), labels, fontsize=7)
    ties.invert_yaxis()
    ties.set(title="The two best log-confidences of a step", xlabel="steps, %", xlim=(0, 100))
    ties.legend(fontsize=7)
    for panel in (tokens, order, ranks, ties):
        panel.grid(alpha=0.3)
        panel.set_axisbelow(True)
    drawing.suptitle(f"{document.get('title', 'Traces')}: {document['sequences']} sequences, {pooled['states']} steps", fontsize=11)
    buffer = io.BytesIO()
    drawing.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()


def _percent(share: float | None) -> float:
    return float("nan") if share is None else 100 * share
