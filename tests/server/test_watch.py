"""What a watcher is shown is what happened: the answer, its order and every evaluated state can be had from the documents."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from toy import unchecked

from server.slow import Slow
from spot_dlm.decode import decode_steps
from spot_dlm.drafters import Chain, Root
from spot_dlm.interfaces import DecodeParams, Drafter
from spot_dlm.sequence import Finished, Pass
from spot_dlm.server.engine import Seen
from spot_dlm.server.errors import ApiError
from spot_dlm.server.exchange import _MOST_UNREAD, Exchange
from spot_dlm.server.watch import Watch

PROMPT = [5, 6, 7]


@pytest.mark.parametrize("drafter", [Root(), Chain()], ids=["root", "chain"])
def test_documents_tell_what_happened(drafter: Drafter) -> None:
    target = Slow()
    watch, tokens, steps = Watch(target, len(PROMPT)), {}, {}
    with unchecked():
        events = list(decode_steps(target, PROMPT, drafter, DecodeParams(max_new_tokens=30, nodes=6)))
    is_open: set[int] = set()
    for event in events:
        shown = watch.take(event) or {}
        is_open |= set(shown.get("block", {}).get("masked", ()))
        if isinstance(event, Pass):
            _check_pass(event, shown["pass"], tokens)
            for commit in shown["pass"]["committed"]:
                tokens[commit["position"]] = commit["token_id"]
                steps[commit["position"]] = len(set(steps.values()) | {(commit["block"], commit["step"])}), commit["block"], commit["step"]
    result = next(e.result for e in events if isinstance(e, Finished))
    assert [tokens[i] for i in range(30)] == result.token_ids and set(tokens) == is_open >= set(range(30))
    in_order = sorted({(c.block, c.step) for c in result.order})
    assert [in_order.index(steps[i][1:]) for i in range(30)] == result.commit_steps
    assert shown["counts"]["nfe"] == sum(isinstance(e, Pass) for e in events) and shown["counts"]["tokens"] == 30
    assert {k: shown["counts"][k] for k in ("transitions", "drafted", "accepted", "total_s")}.items() <= vars(result.counts).items()


def _check_pass(event: Pass, shown: dict[str, Any], known: dict[int, int]) -> None:
    """Every node's canvas is its first parent's and its own tokens; those that were visited are marked."""
    graph, nodes = event.graph, shown["nodes"]
    assert shown["number"] == event.number and shown["steps"] == len(event.acceptance.transitions)
    assert [i for i, n in enumerate(nodes) if n["accepted"]] == sorted(event.acceptance.nodes)
    start = graph.block * graph.canvases.shape[1] - len(PROMPT)
    states: list[dict[int, int]] = []
    for node, canvas in zip(nodes, graph.canvases.tolist(), strict=True):
        before = states[node["parents"][0]] if node["parents"] else known
        states.append(before | {t["position"]: t["token_id"] for t in node["tokens"]})
        assert all(states[-1].get(start + p, -1) == token for p, token in enumerate(canvas) if start + p >= 0)
        assert node["depth"] == (nodes[node["parents"][0]]["depth"] + 1 if node["parents"] else 0)


def test_what_is_not_read_is_not_kept_without_end() -> None:
    """A client that does not read loses its request, and is told so once it reads."""

    class Eager:
        cancelled = 0

        def submit(self, _: object, listener: Any) -> int:
            for _ in range(2 * _MOST_UNREAD):
                listener(Seen(0, {}))
            return 7

        def cancel(self, number: int) -> None:
            self.cancelled += number

    class Job:
        samples = (None,)

    async def read() -> int:
        exchange, count = Exchange(engine, Job(), asyncio.get_running_loop().time() + 60), 0
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="read too slowly") as refusal:
            async for _ in exchange:
                count += 1
        assert refusal.value.status == 408
        return count

    engine: Any = Eager()
    with unchecked():
        assert asyncio.run(read()) == _MOST_UNREAD and engine.cancelled == 7
