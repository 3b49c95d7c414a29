"""Limits the slices that one Mooncake client has in flight, over all threads.

A slice is one buffer of one key. With more than about 2,048 slices in flight to a peer, Mooncake's
TCP transport fails or hangs for a minute, and the client stays broken.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

MAX_SLICES: Final = 1024
"""Half of the number that broke the transport in a measurement."""


class SliceBudget:
    """A counting semaphore that grants several permits at once, in order of arrival.

    Without the order, small puts could starve a large get. Any thread.
    """

    def __init__(self, capacity: int = MAX_SLICES) -> None:
        self.capacity = capacity
        self._condition = threading.Condition()
        self._waiting: deque[object] = deque()
        self._in_flight = 0
        self._peak = 0

    @property
    def in_flight(self) -> int:
        """Slices in flight now."""
        return self._in_flight

    @property
    def peak(self) -> int:
        """Most slices that were ever in flight at once."""
        return self._peak

    @contextmanager
    def hold(self, slices: int) -> Iterator[None]:
        """Wait until `slices` fit the budget, and hold them inside the block.

        Raises:
            ValueError: `slices` exceeds the budget; split the batch.
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
