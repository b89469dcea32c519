"""Packaged prompts and graders: every reference answer passes its own check, wrong answers do not."""

import pytest

from spot_dlm.tasks import FAMILY_TASKS, SPLITS, TASKS, TaskPrompt, check_of, grade, load_prompts


@pytest.mark.parametrize("task", FAMILY_TASKS)
@pytest.mark.parametrize("split", SPLITS)
def test_reference_answers_pass(task, split):
    prompts = load_prompts(task, split)
    assert len({p.id for p in prompts}) == len(prompts) >= 50
    if task == "stdlib":  # free text
        assert all(grade(p, p.answer) is None for p in prompts)
        return
    for prompt in prompts[:: 1 if task != "python" else 20]:
        assert grade(prompt, prompt.answer) is True, prompt
        assert grade(prompt, prompt.answer + "x") is False, prompt
        assert grade(prompt, "") is False


def test_human_eval_prompts():
    prompts = load_prompts("humaneval")
    assert len(prompts) == 164
    head = prompts[2]
    assert grade(head, head.answer) is True and grade(head, "    return 0.25") is False
    whole = "Sure:\n```python\ndef truncate_number(number):\n    return number % 1\n```\nThat is it."
    assert grade(head, whole) is True and grade(head, whole.replace("% 1", "% 2")) is False


def test_checks_are_checked():
    assert check_of(None, None) == {"kind": "none"} and check_of("a", None) == {"kind": "exact", "text": "a"}
    good = {"kind": "json", "value": [1]}, {"kind": "number", "value": -3}, {"kind": "python", "tests": ["assert f()"]}, {"kind": "none"}
    assert all(check_of("a", check) == check for check in good)
    assert grade(TaskPrompt("t", "f", "p", "", good[1]), "So.\nAnswer: -3") is True
    bad = {"kind": "exact"}, {"kind": "number", "value": 1.5}, {"kind": "python", "tests": "x"}, {"kind": "poem"}, {"kind": []}, {}, "exact"
    for check in bad:
        with pytest.raises(ValueError, match="is not one of: exact: text"):
            check_of("a", check)
    with pytest.raises(ValueError, match="answer=3 must be a text"):
        check_of(3, None)


def test_python_answers_are_run_with_a_time_limit(monkeypatch):
    monkeypatch.setattr("spot_dlm.tasks._PYTHON_TIMEOUT_S", 0.5)
    prompt = TaskPrompt("t", "python", "def f(x):", "    return x", {"kind": "python", "tests": ["assert f(1) == 1"]})
    assert grade(prompt, "    return x") is True
    assert grade(prompt, "    while True: pass") is False
    assert grade(prompt, "    return 2") is False
    assert grade(prompt, "    return x\0") is False


@pytest.mark.parametrize("arguments", [("sudoku", "heldout_values"), ("json", "train")])
def test_unknown_names_are_listed(arguments):
    with pytest.raises(ValueError, match="choose one of"):
        load_prompts(*arguments)


def test_limit_keeps_the_order():
    assert load_prompts("json", limit=3) == load_prompts("json")[:3]
    assert set(FAMILY_TASKS) < set(TASKS)
