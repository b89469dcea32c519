"""Family `arithmetic`: fact drills, column calculations and short word problems."""

from __future__ import annotations

import random

from zoo.families import words as w
from zoo.families.base import Sample, Split, allowed, choose

DRILL_SHARE = 0.5
Step = tuple[int, str, int]

COLUMN_TRAIN = (
    ("+", "{a} + {b} = ?"),
    ("+", "Compute {a} + {b}."),
    ("+", "What is {a} plus {b}?"),
    ("+", "Add {a} and {b}."),
    ("-", "{a} - {b} = ?"),
    ("-", "Compute {a} - {b}."),
    ("-", "What is {a} minus {b}?"),
    ("-", "Take {b} from {a}."),
    ("*", "{a} * {b} = ?"),
    ("*", "Compute {a} * {b}."),
    ("*", "What is {a} times {b}?"),
    ("*", "Multiply {a} by {b}."),
)
COLUMN_HELDOUT = (
    ("+", "What is {a} + {b}?"),
    ("-", "What is {a} - {b}?"),
    ("*", "What is {a} * {b}?"),
)

# {n} name, {p} pronoun, {m} second name, {g} goods; the operators are the steps.
WORD_TRAIN = (
    ("+", "{n} has {a} {g}. {p} buys {b} more. How many {g}?"),
    ("+", "{n} finds {a} {g} and {m} finds {b}. How many {g} in all?"),
    ("+", "There are {a} {g} in a box. {n} adds {b}. How many {g}?"),
    ("+", "{n} has {a} {g}. {m} has {b} more than {n}. How many has {m}?"),
    ("+", "{n} sold {a} {g} on Monday and {b} on Friday. How many {g} in all?"),
    ("-", "{n} has {a} {g}. {p} sells {b}. How many {g} are left?"),
    ("-", "{n} has {a} {g} and gives {b} to {m}. How many {g} are left?"),
    ("-", "There are {a} {g} in a box. {n} takes {b}. How many are left?"),
    ("-", "{n} has {a} {g}. {m} has {b} fewer. How many has {m}?"),
    ("-", "{n} needs {a} {g} and has {b}. How many are missing?"),
    ("*", "{n} has {b} boxes with {a} {g} each. How many {g}?"),
    ("*", "{b} bags hold {a} {g} each. How many {g} in all?"),
    ("*", "{n} buys {a} {g} every day for {b} days. How many {g}?"),
    ("++", "{n} has {a} {g}. {p} buys {b}, then {c} more. How many {g}?"),
    ("++", "{n} has {a} {g}, {m} has {b} and Kim has {c}. How many in all?"),
    ("+-", "{n} has {a} {g}. {p} buys {b} and sells {c}. How many {g}?"),
    ("+-", "A box has {a} {g}. {n} adds {b} and {m} takes {c}. How many {g}?"),
    ("-+", "{n} has {a} {g}. {p} sells {b} and buys {c}. How many {g}?"),
    ("-+", "A box has {a} {g}. {n} takes {b} and {m} adds {c}. How many {g}?"),
    ("--", "{n} has {a} {g}. {p} sells {b}, then {c} more. How many are left?"),
    ("*+", "{n} has {b} boxes with {a} {g} each and {c} more. How many {g}?"),
    ("*-", "{n} buys {b} boxes with {a} {g} each and sells {c}. How many {g}?"),
)
WORD_HELDOUT = (
    ("+", "{n} has {a} {g}. {m} adds {b} more. How many {g} in all?"),
    ("-", "{n} has {a} {g}. {m} takes {b}. How many {g} are left?"),
    ("*", "{n} has {b} bags with {a} {g} each. How many {g} in all?"),
    ("+-", "{n} has {a} {g}. {p} buys {b} and gives {c} to {m}. How many are left?"),
)
_NAMES = {
    text: f"{kind}{i}"
    for kind, group in (
        ("column.", COLUMN_TRAIN + COLUMN_HELDOUT),
        ("word.", WORD_TRAIN + WORD_HELDOUT),
    )
    for i, (_, text) in enumerate(group)
}


def apply(a: int, op: str, b: int) -> int:
    """Evaluate one operation."""
    return a + b if op == "+" else a - b if op == "-" else a * b


def facts(a: int, op: str, b: int) -> list[str]:
    """Write an operation as column steps, each a single drilled fact."""
    a1, a0 = divmod(a, 10)
    b1, b0 = divmod(b, 10)
    if op == "+":
        carry = int(a0 + b0 > 9)
        tens = f"{a1}+{b1}+{carry}={a1 + b1 + carry}"
        return [f"{a0}+{b0}={a0 + b0} carry {carry}", tens]
    if op == "-":
        borrow = int(a0 < b0)
        top = a0 + 10 * borrow
        tens = f"{a1}-{b1}-{borrow}={a1 - b1 - borrow}"
        return [f"{top}-{b0}={top - b0} borrow {borrow}", tens]
    if a < 10:
        return [f"{a}*{b}={a * b}"]
    carry = a0 * b // 10
    part = a1 * b
    return [
        f"{a0}*{b}={a0 * b} carry {carry}",
        f"{a1}*{b}={part}",
        f"{part}+{carry}={part + carry}",
    ]


def key(step: Step) -> str:
    """Write the operands of a step canonically, ignoring the order where it is free."""
    a, op, b = step
    if op != "-":
        a, b = min(a, b), max(a, b)
    return f"{a}{op}{b}"


def _fits(steps: list[Step], split: Split) -> bool:
    """Tell whether the operand pairs of all steps suit the split."""
    if split == "heldout_values":
        return allowed(key(steps[0]), split)
    return all(allowed(key(step), split) for step in steps)


def _fact(rng: random.Random) -> str:
    """Draw one drill fact."""
    kind = rng.randrange(7)
    a, b, c = rng.randint(0, 9), rng.randint(0, 9), rng.randint(0, 1)
    if kind == 0:
        return f"{a}+{b}={a + b}"
    if kind == 1:
        return f"{a}+{b}+{c}={a + b + c}"
    if kind == 2:
        top = rng.randint(a, a + 9)
        return f"{top}-{a}={top - a}"
    if kind == 3:
        top = rng.randint(min(9, a + c), 9)
        low = min(a, top - c)
        return f"{top}-{low}-{c}={top - low - c}"
    if kind in (4, 5):
        b = rng.randint(2, 9)
        return f"{a}*{b}={a * b}"
    a, b = rng.randint(1, 9), rng.randint(2, 9)
    carry = rng.randint(0, b - 1)
    return f"{a * b}+{carry}={a * b + carry}"


def drill(rng: random.Random) -> Sample:
    """Draw a row of four to six facts; drills are for training only."""
    row = [_fact(rng) for _ in range(rng.randint(4, 6))]
    prompt = "Drill: " + " ".join(fact.split("=")[0] for fact in row)
    answer = " ".join(row)
    check = {"kind": "exact", "text": answer}
    return Sample("arithmetic", "drill", prompt, answer, check)


def _number(template: str, prompt: str, lines: list[str], value: int) -> Sample:
    """Assemble a sample whose answer ends with a number."""
    answer = "\n".join([*lines, f"Answer: {value}"])
    check = {"kind": "number", "value": str(value)}
    return Sample("arithmetic", template, prompt, answer, check)


def _column(rng: random.Random, split: Split) -> Sample:
    """Draw a bare calculation with two-digit numbers."""
    op, text = choose(rng, split, COLUMN_TRAIN, COLUMN_HELDOUT)
    while True:
        a = rng.randint(11, 99)
        b = rng.randint(2, 9) if op == "*" else rng.randint(10, 99)
        if (op != "-" or a > b) and _fits([(a, op, b)], split):
            break
    prompt = text.format(a=a, b=b)
    return _number(_NAMES[text], prompt, facts(a, op, b), apply(a, op, b))


def _operands(rng: random.Random, ops: str) -> list[Step]:
    """Draw the steps of a word problem with every result from 2 to 99."""
    while True:
        total = (rng.randint(2, 9) if rng.random() < 0.5 else rng.randint(10, 33)) if ops[0] == "*" else rng.randint(11, 90)
        steps: list[Step] = []
        for op in ops:
            b = rng.randint(2, 9) if op == "*" else rng.randint(2, 60)
            steps.append((total, op, b))
            total = apply(total, op, b)
            if not 2 <= total <= 99 or (len(ops) > len(steps) and total < 10):
                break
        else:
            return steps


def _word(rng: random.Random, split: Split) -> Sample:
    """Draw a word problem of one or two steps."""
    ops, text = choose(rng, split, WORD_TRAIN, WORD_HELDOUT)
    steps = _operands(rng, ops)
    while not _fits(steps, split):
        steps = _operands(rng, ops)
    female = rng.random() < 0.5
    name = rng.choice(w.FEMALE if female else w.MALE)
    other = rng.choice(w.MALE if female else w.FEMALE)
    prompt = text.format(
        n=name,
        m=other,
        p="She" if female else "He",
        g=rng.choice(w.GOODS),
        a=steps[0][0],
        b=steps[0][2],
        c=steps[-1][2],
    )
    lines = []
    for a, op, b in steps:
        result = apply(a, op, b)
        lines.append(f"{a}{op}{b}: {', '.join(facts(a, op, b))} so {result}")
    return _number(_NAMES[text], prompt, lines, apply(*steps[-1]))


def sample(rng: random.Random, split: Split) -> Sample:
    """Draw a drill (training only), a column calculation or a word problem."""
    if split == "train" and rng.random() < DRILL_SHARE:
        return drill(rng)
    return _column(rng, split) if rng.random() < 0.5 else _word(rng, split)
