"""Tests of the training-data families."""

from __future__ import annotations

import itertools
import json
import random
import re
import string
import sys
import sysconfig
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from zoo.families import (
    FAMILIES,
    MAX_ANSWER,
    MAX_PROMPT,
    SPLITS,
    Sample,
    Split,
    arithmetic,
    heldout,
    json_text,
    python_code,
    rewrite,
    sample,
    stdlib,
    stream,
)

WEIGHTS = dict.fromkeys(FAMILIES, 1.0)
NAMES = list(FAMILIES)


@cache
def drawn(family: str, split: Split, n: int = 3000) -> tuple[Sample, ...]:
    """Draw many samples of one family."""
    rng = random.Random(f"{family}|{split}")
    return tuple(sample(family, rng, split) for _ in range(n))


def passes(item: Sample, answer: str) -> bool:
    """Tell whether an answer satisfies the check of a sample."""
    kind = item.check["kind"]
    if kind == "none":
        return True
    if kind == "exact":
        return bool(answer == item.check["text"])
    if kind == "json":
        return list(json.loads(answer).items()) == list(item.check["value"].items())
    if kind == "number":
        return bool(answer.rpartition("Answer: ")[2] == item.check["value"])
    scope: dict[str, Any] = {}
    exec(f"{item.prompt}\n{answer}\n", scope)
    assert callable(scope[item.check["entry"]])
    for test in item.check["tests"]:
        exec(test, scope)
    return True


@pytest.mark.parametrize("split", SPLITS)
def test_stream_depends_only_on_its_arguments(split: Split) -> None:
    """Check that equal seeds give equal streams and other seeds do not."""
    first, again, other = (list(itertools.islice(stream(seed, split, WEIGHTS), 300)) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert {item.family for item in first} == set(NAMES)


def test_stream_ignores_the_order_of_weights() -> None:
    """Check that the mixture ignores the order in which weights are given."""
    swapped = dict(reversed(WEIGHTS.items()))
    one, two = stream(3, "train", WEIGHTS), stream(3, "train", swapped)
    assert list(itertools.islice(one, 50)) == list(itertools.islice(two, 50))


@pytest.mark.parametrize("family", NAMES)
def test_splits_share_no_prompt(family: str) -> None:
    """Check that no prompt of one split occurs in another."""
    train, values, templates = ({item.prompt for item in drawn(family, split)} for split in SPLITS)
    assert not train & values
    assert not train & templates
    assert not values & templates


@pytest.mark.parametrize("family", NAMES)
def test_heldout_templates_never_occur_in_training(family: str) -> None:
    """Check that the template names of training and held-out samples differ."""
    train, values, templates = ({item.template for item in drawn(family, split)} for split in SPLITS)
    assert not train & templates
    if family != "stdlib":
        assert values <= train


def test_a_fifth_of_the_templates_is_held_out() -> None:
    """Check the share of held-out templates of each family."""
    groups = {
        "json": (json_text.TRAIN, json_text.HELDOUT),
        "python": (python_code.TRAIN, python_code.HELDOUT),
        "arithmetic": (
            arithmetic.COLUMN_TRAIN + arithmetic.WORD_TRAIN,
            arithmetic.COLUMN_HELDOUT + arithmetic.WORD_HELDOUT,
        ),
        "rewrite": (rewrite.TRAIN, rewrite.HELDOUT),
    }
    for family, (train, held) in groups.items():
        assert 0.14 <= len(held) / (len(train) + len(held)) <= 0.21, family


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("family", NAMES)
def test_canonical_answers_pass_their_check(family: str, split: Split) -> None:
    """Check every canonical answer, its lengths and its characters."""
    printable = set(string.printable) - set("\t\r\x0b\x0c")
    for item in drawn(family, split)[:1500]:
        assert item.family == family
        assert passes(item, item.answer)
        assert 0 < len(item.prompt) <= MAX_PROMPT, item.prompt
        assert 0 < len(item.answer) <= MAX_ANSWER, item.answer
        assert set(item.prompt + item.answer) <= printable


def test_python_checks_refuse_wrong_constants() -> None:
    """Check that a body with another constant fails at least one assert."""
    for item in drawn("python", "train")[:1500]:
        doc = item.prompt.partition('"""')[2]
        for constant in set(re.findall(r"\b\d+\b", doc)) & set(re.findall(r"\d+", item.answer)):
            wrong = re.sub(rf"\b{constant}\b", str(int(constant) + 1), item.answer)
            with pytest.raises(AssertionError):
                passes(item, wrong)
        letter = re.search(r"'([a-z])'", item.answer)
        if letter:
            other = "b" if letter[1] == "a" else "a"
            wrong = item.answer.replace(letter[0], f"'{other}'")
            with pytest.raises(AssertionError):
                passes(item, wrong)


@pytest.mark.parametrize("family", ["json", "python", "arithmetic", "rewrite"])
def test_answers_are_functions_of_the_prompt(family: str) -> None:
    """Check that one prompt never has two different answers."""
    answers: dict[str, str] = {}
    for split in SPLITS:
        for item in drawn(family, split):
            assert answers.setdefault(item.prompt, item.answer) == item.answer


def test_every_arithmetic_fact_is_right_and_drilled() -> None:
    """Check each equation and that drills cover the facts used in the steps."""
    known: set[str] = set()
    used: set[str] = set()
    rng = random.Random(5)
    for item in (sample("arithmetic", rng, "train") for _ in range(20000)):
        for left, _, right in (token.rstrip(",").partition("=") for token in item.answer.split()):
            if right:
                assert eval(left) == int(right), item.answer
                (known if item.template == "drill" else used).add(left)
    assert used <= known, sorted(used - known)


def test_heldout_number_pairs_never_occur_in_training() -> None:
    """Check that the first operand pair of a held-out sample is new in any wording."""

    def pairs(item: Sample) -> list[str]:
        """Read the operations that a sample computes."""
        found = re.findall(r"(\d+)([-+*])(\d+):", item.answer)
        if item.template.startswith("column"):
            op = {0: "+", 1: "-", 2: "*"}[int(item.template.split(".")[1]) // 4]
            a, b = re.findall(r"\d+", item.prompt)
            found = [(b, op, a) if "Take" in item.prompt else (a, op, b)]
        return [arithmetic.key((int(a), op, int(b))) for a, op, b in found]

    train = {pair for item in drawn("arithmetic", "train") for pair in pairs(item)}
    held = {pairs(item)[0] for item in drawn("arithmetic", "heldout_values")}
    assert len(held) > 300
    assert not train & held


def test_heldout_has_distinct_prompts_and_no_drills() -> None:
    """Check the fixed evaluation lists."""
    for family in NAMES:
        for split in SPLITS[1:]:
            items = heldout(family, split, 200, seed=7)
            assert len({item.prompt for item in items}) == 200
            assert items == heldout(family, split, 200, seed=7)
            assert all(item.template != "drill" for item in items)


def test_heldout_refuses_more_samples_than_exist(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check the error for a family with too few prompts."""
    fixed = drawn("json", "train")[0]
    monkeypatch.setitem(FAMILIES, "json", lambda rng, split: fixed)
    with pytest.raises(ValueError, match="too few prompts"):
        heldout("json", "train", 2, seed=0)


def test_unknown_names_are_refused() -> None:
    """Check the errors for a wrong family and a wrong split."""
    with pytest.raises(ValueError, match="unknown family"):
        sample("poems", random.Random(0), "train")
    with pytest.raises(ValueError, match="unknown split"):
        sample("json", random.Random(0), "test")  # type: ignore[arg-type]


def test_missing_standard_library_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Check the error for an installation without library sources."""
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(RuntimeError, match="at least 30"):
        stdlib._sources.__wrapped__()


def test_mixture_is_fast_enough() -> None:
    """Check that the mixture yields at least 3000 samples per second."""
    mixture = stream(0, "train", WEIGHTS)
    list(itertools.islice(mixture, 500))
    start = time.process_time()
    list(itertools.islice(mixture, 3000))
    assert time.process_time() - start < 1.0
