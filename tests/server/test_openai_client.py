"""The openai client against a server in another process: what it gets is what each request gets alone."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from transformers import PreTrainedTokenizerFast

from server.alone import alone, bare, target
from server.conftest import Running
from spot_dlm.targets.checkpoints import SHIPPED, locate

PROMPT = "To JSON: Anna Berg is 34 years old and lives in Oslo."
TURN = {"role": "user", "content": PROMPT}


def test_chat(server: Running) -> None:
    client, expected = server.client(), alone(PROMPT, max_new_tokens=40)
    answer = client.chat.completions.create(model="shipped", messages=[TURN], max_tokens=40)
    (choice,) = answer.choices
    assert choice.message.content == expected.text and choice.message.role == "assistant" and choice.finish_reason == "stop"
    assert json.loads(choice.message.content) == {"name": "Anna Berg", "age": 34, "city": "Oslo"}
    assert answer.usage.prompt_tokens == len(expected.prompt_ids) and answer.usage.completion_tokens == len(expected.token_ids)
    assert answer.object == "chat.completion" and answer.model == "shipped" and answer.system_fingerprint.startswith("spot-")
    short = client.chat.completions.create(model="shipped", messages=[TURN], max_completion_tokens=5)
    assert short.choices[0].finish_reason == "length" and short.usage.completion_tokens == 5
    assert expected.text.startswith(short.choices[0].message.content)


def test_models(server: Running) -> None:
    client = server.client()
    assert [m.id for m in client.models.list()] == ["shipped"] and client.models.retrieve("shipped").owned_by == "spot-dlm"
    for call in (lambda: client.models.retrieve("other"), lambda: client.completions.create(model="other", prompt="a")):
        with pytest.raises(openai.NotFoundError, match="one model, 'shipped'"):
            call()
    assert server.get("/health").json() == {"status": "ok"} and server.get("/ready").json() == {"status": "ready"}


def test_completions(server: Running) -> None:
    """Text is bare, ids are taken as they are, and a list gives choices in its order."""
    client, ids = server.client(), target().encode(PROMPT)
    answer = client.completions.create(model="shipped", prompt=["Add 1 and", "def f("], n=2, seed=3, temperature=1)
    expected = [
        alone(bare(p), temperature=1.0, seed=3, sequence=i * 2**32 + s) for i, p in enumerate(("Add 1 and", "def f(")) for s in (0, 1)
    ]
    assert [c.text for c in answer.choices] == [r.text for r in expected] and [c.index for c in answer.choices] == [0, 1, 2, 3]
    assert [c.finish_reason for c in answer.choices] == [r.finish_reason for r in expected]
    assert answer.usage.prompt_tokens == len(bare("Add 1 and")) + len(bare("def f("))
    assert client.completions.create(model="shipped", prompt=ids).choices[0].text == alone(PROMPT).text
    assert client.completions.create(model="shipped", prompt=[ids, ids]).choices[1].text == alone(PROMPT).text


def test_conversations(server: Running) -> None:
    """Turns go into the model's own template; typed special tokens stay text, and parts of a content are joined."""
    turns = [
        {"role": "system", "content": "Be brief."}, TURN, {"role": "assistant", "content": "{}"}, {"role": "user", "content": "Again."}
    ]  # fmt: skip
    tokenizer = PreTrainedTokenizerFast.from_pretrained(locate(SHIPPED))
    ids = tokenizer.encode(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True), add_special_tokens=False)
    client = server.client()
    ask = {"model": "shipped", "extra_body": {"spot": {"return_order": True}}}
    answer = client.chat.completions.create(messages=turns, **ask)
    assert answer.choices[0].spot["token_ids"] == alone(ids).token_ids and answer.usage.prompt_tokens == len(ids)
    parts = [{"type": "text", "text": PROMPT[:20]}, {"type": "text", "text": PROMPT[20:]}]
    joined = client.chat.completions.create(messages=[{"role": "user", "content": parts}], **ask)
    assert joined.choices[0].message.content == alone(PROMPT).text
    typed = [{"role": "user", "content": "Say <|MASK|><|im_end|> twice"}]
    answer = client.chat.completions.create(messages=typed, **ask)
    assert answer.usage.prompt_tokens == len(target().encode(typed[0]["content"]))
    assert answer.choices[0].spot["token_ids"] == alone(typed[0]["content"]).token_ids
    mixed = [{"role": "system", "content": "No <|MASK|>."}, TURN]
    assert client.chat.completions.create(messages=mixed, **ask).usage.prompt_tokens > len(target().encode(PROMPT))


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_streams(server: Running, kind: str) -> None:
    """Pieces joined are the text; several of them come, the last chunk says why it ended, and usage comes at the very end."""
    client, options = server.client(), {"include_usage": True}
    common = {"model": "shipped", "stream": True, "stream_options": options, "n": 3, "seed": 4, "temperature": 0.8}
    prompt = PROMPT if kind == "chat" else bare(PROMPT)
    if kind == "chat":
        chunks = list(client.chat.completions.create(messages=[TURN], **common))
        roles = [c.choices[0].delta.role for c in chunks if c.choices and c.choices[0].delta.role]
        assert roles == ["assistant"] * 3
    else:
        chunks = list(client.completions.create(prompt=PROMPT, **common))
    *choices, last = chunks
    expected = [alone(prompt, temperature=0.8, seed=4, sequence=i) for i in range(3)]
    for i, result in enumerate(expected):
        own = [c.choices[0] for c in choices if c.choices[0].index == i]
        pieces = [(c.delta.content or "") if kind == "chat" else c.text for c in own]
        assert "".join(pieces) == result.text and len([p for p in pieces if p]) > 2
        assert [c.finish_reason for c in own if c.finish_reason] == [own[-1].finish_reason] == [result.finish_reason]
    assert not last.choices and last.usage.completion_tokens == sum(len(r.token_ids) for r in expected)
    assert all(c.usage is None for c in choices) and len({c.id for c in chunks}) == 1
    body = {"model": "shipped", "prompt": PROMPT, "stream": True, "max_tokens": 4}
    raw = server.post("/v1/completions", body).text
    assert raw.endswith("data: [DONE]\n\n") and '"usage"' not in raw


def test_samples_and_seeds(server: Running) -> None:
    """n answers differ; a seed gives them again; without one they differ from call to call, and the seed that was used is told."""
    client = server.client()
    ask = {"model": "shipped", "messages": [{"role": "user", "content": "Continue: def read("}], "temperature": 1.0, "n": 3}
    texts = [[c.message.content for c in client.chat.completions.create(seed=s, **ask).choices] for s in (7, 7, 8)]
    assert texts[0] == texts[1] != texts[2] and len(set(texts[0])) == 3
    assert texts[0] == [alone("Continue: def read(", temperature=1.0, seed=7, sequence=i).text for i in range(3)]
    first, second = (client.chat.completions.create(**ask) for _ in range(2))
    assert first.spot["seed"] != second.spot["seed"]
    again = client.chat.completions.create(seed=first.spot["seed"], **ask)
    assert [c.message.content for c in again.choices] == [c.message.content for c in first.choices]


@pytest.mark.parametrize("stops", ['"age"', ["zzz", 'g", "a', "city"], ["Berg"], "never there", ['"', "name"]])
def test_stop_strings(server: Running, stops: str | list[str]) -> None:
    """The text is cut before the first stop string, across tokens, and a stream never sends any of it."""
    client, whole = server.client(), alone(PROMPT, max_new_tokens=40)
    found = [whole.text.find(s) for s in ([stops] if isinstance(stops, str) else stops) if s in whole.text]
    expected = whole.text[: min(found, default=None)]
    ask = {"model": "shipped", "messages": [TURN], "stop": stops, "max_tokens": 40, "extra_body": {"spot": {"return_order": True}}}
    answer = client.chat.completions.create(**ask)
    (choice,) = answer.choices
    assert choice.message.content == expected and choice.finish_reason == "stop"
    used = choice.spot["token_ids"]
    assert used == whole.token_ids[: len(used)] and answer.usage.completion_tokens == len(used)
    assert choice.spot["commit_steps"] == whole.commit_steps[: len(used)]
    if found:
        assert (
            len(used) < len(whole.token_ids) and expected in target().decode(used) and target().decode(used[:-1]).find(expected) in (0, -1)
        )
    sent = "".join(c.choices[0].delta.content or "" for c in client.chat.completions.create(stream=True, **ask))
    assert sent == expected


def test_extensions(server: Running) -> None:
    """Drafter and nodes change nothing, rule and sampler what they say; what is chosen twice or not offered is refused by name."""
    client = server.client()

    def ask(**spot: Any) -> Any:
        return client.chat.completions.create(model="shipped", messages=[TURN], extra_body={"spot": {"return_order": True} | spot}).choices[
            0
        ]

    standard = ask().spot
    assert standard == {"token_ids": alone(PROMPT).token_ids, "commit_steps": alone(PROMPT).commit_steps}
    for same in ({"drafter": "root"}, {"drafter": "order"}, {"nodes": 1}, {"nodes": 32}, {"drafter": "auto", "nodes": "auto"}):
        assert ask(**same).spot == standard
    ruled = alone(PROMPT, rule="k=2")
    assert ask(rule="k=2").spot == {"token_ids": ruled.token_ids, "commit_steps": ruled.commit_steps} != standard
    assert ask(sampler="sdar,temperature=0,block_length=16,denoising_steps=16,remasking_strategy=sequential").message.content
    for bad, field in (
        ({"drafter": "chain"}, "drafter"), ({"nodes": 33}, "nodes"), ({"nodes": 0}, "nodes"), ({"nodes": True}, "nodes"),
        ({"rule": "x"}, "rule"), ({"sampler": "llada,block_length=0"}, "sampler"), ({"rule": "k=2", "sampler": "sdar"}, "sampler"),
        ({"oder": 1}, "oder"),
        ({"rule": "suppress=99999"}, "rule"), ({"rule": "k=100000"}, "rule"), ({"sampler": "dream,steps=99999999999"}, "sampler"),
        ({"sampler": "sdar,block_length=1000,denoising_steps=1000"}, "sampler"), ({"top_k": -1}, "top_k"),
        ({"sampler": "sdar,block_length=2.5"}, "sampler"), ({"sampler": "dream,steps=2.5"}, "sampler"),
        ({"rule": "arrival=99999999"}, "rule"),
        ({"sampler": "llada,gen_length=24,block_length=8,steps=24,eos_eot_ids=abc,logits_eos_inf=true"}, "sampler"),
    ):  # fmt: skip
        with pytest.raises(openai.BadRequestError, match=f"spot.{field}") as caught:
            ask(**bad)
        assert caught.value.body["param"] == f"spot.{field}"
    with pytest.raises(openai.BadRequestError, match="top_p"):
        client.chat.completions.create(
            model="shipped",
            messages=[TURN],
            top_p=0.5,
            temperature=1,
            extra_body={"spot": {"sampler": "llada,gen_length=24,block_length=8,steps=24"}},
        )
