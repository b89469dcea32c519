"""The shipped model behind a server, and a headless Chromium that looks at its page; without one the tests are skipped."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from server.conftest import Running, Start, start  # noqa: F401

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
PATIENCE_MS = 60_000


@dataclass(frozen=True)
class Slowable:
    """A server whose passes take their time while a file is there."""

    running: Running
    file: Path

    def slow(self, is_slow: bool) -> None:
        if is_slow:
            self.file.touch()
        else:
            self.file.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def served(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Slowable:  # noqa: F811
    file = tmp_path_factory.mktemp("slow") / "slow"

    def prepare() -> None:
        import spot_dlm.cli.options as options

        load = options.load_target

        def loaded(*words: Any, **more: Any) -> Any:
            target = load(*words, **more)
            evaluate = target.evaluate_many

            def slowly(queries: Any) -> Any:
                time.sleep(0.05 * file.exists())
                return evaluate(queries)

            target.evaluate_many = slowly
            return target

        options.load_target = loaded

    return Slowable(start("--max-new-tokens", 48, "--nodes", 8, "--batch", 2, "--queue", 0, "--max-body", 2**16, prepare=prepare), file)


@pytest.fixture(scope="module")
def browser(served: Slowable) -> Iterator[Any]:
    """Chromium; started after the server, for a process with a running event loop must not be forked."""
    playwright = pytest.importorskip("playwright.sync_api", reason="the browser tests need the package playwright (extra dev)")
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip("the browser tests need chromium: apt-get install chromium")
    with playwright.sync_playwright() as starter:
        found = starter.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield found
        found.close()


@dataclass
class Visit:
    """The page in a tab of its own, with what it asked for and complained of."""

    page: Any
    url: str
    asked: list[Any] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def text(self, selector: str) -> str:
        return self.page.locator(selector).inner_text()

    def ask(self, prompt: str) -> None:
        """Type a prompt where the focus is, and press Enter."""
        self.page.keyboard.type(prompt)
        self.page.keyboard.press("Enter")

    def done(self, selector: str = "#verdict") -> None:
        self.page.locator(selector).wait_for(timeout=PATIENCE_MS)

    def cells(self, side: str) -> list[dict[str, Any]]:
        """The boxes of a canvas that hold a token of the answer."""
        boxes = f"#{side} .cell[data-pass]:not(.beyond)"
        return self.page.evaluate(
            """(boxes) => [...document.querySelectorAll(boxes)].map((e) => ({
                text: e.textContent, pass: Number(e.dataset.pass), colour: getComputedStyle(e).backgroundColor,
                number: Number([...e.classList].find((c) => /^p[0-9]$/.test(c)).slice(1))}))""",
            boxes,
        )

    def options(self) -> None:
        self.page.locator("#options summary").click()


@pytest.fixture
def visit(browser: Any, served: Slowable) -> Iterator[Visit]:
    """A phone-sized visit without motion, at the end of which nothing was asked of others and nothing complained of."""
    served.slow(False)
    context = browser.new_context(viewport={"width": 360, "height": 740}, reduced_motion="reduce")
    context.set_default_timeout(PATIENCE_MS)
    url = served.running.url
    found = Visit(context.new_page(), url)
    found.page.on("request", lambda request: found.asked.append(request))
    found.page.on("pageerror", lambda error: found.complaints.append(str(error)))
    found.page.on("console", lambda line: found.complaints.append(line.text) if line.type in ("error", "warning") else None)
    found.page.goto(url)
    found.page.locator("#model:not(:empty)").wait_for()
    yield found
    served.slow(False)
    assert all(request.url.startswith(f"{url}/") for request in found.asked), [r.url for r in found.asked]
    context.close()
    assert not found.complaints
