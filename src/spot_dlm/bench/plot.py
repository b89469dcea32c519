"""The figures of a bench as PNG; matplotlib (extra `bench`) is imported when a figure is asked for.

Example: `passes_figure(document)` returns the bytes of the file.
"""

import io
from typing import TYPE_CHECKING, Any

from spot_dlm.bench.drafters import in_order

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLES = {
    "root": ("#999999", ":", "."), "ltr": ("#8c564b", "--", "v"),
    "chain-published": ("#9edae5", "--", "s"), "chain": ("#1f77b4", "--", "s"),
    "spiffy": ("#2ca02c", "--", "^"), "linear": ("#ff7f0e", "-", "D"), "order": ("#d62728", "-", "o"), "oracle": ("#333333", ":", "*"),
}  # fmt: skip


def require_matplotlib() -> None:
    """Check that a figure can be drawn.

    Raises:
        ValueError: if matplotlib is not installed.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ValueError("--plot needs matplotlib: pip install 'spot-dlm[bench]'") from error


def png(figure: "Figure") -> bytes:
    """Return a figure as a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130, bbox_inches="tight")
    return buffer.getvalue()


def passes_figure(document: dict[str, Any]) -> bytes:
    """Draw acceptance length against budget: one panel per task (rows) and temperature, resolution and block length (columns)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cells = [c for c in document["cells"] if c["drafter"] == c["family"]]
    tasks = list(dict.fromkeys(c["task"] for c in cells))
    columns = list(dict.fromkeys((c["temperature"], c["resolution"], c["block_length"]) for c in cells))
    figure = Figure(figsize=(3.6 * len(columns) + 1.5, 2.7 * len(tasks) + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(tasks), len(columns), squeeze=False, sharex=True, sharey="row")
    lines = {}
    for i, task in enumerate(tasks):
        for j, column in enumerate(columns):
            panel = panels[i][j]
            here = [c for c in cells if c["task"] == task and (c["temperature"], c["resolution"], c["block_length"]) == column]
            for drafter in in_order(c["drafter"] for c in here):
                points = sorted((c for c in here if c["drafter"] == drafter), key=lambda c: c["nodes"])
                colour, dash, marker = STYLES.get(drafter, ("#7f7f7f", "-", "x"))
                nodes, lengths, lows, highs = ([c[k] for c in points] for k in ("nodes", "acceptance_length", "low", "high"))
                lines[drafter] = panel.plot(nodes, lengths, color=colour, linestyle=dash, marker=marker, markersize=4)[0]
                panel.fill_between(nodes, lows, highs, color=colour, alpha=0.1, linewidth=0)
            budgets = sorted({c["nodes"] for c in here})
            panel.set_xscale("log", base=2)
            panel.set_xticks(budgets, [str(n) for n in budgets])
            panel.minorticks_off()
            panel.grid(alpha=0.25)
            panel.set_title(f"{task}, T = {column[0]:g}, {column[1]}, L = {column[2]}", fontsize=9)
    figure.supxlabel("nodes N of one pass", fontsize=10)
    figure.supylabel("transitions per pass", fontsize=10)
    figure.legend(list(lines.values()), list(lines), loc="outside right upper", frameon=False, fontsize=9)
    return png(figure)


def tradeoff_figure(document: dict[str, Any]) -> bytes:
    """Draw accuracy against tokens per pass: one panel per temperature, one colour per task, one marker per method."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [r for r in document["rows"] if r["accuracy"] is not None]
    temperatures = list(dict.fromkeys(r["temperature"] for r in rows)) or [0.0]
    tasks = list(dict.fromkeys(r["task"] for r in rows))
    methods = list(dict.fromkeys(r["method"] for r in rows))
    markers = dict(zip(methods, "osD^v<>P*XhpH8d" * (len(methods) // 15 + 1), strict=False))
    figure = Figure(figsize=(5.2 * len(temperatures) + 2.5, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(temperatures), squeeze=False, sharey=True)[0]
    for panel, temperature in zip(panels, temperatures, strict=True):
        for number, task in enumerate(tasks):
            for r in (r for r in rows if r["task"] == task and r["temperature"] == temperature):
                point = r["tokens_per_pass"], 100 * r["accuracy"]
                panel.plot(*point, color=f"C{number}", marker=markers[r["method"]], linestyle="", alpha=0.85)
        panel.set_title(f"T = {temperature:g}", fontsize=10)
        panel.set_xlabel("tokens per decoding pass")
        panel.grid(alpha=0.25)
    panels[0].set_ylabel("exact answers in %")
    handles = [panels[0].plot([], [], color=f"C{i}", marker="s", linestyle="", label=t)[0] for i, t in enumerate(tasks)]
    handles += [panels[0].plot([], [], color="#333333", marker=markers[m], linestyle="", label=m)[0] for m in methods]
    figure.legend(handles=handles, loc="outside right upper", frameon=False, fontsize=8)
    return png(figure)
