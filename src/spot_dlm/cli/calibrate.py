"""`spot calibrate`: count in traces which stale ranks were committed next, and write the best draft graphs.

Example: `spot calibrate traces --out graph.json --picture graph.png`.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from spot_dlm.artifacts import provenance
from spot_dlm.calibrate import DEFAULT_DEPTH, DEFAULT_NODES, Selection, accepted, all_formulas, build_graph, origin, per_pass
from spot_dlm.cli.show import COMMAND, stderr_console
from spot_dlm.rank_graph import GraphTable, RankGraph, read_graphs, write_graphs
from spot_dlm.traces import read_traces

BUDGETS = (2, 4, 8, 16, 32)
DRAWN_NODES = 31


def calibrate(
    traces: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of traces (spot trace).", show_default=False)],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Where the graphs go; an older graph file is replaced.")],
    nodes: Annotated[int, typer.Option("--nodes", help="Nodes of each graph; N - 1 serve budget N.")] = DEFAULT_NODES,
    depth: Annotated[int, typer.Option("--depth", help="Most commits to look ahead.")] = DEFAULT_DEPTH,
    limit_prompts: Annotated[int | None, typer.Option("--limit-prompts", help="Count the first so many prompts only.")] = None,
    selection: Annotated[
        str, typer.Option("--selection", help="Nodes that add most: 'reach' = to the accepted guesses, 'count' = to the summed counts.")
    ] = "reach",
    picture: Annotated[Path | None, typer.Option("--picture", metavar="FILE", help="Draw the first nodes of each graph.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else.")] = False,
) -> None:
    """Calibrate draft graphs on traces, for the drafters calibrated and calibrated-published.

    A node is a set of ranks: which of the positions that the last pass was surest of are committed next, with the best or the
    second-best token. One graph is made for every rule, block length and temperature 0 or above that the traces hold. Nodes are stored
    in the order of their choice, so one graph serves every node budget.

    The table gives the commits per pass that a graph's first N - 1 nodes would have had on the traces themselves.

    \b
    Examples:
      spot trace --prompts prompts.jsonl --limit 50 --out traces
      spot calibrate traces --out graph.json
      spot calibrate traces --nodes 200 --limit-prompts 50 --out graph.json --picture graph.png
      spot verify --drafter calibrated --graph graph.json
    """
    for name, value in (("nodes", nodes), ("depth", depth), ("limit-prompts", 1 if limit_prompts is None else limit_prompts)):
        if value < 1:
            raise ValueError(f"--{name} {value} must be at least 1")
    if selection not in ("reach", "count"):
        raise ValueError(f"--selection {selection} is unknown; choose one of reach, count")
    chosen: Selection = selection  # type: ignore[assignment]  # one of them, as just checked
    _check_out(out)
    if picture is not None and picture.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise ValueError(f"--picture {picture} must end with .png, .svg or .pdf")
    recorded = read_traces(traces)
    graphs, rows = {}, []
    for key, formulas in all_formulas(recorded, depth, limit_prompts):
        if not len(formulas.codes):
            continue
        graph = graphs[key] = build_graph(formulas, nodes, chosen)
        row: dict[str, Any] = {"rule": key.rule, "sampled": key.sampled, "coupled": key.coupled, "block_length": key.block_length}
        row |= {"states": graph.states, "nodes": len(graph)}
        needed = accepted(formulas, graph)
        row["per_pass"] = {str(n): per_pass(needed, n) for n in BUDGETS if n - 1 <= nodes}
        rows.append(row)
    if not graphs:
        raise ValueError(f"{traces}: no state with two masked positions; nothing to calibrate")
    about = origin(recorded, depth, limit_prompts, chosen)
    table = GraphTable(graphs, provenance(command=COMMAND.get()) | about)
    write_graphs(out, table)
    if picture is not None:
        draw(table, picture)
    (stderr_console() if as_json else Console()).print(_table(rows, nodes))
    if as_json:
        print(json.dumps({"out": str(out), "bytes": out.stat().st_size, "prompts": about["prompts"], "graphs": rows}))


def _check_out(out: Path) -> None:
    """Refuse to replace what is no graph file, before the work begins."""
    if out.exists():
        try:
            read_graphs(out)
        except ValueError as error:
            raise ValueError(f"--out {out} exists and is no graph file; give another name") from error
    elif not out.absolute().parent.is_dir():
        raise ValueError(f"--out {out}: its folder does not exist")


def _table(rows: list[dict[str, Any]], nodes: int) -> Table:
    budgets = [n for n in BUDGETS if n - 1 <= nodes]
    table = Table(box=box.SIMPLE, pad_edge=False, collapse_padding=True, title="commits per pass on the traces, by node budget")
    for title in ("rule", "tokens", "L", "states", "nodes", *(f"N={n}" for n in budgets)):
        table.add_column(title, justify="left" if title in ("rule", "tokens") else "right")
    for row in rows:
        tokens = ("coupled" if row["coupled"] else "published") if row["sampled"] else "T = 0"
        shown = [f"{row['per_pass'][str(n)]:.2f}" for n in budgets]
        table.add_row(row["rule"], tokens, str(row["block_length"]), str(row["states"]), str(row["nodes"]), *shown)
    return table


def draw(table: GraphTable, path: Path) -> None:
    """Draw the first nodes of every graph by level, shaded by the share of states from which they were seen."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    count = len(table.graphs)
    columns = min(count, 2)
    lines = -(-count // columns)
    figure, axes = pyplot.subplots(lines, columns, figsize=(9 * columns, 4.5 * lines), squeeze=False)
    for axis in axes.flat[count:]:
        axis.set_axis_off()
    for axis, (key, graph) in zip(axes.flat, table.graphs.items(), strict=False):
        _draw_graph(axis, graph.first(DRAWN_NODES))
        axis.set(title=str(key), xlabel="commits after the certain next state", yticks=[])
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _draw_graph(axis: Any, graph: RankGraph) -> None:
    levels = np.concatenate(([0], graph.levels))
    across = np.zeros(len(levels))
    for level in range(int(levels.max()) + 1):
        at = levels == level
        across[at] = -(np.arange(at.sum()) + 0.5) / at.sum()
    share = np.concatenate(([1.0], np.array(graph.counts) / max(graph.states, 1)))
    for parent, child in graph.edges.tolist():
        axis.plot(levels[[parent, child]], across[[parent, child]], color="0.8", linewidth=0.7, zorder=1)
    axis.scatter(levels, across, c=share, cmap="viridis", vmin=0, vmax=1, s=40, zorder=2)
    labels = ["next state", *(f"{_label(node)}  {share[n]:.0%}" for n, node in enumerate(graph.nodes, 1))]
    for number, label in enumerate(labels):
        axis.annotate(label, (levels[number], across[number]), (0, 5), textcoords="offset points", fontsize=5, ha="center", zorder=3)


def _label(node: Sequence[tuple[int, int]]) -> str:
    """Name a node by its ranks, the second-best token with a prime; runs are shortened."""
    pairs = sorted(node)
    if len(pairs) > 3 and pairs == [(i, 1) for i in range(1, len(pairs) + 1)]:
        return f"1..{len(pairs)}"
    return ",".join(f"{i}{chr(39) * (j - 1)}" for i, j in pairs)
