"""Threads that work beside the one that runs the model."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from typing import Final

import torch
from threadpoolctl import threadpool_limits

_SWITCH_S: Final = 0.0005
_NICENESS: Final = 10
"""A tenth of a core's time where everybody wants it, all that is left where nobody does."""


def share_interpreter() -> None:
    """Let threads that need the interpreter for moments only, between calls that release it, have
    it sooner; for the whole process.

    By default each such moment waits 5 ms while another thread computes in Python: reads from a
    store in shared memory, 6.0 GB/s alone, were 0.6 GB/s beside one, and are 3.8 so. Where the
    model computes on the CPU, being interrupted costs 3% of throughput instead.
    """
    sys.setswitchinterval(_SWITCH_S)


def leave_cores_to_model() -> None:
    """Let torch's operations in the calling thread use that thread alone; call it first there.

    On a CPU every thread that copies would otherwise get an OpenMP team as large as the
    forward's, and each of the forward's parallel regions would wait for a core behind it. The
    forward's own team stays as it is: OpenMP keeps the size of a team for each thread.
    """
    torch.get_num_threads()  # gives the thread its default, which must not come later
    threadpool_limits(1, user_api="openmp")


def give_way() -> None:
    """Let the calling thread, whose work nobody waits for, run when others do not; for good.

    On Linux alone, where threads have priorities of their own. A sandbox may forbid it.
    """
    if sys.platform == "linux":
        tid = threading.get_native_id()
        with contextlib.suppress(OSError):
            niceness = max(_NICENESS, os.getpriority(os.PRIO_PROCESS, tid))
            os.setpriority(os.PRIO_PROCESS, tid, niceness)
