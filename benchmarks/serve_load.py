"""Load for `spot serve`: mixed requests at once, with and without speculation; latencies, tokens per second, and whether memory stays.

A server is started for the run. Every eighth request leaves in the middle, some fail by their own fault; at the end all slots must be
free, and the server must not hold more memory than after the first quarter (plus --slack). Exit code 1 if not. The last line is one
JSON document.

Example: `python benchmarks/serve_load.py --requests 2000 --clients 16`.
"""

import argparse
import json
import random
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from spot_dlm.tasks import FAMILY_TASKS, load_prompts


class Server:
    """A `spot serve` in a process of its own."""

    def __init__(self, words: list[str]) -> None:
        code = "from spot_dlm.cli import main; main()"
        command = [sys.executable, "-c", code, "serve", "--port", "0", *words]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.url, self.name = "", ""
        for line in self._process.stderr or ():
            if found := re.search(r"serving (\S+) on (http://\S+)/v1", line):
                self.name, self.url = found.groups()
                break
        else:
            raise SystemExit("the server did not start")
        while self._get("/ready").status_code != 200:
            time.sleep(0.2)

    def _get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=600)

    @property
    def memory_mib(self) -> float:
        """Resident memory."""
        found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{self._process.pid}/status").read_text("utf-8"))
        return int(found[1]) / 1024 if found else 0.0

    @property
    def num_busy(self) -> float:
        """Samples that run or wait."""
        rows = dict(line.rsplit(" ", 1) for line in self._get("/metrics").text.splitlines() if not line.startswith("#"))
        return float(rows["spot_samples_running"]) + float(rows["spot_samples_waiting"])

    def end(self) -> int:
        """Stop it; return its exit code."""
        self._process.send_signal(signal.SIGTERM)
        self._process.communicate()
        return self._process.returncode


def requests(count: int, drafter: str, name: str, max_tokens: int) -> list[dict[str, Any]]:
    """Return bodies that differ in prompt, length, temperature, samples, stop strings and streaming."""
    prompts = [p.prompt for task in FAMILY_TASKS for p in load_prompts(task, limit=60)]
    rng, bodies = random.Random(0), []
    for i in range(count):
        body: dict[str, Any] = {"model": name, "messages": [{"role": "user", "content": rng.choice(prompts)}], "seed": i}
        body |= {"max_tokens": rng.randint(1, max_tokens), "temperature": rng.choice([0, 0.7, 1.0]), "stream": i % 2 == 0}
        body |= {"n": rng.choice([1, 1, 1, 2]), "stop": rng.choice([None, ["\n\n"], '"'])}
        body["spot"] = {"drafter": drafter}
        if i % 50 == 49:
            body["frobnicate"] = 1
        bodies.append(body)
    return bodies


def ask(url: str, body: dict[str, Any], leaves: bool) -> tuple[int, float, float, int]:
    """Send a request; return status (0: left in the middle), seconds to the first text and to the end, and tokens."""
    began, first, tokens = time.monotonic(), 0.0, 0
    body = body | ({"stream_options": {"include_usage": True}} if body["stream"] else {})
    while True:
        with httpx.stream("POST", url + "/v1/chat/completions", json=body, timeout=600) as response:
            if response.status_code == 429:
                response.read()
                time.sleep(0.2)
                continue
            for line in response.iter_lines():
                first = first or time.monotonic() - began
                if leaves:
                    return 0, first, 0.0, 0
                if found := re.search(r'"completion_tokens": ?(\d+)', line):
                    tokens = int(found[1])
            return response.status_code, first, time.monotonic() - began, tokens


def run(server: Server, drafter: str, args: argparse.Namespace) -> dict[str, Any]:
    """Send all requests; return the figures of one way of drafting."""
    bodies = requests(args.requests, drafter, server.name, args.max_tokens)
    quarter = max(1, len(bodies) // 4)
    outcomes: list[tuple[int, float, float, int]] = []
    memory = []
    began = time.monotonic()
    with ThreadPoolExecutor(args.clients) as pool:
        for at in range(0, len(bodies), quarter):
            part = range(at, min(at + quarter, len(bodies)))
            outcomes += pool.map(lambda i: ask(server.url, bodies[i], i % 8 == 7), part)
            memory.append(server.memory_mib)
    seconds = time.monotonic() - began
    time.sleep(1.0)
    done = sorted(o[2] for o in outcomes if o[0] == 200)
    statuses = {str(status): sum(o[0] == status for o in outcomes) for status in sorted({o[0] for o in outcomes})}
    return {
        "drafter": drafter,
        "requests": len(outcomes),
        "statuses": statuses,
        "p50_s": round(done[len(done) // 2], 3),
        "p95_s": round(done[int(0.95 * len(done))], 3),
        "tokens_per_s": round(sum(o[3] for o in outcomes) / seconds, 1),
        "memory_mib": [round(m, 1) for m in memory],
        "busy_at_the_end": server.num_busy,
    }


def main() -> int:
    """Run both ways, print a line for each and one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000, help="of each way of drafting")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--slack", type=float, default=64.0, help="MiB that memory may grow by after the first quarter")
    parser.add_argument("--serve", default="", help="more options of spot serve, in one text")
    args = parser.parse_args()
    server = Server(args.serve.split())
    rows = []
    for drafter in ("auto", "root"):
        rows.append(run(server, drafter, args))
        print(" ".join(f"{key}={value}" for key, value in rows[-1].items()), file=sys.stderr)
    code = server.end()
    well = code == 0 and all(
        row["busy_at_the_end"] == 0
        and row["memory_mib"][-1] <= rows[0]["memory_mib"][0] + args.slack
        and set(row["statuses"]) <= {"0", "200", "400"}
        for row in rows
    )
    print(json.dumps({"well": well, "exit_code": code, "rows": rows}))
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
