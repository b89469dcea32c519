"""The function kinds of the `python` family: numbers and texts.

In every string `{f}` is the function name, `{a}` the argument name and `{k}`, `{j}`,
`{c}`, `{s}` are drawn constants. The last wording of a kind with four is held out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

NUMBER = ("n", "x", "number", "value", "count", "size", "total", "price", "age", "time")
LIST = (
    "items",
    "values",
    "numbers",
    "data",
    "scores",
    "prices",
    "ages",
    "sizes",
    "points",
)
WORDS = ("words", "names", "lines", "items", "keys", "cities")
TEXT = ("text", "word", "line", "name", "title", "city", "key", "label")

Inputs = tuple[tuple[Any, ...], ...]


@dataclass(frozen=True)
class Kind:
    """One kind of function with its names, wordings, body and reference."""

    name: str
    args: tuple[str, ...]
    functions: tuple[str, ...]
    docs: tuple[str, ...]
    body: str
    inputs: Inputs
    reference: Callable[..., Any]
    extra: str = ""
    edges: Callable[[int], Inputs] | None = None


def around(k: int) -> Inputs:
    """Build number arguments on both sides of a constant."""
    return (k - 1,), (k,), (k + 1,)


N = ((3,), (10,), (57,))
T = (("banana",), ("a sea",), ("Tom",), ("",))
LETTERS = "abcdefgilmnoprst"
COUNTED = (("".join(c * i for i, c in enumerate(LETTERS, 1)),), ("",))
PAIRED = tuple((a + b,) for a, b in zip(LETTERS, LETTERS[1:] + "a", strict=True))

NUMBER_KINDS = (
    Kind(
        "add_k",
        NUMBER,
        ("add_{k}", "plus_{k}"),
        ("Add {k} to {a}.", "Return {a} plus {k}.", "{a} + {k}.", "Return {a} + {k}."),
        "return {a} + {k}",
        N,
        lambda k, x: x + k["k"],
    ),
    Kind(
        "sub_k",
        NUMBER,
        ("minus_{k}", "less_{k}"),
        (
            "Take {k} from {a}.",
            "Return {a} minus {k}.",
            "{a} - {k}.",
            "Return {a} - {k}.",
        ),
        "return {a} - {k}",
        N,
        lambda k, x: x - k["k"],
    ),
    Kind(
        "mul_k",
        NUMBER,
        ("times_{k}", "scale_{k}"),
        (
            "Multiply {a} by {k}.",
            "Return {a} times {k}.",
            "{a} * {k}.",
            "Return {a} * {k}.",
        ),
        "return {a} * {k}",
        N,
        lambda k, x: x * k["k"],
    ),
    Kind(
        "linear",
        NUMBER,
        ("line", "linear", "scale_add"),
        (
            "Multiply {a} by {k} and add {j}.",
            "{a} times {k} plus {j}.",
            "{a} * {k} + {j}.",
        ),
        "return {a} * {k} + {j}",
        N,
        lambda k, x: x * k["k"] + k["j"],
    ),
    Kind(
        "divisible",
        NUMBER,
        ("divisible_by_{k}", "is_multiple_{k}"),
        (
            "Tell whether {k} divides {a}.",
            "Is {a} divisible by {k}?",
            "Check that {a} is a multiple of {k}.",
            "Tell whether {a} is divisible by {k}.",
        ),
        "return {a} % {k} == 0",
        ((12,), (30,), (7,), (0,)),
        lambda k, x: x % k["k"] == 0,
        edges=around,
    ),
    Kind(
        "is_even",
        NUMBER,
        ("is_even", "even", "check_even"),
        ("Is {a} even?", "Tell whether {a} is even.", "Check that {a} is even."),
        "return {a} % 2 == 0",
        N,
        lambda k, x: x % 2 == 0,
    ),
    Kind(
        "above_k",
        NUMBER,
        ("above_{k}", "over_{k}"),
        (
            "Is {a} above {k}?",
            "Tell whether {a} is above {k}.",
            "Is {a} greater than {k}?",
            "Tell whether {a} is greater than {k}.",
        ),
        "return {a} > {k}",
        N,
        lambda k, x: x > k["k"],
        edges=around,
    ),
    Kind(
        "clamp",
        NUMBER,
        ("clamp", "limit", "clip"),
        (
            "Clamp {a} to {k}..{j}.",
            "Limit {a} to the range {k} to {j}.",
            "Keep {a} between {k} and {j}.",
            "Clamp {a} between {k} and {j}.",
        ),
        "return max({k}, min({j}, {a}))",
        ((0,), (50,), (500,)),
        lambda k, x: max(k["k"], min(k["j"], x)),
        edges=around,
    ),
    Kind(
        "square",
        NUMBER,
        ("square", "squared", "power_2"),
        ("Square {a}.", "Return the square of {a}.", "{a} times itself."),
        "return {a} * {a}",
        N,
        lambda k, x: x * x,
    ),
    Kind(
        "absolute",
        NUMBER,
        ("absolute", "distance", "without_sign"),
        (
            "Return {a} without its sign.",
            "Absolute value of {a}.",
            "Make {a} positive.",
        ),
        "if {a} < 0:\n        return -{a}\n    return {a}",
        ((3,), (-4,), (0,)),
        lambda k, x: abs(x),
    ),
    Kind(
        "sum_to",
        NUMBER,
        ("sum_to", "add_up_to", "total_to"),
        (
            "Sum 1 to {a}.",
            "Add the numbers from 1 to {a}.",
            "Return the sum of 1 to {a}.",
        ),
        "return sum(range(1, {a} + 1))",
        ((3,), (10,), (0,)),
        lambda k, x: sum(range(1, x + 1)),
    ),
    Kind(
        "factorial",
        NUMBER,
        ("factorial", "fact", "product_to"),
        ("Return {a} factorial.", "Multiply 1 to {a}.", "Product of 1 to {a}."),
        "result = 1\n    for i in range(1, {a} + 1):\n        result *= i\n    return result",
        ((3,), (5,), (0,)),
        lambda k, x: prod(range(1, x + 1)),
    ),
    Kind(
        "sign_word",
        NUMBER,
        ("size_word", "level", "label_by_{k}"),
        (
            "Return 'high' if {a} is above {k}, else 'low'.",
            "'high' above {k}, else 'low'.",
            "Say 'high' when {a} is above {k}, else 'low'.",
        ),
        "return 'high' if {a} > {k} else 'low'",
        N,
        lambda k, x: "high" if x > k["k"] else "low",
        edges=around,
    ),
    Kind(
        "swap",
        ("pair", "point", "item", "entry", "value"),
        ("swap", "flip", "swap_pair"),
        ("Swap the two parts of {a}.", "Return {a} in swapped order.", "Flip {a}."),
        "first, second = {a}\n    return second, first",
        (((1, 2),), (("a", "b"),)),
        lambda k, p: (p[1], p[0]),
    ),
    Kind(
        "lookup",
        ("table", "prices", "ages", "data", "index"),
        ("lookup", "find", "get_or_{k}"),
        (
            "Look up key in {a}, default {k}.",
            "Get key from {a}, else {k}.",
            "Return {a}[key] or {k} if missing.",
            "Look up key in {a}, else {k}.",
        ),
        "return {a}.get(key, {k})",
        (({"a": 1}, "a"), ({"a": 1}, "b")),
        lambda k, t, key: t.get(key, k["k"]),
        ", key",
    ),
)

TEXT_KINDS = (
    Kind(
        "reverse_text",
        TEXT,
        ("reverse", "backwards", "reversed_text"),
        (
            "Reverse {a}.",
            "Return {a} backwards.",
            "Turn {a} around.",
            "Return {a} reversed.",
        ),
        "return {a}[::-1]",
        T,
        lambda k, s: s[::-1],
    ),
    Kind(
        "count_vowels",
        TEXT,
        ("count_vowels", "vowels", "num_vowels"),
        (
            "Count the vowels in {a}.",
            "Number of vowels in {a}.",
            "How many vowels has {a}?",
        ),
        "return sum(ch in 'aeiou' for ch in {a})",
        T,
        lambda k, s: sum(ch in "aeiou" for ch in s),
    ),
    Kind(
        "count_letter",
        TEXT,
        ("count_{c}", "num_{c}"),
        (
            "Count the letter {c} in {a}.",
            "Number of {c} in {a}.",
            "How many {c} has {a}?",
            "Count {c} in {a}.",
        ),
        "return {a}.count('{c}')",
        COUNTED,
        lambda k, s: s.count(k["c"]),
    ),
    Kind(
        "starts_with",
        TEXT,
        ("starts_with_{c}", "begins_{c}"),
        (
            "Does {a} start with {c}?",
            "Tell whether {a} starts with {c}.",
            "Check that {a} begins with {c}.",
            "Tell whether {a} begins with {c}.",
        ),
        "return {a}.startswith('{c}')",
        PAIRED,
        lambda k, s: s.startswith(k["c"]),
    ),
    Kind(
        "ends_with",
        TEXT,
        ("ends_with_{c}", "ends_{c}"),
        (
            "Does {a} end with {c}?",
            "Tell whether {a} ends with {c}.",
            "Check that {a} ends with {c}.",
        ),
        "return {a}.endswith('{c}')",
        PAIRED,
        lambda k, s: s.endswith(k["c"]),
    ),
    Kind(
        "drop_letter",
        TEXT,
        ("drop_{c}", "remove_{c}"),
        (
            "Remove {c} from {a}.",
            "Drop every {c} in {a}.",
            "Return {a} without {c}.",
            "Drop {c} from {a}.",
        ),
        "return {a}.replace('{c}', '')",
        COUNTED,
        lambda k, s: s.replace(k["c"], ""),
    ),
    Kind(
        "first_chars",
        TEXT,
        ("first_{k}", "start_{k}"),
        (
            "Return the first {k} letters of {a}.",
            "First {k} letters of {a}.",
            "Cut {a} to {k} letters.",
            "Keep the first {k} letters of {a}.",
        ),
        "return {a}[:{k}]",
        (("abcdefghijkl" * 9,), ("ab",)),
        lambda k, s: s[: k["k"]],
    ),
    Kind(
        "upper",
        TEXT,
        ("upper", "shout", "to_upper"),
        ("Make {a} upper case.", "Return {a} in upper case.", "Upper case of {a}."),
        "return {a}.upper()",
        T,
        lambda k, s: s.upper(),
    ),
    Kind(
        "palindrome",
        TEXT,
        ("is_palindrome", "palindrome", "same_backwards"),
        (
            "Is {a} a palindrome?",
            "Tell whether {a} is a palindrome.",
            "Is {a} the same backwards?",
        ),
        "return {a} == {a}[::-1]",
        (("anna",), ("tom",), ("",)),
        lambda k, s: s == s[::-1],
    ),
    Kind(
        "count_words",
        TEXT,
        ("count_words", "num_words", "word_count"),
        (
            "Count the words in {a}.",
            "Number of words in {a}.",
            "How many words has {a}?",
        ),
        "return len({a}.split())",
        T,
        lambda k, s: len(s.split()),
    ),
    Kind(
        "repeat",
        TEXT,
        ("repeat_{k}", "times_{k}"),
        (
            "Repeat {a} {k} times.",
            "Return {a} {k} times in a row.",
            "{k} copies of {a}.",
        ),
        "return {a} * {k}",
        T,
        lambda k, s: s * k["k"],
    ),
)
