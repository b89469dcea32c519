"""The figure of the speed benchmark: speed-up by node budget, and where the milliseconds of a pass go; needs matplotlib.

Example: `speed_figure(document)` returns the bytes of the PNG file.
"""

from typing import Any

from spot_dlm.bench.drafters import in_order
from spot_dlm.bench.plot import STYLES, png
from spot_dlm.bench.speed_figures import GAPS, PLACE

_INSIDE_STYLE = ("#9467bd", "-", "x")
_COLOURS = dict(zip(GAPS, ("#4c72b0", "#dd8452", "#55a868", "#8172b3"), strict=True))


def speed_figure(document: dict[str, Any]) -> bytes:
    """Draw medians over tasks: columns are batch and prefix; one row of panels per temperature and rule, and one row of gaps."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figures = document["medians"]
    columns = list(dict.fromkeys((r["block_length"], r["batch"], r["prefix"]) for r in figures))
    lines = list(dict.fromkeys((r["temperature"], r["rule"]) for r in figures))
    figure = Figure(figsize=(2.6 * len(columns) + 2, 2.4 * (len(lines) + 1) + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(lines) + 1, len(columns), squeeze=False, sharey="row")
    handles: dict[str, Any] = {}
    for j, (length, batch, prefix) in enumerate(columns):
        for i, (temperature, rule) in enumerate(lines):
            here = [r for r in figures if tuple(r[k] for k in PLACE) == (temperature, rule, length, batch, prefix)]
            handles |= _curves(panels[i][j], here)
            panels[i][j].set_title(f"T = {temperature:g}, {rule}, L = {length}\nbatch {batch}, prefix {prefix}", fontsize=8)
            if i == len(lines) - 1:
                _gaps(panels[-1][j], [r for r in here if r["best"]])
    for panel, text in zip(panels[:, 0], [*["speed-up"] * len(lines), "ms per pass\nabove standard"], strict=True):
        panel.set_ylabel(text, fontsize=9)
    swatches = [panels[-1][0].bar([0], [0], color=c) for c in _COLOURS.values()]
    figure.legend([*handles.values(), *swatches], [*handles, *_COLOURS], loc="outside right upper", frameon=False, fontsize=8)
    return png(figure)


def _curves(panel: Any, here: list[dict[str, Any]]) -> dict[str, Any]:
    """Draw the families' speed-ups by budget, the best variant at each, "auto" as the last place; return the handles."""
    budgets = [*sorted({r["nodes"] for r in here if r["nodes"] != "auto"}), *(["auto"] if any(r["nodes"] == "auto" for r in here) else [])]
    handles = {}
    for family in in_order(r["family"] for r in here):
        own = [r for r in here if r["family"] == family]
        at = [n for n in budgets if any(r["nodes"] == n for r in own)]
        colour, dash, marker = STYLES.get(family, _INSIDE_STYLE)
        heights = [max(r["speedup"] for r in own if r["nodes"] == n) for n in at]
        points = [(budgets.index(n), y) for n, y in zip(at, heights, strict=True)]
        fixed = [p for p, n in zip(points, at, strict=True) if n != "auto"]
        style = {"color": colour, "linestyle": dash, "marker": marker, "markersize": 4}
        handles[family] = panel.plot([x for x, _ in fixed], [y for _, y in fixed], **style)[0]
        for x, y in points[len(fixed) :]:
            panel.plot(x, y, color=colour, marker="*", markersize=9)
    panel.axhline(1, color="#999999", linewidth=0.8)
    panel.set_xticks(range(len(budgets)), [str(n) for n in budgets], fontsize=7)
    panel.grid(alpha=0.25)
    return handles


def _gaps(panel: Any, best: list[dict[str, Any]]) -> None:
    """Draw, for the best budget of each family, what a pass costs above standard decoding's, stacked by cause."""
    for x, row in enumerate(best):
        up = down = 0.0
        for name, colour in _COLOURS.items():
            height = row["gap_ms"][name]
            panel.bar([x], [height], bottom=up if height >= 0 else down, color=colour, width=0.7)
            up, down = (up + height, down) if height >= 0 else (up, down + height)
    panel.set_xticks(range(len(best)), [f"{r['family']} {r['nodes']}" for r in best], rotation=90, fontsize=7)
    panel.axhline(0, color="#999999", linewidth=0.8)
    panel.grid(alpha=0.25, axis="y")
