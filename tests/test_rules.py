"""The text form of unmask rules: parsing, errors that list what is allowed, and the round trip."""

import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spot_dlm.rules import describe, parse_rule
from spot_dlm.schedule import Schedule
from spot_dlm.transition import UnmaskRule


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("standard", UnmaskRule()),
        ("bfloat16", UnmaskRule(resolution="bfloat16")),
        ("threshold=0.9", UnmaskRule(select="threshold", threshold=0.9)),
        ("threshold=0.8, non-strict", UnmaskRule(select="threshold", threshold=0.8, strict=False)),
        ("k=2", UnmaskRule(num_per_step=2)),
        ("ltr,k=4", UnmaskRule(select="left_to_right", num_per_step=4)),
        ("leftmost=0.9", UnmaskRule(select="leftmost_above", threshold=0.9)),
        (
            "confidence=margin,source=tempered,resolution=bfloat16",
            UnmaskRule(confidence="margin", source="tempered", resolution="bfloat16"),
        ),
        ("confidence=entropy,no-step-noise", UnmaskRule(confidence="entropy", noise_step=False)),
        ("random", UnmaskRule(order_temperature=math.inf)),
        ("random,k=2,no-step-noise", UnmaskRule(order_temperature=math.inf, num_per_step=2, noise_step=False)),
        (
            "order_temperature=0.5,confidence=margin,schedule=timesteps:8",
            UnmaskRule(order_temperature=0.5, confidence="margin", schedule=Schedule("timesteps", 8)),
        ),
        ("arrival=16", UnmaskRule(select="arrival", schedule=Schedule("timesteps", 16))),
        ("standard,threshold=-0.25,confidence=entropy", UnmaskRule(select="threshold", threshold=-0.25, confidence="entropy")),
    ],
)
def test_text_and_rule(text: str, rule: UnmaskRule) -> None:
    assert parse_rule(text) == rule
    assert parse_rule(describe(rule)) == rule


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "allowed"),
        ("fast", "threshold=X"),
        ("threshold", "allowed"),
        ("threshold=high", "number"),
        ("threshold=nan", "finite"),
        ("k=1.5", "whole"),
        ("k=0", "at least 1"),
        ("ltr,threshold=0.9", "contradicts"),
        ("threshold=0.9,threshold=0.8", "contradicts"),
        ("non-strict", "threshold"),
        ("confidence=luck", "margin"),
        ("source=oracle", "tempered"),
        ("threshold=0.9,k=2", "num_per_step"),
        ("no-step-noise", "law"),
        ("k=2,", "allowed"),
        ("order_temperature=inf", "finite"),
        ("order_temperature=0.00001", "between 0.0001 and 10000"),
        ("order_temperature=-1", "order_temperature=-1 must be"),
        ("order_temperature", "order_temperature=X"),
        ("random,order_temperature=0.5", "contradicts"),
        ("random,ltr", "no meaning with select='left_to_right'"),
        ("random,threshold=0.9", "no meaning with select='threshold'"),
        ("arrival=8,threshold=0.9", "contradicts"),
        ("arrival=8,schedule=half_even:8", "contradicts"),
        ("arrival=2.5", "whole"),
        ("arrival=8,random", "no meaning with select='arrival'"),
        ("arrival=8,k=2", "a schedule says how many"),
    ],
)
def test_errors_name_what_is_wrong(text: str, named: str) -> None:
    with pytest.raises(ValueError, match="rule=") as error:
        parse_rule(text)
    assert named in str(error.value)


_PARTS = [
    st.sampled_from(["", "ltr", "threshold=0.9", "threshold=1e-07", "threshold=0.5,non-strict", "leftmost=0.25", "k=3", "ltr,k=2"]),
    st.sampled_from(["", "", "random", "order_temperature=0.25", "order_temperature=1e+02"]),
    st.sampled_from(["", "confidence=margin", "confidence=max_probability", "confidence=entropy", "confidence=probability"]),
    st.sampled_from(["", "sdar", "source=raw", "source=filtered", "source=tempered"]),
    st.sampled_from(["", "bfloat16", "resolution=float32", "resolution=bfloat16"]),
]


@settings(max_examples=60, deadline=None)
@given(st.tuples(*_PARTS))
def test_round_trip(parts: tuple[str, ...]) -> None:
    text = ",".join(p for p in parts if p) or "standard"
    if "entropy" in text:  # a negative entropy is never above a positive threshold
        text = re.sub(r"(threshold|leftmost)=", r"\1=-", text)
    if re.search("ltr|threshold|leftmost", text):  # which leave no order to draw
        text = re.sub(r",?(random|order_temperature=[^,]*)", "", text)
    rule = parse_rule(text)
    assert parse_rule(describe(rule)) == rule
    assert describe(parse_rule(describe(rule))) == describe(rule)
