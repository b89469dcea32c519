"""What somebody who watches a sample sees: blocks that begin, what every pass committed, its draft graph, the counts at the end.

An observer of events: it changes nothing. Positions count from the first token of the answer; those of the prompt are left out.
The documents are described in docs/serving.md. Example: `Watch(target, len(prompt_ids)).take(event)` is `{"pass": {...}}`.
"""

from collections.abc import Iterable
from typing import Any

from spot_dlm.draft_graph import DraftGraph
from spot_dlm.interfaces import Target
from spot_dlm.sequence import BlockStarted, Committed, Event, Finished, Pass
from spot_dlm.state import MASKED
from spot_dlm.stats import Counts


class Watch:
    """Turns the events of one sample into documents.

    Args:
        target: decodes tokens.
        num_prompt: tokens of the prompt.
    """

    def __init__(self, target: Target, num_prompt: int) -> None:
        self._target, self._num_prompt = target, num_prompt
        self._starts: dict[int, int] = {}
        self._texts: dict[int, str | None] = dict.fromkeys(target.spec.stop_ids)

    def take(self, event: Event) -> dict[str, Any] | None:
        """Return what an event shows; None where it shows nothing that is new."""
        if isinstance(event, BlockStarted):
            return {"block": self._block(event)}
        if isinstance(event, Pass):
            return {"pass": self._pass(event)}
        return {"counts": _counts(event.result.counts)} if isinstance(event, Finished) else None

    def _block(self, event: BlockStarted) -> dict[str, Any]:
        self._starts[event.state.block] = event.start
        masked = [event.start - self._num_prompt + int(p) for p in event.state.masked]
        return {"number": event.state.block, "masked": masked, "committed": self._commits(event.committed)}

    def _pass(self, event: Pass) -> dict[str, Any]:
        return {
            "number": event.number,
            "steps": len(event.acceptance.transitions),
            "committed": self._commits(event.committed),
            "nodes": self._nodes(event.graph, set(event.acceptance.nodes)),
        }

    def _commits(self, commits: Iterable[Committed]) -> list[dict[str, Any]]:
        return [self._token(c.position, c.token) | {"block": c.block, "step": c.step} for c in commits]

    def _nodes(self, graph: DraftGraph, visited: set[int]) -> list[dict[str, Any]]:
        """Return the nodes; each with what it commits beyond its first parent, one without a parent beyond node 0."""
        parents: list[list[int]] = [[] for _ in range(len(graph))]
        for parent, node in graph.edges.tolist():
            parents[node].append(parent)
        start, nodes = self._starts[graph.block], []
        for node, (canvas, depth, reach) in enumerate(zip(graph.canvases, graph.depths.tolist(), graph.reach.tolist(), strict=True)):
            before = graph.canvases[parents[node][0] if parents[node] else 0]
            new = ((canvas != before) & (canvas != MASKED)).nonzero()[0].tolist()
            tokens = [self._token(start + p, int(canvas[p])) for p in new]
            known = {"depth": depth, "parents": parents[node], "reach": round(min(reach, 1.0), 4), "accepted": node in visited}
            nodes.append(known | {"tokens": tokens})
        return nodes

    def _token(self, position: int, token: int) -> dict[str, Any]:
        """Return a token at its place; its text is null where it is an end token."""
        if token not in self._texts:
            self._texts[token] = self._target.decode([token])
        return {"position": position - self._num_prompt, "token_id": token, "text": self._texts[token]}


def _counts(counts: Counts) -> dict[str, Any]:
    names = ("nfe", "transitions", "drafted", "accepted", "tokens", "total_s")
    return {name: getattr(counts, name) for name in names}
