"""`spot eval`: right answers of standard and of speculative decoding on the same prompts, with intervals, passes and seconds.

Example: `spot eval --task json --task my-questions.jsonl --limit 50`.
"""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from spot_dlm import artifacts
from spot_dlm.bench import accuracy as bench_accuracy
from spot_dlm.bench.report import check_writable
from spot_dlm.cli import options as o
from spot_dlm.cli.bench_show import table
from spot_dlm.cli.generate import check_overrides, prepare
from spot_dlm.cli.prompts import DEFAULT_LIMIT, graded_lines
from spot_dlm.cli.show import COMMAND, progress_bar, provenance, say, stderr_console
from spot_dlm.drafters import build_drafter
from spot_dlm.tasks import GRADED_TASKS, TASKS


def evaluate(
    task: Annotated[
        list[str] | None,
        typer.Option(
            "--task",
            metavar="NAME|FILE",
            help=f"{' | '.join(TASKS)}, or JSONL with prompt and answer or check. Repeatable; default: {' '.join(GRADED_TASKS)}.",
        ),
    ] = None,
    split: o.Split = "heldout_values",
    limit: Annotated[
        int | None,
        typer.Option("--limit", help=f"First so many prompts of each. Default: {DEFAULT_LIMIT} of the packaged families, else all."),
    ] = None,
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
    batch: Annotated[int, typer.Option("--batch", help="Prompts that share the passes, both ways; 1 = one after the other.")] = 1,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write the JSON document there, too.")] = None,
) -> None:
    """Grade standard and speculative decoding on the same prompts and seeds: equal answers, so equal accuracy, in fewer passes.

    A FILE holds JSON lines with "prompt" and "answer" (the exact text), or "check": {"kind": "exact", "text": ...}, {"kind": "json",
    "value": ...}, {"kind": "number", "value": ...} (after "Answer:") or {"kind": "python", "tests": ["assert f(1) == 2", ...]} (prompt and
    answer are run together, in a process of its own with a time limit).

    The last line of stdout is one JSON document; its rows ("all" = all together) hold task, prompts, for standard and speculative
    decoding graded, right, accuracy, accuracy_low and _high (95 %, Wilson), nfe and seconds, and same_answers, same_order, nfe_reduction,
    speed_up. Seconds mean something on a quiet machine only. Exit code 1 if any answer differs.

    \b
    Examples:
      spot eval --limit 10
      spot eval --task humaneval --model JetLM/SDAR-1.7B-Chat --max-new-tokens 512
      spot eval --task questions.jsonl --temperature 1 --rule bfloat16 --nodes 16 --out eval.json
    """
    params = o.decode_params(
        temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, rule=rule, max_new_tokens=max_new_tokens, nodes=nodes,
        block_length=block_length, stop=stop, sampler=sampler,
    )  # fmt: skip
    for option, value in (("--batch", batch), ("--limit", limit)):
        if value is not None and value < 1:
            raise ValueError(f"{option} {value} must be at least 1")
    o.check_strict(strict, nodes)
    check_writable(out)
    files = o.DrafterFiles(graph, drafter_file, transfer)
    build_drafter(drafter, graph=graph, file=drafter_file)  # a bad name or file shows before the target is loaded
    console = stderr_console()

    remark = partial(say, console)
    named = graded_lines(task or GRADED_TASKS, split, limit, remark)
    check_overrides([line for _, line in named], sampler)
    target = o.open_target(model, o.TargetOptions(dtype, device, threads, raw, strict, family, cache))
    guess = o.open_drafter(drafter, target.spec, files, remark, [params])
    questions = []
    for name, line in named:
        job = prepare(target, line, params)
        own = replace(job.params, sequence=line.sequence(0))
        questions.append(bench_accuracy.Question(name, str(line.id), job.prompt_ids, own, line.task))
    pairs: list[bench_accuracy.Pair] = []

    def seen(pair: bench_accuracy.Pair) -> None:
        pairs.append(pair)
        advance(pair.speculative.counts.tokens)
        if not pair.same_answer:
            remark(f"not identical: {pair.question.source}, {pair.question.id}")

    try:
        with progress_bar(console, "evaluating", len(questions), shown=console.is_terminal) as advance:
            bench_accuracy.run(target, questions, guess, batch, seen, remark)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted after {len(pairs)} of {len(questions)} prompts; nothing was written") from None
    facts = artifacts.provenance(target.spec, COMMAND.get()) | provenance(target, params)
    facts |= {"drafter": guess.name, "nodes": params.nodes, "raw": raw, "strict": strict, "batch": batch, "split": split}
    document: dict[str, Any] = {
        "rows": bench_accuracy.rows(pairs),
        "all_identical": all(p.same_answer for p in pairs),
        "answers": [_answer(p) for p in pairs],
        "provenance": facts,
        "command": COMMAND.get(),
    }
    console.print(table(HEAD, [_line(row) for row in document["rows"]]))
    try:
        if out is not None:
            artifacts.write_json(out, document)
    finally:
        print(json.dumps(document))
    if not document["all_identical"]:
        raise typer.Exit(1)


HEAD = ("task", "plain", "spec.", "95 %", "same", "passes", "", "seconds", "")
"""Right answers plainly and speculatively with the interval of the first, equal answers, passes and seconds and how many times fewer."""


def _answer(pair: bench_accuracy.Pair) -> dict[str, Any]:
    """Return what the document says of one prompt; the speculative text only where it is another."""
    row: dict[str, Any] = {"task": pair.question.source, "id": pair.question.id, "text": pair.standard.text, "right": pair.standard_right}
    row |= {"nfe_standard": pair.standard.counts.nfe, "nfe_speculative": pair.speculative.counts.nfe}
    return row if pair.same_answer else row | {"text_speculative": pair.speculative.text, "right_speculative": pair.speculative_right}


def _line(row: dict[str, Any]) -> list[str]:
    shares = {way: row[f"accuracy_{way}"] for way in ("standard", "speculative")}
    low, high = row["accuracy_low_standard"], row["accuracy_high_standard"]
    return [
        row["task"], *("-" if s is None else f"{s:.1%}" for s in shares.values()), "-" if low is None else f"{low:.0%}-{high:.0%}",
        f"{round(row['same_answers'] * row['prompts'])}/{row['prompts']}",
        f"{row['nfe_standard']}>{row['nfe_speculative']}", f"{row['nfe_reduction']:.2f}x",
        f"{row['seconds_standard']:.1f}>{row['seconds_speculative']:.1f}", f"{row['speed_up']:.2f}x",
    ]  # fmt: skip
