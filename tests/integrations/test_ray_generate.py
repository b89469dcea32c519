"""Sharded runs: one real one on a cluster of two workers, of which one is killed and whose first driver was, and the rest without Ray."""

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from errno import ENOSPC
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from spot_dlm import artifacts
from spot_dlm.cli import generate_ray, main, on_ray
from spot_dlm.distributed.work import _Worker
from spot_dlm.drafter_files import save_graphs
from spot_dlm.drafters.registry import SHIPPED_GRAPH
from spot_dlm.rank_graph import read_graphs

OPTIONS = ["--drafter", "chain", "--nodes", "4", "--max-new-tokens", "20"]
PATIENCE_S = 240


def write_prompts(path: Path, count: int) -> Path:
    rows = [{"id": f"p{i}", "prompt": f"Add {i + 20} and {3 * i + 11}.", "temperature": i % 2} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def answers(*files: Path) -> list[tuple]:
    rows = [json.loads(line) for file in files for line in file.read_text("utf-8").splitlines()]
    return sorted((r["sequence"], r["id"], r["sample"], r["text"], tuple(r["token_ids"]), tuple(r["commit_steps"])) for r in rows)


def run(*words: str | Path | int) -> int:
    with pytest.raises(SystemExit) as stop:
        main([str(w) for w in words])
    return int(stop.value.code or 0)


def alone(prompts: Path, out: Path, *more: str) -> list[tuple]:
    assert run("generate", "--prompts", prompts, "--out", out, *OPTIONS, *more) == 0
    return answers(out)


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Do the pieces in this process, each twice to no effect, as a cluster that lost a worker might; the numbers of what was done."""
    done: list[int] = []

    def here(prepare: Any, arguments: tuple, pieces: dict, *_: Any) -> Iterator[tuple[int, Any]]:
        work = prepare(*arguments)
        for number, piece in reversed(pieces.items()):
            done.append(number)
            yield number, work(piece)

    @contextmanager
    def workers(*_: Any) -> Iterator[tuple[int, int, int]]:
        yield 2, 1, 0

    for module in (generate_ray, on_ray):
        monkeypatch.setattr(module, "run_on_ray", here)
    monkeypatch.setattr(on_ray.Place, "workers", workers)
    return done


def test_shards_hold_what_one_process_writes(tmp_path: Path, no_ray: list[int], capfd: pytest.CaptureFixture[str]) -> None:
    prompts, out = write_prompts(tmp_path / "p.jsonl", 5), tmp_path / "out"
    command = ["generate", "--prompts", prompts, "--ray", "local", "--shard-size", 2, "-n", 2, "--out", out, *OPTIONS]
    wanted = alone(prompts, tmp_path / "one.jsonl", "-n", "2")
    capfd.readouterr()
    assert run(*command) == 0
    told = capfd.readouterr()
    assert json.loads(told.out)["results"] == 10 and "10 of 10 results in 3 shards: each once, none missing" in told.err
    shards = sorted(out.glob("shard-*.jsonl"))
    assert answers(*shards) == wanted and len(shards) == 3 and no_ray == [2, 1, 0]
    manifest = artifacts.read_json(out / "manifest.json", generate_ray.FORMAT)
    assert [s["sha256"] for s in manifest["shards"]] == [artifacts.file_hash(p) for p in shards]
    shards[1].unlink()  # what is missing is done again, and nothing else
    assert run(*command) == 0 and no_ray == [2, 1, 0, 1] and answers(*shards) == wanted
    assert run(*command) == 0 and no_ray == [2, 1, 0, 1]
    for changed, what in (([*command, "--seed", 3], "other seed"), ([*command, "--shard-size", 3], "other shard_size")):
        capfd.readouterr()
        assert run(*changed) == 2 and f"holds another run ({what}" in capfd.readouterr().err
    write_prompts(prompts, 6)
    assert run(*command) == 2 and "other num_prompts, prompts_sha256" in capfd.readouterr().err
    write_prompts(prompts, 5)
    shards[0].write_bytes(shards[0].read_bytes() + shards[0].read_bytes().splitlines(keepends=True)[0])
    assert run(*command) == 2 and "results are missing, or there twice" in capfd.readouterr().err


def test_what_cannot_be_written_or_is_interrupted_is_continued(
    tmp_path: Path, no_ray: list[int], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    prompts, out = write_prompts(tmp_path / "p.jsonl", 3), tmp_path / "out"
    command = ["generate", "--prompts", prompts, "--ray", "local", "--shard-size", 1, "--out", out, *OPTIONS]
    replace = artifacts.replace_file
    for problem, code, words in (
        (OSError(ENOSPC, "No space left on device"), 2, "shard-00001.jsonl: No space left on device (finished shards are kept"),
        (KeyboardInterrupt(), 130, "interrupted: 1 of 3 decodes done and kept; run the same command again to continue"),
    ):

        def fail(path: Path, write: Any, problem: BaseException = problem) -> None:
            if path.name == "shard-00001.jsonl":
                raise problem
            replace(path, write)

        monkeypatch.setattr(artifacts, "replace_file", fail)
        assert run(*command) == code
        assert words in capfd.readouterr().err and not (out / "manifest.json").exists()
    monkeypatch.setattr(artifacts, "replace_file", replace)
    assert run(*command) == 0 and no_ray == [2, 1, 1, 1, 0]
    assert answers(*out.glob("shard-*.jsonl")) == alone(prompts, tmp_path / "one.jsonl")


def test_failed_decodes_stay_aside(
    tmp_path: Path, no_ray: list[int], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    prompts, out = write_prompts(tmp_path / "p.jsonl", 3), tmp_path / "out"
    command = ["generate", "--prompts", prompts, "--ray", "local", "--shard-size", 2, "--out", out, *OPTIONS]
    decode = generate_ray.Run.all

    def broken(self: Any, jobs: list, as_lines: bool) -> list:
        rows = decode(self, jobs, as_lines)
        if len(jobs) == 2:
            self.failed.append("p.jsonl:2: logits are not finite")
        return rows[:1]

    monkeypatch.setattr(generate_ray.Run, "all", broken)
    assert run(*command) == 2
    assert "1 decodes failed, the first p.jsonl:2: logits are not finite" in capfd.readouterr().err
    assert {p.name for p in out.iterdir()} == {"plan.json", "shard-00000.incomplete.jsonl", "shard-00001.jsonl"}
    monkeypatch.setattr(generate_ray.Run, "all", decode)
    assert run(*command) == 0
    assert {p.name for p in out.iterdir()} == {"plan.json", "manifest.json", "shard-00000.jsonl", "shard-00001.jsonl"}


def test_recorded_shards_are_those_of_this_machine(tmp_path: Path, no_ray: list[int]) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", 2)
    rows = [{k: v for k, v in json.loads(line).items() if k != "temperature"} for line in prompts.read_text().splitlines()]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["trace", "--prompts", prompts, "--max-new-tokens", 16]
    assert run(*command, "--out", tmp_path / "here") == 0
    assert run(*command, "--out", tmp_path / "there", "--ray", "local") == 0 and no_ray == [0]
    assert (tmp_path / "here" / "shard-00000.npz").read_bytes() == (tmp_path / "there" / "shard-00000.npz").read_bytes()
    assert json.loads((tmp_path / "here/plan.json").read_text()) == json.loads((tmp_path / "there/plan.json").read_text())


def test_bad_input_is_one_line_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", 2)
    bad = tmp_path / "bad.jsonl"
    bad.write_text(prompts.read_text() + '{"prompt": "half')
    long = tmp_path / "long.jsonl"
    long.write_text(prompts.read_text() + json.dumps({"prompt": "Add 1 and 2.", "max_new_tokens": 10**6}) + "\n")
    out = ("--out", tmp_path / "out")
    for words, told in (
        (("--prompts", bad, "--ray", "local", *out), "bad.jsonl:3: no complete JSON object"),
        (("--prompts", long, "--ray", "local", *out), "long.jsonl:3:"),
        (("--prompts", prompts, "--ray", "127.0.0.1:1", *out), "--ray 127.0.0.1:1: no Ray cluster there (Connection refused)"),
        (("--prompts", prompts, "--ray", "ray://x:1", *out), "--ray ray://x:1 must be 'local', 'auto' or HOST:PORT"),
        (("--prompts", prompts, "--ray", "local"), "--ray needs --prompts FILE and --out FOLDER"),
        (("--prompts", prompts, "--ray", "local", "--actors", 0, *out), "--actors 0 must be at least 1"),
        (("--prompts", prompts, "--shard-size", 4, *out), "--shard-size 4 needs --ray"),
        (("--prompts", prompts, "--ray", "local", "--out", prompts / "x"), "Not a directory"),
    ):
        assert run("generate", *words) == 2
        err = capfd.readouterr().err
        assert told in err and err.count("\n") == 1
    monkeypatch.setattr("spot_dlm.distributed.cluster.find_spec", lambda _: None)
    assert run("generate", "--prompts", prompts, "--ray", "local", *out) == 2
    assert "--ray needs the package ray: pip install 'spot-dlm[ray]'" in capfd.readouterr().err
    assert not (tmp_path / "out").exists()


def test_graphs_identify_a_run_as_a_file_and_as_a_folder(tmp_path: Path) -> None:
    save_graphs(tmp_path / "g", read_graphs(SHIPPED_GRAPH))
    files = generate_ray.o.DrafterFiles
    folder = generate_ray._hashes(files(tmp_path / "g"))
    assert folder == [artifacts.file_hash(tmp_path / "g" / name) for name in ("config.json", "model.safetensors")]
    assert generate_ray._hashes(files(SHIPPED_GRAPH)) == [artifacts.file_hash(SHIPPED_GRAPH)]
    assert generate_ray._hashes(files(None, tmp_path / "g")) == folder and generate_ray._hashes(files()) == []


def test_a_worker_says_what_it_lacks(tmp_path: Path) -> None:
    sharded = generate_ray.Sharded(
        [], generate_ray.DecodeParams(), "shipped", generate_ray.o.TargetOptions(), "chain", generate_ray.o.DrafterFiles(), 1, 1, 1
    )
    batch = {"number": [7], "piece": [b""]}
    for model, expected, told in (
        (str(tmp_path), {}, f"{tmp_path}: no config.json there; give the folder of a checkpoint"),
        ("shipped", {"torch": "0"}, "torch is '"),
    ):
        worker = _Worker(generate_ray._prepare, (generate_ray.replace(sharded, model=model), 1, expected, []))
        row = worker(batch)
        assert row["number"] == [7] and told in row["error"][0] and not row["outcome"][0]
    worker = _Worker(lambda: lambda _: 1 / 0, ())
    assert worker({"number": [1], "piece": [b"\x80\x04N."]})["error"] == ["ZeroDivisionError: division by zero"]


def spot(words: list[Any], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as file:
        return subprocess.Popen([sys.executable, "-m", "spot_dlm", *map(str, words)], stdout=subprocess.DEVNULL, stderr=file)


def wait_for(holds: Any, process: subprocess.Popen[bytes], log: Path) -> Any:
    end = time.monotonic() + PATIENCE_S
    while not (found := holds()):
        assert process.poll() is None and time.monotonic() < end, log.read_text("utf-8")
        time.sleep(0.05)
    return found


def ray_processes(mark: str, name: bytes = b"ray::MapWorker") -> list[int]:
    """Ids of the processes of one cluster whose name begins so, other than this one; each has the mark in its environment."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and int(entry.name) != os.getpid() and (entry / "cmdline").read_bytes().startswith(name):
                found += [int(entry.name)] if mark.encode() in (entry / "environ").read_bytes() else []
        except OSError:
            continue
    return found


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a cluster of two CPUs, in a folder with a path short enough for Ray's sockets; commands started now find its token."""
    with TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as folder:
        Path(folder, "token").write_text(secrets.token_hex(32))  # Ray would write one into the home folder
        for name, value in (("AUTH_TOKEN_PATH", f"{folder}/token"), ("AUTH_MODE", "token"), ("USAGE_STATS_ENABLED", "0")):
            monkeypatch.setenv(f"RAY_{name}", value)
        with socket.create_server(("", 0)) as one, socket.create_server(("", 0)) as another:
            port, client_port = one.getsockname()[1], another.getsockname()[1]
        words = ["--head", "--port", port, "--ray-client-server-port", client_port, "--num-cpus", 2, "--object-store-memory", 80_000_000]
        words += ["--include-dashboard=false", "--temp-dir", f"{folder}/t", "--block"]
        log = Path(folder, "log")
        with log.open("wb") as file:
            ray = [sys.executable, "-m", "ray.scripts.scripts", "start", *map(str, words)]
            head = subprocess.Popen(ray, stdout=file, stderr=file, start_new_session=True)
        try:
            wait_for(lambda: "will now block" in log.read_text("utf-8"), head, log)
            yield f"127.0.0.1:{port}"
        finally:
            for process in ray_processes(folder, b""):  # a clean end of a cluster takes half a minute
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            head.wait(30)


def test_killed_driver_and_killed_worker_lose_nothing(tmp_path: Path, address: str) -> None:
    mark = os.environ["RAY_AUTH_TOKEN_PATH"]  # in the environment of every process of the cluster
    prompts, out, log = write_prompts(tmp_path / "p.jsonl", 16), tmp_path / "out", tmp_path / "log"
    command = ["generate", "--prompts", prompts, "--ray", address, "--shard-size", 2, "--out", out, *OPTIONS]
    first = spot([*command, "--actors", 1], log)
    wait_for(lambda: list(out.glob("shard-*.jsonl")), first, log)
    first.send_signal(signal.SIGKILL)
    first.wait()
    kept = {p.name: p.stat().st_mtime_ns for p in out.glob("shard-*.jsonl")}
    assert 0 < len(kept) < 8 and not (out / "manifest.json").exists()
    second = spot([*command, "--actors", 2], log)
    wait_for(lambda: len(list(out.glob("shard-*.jsonl"))) > len(kept), second, log)
    os.kill(wait_for(lambda: ray_processes(mark), second, log)[0], signal.SIGKILL)
    assert second.wait(PATIENCE_S) == 0, log.read_text("utf-8")
    assert "16 of 16 results in 8 shards: each once, none missing" in log.read_text("utf-8")
    assert all((out / name).stat().st_mtime_ns == at for name, at in kept.items())
    assert answers(*out.glob("shard-*.jsonl")) == alone(prompts, tmp_path / "one.jsonl")
    end = time.monotonic() + 30
    while ray_processes(mark) and time.monotonic() < end:
        time.sleep(0.1)
    assert not ray_processes(mark)
