"""Family `stdlib`: continue real source lines of the Python standard library.

The texts are those of the running interpreter, so samples depend on its version.
"""

from __future__ import annotations

import itertools
import random
import sysconfig
from functools import lru_cache
from pathlib import Path

from zoo.families.base import Sample, Split

LEAD = "Continue:\n"
MIN_MODULES = 30
MAX_PROMPT_TEXT = 160 - len(LEAD)
MAX_ANSWER_TEXT = 130

TRAIN = (
    "textwrap",
    "argparse",
    "json/decoder",
    "json/scanner",
    "collections/__init__",
    "shutil",
    "ast",
    "bisect",
    "calendar",
    "cmd",
    "code",
    "codecs",
    "configparser",
    "contextlib",
    "copy",
    "csv",
    "dataclasses",
    "datetime",
    "difflib",
    "dis",
    "enum",
    "filecmp",
    "fileinput",
    "fnmatch",
    "fractions",
    "functools",
    "getopt",
    "gettext",
    "glob",
    "gzip",
    "heapq",
    "inspect",
    "ipaddress",
    "keyword",
    "linecache",
    "locale",
    "logging/__init__",
    "mailbox",
    "mimetypes",
    "netrc",
    "optparse",
    "os",
    "pathlib",
    "pickle",
    "platform",
    "posixpath",
    "pprint",
    "queue",
    "random",
    "sched",
    "shelve",
    "string",
    "subprocess",
    "tarfile",
    "tempfile",
    "threading",
    "trace",
    "traceback",
    "types",
    "typing",
    "unittest/case",
    "urllib/parse",
    "uuid",
    "zipfile",
)
HELDOUT_VALUES = (
    "json/encoder",
    "shlex",
    "statistics",
    "weakref",
    "cgi",
    "html/parser",
)
HELDOUT_TEMPLATES = (
    "genericpath",
    "reprlib",
    "selectors",
    "tokenize",
    "timeit",
    "wave",
)
MODULES: dict[Split, tuple[str, ...]] = {
    "train": TRAIN,
    "heldout_values": HELDOUT_VALUES,
    "heldout_templates": HELDOUT_TEMPLATES,
}

Window = tuple[str, tuple[str, ...]]


def _usable(line: str) -> bool:
    """Tell whether a line is ASCII, free of tabs and not overlong."""
    return line.isascii() and line.isprintable() and len(line) <= 100


@lru_cache(maxsize=1)
def _sources() -> dict[str, list[str]]:
    """Read the source lines of every listed module that exists."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found: dict[str, list[str]] = {}
    for name in TRAIN + HELDOUT_VALUES + HELDOUT_TEMPLATES:
        path = root / f"{name}.py"
        if path.is_file():
            text = path.read_text(encoding="utf-8", errors="replace")
            found[name] = [line.rstrip() for line in text.splitlines()]
    if len(found) < MIN_MODULES:
        raise RuntimeError(f"found {len(found)} standard-library modules under {root}, at least {MIN_MODULES} are needed")
    return found


def _runs(lines: list[str]) -> list[list[str]]:
    """Cut source lines into runs of usable non-empty lines."""
    runs: list[list[str]] = [[]]
    for line in lines:
        if line and _usable(line):
            runs[-1].append(line)
        elif runs[-1]:
            runs.append([])
    return runs


def _pairs(split: Split) -> set[tuple[str, str]]:
    """Collect the pairs of adjacent stripped lines of a split's modules."""
    pairs: set[tuple[str, str]] = set()
    for name in MODULES[split]:
        for run in _runs(_sources().get(name, [])):
            stripped = [line.strip() for line in run]
            pairs.update(itertools.pairwise(stripped))
    return pairs


@lru_cache(maxsize=3)
def _windows(split: Split) -> tuple[Window, ...]:
    """List the four-to-seven-line windows of a split, without repeated openings."""
    seen: set[tuple[str, str]] = set()
    if split != "train":
        seen |= _pairs("train")
    if split == "heldout_templates":
        seen |= _pairs("heldout_values")
    windows = []
    for name in MODULES[split]:
        for run in _runs(_sources().get(name, [])):
            for i in range(len(run) - 3):
                opening = (run[i].strip(), run[i + 1].strip())
                shortest = sum(len(line.strip()) for line in run[i : i + 4])
                if opening not in seen and shortest <= 240:
                    seen.add(opening)
                    windows.append((name, tuple(run[i : i + 7])))
    return tuple(windows)


def _dedent(lines: tuple[str, ...]) -> list[str]:
    """Remove the indentation that all lines share."""
    margin = min(len(line) - len(line.lstrip()) for line in lines)
    return [line[margin:] for line in lines]


def sample(rng: random.Random, split: Split) -> Sample:
    """Draw a few consecutive source lines and the lines that follow them."""
    windows = _windows(split)
    while True:
        name, lines = rng.choice(windows)
        given = rng.randint(2, min(4, len(lines) - 2))
        after = rng.randint(2, min(3, len(lines) - given))
        shown = _dedent(lines[: given + after])
        prompt = "\n".join(shown[:given])
        answer = "\n".join(shown[given:])
        if len(prompt) <= MAX_PROMPT_TEXT and len(answer) <= MAX_ANSWER_TEXT:
            return Sample("stdlib", name, LEAD + prompt, answer, {"kind": "none"})
