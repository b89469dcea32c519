"""The chain as published (`chain-published`) against runs of FreeDave's own code on the tiny SDAR checkpoint (freedave/README.md).

Counted as there, a run has one prefill, the decoding passes, and one pass per block, the last included, that stores its keys. Ours
stores a block in the first pass of the next one; `NotFolding` takes that away, and the pass after the last block is added here.

FreeDave within a block, 28 runs: the same passes, one by one, so the same NFE. What differs inside a pass is bookkeeping:

* Its first draft is the certain next state, our root. It takes a transition as committed when a pass has checked the state after it,
  we when the pass before it is there: its commits lag ours by one transition until the block is complete.
* It also evaluates a complete block when its chain reaches one: a row more than ours, whose logits it does not use.
* Under a threshold its chain goes on with one position per draft, whatever the threshold; ours applies the rule to stale candidates.
  These are the same states, for the certain next state already holds every position above the threshold.

FreeDave in eager mode, 28 runs: the same tokens in other passes, for it drafts positions of the next block, still masked there, beside
those of this one. That is another drafter, not the published chain. It does not end a block without a pass over the complete block, which
commits positions of the next one too, often for a pass more (none where the chain holds the complete block already); and every block
still has a first pass of its own. So the first call that differs ends the first block: there they go on into the next one while we store
the block, or have just completed it. `EAGER` has the calls of every block and the number of this call.

Two differences need a threshold and occur in none of these runs (`told` asserts it): where one transition commits several positions,
FreeDave's walk may jump over drafts (`test_where_their_walk_would_jump`), and if that completes a block with more than one position left
and no draft of it was right, it takes a pass more.
"""

import json
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from spot_dlm.decode import decode_steps, generate
from spot_dlm.drafters import Chain, Root
from spot_dlm.interfaces import DecodeParams
from spot_dlm.sequence import BlockFinished, BlockStarted, Finished, Pass
from spot_dlm.state import MASKED
from spot_dlm.targets import load_target
from spot_dlm.transition import Sampling, UnmaskRule

FOLDER = Path(__file__).parent
CASES = {case["id"]: case for case in json.loads((FOLDER / "freedave" / "sdar.json").read_text("utf-8"))["cases"]}
RUNS = [(name, i) for name, case in CASES.items() for i in range(len(case["freedave"]))]
PLAIN = [(name, i) for name, i in RUNS if not CASES[name]["freedave"][i]["eager"]]
EAGER_RUNS = [run for run in RUNS if run not in PLAIN]
PUBLISHED = Chain(coupled=False)
EAGER = {
    "fd-sdar-p5-g24-b4": (29, [4, 4, 3, 3, 3, 2, 2], 30, [3, 4, 4, 2, 3, 3, 3], 4),
    "fd-sdar-p8-g24-b4": (26, [3, 4, 2, 3, 4, 3], 26, [2, 4, 3, 4, 3, 3], 3),
    "fd-sdar-p11-g24-b8": (27, [5, 7, 5, 5], 28, [4, 7, 6, 6], 5),
    "fd-sdar-p1-g16-b8": (20, [5, 6, 6], 20, [4, 6, 7], 4),
    "fd-sdar-p19-g33-b8": (35, [3, 6, 7, 8, 5], 35, [3, 6, 7, 7, 6], 3),
    "fd-sdar-p8-g32-b16": (28, [6, 12, 7], 27, [5, 11, 8], 5),
    "fd-sdar-thr0.6-p8-g24-b4": (26, [3, 4, 2, 3, 4, 3], 26, [2, 4, 3, 4, 3, 3], 3),
    "fd-sdar-thr0.5-p11-g24-b8": (25, [5, 5, 5, 5], 25, [4, 5, 6, 5], 5),
}
"""Their NFE in eager mode and its decoding calls per block; the same of ours; the first call that differs. Equal for 4 and 8 drafts."""
CROSSING = {
    "fd-sdar-p5-g24-b4": 23,
    "fd-sdar-p8-g24-b4": 18,
    "fd-sdar-p11-g24-b8": 23,
    "fd-sdar-p1-g16-b8": 17,
    "fd-sdar-p19-g33-b8": 29,
    "fd-sdar-p8-g32-b16": 24,
    "fd-sdar-thr0.6-p8-g24-b4": 18,
    "fd-sdar-thr0.5-p11-g24-b8": 20,
}
"""Prefill and decoding passes as shipped: commits folded, guesses across the end of a block. Equal for 4 and 8 nodes."""


@cache
def load():
    return load_target(str(FOLDER / "sdar"), device="cpu", stop_ids=())


@dataclass
class NotFolding:
    """A target whose blocks are stored by a pass of their own; notes its calls as FreeDave's monitor does: rows, tokens, start, store."""

    target: object = field(default_factory=load)
    calls: list = field(default_factory=list)

    @property
    def spec(self):
        return replace(self.target.spec, crosses=False)

    def prefill(self, token_ids, block_length):
        if len(token_ids):
            self.calls.append((1, len(token_ids), 0, True))
        return self.target.prefill(token_ids, block_length)

    def evaluate(self, prefix, canvases):
        self.calls.append((*canvases.shape, prefix.length, False))
        return self.target.evaluate(prefix, canvases)

    def commit(self, prefix, token_ids):
        self.calls.append((1, len(token_ids), prefix.length, True))
        return self.target.commit(prefix, token_ids)

    def encode(self, text):
        return self.target.encode(text)

    def decode(self, token_ids):
        return self.target.decode(token_ids)


def params_of(case, nodes=1, **changes):
    official = case["settings"]
    threshold = official.get("confidence_threshold")
    rule = UnmaskRule() if threshold is None else UnmaskRule(select="threshold", threshold=threshold, strict=False)
    params = DecodeParams(rule, Sampling(0.0), official["max_gen_length"], nodes, official["block_length"], boundary=False)
    return replace(params, **changes)


def their_calls(run):
    """Return FreeDave's calls as rows, tokens of a row, start and store; a tree's branches are rows."""
    calls = run["forwards"]
    assert len(calls) == run["nfe"] and all(call["kv_in"] == call["start"] for call in calls)
    return [(call["batch"], call["len"], call["start"], call["store_kv"]) for call in calls]


def as_rows(calls, length):
    """Split the one row of a tree into its branches; everything but the prefill is blocks of `length`."""
    return [(1, n, at, True) if store else (rows * n // length, length, at, False) for rows, n, at, store in calls]


def canvas_of(result):
    """Return the padded canvas: FreeDave returns whole blocks."""
    tokens = {c.position: c.token for c in result.order}
    return result.prompt_ids + [tokens[len(result.prompt_ids) + i] for i in range(len(tokens))]


def transitions_of(result):
    """Return the number of the transition that committed each generated position of the padded canvas."""
    number: dict[tuple[int, int], int] = {}
    at = {c.position: number.setdefault((c.block, c.step), len(number)) for c in result.order}
    return [at[len(result.prompt_ids) + i] for i in range(len(at))]


def first_calls(prompt, length):
    whole = len(prompt) // length * length
    return [(1, whole, 0, True)] if whole else []


def jumps(event):
    """Whether the walk ended at a state that a node holds as that of another step."""
    state = event.acceptance.state
    return state.block == event.graph.block and bool((event.graph.canvases == state.canvas).all(axis=1).any())


@dataclass
class Told:
    """Our run, told as FreeDave would tell it."""

    calls: list
    step_map: list
    proposed: int
    result: object
    ours: list


def told(case, drafts):
    """Decode with `chain-published` and derive from the passes what FreeDave's code must report if it makes the same ones."""
    target = NotFolding()
    length = case["settings"]["block_length"]
    calls, groups, proposed = first_calls(case["prompt"], length), [], 0
    before = None
    for event in decode_steps(target, case["prompt"], PUBLISHED, params_of(case, drafts)):
        if isinstance(event, BlockStarted):
            start, theirs, before = event.start, event.state.canvas, None
        elif isinstance(event, Pass):
            final, visited = event.acceptance.state, event.acceptance.transitions[-1].before.canvas
            if before is None:
                calls.append((1, length, start, False))
            else:
                root = before.state
                masks = int((theirs == MASKED).sum())
                rows = min(drafts, masks)
                assert len(event.graph) == min(drafts, len(root.masked)), "without the complete block"
                calls.append((rows, length, start, False))
                reached = min(masks, masks - len(root.masked) + rows - 1)
                proposed += reached
                whole = root.canvas.copy()
                whole[root.masked] = (
                    before.transitions[-1].candidates.take(np.isin(before.transitions[-1].before.masked, root.masked)).tokens
                )
                taken = whole if reached == masks and np.array_equal(whole, final.canvas) else visited
                groups.append([start + p for p in np.flatnonzero((theirs == MASKED) & (taken != MASKED))])
                theirs = taken
                assert not jumps(event), "FreeDave's walk would go on"
            before = event.acceptance
        elif isinstance(event, BlockFinished):
            left = [start + p for p in np.flatnonzero(theirs == MASKED)]
            assert len(left) <= 1, "FreeDave would check this transition in a pass of its own"
            proposed += len(left)
            groups += [left] if left else []
            calls.append((1, length, start, True))
        elif isinstance(event, Finished):
            result = event.result
    at = {p: number for number, group in enumerate(groups) for p in group}
    first = len(case["prompt"])
    return Told(calls, [at[first + i] for i in range(len(at))], proposed, result, target.calls)


def test_every_run_is_compared():
    assert len(CASES) == 8 and len(PLAIN) == 28 and len(EAGER_RUNS) == 28


@pytest.mark.parametrize("name", CASES)
def test_standard_decoding_is_their_baseline(name):
    case = CASES[name]
    target = NotFolding()
    result = generate(target, case["prompt"], Root(), params_of(case))
    last = case["settings"]["block_length"]
    assert [*target.calls, (1, last, len(canvas_of(result)) - last, True)] == their_calls(case["baseline"])
    assert canvas_of(result) == case["baseline"]["output"]
    assert transitions_of(result) == case["baseline"]["step_map"]


@pytest.mark.parametrize("name, index", PLAIN)
def test_the_same_passes(name, index):
    """Tokens, order, the calls one by one with their rows, the positions every pass commits, and what it proposes."""
    case = CASES[name]
    run, length = case["freedave"][index], case["settings"]["block_length"]
    ours = told(case, run["draft_steps"])
    assert canvas_of(ours.result) == run["output"]
    assert transitions_of(ours.result) == case["baseline"]["step_map"]
    assert ours.calls == as_rows(their_calls(run), length)
    assert ours.step_map == run["step_map"]
    assert (ours.proposed, len(ours.step_map)) == (run["num_proposed"], run["num_hit"])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("drafts", [4, 8])
def test_the_same_number_of_passes(name, drafts):
    """NFE as FreeDave counts, from our own counters, folded or not; a row less where it evaluates complete blocks."""
    case = CASES[name]
    ours = told(case, drafts)
    counts = ours.result.counts
    (nfe,) = {run["nfe"] for run in case["freedave"] if not run["eager"]}
    assert counts.nfe_prefill + counts.nfe + counts.nfe_commit + 1 == nfe, "and one for the last block's keys"
    folded = generate(load(), case["prompt"], PUBLISHED, params_of(case, drafts))
    assert folded.counts.nfe_commit == 0
    assert folded.counts.nfe_prefill + folded.counts.nfe + folded.counts.blocks == nfe
    assert folded.order == ours.result.order
    for here, there in zip([*ours.ours, ours.calls[-1]], ours.calls, strict=True):
        assert here[1:] == there[1:] and here[0] <= there[0]


def committed_after(run, prompt, length):
    """Return how many positions FreeDave has committed after each call; a block's last one needs none and counts at its store."""
    steps, whole = run["step_map"], len(prompt) // length * length
    taken, fresh, out = 0, True, []
    for _, _, start, store in their_calls(run):
        if store and start >= whole:
            taken = max(taken, 1 + max(steps[max(start - len(prompt), 0) : start + length - len(prompt)]))
        elif not store:
            taken += not fresh
        fresh = store
        out.append(sum(step < taken for step in steps))
    assert out[-1] == len(steps)
    return out


def decoding_calls(calls, length):
    """Return the number of decoding calls of each block."""
    blocks = [start // length for _, _, start, store in calls if not store]
    return [blocks.count(block) for block in sorted(set(blocks))]


@pytest.mark.parametrize("name, index", EAGER_RUNS)
def test_eager_mode_takes_other_passes_to_the_same_tokens(name, index):
    case = CASES[name]
    run, length = case["freedave"][index], case["settings"]["block_length"]
    drafts = run["draft_steps"]
    ours = told(case, drafts)
    assert canvas_of(ours.result) == run["output"]
    order = np.argsort(transitions_of(ours.result), kind="stable")
    assert (np.diff(np.array(run["step_map"])[order]) >= 0).all(), "in the same order"
    nfe, calls = run["nfe"], decoding_calls(their_calls(run), length)
    plain = {"step_map": ours.step_map, "nfe": len(ours.calls), "forwards": [call_of(*c) for c in ours.calls]}
    here, there = committed_after(plain, case["prompt"], length), committed_after(run, case["prompt"], length)
    first = next(i for i, (a, b) in enumerate(zip(here, there, strict=False)) if a != b)
    assert (nfe, calls, len(ours.calls), decoding_calls(ours.calls, length), first) == EAGER[name]
    start = len(case["prompt"]) // length * length
    assert their_calls(run)[first][2:] == (start, False), "they still check a state of the first block"
    assert there[first] > here[first] == start + length - len(case["prompt"]), "which we have completed"
    assert first in (stored := ours.calls.index((1, length, start, True)), stored - 1)


def call_of(rows, tokens, start, store):
    return {"batch": rows, "len": tokens, "start": start, "store_kv": store, "kv_in": start}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("nodes", [4, 8])
def test_as_shipped(name, nodes):
    """Folded commits and guesses across blocks: the same tokens in fewer passes than either mode of FreeDave."""
    case = CASES[name]
    result = generate(load(), case["prompt"], PUBLISHED, params_of(case, nodes, boundary=True))
    assert canvas_of(result) == case["baseline"]["output"]
    assert transitions_of(result) == case["baseline"]["step_map"]
    assert result.counts.nfe_commit == 0
    assert result.counts.nfe_prefill + result.counts.nfe == CROSSING[name] < min(run["nfe"] for run in case["freedave"])


@pytest.mark.parametrize("threshold, expected", [(0.3, 0), (0.4, 1), (0.5, 1), (0.6, 1), (0.7, 0)])
def test_where_their_walk_would_jump(threshold, expected):
    """A deviation that no run shows: a transition to a node of another step ends our walk, at temperature 0 too.

    FreeDave compares canvases only. Ours compares the step as well, on which the noise depends.
    """
    case = CASES["fd-sdar-p5-g24-b4"]
    rule = UnmaskRule(select="threshold", threshold=threshold, strict=False)
    events = decode_steps(load(), case["prompt"], PUBLISHED, params_of(case, 4, rule=rule))
    assert sum(jumps(event) for event in events if isinstance(event, Pass)) == expected
