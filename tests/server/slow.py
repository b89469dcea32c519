"""A toy target that takes its time and fails on some prompts, and what it answers alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from toy import ToyPrefix, unchecked
from trace_toys import AnyLength, Settled

from spot_dlm.decode import generate
from spot_dlm.drafters import Root
from spot_dlm.interfaces import DecodeParams, MaskedLogits

NAN, BROKEN, PATHS = 23, 22, 21  # first tokens of prompts that fail
FAILING = {NAN: "NaN", BROKEN: "the device is gone", PATHS: "/secret/path"}


class Slow(AnyLength):
    """A toy that takes some milliseconds for a pass and fails on some prompts."""

    def __init__(self, pass_s: float = 0.0) -> None:
        super().__init__(Settled(24, 4, seed=5, jitter=1.5), stop_ids=range(0, 1), max_length=1024, crosses=True)
        self._pass_s = pass_s

    def evaluate(self, prefix: ToyPrefix, canvases: np.ndarray) -> MaskedLogits:
        first = prefix.ids[:1]
        if first == (BROKEN,):
            raise RuntimeError("the device\n  is gone")
        if first == (PATHS,):
            raise OSError(2, "no such file", "/secret/path")
        exact = super().evaluate(prefix, canvases)
        packed = exact.packed.clone()
        packed[:, 0] = -torch.inf  # answers have no end but max_tokens
        if first == (NAN,) and prefix.length > 8:
            packed[-1, 3] = torch.nan
        return MaskedLogits(packed, exact.offsets)

    def evaluate_many(self, queries: list[tuple[ToyPrefix, np.ndarray]]) -> list[MaskedLogits]:
        time.sleep(self._pass_s)
        return [self.evaluate(*query) for query in queries]


def slowly(pass_s: float) -> Callable[[], None]:
    def prepare() -> None:
        import spot_dlm.cli.options

        spot_dlm.cli.options.load_target = lambda *_, **__: Slow(pass_s)

    return prepare


def body(prompt: list[int], max_tokens: int = 200, **more: Any) -> dict[str, Any]:
    return {"model": "toy", "prompt": prompt, "max_tokens": max_tokens} | more


def alone(prompt: list[int], max_tokens: int = 200) -> str:
    with unchecked():
        return generate(Slow(), prompt, Root(), DecodeParams(max_new_tokens=max_tokens, nodes=1)).text
