"""`spot serve`: an OpenAI-compatible HTTP server.

Example: `spot serve --port 8000`.
"""

import os
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from spot_dlm.batch import MAX_CACHED_TOKENS, MAX_REQUESTS
from spot_dlm.budget import MOST_NODES
from spot_dlm.cli import options as o
from spot_dlm.cli.on_ray import Place, absolute, check_ray, here
from spot_dlm.cli.show import say, stderr_console
from spot_dlm.drafters import build_drafter
from spot_dlm.interfaces import Drafter, Target

API_KEY = "SPOT_API_KEY"


def serve(
    model: o.Model = "shipped",
    family: o.FamilyName = None,
    cache: o.CacheName = "exact",
    drafter: o.DrafterName = o.DEFAULT_DRAFTER,
    nodes: o.Nodes = o.DEFAULT_NODES,
    graph: o.Graph = None,
    drafter_file: o.DrafterFile = None,
    transfer: o.Transfer = False,
    temperature: o.SamplerTemperature = None,
    top_p: o.TopP = 1.0,
    top_k: o.TopK = 0,
    max_new_tokens: o.MaxNewTokens = o.MAX_NEW_TOKENS,
    rule: o.Rule = o.DEFAULT_RULE,
    sampler: o.Sampler = None,
    block_length: o.BlockLength = None,
    dtype: o.Dtype = None,
    device: o.Device = None,
    threads: o.Threads = None,
    raw: o.Raw = False,
    strict: o.Strict = 1,
    host: Annotated[str, typer.Option("--host", help="Address to listen on; the default is for this machine alone.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0 = a free one.")] = 8000,
    name: Annotated[str | None, typer.Option("--name", help="Model name for clients; default: --model, of a folder its name.")] = None,
    batch: Annotated[int, typer.Option("--batch", metavar="N", help="Answers that share a pass at most.")] = MAX_REQUESTS,
    queue: Annotated[int, typer.Option("--queue", metavar="N", help="Answers that wait at most; beyond them: 429.")] = 64,
    max_cached_tokens: Annotated[
        int, typer.Option("--max-cached-tokens", metavar="N", help="Tokens in the caches of all that share a pass.")
    ] = MAX_CACHED_TOKENS,
    max_body: Annotated[int, typer.Option("--max-body", metavar="BYTES", help="Bytes of a request at most; beyond: 413.")] = 2**20,
    timeout: Annotated[float, typer.Option("--timeout", metavar="S", help="Seconds to a whole answer; beyond: 504.")] = 600.0,
    grace: Annotated[float, typer.Option("--grace", metavar="S", help="Seconds that answers have to end after SIGTERM.")] = 30.0,
    api_key_file: Annotated[
        Path | None, typer.Option("--api-key-file", metavar="FILE", help=f"Key that clients must show; or the variable {API_KEY}.")
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            "--ray", metavar="ADDRESS|local", help="Replicas on a Ray cluster (docs/ray.md): HOST:PORT of its head, auto, or local."
        ),
    ] = None,
    replicas: Annotated[
        int | None, typer.Option("--replicas", metavar="N", help="With --ray: servers behind the address; default: 1.")
    ] = None,
) -> None:
    """Serve a model over HTTP, in OpenAI's shape: /v1/chat/completions, /v1/completions, /v1/models, /health, /ready, /metrics.

    Options of decoding are the defaults of requests that do not say them (docs/serving.md). Requests share passes; the tokens of each
    are those it gets alone. SIGTERM ends in order: exit code 0.

    \b
    Examples:
      spot serve
      spot serve --model JetLM/SDAR-1.7B-Chat --port 8080 --batch 8
      SPOT_API_KEY=secret spot serve --host 0.0.0.0
      spot serve --ray local --replicas 2
    """
    for module in ("fastapi", "uvicorn", "prometheus_client"):
        if find_spec(module) is None:
            raise ValueError(f"spot serve needs the package {module}: pip install 'spot-dlm[server]'")
    check_ray(ray, {"--replicas": replicas})
    from spot_dlm.server.run import address, listen
    from spot_dlm.server.run import serve as run
    from spot_dlm.server.settings import Defaults, Settings

    chosen = o.decode_params(
        temperature=temperature, top_p=top_p, top_k=top_k, rule=rule, max_new_tokens=max_new_tokens, nodes=nodes, block_length=block_length,
        sampler=sampler,
    )  # fmt: skip
    o.check_strict(strict, nodes)
    build_drafter(drafter, graph=graph, file=drafter_file)  # a bad name or file shows before the target is loaded
    console = stderr_console()

    remark = partial(say, console)
    settings = Settings(
        name=name or (Path(model).resolve().name if Path(model).exists() else model),
        max_requests=batch, queue=queue, max_cached_tokens=max_cached_tokens, max_body_bytes=max_body, timeout_s=timeout, grace_s=grace,
        max_nodes=strict if strict > 1 else MOST_NODES if chosen.nodes == "auto" else max(MOST_NODES, chosen.nodes),
        needs_fixed_nodes=strict > 1,
        api_key=_api_key(api_key_file),
        defaults=Defaults(max_new_tokens, temperature, top_p, top_k, chosen.nodes, rule, sampler, chosen.block_length),
    )  # fmt: skip
    options, files = o.TargetOptions(dtype, device, threads, raw, strict, family, cache), o.DrafterFiles(graph, drafter_file, transfer)
    with listen(host, port) as listener:
        if not settings.api_key and host not in ("127.0.0.1", "::1", "localhost"):
            remark(f"anybody who reaches {host} may use this server: set {API_KEY} or --api-key-file")
        if ray is not None:
            port = listener.getsockname()[1]
            listener.close()  # a Ray process will have the port
            with Place(ray, replicas or 1, threads or 1, device).workers(console, replicas or 1) as (count, cpus, gpus):
                from spot_dlm.distributed.replicas import Replicas, serve_on_ray

                arguments = (here(model), replace(options, threads=cpus), drafter, absolute(files))
                serve_on_ray(_open, arguments, settings, Replicas(count, cpus, gpus), host, port, remark)
            return
        target = o.open_target(model, options)
        guess = o.open_drafter(drafter, target.spec, files, remark)
        remark(f"serving {settings.name} on {address(listener)}/v1")
        run(target, guess, settings, listener, remark)


def _open(model: str, options: o.TargetOptions, drafter: str, files: o.DrafterFiles) -> tuple[Target, Drafter]:
    """Return what a replica serves."""
    target = o.open_target(model, options)
    return target, o.open_drafter(drafter, target.spec, files, lambda _: None)


def _api_key(file: Path | None) -> str:
    """Return the key of the file, else of the environment; empty: none.

    Raises:
        ValueError: if the file holds no key.
    """
    if file is None:
        return os.environ.get(API_KEY, "").strip()
    key = file.read_text("utf-8").strip()
    if not key:
        raise ValueError(f"--api-key-file {file} holds no key")
    return key
