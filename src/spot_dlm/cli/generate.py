"""`spot generate`: decode one prompt, or a file of prompts that an interrupted run continues.

Example: `spot generate --prompts prompts.jsonl --out results.jsonl`.
"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from spot_dlm.batch import MAX_REQUESTS, Failed, Request, decode_batch
from spot_dlm.canvas import Canvas
from spot_dlm.cli import options as o
from spot_dlm.cli.jsonl import PromptLine, ResultFile, read_prompts
from spot_dlm.cli.on_ray import SHARD_SIZE, Place, check_ray
from spot_dlm.cli.show import one_line, progress_bar, provenance, say, stats_table, stderr_console
from spot_dlm.drafters import build_drafter
from spot_dlm.interfaces import DecodeParams, Drafter, Target
from spot_dlm.sequence import Event, Finished, Result, check_prompt
from spot_dlm.stats import Counts


@dataclass(frozen=True)
class Job:
    """One prompt, encoded and checked, with its own parameters."""

    line: PromptLine
    prompt_ids: list[int]
    params: DecodeParams


def generate(
    prompt: Annotated[str | None, typer.Argument(help="The prompt; '-' or none: read it from stdin.", show_default=False)] = None,
    prompts: o.PromptsFile = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Append results as JSON lines; a second run continues. With --ray a folder of shards."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Empty the file of --out first.")] = False,
    samples: Annotated[int, typer.Option("-n", "--samples", help="Samples of every prompt.")] = 1,
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
    seed: o.Seed = 0,
    max_new_tokens: o.MaxNewTokens = o.MAX_NEW_TOKENS,
    rule: o.Rule = o.DEFAULT_RULE,
    sampler: o.Sampler = None,
    block_length: o.BlockLength = None,
    stop: o.StopAt = "block",
    dtype: o.Dtype = None,
    device: o.Device = None,
    threads: o.Threads = None,
    raw: o.Raw = False,
    strict: o.Strict = 1,
    batch: o.Batch = "auto",
    stats: o.Stats = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show the canvas filling in, on stderr.")] = False,
    as_json: o.Json = False,
    ray: o.RayAddress = None,
    actors: o.Actors = None,
    shard_size: Annotated[
        int | None, typer.Option("--shard-size", metavar="N", help=f"Prompts of a shard, with --ray; default: {SHARD_SIZE}.")
    ] = None,
) -> None:
    """Decode a prompt and print the answer.

    With --prompts, results are JSON lines on stdout, or in the file of --out, written as they finish. The same command with the
    same --out continues after an interruption: finished prompts are skipped, a half-written last line is removed.

    Up to --batch decodes share each pass; results are written as they finish. All prompts are checked before the first one is decoded;
    one that fails later does not stop the others: it is named on stderr, and the exit code is 2.

    Every sample has noise of its own: its key is the prompt's number in the file (from 0) times 2^32 plus the sample's number.

    \b
    Examples:
      spot generate "To JSON: Anna Berg, 34, lives in Oslo." --stats
      echo "To JSON: Anna Berg, 34, lives in Oslo." | spot generate --watch
      spot generate "Compute 17 + 25." --temperature 1 --seed 3 -n 4
      spot generate --prompts prompts.jsonl --out results.jsonl --nodes 16 --batch 8
      spot generate "Compute 17 + 25." --rule threshold=0.9 --json
      spot generate --prompts big.jsonl --ray local --actors 2 --out results
    """
    params = o.decode_params(
        temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, rule=rule, max_new_tokens=max_new_tokens, nodes=nodes,
        block_length=block_length, stop=stop, sampler=sampler,
    )  # fmt: skip
    if samples < 1:
        raise ValueError(f"-n {samples} must be at least 1")
    if overwrite and out is None:
        raise ValueError("--overwrite needs --out")
    if out is not None and prompts is not None and out.is_file() and out.samefile(prompts):
        raise ValueError(f"--out {out} is the file of --prompts; give another --out")
    together = batch_size(batch)
    check_ray(ray, {"--actors": actors, "--shard-size": shard_size})
    if ray is not None and (prompt is not None or prompts is None or out is None or overwrite or watch):
        raise ValueError("--ray needs --prompts FILE and --out FOLDER, and goes without --overwrite and --watch")
    if watch and together > 1:
        if batch != "auto":
            raise ValueError(f"--watch shows one decode at a time; leave out --batch {batch}")
        together = 1
    o.check_strict(strict, nodes)
    files = o.DrafterFiles(graph, drafter_file, transfer)
    build_drafter(drafter, graph=graph, file=drafter_file)  # a bad name or file shows before the target is loaded
    console = stderr_console()
    lines = _prompt_lines(prompt, prompts, console)
    check_overrides(lines, sampler)
    options = o.TargetOptions(dtype, device, threads, raw, strict, family, cache)
    if ray is not None and out is not None:
        from spot_dlm.cli.generate_ray import Sharded, generate_on_ray

        sharded = Sharded(lines, params, model, options, drafter, files, samples, together, shard_size or SHARD_SIZE)
        generate_on_ray(sharded, out, Place(ray, actors, threads or 1, device), console, stats)
        return
    target = o.open_target(model, options)
    guess = o.open_drafter(drafter, target.spec, files, partial(say, console), [params])
    jobs = [prepare(target, line, params) for line in lines]
    settings = provenance(target, params) | {"drafter": guess.name, "nodes": params.nodes, "raw": raw, "strict": strict}
    with ExitStack() as stack:
        file = None if out is None else stack.enter_context(ResultFile(out, settings, overwrite))
        run = Run(target, guess, file, samples, together, console, watch, quiet=as_json)
        rows = run.all(jobs, as_lines=prompts is not None)
    if stats:
        console.print(stats_table(run.counts))
    if as_json:
        summary: dict[str, Any] = {"settings": settings, "counts": run.counts.to_dict(), "skipped": run.num_skipped}
        print(json.dumps(summary | ({"results": rows} if out is None else {"out": str(out), "done": run.num_done})))
    run.check()


def _prompt_lines(prompt: str | None, prompts: Path | None, console: Console) -> list[PromptLine]:
    """Return the prompts from the argument, the file or stdin."""
    if prompts is not None:
        if prompt is not None:
            raise ValueError("give a prompt or --prompts FILE, not both")
        return read_prompts(prompts, partial(say, console))
    where = "the prompt"
    if prompt is None or prompt == "-":
        if sys.stdin is None or sys.stdin.isatty():
            raise ValueError("no prompt: give one in quotes, a file with --prompts, or text on stdin")
        where = "stdin"
        try:
            prompt = sys.stdin.buffer.read().decode("utf-8").removesuffix("\n")
        except UnicodeDecodeError as error:
            raise ValueError(f"stdin is no UTF-8 text ({error})") from error
    return [PromptLine("prompt", 0, prompt, where, {})]


def batch_size(text: str) -> int:
    """Return how many decodes share a pass, as --batch says it."""
    count = o.parse_count("--batch", text, 10**9 - 1)
    return MAX_REQUESTS if count == "auto" else count


def check_overrides(lines: list[PromptLine], sampler: str | None) -> None:
    """Refuse prompts with a temperature or length of their own under an official sampler, whose rule and schedule follow from both.

    Raises:
        ValueError: naming the prompt.
    """
    for line in lines if sampler is not None else ():
        for name in ("temperature", "max_new_tokens"):
            if name in line.overrides:
                raise ValueError(f"{line.where}: {name} is for --sampler to say, the same for all prompts")


def prepare(target: Target, line: PromptLine, params: DecodeParams) -> Job:
    """Encode one prompt and check it against the target before anything is decoded.

    Raises:
        ValueError: naming the prompt and what is wrong with it.
    """
    try:
        own = dict(line.overrides)
        length = own.pop("max_new_tokens", params.max_new_tokens)
        params = replace(params, sampling=replace(params.sampling, **own), max_new_tokens=length)
        if isinstance(line.prompt, str):
            line.prompt.encode("utf-8")
        ids = target.encode(line.prompt) if isinstance(line.prompt, str) else line.prompt
        check_prompt(target.spec, ids, params)
    except UnicodeEncodeError as error:
        raise ValueError(f"{line.where}: no valid UTF-8 text") from error
    except ValueError as error:
        raise ValueError(f"{line.where}: {error}") from error
    return Job(line, ids, params)


def result_row(job: Job, sample: int, params: DecodeParams, result: Result) -> dict[str, Any]:
    """Return what a result line says of one decode, besides its settings."""
    key = "prompt" if isinstance(job.line.prompt, str) else "prompt_ids"
    row: dict[str, Any] = {"id": job.line.id, "sample": sample, "sequence": params.sequence, key: job.line.prompt, "text": result.text}
    row |= {"token_ids": result.token_ids, "commit_steps": result.commit_steps, "finish_reason": result.finish_reason}
    row |= {"num_prompt_tokens": len(job.prompt_ids), "counts": result.counts.to_dict()}
    return row | ({"overrides": job.line.overrides} if job.line.overrides else {})


Observer = Callable[[Event], dict[str, Any]]
"""Sees every event of one decode; what it returns at the last one is added to the row of the result."""


class Run:
    """Decodes jobs, some at a time, and hands every result on as soon as it is there.

    `observe` gives the observer of a decode.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        file: ResultFile | None,
        samples: int,
        batch: int,
        console: Console,
        watch: bool,
        quiet: bool,
        observe: Callable[[Job, DecodeParams], Observer] | None = None,
    ) -> None:
        self._target, self._drafter, self._file, self._samples, self._batch = target, drafter, file, samples, batch
        self.failed: list[str] = []
        self.cause: Exception | None = None
        self._console, self._watch, self._quiet, self._observe = console, watch, quiet, observe
        self.counts = Counts()
        self.num_done = self.num_skipped = self._num_printed = 0
        self._texts: dict[int, str] = {}

    def all(self, jobs: list[Job], as_lines: bool) -> list[dict[str, Any]]:
        """Decode what is not finished yet; return the rows where no file keeps them."""
        todo = list(self._todo(jobs))
        total = len(todo) + self.num_skipped
        if self.num_skipped:
            self._say(f"{self.num_skipped} of {total} decodes are finished already")
        rows: list[dict[str, Any]] = []
        prints = self._file is None and not self._quiet
        on_screen = prints and sys.stdout is not None and sys.stdout.isatty()
        shown = self._console.is_terminal and not self._watch and not on_screen and total > 1
        try:
            with progress_bar(self._console, "decoding", total, self.num_skipped, shown) as advance:
                for row in self._rows(todo):
                    if self._file is not None:
                        self._file.append(row)
                    elif self._quiet:
                        rows.append(row)
                    elif as_lines:
                        print(json.dumps(row, ensure_ascii=False), flush=True)
                    else:
                        self._texts[row["sample"]] = row["text"]
                        self._print_texts()
                    self.num_done += 1
                    advance(row["counts"]["tokens"])
        except KeyboardInterrupt:
            raise KeyboardInterrupt(self._farewell(total)) from None
        finally:
            self._print_texts(all_of_them=True)
        return sorted(rows, key=lambda row: row["sequence"])

    def check(self) -> None:
        """Raise ValueError if any decode failed."""
        if self.failed:
            total = len(self.failed) + self.num_done
            message = self.failed[0] if total == 1 else f"{len(self.failed)} of {total} decodes failed: {self.failed[0]}"
            raise ValueError(message) from self.cause

    def _todo(self, jobs: list[Job]) -> Iterator[tuple[Job, int]]:
        for job in jobs:
            for sample in range(self._samples):
                if self._file is not None and self._file.is_finished(job.line, sample):
                    self.num_skipped += 1
                else:
                    yield job, sample

    def _rows(self, todo: list[tuple[Job, int]]) -> Iterator[dict[str, Any]]:
        """Decode and yield the row of each result as it ends; what fails is said and remembered."""
        canvas: Canvas | None = None
        observers: dict[int, Observer] = {}
        numbered = [replace(job.params, sequence=job.line.sequence(sample)) for job, sample in todo]
        requests = (Request(i, job.prompt_ids, params) for i, ((job, _), params) in enumerate(zip(todo, numbered, strict=True)))
        with ExitStack() as stack:
            for number, event in decode_batch(self._target, requests, self._drafter, max_requests=self._batch, say=self._say):
                job, sample = todo[number]
                if self._watch and canvas is None:
                    title = f"{job.line.id} · sample {sample}" if len(todo) > 1 else ""
                    canvas = stack.enter_context(Canvas(self._target, self._console, title))
                if isinstance(event, Failed):
                    self.failed.append(f"{job.line.where}: {one_line(event.error)}")
                    self.cause = self.cause or event.error
                    if len(todo) > 1:
                        self._say(self.failed[-1])
                elif canvas is not None:
                    canvas.show(event)
                more: dict[str, Any] = {}
                if self._observe is not None and not isinstance(event, Failed):
                    if number not in observers:
                        observers[number] = self._observe(job, numbered[number])
                    more = observers[number](event)
                if isinstance(event, Finished | Failed):
                    stack.close()
                    canvas = None
                    observers.pop(number, None)
                if isinstance(event, Finished):
                    self.counts = self.counts + event.result.counts
                    yield result_row(job, sample, numbered[number], event.result) | more

    def _say(self, text: str) -> None:
        say(self._console, text)

    def _print_texts(self, all_of_them: bool = False) -> None:
        """Print the samples of one prompt in order, each once those before it are there, at the end whatever is left."""
        while self._texts and (all_of_them or self._num_printed in self._texts):
            sample = min(self._texts)
            print(("\n" if self._num_printed else "") + self._texts.pop(sample), flush=True)
            self._num_printed = sample + 1

    def _farewell(self, total: int) -> str:
        done = self.num_done + self.num_skipped
        if self._file is None:
            return f"interrupted: {done} of {total} decodes done; --out FILE would let the same command continue"
        return f"interrupted: {done} of {total} decodes done and kept; run the same command again to continue"
