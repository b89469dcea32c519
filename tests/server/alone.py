"""What a request must get: standard decoding of it alone, in this process."""

from __future__ import annotations

from functools import cache
from typing import Any

from toy import unchecked

from spot_dlm.decode import generate
from spot_dlm.drafters import Root
from spot_dlm.interfaces import DecodeParams
from spot_dlm.rules import parse_rule
from spot_dlm.sequence import Result
from spot_dlm.targets import load_target
from spot_dlm.transition import Sampling

target = cache(load_target)


def alone(prompt: str | list[int], *, rule: str = "standard", sequence: int = 0, max_new_tokens: int = 24, **drawn: Any) -> Result:
    """Standard decoding of one prompt, in this process."""
    params = DecodeParams(parse_rule(rule), Sampling(**drawn), max_new_tokens, nodes=1, sequence=sequence)
    with unchecked():
        return generate(target(), prompt, Root(), params)


def bare(text: str) -> list[int]:
    return target().codec.encode_bare(text)
