"""Rules that draw the order of positions: the authors' loops with call-order randomness have the same law of whole trajectories.

The loops are written from their description (LLaDA generate.py l.101-118, Dream generation_utils.py l.422-457) on NumPy's generator. Every
check would fail a correct decoder with probability 1e-6; seeds are fixed. The package decodes in a process of its own
(`python test_drawn_orders.py`): the run-time shape checks cost several times the decoding.
"""

from __future__ import annotations

import ast
import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

sys.path.insert(0, str(Path(__file__).parents[1]))
from reference_decoder import ToyTarget, reference_noise
from toy import ToyTargetAdapter

from spot_dlm.decode import generate
from spot_dlm.drafters import Chain
from spot_dlm.interfaces import DecodeParams
from spot_dlm.noise import CoupledNoise
from spot_dlm.presets import official
from spot_dlm.schedule import Schedule

ALPHA = 1e-6
VOCAB = LENGTH = 3
SAMPLES = 800
TOY = ToyTarget(VOCAB, LENGTH, 265, 1.0)
PROMPT = [0] * LENGTH


def softmax(x):
    weight = np.exp(x - x.max())
    return weight / weight.sum()


def sample_tokens(rng, rows, temperature):
    """Tokens and the distributions that they come from."""
    p = [softmax(row.astype(np.float64) / (temperature or 1)) for row in rows.values()]
    return {i: int(q.argmax() if temperature == 0 else rng.choice(VOCAB, p=q)) for i, q in zip(rows, p, strict=True)}, p


def llada_random(rng, steps, temperature):
    """Return what each pass commits."""
    canvas, passes = [None] * LENGTH, []
    for step in range(steps):
        rows = TOY(PROMPT, canvas)
        tokens, _ = sample_tokens(rng, rows, temperature)
        confidence = {i: rng.random() for i in rows}
        best = sorted(rows, key=lambda i: -confidence[i])[: LENGTH // steps + (step < LENGTH % steps)]
        passes.append({i: tokens[i] for i in best})
        for i in best:
            canvas[i] = tokens[i]
    return passes


def dream(rng, steps, temperature, alg, alg_temp=0.0):
    """Return what each pass commits."""
    canvas, passes, times = [None] * LENGTH, [], np.linspace(1, 1e-3, steps + 1)
    for i in range(steps):
        rows, share = TOY(PROMPT, canvas), 1 - times[i + 1] / times[i]
        tokens, p = sample_tokens(rng, rows, temperature) if rows else ({}, [])
        if alg == "origin":
            chosen = [at for at in rows if i == steps - 1 or rng.random() < share]
        else:
            count = len(rows) if i == steps - 1 else int(len(rows) * share)
            confidence = [q[tokens[at]] if alg == "maskgit_plus" else (q * np.log(q)).sum() for at, q in zip(rows, p, strict=True)]
            chosen, left = [], dict(zip(rows, np.exp(np.array(confidence) / alg_temp), strict=True))
            for _ in range(count):
                weights = np.array(list(left.values()))
                chosen.append(list(left)[rng.choice(len(left), p=weights / weights.sum())])
                del left[chosen[-1]]
        passes.append({at: tokens[at] for at in chosen})
        for at in chosen:
            canvas[at] = tokens[at]
    return passes


def ours(sampler: str, arguments: dict, temperature: float) -> Counter:
    """Decode with the coupled chain; count what the steps commit and the passes that are not made."""
    params, target, counts = official(sampler, temperature=temperature, **arguments), ToyTargetAdapter(TOY), Counter()
    for sequence in range(SAMPLES):
        at = DecodeParams(params.rule, params.sampling, LENGTH, 3, stop="never", sequence=sequence)
        result = generate(target, PROMPT, Chain(), at)
        steps: dict[int, list] = {}
        for c in result.order:
            steps.setdefault(c.step, []).append((c.position - LENGTH, c.token))
        counts[tuple(tuple(sorted(s)) for s in steps.values()), result.counts.idle] += 1
    return counts


def theirs(loop, *arguments) -> Counter:
    rng, counts = np.random.default_rng(12), Counter()
    for _ in range(SAMPLES):
        passes = loop(rng, *arguments)
        counts[tuple(tuple(sorted(p.items())) for p in passes if p), sum(not p for p in passes)] += 1
    return counts


def p_value(one: Counter, two: Counter) -> float:
    """Chi-square of two samples of equal size; outcomes seen under 12 times in all are pooled."""
    pairs = [(one[k], two[k]) for k in one.keys() | two.keys()]
    rare = [pair for pair in pairs if sum(pair) < 12]
    table = [pair for pair in pairs if sum(pair) >= 12] + ([tuple(np.sum(rare, axis=0))] if rare else [])
    return float(stats.chi2_contingency(np.array(table))[1]) if len(table) > 1 else 1.0


LLADA = {"gen_length": LENGTH, "block_length": LENGTH, "remasking": "random"}
CASES = {
    "llada": (("llada", {**LLADA, "steps": 3}), llada_random, 3),
    "llada, two steps": (("llada", {**LLADA, "steps": 2}), llada_random, 2),
    "dream origin": (("dream", {"steps": 4, "alg": "origin"}), dream, 4, "origin"),
    "dream alg_temp": (("dream", {"steps": 5, "alg": "maskgit_plus", "alg_temp": 0.2}), dream, 5, "maskgit_plus", 0.2),
    "dream alg_temp, entropy": (("dream", {"steps": 3, "alg": "entropy", "alg_temp": 0.4}), dream, 3, "entropy", 0.4),
}
OTHERS = {"llada by confidence": ("llada", {**LLADA, "steps": 3, "remasking": "low_confidence"})}
TEMPERATURES = (0.0, 1.0)


@pytest.fixture(scope="module")
def decoded() -> dict[str, Counter]:
    """What the package decodes in every case."""
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return {name: Counter({ast.literal_eval(k): n for k, n in counts.items()}) for name, counts in json.loads(done.stdout).items()}


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("case", CASES)
def test_trajectories_have_the_law_of_the_authors_loop(decoded, case, temperature):
    """Positions and tokens of every step and the number of passes without a commit, speculative decoding against the loop."""
    _, loop, steps, *more = CASES[case]
    assert p_value(decoded[f"{case} {temperature}"], theirs(loop, steps, temperature, *more)) > ALPHA


@pytest.mark.parametrize("other", ["llada by confidence", "dream alg_temp"])
def test_power_another_rule_is_noticed(decoded, other):
    assert p_value(decoded[f"{other} 1.0"], theirs(*CASES["llada"][1:3], 1.0)) < ALPHA


# -------------------------------------------------------------------------------------------------------------- the noise


def test_every_order_of_positions_is_as_likely():
    """24 orders of four positions: in the ranks of a step, and taking the first step after step; neighbours in the key are independent."""
    at, sequences = np.arange(4), range(6000)
    drawn = np.stack([CoupledNoise(3, s).order(1, range(4), at) for s in sequences])
    orders = [Counter(map(tuple, np.argsort(-drawn[:, step], axis=1).tolist())) for step in (0, 3)]
    taken: Counter = Counter()
    for ranks in drawn:
        left, order = set(range(4)), []
        for step in range(4):
            order.append(max(left, key=lambda i: ranks[step, i]))
            left.remove(order[-1])
        taken[tuple(order)] += 1
    for counts in (*orders, taken):
        assert set(counts) == set(itertools.permutations(range(4)))
        assert stats.chisquare(list(counts.values())).pvalue > ALPHA
    values = drawn.reshape(len(drawn), -1).astype(np.float64)
    assert stats.kstest(values[:, 0], "gumbel_r").pvalue > ALPHA
    assert np.abs(np.corrcoef(values.T) - np.eye(values.shape[1])).max() < 5.5 / np.sqrt(len(values))


def test_noise_of_the_order_is_independent_of_the_tokens_noise():
    """Under the same words, and one step or position aside: no correlation of either value with any of the first tokens'."""
    sequences, at = range(4000), np.arange(3)
    order = np.stack([CoupledNoise(8, s).order(2, range(3), at) for s in sequences]).reshape(len(sequences), -1)
    times = np.stack([CoupledNoise(8, s).times(2, at) for s in sequences])
    tokens = np.stack([[reference_noise(8, s, 2, t, p, 3) for t in range(3) for p in range(3)] for s in sequences])
    flat = np.exp(tokens.reshape(len(sequences), -1).astype(np.float64))
    for values in (np.exp(-order.astype(np.float64)), times):
        both = np.corrcoef(values.T, flat.T)[: values.shape[1], values.shape[1] :]
        assert both.size and np.abs(both).max() < 5.5 / np.sqrt(len(sequences))
    winners, first = tokens.argmin(axis=-1), order.reshape(-1, 3, 3).argmax(axis=-1)
    table = np.zeros((27, 3))
    np.add.at(table, (winners[:, :3] @ [9, 3, 1], first[:, 0]), 1)  # the tokens of step 0 and the position that it takes
    assert stats.chi2_contingency(table)[1] > ALPHA


def test_times_of_arrival_follow_the_official_hazard():
    """A step that a position reaches takes it with probability 1 - s/t, the last one for sure; positions are independent."""
    steps, at = 6, np.arange(8)
    schedule, times = Schedule("timesteps", 6), np.linspace(1, 1e-3, 7)
    arrived = np.stack([schedule.arrivals(CoupledNoise(4, s).times(0, at)) for s in range(4000)])
    for step in range(steps):
        reached, here = (arrived >= step).sum(), (arrived == step).sum()
        chance = 1.0 if step == steps - 1 else 1 - times[step + 1] / times[step]
        assert stats.binomtest(int(here), int(reached), chance).pvalue > ALPHA
    assert np.abs(np.corrcoef(arrived.T) - np.eye(8)).max() < 5.5 / np.sqrt(len(arrived))
    assert Schedule("timesteps", 1).arrivals(np.array([1e-9, 0.5, 1 - 1e-9])).tolist() == [0, 0, 0]


if __name__ == "__main__":
    cases = {name: case[0] for name, case in CASES.items()} | OTHERS
    found = {f"{name} {t}": ours(*case, t) for name, case in cases.items() for t in TEMPERATURES}
    print(json.dumps({name: {repr(k): n for k, n in counts.items()} for name, counts in found.items()}))
