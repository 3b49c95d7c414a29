"""Threads for calls that may hang. A caller submits a call, and limits its own wait."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Final

_MAX_IDLE: Final = 8

Work = Callable[[], None]


class CallThreads:
    """Runs each call at once, in an idle thread or a new one. Any thread may submit.

    The threads are daemons, so a thread that hangs in a library does not keep the process from
    ending. Work must not raise. `close` ends idle threads; the others end with their work.
    """

    def __init__(self, name: str, enter: Callable[[], None] = lambda: None) -> None:
        """Args:
        name: Name of every thread.
        enter: Called once in each thread, before its work.
        """
        self._name = name
        self._enter = enter
        self._idle: list[SimpleQueue[Work | None]] = []
        self._num_busy = 0
        self._closed = False
        self._lock = threading.Lock()

    @property
    def num_busy(self) -> int:
        """Number of calls in progress."""
        return self._num_busy

    def submit(self, work: Work) -> None:
        """Run `work` now, in another thread.

        Raises:
            RuntimeError: The system has no thread left; `work` does not run.
        """
        with self._lock:
            assert not self._closed, f"{self._name}: closed"
            self._num_busy += 1
            queue = self._idle.pop() if self._idle else None
        if queue is None:
            queue = SimpleQueue()
            thread = threading.Thread(
                target=self._serve, args=(queue,), name=self._name, daemon=True
            )
            try:
                thread.start()
            except RuntimeError:
                with self._lock:
                    self._num_busy -= 1
                raise
        queue.put(work)

    def close(self) -> None:
        """Accept no more work, and end the idle threads. Idempotent."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for queue in idle:
            queue.put(None)

    def _serve(self, queue: SimpleQueue[Work | None]) -> None:
        self._enter()
        while (work := queue.get()) is not None:
            work()
            with self._lock:
                self._num_busy -= 1
                if self._closed or len(self._idle) >= _MAX_IDLE:
                    return
                self._idle.append(queue)
