"""Prompt files in, result files out: JSON lines, checked before anything is decoded and safe to continue after an interruption.

Knows nothing of targets. Example: `read_prompts(Path("prompts.jsonl"))[0].prompt`.
"""

import fcntl
import json
import math
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from spot_dlm.interfaces import SAMPLES_PER_PROMPT
from spot_dlm.tasks import TaskPrompt, check_of

KNOWN = ("id", "prompt", "prompt_ids", "seed", "temperature", "max_new_tokens")
GRADED = ("family", "answer", "check")
"""Keys more of prompts whose answers are graded, as in `TaskPrompt`."""
_BEGINNING = b'{"id": '  # of every result line, see result_row and result_line


@dataclass(frozen=True)
class PromptLine:
    """One prompt of a file: its number from 0, the line it stands on, and what overrides the command's options.

    `task` says how its answers are graded, None where they are not.
    """

    id: str | int
    index: int
    prompt: str | list[int]
    where: str
    overrides: dict[str, Any]
    task: TaskPrompt | None = None

    def sequence(self, sample: int) -> int:
        """Return the noise key of one sample: prompts and samples of one run all differ, whatever their number."""
        return self.index * SAMPLES_PER_PROMPT + sample


def read_prompts(path: Path, warn: Callable[[str], None] = lambda _: None, graded: bool = False) -> list[PromptLine]:
    """Read and check a whole prompt file; `graded` reads how answers are graded, too.

    Raises:
        ValueError: naming the line that is unreadable, half-written, empty, carries an id twice or a check that cannot be made.
        OSError: if the file cannot be read.
    """
    lines = path.read_bytes().split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    if not lines:
        raise ValueError(f"{path}: no prompts there")
    prompts: list[PromptLine] = []
    seen: dict[str, str] = {}
    unknown: set[str] = set()
    known = KNOWN + GRADED if graded else KNOWN
    for number, line in enumerate(lines, 1):
        where = f"{path}:{number}"
        row = _object(line, where)
        prompt = _prompt_line(row, number, where)
        if str(prompt.id) in seen:
            raise ValueError(f"{where}: id {prompt.id!r} stands on line {seen[str(prompt.id)]} already")
        seen[str(prompt.id)] = str(number)
        unknown |= set(row) - set(known)
        prompts.append(replace(prompt, task=_task(row, prompt, path.stem)) if graded else prompt)
    if unknown:
        warn(f"{path}: ignored keys {', '.join(sorted(unknown))}; known are {', '.join(known)}")
    return prompts


def _object(line: bytes, where: str) -> dict[str, Any]:
    if not line.strip():
        raise ValueError(f"{where}: the line is empty")
    try:
        row = json.loads(line.decode("utf-8"))
    except ValueError as error:
        raise ValueError(f"{where}: no complete JSON object ({error})") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where}: a JSON object is needed, got {type(row).__name__}")
    return row


def _prompt_line(row: dict[str, Any], number: int, where: str) -> PromptLine:
    given = [k for k in ("prompt", "prompt_ids") if k in row]
    if len(given) != 1:
        raise ValueError(f"{where}: exactly one of prompt and prompt_ids is needed, got {' and '.join(given) or 'none'}")
    prompt = row[given[0]]
    if given[0] == "prompt":
        if not isinstance(prompt, str):
            raise ValueError(f"{where}: prompt must be a text")
    elif not (isinstance(prompt, list) and all(_is_whole(i) for i in prompt)):
        raise ValueError(f"{where}: prompt_ids must be a list of whole numbers")
    name = row.get("id", number)
    if not (_is_whole(name) or (isinstance(name, str) and name)):
        raise ValueError(f"{where}: id must be a text or a whole number")
    overrides = {k: row[k] for k in ("seed", "temperature", "max_new_tokens") if row.get(k) is not None}
    for key, value in overrides.items():
        if not (_is_whole(value) or (key == "temperature" and isinstance(value, float) and math.isfinite(value))) or abs(value) >= 2**64:
            raise ValueError(f"{where}: {key}={value!r:.40} must be a {'' if key == 'temperature' else 'whole '}number")
    if "temperature" in overrides:
        overrides["temperature"] = float(overrides["temperature"])
    return PromptLine(name, number - 1, prompt, where, overrides)


def _task(row: dict[str, Any], line: PromptLine, family: str) -> TaskPrompt | None:
    """Return how the answers to a prompt are graded, None where nothing says it."""
    answer, check, family = row.get("answer"), row.get("check"), row.get("family") or family
    if answer is None and check is None:
        return None
    try:
        if not isinstance(family, str):
            raise ValueError("family must be a text")
        found = check_of(answer, check)
        if found["kind"] == "python" and not isinstance(line.prompt, str):
            raise ValueError("check kind 'python' needs the prompt as text, the function's head")
    except ValueError as error:
        raise ValueError(f"{line.where}: {error}") from error
    return TaskPrompt(str(line.id), family, line.prompt if isinstance(line.prompt, str) else "", answer or "", found)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_half_written(tail: bytes) -> bool:
    """Whether a last line without its end can be what is left of a result line, and not a whole line of something else."""
    if not tail.startswith(_BEGINNING):
        return _BEGINNING.startswith(tail)
    try:
        json.loads(tail)
    except ValueError:
        return True
    return False


def result_line(row: dict[str, Any], settings: dict[str, Any]) -> bytes:
    """Return the line of one result, with the settings that made it."""
    return (json.dumps(row | {"settings": settings}, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


class ResultFile:
    """An append-only file of result lines that a second run continues.

    Every line carries the settings that made it, so a file never mixes two. A half-written last line is removed, a failed write
    is taken back. The file is locked while it is open.

    Raises:
        ValueError: if a line is damaged, is no result line or was made with other settings, or another run has the file.
        OSError: if the file cannot be opened.
    """

    def __init__(self, path: Path, settings: dict[str, Any], overwrite: bool = False) -> None:
        self._path, self._settings = path, settings
        self.finished: dict[tuple[str, int], dict[str, Any]] = {}
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            if stat.S_ISREG(os.fstat(self._file).st_mode):
                self._lock()
                if overwrite:
                    os.ftruncate(self._file, 0)
                self._read()
        except BaseException:
            os.close(self._file)
            raise

    def _lock(self) -> None:
        with suppress(OSError):  # some file systems have no locks
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ValueError(f"{self._path}: another run is writing this file; wait for it or give another --out") from error

    def _read(self) -> None:
        data = self._path.read_bytes()
        *lines, tail = data.split(b"\n")
        for number, line in enumerate(lines, 1):
            key, row = self._row(line, number)
            self.finished[key] = row
        if tail:
            if not _is_half_written(tail):
                self._row(tail, len(lines) + 1)
            os.ftruncate(self._file, len(data) - len(tail))

    def _row(self, line: bytes, number: int) -> tuple[tuple[str, int], dict[str, Any]]:
        where = f"{self._path}:{number}"
        try:
            row = _object(line, where)
            key = str(row["id"]), int(row["sample"])
            if not (isinstance(row["text"], str) and isinstance(row["token_ids"], list)):
                raise TypeError("text or token_ids is damaged")
            differing = self._differing(dict(row["settings"]))
        except (KeyError, TypeError, ValueError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else error
            raise ValueError(f"{where}: not a result line of spot ({reason}); give another --out or --overwrite") from error
        if differing:
            raise ValueError(f"{where}: made with other settings ({differing}); give another --out or --overwrite")
        return key, row

    def _differing(self, found: dict[str, Any]) -> str:
        keys = [k for k in {**self._settings, **found} if self._settings.get(k) != found.get(k)]
        return ", ".join(f"{k} is {found.get(k)!r} there, {self._settings.get(k)!r} now" for k in keys)

    def is_finished(self, prompt: PromptLine, sample: int) -> bool:
        """Whether the file holds this sample already.

        Raises:
            ValueError: if it holds another prompt under the same id.
        """
        row = self.finished.get((str(prompt.id), sample))
        if row is None:
            return False
        key = "prompt" if isinstance(prompt.prompt, str) else "prompt_ids"
        same = row.get(key) == prompt.prompt and row.get("sequence") == prompt.sequence(sample)
        if not same or row.get("overrides", {}) != prompt.overrides:
            raise ValueError(f"{prompt.where}: {self._path} holds another prompt as id {prompt.id!r}; give another --out or --overwrite")
        return True

    def append(self, row: dict[str, Any]) -> None:
        """Write one line at once; if that fails nothing of it stays."""
        data = result_line(row, self._settings)
        size = os.fstat(self._file).st_size
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except BaseException as error:
            with suppress(OSError):
                os.ftruncate(self._file, size)
            if isinstance(error, OSError):
                raise OSError(error.errno, f"{error.strerror} (the results before it are kept)", str(self._path)) from error
            raise

    def __enter__(self) -> "ResultFile":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        os.close(self._file)
