"""Page-locked memory in large pieces that comes up fast.

Page-locking memory that has never been touched is slow: one thread in the kernel finds and zeroes
the pages one by one. Here threads touch the memory first, in huge pages where the kernel gives
them, and lock it afterwards. See benchmark/results for what that brings.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import weakref
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from typing import Final

import torch

from sglang.srt.constants import GIB, MIB
from sglang.srt.hardware_backend.device_runtime import DeviceRuntime
from sglang.srt.utils.progress import progress_bar

logger = logging.getLogger(__name__)

_HUGE_PAGE: Final = 2 * MIB
_TOUCH_BYTES: Final = 64 * MIB
_MAX_THREADS: Final = 16


def allocate_pinned(size: int, runtime: DeviceRuntime) -> torch.Tensor:
    """Zeroed bytes, page-locked by `runtime` in one registration: uint8 `[size]`.

    They start on a huge page. Shows progress above 1 GiB. The memory goes back with the last view
    of the tensor.

    Raises:
        MemoryError: The machine has too little memory, or the driver refused to lock it.
    """
    region, offset = _map(size)
    block = (ctypes.c_uint8 * size).from_buffer(region, offset)
    address = ctypes.addressof(block)
    touch_and_lock(address, size, runtime)
    # Locked memory is unlocked before it is unmapped: the finalizer holds the mapping. At exit
    # both go with the process, and the driver may be gone before.
    weakref.finalize(block, _release, address, region, runtime).atexit = False
    return torch.frombuffer(block, dtype=torch.uint8)


def touch_and_lock(address: int, size: int, runtime: DeviceRuntime) -> None:
    """Zero and page-lock memory that was never touched. Shows progress above 1 GiB.

    Raises MemoryError where the driver refuses.
    """
    _touch_in_threads(address, size, runtime.host_cpus_near_device())
    runtime.register_host_memory(address, size)


def _map(size: int) -> tuple[mmap.mmap, int]:
    """Private anonymous memory, and where its first huge page starts in it."""
    try:
        region = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"cannot map {size} bytes of host memory: {error}") from None
    with suppress(OSError):
        # A kernel without huge pages refuses; small ones do as well, only slower.
        region.madvise(mmap.MADV_HUGEPAGE)
    start = ctypes.addressof(ctypes.c_uint8.from_buffer(region))
    return region, -start % _HUGE_PAGE


def _touch_in_threads(address: int, size: int, cpus_near_device: frozenset[int]) -> None:
    """Zero memory for the first time, on CPUs near the device if those are known."""
    own = os.sched_getaffinity(0)
    cpus = (cpus_near_device & own) or own
    bar = progress_bar(
        logger.info,
        total=size,
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        desc="host cache memory",
        disable=size <= GIB,
    )
    with (
        bar,
        ThreadPoolExecutor(
            min(_MAX_THREADS, len(cpus)),
            thread_name_prefix="touch-host-memory",
            initializer=os.sched_setaffinity,
            initargs=(0, cpus),
        ) as threads,
    ):
        for done in as_completed(
            threads.submit(_zero, address + start, min(_TOUCH_BYTES, size - start))
            for start in range(0, size, _TOUCH_BYTES)
        ):
            bar.update(done.result())


def _zero(address: int, size: int) -> int:
    ctypes.memset(address, 0, size)  # releases the GIL
    return size


def _release(address: int, region: mmap.mmap, runtime: DeviceRuntime) -> None:
    runtime.unregister_host_memory(address)
    del region  # was held until here, so that it is unmapped after that
