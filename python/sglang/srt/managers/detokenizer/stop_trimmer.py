"""Streaming around stops: text that may turn out to be part of a stop is held back."""

from __future__ import annotations

from collections.abc import Sequence


class StopTrimmer:
    """Holds back the tail of a text that a stop could begin in, and cuts the stop.

    The scheduler decides whether a stop was met, and where a pattern may begin to match. The
    trimmer itself finds the tail that may be the start of a stop string. State: the held text.
    """

    def __init__(self, stops: Sequence[str], *, keep_match: bool) -> None:
        """Trim around `stops`.

        Args:
            stops: The request's stop strings.
            keep_match: The match that stops the request stays in the text (`no_stop_trim`):
                every call passes its text on.
        """
        self._stops = tuple(stops)
        self._keep_match = keep_match
        self._held = ""
        self._num_shown = 0
        """Characters that were sent."""

    def feed(self, text: str, shown_chars: int | None = None) -> str:
        """Add `text` to the held text; return the part of both that is certain to be shown.

        Args:
            text: New text; it continues the text of the last call.
            shown_chars: `RequestOutput.shown_chars`.
        """
        if self._keep_match:
            return text
        text = self._held + text
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        return self._show(text, len(text) - keep, shown_chars)

    def finish(self, text: str, shown_chars: int | None = None) -> str:
        """The rest of the text. Text that is not shown now is dropped."""
        if self._keep_match:
            return text
        text = self._held + text
        return self._show(text, len(text), shown_chars)

    def _show(self, text: str, count: int, shown_chars: int | None) -> str:
        if shown_chars is not None:
            count = min(count, max(shown_chars - self._num_shown, 0))
        self._num_shown += count
        self._held = text[count:]
        return text[:count]


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of `text` that `stop` begins with, all of `stop` included.

    A whole stop string is held back too: it ends the request, perhaps only with the next message.
    """
    position = text.find(stop[0], max(len(text) - len(stop), 0))
    while position >= 0:
        if stop.startswith(text[position:]):
            return len(text) - position
        position = text.find(stop[0], position + 1)
    return 0
