"""Recorded states as training examples: dense features, the true path that follows, and what became of the stale tokens.

Knows nothing of models. Example: `states = TraceStates(read_traces(folder)); states.batch(states.indices[:32], depths=16)`.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import no_type_check

import numpy as np
from jaxtyping import Int8, Int64
from numba import njit

from spot_dlm.features import NUM_LOGP, StateBatch
from spot_dlm.lookahead import decisive_rank
from spot_dlm.rules import parse_rule
from spot_dlm.traces import Traces

BEST, SECOND, OTHER = 0, 1, 2
"""What a committed token was among the stale ones."""


@dataclass(frozen=True)
class Paths:
    """What the target did after each state: positions committed at depth 0, 1, ... below the root, and which token it was.

    `kind` is BEST, SECOND or OTHER, -1 beyond the block's end; `look_ahead` are the best and second-best stale tokens.
    """

    positions: Int64[np.ndarray, "B D"]
    tokens: Int64[np.ndarray, "B D"]
    kind: Int8[np.ndarray, "B D"]
    look_ahead: Int64[np.ndarray, "B D L 2"]


class TraceStates:
    """Random access to the states of finished traces; `indices` are those whose root still has two masked positions."""

    def __init__(self, traces: Traces) -> None:
        self.traces = traces
        self.rows = traces.offsets("state")
        self.ahead = traces.offsets("ahead")
        self.effects = traces.offsets("effect")
        self.first_state = traces.offsets("block")
        self.block_of = np.repeat(np.arange(len(traces.block["index"])), traces.block["states"])
        self.setting_of_block = traces.setting_of_block().astype(np.int64)
        lengths = np.array([s["block_length"] for s in traces.settings], dtype=np.int64)
        self.length_of_block = lengths[self.setting_of_block]
        self.sequence_of_block = np.repeat(np.arange(len(traces.sequence["blocks"])), traces.sequence["blocks"])
        self.temperature = np.array([s["temperature"] for s in traces.settings], dtype=np.float32)
        rules = [parse_rule(s["rule"]) for s in traces.settings]
        self.rounded = np.array([r.resolution == "bfloat16" for r in rules], dtype=np.int8)
        setting = self.setting_of_block[self.block_of]
        self.row_rank = self._ranks(np.repeat(setting, traces.state["rows"]), traces.row["fine"], traces.row["position"])
        counts = np.diff(self.ahead)
        self.ahead_rank = self._ranks(np.repeat(setting, counts), traces.ahead["fine"][:, 0], self._ahead_positions)

    def _ranks(self, setting: np.ndarray, fine: np.ndarray, positions: np.ndarray) -> np.ndarray:
        out = np.empty(len(fine), dtype=np.float32)
        for number, entry in enumerate(self.traces.settings):
            at = setting == number
            out[at] = decisive_rank(fine[None, at], positions[None, at].astype(np.int64), parse_rule(entry["rule"]))[0]
        return out

    @cached_property
    def _ahead_positions(self) -> np.ndarray:
        """Position of every look-ahead entry."""
        state = self.traces.state
        out = np.empty(int(self.ahead[-1]), dtype=np.int16)
        _fill_positions(self.rows, self.ahead, state["ahead_depths"], state["commit_position"], self.traces.row["position"], out)
        return out

    @cached_property
    def indices(self) -> Int64[np.ndarray, " n"]:
        """States whose root has at least two masked positions: where there is something to draft."""
        return np.flatnonzero(self.traces.state["rows"] >= 3)

    @cached_property
    def drafted(self) -> Int64[np.ndarray, " n"]:
        """Those of `indices` at which a speculative recorder drafted, so that effects are recorded."""
        return self.indices[self.traces.state["effect_rows"][self.indices] > 0]

    def of_sequences(self, sequences: Int64[np.ndarray, " k"]) -> Int64[np.ndarray, " n"]:
        """Return those of `indices` that belong to the given sequences."""
        chosen = np.zeros(len(self.traces.sequence["blocks"]), dtype=bool)
        chosen[sequences] = True
        return self.indices[chosen[self.sequence_of_block[self.block_of[self.indices]]]]

    def lengths(self, indices: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " n"]:
        """Return the block length of states."""
        return self.length_of_block[self.block_of[indices]]

    def batch(self, indices: Int64[np.ndarray, " B"], depths: int) -> tuple[StateBatch, Paths]:
        """Return states of one block length, densely, with the paths that followed.

        Args:
            indices: states.
            depths: depths of the look-ahead and of the paths.
        """
        traces, state = self.traces, self.traces.state
        size, length = len(indices), int(self.lengths(indices[:1])[0])
        f32 = np.float32
        status, age = np.zeros((size, length), np.int8), np.zeros((size, length), np.int16)
        commit_fine = np.zeros((size, length), f32)
        logp, log_rest = np.zeros((size, length, NUM_LOGP), f32), np.zeros((size, length), f32)
        entropy, fine = np.zeros((size, length), f32), np.zeros((size, length), f32)
        past = np.ones((size, 2, length), f32)
        ahead_fine, ahead_rank, margin = (np.zeros((size, depths, length), f32) for _ in range(3))
        agree = np.zeros((size, depths, length), np.int8)
        effect, known = np.zeros((size, length, length), f32), np.zeros((size, length), f32)
        positions, tokens = np.zeros((size, depths), np.int64), np.zeros((size, depths), np.int64)
        kind = np.full((size, depths), -1, np.int8)
        look_ahead = np.full((size, depths, length, 2), -1, np.int64)
        blocks = self.block_of[indices]
        _gather(
            np.asarray(indices, np.int64), self.first_state[blocks], self.first_state[blocks + 1], self.rows, self.ahead,
            state["ahead_depths"], state["commit_position"], state["commit_token"],
            traces.row["position"], traces.row["logp"], traces.row["ids"], traces.row["log_rest"], traces.row["entropy"],
            traces.row["fine"], self.row_rank, traces.ahead["tokens"], traces.ahead["fine"], self.ahead_rank, traces.ahead["margin"],
            self.effects, state["effect_rows"], traces.effect["value"], traces.row["known"], effect, known,
            status, age, commit_fine, logp, log_rest, entropy, fine, past, ahead_fine, ahead_rank, margin, agree,
            positions, tokens, kind, look_ahead,
        )  # fmt: skip
        setting = self.setting_of_block[blocks]
        dense = StateBatch(
            status, age, commit_fine, logp, log_rest, entropy, fine, past, ahead_fine, ahead_rank, margin, agree,
            effect, known, self.temperature[setting], self.rounded[setting],
        )  # fmt: skip
        return dense, Paths(positions, tokens, kind, look_ahead)


@njit(cache=True)
@no_type_check
def _fill_positions(rows, ahead, ahead_depths, commit_position, row_position, out):
    """Write the position of every look-ahead entry (depth-major, the committed position left out)."""
    for s in range(len(ahead_depths)):
        at = ahead[s]
        for _ in range(ahead_depths[s]):
            for r in range(rows[s], rows[s + 1]):
                if row_position[r] != commit_position[s]:
                    out[at] = row_position[r]
                    at += 1


@njit(cache=True)
@no_type_check
def _gather(
    indices, first_state, end_state, rows, ahead, ahead_depths, commit_position, commit_token,
    row_position, row_logp, row_ids, row_log_rest, row_entropy, row_fine, row_rank, a_tokens, a_fine, a_rank, a_margin,
    effects, effect_rows, effect_value, row_known, effect, known,
    status, age, commit_fine, logp, log_rest, entropy, fine, past, ahead_fine, ahead_rank, margin, agree,
    positions, tokens, kind, look_ahead,
):  # fmt: skip
    """Fill the dense arrays of every state from the flat tables."""
    depths = positions.shape[1]
    for b in range(len(indices)):
        s = indices[b]
        for t in range(first_state[b], s):
            p = commit_position[t]
            status[b, p] = 1
            age[b, p] = s - t
            for r in range(rows[t], rows[t + 1]):
                if row_position[r] == p:
                    commit_fine[b, p] = row_fine[r]
        for back in range(2):
            t = s - 1 - back
            if t >= first_state[b]:
                for r in range(rows[t], rows[t + 1]):
                    past[b, back, row_position[r]] = row_fine[r]
        num = 0
        drafted = s
        while drafted > first_state[b] and effect_rows[drafted] == 0:
            drafted -= 1  # between two drafts: what was known at the earlier one, further away by now
        if effect_rows[drafted] > 0:
            at = effects[drafted]
            for r in range(rows[drafted], rows[drafted + 1]):
                if row_known[r] > 0:
                    known[b, row_position[r]] = 1.0 / (1.0 / row_known[r] + 0.1 * (s - drafted))
                for q in range(rows[drafted], rows[drafted + 1]):
                    effect[b, row_position[r], row_position[q]] = effect_value[at]
                    at += 1
            for t in range(drafted, s):
                known[b, commit_position[t]] = 0.0
        for r in range(rows[s], rows[s + 1]):
            p = row_position[r]
            logp[b, p] = row_logp[r]
            log_rest[b, p] = row_log_rest[r]
            entropy[b, p] = row_entropy[r]
            fine[b, p] = row_fine[r]
            if p == commit_position[s]:
                status[b, p] = 2
                commit_fine[b, p] = row_fine[r]
                continue
            status[b, p] = 3
            for d in range(depths):
                if ahead_depths[s] == 0:
                    ahead_fine[b, d, p] = row_fine[r]
                    ahead_rank[b, d, p] = row_rank[r]
                    margin[b, d, p] = row_logp[r, 0] - row_logp[r, 1]
                    agree[b, d, p] = 1
                    look_ahead[b, d, p] = row_ids[r]
                else:
                    e = ahead[s] + min(d, ahead_depths[s] - 1) * (rows[s + 1] - rows[s] - 1) + num
                    ahead_fine[b, d, p] = a_fine[e, 0]
                    ahead_rank[b, d, p] = a_rank[e]
                    margin[b, d, p] = a_margin[e]
                    agree[b, d, p] = a_tokens[e, 0] == row_ids[r, 0]
                    look_ahead[b, d, p] = a_tokens[e]
            num += 1
        for d in range(min(depths, end_state[b] - s - 1)):
            p, token = commit_position[s + 1 + d], commit_token[s + 1 + d]
            positions[b, d] = p
            tokens[b, d] = token
            kind[b, d] = 0 if look_ahead[b, d, p, 0] == token else (1 if look_ahead[b, d, p, 1] == token else 2)
