"""docs/quickstart.md: every command is read by the real parser, and every piece of Python runs with the shipped model."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import typer
from server.conftest import Start, start  # noqa: F401  # a fixture

import spot_dlm as spot
from spot_dlm.cli import app

PAGE = Path(__file__).parents[1] / "docs" / "quickstart.md"
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
COMMANDS = [line for kind, text in BLOCKS if kind == "bash" for line in text.splitlines() if line.startswith("spot ")]
PYTHON = [text for kind, text in BLOCKS if kind == "python"]


def shown_after(text: str) -> str:
    """The output that the page shows for a block."""
    return BLOCKS[BLOCKS.index(("python", text)) + 1][1].rstrip("\n")


def parse(line: str) -> typer.Context:
    name, *words = shlex.split(line.removesuffix("&"), comments=True)[1:]
    return typer.main.get_command(app).commands[name].make_context(name, words)


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_is_one_that_the_parser_takes(line: str) -> None:
    assert parse(line).params


def test_a_command_of_yesterday_would_be_found() -> None:
    with pytest.raises(Exception, match="--stats-of-yesterday"):
        parse("spot generate hello --stats-of-yesterday")


def test_the_page_leaves_nothing_out() -> None:
    names = [line.split()[1] for line in COMMANDS]
    assert names == ["generate", "verify", "trace", "train", "verify", "serve", "eval"]
    assert len(PYTHON) == 2


def test_the_answer_and_its_passes_are_those_shown() -> None:
    prompt, nodes = parse(COMMANDS[0]).params["prompt"], int(parse(COMMANDS[0]).params["nodes"])
    target = spot.load_target()
    result = spot.generate(target, prompt, spot.build_drafter("auto", spec=target.spec), spot.DecodeParams(nodes=nodes))
    standard = spot.generate(target, prompt, spot.Root(), spot.DecodeParams(nodes=1))
    page = PAGE.read_text("utf-8")
    assert f"\n{result.text}\ntokens               {result.counts.tokens} in 1 sequence\n" in page
    assert f"nfe                  {result.counts.nfe} decoding passes" in page
    assert f"takes {standard.counts.nfe} passes" in page


def test_the_stream_is_the_one_shown(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(PYTHON[0], "quickstart.md", "exec"), {})
    assert capsys.readouterr().out.replace("|", "") == shown_after(PYTHON[0]).replace("|", "")


def test_the_client_streams_the_answer_shown(start: Start, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    server = start()
    exec(compile(PYTHON[1].replace("http://127.0.0.1:8000", server.url), "quickstart.md", "exec"), {})
    assert capsys.readouterr().out.strip() == shown_after(PYTHON[1])


def test_links_lead_somewhere() -> None:
    for link in re.findall(r"\]\(([^)#]+)", PAGE.read_text("utf-8")):
        assert (PAGE.parent / link).exists(), link


def test_the_shell_can_read_the_page() -> None:
    for kind, text in BLOCKS:
        if kind == "bash":
            text = text.replace("<this repository>", "repository")
            done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, timeout=30)
            assert done.returncode == 0, done.stderr
