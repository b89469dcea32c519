"""The page at `/` in a real browser: what it shows is what the API says, whatever is typed and whatever goes wrong."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from browser.conftest import Slowable, Visit

PROMPT = "To JSON: Anna Berg is 34 years old and lives in Oslo."
ANSWER = '{"name": "Anna Berg", "age": 34, "city": "Oslo"}'
NASTY = "<img src=x onerror='window.hurt = 1'><script>window.hurt = 1</script>"

COUNT_FILLED = """() => {
    window.filled = new Set();
    const count = () => window.filled.add(document.querySelectorAll('#speculative .cell[data-pass]').length);
    new MutationObserver(count).observe(document.body, {subtree: true, childList: true});
}"""
LOW_CONTRAST = """() => {
    const parts = (c) => c.match(/[0-9.]+/g).map(Number);
    const linear = (v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    const level = (c) => parts(c).slice(0, 3).reduce((sum, v, i) => sum + linear(v / 255) * [0.2126, 0.7152, 0.0722][i], 0);
    const behind = (e) => {
        for (; e; e = e.parentElement) {
            const c = getComputedStyle(e).backgroundColor;
            if (parts(c)[3] !== 0) return c;
        }
        return 'rgb(255, 255, 255)';
    };
    const ratio = (e) => {
        const [a, b] = [level(getComputedStyle(e).color), level(behind(e))].sort((x, y) => y - x);
        return (a + 0.05) / (b + 0.05);
    };
    const texts = [...document.querySelectorAll('h1, h2, p, label, dt, dd, button, summary, li, .cell:not(.beyond)')];
    return texts.filter((e) => e.textContent.trim() && ratio(e) < 4.5).map((e) => `${e.className} ${e.textContent} ${ratio(e)}`);
}"""
"""What has a contrast below 4.5 to 1."""


def watched(url: str, **spot: Any) -> list[dict[str, Any]]:
    """What the API itself says of the prompt, document by document."""
    body = {"model": "shipped", "messages": [{"role": "user", "content": PROMPT}], "stream": True}
    body["spot"] = {"return_passes": True, "return_order": True} | spot
    lines = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines[:-2]]


def seen(choices: list[dict[str, Any]], what: str) -> list[Any]:
    return [c["spot"][what] for c in choices if what in c.get("spot", {})]


def no_overflow(visit: Visit) -> bool:
    return visit.page.evaluate("document.documentElement.scrollWidth <= innerWidth && document.body.scrollWidth <= innerWidth")


def chunks(*texts: str, complete: bool = True) -> str:
    """A stream of one pass that commits these tokens."""
    commits = [{"position": i, "token_id": i, "text": t, "block": 0, "step": i} for i, t in enumerate(texts)]
    root = {"depth": 0, "parents": [], "reach": 1.0, "accepted": True, "tokens": []}
    guess = {"depth": 1, "parents": [0], "reach": 0.5, "accepted": False, "tokens": [commits[0]]}
    masked = list(range(len(texts)))
    counts = {"nfe": 1, "transitions": len(texts), "drafted": 1, "accepted": 0, "tokens": len(texts), "total_s": 0.1}
    choices = [
        {"delta": {"content": "".join(texts)}, "spot": {"block": {"number": 0, "masked": masked, "committed": []}}},
        {"delta": {}, "spot": {"pass": {"number": 0, "steps": len(texts), "committed": commits, "nodes": [root, guess]}}},
        {"delta": {}, "spot": {"counts": counts}},
        {"delta": {}, "finish_reason": "stop", "spot": {"token_ids": masked, "commit_steps": masked}},
    ]
    events = [f"data: {json.dumps({'choices': [c], 'spot': {'seed': 1}})}\n\n" for c in choices]
    return "".join(events) + ("data: [DONE]\n\n" if complete else "")


def answer_with(visit: Visit, *bodies: str, status: int = 200, headers: dict[str, str] | None = None) -> None:
    """Let requests be answered with these bodies, one after the other."""
    left = list(bodies)
    kind = "text/event-stream" if status == 200 else "application/json"
    visit.page.route("**/v1/chat/completions", lambda r: r.fulfill(status=status, content_type=kind, headers=headers, body=left.pop(0)))


def test_by_keyboard_alone_both_answers_appear_and_are_identical(visit: Visit, served: Slowable) -> None:
    """Figures, colours and tokens are those of the API; nothing is wider than a phone, then or at any pass."""
    speculative, standard = watched(visit.url), watched(visit.url, drafter="root")
    assert visit.page.evaluate("document.activeElement.id") == "prompt"
    visit.ask(PROMPT)
    visit.done()
    assert visit.text("#verdict") == "\u2713 Identical: both gave the same 35 tokens, committed in the same order."
    assert visit.text("#answer") == ANSWER and not visit.page.locator("#other").is_visible()
    for side, choices in (("speculative", speculative), ("standard", standard)):
        (counts,), passes, (ids,) = seen(choices, "counts"), seen(choices, "pass"), seen(choices, "token_ids")
        assert len(passes) == counts["nfe"] and sum(p["steps"] for p in passes) == counts["transitions"]
        figures = f"{counts['nfe']} passes, {counts['tokens']} tokens, {counts['tokens'] / counts['nfe']:.2f} tokens per pass"
        assert visit.text(f"#{side} .count") == figures
        at = {c["position"]: (p["number"] + 1, c["text"]) for p in passes for c in p["committed"]}
        cells = visit.cells(side)
        assert len(cells) == len(ids) == counts["tokens"] and [c["pass"] for c in cells] == [at[i][0] for i in range(len(ids))]
        shown = ["\u220e" if at[i][1] is None else at[i][1].replace(" ", "\u00a0") for i in range(len(ids))]
        assert [c["text"] for c in cells] == shown
        assert len({c["colour"] for c in cells}) == len({c["number"] for c in cells}) > 3
        assert all((a["pass"] < b["pass"]) <= (a["number"] <= b["number"]) for a in cells[7:23] for b in cells[7:23])  # one block
    (fast,), (slow,) = seen(speculative, "counts"), seen(standard, "counts")
    assert slow["nfe"] == fast["transitions"] > fast["nfe"] and visit.text("#passes") == str(fast["nfe"])
    assert visit.text("#reduction") == f"{slow['nfe'] / fast['nfe']:.2f}\u00d7" and visit.text("#speedup").endswith("\u00d7")
    assert no_overflow(visit)
    visit.page.locator("#head").focus()
    visit.page.keyboard.press("Home")
    visit.page.keyboard.press("ArrowRight")
    visit.page.keyboard.press("ArrowRight")
    second = seen(speculative, "pass")[1]
    visit.done("#told:text('Pass 2 checked')")
    nodes = visit.page.locator("#graph rect.node")
    assert nodes.count() == len(second["nodes"]) + 1 > 2  # and the model's own step
    assert visit.page.locator("#graph rect.failed").count() == sum(not n["accepted"] for n in second["nodes"]) > 0
    assert visit.page.locator("#speculative .cell.guess").count() > 0 and no_overflow(visit)


def test_playing_fills_the_canvas_pass_by_pass(visit: Visit) -> None:
    visit.page.evaluate("document.querySelector('#pace').value = '20'")  # hidden until there is something to replay
    visit.page.uncheck("#beside")
    visit.page.locator("#prompt").focus()
    visit.page.evaluate(COUNT_FILLED)
    visit.ask(PROMPT)
    visit.done("#status:text('Done')")
    filled = visit.page.evaluate("[...window.filled].sort((a, b) => a - b)")
    assert len(filled) > 5 and filled[-1] >= 35
    assert not visit.page.locator("#standard").is_visible() and not visit.page.locator("#verdict").is_visible()
    assert [json.loads(r.post_data)["spot"].get("drafter") for r in visit.asked if r.method == "POST"] == [None]


def test_markup_stays_text(visit: Visit) -> None:
    answer_with(visit, *[chunks(NASTY, "\n", "\u202e<b>", "x")] * 2)
    visit.ask(NASTY)
    visit.done()
    assert NASTY in visit.text("#answer") and visit.page.locator("#answer *, .canvas :not(span, br)").count() == 0
    assert visit.page.evaluate("window.hurt") is None and "\u202e" not in visit.page.locator("#speculative .canvas").inner_text()
    assert json.loads(visit.asked[-1].post_data)["messages"] == [{"role": "user", "content": NASTY}] and no_overflow(visit)


def test_answers_that_differ_are_a_warning(visit: Visit) -> None:
    order = chunks("a", "b").replace('"commit_steps": [0, 1]', '"commit_steps": [1, 0]')
    answer_with(visit, chunks("a", "b"), chunks("a", "b", "c"), chunks("a", "b"), order)
    for words in (
        "token 3 is nothing in speculative and \u201cc\u201d in standard",
        "token 1 was committed at step 1 in speculative and at step 2",
    ):
        visit.ask("x")
        visit.page.locator("#verdict", has_text=words).wait_for()
        assert visit.text("#verdict").startswith("\u26a0 Not identical") and "same" not in visit.page.locator("#verdict").get_attribute(
            "class"
        )


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("", "The prompt is empty"),
        ("a b c d " * 1100, "The server did not take this request: prompt of"),
        ("a b c d " * 10_000, "The server did not take this request: the body may have 65536 bytes"),
    ],
    ids=["empty", "too long for the model", "too long for the server"],
)
def test_prompts_that_cannot_be_decoded(visit: Visit, typed: str, words: str) -> None:
    visit.page.locator("#prompt").fill(typed)
    visit.page.keyboard.press("Enter")
    visit.page.locator("#error", has_text=words).wait_for()
    assert visit.page.locator("#go").is_visible() and no_overflow(visit)
    visit.complaints[:] = [c for c in visit.complaints if "status of 4" not in c]  # the browser's own
    visit.page.locator("#prompt").fill("Add 47 and 38.")
    visit.page.keyboard.press("Enter")
    visit.done()
    assert not visit.page.locator("#error").is_visible()


def test_a_server_that_fails_is_told_in_words(visit: Visit) -> None:
    visit.page.uncheck("#beside")
    broken = json.dumps({"error": {"message": "decoding failed", "type": "server_error", "param": None, "code": "decoding_failed"}})
    answers: list[tuple[str, dict[str, Any]]] = [
        ("The server could not answer: decoding failed.", {"status": 500, "body": broken}),
        ("The server could not answer: it answered with status 502", {"status": 502, "body": "<html>"}),
        (
            "The server could not finish this answer: decoding failed.",
            {"status": 200, "body": chunks("a", complete=False) + f"data: {broken}\n\n"},
        ),
        ("The connection was lost before the answer was complete.", {"status": 200, "body": chunks("a", complete=False)}),
    ]
    visit.page.locator("#prompt").focus()
    left = [answer for _, answer in answers]  # one route for all: one that ends after its first answer may let the next request through
    visit.page.route("**/v1/chat/completions", lambda route: route.fulfill(**left.pop(0)))
    for words, _ in answers:
        visit.ask("x")
        visit.page.locator("#error", has_text=words).wait_for()
    visit.page.route("**/v1/chat/completions", lambda route: route.abort("connectionrefused"))
    visit.ask("x")
    visit.page.locator("#error", has_text="The server cannot be reached").wait_for()
    visit.complaints[:] = [c for c in visit.complaints if "Failed to load resource" not in c]


def test_a_full_server_and_a_stop_that_frees_its_place(visit: Visit, served: Slowable) -> None:
    served.slow(True)
    running = served.running
    turn = {"role": "user", "content": "Continue: class A:"}  # answered at length
    body = {"model": "shipped", "messages": [turn], "n": 2, "stream": True, "spot": {"drafter": "root"}, "max_tokens": 400}
    with httpx.stream("POST", f"{visit.url}/v1/chat/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()  # once forgotten, the connection is closed
        assert next(lines)
        visit.ask(PROMPT)
        visit.page.locator("#error", has_text="The server is busy: all places are taken. Try again in").wait_for()
    visit.complaints[:] = [c for c in visit.complaints if "429" not in c]
    running.wait_until(lambda: running.is_idle, "the others left")
    before = running.metric('spot_samples_total{outcome="cancelled"}')
    visit.page.keyboard.press("Enter")
    visit.done("#speculative .cell[data-pass] >> nth=1")
    assert running.metric("spot_samples_running") == 1
    visit.page.locator("#stop").click()
    visit.page.locator("#status", has_text="Stopped.").wait_for()
    running.wait_until(lambda: running.is_idle, "the place is free")
    assert running.metric('spot_samples_total{outcome="cancelled"}') == before + 1
    assert visit.page.evaluate("document.activeElement.id") == "go" and not visit.page.locator("#verdict").is_visible()
    served.slow(False)
    visit.page.keyboard.press("Enter")  # on the button
    visit.done()


def test_a_key_is_asked_for_and_kept_in_the_tab(visit: Visit) -> None:
    refusal = json.dumps({"error": {"message": "the API key is missing or wrong"}})

    def guard(route: Any) -> None:
        if route.request.headers.get("authorization") == "Bearer secret":
            route.continue_()
        else:
            route.fulfill(status=401, content_type="application/json", body=refusal)

    visit.page.route("**/v1/**", guard)
    visit.page.reload()
    visit.page.locator("#error", has_text="This server wants an API key").wait_for()
    visit.complaints[:] = [c for c in visit.complaints if "401" not in c]
    assert visit.page.evaluate("document.activeElement.id") == "key"
    visit.page.keyboard.type("secret")
    visit.page.keyboard.press("Tab")
    visit.page.locator("#model", has_text="shipped").wait_for()
    visit.page.locator("#prompt").focus()
    visit.ask("Add 47 and 38.")
    visit.done()
    stored = visit.page.evaluate("[localStorage.length, document.cookie, Object.values(sessionStorage)]")
    assert stored == [0, "", ["secret"]] and "secret" not in visit.page.url


def test_options_are_sent_and_mistakes_named(visit: Visit) -> None:
    visit.options()
    visit.page.locator("#temperature").fill("0.8")
    visit.page.locator("#seed").fill("7")
    visit.page.select_option("#nodes", "4")
    visit.page.select_option("#rule", "bfloat16")
    visit.page.select_option("#route", "completion")
    visit.page.locator("#max_tokens").fill("x")
    visit.page.locator("#prompt").focus()
    visit.ask("def f(")
    visit.page.locator("#error", has_text="The length must be a whole number, not \u201cx\u201d.").wait_for()
    assert visit.page.evaluate("document.activeElement.id") == "max_tokens" and no_overflow(visit)
    visit.page.locator("#max_tokens").fill("20")
    visit.page.keyboard.press("Enter")
    visit.done()
    assert "Identical" in visit.text("#verdict") and "seed 7" in visit.text("#made")
    first, second = (json.loads(r.post_data) for r in visit.asked if r.method == "POST")
    common = {
        "model": "shipped",
        "seed": 7,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.8,
        "max_tokens": 20,
    }
    shown = {"return_passes": True, "return_order": True, "rule": "bfloat16"}
    assert first == common | {"prompt": "def f(", "spot": shown | {"nodes": 4}}
    assert second == common | {"prompt": "def f(", "spot": shown | {"drafter": "root"}}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_both_schemes(visit: Visit, scheme: str) -> None:
    """Contrast of text to what is behind it is at least 4.5 to 1 in every box and line (WCAG 2.2 AA)."""
    visit.page.emulate_media(color_scheme=scheme)
    visit.ask(PROMPT)
    visit.done()
    low = visit.page.evaluate(LOW_CONTRAST)
    assert low == []


def test_files_of_the_page(served: Slowable) -> None:
    """They forbid everything that does not come from the server, need no key, and tell their kind."""
    for path, kind in (
        ("/", "text/html"),
        ("/page/page.js", "text/javascript"),
        ("/page/page.css", "text/css"),
        ("/page/icon.svg", "image/svg+xml"),
    ):
        answer = served.running.get(path)
        assert answer.status_code == 200 and answer.headers["content-type"] == f"{kind}; charset=utf-8"
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "//" not in answer.text.replace("http://www.w3.org/2000/svg", "").replace("// ", "")
    assert served.running.get("/page/").status_code == served.running.get("/page/../app.py").status_code == 404
