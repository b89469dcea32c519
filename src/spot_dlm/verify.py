"""Verification: replay the target's own transitions along a draft graph and keep what it would have done anyway.

`accept` is the walk of method.md section 4; a drafter can only decide how far one pass gets, never what is visited. Knows nothing
of targets and drafters.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from jaxtyping import Float
from torch import Tensor

from spot_dlm.draft_graph import DraftGraph
from spot_dlm.noise import CoupledNoise
from spot_dlm.state import BlockState
from spot_dlm.transition import Sampling, Transition, UnmaskRule, denoise


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


def accept(
    graph: DraftGraph,
    root: BlockState,
    logits_of: Callable[[int], Float[Tensor, "m V"]],
    step: Callable[[BlockState, Float[Tensor, "m V"]], Transition],
    is_final: Callable[[BlockState], bool],
) -> Acceptance:
    """Walk from the root: apply F to the current node, move to the node that equals the result, stop where there is none.

    Args:
        graph: guesses; node 0 is `root`.
        logits_of: logits of a node's masked positions, as the target gave them in this pass.
        step: F with its rule, sampling and noise bound.
        is_final: whether decoding of the block ends with a state.
    """
    node, state = 0, root
    transitions: list[Transition] = []
    nodes: list[int] = []
    while True:
        logits = logits_of(node)
        transition = step(state.decoded, logits)
        transitions.append(transition)
        nodes.append(node)
        state = transition.state
        following = None if is_final(state) else graph.find(state)
        if following is None:
            return Acceptance(transitions, nodes, logits)
        node = following


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
    """Walk several graphs; an error stays with the walk that caused it."""
    out: list[Acceptance | ValueError] = []
    for w in walks:
        try:
            step = partial(denoise, rule=w.rule, sampling=w.sampling, noise=w.noise)
            out.append(accept(w.graph, w.root, w.logits_of, step, w.is_final))
        except ValueError as error:
            out.append(error)
    return out
