"""The peak memory of decoding with a vocabulary of 150,000, measured in a process of its own, against the formula of docs/performance.md.

Run as a script it prints, for every setting, the formula's bytes and the measured ones.
"""

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spot_dlm.batch import Request, decode_batch
from spot_dlm.drafters import Chain, Root
from spot_dlm.interfaces import DecodeParams, MaskedLogits, TargetSpec
from spot_dlm.sequence import Finished
from spot_dlm.targets.adapter import Adapter
from spot_dlm.targets.block_causal import BlockCausalTarget
from spot_dlm.targets.full_attention import FullAttentionTarget
from spot_dlm.targets.weights import read_weights
from spot_dlm.transition import Sampling, UnmaskRule

VOCAB, LENGTH = 150_000, 32
HEAD_BYTES = 2**28
SLACK = 12 * 2**20
"""Bytes for everything whose size does not depend on the vocabulary, and for what the allocator keeps."""

STANDARD, ENTROPY = UnmaskRule(num_per_step=4), UnmaskRule(num_per_step=4, confidence="entropy")
SETTINGS: dict[str, tuple[UnmaskRule, Sampling, int, int]] = {  # rule, sampling, nodes, prompts
    "temperature 0": (STANDARD, Sampling(), 1, 1),
    "temperature 1": (STANDARD, Sampling(1.0), 1, 1),
    "temperature 0.7": (STANDARD, Sampling(0.7), 1, 1),
    "entropy": (ENTROPY, Sampling(), 1, 1),
    "top-k": (STANDARD, Sampling(0.7, top_k=20), 1, 1),
    "top-p": (STANDARD, Sampling(0.7, top_p=0.9), 1, 1),
    "8 nodes": (STANDARD, Sampling(1.0), 8, 1),
    "8 nodes, bfloat16": (STANDARD, Sampling(1.0), 8, 1),
    "full attention, 4 nodes": (STANDARD, Sampling(), 4, 1),
    "5 nodes, 7 prompts": (STANDARD, Sampling(), 5, 7),
}


def copies(rule: UnmaskRule, sampling: Sampling) -> int:
    """Return how many times the logits of one state exist at most while its step is made, these apart."""
    drawn = sampling.temperature > 0
    if drawn and sampling.top_p < 1:
        return 7  # an order of 64-bit numbers, sorted logits and probabilities, cumulative sums
    if rule.confidence == "entropy":
        return 4 + (drawn and (sampling.temperature != 1 or sampling.top_k > 0))
    if drawn and sampling.top_k > 0:
        return 4 + (sampling.temperature != 1)
    return 2 if drawn and sampling.temperature != 1 else 1


def formula(rows: Sequence[int], number_bytes: int, most: int, copied: int) -> int:
    """Return the bytes of docs/performance.md ("Memory") that depend on the vocabulary.

    Args:
        rows: masked positions of every pass, all prompts and nodes together.
        number_bytes: bytes of a number of the weights.
        most: masked positions of one state at most.
        copied: see `copies`.
    """
    row = 4 * VOCAB
    passes = zip((0, *rows), rows, strict=False)
    return max(row * (last + now) + max(min(HEAD_BYTES, row * now) * number_bytes // 4, row * most * copied) for last, now in passes)


@dataclass
class Counting:
    """A target that counts the masked positions of its passes."""

    target: Any
    rows: list[int] = field(default_factory=list)

    @property
    def spec(self) -> TargetSpec:
        return self.target.spec

    def __getattr__(self, name: str) -> Any:
        return getattr(self.target, name)

    def evaluate_many(self, queries: Sequence[tuple[Any, np.ndarray]]) -> list[MaskedLogits]:
        found = self.target.evaluate_many(queries)
        self.rows.append(sum(len(logits.packed) for logits in found))
        return found


def measure() -> Iterator[tuple[str, int, int, int]]:
    """Yield every setting with the formula's bytes, those by which the process grew at most, and those of the largest pass's logits."""
    import torch

    from tests.tiny_hosts import build

    torch.set_num_threads(1)
    plain, host = build("Qwen3", {"vocab_size": VOCAB, "hidden_size": 16, "head_dim": 8, "num_hidden_layers": 1})
    full = FullAttentionTarget(
        read_weights(deepcopy(host)), replace(plain.spec, crosses=False, blocks="generated", whole_canvas=True), None
    )
    half = BlockCausalTarget(read_weights(host.bfloat16()), replace(plain.spec, dtype="bfloat16"), None)
    for name, (rule, sampling, nodes, prompts) in SETTINGS.items():
        target: Adapter = half if "bfloat16" in name else full if "full" in name else plain
        params = DecodeParams(rule, sampling, LENGTH, nodes, block_length=LENGTH)
        decode(target, replace(params, max_new_tokens=8, block_length=8), prompts)  # compiles, loads libraries, makes tables
        counting = Counting(target)
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        before = status("VmRSS")
        decode(counting, params, prompts)
        expected = formula(counting.rows, 2 if "bfloat16" in name else 4, LENGTH, copies(rule, sampling))
        yield name, expected, status("VmHWM") - before, 4 * VOCAB * max(counting.rows)


def decode(target: Any, params: DecodeParams, prompts: int) -> None:
    requests = [Request(i, [i + 1] * (1 if params.max_new_tokens < LENGTH else LENGTH), params) for i in range(prompts)]
    drafter = Root() if params.nodes == 1 else Chain()
    ended = [event for _, event in decode_batch(target, requests, drafter) if isinstance(event, Finished)]
    assert len(ended) == prompts


def status(name: str) -> int:
    lines = Path("/proc/self/status").read_text("utf-8").splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the highest resident size cannot be reset here")
def test_the_formula_bounds_the_peak() -> None:
    """Never above it, and no setting far below: a bound that anything would keep says nothing."""
    root = Path(__file__).parents[1]
    environment = os.environ | {"PYTHONPATH": f"{root}:{root / 'tests'}", "MALLOC_MMAP_THRESHOLD_": "1000000"}
    done = subprocess.run([sys.executable, __file__], cwd=root, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found) == set(SETTINGS)
    for name, (expected, measured, _) in found.items():
        assert 0.9 * expected - SLACK < measured < expected + SLACK, (name, expected, measured)
    assert max(largest for *_, largest in found.values()) > 1.2 * HEAD_BYTES, "one pass at least needs the bound of the head's part"


if __name__ == "__main__":
    print(json.dumps({name: sizes for name, *sizes in measure()}))
