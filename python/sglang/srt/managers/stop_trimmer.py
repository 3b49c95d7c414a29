"""Streaming around stop strings: nothing is sent that may turn out to be part of one."""

from __future__ import annotations

from collections.abc import Sequence


class StopTrimmer:
    """Holds back the tail of a text that a stop string could begin in, and cuts the match.

    The scheduler decides that a stop string was met; this class only decides how much text is
    shown. State: the held text, shorter than the longest stop string.
    """

    def __init__(self, stops: Sequence[str], *, keep_match: bool, last_match: bool) -> None:
        """Trim around `stops`.

        Args:
            stops: The request's stop strings; none makes every call pass its text on.
            keep_match: The matched string stays in the text (`no_stop_trim`).
            last_match: The text may hold earlier matches that did not count, because the request
                asked for a least number of tokens.
        """
        self._stops = () if keep_match else tuple(stops)
        self._last_match = last_match
        self._held = ""

    def feed(self, text: str) -> str:
        """The part of everything held and `text` that is certain to be shown."""
        if not self._stops:
            return text
        text = self._held + text
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self, text: str, matched: int | str | None) -> str:
        """The rest: `text` is the last one, `matched` the stop string that ended the request."""
        text = self._held + text
        self._held = ""
        if not self._stops or not isinstance(matched, str):
            return text
        position = text.rfind(matched) if self._last_match else text.find(matched)
        return text if position < 0 else text[:position]


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of `text` that `stop` begins with, or holds whole.

    A whole stop string is held back too: it ends the request, and the message that says so may
    be the next one.
    """
    position = text.find(stop[0], max(len(text) - len(stop), 0))
    while position >= 0:
        if stop.startswith(text[position:]):
            return len(text) - position
        position = text.find(stop[0], position + 1)
    return 0
