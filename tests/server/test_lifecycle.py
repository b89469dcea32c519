"""Slots, queue and failures: a target that takes its time, and fails on some prompts."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from server.conftest import Running, Start
from server.slow import FAILING, alone, body, slowly


@pytest.fixture(scope="module")
def server(start: Start) -> Running:
    """Two slots, three that wait."""
    return start("--name", "toy", "--drafter", "chain", "--batch", 2, "--queue", 3, "--timeout", 15, prepare=slowly(0.02))


def test_a_client_that_leaves_in_the_middle_frees_its_slot(server: Running) -> None:
    for stream in (True, False):
        request = body([5, 6], 900, stream=stream, n=2, spot={"drafter": "root"})
        before = server.metric('spot_samples_total{outcome="cancelled"}')
        with httpx.Client(timeout=0.8) as client:
            if stream:
                with client.stream("POST", f"{server.url}/v1/completions", json=request) as response:
                    lines = response.iter_lines()
                    assert next(lines).startswith("data: ")
                    assert server.metric("spot_samples_running") == 2
            else:
                with pytest.raises(httpx.ReadTimeout):
                    client.post(f"{server.url}/v1/completions", json=request)
        server.wait_until(lambda: server.is_idle, "the slots are free")
        assert server.metric('spot_samples_total{outcome="cancelled"}') - before == 2
    assert server.post("/v1/completions", body([5, 6], 9)).json()["choices"][0]["text"] == alone([5, 6], 9)


def test_a_client_that_leaves_while_it_waits(server: Running) -> None:
    long = body([7], 900, stream=True, n=2, spot={"nodes": 1})
    with httpx.stream("POST", f"{server.url}/v1/completions", json=long, timeout=60) as response:
        lines = response.iter_lines()
        assert next(lines)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/v1/completions", json=body([8], n=3), timeout=0.4)
        server.wait_until(lambda: server.metric("spot_samples_waiting") == 0, "it waits no more")
        assert server.metric("spot_samples_running") == 2
    server.wait_until(lambda: server.is_idle, "the slots are free")


def test_a_full_queue_is_a_429_that_says_when_to_come_again(server: Running) -> None:
    prompts = [[3 + i, 4] for i in range(12)]

    def ask(prompt: list[int]) -> httpx.Response:
        return server.post("/v1/completions", body(prompt, 40, spot={"nodes": 1}))

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(ask, prompts))
    refused = [a for a in answers if a.status_code == 429]
    assert 0 < len(refused) <= 7 and all(a.status_code in (200, 429) for a in answers)
    assert all(1 <= int(a.headers["retry-after"]) <= 60 and a.json()["error"]["type"] == "rate_limit_error" for a in refused)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.status_code == 429 or answer.json()["choices"][0]["text"] == alone(prompt, 40)
    client = server.client()
    with pytest.raises(openai.BadRequestError, match="may ask for 5 answers"):
        client.completions.create(**body([3], n=6))
    patient = server.client(max_retries=8)
    with ThreadPoolExecutor(6) as pool:
        texts = list(pool.map(lambda p: patient.completions.create(**body(p, 12)).choices[0].text, prompts[:6]))
    assert texts == [alone(p, 12) for p in prompts[:6]]


def test_failures_are_a_500_of_their_request_alone(server: Running) -> None:
    """NaN logits become no text, in streams neither; what runs beside them goes on, and no detail leaves the server."""
    with ThreadPoolExecutor(2) as pool:
        beside = pool.submit(server.post, "/v1/completions", body([9, 8], 60))
        for token, detail in FAILING.items():
            prompt = [token] * 5
            answer = server.post("/v1/completions", body(prompt))
            assert answer.status_code == 500 and answer.json()["error"]["code"] == "decoding_failed"
            assert answer.json()["error"]["type"] == "server_error" and detail not in answer.text
            assert detail in server.log.read_text("utf-8")
            with pytest.raises(openai.APIError, match="decoding failed"):
                list(server.client().completions.create(**body(prompt), stream=True))
            raw = server.post("/v1/completions", body(prompt, stream=True)).text
            assert raw.count("data: ") == raw.count("\n\n") and "[DONE]" not in raw and raw.endswith("\n\n")
            both = server.post("/v1/completions", body(prompt) | {"prompt": [[4, 5], prompt]})
            assert both.status_code == 500
        assert beside.result().json()["choices"][0]["text"] == alone([9, 8], 60)
    server.wait_until(lambda: server.is_idle, "nothing is left")


def test_a_model_without_tokenizer_takes_ids(server: Running) -> None:
    chat = server.post("/v1/chat/completions", {"model": "toy", "messages": [{"role": "user", "content": "a"}]})
    for answer in (chat, server.post("/v1/completions", body([1]) | {"prompt": "a"})):
        assert answer.status_code == 400 and "no tokenizer" in answer.json()["error"]["message"]
