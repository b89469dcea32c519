"""The end of answers and of the server: time limits, SIGTERM, ctrl-C; and the key."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from server.conftest import Start
from server.slow import alone, body, slowly


def test_an_answer_that_takes_too_long_is_a_504(start: Start) -> None:
    server = start("--name", "toy", "--drafter", "root", "--batch", 2, "--timeout", 1, prepare=slowly(0.02))
    long = body([5, 6], 300)
    answer = server.post("/v1/completions", long)
    assert answer.status_code == 504 and answer.json()["error"]["code"] == "timeout"
    *chunks, last = [json.loads(line[6:]) for line in server.post("/v1/completions", long | {"stream": True}).text.split("\n\n") if line]
    text = "".join(c["choices"][0]["text"] for c in chunks)
    assert last["error"]["code"] == "timeout" and text and alone([5, 6], 300).startswith(text)
    server.wait_until(lambda: server.is_idle, "the slots are free")
    assert server.end() == 0


def test_sigterm_lets_what_runs_end(start: Start) -> None:
    server = start("--name", "toy", "--drafter", "chain", prepare=slowly(0.02))
    with ThreadPoolExecutor(3) as pool:
        waits = [pool.submit(server.post, "/v1/completions", body([9, i], 40, stream=i == 2, spot={"nodes": 1})) for i in (1, 2)]
        server.wait_until(lambda: server.metric("spot_samples_running") == 2, "they run")
        ending = pool.submit(server.end)
        server.wait_until(lambda: "ending: 2 answers" in server.log.read_text("utf-8"), "it was told")
        os.kill(server.pid, signal.SIGTERM)  # as from a process manager that tells the whole group
        whole, streamed = (wait.result() for wait in waits)
    assert whole.json()["choices"][0]["text"] == alone([9, 1], 40) and streamed.text.endswith("data: [DONE]\n\n")
    log = server.log.read_text("utf-8")
    assert ending.result() == 0 and "Traceback" not in log and log.count("ending") == 1


def test_what_runs_after_the_grace_is_told_so(start: Start) -> None:
    server = start("--name", "toy", "--drafter", "root", "--grace", 0.5, prepare=slowly(0.05))
    with ThreadPoolExecutor(3) as pool:
        waits = [pool.submit(server.post, "/v1/completions", body([9, i], 900, stream=i == 2)) for i in (1, 2)]
        server.wait_until(lambda: server.metric("spot_samples_running") == 2, "they run")
        began = time.monotonic()
        assert server.end() == 0 and time.monotonic() - began < 20
        whole, streamed = (wait.result() for wait in waits)
    assert whole.status_code == 503 and whole.json()["error"]["code"] == "shutting_down" and int(whole.headers["retry-after"]) > 0
    assert '"code": "shutting_down"' in streamed.text and "[DONE]" not in streamed.text
    assert "2 requests were ended" in server.log.read_text("utf-8")


def test_ctrl_c(start: Start) -> None:
    server = start("--name", "toy", "--drafter", "root", prepare=slowly(0.0))
    assert server.end(signal.SIGINT) == 130 and "Traceback" not in server.log.read_text("utf-8")


def test_a_key(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("s3cret\n")
    server = start("--name", "toy", "--drafter", "root", "--api-key-file", file, prepare=slowly(0.0))
    assert server.client(api_key="s3cret").completions.create(**body([5], 3)).choices[0].text == alone([5], 3)
    for key in ("x", "s3cre", "s3crett", "x" * 10_000, "s3cret\u00e9"):
        for method, path in (("POST", "/v1/completions"), ("POST", "/v1/chat/completions"), ("GET", "/v1/models"), ("GET", "/metrics")):
            headers = {"authorization": f"Bearer {key}".encode("latin-1"), "content-type": "application/json"}
            answer = httpx.request(method, server.url + path, headers=headers, content=b"{}" if method == "POST" else None)
            assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
    assert httpx.post(f"{server.url}/v1/completions", json=body([5])).status_code == 401
    assert server.get("/health").status_code == 200 and server.get("/ready").status_code == 200
    assert server.end() == 0


def test_a_body_that_does_not_come_is_a_408(start: Start) -> None:
    def prepare() -> None:
        import spot_dlm.server.app

        spot_dlm.server.app.BODY_S = 0.3
        slowly(0.0)()

    server = start("--name", "toy", "--drafter", "root", prepare=prepare)
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{")
        assert connection.recv(4000).startswith(b"HTTP/1.1 408 ")
    assert server.end() == 0
