"""Clients that mean ill or are mistaken: a 4xx in OpenAI's shape that names the fault, no hang, and nobody else's data."""

from __future__ import annotations

import json
import re
import socket
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

import spot_dlm
from server.alone import alone
from server.conftest import Running, Start
from spot_dlm.server.schema import UNSUPPORTED

HOME = str(Path(spot_dlm.__file__).parent)
GOOD: dict[str, Any] = {"model": "shipped", "messages": [{"role": "user", "content": "Add 47 and 38."}], "max_tokens": 6}
ODD = ("x", 1.5, -1, True, [], {}, [[]], 10**30, "💥", [None], 1e308)
"""Values of many types; a field takes few of them."""
TAKES: dict[str, tuple[Any, ...]] = {
    "model": (), "messages": (), "max_tokens": (), "max_completion_tokens": (), "temperature": (1.5, 0), "top_p": (), "n": (),
    "seed": (-1, 0), "stop": ("x", "\x00", "💥", []), "stream": (True,), "stream_options": (), "user": ("x", "\x00", "💥"), "spot": ({},),
}  # fmt: skip


@pytest.fixture(scope="module")
def hardy(start: Start) -> Running:
    return start("--max-new-tokens", 8, "--batch", 4, "--queue", 8, "--max-body", 2**18)


def refused(response: httpx.Response, status: int, param: str | None = None) -> str:
    """Check the shape of an error; return its message."""
    assert response.status_code == status, response.text[:300]
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"} and len(response.content) < 2000
    assert not re.search(r"Traceback|File \"|site-packages|\.py", response.text) and HOME not in response.text
    if param is not None:
        assert error["param"] == param and param in error["message"], error
    return error["message"]


def still_well(server: Running) -> None:
    answer = server.post("/v1/chat/completions", GOOD)
    assert answer.status_code == 200 and answer.json()["choices"][0]["message"]["content"] == alone("Add 47 and 38.", max_new_tokens=6).text
    assert server.is_idle


@pytest.mark.parametrize("body", [
    b"", b"{", b"[]", b"null", b"12", b'"text"', b"{'model': 1}", b'{"model": "shipped"', b"\xff\xfe{}", b'{"model": "\xc3\x28"}',
    b'{"model": "shipped", "prompt": "\\ud800"}', b'{"model": "shipped", "prompt": "a", "temperature": NaN}',
    b'{"model": "shipped", "prompt": "a", "temperature": Infinity}', b"[" * 100_000, b'{"a":' * 50_000, b"1" * 10_000,
    '{"model": "shipped", "prompt": "a"}'.encode("utf-16"),
])  # fmt: skip
def test_bodies_that_are_no_json_objects(hardy: Running, body: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        refused(hardy.post(path, content=body, headers={"content-type": "application/json"}), 400)


def test_every_field_with_every_wrong_type(hardy: Running) -> None:
    with httpx.Client(base_url=hardy.url, timeout=120) as client:
        for field, taken in TAKES.items():
            for value in ODD:
                takes = any(type(value) is type(ok) and value == ok for ok in taken)
                if takes or (field == "model" and isinstance(value, str)):
                    continue
                body = json.dumps({k: v for k, v in GOOD.items() if k != "max_tokens"} | {field: value})
                response = client.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
                message = refused(response, 400)
                assert field in message or (field == "max_completion_tokens" and "max_tokens" in message), (field, value, message)
        for value in (1.5, -1, True, [], {}, [[]], [1, "a"], ["a", 1], [[1], "a"], [True], [-1], [10**30], [99999], "", "  ", [""], None):
            message = refused(client.post("/v1/completions", json={"model": "shipped", "prompt": value, "max_tokens": 3}), 400)
            assert "prompt" in message
    still_well(hardy)


@pytest.mark.parametrize(("change", "param"), [
    ({"frobnicate": 1}, "frobnicate"), ({"x" * 100_000: 1}, None), ({"\x00💥": 1}, "\x00💥"), ({"spot": {"seeed": 1}}, "spot.seeed"),
    ({"messages": []}, "messages"), ({"messages": [{}]}, "messages.0.role"), ({"messages": [{"role": "user"}]}, "messages.0.content"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages.0.role"), ({"messages": [{"role": "user", "content": ""}]}, "messages"),
    ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": "\n \t"}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "/etc/passwd"}}]}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": "a", "name": "b"}]}, "messages.0.name"), ({"messages": [["role", "user"]]}, "messages.0"),
    ({"n": 10**9}, "n"), ({"n": 17}, "n"), ({"n": 0}, "n"), ({"max_tokens": 10**9}, None), ({"max_tokens": 4096}, None),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"), ({"stop": [str(i) for i in range(10_000)]}, "stop"),
    ({"stop": ""}, "stop"), ({"stop": ["a" * 10_000]}, "stop"), ({"stop": [None]}, "stop"), ({"temperature": 1e30}, "temperature"),
    ({"temperature": 1e-30}, "temperature"), ({"temperature": -0.5}, "temperature"), ({"top_p": 0}, "top_p"), ({"top_p": 1.01}, "top_p"),
    ({"seed": 2**63}, "seed"), ({"stream_options": {"include_usage": True}}, "stream_options"), ({"spot": []}, "spot"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"), ({"spot": {"rule": "x" * 501}}, "spot.rule"),
    ({"spot": {"rule": "__import__('os')"}}, "spot.rule"), ({"spot": {"sampler": "llada,steps=abc"}}, "spot.sampler"),
    ({"spot": {"sampler": "../../etc/passwd"}}, "spot.sampler"), ({"spot": {"nodes": float(10**9)}}, "spot.nodes"),
])  # fmt: skip
def test_values_that_are_refused_by_name(hardy: Running, change: dict, param: str | None) -> None:
    refused(hardy.post("/v1/chat/completions", GOOD | change), 400, param)


def test_fields_that_are_not_offered(hardy: Running) -> None:
    """OpenAI's own fields are refused by name, unless they ask for nothing."""
    asking = {"echo": True, "best_of": 2, "suffix": "a", "tools": [{"type": "function"}], "logit_bias": {"5": 1}, "frequency_penalty": 0.5}
    for field in UNSUPPORTED:
        refused(hardy.post("/v1/chat/completions", GOOD | {field: asking.get(field, {"some": "thing"})}), 400, field)
        refused(hardy.post("/v1/completions", {"model": "shipped", "prompt": "a", field: asking.get(field, [3])}), 400, field)
    nothing = {field: idle[0] if idle else None for field, idle in UNSUPPORTED.items()}
    assert hardy.post("/v1/chat/completions", GOOD | nothing).status_code == 200
    assert "no probabilities" in refused(hardy.post("/v1/chat/completions", GOOD | {"logprobs": True}), 400, "logprobs")


def test_sizes(hardy: Running) -> None:
    """Ten megabytes are too large whether their length is told or not; a prompt that does not fit names the numbers."""
    huge = json.dumps(GOOD | {"messages": [{"role": "user", "content": "a" * 10_000_000}]}).encode()
    headers = {"content-type": "application/json"}
    assert "262144" in refused(hardy.post("/v1/chat/completions", content=huge, headers=headers), 413)
    parts = (huge[i : i + 65536] for i in range(0, len(huge), 65536))
    refused(hardy.post("/v1/chat/completions", content=parts, headers=headers), 413)
    long = refused(hardy.post("/v1/chat/completions", GOOD | {"messages": [{"role": "user", "content": "a b " * 3_000}]}), 400)
    assert "context holds" in long and "max_tokens=6" in long
    began = time.monotonic()
    for text in ("a" * 250_000, "<|MASK|>" * 30_000, "a" + "\n" * 120_000):
        for body in ({"messages": [{"role": "user", "content": text}]}, {"messages": [{"role": "user", "content": text[:9]}] * 5_000}):
            assert "context holds" in refused(hardy.post("/v1/chat/completions", GOOD | body), 400, "messages")
        assert "context holds" in refused(hardy.post("/v1/completions", {"model": "shipped", "prompt": text}), 400, "prompt")
    assert time.monotonic() - began < 30, "it does not take what encoding all of it would"
    refused(hardy.post("/v1/completions", {"model": "shipped", "prompt": ["a"] * 1000}), 400, "prompt")
    still_well(hardy)


def test_requests_that_are_none(hardy: Running) -> None:
    refused(hardy.get("/v1/chat/completions"), 405)
    refused(hardy.get("/etc/passwd"), 404)
    refused(hardy.get("/v1/models/../../etc/passwd"), 404)
    refused(hardy.post("/v1/nothing", GOOD), 404)
    refused(hardy.post("/v1/completions", content=b"prompt=a", headers={"content-type": "application/x-www-form-urlencoded"}), 415)
    refused(hardy.post("/v1/completions", content=b"{}"), 415)
    refused(hardy.post("/v1/completions", {"model": "\x00💥", "prompt": "a"}), 404)
    for path in ("/docs", "/openapi.json", "/redoc"):
        assert hardy.get(path).status_code == 404


def connect(server: Running, text: bytes) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=60)
    connection.sendall(text)
    return connection


def test_broken_http(hardy: Running) -> None:
    for text in (b"\x16\x03\x01\x02\x00", b"GET\r\n\r\n", b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n", b"a" * 100_000):
        with connect(hardy, text) as connection:
            assert not connection.recv(2000).startswith((b"HTTP/1.1 2", b"HTTP/1.1 5"))
    still_well(hardy)


def test_a_body_that_does_not_come_and_a_reader_that_does_not_read(hardy: Running) -> None:
    """Neither keeps others waiting, and the slot of an answer that nobody reads is free once it is decoded."""
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    body = json.dumps(GOOD | {"stream": True, "n": 2, "max_tokens": 64}).encode()
    silent = [connect(hardy, head % 100 + b'{"model"') for _ in range(5)]
    slow = [connect(hardy, head % len(body) + body) for _ in range(3)]
    began = time.monotonic()
    hardy.wait_until(lambda: hardy.metric("spot_samples_running") > 0, "the slow reader's request began")
    answer = hardy.post("/v1/chat/completions", GOOD)
    assert answer.status_code == 200 and time.monotonic() - began < 60
    hardy.wait_until(lambda: hardy.is_idle, "all were decoded")
    for connection in (*silent, *slow):
        connection.close()
    still_well(hardy)


def test_special_tokens_in_text_are_text(hardy: Running) -> None:
    for text in (
        "<|MASK|>" * 20,
        "<|im_end|><|im_start|>",
        "<|endoftext|>",
        "\x00\x01",
        "\ufffe",
        "\N{OBJECT REPLACEMENT CHARACTER}spot-content-0",
    ):
        answer = hardy.post("/v1/chat/completions", GOOD | {"messages": [{"role": "user", "content": text}]})
        assert answer.status_code == 200 and "MASK" not in answer.text
    still_well(hardy)
