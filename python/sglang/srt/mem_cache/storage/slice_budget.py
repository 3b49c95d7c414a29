"""Bounds how many slices one Mooncake client has in flight, over all threads.

A slice is one buffer of one key. Beyond about 2,048 in flight to a peer Mooncake's TCP transport
fails or hangs for a minute, and the client stays broken after that.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

MAX_SLICES: Final = 1024
"""Half of what was measured to break the transport."""


class SliceBudget:
    """A counting semaphore that takes several permits at once, in order of arrival.

    Order matters: without it small puts would starve a large get for ever. Any thread.
    """

    def __init__(self, capacity: int = MAX_SLICES) -> None:
        self.capacity = capacity
        self._condition = threading.Condition()
        self._waiting: deque[object] = deque()
        self._in_flight = 0
        self._peak = 0

    @property
    def in_flight(self) -> int:
        """Slices held now."""
        return self._in_flight

    @property
    def peak(self) -> int:
        """Most slices ever held at once."""
        return self._peak

    @contextmanager
    def hold(self, slices: int) -> Iterator[None]:
        """Wait for room for `slices`, and hold them for the length of the block.

        Raises:
            ValueError: It can never fit; split the batch.
        """
        if not 0 <= slices <= self.capacity:
            raise ValueError(f"{slices} slices do not fit a budget of {self.capacity}")
        ticket = object()
        with self._condition:
            self._waiting.append(ticket)
            self._condition.wait_for(
                lambda: self._waiting[0] is ticket and self._in_flight + slices <= self.capacity
            )
            self._waiting.popleft()
            self._in_flight += slices
            self._peak = max(self._peak, self._in_flight)
            self._condition.notify_all()
        try:
            yield
        finally:
            with self._condition:
                self._in_flight -= slices
                self._condition.notify_all()
