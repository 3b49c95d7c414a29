"""One call in a thread of its own: for what may fail in any way, take long or never return."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from sglang.srt.utils.threads import leave_cores_to_model

logger = logging.getLogger(__name__)

T = TypeVar("T")


class BackgroundCall(Generic[T]):
    """Runs `work` in a daemon thread, and keeps what comes of it.

    Whatever `work` raises ends with that thread, `SystemExit` too. A call that hangs is not ended:
    abandon it, and it costs a thread. All but `work` and `discard` is for one owner's thread.

    Args:
        name: Of the thread.
        work: What to do.
        expected: What `work` is known to raise; anything else goes to the log with its traceback.
        discard: Undoes a result that nobody takes; runs in a thread beside the owner's.
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
        """The result, once there is one."""
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        """Makes one side see that both have happened: the end, and that it was abandoned."""
        self._ended = threading.Event()
        self._is_abandoned = False
        threading.Thread(target=self._run, name=name, daemon=True).start()

    @property
    def ended(self) -> bool:
        """Whether `work` has returned or raised."""
        return self._ended.is_set()

    def wait(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds for the end; whether it came."""
        return self._ended.wait(timeout)

    @property
    def error(self) -> BaseException | None:
        """What `work` raised. To be asked once it has ended."""
        assert self.ended
        return self._error

    @property
    def result(self) -> T:
        """What `work` returned. To be asked once it has ended without an error."""
        return self._results[0]

    def abandon(self) -> None:
        """Do not take the result, whether it is there or not: `discard` gets it."""
        with self._lock:
            self._is_abandoned = True
            ended = self.ended
        if ended and self._results and self._discard is not None:
            threading.Thread(target=self._undo, name=self._name, daemon=True).start()

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
