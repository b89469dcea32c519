"""The live canvas of `--watch`: committed tokens coloured by the pass that committed them, masked positions as dots, and dim the guesses
of the last pass that were not taken.

An observer of events: it changes nothing. Example: `with Canvas(target, console) as canvas: canvas.show(event)`.
"""

from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from spot_dlm.interfaces import Target
from spot_dlm.sequence import BlockStarted, Event, Finished, Pass
from spot_dlm.state import MASKED

COLOURS = ("bright_cyan", "bright_green", "bright_yellow", "bright_magenta", "bright_blue", "bright_red")
_HOLE, _END = "·", "∎"


class Canvas:
    """Draws one decode on a console; without a terminal only the last frame is printed."""

    def __init__(self, target: Target, console: Console, title: str = "") -> None:
        self._target, self._title = target, title
        self._console = console
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop")
        self._cells: dict[int, tuple[str, str]] = {}
        self._num_passes = self._num_tokens = 0

    def __enter__(self) -> "Canvas":
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._live.stop()
        if not self._console.is_terminal:
            self._console.print()

    def show(self, event: Event) -> None:
        """Draw what an event changed."""
        if isinstance(event, BlockStarted):
            holes = {event.start + int(p): (_HOLE, "dim") for p in event.state.masked}
            self._cells = holes | self._cells  # the pass before may have committed some already
        elif isinstance(event, Pass):
            self._show_pass(event)
        elif isinstance(event, Finished):
            last = len(event.result.prompt_ids) + len(event.result.token_ids)
            self._cells = {p: c for p, c in self._cells.items() if p < last}
        else:
            return
        self._live.update(self.render(), refresh=True)

    def _show_pass(self, event: Pass) -> None:
        state = event.acceptance.state
        start = state.block * len(state.canvas)
        guess = event.graph.canvases[int(event.graph.depths.argmax())]
        for position in state.masked.tolist() if state.block == event.graph.block else ():
            token = int(guess[position])
            self._cells[start + position] = (_HOLE, "dim") if token == MASKED else (self._token(token), "dim italic")
        colour = COLOURS[event.number % len(COLOURS)]
        for commit in event.committed:
            self._cells[commit.position] = (self._token(commit.token), colour)
        self._num_passes = event.number + 1
        self._num_tokens += len(event.committed)

    def _token(self, token: int) -> str:
        if token in self._target.spec.stop_ids:
            return _END
        text = self._target.decode([token])
        return "".join(c if c.isprintable() or c == "\n" else " " for c in text) or f"<{token}>"

    def render(self) -> Panel:
        """Return the frame: the last lines that fit the screen."""
        text = Text()
        for _, (token, style) in sorted(self._cells.items()):
            text.append(token, style)
        lines = text.wrap(self._console, max(20, self._console.width - 4))
        shown = Text("\n").join(lines[-max(3, self._console.height - 4) :])
        caption = f"{self._num_tokens} tokens in {self._num_passes} passes"
        return Panel(shown, title=Text(self._title) if self._title else None, subtitle=caption, title_align="left", subtitle_align="right")
