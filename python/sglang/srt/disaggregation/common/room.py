"""A room as a decode server has it: whom it asks, and how it ends without success."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Final

ABORTED: Final = "the request was aborted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A rank of a prefill server, and how it knows who asks.

    Attributes:
        where: The prefill server, for errors.
        endpoint: Of the rank.
        room: There.
        reader: See `Reader`.
        part: Of those of the reader's ranks that ask this one, which is asking.
        num_parts: How many ask.
    """

    where: str
    endpoint: str
    room: int
    reader: str
    part: int = 0
    num_parts: int = 1


class RoomFailed(RuntimeError):
    """The prompt does not come; the message says which step failed, and why."""


class ReadFailed(RoomFailed):
    """The transport did not move what was to be read."""


class Cancellation:
    """Says that a prompt is not wanted any more, and why. Any thread."""

    def __init__(self) -> None:
        self.why = ABORTED
        """Set before `is_set`; the first reason counts."""
        self._event = threading.Event()
        self._lock = threading.Lock()

    def set(self, why: str) -> None:
        with self._lock:
            if not self._event.is_set():
                self.why = why
                self._event.set()

    def is_set(self) -> bool:
        return self._event.is_set()

    def wait(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds; whether it is set then."""
        return self._event.wait(timeout)
