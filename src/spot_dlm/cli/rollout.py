"""`spot rollout`: samples of every prompt with steps, log-probabilities and grades, for reinforcement learning.

Example: `spot rollout --prompts prompts.jsonl --samples 8 --temperature 1 --out rollouts.jsonl`.
"""

import json
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from spot_dlm.cli import options as o
from spot_dlm.cli.generate import Job, Observer, Run, batch_size, check_overrides, prepare
from spot_dlm.cli.jsonl import PromptLine, ResultFile, read_prompts
from spot_dlm.cli.prompts import task_lines
from spot_dlm.cli.show import provenance, say, stats_table, stderr_console
from spot_dlm.drafters import build_drafter
from spot_dlm.interfaces import DecodeParams
from spot_dlm.rollout import FILE_NAME, FORMAT, LOGPROBS, RAW_LOGPROBS, Recording
from spot_dlm.sequence import Event
from spot_dlm.tasks import TASKS, grade


def rollout(
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE|DIR", help=f"Append to this file, or to {FILE_NAME} in a folder; a second run continues.")
    ],
    prompts: Annotated[
        Path | None,
        typer.Option("--prompts", metavar="FILE", help="JSONL as for spot generate, with answer or check where answers are to be graded."),
    ] = None,
    task: Annotated[
        list[str] | None, typer.Option("--task", help=f"Packaged prompts instead of a file: {' | '.join(TASKS)}. Repeatable.")
    ] = None,
    split: o.Split = "heldout_values",
    limit: Annotated[int | None, typer.Option("--limit", help="First so many prompts of the file or of each task.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Empty the file of --out first.")] = False,
    samples: Annotated[int, typer.Option("-n", "--samples", help="Samples of every prompt.")] = 8,
    raw_logprobs: Annotated[
        bool, typer.Option("--raw-logprobs", help="Write log-probabilities without temperature and filters, too.")
    ] = False,
    model: o.Model = "shipped",
    family: o.FamilyName = None,
    cache: o.CacheName = "exact",
    drafter: o.DrafterName = o.DEFAULT_DRAFTER,
    nodes: o.Nodes = o.DEFAULT_NODES,
    graph: o.Graph = None,
    drafter_file: o.DrafterFile = None,
    transfer: o.Transfer = False,
    temperature: Annotated[
        float | None, typer.Option("--temperature", help="0 = the most probable token. Default: 1, or what --sampler says.")
    ] = None,
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
    as_json: o.Json = False,
) -> None:
    """Sample every prompt and write exact trajectories: tokens, the step of every commit and its log-probability, grades.

    A line holds one sample: text, token_ids, commit_steps and logprobs (one for each token), and in `commits` the whole trajectory in its
    order, tokens after the end token included. Log-probabilities are those of the logits on which standard decoding commits the token,
    under the temperature, top-k and top-p of the sampling; at temperature 0 under the logits as they are. Speculation changes none of
    it. `grade` says whether the answer is right, where the prompt has an answer or a check.

    The same command with the same --out continues after an interruption. spot_dlm.rollout.read_rollouts reads the file as padded tensors.

    \b
    Examples:
      spot rollout --prompts prompts.jsonl --samples 8 --temperature 1 --out rollouts.jsonl
      spot rollout --task arithmetic --limit 16 --rule confidence=max_probability --out rollouts
      spot rollout --prompts prompts.jsonl --top-p 0.9 --raw-logprobs --out rollouts.jsonl
    """
    if temperature is None and sampler is None:
        temperature = 1.0
    params = o.decode_params(
        temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, rule=rule, max_new_tokens=max_new_tokens, nodes=nodes,
        block_length=block_length, stop=stop, sampler=sampler,
    )  # fmt: skip
    for option, value in (("--samples", samples), ("--limit", limit)):
        if value is not None and value < 1:
            raise ValueError(f"{option} {value} must be at least 1")
    path = out / FILE_NAME if out.is_dir() else out
    if prompts is not None and path.is_file() and path.samefile(prompts):
        raise ValueError(f"--out {out} is the file of --prompts; give another --out")
    together = batch_size(batch)
    o.check_strict(strict, nodes)
    files = o.DrafterFiles(graph, drafter_file, transfer)
    build_drafter(drafter, graph=graph, file=drafter_file)  # a bad name or file shows before the target is loaded
    console = stderr_console()

    remark = partial(say, console)
    if (prompts is None) == (not task):
        raise ValueError("give --prompts FILE or --task NAME, one of them")
    lines = task_lines(task or [], split, limit) if prompts is None else read_prompts(prompts, remark, graded=True)[:limit]
    check_overrides(lines, sampler)
    target = o.open_target(model, o.TargetOptions(dtype, device, threads, raw, strict, family, cache))
    Recording(target.spec, params, raw_logprobs)  # what cannot be recorded shows before anything is decoded
    guess = o.open_drafter(drafter, target.spec, files, remark, [params])
    jobs = [prepare(target, line, params) for line in lines]
    settings = provenance(target, params) | {
        "drafter": guess.name, "nodes": params.nodes, "raw": raw, "strict": strict, "rollouts": FORMAT, "logprobs": LOGPROBS,
        "raw_logprobs": RAW_LOGPROBS if raw_logprobs else None, "mask_token_id": target.spec.mask_token_id,
    }  # fmt: skip

    def observe(job: Job, own: DecodeParams) -> Observer:
        recording = Recording(target.spec, own, raw_logprobs)

        def see(event: Event) -> dict[str, Any]:
            found = recording.see(event)
            return {} if found is None else found.row() | _graded(job.line, found.result.text)

        return see

    with ResultFile(path, settings, overwrite) as file:
        run = Run(target, guess, file, samples, together, console, watch=False, quiet=True, observe=observe)
        run.all(jobs, as_lines=False)
    if stats:
        console.print(stats_table(run.counts))
    if as_json:
        summary = {"settings": settings, "counts": run.counts.to_dict(), "skipped": run.num_skipped}
        print(json.dumps(summary | {"out": str(path), "done": run.num_done}))
    run.check()


def _graded(line: PromptLine, text: str) -> dict[str, Any]:
    """Return the grade of an answer, nothing for a prompt that says none."""
    return {} if line.task is None else {"grade": grade(line.task, text)}
