"""Threads that work beside the one that runs the model."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from typing import Final

import torch
from threadpoolctl import threadpool_limits

_NICENESS: Final = 10
"""A tenth of a core's time where everybody wants it, all that is left where nobody does."""


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
