"""64 requests at once: each gets what it gets alone, and they share passes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from server.alone import alone
from server.conftest import Running


def test_64_requests_at_once_are_those_of_each_alone(server: Running) -> None:
    """They differ in everything, some stream, some have several samples, some stop early."""
    client = server.client()
    prompts = [f"Add {i} and {i + 3}." if i % 2 else f"Continue: x{i} = " for i in range(64)]
    rules = ("standard", "bfloat16", "threshold=0.6", "k=2", "ltr")

    def ask(i: int) -> list[str]:
        more: dict[str, Any] = {"stop": ["=", ". "]} if i % 7 == 3 else {}
        if i % 5 == 2:
            more["top_p"] = 0.9
        body = {"spot": {"rule": rules[i % 5], "nodes": ("auto", 1, 6)[i % 3]}}
        call = client.chat.completions.create(
            model="shipped", messages=[{"role": "user", "content": prompts[i]}], temperature=(0, 1.0, 0.7)[i % 3], seed=i, n=1 + i % 2,
            max_tokens=3 + i % 13, stream=i % 4 == 0, extra_body=body, **more,
        )  # fmt: skip
        if i % 4:
            return [c.message.content for c in call.choices]
        texts = [""] * (1 + i % 2)
        for chunk in call:
            texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        return texts

    def cut(i: int, text: str) -> str:
        found = [text.find(s) for s in ("=", ". ") if i % 7 == 3 and s in text]
        return text[: min(found, default=None)]

    with ThreadPoolExecutor(64) as pool:
        together = list(pool.map(ask, range(64)))
    for i, texts in enumerate(together):
        drawn = {"temperature": (0.0, 1.0, 0.7)[i % 3], "seed": i, "top_p": 0.9 if i % 5 == 2 else 1.0}
        expected = [alone(prompts[i], rule=rules[i % 5], max_new_tokens=3 + i % 13, sequence=s, **drawn).text for s in range(1 + i % 2)]
        assert texts == [cut(i, text) for text in expected], i
    assert server.is_idle and server.metric("spot_batch_passes_total") < server.metric("spot_sample_passes_total") / 2
