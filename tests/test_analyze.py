"""The findings on a hand-made trace whose numbers follow by hand, and how scorers are plugged in."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from toy import unchecked

from spot_dlm.analyze import analyze, figure
from spot_dlm.features import StateBatch
from spot_dlm.trace_states import Paths
from spot_dlm.traces import COLUMNS, FORMAT, Columns, Traces


@pytest.fixture(autouse=True)
def fast() -> Iterator[None]:
    with unchecked():
        yield


SURE = float(np.float32(-1e-4))
ALSO_SURE = float(np.float32(-2e-4))  # bfloat16 makes both 1, log-probabilities differ by 1e-4
STATES = [
    # masked position -> (log confidence, best token, second token); then what was committed
    ({0: (SURE, 10, 50), 1: (-2.0, 11, 51), 2: (ALSO_SURE, 12, 52), 3: (-1.0, 13, 53)}, (0, 10)),
    ({1: (-0.5, 21, 11), 2: (ALSO_SURE, 12, 52), 3: (-0.5 - 1e-6, 13, 54)}, (2, 12)),
    ({1: (-0.25, 21, 51), 3: (-0.25, 23, 13)}, (1, 21)),
    ({3: (-0.1, 99, 13)}, (3, 99)),
]


def hand_made(rules: tuple[str, ...] = ("standard",), families: tuple[str, ...] = ("json",)) -> Traces:
    """One block of four positions at temperature 0, the same for every family and rule."""
    columns = Columns()
    for prompt in range(len(families)):
        for setting in range(len(rules)):
            columns.add("sequence", prompt=prompt, setting=setting, blocks=1, tokens=4)
            columns.add("block", index=0, tail=0, states=4)
            for step, (rows, (position, token)) in enumerate(STATES):
                state = {"step": step, "rows": len(rows), "commit_position": position, "commit_token": token}
                columns.add("state", **dict.fromkeys(COLUMNS["state"], 0) | state)
                for p, (fine, best, second) in rows.items():
                    logp = np.full(8, -80.0)
                    logp[:2] = fine, fine - 1
                    row = {"position": p, "logp": logp, "ids": [best, second], "fine": fine, "token": best}
                    columns.add("row", **dict.fromkeys(COLUMNS["row"], 0) | row)
    settings = [{"rule": r, "temperature": 0.0, "block_length": 4, "top_p": 1.0, "top_k": 0} for r in rules]
    manifest = {"format": FORMAT, "settings": settings, "prompts": [{"id": i, "family": f} for i, f in enumerate(families)], "shards": []}
    arrays = columns.arrays()
    return Traces(manifest, **{t: {c: arrays[f"{t}_{c}"] for c in names} for t, names in COLUMNS.items()})


def test_numbers_by_hand() -> None:
    """State 0 looks at commits (2, 12), (1, 21), (3, 99); state 1 at (1, 21), (3, 99); state 2 at (3, 99).

    Tokens. Look-ahead 1: 12 is state 0's best; 21 is state 1's best; 99 is neither of state 2's: 2 of 3, in best two 2 of 3.
    Look-ahead 2: state 0 has 11 / 51 for 21: wrong; state 1 has 13 / 54 for 99: wrong. 4 and 8: no case, the block is over.
    Order. Look-ahead 1, more than one position left: state 0 leaves 1, 2, 3 and ranks 2 first: right; left to right says 1: place 2.
    State 1 leaves 1 (-0.5) and 3 (a little less): place 1 both ways. Look-ahead 2: state 0, with 2 gone, leaves 1 (-2) and 3 (-1);
    the next is 1: place 2 by confidence, 1 from the left.
    Ties. Gaps of the two best: 1e-4, 0.4998, 0: one equal, two below 1e-3, one below 1e-5.
    """
    document = analyze(hand_made())
    pooled = document["pooled"]
    assert pooled["states"] == 3 and document["sequences"] == 1 and document["look_aheads"] == [1, 2, 4, 8]
    assert pooled["token"]["1"] == {"n": 3, "best": round(2 / 3, 6), "two_best": round(2 / 3, 6)}
    assert pooled["token"]["2"] == {"n": 2, "best": 0.0, "two_best": 0.0}
    assert pooled["token"]["4"] == pooled["token"]["8"] == {"n": 0, "best": None, "two_best": None}
    rule, left = pooled["order"]["rule"], pooled["order"]["left_to_right"]
    assert rule["1"] == {"n": 2, "top1": 1.0, "top2": 1.0, "top3": 1.0}
    assert rule["2"] == {"n": 1, "top1": 0.0, "top2": 1.0, "top3": 1.0}
    assert left["1"] == {"n": 2, "top1": 0.5, "top2": 1.0, "top3": 1.0}
    assert left["2"] == {"n": 1, "top1": 1.0, "top2": 1.0, "top3": 1.0}
    assert rule["4"]["n"] == rule["8"]["n"] == 0
    assert pooled["next_rank"] == [2]
    assert pooled["ties"] == {"n": 3, "equal": round(1 / 3, 6), "gap_below_1e-3": round(2 / 3, 6), "gap_below_1e-5": round(1 / 3, 6)}


def test_second_best_counts() -> None:
    """With 13 committed last instead of 99, state 1's best and state 2's second are right."""
    traces = hand_made()
    traces.state["commit_token"][3] = 13
    token = analyze(traces)["pooled"]["token"]
    assert token["1"] == {"n": 3, "best": round(2 / 3, 6), "two_best": 1.0}
    assert token["2"] == {"n": 2, "best": 0.5, "two_best": 0.5}


def test_resolution_decides_ties() -> None:
    """At bfloat16 the two sure positions of step 0 are equal, and 1 and 3 of step 1 are too: the tie goes to the lower position."""
    settings = {s["rule"]: s for s in analyze(hand_made(("standard", "bfloat16")))["settings"]}
    assert settings["standard"]["ties"]["equal"] == round(1 / 3, 6) and settings["bfloat16"]["ties"]["equal"] == round(2 / 3, 6)
    assert settings["bfloat16"]["ties"]["gap_below_1e-5"] == round(1 / 3, 6)
    assert settings["bfloat16"]["order"]["rule"]["1"]["top1"] == 1.0


def test_groups() -> None:
    document = analyze(hand_made(("standard", "ltr"), ("json", "python", "json")))
    assert [(c["family"], c["rule"], c["states"]) for c in document["cells"]] == [
        ("json", "standard", 6), ("json", "ltr", 6), ("python", "standard", 3), ("python", "ltr", 3),
    ]  # fmt: skip
    assert [(s["rule"], s["temperature"], s["block_length"], s["states"]) for s in document["settings"]] == [
        ("standard", 0.0, 4, 9), ("ltr", 0.0, 4, 9),
    ]  # fmt: skip
    assert document["pooled"]["states"] == 18 and document["pooled"]["token"]["1"]["n"] == 18
    ltr = document["settings"][1]
    assert ltr["order"]["rule"] == ltr["order"]["left_to_right"] and ltr["ties"]["equal"] == 0


def test_coupled_tokens_and_confidences_of_later_depths() -> None:
    """At T > 0 the look-ahead's depth k - 1 counts: state 0's own entries, depth-major over positions 1, 2, 3."""
    traces = hand_made()
    traces.manifest["settings"][0]["temperature"] = 1.0
    traces.state["ahead_depths"][:] = [2, 1, 1, 0]
    ahead = [
        ([31, 0], -1.0), ([12, 0], -2.0), ([33, 0], -3.0),  # depth 0: 2 is next, its token right, its place second
        ([21, 0], -1.0), ([42, 0], -0.1), ([43, 0], -3.0),  # depth 1: 1 is next, right, and first once 2 is gone
        ([41, 21], -3.0), ([13, 0], -2.0),  # state 1: 1 is next, 21 second, place second
        ([99, 0], -3.0),
    ]  # fmt: skip
    columns = Columns()
    for tokens, fine in ahead:
        columns.add("ahead", tokens=tokens, fine=[fine, -80.0], margin=1.0)
    arrays = columns.arrays()
    traces.ahead.update({c: arrays[f"ahead_{c}"] for c in COLUMNS["ahead"]})
    pooled = analyze(traces)["pooled"]
    assert pooled["token"]["1"] == {"n": 3, "best": round(2 / 3, 6), "two_best": 1.0}
    assert pooled["order"]["rule"]["1"] == {"n": 2, "top1": 0.0, "top2": 1.0, "top3": 1.0}
    assert pooled["token"]["2"]["n"] == 2 and pooled["order"]["rule"]["2"] == {"n": 1, "top1": 1.0, "top2": 1.0, "top3": 1.0}
    assert pooled["next_rank"] == [0, 2]


def test_scorers() -> None:
    def oracle(batch: StateBatch, paths: Paths) -> np.ndarray:
        scores = np.zeros(batch.ahead_rank.shape, np.float32)
        for b, d in zip(*np.nonzero(paths.kind >= 0), strict=True):
            scores[b, d, paths.positions[b, d]] = 1
        return scores

    def contrary(batch: StateBatch, paths: Paths) -> np.ndarray:
        return -oracle(batch, paths)

    order = analyze(hand_made(), {"oracle": oracle, "contrary": contrary})["pooled"]["order"]
    assert order["oracle"]["1"]["top1"] == order["oracle"]["2"]["top1"] == 1.0
    assert order["contrary"]["1"] == {"n": 2, "top1": 0.0, "top2": 0.5, "top3": 1.0}
    with pytest.raises(ValueError, match="scorer 'flat': scores must be numbers of shape"):
        analyze(hand_made(), {"flat": lambda batch, paths: np.zeros(3, np.float32)})
    with pytest.raises(ValueError, match="scorer 'nan'"):
        analyze(hand_made(), {"nan": lambda batch, paths: np.full_like(batch.ahead_rank, np.nan)})


def test_figure() -> None:
    assert figure(analyze(hand_made(("standard", "bfloat16")))).startswith(b"\x89PNG")
