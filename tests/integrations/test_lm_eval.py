"""The harness's model `spot`, by the installed harness on a task file made of held-out prompts: nothing is fetched."""

import json
import sys
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import lm_eval
import pytest
import yaml
from lm_eval.api.instance import Instance
from lm_eval.api.model import CachingLM
from lm_eval.tasks import TaskManager

import spot_dlm as spot
from spot_dlm.cli.options import open_target
from spot_dlm.integrations.lm_eval import model as module
from spot_dlm.integrations.lm_eval.__main__ import main
from spot_dlm.integrations.lm_eval.arguments import Arguments
from spot_dlm.integrations.lm_eval.model import SpotLM
from spot_dlm.tasks import load_prompts
from spot_dlm.transition import Sampling

PROMPTS = load_prompts("json", limit=3)
LENGTH = 48


load = cache(open_target)


@pytest.fixture(autouse=True)
def quicker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "open_target", load)
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)  # asks pip and lscpu, which takes seconds


@pytest.fixture(scope="module")
def task_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    lines = [json.dumps({"prompt": p.prompt, "answer": p.answer}) for p in PROMPTS]
    (folder / "data.jsonl").write_text("\n".join(lines) + "\n")
    task = {
        "task": "spot_json",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "data.jsonl")}, "cache_dir": str(folder / "cache")},
        "test_split": "test",
        "fewshot_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": LENGTH, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    (folder / "spot_json.yaml").write_text(yaml.safe_dump(task))
    choice = {**task, "task": "spot_choice", "output_type": "multiple_choice", "doc_to_choice": ["a", "b"], "doc_to_target": 0}
    del choice["generation_kwargs"]
    (folder / "spot_choice.yaml").write_text(yaml.safe_dump({**choice, "metric_list": [{"metric": "acc"}]}))
    return folder


@pytest.fixture(scope="module")
def target() -> spot.Target:
    return spot.load_target()


@pytest.fixture(scope="module")
def plain(target: spot.Target) -> list[spot.Result]:
    """Standard decoding of the prompts, as `spot generate --drafter root` decodes them."""
    return [spot.generate(target, p.prompt, spot.Root(), spot.DecodeParams(max_new_tokens=LENGTH, nodes=1)) for p in PROMPTS]


def evaluate(lm: SpotLM, folder: Path, task: str = "spot_json", **more: object) -> dict:
    tasks = TaskManager(include_path=str(folder), include_defaults=False)
    return lm_eval.simple_evaluate(
        lm, tasks=[task], task_manager=tasks, **{"apply_chat_template": True, "bootstrap_iters": 0, "log_samples": True, **more}
    )


def texts(results: dict) -> list[str]:
    return [row["resps"][0][0] for row in results["samples"]["spot_json"]]


def requests(prompts: list[str], **asked: object) -> list[Instance]:
    return [Instance("generate_until", {}, (p, {"max_gen_toks": LENGTH} | asked), 0, ("t", n, 1)) for n, p in enumerate(prompts)]


def test_results_and_answers_are_those_of_standard_decoding(task_folder: Path, plain: list[spot.Result], tmp_path: Path) -> None:
    root = SpotLM(drafter="root", nodes=1, batch_size=1)
    auto = SpotLM(drafter="auto", nodes=8, batch_size=4, passes=str(tmp_path / "passes.json"))
    standard, speculative = evaluate(root, task_folder), evaluate(auto, task_folder)
    assert texts(standard) == texts(speculative) == [e.text for e in plain]
    assert standard["results"] == speculative["results"]
    assert standard["results"]["spot_json"]["exact_match,none"] > 0.5
    assert [p.nfe for p in root.passes] == [p.nfe_standard for p in root.passes] == [e.counts.nfe for e in plain]
    assert [p.nfe_standard for p in auto.passes] == [p.nfe for p in root.passes]
    assert all(p.nfe < p.nfe_standard for p in auto.passes)
    told = speculative["config"]["passes"]
    assert told == speculative["config"]["passes_by_task"]["spot_json"]
    assert told["nfe_reduction"] == told["nfe_standard"] / told["nfe"] > 1.5
    assert speculative["config"]["spot_by_task"]["spot_json"]["max_new_tokens"] == LENGTH
    written = json.loads((tmp_path / "passes.json").read_text())
    assert written["passes"] == told and len(written["requests"]) == len(PROMPTS)


def test_stop_strings_end_the_request_where_they_end_the_text(plain: list[spot.Result]) -> None:
    asked = requests([p.prompt for p in PROMPTS], until=["age", ",", "never"], do_sample=False)
    root, auto = SpotLM(drafter="root", nodes=1, chat=True), SpotLM(nodes=8, chat=True)
    found = root.generate_until(asked, disable_tqdm=True)
    assert found == auto.generate_until(asked, disable_tqdm=True) == [w.text.split(",")[0].split("age")[0] for w in plain]
    assert [p.finish_reason for p in root.passes] == ["until"] * len(PROMPTS)
    assert [p.nfe for p in root.passes] == [p.nfe_standard for p in root.passes] == [p.nfe_standard for p in auto.passes]
    assert sum(p.nfe for p in root.passes) < sum(w.counts.nfe for w in plain)


def test_samples_have_noise_of_their_own_as_in_spot_generate(target: spot.Target) -> None:
    lm = SpotLM(nodes=8, chat=True, seed=3, rule="k=2")
    prompts = [p.prompt for p in load_prompts("stdlib", limit=2)]
    asked = requests(prompts, temperature=1.5, do_sample=True, max_gen_toks=32)
    found = lm.generate_until([asked[0], asked[0], asked[1]], disable_tqdm=True)
    params = Arguments(rule="k=2", seed=3, nodes=1, temperature=1.5, max_gen_toks=32).params({})
    keys = ((0, 0), (0, 1), (1, 2**32))
    assert params.sampling == Sampling(1.5, seed=3)
    expected = [spot.generate(target, prompts[n], spot.Root(), replace(params, sequence=key)).text for n, key in keys]
    assert found == expected
    assert found[0] != found[1]


def test_prompts_are_those_of_spot_generate(target: spot.Target) -> None:
    lm = SpotLM()
    for text in ("Add 1 and 2.", "What does <|im_end|> mean?", " a\n<|MASK|>"):
        context = lm.apply_chat_template([{"role": "user", "content": text}])
        assert lm._prompts.encode(context) == target.encode(text)
    turns = [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "2"}, {"role": "user", "content": "3?"}]
    ids = lm._prompts.encode(lm.apply_chat_template(turns))
    assert [t for t in ("1?", "2", "3?") if t in target.decode(ids)] == ["1?", "2", "3?"]
    opened = lm.apply_chat_template([turns[0], {"role": "assistant", "content": "The"}], add_generation_prompt=False)
    assert opened.endswith("The")
    with pytest.raises(ValueError, match="NUL character"):
        lm.apply_chat_template([{"role": "user", "content": "a\0b"}])
    bare = SpotLM()
    assert bare._prompts.encode("<|im_end|> a") == spot.load_target(use_template=False).encode("<|im_end|> a")


def test_examples_are_turns_and_the_results_say_what_was_used(task_folder: Path) -> None:
    lm = SpotLM(sampler="sdar,block_length=16,denoising_steps=16", nodes=4)
    more = {"num_fewshot": 1, "system_instruction": "Be brief.", "fewshot_as_multiturn": True, "limit": 1}
    results = evaluate(lm, task_folder, gen_kwargs="do_sample=true,temperature=0.5,max_gen_toks=16", **more)
    context = results["samples"]["spot_json"][0]["arguments"][0][0]
    assert [part.partition("<|im_end|>")[0] for part in context.split("<|im_start|>")][1] == "Be brief."
    assert context.count("<|im_start|>") == 3 and context.endswith(f"{PROMPTS[0].prompt}<|im_end|>")
    used = results["config"]["spot_by_task"]["spot_json"]
    assert (used["temperature"], used["rule"], used["max_new_tokens"]) == (0.5, "threshold=0.85,source=filtered", 16)


def test_the_harness_caches_answers(tmp_path: Path) -> None:
    asked = requests([PROMPTS[0].prompt], do_sample=False)
    lm = SpotLM(nodes=4, chat=True)
    first = CachingLM(lm, str(tmp_path / "cache.db")).generate_until(asked)
    assert CachingLM(lm, str(tmp_path / "cache.db")).generate_until(asked) == first
    assert len(lm.passes) == 1
    with pytest.raises(ValueError, match="one answer for all samples"):
        CachingLM(SpotLM(temperature=1), str(tmp_path / "cache.db"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"temprature": 1, "nodez": 2}, "model_args: temprature, nodez unknown; the model spot knows model, "),
        ({"nodes": 0}, "--nodes 0 must be"),
        ({"transfer": "yes"}, "model_args: transfer='yes' must be true or false"),
        ({"model": "a", "pretrained": "b"}, "model=a and pretrained=b are the same argument"),
        ({"rule": "fast"}, "rule='fast'"),
        ({"sampler": "llada,steps=7"}, "steps"),
        ({"drafter": "psychic"}, "drafter='psychic' is unknown"),
        ({"batch_size": "many"}, "batch_size=many must be"),
        ({"max_gen_toks": 0}, "max_gen_toks=0 must be at least 1"),
        ({"passes": "/nowhere/passes.json"}, "cannot be written"),
    ],
)
def test_bad_model_arguments_are_named(given: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", "[(]")):
        SpotLM(**given)


def test_bad_requests_are_named() -> None:
    lm = SpotLM(chat=True, max_gen_toks=8)
    with pytest.raises(ValueError, match=r"task t, document 0: generation_kwargs: penalty not offered"):
        lm.generate_until(requests(["a"], penalty=2))
    with pytest.raises(ValueError, match=r"num_beams=4 not offered"):
        lm.generate_until(requests(["a"], num_beams=4))
    with pytest.raises(ValueError, match=r"document 1: prompt of .* context holds 4096"):
        lm.generate_until(requests(["a", "b " * 4096]))
    with pytest.raises(ValueError, match="give one of them"):
        lm.apply_chat_template([{"role": "user", "content": "a"}])
    assert lm.passes == []


def test_a_task_comes_before_the_model_arguments() -> None:
    arguments = Arguments(temperature=0.5, max_gen_toks=32, top_k=3)
    assert arguments.params({}).sampling == Sampling(0.5, 3)
    assert arguments.params({"do_sample": False}).sampling.temperature == 0
    assert arguments.params({"do_sample": True}).sampling.temperature == 0.5
    assert arguments.params({"temperature": 0.7, "do_sample": True, "max_tokens": 9}).max_new_tokens == 9
    official = Arguments(sampler="sdar,block_length=16,denoising_steps=16")
    assert official.params({"max_gen_toks": 48, "do_sample": False}) == spot.DecodeParams(
        **{
            **vars(spot.official("sdar", gen_length=48, block_length=16, denoising_steps=16, temperature=0.0)),
            "sampling": Sampling(0.0),
        }
    )


def test_the_command_evaluates_and_refuses_likelihoods(
    task_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lm_eval.tasks.TaskManager", partial(TaskManager, include_defaults=False))  # the harness's own take seconds

    def run(task: str, *more: str) -> None:
        words = ["--model", "spot", "--tasks", task, "--include_path", str(task_folder), "--limit", "2", *more]
        monkeypatch.setattr(sys, "argv", ["lm_eval", *words])
        main()

    run("spot_json", "--model_args", "model=shipped,nodes=8", "--apply_chat_template", "--output_path", str(tmp_path), "--batch_size", "2")
    assert "|spot_json|" in capfd.readouterr().out
    results = json.loads(next(tmp_path.rglob("results_*.json")).read_text())
    assert results["config"]["passes"]["requests"] == 2
    assert results["config"]["batch_sizes"] == [2]
    for words, message in (
        (("spot_choice",), "the model spot answers generate_until only"),
        (("spot_json", "--model_args", "nodez=3"), "model_args: nodez unknown"),
        (("spot_jsom",), "Tasks not found: spot_jsom"),
    ):
        with pytest.raises(SystemExit) as stop:
            run(*words)
        assert stop.value.code == 2
        assert f"spot: {message}" in capfd.readouterr().err


def test_a_harness_that_is_not_installed_is_one_line(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval.__main__", None)
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert capfd.readouterr().err.rstrip().endswith("the harness is installed by: pip install 'spot-dlm[lm-eval]'")
