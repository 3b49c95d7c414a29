"""Settings of threads that run beside the model's thread."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from sglang.srt.utils.loaded_libraries import mappings

_SWITCH_S: Final = 0.0005
_OPENMP: Final = re.compile(r"/lib(gomp|i?omp5?)[-.][^/]*\Z")
"""Files of OpenMP's libraries; torch brings its own."""
_NICENESS: Final = 10
"""About a tenth of the time of a busy core, and all of an idle one."""


def started_pool(
    num_threads: int, prefix: str, initializer: Callable[[], None] | None = None
) -> ThreadPoolExecutor:
    """A pool of `num_threads` threads that run already, so that `submit` starts none.

    A pool otherwise starts its threads in `submit`. If the system then has no thread left, `submit`
    raises, but the work stays queued and may run much later, on memory that has another owner.

    Raises:
        RuntimeError: The system has no thread left.
    """
    pool = ThreadPoolExecutor(num_threads, prefix, initializer)
    have_started = threading.Event()
    try:
        for _ in range(num_threads):
            pool.submit(have_started.wait)  # No thread is idle meanwhile, so each starts one.
    except RuntimeError:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    finally:
        have_started.set()
    return pool


def shorten_switch_interval() -> None:
    """Shorten the switch interval of the interpreter for the whole process.

    Threads that copy and read need the interpreter lock briefly between calls that release it. The
    default makes a thread wait 5 ms for the lock while another runs Python code. Measured: reads
    from a store in shared memory reach 6.0 GB/s alone, 0.6 GB/s beside a thread that runs Python,
    and 3.8 GB/s with the shorter interval. A model on the CPU would lose 3% of its throughput.
    """
    sys.setswitchinterval(_SWITCH_S)


def leave_cores_to_model() -> None:
    """Limit torch's operations in the calling thread to one core. Call it first in the thread.

    Otherwise each copying thread would get an OpenMP team as large as the forward's, and the
    forward's parallel regions would wait for cores. The forward's team stays unchanged, because
    OpenMP keeps the size of a team for each thread.
    """
    import torch  # Processes without torch import this module too.

    torch.get_num_threads()  # Sets the thread's default now, so that it cannot override the limit.
    for path in {path for _, _, path in mappings() if _OPENMP.search(path)}:
        ctypes.CDLL(path).omp_set_num_threads(1)


def lower_priority() -> None:
    """Lower the priority of the calling thread for good. For work that no request waits for.

    Only on Linux, where each thread has a priority. A sandbox may forbid it; then nothing happens.
    """
    if sys.platform == "linux":
        tid = threading.get_native_id()
        with contextlib.suppress(OSError):
            niceness = max(_NICENESS, os.getpriority(os.PRIO_PROCESS, tid))
            os.setpriority(os.PRIO_PROCESS, tid, niceness)
