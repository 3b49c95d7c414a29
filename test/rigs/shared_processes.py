"""Processes of a fork server that several threads of this one start, poll and join.

`multiprocessing` has no lock. Each start of a process reads the ends of all others, and an end can
be read once: a thread that reads it second takes 255 for the status.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from multiprocessing import connection, popen_forkserver
from multiprocessing.context import ForkServerProcess
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Final


class SharedProcess(ForkServerProcess):
    """A `multiprocessing` process with the start method `forkserver`, for any thread."""

    @staticmethod
    def _Popen(process_obj: BaseProcess) -> popen_forkserver.Popen:
        return _Popen(process_obj)


class _Popen(popen_forkserver.Popen):
    """Lets one thread at a time read the end."""

    def __init__(self, process_obj: BaseProcess) -> None:
        self._reads = threading.Lock()
        super().__init__(process_obj)

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        if flag != os.WNOHANG:
            connection.wait([self.sentinel])
        with self._reads:
            return super().poll()


class _WithoutProgram:
    """See `without_program`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_inside = 0
        self._program: ModuleType

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            if not self._num_inside:
                # `mock.patch.dict` would also drop the modules that other threads import meanwhile.
                self._program = sys.modules["__main__"]
                sys.modules["__main__"] = ModuleType("__main__")
            self._num_inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_inside -= 1
                if not self._num_inside:
                    sys.modules["__main__"] = self._program


without_program: Final = _WithoutProgram()
"""Context in which started processes do not import this one's program, a test file, again. Threads
may be in it at the same time: the last one to leave brings the program back."""
