"""Limits the slices in flight of one user of Mooncake's transport, over all threads.

A slice is one buffer of one request. With more than 2,048 in flight to a peer, Mooncake's TCP
transport fails or hangs for a minute, and the connection stays broken. Each engine object and each
store client has its own transport, and so its own budget: `docs/transports.md`, "Beside the store".
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

MAX_SLICES: Final = 1024
"""Most slices in flight: half of the number that breaks the transport, by measurement."""


class SliceBudget:
    """A counting semaphore whose callers take several permits at once, in order of arrival.

    The order prevents small puts from starving a large get. Any thread. A thread may release
    permits that another thread acquired.
    """

    def __init__(self, capacity: int = MAX_SLICES) -> None:
        self.capacity = capacity
        self._condition = threading.Condition()
        self._waiting: deque[object] = deque()
        self._in_flight = 0
        self._peak = 0

    @property
    def in_flight(self) -> int:
        """Number of slices held now."""
        return self._in_flight

    @property
    def peak(self) -> int:
        """Largest number of slices held at the same time so far."""
        return self._peak

    def acquire(self, slices: int, deadline: float | None = None) -> bool:
        """Wait for room for `slices`, and hold them until `release`.

        Args:
            slices: Number of slices.
            deadline: `time.monotonic()` seconds; None: wait without a limit.

        Returns:
            True if they are held; False if the deadline has passed.

        Raises:
            ValueError: They can never fit; split the batch.
        """
        if not 0 <= slices <= self.capacity:
            raise ValueError(f"{slices} slices do not fit a budget of {self.capacity}")
        ticket = object()
        with self._condition:
            self._waiting.append(ticket)
            timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
            has_room = self._condition.wait_for(
                lambda: self._waiting[0] is ticket and self._in_flight + slices <= self.capacity,
                timeout,
            )
            self._waiting.remove(ticket)
            if has_room:
                self._in_flight += slices
                self._peak = max(self._peak, self._in_flight)
            self._condition.notify_all()
            return has_room

    def release(self, slices: int) -> None:
        """Release slices that `acquire` took."""
        with self._condition:
            self._in_flight -= slices
            self._condition.notify_all()

    @contextmanager
    def hold(self, slices: int) -> Iterator[None]:
        """Context that waits for room for `slices`, and holds them inside.

        Raises:
            ValueError: They can never fit; split the batch.
        """
        self.acquire(slices)
        try:
            yield
        finally:
            self.release(slices)
