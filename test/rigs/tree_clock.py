"""CPU time of a process with all its descendants."""

from __future__ import annotations

import contextlib

import psutil


class TreeClock:
    """Adds up what samples find. The time of a process after its last sample is not counted.

    Args:
        pid: The root of the tree.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._seconds: dict[psutil.Process, float] = {}

    @property
    def seconds(self) -> float:
        """CPU seconds of all processes that have been in the tree."""
        return sum(self._seconds.values())

    def sample(self) -> None:
        """Read the clocks of the processes that live."""
        with contextlib.suppress(psutil.Error):
            root = psutil.Process(self._pid)
            for process in (root, *root.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    times = process.cpu_times()
                    self._seconds[process] = times.user + times.system
