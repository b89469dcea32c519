"""What lossless speculation is worth on an accelerator, in at most eight minutes and without a network: costs, acceptance, speed, identity.

    python benchmarks/accelerator.py --out results/accelerator.json            # one GPU
    python benchmarks/accelerator.py --target FOLDER --drafter-file DIR        # a larger trained target, too
    python benchmarks/accelerator.py --tiny                                    # shrunk shapes on a CPU, under a minute

Sections, each with a limit of time; the last line is one JSON document whose figures all say what kind they are:

    cost       measured, random weights: milliseconds and memory of a pass by rows, prefix and block; share of kernels
    loop       measured, random weights: drafting, walk and host around such a pass (the whole vocabulary, nothing accepted)
    acceptance measured, trained: passes saved by the shipped target's drafters
    predicted  predicted: cost and loop of the large shapes with the acceptance of the shipped target; no run of anything
    speed      measured, trained: wall clock of the shipped target and of --target on this device
    identity   measured, trained: standard against speculative decoding, with and without equal shapes (strict)

Real shapes are built in memory, weight by weight on the device (`random_target`): no checkpoint of 16 GB is written or read.
"""

import argparse
import json
import shlex
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import spot_dlm as spot
from spot_dlm.artifacts import provenance, write_json
from spot_dlm.bench import speed
from spot_dlm.bench.speed_figures import rows
from spot_dlm.bench.speed_plan import Method, Plan
from spot_dlm.compare import first_divergence, refine, standard_trajectory, trajectory
from spot_dlm.interfaces import Drafter, Target, TargetSpec
from spot_dlm.rules import parse_rule
from spot_dlm.state import MASKED
from spot_dlm.stats import Counts
from spot_dlm.targets.block_causal import BlockCausalTarget
from spot_dlm.targets.weights import read_weights
from spot_dlm.tasks import load_prompts
from spot_dlm.tune import cpu_name

RANDOM, TRAINED, PREDICTED = "measured, random weights", "measured, trained", "predicted"
ABSENT = "not in this version"


@dataclass(frozen=True)
class Shape:
    """Sizes of a Qwen3-like host."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int


SDAR_1_7B = Shape("SDAR-1.7B-shaped", 28, 2048, 16, 8, 128, 6144, 151936)
SDAR_8B = Shape("SDAR-8B-shaped", 36, 4096, 32, 8, 128, 12288, 151936)
TINY = Shape("tiny", 2, 64, 4, 2, 16, 128, 320)


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    shapes: tuple[Shape, ...] = (SDAR_1_7B, SDAR_8B)
    prefixes: tuple[int, ...] = (64, 512, 2048)
    block_lengths: tuple[int, ...] = (4, 32)
    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    nodes: tuple[int, ...] = (2, 4, 8, 16, 32)
    tasks: tuple[str, ...] = ("json", "rewrite")
    batches: tuple[int, ...] = (1, 16)
    temperatures: tuple[float, ...] = (0.0, 1.0)
    prompts: int = 3
    passes: int = 15
    tokens: int = 96
    loop_tokens: int = 24


SMALL = Size(
    (TINY,), prefixes=(16, 64), block_lengths=(4, 8), rows=(1, 2, 4), nodes=(2, 4), tasks=("json",), batches=(2,), temperatures=(1.0,),
    prompts=1, passes=2, tokens=12, loop_tokens=6,
)  # fmt: skip
LIMITS_S = {"cost": 140.0, "loop": 60.0, "acceptance": 75.0, "predicted": 5.0, "speed": 90.0, "identity": 60.0}


@dataclass
class Run:
    """What the sections share: sizes, the device, the figures so far and the end of the current section."""

    size: Size
    device: torch.device
    target: str | None = None
    drafter_file: Path | None = None
    figures: list[dict[str, Any]] = field(default_factory=list)
    deadline: float = 0.0

    def add(self, section: str, kind: str, **figure: Any) -> None:
        """Keep a figure."""
        self.figures.append({"section": section, "kind": kind, **figure})

    @property
    def is_over(self) -> bool:
        """Whether the section's time is up."""
        return time.monotonic() > self.deadline

    def of(self, section: str, **wanted: Any) -> list[dict[str, Any]]:
        """Return a section's figures with these values."""
        return [f for f in self.figures if f["section"] == section and all(f.get(k) == v for k, v in wanted.items())]


def random_target(
    shape: Shape, device: torch.device, dtype: torch.dtype, block_length: int, max_length: int = 4096, padded_rows: int = 1
) -> BlockCausalTarget:
    """Return a target of a shape with random weights: the host is made without storage, then every weight is drawn where it will live."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes: dict[str, Any] = {
        "num_hidden_layers": shape.layers, "hidden_size": shape.hidden, "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim, "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocab, "max_position_embeddings": max_length, "tie_word_embeddings": False, "rope_theta": 1e6,
    }  # fmt: skip
    config = Qwen3Config(**sizes)
    with torch.device("meta"):
        host: Any = Qwen3ForCausalLM(config)
    host = host.to(dtype).to_empty(device=device).eval().requires_grad_(False)
    host.model.rotary_emb = type(host.model.rotary_emb)(config).to(device)  # its table is no weight
    generator = torch.Generator(device).manual_seed(0)
    for weight in host.parameters():
        if weight.ndim == 2:
            weight.normal_(0, weight.shape[-1] ** -0.5, generator=generator)
        else:
            weight.uniform_(0.7, 1.3, generator=generator)
    parameters = sum(w.numel() for w in host.parameters())
    ids = shape.vocab - 1, frozenset[int]()
    name = str(dtype).removeprefix("torch.")
    spec = TargetSpec(shape.name, "sdar", block_length, shape.vocab, *ids, max_length, device, name, parameters, crosses=True)
    return BlockCausalTarget(read_weights(host), spec, None, padded_rows)


def timed(passes: int, run: Callable[[], object], device: torch.device) -> float:
    """Return the median milliseconds of a call, two warm-up calls left out."""
    found = []
    for number in range(passes + 2):
        synchronize(device)
        began = time.perf_counter()
        run()
        synchronize(device)
        if number >= 2:
            found.append(1e3 * (time.perf_counter() - began))
    return statistics.median(found)


def synchronize(device: torch.device) -> None:
    """Wait for the device's queue."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def kernel_ms(run: Callable[[], object], device: torch.device, calls: int = 3) -> float | None:
    """Return the milliseconds per call in which kernels run; None on a CPU, where all is host."""
    if device.type != "cuda":
        return None
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as watched:
        for _ in range(calls):
            run()
        synchronize(device)
    return sum(event.self_device_time_total for event in watched.key_averages()) / 1e3 / calls


def canvases(count: int, length: int, vocab: int, seed: int = 0) -> np.ndarray:
    """Return different canvases of which every second position is masked: the middle of a block."""
    found = np.random.default_rng(seed).integers(0, vocab - 1, (count, length))
    found[:, ::2] = MASKED
    return found


def measure_cost(run: Run) -> None:
    """Measure passes of every shape, block, prefix and number of rows."""
    dtype = torch.bfloat16 if run.device.type == "cuda" else torch.float32
    for shape in run.size.shapes:
        target = random_target(shape, run.device, dtype, run.size.block_lengths[0])
        place = {"model": shape.name, "parameters": target.spec.num_parameters, "dtype": target.spec.dtype}
        for length, tokens in ((length, tokens) for tokens in run.size.prefixes for length in run.size.block_lengths):
            ids = np.random.default_rng(1).integers(0, shape.vocab - 1, tokens // length * length)
            prefix = target.prefill(ids, length)
            for count in () if run.is_over else run.size.rows:
                drawn = canvases(count, length, shape.vocab)
                call = lambda: target.evaluate(prefix, drawn)  # noqa: B023, E731
                if run.device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats(run.device)
                ms = timed(run.size.passes, call, run.device)
                busy = kernel_ms(call, run.device) if count in (1, 8, 32) else None
                peak = torch.cuda.max_memory_allocated(run.device) / 2**20 if run.device.type == "cuda" else None  # the weights included
                figures = {"ms": ms, "kernel_ms": busy, "kernel_share": busy and min(1.0, busy / ms), "peak_mib": peak}
                run.add("cost", RANDOM, **place, block_length=length, prefix=prefix.length, rows=count, **figures)
        del target
        if run.device.type == "cuda":
            torch.cuda.empty_cache()
    run.add("cost", ABSENT, model="LLaDA-8B-shaped", reason="full attention needs an adapter that this version does not have")


def counted(
    target: Target, drafter: Drafter, prompts: Sequence[str | list[int]], nodes: int, temperature: float, tokens: int, length: int
) -> Counts:
    """Return the counts of decoding some prompts one by one."""
    params = spot.DecodeParams(parse_rule("bfloat16"), spot.Sampling(temperature=temperature), tokens, nodes, length)
    found = (spot.generate(target, p, drafter, replace(params, sequence=i)).counts for i, p in enumerate(prompts))
    return sum(found, Counts())


def measure_loop(run: Run) -> None:
    """Measure what the loop spends around a pass with a large vocabulary: on the first shape, for its sizes hardly matter here."""
    shape = run.size.shapes[0]
    dtype = torch.bfloat16 if run.device.type == "cuda" else torch.float32
    for length in run.size.block_lengths:
        target = random_target(shape, run.device, dtype, length)
        prompt = np.random.default_rng(2).integers(0, shape.vocab - 1, 64).tolist()
        runs = [("root", 1), *((name, n) for name in ("chain", "order") for n in sorted({run.size.nodes[1], run.size.nodes[-1]}))]
        for temperature in run.size.temperatures:
            for name, nodes in runs:
                if run.is_over:
                    return
                drafter = spot.build_drafter(name)
                for tokens in (4, run.size.loop_tokens):  # the first decode is the warm-up
                    counts = counted(target, drafter, [prompt], nodes, temperature, tokens, length)
                host = counts.total_s - counts.target_s - counts.draft_s - counts.verify_s
                figures = {"draft_ms": 1e3 * counts.draft_s / counts.nfe, "host_ms": 1e3 * host / counts.nfe}
                figures["walk_ms_per_step"] = 1e3 * counts.verify_s / counts.transitions
                place = {"model": shape.name, "block_length": length, "temperature": temperature, "drafter": name, "nodes": nodes}
                run.add("loop", RANDOM, **place, **figures)


def measure_acceptance(run: Run) -> None:
    """Count the passes that the shipped target's drafters save: passes do not depend on the device."""
    target = spot.load_target()
    prompts = [p.prompt for task in run.size.tasks for p in load_prompts(task, limit=run.size.prompts)]
    for length in run.size.block_lengths:
        for temperature in run.size.temperatures:
            standard = counted(target, spot.Root(), prompts, 1, temperature, run.size.tokens, length)
            for name, drafter in drafters_for(run, target).items():
                for nodes in run.size.nodes:
                    if run.is_over:
                        return
                    counts = counted(target, drafter, prompts, nodes, temperature, run.size.tokens, length)
                    place = {"model": "shipped", "block_length": length, "temperature": temperature, "drafter": name, "nodes": nodes}
                    figures = {
                        "nfe_reduction": standard.nfe / counts.nfe,
                        "nfe_reduction_official": standard.nfe_official / (counts.nfe + counts.nfe_commit),
                        "rows_per_pass": counts.rows / counts.nfe,
                        "steps_per_pass": counts.acceptance_length,
                    }
                    run.add("acceptance", TRAINED, **place, rule="bfloat16", prompts=len(prompts), **figures)


def predict(run: Run) -> None:
    """Combine: passes saved x (milliseconds of a standard pass / of a speculative one), the loop around each included."""
    for found in run.of("acceptance"):
        place = {k: found[k] for k in ("block_length", "temperature")}
        base = _loop(run, "root", 1, 1.0, **place)
        around = _loop(run, found["drafter"], found["nodes"], found["steps_per_pass"], **place)
        for shape in run.size.shapes:
            for tokens in sorted({f["prefix"] for f in run.of("cost", model=shape.name, block_length=place["block_length"])}):
                curve = run.of("cost", model=shape.name, block_length=place["block_length"], prefix=tokens)
                known = [f["rows"] for f in curve], [f["ms"] for f in curve]
                if base is None or around is None or known[0][0] != 1 or known[0][-1] < found["rows_per_pass"]:
                    continue
                standard, ours = float(known[1][0]) + base, float(np.interp(found["rows_per_pass"], *known)) + around
                figures = {"speedup": found["nfe_reduction"] * standard / ours, "standard_ms_per_pass": standard, "ms_per_pass": ours}
                named = {"drafter": found["drafter"], "nodes": found["nodes"], "acceptance_of": "shipped"}
                run.add("predicted", PREDICTED, model=shape.name, prefix=tokens, **place, **named, **figures)


def _loop(run: Run, drafter: str, nodes: int, steps: float, **place: Any) -> float | None:
    """Return the milliseconds around a pass that takes so many steps, linear between the budgets that were measured."""
    found = run.of("loop", drafter=drafter, **place)
    curve = sorted((f["nodes"], f["draft_ms"] + f["host_ms"] + steps * f["walk_ms_per_step"]) for f in found)
    return float(np.interp(nodes, [n for n, _ in curve], [ms for _, ms in curve])) if curve else None


class _OutOfTime(Exception): ...


def trained(run: Run, dtype: str | None = None, padded_rows: int = 1) -> Iterator[Target]:
    """Load the shipped target and the one that was given, on the device."""
    for model in ("shipped", *([run.target] if run.target else [])):
        yield spot.load_target(model, device=str(run.device), dtype=dtype, padded_rows=padded_rows)


def drafters_for(run: Run, target: Target) -> dict[str, Drafter]:
    """Return chain and order; order is the one that was given where the target is, else the shipped one, transferred."""
    file = run.drafter_file if target.spec.name == run.target else None
    return {"chain": spot.build_drafter("chain"), "order": spot.build_drafter("order", file=file, spec=target.spec, transfer=True)}


def measure_speed(run: Run) -> None:
    """Decode held-out prompts with standard decoding, chain and order in turn, by the clock (`spot bench speed`)."""
    size, middle = run.size, run.size.nodes[len(run.size.nodes) // 2]
    chosen = (Method("chain", middle), *(Method("order", n) for n in sorted({middle, size.nodes[-1]})), Method("order", "auto"))
    prefixes = (size.prefixes[0], size.prefixes[-1])
    plan = Plan(size.tasks[:1], chosen, limit=2, rules=("bfloat16",), batches=size.batches, prefixes=prefixes, repeats=2)
    plan = replace(plan, temperatures=size.temperatures, max_new_tokens=size.tokens)
    end, left = run.deadline, 1 + (run.target is not None)
    for target in trained(run):
        run.deadline, left = time.monotonic() + (end - time.monotonic()) / left, left - 1
        samples: list[speed.Sample] = []

        def seen(sample: speed.Sample, share: float, kept: list[speed.Sample] = samples) -> None:
            kept.append(sample)
            if run.is_over:
                raise _OutOfTime

        with suppress(_OutOfTime):
            speed.run(target, plan, drafters_for(run, target), seen)
        rounds = Counter((s.setting, s.unit, s.repeat) for s in samples)
        whole = [s for s in samples if rounds[s.setting, s.unit, s.repeat] == len(chosen) + 1]
        for row in rows(whole):  # of whole rounds, so that every run has its standard one
            run.add("speed", TRAINED, model=target.spec.name, parameters=target.spec.num_parameters, dtype=target.spec.dtype, **row)


def check_identity(run: Run) -> None:
    """Compare standard and speculative decoding in tokens and order, with rows as they come and at one fixed shape (strict)."""
    nodes = run.size.nodes[len(run.size.nodes) // 2]
    prompts = [p.prompt for task in run.size.tasks for p in load_prompts(task, limit=run.size.prompts)]
    dtypes = ("float32", "bfloat16") if run.device.type == "cuda" else ("float32",)
    for dtype, strict in ((dtype, strict) for dtype in dtypes for strict in (1, nodes)):
        for target in trained(run, dtype, strict):
            kinds = Counter[str](identical=0)
            for temperature in run.size.temperatures:
                params = spot.DecodeParams(sampling=spot.Sampling(temperature=temperature), max_new_tokens=run.size.tokens, nodes=nodes)
                for prompt in prompts:
                    standard = standard_trajectory(target, prompt, params)
                    for drafter in drafters_for(run, target).values():
                        if run.is_over:
                            break
                        found = first_divergence(standard, trajectory(target, prompt, drafter, params), params.rule)
                        kinds["identical" if found is None else refine(found, target, prompt, params).kind] += 1
            place = {"model": target.spec.name, "dtype": dtype, "strict": strict > 1, "nodes": nodes}
            run.add("identity", TRAINED, **place, cases=kinds.total(), **kinds)


SECTIONS: dict[str, Callable[[Run], None]] = {
    "cost": measure_cost, "loop": measure_loop, "acceptance": measure_acceptance, "predicted": predict, "speed": measure_speed,
    "identity": check_identity,
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the sections and print one JSON document last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="shrunk shapes and few prompts")
    parser.add_argument("--device", help="default: cuda where there is one")
    parser.add_argument("--target", help="folder of a larger trained target")
    parser.add_argument("--drafter-file", type=Path, help="its order model; default: the shipped one, transferred")
    parser.add_argument("--skip", action="append", default=[], choices=tuple(SECTIONS))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(arguments)
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    torch.set_num_threads(1)  # what is left to the CPU is small
    run = Run(SMALL if args.tiny else Size(), device, args.target, args.drafter_file)
    for name in ("chain", "order"):  # compiled here, in nobody's time
        counted(spot.load_target(), spot.build_drafter(name), ["Add 47 and 38."], 8, 1.0, 40, 16)
    status = {}
    for name, section in SECTIONS.items():
        if name in args.skip:
            status[name] = "skipped"
            continue
        began = time.monotonic()
        run.deadline = began + (3600.0 if args.tiny else LIMITS_S[name])
        try:
            section(run)
            status[name] = "out of time" if run.is_over else "done"
        except Exception as error:  # the others are still worth having
            status[name] = f"failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        print(f"{name}: {status[name]}, {time.monotonic() - began:.0f} s, {len(run.of(name))} figures", file=sys.stderr, flush=True)
    document = provenance(None, shlex.join(["python", "benchmarks/accelerator.py", *(sys.argv[1:] if arguments is None else arguments)]))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    document |= {"device": name, "tiny": args.tiny, "threads": torch.get_num_threads(), "sections": status, "figures": run.figures}
    if args.out:
        write_json(args.out, document)
    print(json.dumps(document))
    return document


if __name__ == "__main__":
    main()
