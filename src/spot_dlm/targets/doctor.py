"""What can be said of a checkpoint without its weights: config.json, the headers of the weights, and the tokenizer files are read.

Knows nothing of the command line; no target is built and no weight is read. Example: `diagnose("JetLM/SDAR-1.7B-Chat").problems` is
empty where `load_target` will load and decode.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from spot_dlm.targets.checkpoints import SHIPPED, attention_problems, key_problems, locate, missing_experts, outline, read_json
from spot_dlm.targets.encoder_weights import check_encoder
from spot_dlm.targets.families import Family, chat_templates, find_family
from spot_dlm.targets.special_ids import CONFIG, GENERATION, TOKENIZER, block_length, end_tokens, mask_token
from spot_dlm.targets.text import TextCodec
from spot_dlm.targets.weights import check_host

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_LARGEST_HEADER = 10**8
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_STORED = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}
_NOTHING_READ = "no safetensors weights there"


class Tensor(NamedTuple):
    """One tensor as the header of a file describes it."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(kw_only=True)
class Headers:
    """All tensors of a checkpoint; not `complete` where a header could not be read, so that nothing is missing for certain."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    files: int = 0
    total_bytes: int | None = None
    complete: bool = True


@dataclass(kw_only=True)
class Diagnosis:
    """What a checkpoint is and what is wrong with it; None where it cannot be said.

    Args:
        model: what was asked for.
        folder: where its files are.
        family: row of the family table.
        recognised: how the row was found.
        host: native transformers class.
        attention: see Family, as are shift and blocks.
        block_length: tokens of a block.
        block_length_from: what says so.
        parameters: numbers in the weights.
        stored: parameters by the number format of the files.
        memory: bytes of the weights by the number format they are loaded in.
        ids: mask, end tokens and padding: "ids", their "texts" and where they are "from".
        tokenizer: its file.
        chat_template: its file, or the family whose template stands in; None: text must be encoded bare.
        vocabulary: number of token ids.
        max_length: most positions.
        missing: tensors that the native class needs and the files lack.
        unexpected: tensors that the native class does not know.
        mismatched: tensors of another shape than config.json asks for.
        problems: one line each; empty: loads and decodes.
    """

    model: str
    folder: str
    family: str | None = None
    recognised: str | None = None
    host: str | None = None
    attention: str | None = None
    shift: str | None = None
    blocks: str | None = None
    block_length: int | None = None
    block_length_from: str | None = None
    parameters: int | None = None
    stored: dict[str, int] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    ids: dict[str, dict[str, Any]] = field(default_factory=dict)
    tokenizer: str | None = None
    chat_template: str | None = None
    vocabulary: int | None = None
    max_length: int | None = None
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON types."""
        return asdict(self)


def diagnose(model: str, family: str | None = None) -> Diagnosis:
    """Say what a checkpoint is and what is wrong with it; of a hub id only the text files and the headers are fetched.

    Args:
        model: "shipped", a folder or a hub id.
        family: a row of the family table; default: what config.json and the name lead to.

    Raises:
        ValueError: if it is no checkpoint or the family is unknown.
    """
    folder = locate(model, weights=False)
    config = read_json(folder / CONFIG, model)
    here = model == SHIPPED or Path(model).expanduser().exists()
    name = model if model == SHIPPED or not here else str(folder.resolve())
    if family is not None:
        find_family(config, name, family)  # a bad name is a bad argument, not a problem of the checkpoint
    told = Diagnosis(model=model, folder=str(folder))
    codec = _read_text(folder, told)
    headers = _read_headers(folder, None if here else model, told)
    _count(headers, config, told)
    row = None
    with _noted(told):
        row = find_family(config, name, family)
    vocabulary = config.get("vocab_size")
    told.vocabulary = vocabulary if isinstance(vocabulary, int) else None
    if row is None:
        return told
    _describe(row, config, model, family, told)
    if told.chat_template is None and codec is not None and codec.fitting(chat_templates(row, name)):
        told.chat_template = f"default of {row.name}"
    _compare(folder, config, row, headers, told)
    _find_ids(folder, config, codec, row, told)
    if codec is not None and told.vocabulary is not None and (highest := max(codec.defined_ids, default=0)) >= told.vocabulary:
        told.problems.append(f"the tokenizer has ids up to {highest}, outside the vocabulary of {told.vocabulary}")
    return told


@contextmanager
def _noted(told: Diagnosis) -> Iterator[None]:
    """Turn a refusal into a problem, without the name of the checkpoint in front."""
    try:
        yield
    except (ValueError, TypeError, OverflowError) as error:
        text = " ".join(str(error).split())
        for prefix in (told.model, told.folder, str(Path(told.folder).resolve())):
            text = text.removeprefix(f"{prefix}: ")
        told.problems.append(text)


def _read_text(folder: Path, told: Diagnosis) -> TextCodec | None:
    """Note tokenizer and chat template."""
    if (folder / "tokenizer.json").exists():
        told.tokenizer = "tokenizer.json"
    elif (folder / "vocab.json").exists() and (folder / "merges.txt").exists():
        told.tokenizer = "vocab.json, merges.txt"
    else:
        told.problems.append("no tokenizer (tokenizer.json, or vocab.json and merges.txt): only token ids can be decoded, no text")
    if (folder / "chat_template.jinja").exists():
        told.chat_template = "chat_template.jinja"
    elif _optional(folder / "tokenizer_config.json").get("chat_template"):
        told.chat_template = "tokenizer_config.json"
    codec = None
    with _noted(told):
        codec = TextCodec.read(folder)
    return codec


def _optional(path: Path) -> dict[str, Any]:
    """Return a file's object, empty where there is none; who needs the file says what is wrong with it."""
    try:
        return read_json(path, path.parent.name) if path.exists() else {}
    except ValueError:
        return {}


def _read_headers(folder: Path, hub_id: str | None, told: Diagnosis) -> Headers:
    """Return the tensors that the files list; a hub id whose weights are not here is asked for its headers."""
    headers, names = Headers(), [_SINGLE]
    if not (folder / _SINGLE).exists():
        if (folder / _INDEX).exists():
            names = _indexed(folder, headers, told)
        elif hub_id is None:
            headers.complete = False
            others = "; *.bin and *.pt files are pickles and never read" if [*folder.glob("*.bin"), *folder.glob("*.pt")] else ""
            told.problems.append(f"{_NOTHING_READ} ({_SINGLE} or {_INDEX}){others}")
            return headers
    if hub_id is not None and not all((folder / name).exists() for name in names):
        _ask_hub(hub_id, headers, told)
        return headers
    headers.files = len(names)
    for name in names:
        try:
            tensors, problem = read_header(folder / name)
        except ValueError as error:
            tensors, problem, headers.complete = {}, str(error), False
        headers.tensors |= tensors
        if problem is not None:
            told.problems.append(problem)
    return headers


def _indexed(folder: Path, headers: Headers, told: Diagnosis) -> list[str]:
    """Return the files that the index names."""
    index: dict[str, Any] = {}
    with _noted(told):
        index = read_json(folder / _INDEX, told.model)
    files, total = index.get("weight_map"), index.get("metadata", {})
    headers.total_bytes = total.get("total_size") if isinstance(total, dict) and isinstance(total.get("total_size"), int) else None
    if not isinstance(files, dict) or not files or not all(isinstance(f, str) and Path(f).name == f for f in files.values()):
        told.problems.append(f"{_INDEX} has no weight_map from tensors to files of this folder")
        headers.complete = False
        return []
    return sorted(set(files.values()))


def _ask_hub(hub_id: str, headers: Headers, told: Diagnosis) -> None:
    """Fetch the headers, a few kilobytes of each file, and nothing else of the weights."""
    import huggingface_hub

    try:
        known = huggingface_hub.get_safetensors_metadata(hub_id).files_metadata
    except Exception as error:  # the network's and the hub's own
        headers.complete = False
        lines = str(error).strip().splitlines() or [type(error).__name__]
        none = type(error).__name__ == "NotASafetensorsRepoError"
        told.problems.append(f"{_NOTHING_READ}: {lines[0]}" if none else f"the headers of the weights cannot be fetched: {lines[0]}")
        return
    headers.files = len(known)
    for file in known.values():
        headers.tensors |= {name: Tensor(str(t.dtype), tuple(t.shape)) for name, t in file.tensors.items()}


def read_header(path: Path) -> tuple[dict[str, Tensor], str | None]:
    """Return the tensors that a safetensors file lists, and what is wrong with the file's length.

    Raises:
        ValueError: if the header itself cannot be read.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8:
                raise ValueError(f"{path.name} is truncated: {size} bytes, its header alone needs {8 + length}")
            if length > _LARGEST_HEADER:
                raise ValueError(f"{path.name} is damaged: a header of {length} bytes")
            header = json.loads(file.read(length))
        parsed = {
            str(name): (Tensor(str(t["dtype"]), tuple(int(n) for n in t["shape"])), int(t["data_offsets"][1]))
            for name, t in header.items()
            if name != "__metadata__"
        }
    except OSError as error:
        raise ValueError(f"{path.name} cannot be read: {error.strerror or error}") from error
    except (AttributeError, KeyError, IndexError, TypeError, RecursionError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path.name} is damaged: its header is not one of safetensors") from error
    needed = 8 + length + max((end for _, end in parsed.values()), default=0)
    problem = None
    if size != needed:
        problem = f"{path.name} is {'truncated' if size < needed else 'damaged'}: {size} bytes, its header asks for {needed}"
    return {name: tensor for name, (tensor, _) in parsed.items()}, problem


def _count(headers: Headers, config: dict[str, Any], told: Diagnosis) -> None:
    """Note parameters and memory: from the shapes, else from the bytes that the index states."""
    for tensor in headers.tensors.values():
        told.stored[tensor.dtype] = told.stored.get(tensor.dtype, 0) + prod(tensor.shape)
    if headers.tensors and headers.complete:
        told.parameters = sum(told.stored.values())
    elif headers.total_bytes is not None:
        told.parameters = headers.total_bytes // _BYTES.get(str(config.get("dtype") or config.get("torch_dtype")), 2)
    if told.parameters is not None:
        told.memory = {name: told.parameters * size for name, size in _BYTES.items()}
    foreign = Counter(t.dtype for t in headers.tensors.values() if t.dtype not in _STORED)
    for dtype, count in foreign.items():
        told.problems.append(f"{count} tensors are stored as {dtype}; only {', '.join(_STORED)} are loaded")


def _describe(row: Family, config: dict[str, Any], model: str, family: str | None, told: Diagnosis) -> None:
    """Note what the family's row says."""
    stated = config.get("architectures")
    architecture = stated[0] if isinstance(stated, list) and stated else "(none)"
    named = f" and a name that has {row.named!r} in it" if row.named else ""
    told.family = row.name
    told.recognised = f"by architecture {architecture}{named}" if family is None else "by --family"
    told.host = row.host_of(config)[1]
    told.attention, told.shift, told.blocks = row.attention, row.shift, row.blocks
    with _noted(told):
        found = block_length(config, row, model)
        told.block_length, told.block_length_from = found
        if found.value < 1:
            raise ValueError(f"block_length={found.value} must be at least 1")


def _compare(folder: Path, config: dict[str, Any], row: Family, headers: Headers, told: Diagnosis) -> None:
    """Note what differs between the tensors in the files and those of the native class, and what the class cannot do."""
    shapes = {name: tensor.shape for name, tensor in headers.tensors.items()}
    experts: list[str] = []
    with _noted(told):
        experts = missing_experts(shapes, config)
    siblings = {_any_expert(name): shape for name, shape in shapes.items()}
    for name in experts:  # transformers joins experts: with one missing it could not say what else is wrong
        sibling = siblings.get(_any_expert(name))
        if sibling is not None:
            shapes[name] = sibling
    with _noted(told):
        host, report = outline(folder, config, row, shapes)
        told.vocabulary, told.max_length = int(host.config.vocab_size), int(host.config.max_position_embeddings)
        told.problems += attention_problems(host, row)
        if headers.complete:
            told.missing = sorted(map(str, report["missing_keys"]))
            told.unexpected = sorted(map(str, report["unexpected_keys"]))
            told.mismatched = sorted(f"{name} {list(has)} instead of {list(needs)}" for name, has, needs in report["mismatched_keys"])
            if experts:
                told.missing = sorted({*told.missing, *experts})
                told.problems.append(f"{len(experts)} missing keys in the weights, first {experts[0]}")
            told.problems += key_problems(host, report)
        (check_encoder if row.encoder else check_host)(host)


def _any_expert(name: str) -> str:
    return re.sub(r"\.experts\.\d+\.", ".experts.*.", name)


def _find_ids(folder: Path, config: dict[str, Any], codec: TextCodec | None, row: Family, told: Diagnosis) -> None:
    """Note the special ids, where each comes from, and those outside the vocabulary."""

    def note(name: str, ids: list[int], source: str, what: str | None) -> None:
        told.ids[name] = {"ids": ids, "texts": [codec.token_text(i) if codec and i >= 0 else "" for i in ids], "from": source}
        for i in ids if what is not None and told.vocabulary is not None else ():
            if not 0 <= i < told.vocabulary:  # type: ignore[operator]  # just checked
                told.problems.append(f"{what} {i} lies outside the vocabulary of {told.vocabulary} ({source})")

    with _noted(told):
        mask = mask_token(config, codec, row, told.model)
        note("mask", [mask.value], mask.source, "mask_token_id")
    with _noted(told):
        ends = end_tokens(folder, config, row)
        note("end", sorted(ends.values), ends.source, "end token")
    with _noted(told):
        known = [(config.get("pad_token_id"), CONFIG), (_optional(folder / GENERATION).get("pad_token_id"), GENERATION)]
        stated = _optional(folder / "tokenizer_config.json").get("pad_token")
        text = stated.get("content") if isinstance(stated, dict) else stated
        known.append((codec.id_of(str(text)) if codec is not None and text else None, f"{TOKENIZER} ({text})"))
        for value, source in known:
            if value is not None:
                note("padding", [int(value)], source, "pad_token_id" if row.hides_padding and source == CONFIG else None)
                break
