"""Calls in threads of their own, for work that may fail in any way, take long or never return."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Final, Generic, TypeVar

from sglang.srt.utils.threads import leave_cores_to_model

logger = logging.getLogger(__name__)

T = TypeVar("T")
Work = Callable[[], None]

_MAX_IDLE: Final = 8


class BackgroundCall(Generic[T]):
    """Runs `work` in a daemon thread, and keeps its result or its exception.

    Any exception of `work`, also `SystemExit`, ends only that thread. A call that hangs cannot be
    ended; after `abandon` it costs one thread. A call for which the system has no thread left ends
    at once, with an error. The methods are for the owner's thread; `work` and `discard` run in
    other threads.

    Args:
        expected: Exceptions that `work` is known to raise; others are logged with a traceback.
        discard: Undoes a result that was abandoned.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[], T],
        *,
        expected: tuple[type[Exception], ...] = (),
        discard: Callable[[T], object] | None = None,
    ) -> None:
        self._name = name
        self._work = work
        self._expected = expected
        self._discard = discard
        self._results: list[T] = []
        self._lock = threading.Lock()
        """Guards `_ended` and `_is_abandoned`, so that exactly one thread sees both set."""
        self._ended = threading.Event()
        self._is_abandoned = False
        self._error: BaseException | None = None
        if (error := self._start(self._run)) is not None:
            self._error = error
            self._ended.set()

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    def wait(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds for the end. Returns whether it came."""
        return self._ended.wait(timeout)

    @property
    def error(self) -> BaseException | None:
        """The exception of `work`, or None. Valid after the end."""
        assert self.ended
        return self._error

    @property
    def result(self) -> T:
        """The result of `work`. Valid after an end without an error."""
        return self._results[0]

    def abandon(self) -> None:
        """Give up the call: `discard` gets the result, now or after the end."""
        with self._lock:
            self._is_abandoned = True
            ended = self.ended
        if ended and self._results and self._discard is not None:
            self._start(self._undo)

    def _start(self, target: Callable[[], None]) -> RuntimeError | None:
        """Run `target` in a thread; why there is none."""
        try:
            threading.Thread(target=target, name=self._name, daemon=True).start()
        except RuntimeError as error:
            logger.warning("%s: %s", self._name, error)
            return error
        return None

    def _run(self) -> None:
        try:
            leave_cores_to_model()
            self._results.append(self._work())
        except BaseException as error:
            if not isinstance(error, self._expected):
                logger.warning("%s failed", self._name, exc_info=True)
            self._error = error
        with self._lock:
            self._ended.set()
            is_abandoned = self._is_abandoned
        if is_abandoned:
            self._undo()

    def _undo(self) -> None:
        try:
            if self._results and self._discard is not None:
                self._discard(self._results[0])
        except BaseException:
            logger.warning("%s could not be undone", self._name, exc_info=True)


class CallThreads:
    """Runs each call at once, in an idle thread or a new one. Any thread may submit.

    The threads are daemons, so a thread that hangs in a library does not keep the process from
    ending. Work must not raise. `close` ends idle threads; the others end with their work.
    """

    def __init__(self, name: str, enter: Callable[[], None] = lambda: None) -> None:
        """Args:
        enter: Called once in each thread, before its work.
        """
        self._name = name
        self._enter = enter
        self._idle: list[SimpleQueue[Work | None]] = []
        self.num_busy = 0
        """Number of calls in progress."""
        self._closed = False
        self._lock = threading.Lock()

    def submit(self, work: Work) -> None:
        """Run `work` now, in another thread. Raises RuntimeError if the system has no thread left;
        `work` does not run."""
        with self._lock:
            assert not self._closed, f"{self._name}: closed"
            self.num_busy += 1
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
                    self.num_busy -= 1
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
                self.num_busy -= 1
                if self._closed or len(self._idle) >= _MAX_IDLE:
                    return
                self._idle.append(queue)
