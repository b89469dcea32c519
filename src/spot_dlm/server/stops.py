"""Stop strings: text up to the first of them, however it is cut into pieces, and nothing that might still become one.

Example: `StopFilter(["\\n\\n"])` gives "a" for the pieces "a\\n" and "\\n b", and stops.
"""

from collections.abc import Sequence


class StopFilter:
    """Passes text on until a stop string is complete; the one that ends first counts, of those the one that begins first.

    Args:
        stops: texts, none of them empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self._held = tuple(stops), ""
        self.is_stopped = False

    def feed(self, text: str) -> str:
        """Return what a piece makes certain to stand before any stop string."""
        if self.is_stopped:
            return ""
        text = self._held + text
        found = [(text.find(stop) + len(stop), -len(stop)) for stop in self._stops if stop in text]
        if found:
            self.is_stopped, self._held = True, ""
            end, size = min(found)
            return text[: end + size]
        waiting = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - waiting :]
        return text[: len(text) - waiting]

    def end(self) -> str:
        """Return what was held back; nothing follows any more."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest beginning of `stop`, not all of it, that the text ends with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
