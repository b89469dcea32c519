"""Family `python`: a signature with a docstring is completed with its body."""

from __future__ import annotations

import random

from zoo.families.base import Sample, Split, allowed, choose
from zoo.families.python_kinds import LETTERS, NUMBER_KINDS, TEXT_KINDS, Kind
from zoo.families.python_list_kinds import LIST_KINDS

KINDS = NUMBER_KINDS + TEXT_KINDS + LIST_KINDS
HELDOUT_WORDING = 3
SEPARATORS = (
    ",",
    ", ",
    "-",
    ";",
    "; ",
    " ",
    ":",
    "/",
    "_",
    " - ",
    "+",
    "|",
    " / ",
    ".",
)

Entry = tuple[Kind, int]
_ALL: tuple[Entry, ...] = tuple((k, i) for k in KINDS for i in range(len(k.docs)))
TRAIN = tuple(entry for entry in _ALL if entry[1] != HELDOUT_WORDING)
HELDOUT = tuple(entry for entry in _ALL if entry[1] == HELDOUT_WORDING)


def _fields(kind: Kind, rng: random.Random) -> dict[str, str | int]:
    """Draw the constants and names of a function."""
    low = rng.randint(2, 49)
    fields: dict[str, str | int] = {
        "k": low,
        "j": low + rng.randint(1, 50),
        "c": rng.choice(LETTERS),
        "s": rng.choice(SEPARATORS),
        "a": rng.choice(kind.args),
    }
    function = rng.choice(kind.functions).format_map(fields)
    if rng.random() < 0.5:
        function = f"{function}_{fields['a']}"
    fields["f"] = function
    return fields


def _key(kind: Kind, fields: dict[str, str | int]) -> str:
    """Write the values that distinguish a function canonically."""
    used = kind.body + "".join(kind.docs)
    shown = [str(fields[name]) for name in "kjcs" if "{" + name + "}" in used]
    return "|".join([kind.name, str(fields["f"]), str(fields["a"]), *shown])


def _tests(kind: Kind, fields: dict[str, str | int]) -> list[str]:
    """Write the asserts that compare the function with its reference."""
    tests = []
    edges = kind.edges(int(fields["k"])) if kind.edges else ()
    for args in kind.inputs + edges:
        wanted = kind.reference(fields, *args)
        call = ", ".join(repr(arg) for arg in args)
        tests.append(f"assert {fields['f']}({call}) == {wanted!r}")
    return tests


def sample(rng: random.Random, split: Split) -> Sample:
    """Draw one function: the prompt is its head, the answer its body."""
    kind, wording = choose(rng, split, TRAIN, HELDOUT)
    fields = _fields(kind, rng)
    while not allowed(_key(kind, fields), split):
        fields = _fields(kind, rng)
    doc = kind.docs[wording].format_map(fields)
    prompt = f'def {fields["f"]}({fields["a"]}{kind.extra}):\n    """{doc}"""'
    answer = "    " + kind.body.format_map(fields)
    check = {"kind": "python", "entry": fields["f"], "tests": _tests(kind, fields)}
    return Sample("python", f"{kind.name}.{wording}", prompt, answer, check)
