"""Two replicas on a cluster of their own: the answers of one server, one replica killed, counts of both, the end."""

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter

import spot_dlm as spot
from spot_dlm.cli import main
from spot_dlm.distributed.replicas import Board, collected, rendered
from spot_dlm.transition import Sampling

PATIENCE_S = 240
KEY = "a-key"


@dataclass
class Served:
    """The command and its address."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path
    mark: str

    def post(self, document: dict[str, Any], key: str = KEY) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"}
        return httpx.post(f"{self.url}/v1/completions", json={"model": "shipped"} | document, headers=headers, timeout=PATIENCE_S)

    def wait_for(self, holds: Callable[[], Any]) -> Any:
        end = time.monotonic() + PATIENCE_S
        while not (found := holds()):
            assert self.process.poll() is None and time.monotonic() < end, self.log.read_text("utf-8")
            time.sleep(0.1)
        return found

    def replicas(self) -> list[int]:
        """Process ids of the replicas of this test."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and (entry / "cmdline").read_bytes().startswith(b"ray::ServeReplica:spot"):
                    found += [int(entry.name)] if self.mark.encode() in (entry / "environ").read_bytes() else []
            except OSError:
                continue
        return found


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    (folder / "token").write_text(secrets.token_hex(32))  # Ray would write one into the home folder
    (folder / "key").write_text(KEY)
    mark = f"mark-{os.getpid()}-{time.time_ns()}"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = ["serve", "--ray", "local", "--replicas", "2", "--port", str(port), "--drafter", "chain", "--nodes", "4", "--strict", "4"]
    words += ["--batch", "2", "--queue", "1", "--api-key-file", str(folder / "key")]
    log = folder / "log"
    with log.open("wb") as file:
        environment = os.environ | {"RAY_AUTH_TOKEN_PATH": str(folder / "token"), "SPOT_TEST_RUN": mark}
        process = subprocess.Popen([sys.executable, "-m", "spot_dlm", *words], stdout=file, stderr=file, env=environment)
    served = Served(process, f"http://127.0.0.1:{port}", log, mark)
    try:
        served.wait_for(lambda: "/v1" in log.read_text("utf-8"))
        yield served
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def alone(seed: int) -> str:
    target = spot.load_target()
    params = spot.DecodeParams(sampling=Sampling(temperature=1.0, seed=seed), max_new_tokens=24, nodes=4, stop="prefix")
    assert target.codec is not None
    ids = target.codec.encode_bare("Add 47 and 38.")
    return spot.generate(target, ids, spot.build_drafter("chain"), params).text


def test_two_replicas_answer_as_one_and_a_killed_one_is_replaced(served: Served) -> None:
    wanted = {seed: alone(seed) for seed in range(3)}

    def ask(number: int) -> tuple[int, str]:
        seed = number % 3
        answer = served.post({"prompt": "Add 47 and 38.", "max_tokens": 24, "temperature": 1, "seed": seed})
        return answer.status_code, "" if answer.status_code != 200 else answer.json()["choices"][0]["text"] == wanted[seed]

    assert served.post({"prompt": "Add 47 and 38."}, key="another").status_code == 401
    assert served.post({"prompt": "Add 47 and 38.", "nonsense": 1}).status_code == 400
    with ThreadPoolExecutor(2) as two:
        assert set(two.map(ask, range(8))) == {(200, True)}
        stream = served.post({"prompt": "Add 47 and 38.", "max_tokens": 24, "temperature": 1, "seed": 1, "stream": True})
        assert stream.headers["content-type"].startswith("text/event-stream") and stream.text.endswith("data: [DONE]\n\n")
        assert stream.text.count("data: ") > 3
        before = served.replicas()
        assert len(before) == 2
        os.kill(before[0], signal.SIGKILL)
        after = list(two.map(ask, range(12)))
    lost = [a for a in after if a[0] != 200]
    assert len(lost) <= 4 and {a for a in after if a[0] == 200} == {(200, True)}
    served.wait_for(lambda: len(served.replicas()) == 2 and before[0] not in served.replicas())
    with ThreadPoolExecutor(16) as many:
        long = {"prompt": "Continue: class A:", "max_tokens": 200}  # answered at length
        answers = list(many.map(lambda _: served.post(long), range(16)))
    assert {a.status_code for a in answers} == {200, 429}
    assert all(a.json()["error"]["code"] == "queue_full" and a.headers["retry-after"] for a in answers if a.status_code == 429)
    headers = {"authorization": f"Bearer {KEY}"}

    def counted() -> bool:
        lines = httpx.get(f"{served.url}/metrics", headers=headers).text.splitlines()
        return sum(line.startswith("spot_tokens_total{replica=") for line in lines) >= 2

    served.wait_for(counted)
    assert httpx.get(f"{served.url}/ready").json() == {"status": "ready"} and httpx.get(f"{served.url}/health").status_code == 200


def test_the_end_lets_answers_end_and_leaves_nothing(served: Served) -> None:
    body = {"model": "shipped", "prompt": "Continue: class A:", "max_tokens": 400, "stream": True, "spot": {"drafter": "root"}}
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx.stream("POST", f"{served.url}/v1/completions", json=body, headers=headers, timeout=PATIENCE_S) as answer:
        lines = filter(None, answer.iter_lines())
        assert next(lines).startswith("data: ")  # it runs
        served.process.send_signal(signal.SIGTERM)
        *_, last, end = lines
    assert end == "data: [DONE]" and json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"] in ("stop", "length")
    assert served.process.wait(PATIENCE_S) == 0, served.log.read_text("utf-8")
    assert "ended" in served.log.read_text("utf-8") and not served.replicas()


def test_counts_of_replicas_stand_side_by_side() -> None:
    board, said = Board(), {}
    for name, count in (("a", 1), ("b", 2)):
        registry = CollectorRegistry()
        Counter("spot_tokens", "Tokens of answers", registry=registry).inc(count)
        said, draining = board.report(name, collected(registry))
        assert not draining
    lines = rendered(said).decode().splitlines()
    assert lines.count("# TYPE spot_tokens_total counter") == 1
    assert {'spot_tokens_total{replica="a"} 1.0', 'spot_tokens_total{replica="b"} 2.0'} <= set(lines)
    board.drain()
    assert board.report("a", collected(CollectorRegistry()))[1]


def test_bad_options_are_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    for words, told in (
        (["--replicas", "2"], "--replicas 2 needs --ray"),
        (["--ray", "127.0.0.1:1"], "--ray 127.0.0.1:1: no Ray cluster there (Connection refused)"),
        (["--ray", "local", "--replicas", "0"], "--replicas 0 must be at least 1"),
    ):
        with pytest.raises(SystemExit) as stop:
            main(["serve", *words])
        err = capfd.readouterr().err
        assert stop.value.code == 2 and told in err and err.count("\n") == 1
