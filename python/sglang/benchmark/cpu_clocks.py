"""CPU time of a thread or a process, in nanoseconds' resolution.

`/proc` and `psutil` count ticks of 10 ms: what a request takes of a process is less than one.
Linux has a clock for each thread and process, whose number is made from the id
(`clock_getcpuclockid(3)`).
"""

from __future__ import annotations

import time


def thread_seconds(tid: int) -> float:
    """CPU time so far of a thread of this process, by its native id. OSError: there is none."""
    return time.clock_gettime((~tid << 3) | 6)


def process_seconds(pid: int) -> float:
    """CPU time so far of a process, all its threads. OSError: there is none."""
    return time.clock_gettime((~pid << 3) | 2)
