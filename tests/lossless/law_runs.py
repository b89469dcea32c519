"""Sample many package decodes of an enumerable toy, in a process of its own: the run-time shape checks cost three times the decoding.

`python law_runs.py SAMPLES BROKEN_SAMPLES` prints one JSON object: "case/variant" -> {ids: count}, and "cpu_s/case/variant". Every
decode goes through `spot_dlm.generate` (loop, draft, walk, commit) with its own `sequence` key. Only noise and `propose` are evaluated
for all sequences at once, state by state: their rows are independent to the bit (tests/property), and the first 30 decodes are
repeated without the table here.
"""

from __future__ import annotations

import gc
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from reference_decoder import ToyTarget
from toy import ToyTargetAdapter, split_rule

from spot_dlm import decode, sequence, transition, verify
from spot_dlm import noise as noise_module
from spot_dlm.drafters import Chain, Root, stale
from spot_dlm.interfaces import DecodeParams
from spot_dlm.schedule import Schedule
from spot_dlm.state import MASKED
from spot_dlm.transition import Candidates, propose
from spot_dlm.verify import Acceptance

VOCAB = LENGTH = 3
TOY = (VOCAB, LENGTH, 265, 1.0)  # the toy on which leaving the step out of the noise shows best
CASES = {
    "top-probability": {},
    "leftmost_above-margin": {"select": "leftmost_above", "confidence": "margin", "threshold": 0.3},
    "threshold-entropy": {"select": "threshold", "confidence": "entropy", "threshold": -0.75},
    "left_to_right-max_probability": {"select": "left_to_right", "confidence": "max_probability", "top_p": 0.9, "source": "filtered"},
    "top-probability-bfloat16": {"resolution": "bfloat16"},
    "top-two-margin": {"num_per_step": 2, "confidence": "margin", "source": "tempered"},
    "threshold-probability": {"select": "threshold", "threshold": 0.5, "strict": False},
    "half-even-schedule": {"schedule": Schedule("half_even", 2)},
    "random-order": {"order_temperature": math.inf},
    "order-drawn-by-probability": {"order_temperature": 0.15},
    "arrival": {"select": "arrival", "schedule": Schedule("timesteps", 3)},
    "top-entropy-same-noise": {"confidence": "entropy", "noise_step": False},
}


def options_of(case: str) -> dict:
    return dict(CASES[case], temperature=1.0, seed=20)


def toy() -> ToyTarget:
    return ToyTarget(*TOY)


class NoiseTable:
    """The noise of sequences 0..S-1 in block 1 (the prompt is block 0), all steps and positions."""

    def __init__(self, seed: int, sequences: int) -> None:
        absorb = noise_module._absorb
        steps = [absorb(absorb(noise_module.CoupledNoise(seed, s)._root, 1), t) for s in range(sequences) for t in range(LENGTH)]
        keys = [absorb(step, p) for step in steps for p in range(LENGTH)]
        noise_module._absorb = lambda _, word: keys[word]
        try:
            rows = noise_module.CoupledNoise.__new__(noise_module.CoupledNoise)
            rows._root, rows._device = 0, torch.device("cpu")
            self.values = rows._draw(0, 0, np.arange(len(keys)), VOCAB).reshape(sequences, LENGTH, LENGTH, VOCAB)
        finally:
            noise_module._absorb = absorb
        for s in np.random.default_rng(0).integers(0, sequences, 40).tolist():
            for step in range(LENGTH):
                true = noise_module.CoupledNoise(seed, s).rows(1, step, np.arange(LENGTH), VOCAB)
                assert torch.equal(true, self.values[s, step])

    def __call__(self, seed: int, sequence: int, use_step: bool = True, device: object = "cpu") -> TabulatedNoise:
        return TabulatedNoise(self, sequence, use_step, noise_module.CoupledNoise(seed, sequence))


@dataclass
class TabulatedNoise:
    """Tokens' noise from the table, positions' noise as the package draws it."""

    table: NoiseTable
    sequence: int
    use_step: bool
    plain: noise_module.CoupledNoise

    def order(self, block: int, steps: Sequence[int], positions: np.ndarray) -> np.ndarray:
        return self.plain.order(block, steps, positions)

    def times(self, block: int, positions: np.ndarray) -> np.ndarray:
        return self.plain.times(block, positions)


class Tabulated:
    """`denoise` and `stale_candidates` with every state's candidates proposed for all sequences at once."""

    def __init__(self) -> None:
        self.known: dict[tuple, tuple[np.ndarray, ...]] = {}

    def candidates(self, state, step, logits, rule, sampling, noise) -> Candidates:
        key = (state.key, step, noise.use_step)
        positions = state.masked
        if key not in self.known:
            drawn = noise.table.values[:, step if noise.use_step else 0][:, torch.from_numpy(positions)]
            count = len(drawn)
            flat = propose(np.tile(positions, count), logits.repeat(count, 1), rule, sampling, drawn.flatten(0, 1))
            self.known[key] = tuple(a.reshape(count, -1) for a in (flat.tokens, flat.rank, flat.natural, flat.fine))
        return Candidates(positions, *(a[noise.sequence] for a in self.known[key]))

    def denoise(self, state, logits, rule, sampling, noise):
        return transition.commit(state, self.candidates(state, state.step, logits, rule, sampling, noise), rule, noise)

    def stale_candidates(self, context, depths, coupled):
        before, root = context.last.before, context.root
        for depth in range(depths):
            step = root.step + depth if coupled else before.step
            found = self.candidates(before, step, context.logits, context.rule, context.sampling, context.noise)
            yield stale.still_masked(found, root)


def accept_one_unseen(graph, root, logits_of, step, is_final):
    """Broken: takes the first guess without comparing it with what F gave."""
    first = step(root, logits_of(0))
    if len(graph) == 1 or is_final(first.state):
        return decode_accept(graph, root, logits_of, step, is_final)
    guess = type(root)(graph.block, graph.canvases[1].copy(), int(graph.steps[1]))
    at = np.flatnonzero((guess.canvas != root.canvas) & (root.canvas == MASKED))
    taken = type(first)(root, guess, at, guess.canvas[at], first.candidates)
    second = step(guess, logits_of(1))
    return Acceptance([taken, second], [0, 1], logits_of(1))


def accept_drafted_tokens(graph, root, logits_of, step, is_final):
    """Broken: compares positions only and keeps the drafted tokens (drawn without the step's own noise)."""
    first = step(root, logits_of(0))
    same = [n for n in range(1, len(graph)) if ((graph.canvases[n] == MASKED) == (first.state.canvas == MASKED)).all()]
    if not same or is_final(first.state):
        return decode_accept(graph, root, logits_of, step, is_final)
    guess = type(root)(graph.block, graph.canvases[same[0]].copy(), int(graph.steps[same[0]]))
    taken = type(first)(root, guess, first.positions, guess.canvas[first.positions], first.candidates)
    second = step(guess, logits_of(same[0]))
    return Acceptance([taken, second], [0, same[0]], logits_of(same[0]))


class Walks:
    """`accept_many` that walks one graph after the other, with a step and a walk that can be exchanged."""

    def __init__(self) -> None:
        self.accept, self.denoise = verify.accept, transition.denoise

    def __call__(self, walks):
        return [self.accept(w.graph, w.root, w.logits_of, self._step(w), w.is_final) for w in walks]

    def _step(self, walk):
        return lambda state, logits: self.denoise(state, logits, walk.rule, walk.sampling, walk.noise)


WALKS = decode.accept_many = Walks()
decode_accept = verify.accept
VARIANTS = {
    "standard": (Root(), decode_accept),
    "chain": (Chain(), decode_accept),
    "no-step-in-noise": (Root(), decode_accept),
    "one-unseen": (Chain(), accept_one_unseen),
    "drafted-tokens": (Chain(coupled=False), accept_drafted_tokens),
    "order-from-token-noise": (Root(), decode_accept),
}
BROKEN_CASES = dict.fromkeys(list(VARIANTS)[2:], "top-probability") | {"order-from-token-noise": "random-order"}


KEYS = noise_module.CoupledNoise._order_key, noise_module.CoupledNoise.step_key


def sample(case: str, variant: str, target: ToyTargetAdapter, sequences: range) -> Counter:
    drafter, WALKS.accept = VARIANTS[variant]
    rule, sampling, _ = split_rule(options_of(case))
    if variant == "no-step-in-noise":
        object.__setattr__(rule, "noise_step", False)  # past the validation that forbids it
    noise_module.CoupledNoise._order_key = KEYS[variant == "order-from-token-noise"]
    counts: Counter = Counter()
    for key in sequences:
        params = DecodeParams(rule, sampling, LENGTH, 4, sequence=key)
        counts[",".join(map(str, decode.generate(target, [0] * LENGTH, drafter, params).token_ids))] += 1
    return counts


def main(samples: int, broken_samples: int) -> dict:
    torch.set_num_threads(1)
    gc.freeze()
    gc.set_threshold(100_000)
    target, table = ToyTargetAdapter(toy()), NoiseTable(20, samples)
    plain = sequence.CoupledNoise, WALKS.denoise, stale.stale_candidates
    jobs = [(case, variant, samples) for case in CASES for variant in ("standard", "chain")]
    jobs += [(case, variant, broken_samples) for variant, case in BROKEN_CASES.items()]
    result = {}
    for case, variant, count in jobs:
        began = time.process_time()
        tabulated = Tabulated()
        sequence.CoupledNoise, WALKS.denoise, stale.stale_candidates = table, tabulated.denoise, tabulated.stale_candidates
        first = sample(case, variant, target, range(30))
        result[f"{case}/{variant}"] = first + sample(case, variant, target, range(30, count))
        sequence.CoupledNoise, WALKS.denoise, stale.stale_candidates = plain
        assert sample(case, variant, target, range(30)) == first, (case, variant)
        result[f"cpu_s/{case}/{variant}"] = time.process_time() - began
        print(case, variant, result[f"cpu_s/{case}/{variant}"], file=sys.stderr, flush=True)
    return result


if __name__ == "__main__":
    print(json.dumps(main(*map(int, sys.argv[1:]))))
