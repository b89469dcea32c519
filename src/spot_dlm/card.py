"""The model card of a drafter: metadata and text from its config.json, figures from results files or as the user gave them.

No figure is computed or guessed here. Knows nothing of the hub. Example: `card(read_config(folder), [read_results(path, about)])`.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spot_dlm.drafter_files import CALIBRATED, REPOSITORY, trained_rules

TAGS = ["speculative-decoding", "diffusion-language-model", "drafter", "spot-dlm"]


@dataclass(frozen=True)
class Measured:
    """Figures of one results file: its command and the lines of the table."""

    command: str
    rows: list[dict[str, Any]]


def read_results(path: Path, about: Mapping[str, Any], shipped_sha256: Sequence[str] = ()) -> Measured:
    """Return what a results file ('spot verify --json', 'spot bench passes --out') says of a drafter.

    Args:
        path: the file.
        about: the drafter's config.json.
        shipped_sha256: weights of the shipped drafters, which were measured where the command names no file.

    Raises:
        ValueError: if the file is none, is of another target or another drafter, or has nothing on one of this kind.
    """
    try:
        document = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"--results {path}: cannot be read ({error})") from error
    rows = (document.get("pooled") or document.get("rows")) if isinstance(document, dict) else None
    origin = document.get("provenance") if isinstance(document, dict) else None
    if not isinstance(rows, list) or not isinstance(origin, dict):
        raise ValueError(f"--results {path}: holds no rows with provenance; give a file of 'spot verify --json' or 'spot bench passes'")
    theirs, ours = origin.get("fingerprint"), (about.get("target") or {}).get("fingerprint")
    if not theirs or theirs != ours:  # nothing said is no proof
        raise ValueError(f"--results {path}: was measured on target {theirs}, this drafter was fitted on {ours}")
    command = str(document.get("command") or origin.get("command") or "")
    given = "--drafter-file" in command or "--graph" in command
    if not given and about.get("weights_sha256") not in shipped_sha256 and about["kind"] != CALIBRATED:
        raise ValueError(f"--results {path}: was measured with the shipped drafter (no --drafter-file in {command!r}), not with this one")
    try:
        own = [_figure(row, origin) for row in rows if isinstance(row, dict) and _is_of(row, about["kind"])]
    except (TypeError, ValueError) as error:
        raise ValueError(f"--results {path}: damaged: a row of {about['kind']} holds a figure that is no number ({error})") from error
    if not own:
        raise ValueError(f"--results {path}: has no row of a drafter of kind {about['kind']!r}")
    return Measured(command, own)


def _is_of(row: Mapping[str, Any], kind: str) -> bool:
    name = str(row.get("drafter"))
    return (name == kind or (kind == CALIBRATED and name.startswith(kind))) and "nfe_reduction" in row and "nodes" in row


def _figure(row: Mapping[str, Any], origin: Mapping[str, Any]) -> dict[str, Any]:
    rule = row.get("rule") or {"float32": "standard"}.get(str(row.get("resolution")), row.get("resolution"))
    return {
        "T": f"{row.get('temperature', 0):g}",
        "rule": rule,
        "block": row.get("block_length") or origin.get("block_length"),
        "drafter": row["drafter"],
        "N": row["nodes"],
        "times fewer passes": f"{row['nfe_reduction']:.2f}",
        "decodes": row.get("cases") or row.get("prompts"),
        "identical": {True: "all", False: "NOT all", None: ""}.get(row.get("identical"), row.get("identical")),
    }


def card(about: Mapping[str, Any], measured: Sequence[Measured] = (), given: Sequence[str] = (), title: str = "") -> str:
    """Return README.md: YAML metadata, what the drafter is, what it belongs to, figures, use."""
    from huggingface_hub import ModelCardData

    target = about.get("target") or {}
    name = str(target.get("name", "?"))
    base = name if re.fullmatch(REPOSITORY, name) else None
    data = ModelCardData(library_name="spot-dlm", tags=[*TAGS, f"spot-{about['kind']}"], base_model=base)
    heading = title or f"Drafter ({about['kind']}) for {name}"
    parts = [
        f"---\n{data.to_yaml().strip()}\n---",
        f"# {heading}",
        f"A drafter of kind `{about['kind']}` for lossless speculative decoding of the diffusion language model `{name}` with "
        "spot-dlm. It decides how many passes decoding takes, never the tokens or their order.",
        "## Belongs to\n" + _table(["", "value"], _origin_rows(about)),
        "## Acceptance\n" + _acceptance(about, measured, given),
        f"## Use\n```\n{_use(about, name)}\n```",
    ]
    return "\n\n".join(parts) + "\n"


def _use(about: Mapping[str, Any], name: str) -> str:
    return f'spot generate "..." --model {name} --drafter {about["kind"]} --drafter-file OWNER/NAME'


def _origin_rows(about: Mapping[str, Any]) -> list[list[object]]:
    target, hashes = about.get("target") or {}, about.get("hashes") or {}
    settings = about.get("trace_settings") or []
    known: list[list[object]] = [[f"hash of {kind}", f"`{value}`"] for kind, value in hashes.items()]
    rows: list[list[object]] = [
        ["target", f"`{target.get('name', '?')}` (family {target.get('family', '?')}, {target.get('dtype', '?')})"],
        *known,
        ["rules", ", ".join(f"`{rule}`" for rule in trained_rules(about)) or "not stated"],
        ["temperatures", ", ".join(sorted({f"{s['temperature']:g}" for s in settings if "temperature" in s})) or "not stated"],
        ["block lengths", ", ".join(map(str, sorted({s["block_length"] for s in settings if s.get("block_length")}))) or "not stated"],
        ["made by", f"`{about.get('command') or 'not stated'}` (spot-dlm {about.get('spot_dlm', '?')})"],
        ["weights", f"`{about.get('weights_sha256', '?')}`"],
    ]
    return rows


def _acceptance(about: Mapping[str, Any], measured: Sequence[Measured], given: Sequence[str]) -> str:
    parts = []
    for one in measured:
        columns = list(one.rows[0])
        parts.append(f"Measured by `{one.command}`:\n\n" + _table(columns, [[row[c] for c in columns] for row in one.rows]))
    if given:
        parts.append("As stated by whoever published this drafter:\n\n" + "\n".join(f"* {line}" for line in given))
    best = (about.get("training") or {}).get("calibrated") or (about.get("training") or {}).get("best") or {}
    lengths = [(n, best.get(f"acceptance_{n}")) for n in (8, 32)]
    if any(value is not None for _, value in lengths):
        rows = [[n, f"{value:.2f}"] for n, value in lengths if value is not None]
        parts.append("On held-out traces while it was trained, steps that a pass advances:\n\n" + _table(["N", "steps a pass"], rows))
    return "\n\n".join(parts) or "Not measured. `spot verify --drafter-file` on your own prompts says it."


def _table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join([*lines, *("| " + " | ".join(map(_cell, row)) + " |" for row in rows)])


def _cell(value: object) -> str:
    return str("" if value is None else value).replace("|", "\\|").replace("\n", " ")
