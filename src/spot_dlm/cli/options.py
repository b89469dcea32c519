"""Option types that the commands share, and the step from options to a target and DecodeParams.

Knows nothing of what the commands do. Example: `target = open_target("shipped", TargetOptions())`.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import torch
import typer

from spot_dlm.batch import MAX_REQUESTS
from spot_dlm.drafter_files import read_config
from spot_dlm.drafters import AUTO, CALIBRATED, DRAFTERS, Calibrated, Order, build_drafter, is_foreign
from spot_dlm.growth import is_compiled
from spot_dlm.hub import find_drafter
from spot_dlm.interfaces import MAX_NODES, DecodeParams, Drafter, Stop, Target, TargetSpec
from spot_dlm.presets import SAMPLERS, parse_sampler
from spot_dlm.rules import ALLOWED, parse_rule
from spot_dlm.targets import SHIPPED, load_target
from spot_dlm.targets.families import FAMILIES
from spot_dlm.tasks import SPLITS
from spot_dlm.transition import Sampling

DEFAULT_DRAFTER = AUTO
DEFAULT_NODES = "auto"
DEFAULT_RULE = "standard"
MAX_NEW_TOKENS = DecodeParams().max_new_tokens

_NAMES = " | ".join(DRAFTERS)
_RULE_HELP = f"Unmask rule: {ALLOWED}."
_NODES_HELP = "Rows of one target pass, the certain next state included; 1 = standard decoding; auto = as many as pay (spot tune)."
_DRAFTER_HELP = (
    f"How future states are guessed: {_NAMES}; auto = the kind of --drafter-file, else order, on any model. Never changes the answer."
)

Model = Annotated[str, typer.Option("--model", help="'shipped', a checkpoint folder or a hub id (owner/name).")]
FamilyName = Annotated[
    str | None,
    typer.Option(
        "--family",
        metavar="NAME",
        help=f"Row of the family table ({' | '.join(row.name for row in FAMILIES)}); default: by config.json and the model's name.",
    ),
]
CacheName = Annotated[
    str,
    typer.Option(
        "--cache",
        metavar="NAME",
        help="For full attention (LLaDA, ...): exact | prefix | dual. The last two are other, approximate decoders, much cheaper a pass.",
    ),
]
DrafterName = Annotated[str, typer.Option("--drafter", help=_DRAFTER_HELP)]
DrafterNames = Annotated[list[str], typer.Option("--drafter", help=f"{_DRAFTER_HELP} Repeatable; 'all' = those for every rule.")]


def located(place: Path | list[Path] | None) -> Any:
    """Return where drafters are, those given as hub ids after fetching them (the callback of options that name drafters)."""
    return [find_drafter(one) for one in place] if isinstance(place, list) else None if place is None else find_drafter(place)


Graph = Annotated[
    Path | None,
    typer.Option(
        "--graph",
        metavar="FILE",
        callback=located,
        help="Graphs of the calibrated drafters: a file (spot calibrate), folder or hub id; default: the shipped model's.",
    ),
]
DrafterFile = Annotated[
    Path | None,
    typer.Option(
        "--drafter-file",
        metavar="DIR|ID",
        callback=located,
        help="Fitted drafter: a folder (spot train) or hub id (owner/name[@revision]); default: the shipped model's.",
    ),
]
Transfer = Annotated[
    bool, typer.Option("--transfer", help="Use a drafter that was fitted on another model, with another tokenizer or for another rule.")
]
Nodes = Annotated[str, typer.Option("--nodes", metavar="N|auto", help=_NODES_HELP)]
NodesList = Annotated[list[str], typer.Option("--nodes", metavar="N|auto", help=f"{_NODES_HELP} Repeatable.")]
Rule = Annotated[str, typer.Option("--rule", help=_RULE_HELP)]
Rules = Annotated[list[str], typer.Option("--rule", help=f"{_RULE_HELP} Repeatable.")]
Sampler = Annotated[
    str | None,
    typer.Option(
        "--sampler",
        metavar="NAME[,ARG=VALUE...]",
        help=f"An official sampler ({' | '.join(SAMPLERS)}) by its own arguments, as in llada,steps=64,block_length=32; instead of --rule, "
        "--block-length and --stop.",
    ),
]
Temperature = Annotated[float, typer.Option("--temperature", help="0 = the most probable token.")]
SamplerTemperature = Annotated[
    float | None, typer.Option("--temperature", help="0 = the most probable token. Default: 0, or what --sampler says.")
]
Temperatures = Annotated[list[float], typer.Option("--temperature", help="0 = the most probable token. Repeatable.")]
TopP = Annotated[float, typer.Option("--top-p", help="Nucleus filter; 1 = off.")]
TopK = Annotated[int, typer.Option("--top-k", help="Keep the k most probable tokens; 0 = off.")]
Seed = Annotated[int, typer.Option("--seed", help="Seed of the noise.")]
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", help="Tokens to return at most.")]
BlockLength = Annotated[int | None, typer.Option("--block-length", help="Tokens of a block; default: the checkpoint's.")]
StopAt = Annotated[str, typer.Option("--stop", help="'block' completes the block of the end token, 'prefix' stops at it.")]
Dtype = Annotated[str | None, typer.Option("--dtype", help="float32 | bfloat16 | float16; default: float32 on a CPU.")]
Device = Annotated[str | None, typer.Option("--device", help="cpu | cuda | ...; default: an accelerator if there is one.")]
Threads = Annotated[int | None, typer.Option("--threads", help="CPU threads; default: 1 for the shipped model, else torch's.")]
Raw = Annotated[bool, typer.Option("--raw", help="Encode the bare prompt, without a chat template (base models).")]
Strict = Annotated[
    int,
    typer.Option("--strict", metavar="ROWS", help="Evaluate every pass at so many rows: --nodes or more (equal kernels on any device)."),
]
Batch = Annotated[
    str, typer.Option("--batch", metavar="N|auto", help=f"Decodes that share a pass; auto = {MAX_REQUESTS}. On a CPU answers stay.")
]
Stats = Annotated[bool, typer.Option("--stats", help="Print passes, acceptance by depth and seconds on stderr.")]
Split = Annotated[str, typer.Option("--split", help=f"Held-out prompts: {' | '.join(SPLITS)}.")]
PromptsFile = Annotated[
    Path | None,
    typer.Option("--prompts", metavar="FILE", help='JSONL: {"prompt": str} or {"prompt_ids": [int]} a line, optionally "id", '
                 '"seed", "temperature", "max_new_tokens".'),
]  # fmt: skip
RayAddress = Annotated[
    str | None,
    typer.Option("--ray", metavar="ADDRESS|local", help="Work on a Ray cluster (docs/ray.md): HOST:PORT of its head, auto, or local."),
]
Actors = Annotated[
    int | None, typer.Option("--actors", metavar="N", help="Ray workers, each with its own copy of the model; default: as many as fit.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else.")]

ALL_DRAFTERS = tuple(name for name in DRAFTERS if name != "root" and name not in CALIBRATED)
"""What 'all' stands for: drafters for every rule; calibrated graphs know the rules of their traces only."""


@dataclass(frozen=True)
class TargetOptions:
    """How a target is loaded; the defaults are the command line's."""

    dtype: str | None = None
    device: str | None = None
    threads: int | None = None
    raw: bool = False
    strict: int = 1
    family: str | None = None
    cache: str = "exact"

    @property
    def arguments(self) -> dict[str, Any]:
        """Return what `load_target` is given besides the model; what is as by default is left out."""
        given = {
            "family": self.family,
            "dtype": self.dtype,
            "device": self.device,
            "use_template": False if self.raw else None,
            "cache": None if self.cache == "exact" else self.cache,
            "padded_rows": None if self.strict == 1 else self.strict,
        }
        return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True)
class DrafterFiles:
    """Files given instead of the shipped ones, and whether a foreign one may be used."""

    graph: Path | None = None
    file: Path | None = None
    transfer: bool = False


def open_target(model: str, options: TargetOptions) -> Target:
    """Load a target and set the number of CPU threads.

    Raises:
        ValueError: for an unknown model, a damaged checkpoint or a bad option.
    """
    if options.strict < 1:
        raise ValueError(f"--strict {options.strict} must be at least 1")
    if options.threads is not None and options.threads < 1:
        raise ValueError(f"--threads {options.threads} must be at least 1")
    if options.device is not None:
        check_device(options.device)
    threads = 1 if options.threads is None and model == SHIPPED else options.threads
    if threads is not None:
        torch.set_num_threads(threads)
    return load_target(model, **options.arguments)


def once(say: Callable[[str], None]) -> Callable[[str], None]:
    """Return `say` for texts that it has not said yet."""
    said: set[str] = set()

    def tell(text: str) -> None:
        if text not in said:
            said.add(text)
            say(text)

    return tell


def open_drafter(
    name: str, spec: TargetSpec, files: DrafterFiles, say: Callable[[str], None], params: Sequence[DecodeParams] = ()
) -> Drafter:
    """Build a drafter for a target, and say so where it was fitted on another; `params` are how it will be decoded.

    Raises:
        ValueError: for an unknown name, a damaged file, or a foreign drafter without --transfer.
    """
    for one in params or (None,):
        drafter = build_drafter(name, graph=files.graph, file=files.file, spec=spec, transfer=files.transfer, params=one)
    if isinstance(drafter, Order | Calibrated) and not is_compiled():
        say("compiling the drafter for this machine, once: about 20 seconds more before the first answer")
    if not (name == AUTO and files.file is None) and is_foreign(drafter, spec):
        say(f"drafter {drafter.name} was fitted on another model and is used all the same (--transfer)")
    return drafter


def is_left_out(name: str, spec: TargetSpec, files: DrafterFiles, say: Callable[[str], None]) -> bool:
    """Whether 'all' does not stand for a drafter because it was fitted on another target; says so."""
    if files.file is not None and name in ("order", "linear") and read_config(files.file)["kind"] != name:
        say(f"{name} is left out: --drafter-file holds a drafter of the other kind")
        return True
    drafter = build_drafter(name, graph=files.graph, file=files.file)
    left_out = is_foreign(drafter, spec) and not files.transfer
    if left_out:
        say(f"{name} is left out: it was fitted on another model (--transfer uses it all the same)")
    return left_out


def check_device(name: str) -> None:
    """Refuse a device that cannot be used.

    Raises:
        ValueError: with the reason.
    """
    try:
        torch.empty(1, device=torch.device(name))
    except Exception as error:  # torch raises RuntimeError, AssertionError and others here
        reason = str(error).strip().split("\n")[0]
        raise ValueError(f"--device {name} cannot be used: {reason}") from error


def parse_nodes(text: str) -> int | Literal["auto"]:
    """Return the node budget that an option gives.

    Raises:
        ValueError: if it is neither 'auto' nor a whole number in its range.
    """
    return parse_count("--nodes", text, MAX_NODES, " (standard decoding)")


def parse_count(option: str, text: str, most: int, of_one: str = "") -> int | Literal["auto"]:
    """Return "auto" or the whole number from 1 to `most` that an option gives; `of_one` says what 1 means.

    Raises:
        ValueError: naming the option and what is allowed.
    """
    if text == "auto":
        return "auto"
    if not text.isascii() or not text.isdigit() or len(text) > 9 or not 1 <= int(text) <= most:
        raise ValueError(f"{option} {text[:40]} must be 'auto' or a whole number from 1{of_one} to {most}")
    return int(text)


def check_strict(strict: int, nodes: str) -> None:
    """Refuse a number of rows that the largest pass exceeds, or that no pass can have; 1 is off.

    Raises:
        ValueError: naming the values.
    """
    if strict > 2 * MAX_NODES:
        raise ValueError(f"--strict {strict} must be at most {2 * MAX_NODES}")
    if strict > 1 and nodes == "auto":
        raise ValueError(f"--strict {strict} needs a --nodes of so many rows or fewer, not auto")
    if nodes != "auto" and 1 < strict < int(nodes):
        raise ValueError(f"--strict {strict} is below --nodes {nodes}: larger passes would not have the same shape")


def decode_params(
    *,
    temperature: float | None = None,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    rule: str = DEFAULT_RULE,
    max_new_tokens: int = MAX_NEW_TOKENS,
    nodes: str = DEFAULT_NODES,
    block_length: int | None = None,
    stop: str = "block",
    sampler: str | None = None,
) -> DecodeParams:
    """Validate the decoding options; without a temperature it is the sampler's own, or 0.

    Raises:
        ValueError: naming the option, the value and what is allowed.
    """
    if stop not in get_args(Stop):
        raise ValueError(f"--stop {stop} is unknown; choose one of {', '.join(get_args(Stop))}")
    if sampler is not None:
        for option, value, default in (("--rule", rule, DEFAULT_RULE), ("--block-length", block_length, None), ("--stop", stop, "block")):
            if value != default:
                raise ValueError(f"--sampler says what {option} {value} would: give one of them")
        if temperature is not None and re.search(r",\s*temperature\s*=", sampler):
            raise ValueError(f"--sampler says what --temperature {temperature:g} would: give one of them")
        given = {"temperature": temperature, "top_p": top_p if top_p != 1 else None, "top_k": top_k or None}
        common = {name: value for name, value in given.items() if value is not None}
        chosen = parse_sampler(sampler, max_new_tokens=max_new_tokens, **common)
        return replace(chosen, sampling=replace(chosen.sampling, seed=seed), nodes=parse_nodes(nodes))
    checked: Stop = stop  # type: ignore[assignment]  # one of them, as just checked
    return DecodeParams(
        rule=parse_rule(rule),
        sampling=Sampling(temperature=temperature or 0.0, top_k=top_k, top_p=top_p, seed=seed),
        max_new_tokens=max_new_tokens,
        nodes=parse_nodes(nodes),
        block_length=block_length,
        stop=checked,
    )
