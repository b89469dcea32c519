"""What a bench shows: tables as rows of text and in Markdown; and the check, before the work, that its files can be written.

Example: `check_writable(path); ...; path.write_text(passes_markdown(document))`.
"""

import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from spot_dlm.bench.drafters import in_order


def check_writable(path: Path | None) -> None:
    """Refuse a file that could not be written later; None is fine.

    Raises:
        ValueError: naming the file and the reason.
    """
    if path is None:
        return
    if path.exists() and not path.is_file():
        raise ValueError(f"{path}: not a regular file")
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise ValueError(f"{path}: cannot be written ({error.strerror})") from error
    os.close(handle)
    os.unlink(name)


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(map(str, row)) + " |" for row in rows)])


def passes_tables(cells: Sequence[dict[str, Any]], intervals: bool = True) -> list[tuple[str, list[str], list[list[str]]]]:
    """Return (title, head, rows) for every task, temperature, resolution and block length: drafters by budgets."""
    tables = []
    keys = ("task", "temperature", "resolution", "block_length")
    for place in dict.fromkeys(tuple(c[k] for k in keys) for c in cells):
        here = [c for c in cells if tuple(c[k] for k in keys) == place]
        shown = [c for c in here if c["drafter"] == c["family"]]
        budgets = sorted({c["nodes"] for c in shown})
        rows = []
        for drafter in in_order(c["drafter"] for c in shown):
            found = {c["nodes"]: c for c in shown if c["drafter"] == drafter}
            rows.append([drafter, *(_figure(found.get(n), intervals) for n in budgets)])
        task, temperature, resolution, length = place
        title = f"{task}, T = {temperature:g}, {resolution}, L = {length}, {here[0]['prompts']} prompts"
        tables.append((title, ["drafter", *(f"N={n}" for n in budgets)], rows))
    return tables


def _figure(cell: dict[str, Any] | None, intervals: bool) -> str:
    if cell is None:
        return ""
    shown = f" [{cell['low']:.2f}, {cell['high']:.2f}]" if intervals else ""
    return f"{cell['acceptance_length']:.2f}{shown}{'' if cell['identical'] else ' NOT IDENTICAL'}"


def comparison_lines(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return the comparisons of `order` as table rows, see COMPARISON_HEAD."""
    return [
        [
            r["task"], f"{r['temperature']:g}", r["resolution"], str(r["block_length"]), str(r["nodes"]), f"{r['order']:.2f}",
            f"{r['best_baseline']} {r['baseline']:.2f}", f"{r['difference']:+.2f} [{r['low']:+.2f}, {r['high']:+.2f}]", f"{r['ratio']:.2f}",
            f"{r['oracle_share']:.0%}" if "oracle_share" in r else "",
        ]
        for r in rows
    ]  # fmt: skip


COMPARISON_HEAD = ("task", "T", "resolution", "L", "N", "order", "best baseline", "difference", "ratio", "of oracle")


def passes_markdown(document: dict[str, Any]) -> str:
    """Return the whole report of `passes` in Markdown."""
    parts = ["# Transitions per decoding pass", f"`{document['command']}`", f"95 % intervals: {document['intervals']}."]
    for title, head, rows in passes_tables([*document["pooled"], *document["cells"]]):
        parts += [f"## {title}", markdown_table(head, rows)]
    if document["comparisons"]:
        parts += ["## order against the best baseline", markdown_table(COMPARISON_HEAD, comparison_lines(document["comparisons"]))]
    return "\n\n".join(parts) + "\n"


TRADEOFF_HEAD = ("task", "T", "method", "accuracy", "same", "tok/pass", "speed-up", "s")


def tradeoff_lines(rows: Sequence[dict[str, Any]], intervals: bool = True) -> list[list[str]]:
    """Return the rows of `tradeoff` as table rows, see TRADEOFF_HEAD."""
    return [
        [
            r["task"], f"{r['temperature']:g}", r["method"],
            _accuracy(r, intervals),
            f"{r['same_answers']:.1%}", f"{r['tokens_per_pass']:.2f}", f"{r['speed_up']:.2f}", f"{r['seconds']:.2f}",
        ]
        for r in rows
    ]  # fmt: skip


def _accuracy(row: dict[str, Any], intervals: bool) -> str:
    if row["accuracy"] is None:
        return ""
    shown = f" [{row['accuracy_low']:.0%}, {row['accuracy_high']:.0%}]" if intervals else ""
    return f"{row['accuracy']:.1%}{shown}"


def tradeoff_markdown(document: dict[str, Any]) -> str:
    """Return the whole report of `tradeoff` in Markdown."""
    table = markdown_table(TRADEOFF_HEAD, tradeoff_lines(document["rows"]))
    return f"# Accuracy against speed\n\n`{document['command']}`\n\n{table}\n"


TRANSFER_DRAFTERS = ("chain-published", "chain", "spiffy", "transferred", "others", "own", "oracle")


def transfer_tables(document: dict[str, Any], intervals: bool = True) -> list[tuple[str, list[str], list[list[str]]]]:
    """Return (title, head, rows) for every temperature and resolution: acceptance lengths by target and budget, then ratios.

    Without intervals a ratio has a star where its interval holds no 1.
    """
    keys = ("temperature", "resolution")
    shown = [c for c in document["cells"] if c["drafter"] == c["family"]]
    drafters = [d for d in TRANSFER_DRAFTERS if any(c["drafter"] == d for c in shown)]
    rivals = list(dict.fromkeys(r["rival"] for r in document["comparisons"]))
    tables = []
    for place in dict.fromkeys(tuple(c[k] for k in keys) for c in shown):
        here = [c for c in shown if tuple(c[k] for k in keys) == place]
        ratios = [r for r in document["comparisons"] if tuple(r[k] for k in keys) == place]
        lengths, over = [], []
        for target, nodes in dict.fromkeys((c["target"], c["nodes"]) for c in here):
            cells = {c["drafter"]: c for c in here if (c["target"], c["nodes"]) == (target, nodes)}
            rows = {r["rival"]: r for r in ratios if (r["target"], r["nodes"]) == (target, nodes)}
            lengths.append([target, str(nodes), *(_figure(cells.get(d), intervals) for d in drafters)])
            over.append([target, str(nodes), *(_ratio(rows.get(r), intervals) for r in rivals)])
        where = f"T = {place[0]:g}, {place[1]}"
        tables.append((f"transitions per pass, {where}", ["target", "N", *drafters], lengths))
        tables.append((f"transferred over others, {where}", ["target", "N", *rivals], over))
    return tables


def _ratio(row: dict[str, Any] | None, intervals: bool) -> str:
    if row is None:
        return ""
    return f"{row['ratio']:.2f}" + (
        f" [{row['low']:.2f}, {row['high']:.2f}]" if intervals else "" if row["low"] <= 1 <= row["high"] else "*"
    )


def transfer_markdown(document: dict[str, Any]) -> str:
    """Return the whole report of `transfer` in Markdown."""
    parts = ["# Transfer", f"`{document['command']}`", f"95 % intervals: {document['intervals']}."]
    for title, head, rows in transfer_tables(document):
        parts += [f"## {title}", markdown_table(head, rows)]
    return "\n\n".join(parts) + "\n"
