"""A request while it is decoded: its events become text, which ends at a stop string, and the count of its passes.

A stop string ends the request with the token that completes it, as in the harness's own models, however many tokens a pass commits.

Example: `answer.take(event)` for every event, until it is true.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lm_eval.models.utils import postprocess_generated_text

from spot_dlm.interfaces import SAMPLES_PER_PROMPT, DecodeParams, Target
from spot_dlm.sequence import BlockStarted, Event, Finished, Pass
from spot_dlm.stable import StableIds, TextStream


@dataclass(frozen=True)
class Passes:
    """What one request took; `nfe_standard` is what standard decoding takes for the same tokens."""

    task: str
    doc_id: int
    sample: int
    tokens: int
    nfe: int
    nfe_standard: int
    finish_reason: Literal["stop", "length", "until"]


class Answer:
    """The way from a request's events to its text; `text` and `passes` are set at the end."""

    def __init__(self, target: Target, num_prompt: int, params: DecodeParams, until: Sequence[str], task: str, doc_id: int) -> None:
        self._run, self._stream = StableIds(target.spec.stop_ids, params.max_new_tokens), TextStream(target.decode)
        self._num_prompt, self._until = num_prompt, [stop for stop in until if stop]
        self._name = (task, doc_id, params.sequence % SAMPLES_PER_PROMPT)
        self._steps: dict[tuple[int, int], int] = {}  # the number of each, from 1
        self._step_at: dict[int, int] = {}
        self._so_far, self._num_stable, self._nfe = "", 0, 0
        self.text = ""
        self.passes: Passes | None = None

    def take(self, event: Event) -> bool:
        """Take an event; return whether the request has ended, by itself or at a stop string."""
        self._nfe += isinstance(event, Pass)
        if isinstance(event, BlockStarted | Pass):
            for c in event.committed:
                if c.step >= 0:  # a seed takes no pass
                    self._steps.setdefault((c.block, c.step), len(self._steps) + 1)
                self._step_at[c.position] = len(self._steps)
        for token_id in self._run.take(event):
            self._num_stable += 1
            self._so_far += self._stream.push(token_id)
            if self._is_stopped():
                needed = range(self._num_prompt, self._num_prompt + self._num_stable)
                return self._end(self._num_stable, max(self._step_at[i] for i in needed), "until")
        if isinstance(event, Finished):
            self._so_far += self._stream.end()
            counts = event.result.counts
            return self._end(counts.tokens, counts.transitions, "until" if self._is_stopped() else event.result.finish_reason)
        return False

    def _is_stopped(self) -> bool:
        return any(stop in self._so_far for stop in self._until)

    def _end(self, tokens: int, nfe_standard: int, reason: Literal["stop", "length", "until"]) -> bool:
        self.text = postprocess_generated_text(self._so_far, self._until, None)
        self.passes = Passes(*self._name, tokens, self._nfe, nfe_standard, reason)
        return True


def totals(passes: Sequence[Passes]) -> dict[str, Any]:
    """Return the sums over requests, and how many times fewer passes than standard decoding they took."""
    sums: dict[str, Any] = {"requests": len(passes)}
    sums |= {name: sum(getattr(p, name) for p in passes) for name in ("tokens", "nfe", "nfe_standard")}
    return sums | {"nfe_reduction": sums["nfe_standard"] / sums["nfe"] if sums["nfe"] else None}
