"""`spot analyze`: what traces say about stale tokens and about the order, as a table, a JSON file and a figure.

Example: `spot analyze traces --out analysis.json --plot analysis.png`.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from spot_dlm.analyze import Scorer, figure, scorer_of
from spot_dlm.analyze import analyze as analyze_traces
from spot_dlm.artifacts import provenance, replace_file, write_json
from spot_dlm.cli import options as o
from spot_dlm.cli.show import COMMAND, stderr_console
from spot_dlm.drafter_files import load_order_model
from spot_dlm.drafters.registry import SHIPPED_MODELS
from spot_dlm.traces import read_traces


def analyze(
    traces: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of finished traces (spot trace).", show_default=False)],
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write all figures as one JSON document.")] = None,
    drafter_file: Annotated[
        list[Path] | None,
        typer.Option(
            "--drafter-file",
            metavar="DIR|ID",
            callback=o.located,
            help="Trained drafter to judge too (spot train). Repeatable; default: those of the shipped model where the traces are its own.",
        ),
    ] = None,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Draw them as a PNG (needs matplotlib).")] = None,
) -> None:
    """Measure on traces how often the tokens and the order of later steps are known in advance.

    Per family, rule, temperature and block length, and pooled: how often the stale token is the committed one at look-ahead 1, 2, 4, 8;
    how often the stale confidences and left to right name the next position; at which place of the stale order the next commit
    stood; how often the two best confidences of a step are equal or nearly so. The last line on stdout is one JSON document.

    \b
    Examples:
      spot analyze traces
      spot analyze traces --out analysis.json --plot analysis.png
    """
    for path in (out, plot):
        if path is not None and not path.absolute().parent.is_dir():
            raise ValueError(f"{path}: no such folder {path.parent}")
    console = stderr_console()
    read = read_traces(traces)
    fingerprint = read.manifest.get("target", {}).get("fingerprint")
    models = [load_order_model(folder) for folder in drafter_file or SHIPPED_MODELS]
    judged = [f.model for f in models if drafter_file or f.target_fingerprint == fingerprint]
    scorers: dict[str, Scorer] = {m.config.kind: scorer_of(m) for m in judged}
    document = analyze_traces(read, scorers)
    origin = {k: read.manifest.get(k) for k in ("target", "seed", "prompts_hash", "git_revision", "command")}
    document |= {"traces": origin, **provenance(command=COMMAND.get())}
    for table in _tables(document):
        console.print(table)
    if out is not None:
        write_json(out, document)
    if plot is not None:
        title = f"Stale tokens and order, {(origin['target'] or {}).get('name', 'unknown target')}"
        picture = figure(document | {"title": title})
        replace_file(plot, lambda partial: partial.write_bytes(picture))
    files = {k: str(v) for k, v in (("out", out), ("plot", plot)) if v is not None}
    print(json.dumps(files | {k: document[k] for k in ("sequences", "look_aheads", "pooled")}))


def _tables(document: dict[str, Any]) -> Iterator[Table]:
    """Yield what is known of tokens, of the order and of ties, by setting (families pooled) and pooled over all."""
    everything = {"rule": "all", "temperature": None, "block_length": None} | document["pooled"]
    rows = [*document["settings"], everything]
    looks = "/".join(str(k) for k in document["look_aheads"])
    kinds = {"committed": ("token", "best"), "in best two": ("token", "two_best")}
    yield _table(
        f"stale token is the committed one, %, at look-ahead {looks}",
        rows,
        {k: [_list(r[t], s) for r in rows] for k, (t, s) in kinds.items()},
    )
    names = list(document["pooled"]["order"])
    columns = {n.replace("_", " "): [_list(r["order"][n], "top1") for r in rows] for n in names}
    yield _table(f"first choice is the next position, %, at look-ahead {looks}", rows, columns)
    ties = {"equal": "equal", "gap < 1e-3": "gap_below_1e-3", "gap < 1e-5": "gap_below_1e-5"}
    yield _table(
        "the two best confidences of a step, % of steps", rows, {k: [_percent(r["ties"][v]) for r in rows] for k, v in ties.items()}
    )


def _table(title: str, rows: list[dict[str, Any]], columns: dict[str, list[str]]) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False, collapse_padding=True, title=title, title_justify="left")
    for name in ("rule", "T", "L", "steps", *columns):
        table.add_column(name, justify="left" if name == "rule" and len(table.columns) == 0 else "right")
    for i, row in enumerate(rows):
        temperature = "" if row["temperature"] is None else f"{row['temperature']:g}"
        cells = (values[i] for values in columns.values())
        table.add_row(row["rule"], temperature, str(row["block_length"] or ""), str(row["states"]), *cells)
    return table


def _list(shares: dict[str, Any], key: str) -> str:
    return "/".join(_percent(entry[key]) for entry in shares.values())


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f}" if share == 1 else f"{100 * share:.1f}"
