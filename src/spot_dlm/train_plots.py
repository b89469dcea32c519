"""What a training came to: how well reach probabilities hold on held-out traces, in numbers and as figures.

Knows nothing of the command line. Example: `report(traces, Path("drafter"), print)` adds `reliability` to training.json and draws
loss.png and reliability.png.
"""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float64, Int64

from spot_dlm.artifacts import replace_file
from spot_dlm.drafter_files import load_order_model
from spot_dlm.order_model import OrderModel
from spot_dlm.simulate import reach_histogram, simulate
from spot_dlm.trace_states import TraceStates
from spot_dlm.traces import Traces
from spot_dlm.train import BUDGETS, validation_blocks

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NODES = 32
EDGES = np.array([0, 1e-3, 3e-3, 0.01, 0.03, 0.06, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99], dtype=np.float64)
"""Lower ends of the bins of predicted reach."""


def report(traces: Traces, folder: Path, remark: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Measure the drafter in `folder` on its validation split, add the numbers to training.json and draw the figures.

    Args:
        traces: those it was trained on.
        folder: of the drafter.
        remark: called with what could not be done.

    Returns:
        The numbers: reach against frequency by temperature, expected against realised acceptance by setting and family.
    """
    about = json.loads((folder / "training.json").read_text("utf-8"))
    states = TraceStates(traces)
    found = measure(load_order_model(folder).model, states, validation_blocks(states, about["params"]["seed"]))
    about["reliability"] = found
    replace_file(folder / "training.json", lambda partial: partial.write_text(json.dumps(about, indent=1) + "\n", "utf-8"))
    try:
        figures = {"loss.png": _loss_figure(about["history"], about["best_step"]), "reliability.png": _reliability_figure(found)}
    except ImportError:
        remark("no figures: matplotlib is not installed (pip install 'spot-dlm[bench]')")
        return found
    for name, figure in figures.items():
        _write(folder / name, _png(figure))
    return found


def _write(path: Path, content: bytes) -> None:
    replace_file(path, lambda partial: partial.write_bytes(content))


def measure(model: OrderModel, states: TraceStates, blocks: Int64[np.ndarray, " n"]) -> dict[str, Any]:
    """Return reliability by temperature (bins without nodes left out) and acceptance by setting and family."""
    counts = reach_histogram(model, states, blocks, NODES, EDGES)
    reach = {f"{t:g}": _bins(counts[states.temperature == t].sum(axis=0)) for t in np.unique(states.temperature)}
    outcome = simulate(model, states, blocks, BUDGETS)
    sequence = states.traces.sequence["prompt"][states.sequence_of_block[blocks]]
    family = np.array([str(p.get("family", "")) for p in states.traces.prompts])[sequence]
    setting = states.setting_of_block[blocks]
    rows = []
    for number, name in sorted({*zip(setting.tolist(), family.tolist(), strict=True)}):
        at = (setting == number) & (family == name)
        row: dict[str, Any] = {k: states.traces.settings[number][k] for k in ("rule", "temperature", "block_length")}
        row |= {"family": name, "blocks": int(at.sum())}
        for budget, result in outcome.items():
            passes = result.passes[at].sum()
            row[f"acceptance_{budget}"] = float(result.transitions[at].sum() / passes)
            row[f"expected_{budget}"] = float(result.expected[at].sum() / passes)
        rows.append(row)
    return {"nodes": NODES, "blocks": len(blocks), "reach": reach, "acceptance": rows}


def _bins(counts: Float64[np.ndarray, "b 3"]) -> list[dict[str, float]]:
    return [
        {"from": float(low), "nodes": int(nodes), "predicted": float(reach / nodes), "realised": float(hits / nodes)}
        for low, (nodes, reach, hits) in zip(EDGES, counts, strict=True)
        if nodes
    ]


def _figure(panels: int) -> tuple["Figure", Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6 * panels, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, panels, squeeze=False)[0]


def _loss_figure(history: list[dict[str, float]], best_step: int) -> "Figure":
    figure, panels = _figure(3)
    steps = [row["step"] for row in history]
    for panel, name, title in ((panels[0], "order_loss", "order loss in nats"), (panels[1], "token_loss", "token loss in nats")):
        panel.plot(steps, [row[name] for row in history], marker=".")
        panel.set_title(title, fontsize=10)
    for number, budget in enumerate(BUDGETS):
        panels[2].plot(steps, [row[f"acceptance_{budget}"] for row in history], color=f"C{number}", marker=".", label=f"N = {budget}")
        expected = [row[f"expected_{budget}"] for row in history]
        panels[2].plot(steps, expected, color=f"C{number}", linestyle=":", label=f"N = {budget}, expected")
    panels[2].axvline(best_step, color="#999999", linewidth=1)
    panels[2].set_title("held-out transitions per pass (line: kept)", fontsize=10)
    panels[2].legend(frameon=False, fontsize=8)
    for panel in panels:
        panel.set_xlabel("step")
        panel.grid(alpha=0.25)
    return figure


def _reliability_figure(found: dict[str, Any]) -> "Figure":
    figure, panels = _figure(2)
    for number, (temperature, bins) in enumerate(found["reach"].items()):
        points = [b["predicted"] for b in bins], [b["realised"] for b in bins]
        panels[0].plot(*points, color=f"C{number}", marker="o", markersize=4, label=f"T = {temperature}")
    panels[0].plot([0, 1], [0, 1], color="#999999", linewidth=1)
    panels[0].set(xlabel="predicted reach of a node", ylabel="share that the walk arrived at", title=f"N = {found['nodes']}")
    for number, budget in enumerate(BUDGETS):
        points = [r[f"expected_{budget}"] for r in found["acceptance"]], [r[f"acceptance_{budget}"] for r in found["acceptance"]]
        panels[1].plot(*points, color=f"C{number}", marker="o", markersize=4, linestyle="", label=f"N = {budget}")
    high = max([r[f"{k}_{n}"] for r in found["acceptance"] for k in ("expected", "acceptance") for n in BUDGETS], default=2.0)
    panels[1].plot([1, high], [1, high], color="#999999", linewidth=1)
    panels[1].set(xlabel="expected transitions per pass", ylabel="realised", title="every setting and family")
    for panel in panels:
        panel.legend(frameon=False, fontsize=8)
        panel.grid(alpha=0.25)
    return figure


def _png(figure: "Figure") -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    return buffer.getvalue()
