"""Traces: recorded standard decoding on disk, vocabulary-free, as flat arrays in shards with a manifest written last.

Four tables, each one array per column: sequences > blocks > states > rows, where a row is one masked position of one state. A state
is the canvas before one transition; its row count is the number of masked positions. Never whole logits. At T > 0 every state also
has `ahead_*` entries: depths x (masked - 1) look-ahead tokens of its successor, depth-major. Where a speculative decoder recorded, the
states at which it drafted also have effects (`effects.py`): `effect_rows` x rows numbers, all rows or none. Knows nothing of how
traces are made.

Example: `traces = read_traces(Path("traces")); traces.state["commit_position"]`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from spot_dlm.artifacts import file_hash, read_json, replace_file, write_json

FORMAT = "spot-traces/2"
NUM_LOGP = 8
"""Best log-probabilities kept of every row."""

COLUMNS: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {
    "sequence": {"prompt": ("int32", ()), "setting": ("int16", ()), "blocks": ("int32", ()), "tokens": ("int32", ())},
    "block": {"index": ("int32", ()), "tail": ("int16", ()), "states": ("int16", ())},
    "state": {
        "step": ("int16", ()),
        "rows": ("int16", ()),
        "ahead_depths": ("int16", ()),
        "effect_rows": ("int16", ()),
        "commit_position": ("int16", ()),
        "commit_token": ("int32", ()),
    },
    "row": {
        "position": ("int16", ()),
        "logp": ("float32", (NUM_LOGP,)),
        "ids": ("int32", (2,)),
        "log_rest": ("float32", ()),
        "entropy": ("float32", ()),
        "fine": ("float32", ()),
        "token": ("int32", ()),
        "known": ("float32", ()),
    },
    "effect": {"value": ("float32", ())},
    "ahead": {"tokens": ("int32", (2,)), "fine": ("float32", (2,)), "margin": ("float32", ())},
}
"""Tables, columns, types and the shape of one entry."""


@dataclass
class Columns:
    """Growing columns of the four tables and the look-ahead; `arrays` concatenates them."""

    parts: dict[str, list[np.ndarray]] = field(default_factory=dict)

    def add(self, table: str, **values: Any) -> None:
        """Append entries (arrays of equal length, or scalars for one entry)."""
        for column, (dtype, shape) in COLUMNS[table].items():
            array = np.asarray(values[column], dtype=dtype)
            self.parts.setdefault(f"{table}_{column}", []).append(array.reshape(-1, *shape))

    def arrays(self) -> dict[str, np.ndarray]:
        """Return every column as one array, empty where nothing was added."""
        return {
            f"{table}_{column}": np.concatenate(self.parts.get(f"{table}_{column}", [np.empty((0, *shape), dtype)]))
            for table, columns in COLUMNS.items()
            for column, (dtype, shape) in columns.items()
        }


@dataclass(frozen=True)
class Traces:
    """All shards of a folder, joined: one dictionary of columns per table, offsets into the finer table, and the manifest."""

    manifest: Mapping[str, Any]
    sequence: dict[str, np.ndarray]
    block: dict[str, np.ndarray]
    state: dict[str, np.ndarray]
    row: dict[str, np.ndarray]
    ahead: dict[str, np.ndarray]
    effect: dict[str, np.ndarray]

    @property
    def settings(self) -> Sequence[Mapping[str, Any]]:
        """Decoding settings: rule (text), temperature, top_p, top_k, block_length, seed."""
        return self.manifest["settings"]

    @property
    def prompts(self) -> Sequence[Mapping[str, Any]]:
        """Recorded prompts: id and family (empty where the file gave none)."""
        return self.manifest["prompts"]

    def offsets(self, table: str) -> np.ndarray:
        """Return where each entry's children begin in the finer table (one more entry than `table` has), e.g. rows of a state.

        Args:
            table: "sequence" (blocks), "block" (states), "state" (rows), "ahead" or "effect" (look-ahead and effect entries of a state).
        """
        rows = self.state["rows"].astype(np.int64)
        counts = {
            "sequence": self.sequence["blocks"],
            "block": self.block["states"],
            "state": rows,
            "ahead": self.state["ahead_depths"] * (rows - 1),
            "effect": self.state["effect_rows"] * rows,
        }[table]
        return np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))

    def setting_of_block(self) -> np.ndarray:
        """Return the setting number of every block."""
        return np.repeat(self.sequence["setting"], self.sequence["blocks"])


def write_shard(folder: Path, number: int, columns: Columns) -> None:
    """Write one shard whole or not at all."""
    arrays = columns.arrays()

    def write(partial: Path) -> None:
        with partial.open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays)

    replace_file(shard_path(folder, number), write)


def shard_path(folder: Path, number: int) -> Path:
    """Return the file of a shard."""
    return folder / f"shard-{number:05d}.npz"


def write_manifest(folder: Path, about: Mapping[str, Any], num_shards: int) -> dict[str, Any]:
    """Write the manifest, which makes the traces complete: what was recorded, and the hash and size of every shard."""
    shards = []
    for number in range(num_shards):
        path = shard_path(folder, number)
        shards.append({"file": path.name, "bytes": path.stat().st_size, "sha256": file_hash(path)})
    document = {"format": FORMAT, **about, "shards": shards}
    write_json(folder / "manifest.json", document)
    return document


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read a trace folder's manifest.

    Raises:
        ValueError: if the recording is unfinished or the folder holds no traces.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; record one with 'spot trace'")
    if not (folder / "manifest.json").exists():
        raise ValueError(
            f"{folder}: no manifest.json: the recording is unfinished (run the same 'spot trace' again) or this is no trace folder"
        )
    return read_json(folder / "manifest.json", FORMAT)


def join_traces(parts: Sequence[Traces]) -> Traces:
    """Return several recordings as one; prompts and settings are numbered on, the manifest is the first one's with all shards.

    Where they are of several targets, the manifest's target is named "several" and lists them.
    """
    if len(parts) == 1:
        return parts[0]
    tables = {name: {c: np.concatenate([getattr(p, name)[c] for p in parts]) for c in columns} for name, columns in COLUMNS.items()}
    for column, counts in (("prompt", [len(p.prompts) for p in parts]), ("setting", [len(p.settings) for p in parts])):
        shift = np.repeat(np.cumsum([0, *counts[:-1]]), [len(p.sequence[column]) for p in parts])
        tables["sequence"][column] = (tables["sequence"][column] + shift).astype(COLUMNS["sequence"][column][0])
    lists = {key: [entry for p in parts for entry in p.manifest[key]] for key in ("prompts", "settings", "shards")}
    targets = list({p.manifest["target"]["fingerprint"]: p.manifest["target"] for p in parts}.values())
    target = targets[0] if len(targets) == 1 else {"name": "several", "fingerprint": "several", "targets": targets}
    return Traces({**parts[0].manifest, "target": target, **lists}, **tables)


def read_traces(folder: Path, check: bool = True) -> Traces:
    """Read and join all shards of a finished recording.

    Raises:
        ValueError: naming the shard that is missing, changed or damaged.
    """
    manifest = read_manifest(folder)
    shards = []
    for entry in manifest["shards"]:
        path = folder / entry["file"]
        if not path.exists() or path.stat().st_size != entry["bytes"] or (check and file_hash(path) != entry["sha256"]):
            raise ValueError(f"{path}: missing or not the file that the manifest describes; record the traces again")
        try:
            with np.load(path, allow_pickle=False) as file:
                shards.append({name: file[name] for name in file.files})
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"{path}: damaged ({error})") from error
    tables = {
        table: {column: np.concatenate([s[f"{table}_{column}"] for s in shards]) for column in columns}
        for table, columns in COLUMNS.items()
    }
    if not len(tables["state"]["step"]):
        raise ValueError(f"{folder}: the traces hold no state")
    return Traces(manifest, **tables)
