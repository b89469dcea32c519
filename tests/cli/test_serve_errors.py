"""`spot serve` with bad options: one line on stderr and exit code 2, before a model is loaded."""

import socket
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from cli.conftest import Spot


@pytest.fixture(autouse=True)
def no_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("spot_dlm.cli.options.load_target", load)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--batch", 0), "max_requests=0 must be at least 1"),
        (("--queue", -1), "queue=-1 must be at least 0"),
        (("--timeout", 0), "timeout_s=0.0 must be above 0"),
        (("--max-body", 0), "max_body_bytes=0 must be at least 1"),
        (("--max-cached-tokens", 0), "max_cached_tokens=0 must be at least 1"),
        (("--strict", 4), "--strict 4 needs a --nodes"),
        (("--rule", "x"), "rule='x'"),
        (("--sampler", "x"), "sampler='x' is unknown"),
        (("--port", 65536), "65535"),
        (("--host", "no.such.host.invalid"), "cannot listen on no.such.host.invalid port 8000"),
        (("--host", "192.0.2.1", "--port", 0), "cannot listen on 192.0.2.1 port 0"),
        (("--api-key-file", "/dev/null"), "holds no key"),
        (("--api-key-file", "/no/such/file"), "No such file"),
    ],
)
def test_bad_options(spot: Spot, words: tuple, message: str) -> None:
    found = spot("serve", *words)
    assert found.code == 2 and not found.out and message in found.err and found.err.count("\n") == 1


def test_a_port_that_is_taken(spot: Spot) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = spot("serve", "--port", port)
    assert found.code == 2 and f"cannot listen on 127.0.0.1 port {port}: Address already in use" in found.err


def test_without_the_extra(spot: Spot, monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["spot_dlm.cli.serve"]  # the package has a function of that name
    monkeypatch.setattr(module, "find_spec", lambda name: None if name == "uvicorn" else find_spec(name))
    found = spot("serve")
    assert found.code == 2 and "pip install 'spot-dlm[server]'" in found.err and "uvicorn" in found.err


def test_help(spot: Spot, tmp_path: Path) -> None:
    text = spot("serve", "--help").out
    assert "Examples:" in text and "/v1/chat/completions" in text and "SPOT_API_KEY" in text
