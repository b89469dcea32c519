"""Verification: replay the target's own transitions along a draft graph and keep what it would have done anyway.

The walk of method.md section 4, of one graph (`accept`) or of several in lockstep (`accept_many`); a drafter can only decide how far one
pass gets, never what is visited. Knows nothing of targets and drafters.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from spot_dlm.draft_graph import DraftGraph
from spot_dlm.noise import CoupledNoise, draw_each
from spot_dlm.race import on_host
from spot_dlm.state import BlockState
from spot_dlm.transition import Sampling, Transition, UnmaskRule, commit, denoise, propose

_SHARED_LOGITS = 2**20
"""Logits that several steps measure together at most: beyond, what a call costs is nothing to what its memory does."""


@dataclass(frozen=True)
class Step:
    """The arguments of one `denoise`."""

    state: BlockState
    logits: Float[Tensor, "m V"]
    rule: UnmaskRule
    sampling: Sampling
    noise: CoupledNoise


def denoise_many(steps: Sequence[Step]) -> list[Transition | ValueError]:
    """Apply `denoise` to each of several steps, equal to the bit, in few calls: those with equal parameters are measured together.

    On the host only: elsewhere a sum's rounding may depend on how many rows are summed, so every step has its own call. A step whose
    logits decide nothing gives its error and leaves the others alone.
    """
    groups: dict[tuple[object, ...], list[int]] = {}
    for i, step in enumerate(steps):
        drawn = step.sampling.temperature, step.sampling.top_k, step.sampling.top_p
        missing = len(step.state.masked) - len(step.logits)  # rows of a broken target, which must not shift others
        alone = -1 if on_host(step.logits) else i
        groups.setdefault((step.rule, *drawn, missing, step.logits.shape[-1], alone), []).append(i)
    out: dict[int, Transition | ValueError] = {}
    for group in groups.values():
        out |= zip(group, _denoise_alike([steps[i] for i in group]), strict=True)
    return [out[i] for i in range(len(steps))]


def _denoise_alike(steps: list[Step]) -> list[Transition | ValueError]:
    """Apply steps of equal parameters: half by half where they are too large to share a call, or one of them fails."""
    try:
        if len(steps) == 1:
            return [denoise(s.state, s.logits, s.rule, s.sampling, s.noise) for s in steps]
        if sum(s.logits.numel() for s in steps) <= _SHARED_LOGITS:
            return _denoise_together(steps)
    except ValueError as error:
        if len(steps) == 1:
            return [error]
    half = len(steps) // 2
    return _denoise_alike(steps[:half]) + _denoise_alike(steps[half:])


def _denoise_together(steps: list[Step]) -> list[Transition | ValueError]:
    """Propose for all steps in one call, one after the other in its rows."""
    rule, sampling = steps[0].rule, steps[0].sampling
    masked = [s.state.masked for s in steps]
    drawings = [(s.noise, s.state.block, s.state.step, len(m)) for s, m in zip(steps, masked, strict=True)]
    draw = partial(draw_each, drawings) if sampling.temperature > 0 else None
    candidates = propose(np.concatenate(masked), torch.cat([s.logits for s in steps]), rule, sampling, draw)
    ends = np.cumsum([len(m) for m in masked]).tolist()
    return [commit(s.state, candidates.take(slice(e - len(m), e)), rule, s.noise) for s, m, e in zip(steps, masked, ends, strict=True)]


@dataclass(frozen=True)
class Acceptance:
    """What one pass proved: its transitions (at least one), the visited node of each, and the logits of the last visited node.

    Where a node is a complete block, its transition is the first of the next block.
    """

    transitions: list[Transition]
    nodes: list[int]
    logits: Float[Tensor, "m V"]

    @property
    def state(self) -> BlockState:
        """The certain next state."""
        return self.transitions[-1].state


_Asked = tuple[BlockState, Float[Tensor, "m V"]]
"""A state and its logits, to which F is to be applied."""


def _walk(
    graph: DraftGraph, root: BlockState, logits_of: Callable[[int], Float[Tensor, "m V"]], is_final: Callable[[BlockState], bool]
) -> Generator[_Asked, Transition, Acceptance]:
    """Walk from the root: apply F to the current node, move to the node that equals the result, stop where there is none.

    Yields what F is to be applied to, is sent the transition, and returns what was proved.
    """
    node, state = 0, root
    transitions: list[Transition] = []
    nodes: list[int] = []
    while True:
        logits = logits_of(node)
        transition = yield state.decoded, logits
        transitions.append(transition)
        nodes.append(node)
        state = transition.state
        following = None if is_final(state) else graph.find(state)
        if following is None:
            return Acceptance(transitions, nodes, logits)
        node = following


def accept(
    graph: DraftGraph,
    root: BlockState,
    logits_of: Callable[[int], Float[Tensor, "m V"]],
    step: Callable[[BlockState, Float[Tensor, "m V"]], Transition],
    is_final: Callable[[BlockState], bool],
) -> Acceptance:
    """Walk one graph.

    Args:
        graph: guesses; node 0 is `root`.
        logits_of: logits of a node's masked positions, as the target gave them in this pass.
        step: F with its rule, sampling and noise bound.
        is_final: whether decoding of the block ends with a state.
    """
    walk = _walk(graph, root, logits_of, is_final)
    asked = next(walk)
    while True:
        try:
            asked = walk.send(step(*asked))
        except StopIteration as end:
            return end.value


@dataclass(frozen=True)
class Walk:
    """What one walk needs: the graph and its root, the logits of every node, F's rule, sampling and noise, and where decoding ends."""

    graph: DraftGraph
    root: BlockState
    logits_of: Callable[[int], Float[Tensor, "m V"]]
    rule: UnmaskRule
    sampling: Sampling
    noise: CoupledNoise
    is_final: Callable[[BlockState], bool]


def accept_many(walks: Sequence[Walk]) -> list[Acceptance | ValueError]:
    """Walk several graphs in lockstep, as `accept` would each of them; logits that decide nothing are the error of their own walk only."""
    going = [_walk(w.graph, w.root, w.logits_of, w.is_final) for w in walks]
    asked = {i: next(walk) for i, walk in enumerate(going)}
    out: dict[int, Acceptance | ValueError] = {}
    while asked:
        steps = [Step(*what, walks[i].rule, walks[i].sampling, walks[i].noise) for i, what in asked.items()]
        answers = zip(list(asked), denoise_many(steps), strict=True)
        asked = {}
        for i, answer in answers:
            if isinstance(answer, ValueError):
                out[i] = answer
                continue
            try:
                asked[i] = going[i].send(answer)
            except StopIteration as end:
                out[i] = end.value
    return [out[i] for i in range(len(walks))]
