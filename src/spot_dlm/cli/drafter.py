"""`spot drafter`: show a fitted drafter, save it with a model card, push it to the Hugging Face hub.

Example: `spot drafter save drafter --out published --results results.json && spot drafter push published --repo owner/name --dry-run`.
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from spot_dlm import rank_graph
from spot_dlm.artifacts import replace_file
from spot_dlm.card import card, read_results
from spot_dlm.cli import options as o
from spot_dlm.cli.show import print_facts
from spot_dlm.drafter_files import CALIBRATED, CONFIG, FORMAT, load_fitted, read_config, save_fitted, trained_rules
from spot_dlm.drafters.registry import SHIPPED_MODELS
from spot_dlm.hub import CARD, FILES, push_drafter

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Show, save and publish fitted drafters.")

Source = Annotated[
    Path,
    typer.Argument(
        metavar="DRAFTER", help="Folder, graph file of 'spot calibrate', or hub id (owner/name[@revision]).", callback=o.located
    ),
]


@app.command(short_help="Show what a drafter is and what it belongs to.")
def show(drafter: Source, as_json: o.Json = False) -> None:
    """Show what a drafter is, what it was fitted on and whether its files are whole.

    \b
    Examples:
      spot drafter show drafter
      spot drafter show owner/name@v1 --json
    """
    about = dict(load_fitted(drafter).about)
    facts = _facts(drafter, about)
    if as_json:
        print(json.dumps(facts))
        return
    print_facts({name: _text(value) for name, value in facts.items()})


def _facts(place: Path, about: dict[str, Any]) -> dict[str, Any]:
    target, settings = about.get("target") or {}, about.get("trace_settings") or []
    return {
        "drafter": str(place),
        "kind": about.get("kind", CALIBRATED),
        "format": FORMAT if place.is_dir() else rank_graph.FORMAT,
        "parameters": about.get("num_parameters"),
        "target": {k: target[k] for k in ("name", "family", "architecture", "dtype", "vocab_size") if k in target},
        "hashes": about.get("hashes") or {"target": target.get("fingerprint", "")},
        "rules": trained_rules(about),
        "temperatures": sorted({s["temperature"] for s in settings if "temperature" in s}),
        "block_lengths": sorted({s["block_length"] for s in settings if s.get("block_length")}),
        "made_by": about.get("command", ""),
        "spot_dlm": about.get("spot_dlm", ""),
        "weights_sha256": about.get("weights_sha256", ""),
        "card": (place / CARD).is_file(),
    }


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {v}" for k, v in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none stated"
    return {True: "yes", False: "no", None: "none"}.get(value, str(value)) if not isinstance(value, str) else value


@app.command(short_help="Save a drafter as a folder with a model card.")
def save(
    drafter: Source,
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="A new or empty folder.")],
    results: Annotated[
        list[Path] | None,
        typer.Option(
            "--results",
            metavar="FILE",
            help="Figures for the card, by 'spot verify --json' or 'spot bench passes'. Repeatable.",
        ),
    ] = None,
    measured: Annotated[
        list[str] | None, typer.Option("--measured", metavar="TEXT", help="A line on acceptance for the card, as you state it. Repeatable.")
    ] = None,
    title: Annotated[str, typer.Option("--title", help="First line of the card.")] = "",
) -> None:
    """Save a drafter as config.json, model.safetensors and README.md: what a repository on the hub holds.

    The card's figures come from --results, which must have been measured on the drafter's own target, from --measured word by word,
    and from the drafter's own training; there are no others.

    \b
    Examples:
      spot verify --drafter order --drafter-file drafter --json > results.json
      spot drafter save drafter --out published --results results.json
      spot drafter save graph.json --out published-graph
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"--out {out}: exists and is not an empty folder; give another name")
    fitted = load_fitted(drafter)
    about = dict(fitted.about)
    about.setdefault("kind", CALIBRATED)
    shipped = [str(read_config(folder).get("weights_sha256")) for folder in SHIPPED_MODELS]
    figures = [read_results(path, about, shipped) for path in results or ()]
    with _whole(out) as folder:
        save_fitted(folder, fitted)
        text = card(read_config(folder), figures, measured or (), title)
        replace_file(folder / CARD, lambda partial: partial.write_text(text, "utf-8"))
    print(out)


@contextmanager
def _whole(out: Path) -> Iterator[Path]:
    """Give a folder to fill; its files are moved to `out` once all are written, config.json last. If that fails, nothing stays."""
    made = not out.exists()
    out.mkdir(parents=True, exist_ok=True)
    partial = out / f".{os.getpid()}.partial"
    try:
        partial.mkdir()
        yield partial
        for name in sorted((file.name for file in partial.iterdir()), key=lambda name: name == CONFIG):
            os.replace(partial / name, out / name)
    except BaseException:
        for name in () if (out / CONFIG).exists() else FILES:
            (out / name).unlink(missing_ok=True)
        raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        if made and not any(out.iterdir()):
            out.rmdir()


@app.command(short_help="Push a drafter's folder to the Hugging Face hub.")
def push(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="What 'spot drafter save' wrote.")],
    repo: Annotated[str, typer.Option("--repo", metavar="OWNER/NAME", help="The repository; it is made if needed.")],
    private: Annotated[bool, typer.Option("--private", help="Make it private.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be sent, and send nothing.")] = False,
) -> None:
    """Push config.json, model.safetensors and README.md in one commit. The token is that of huggingface_hub's own login ('hf auth login').

    \b
    Examples:
      spot drafter push published --repo owner/name --dry-run
      spot drafter push published --repo owner/name --private
    """
    upload = push_drafter(folder, repo, private, dry_run)
    for name, size in upload.files.items():
        print(f"{size:>12,}  {name}")
    print(f"would be sent to {repo}" if dry_run else upload.url)
