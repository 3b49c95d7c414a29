"""CPU time of a thread or a process, with a resolution of nanoseconds.

`/proc` and `psutil` count ticks of 10 ms, and a request takes less than one tick of a process.
Linux has a clock for each thread and process; its number follows from the id
(`clock_getcpuclockid(3)`).
"""

from __future__ import annotations

import time


def thread_seconds(tid: int) -> float:
    """CPU time of a thread of this process, by native id. Raises OSError if there is none."""
    return time.clock_gettime((~tid << 3) | 6)


def process_seconds(pid: int) -> float:
    """CPU time of all threads of a process. Raises OSError if there is none."""
    return time.clock_gettime((~pid << 3) | 2)
