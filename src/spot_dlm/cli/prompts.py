"""Prompts of the commands from packaged tasks and from files, numbered through: every prompt has noise of its own.

Knows nothing of targets. Example: `task_lines(["json"], limit=2)[1].prompt`.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from spot_dlm.cli.jsonl import PromptLine, read_prompts
from spot_dlm.tasks import FAMILY_TASKS, TASKS, load_prompts

DEFAULT_LIMIT = 20
"""Prompts of a packaged family that are graded where no limit is given."""


def task_lines(names: Iterable[str], split: str = "heldout_values", limit: int | None = None) -> list[PromptLine]:
    """Return the first prompts of packaged tasks.

    Raises:
        ValueError: for an unknown name or split.
    """
    found = [p for name in dict.fromkeys(names) for p in load_prompts(name, split, limit)]
    return [PromptLine(p.id, i, p.prompt, f"prompt {p.id}", {}, p) for i, p in enumerate(found)]


def graded_lines(sources: Iterable[str], split: str, limit: int | None, warn: Callable[[str], None]) -> list[tuple[str, PromptLine]]:
    """Return the first prompts of every source, a task's name or a file, with the source's name.

    Raises:
        ValueError: for a source that is neither, and where a file has no prompt whose answers can be graded.
    """
    found: list[tuple[str, PromptLine]] = []
    for source in dict.fromkeys(sources):
        if source in TASKS:
            default = DEFAULT_LIMIT if source in FAMILY_TASKS else None
            found += [(source, line) for line in task_lines([source], split, limit or default)]
            continue
        if not Path(source).is_file():
            raise ValueError(f"--task {source} is no file and no task; tasks are {', '.join(TASKS)}")
        lines = read_prompts(Path(source), warn, graded=True)[:limit]
        if all(line.task is None for line in lines):
            raise ValueError(f"{source}: no prompt there has an answer or a check")
        found += [(source, line) for line in lines]
    return [(name, replace(line, index=i)) for i, (name, line) in enumerate(found)]
