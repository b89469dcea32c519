"""`spot doctor`: whether a checkpoint will load and decode, said without its weights.

Example: `spot doctor JetLM/SDAR-1.7B-Chat --json`.
"""

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from spot_dlm.cli import options as o
from spot_dlm.targets.doctor import Diagnosis, diagnose


def doctor(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="'shipped', a checkpoint folder or a hub id (owner/name).")],
    family: o.FamilyName = None,
    as_json: o.Json = False,
) -> None:
    """Say what a checkpoint is and whether it will load and decode, without reading its weights.

    Reads config.json, the headers of the safetensors files (names, shapes and number formats) and the tokenizer files, compares the
    tensors with those of the native class, and lists what is wrong. Of a hub id only these are fetched, no weights. Exit codes: 0
    loads and decodes, 1 there are problems, 2 bad arguments or not a checkpoint.

    JSON keys: model, folder, family, recognised, host, attention, shift, blocks, block_length, block_length_from, parameters, stored
    (parameters by number format), memory (bytes by number format), ids (mask, end, padding: ids, texts, from), tokenizer,
    chat_template, vocabulary, max_length, missing, unexpected, mismatched (tensors), problems.

    \b
    Examples:
      spot doctor ./my-checkpoint
      spot doctor JetLM/SDAR-1.7B-Chat --json
    """
    told = diagnose(model, family)
    if as_json:
        print(json.dumps(told.to_dict()))
    else:
        _show(Console(), told)
    if told.problems:
        raise typer.Exit(1)


def _show(console: Console, told: Diagnosis) -> None:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for key, text in _lines(told).items():
        table.add_row(key, Text(text))
    console.print(table, highlight=False)
    for problem in told.problems:
        console.print(Text.assemble(("problem: ", "red"), problem), soft_wrap=True)
    if not told.problems:
        console.print(Text("no problems: loads and decodes", "green"))


def _lines(told: Diagnosis) -> dict[str, str]:
    lines = {"model": told.model, "family": f"{told.family}, {told.recognised}" if told.family else "not one that is supported"}
    if told.family:
        lines |= {"host": str(told.host), "attention": str(told.attention), "shift": str(told.shift), "blocks": str(told.blocks)}
        lines["block length"] = f"{told.block_length} from {told.block_length_from}" if told.block_length is not None else "unknown"
    if told.parameters is not None:
        stored = ", ".join(f"{dtype} {count:,}" if len(told.stored) > 1 else dtype for dtype, count in told.stored.items())
        lines["parameters"] = f"{told.parameters:,}" + (f" stored as {stored}" if stored else "")
        lines["memory"] = ", ".join(f"{name} {_size(count)}" for name, count in told.memory.items()) + " for the weights"
    for name, found in told.ids.items():
        pairs = (f"{i} {text!r}" if text else str(i) for i, text in zip(found["ids"], found["texts"], strict=True))
        lines[{"mask": "mask token", "end": "end tokens"}.get(name, name)] = f"{', '.join(pairs) or 'none'} from {found['from']}"
    lines |= {"vocabulary": str(told.vocabulary or "unknown"), "context": str(told.max_length or "unknown")}
    lines |= {"tokenizer": told.tokenizer or "no"}
    lines["chat template"] = f"yes, {told.chat_template}" if told.chat_template else "no: prompts are encoded bare, with --raw"
    return lines


def _size(count: int) -> str:
    """Return bytes with a unit that leaves one to three digits before the point."""
    size, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{size:.1f} {unit}"
