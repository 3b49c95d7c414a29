"""Memory for host pools: how much there is, and where buffers come from.

Buffers are touched when they are allocated, so that a machine without enough memory fails at
start and the first copies do not pay for page faults.

Page-locking memory that has never been touched is slow: one thread in the kernel finds and zeroes
the pages one by one. Threads therefore touch it first, in huge pages where the kernel gives
them, and lock it afterwards; benchmark/results has the gain.
"""

from __future__ import annotations

import ctypes
import logging
import math
import mmap
import os
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from typing import Any, Final

import torch

from sglang.srt.constants import GIB, MIB
from sglang.srt.distributed.device_communicators.mooncake_library import load_mooncake
from sglang.srt.environ import envs
from sglang.srt.hardware_backend.device_runtime import DeviceRuntime
from sglang.srt.utils.process import host_memory
from sglang.srt.utils.progress import progress_bar

logger = logging.getLogger(__name__)

HOST_DEVICE: Final = "cpu"
"""Device of host pools."""
_TOUCH_BYTES: Final = 64 * MIB
_HUGE_PAGE: Final = 2 * MIB
_MAX_THREADS: Final = 16


class HostTensorAllocator:
    """Allocates the buffers of host pools. A subclass may take them from elsewhere."""

    def allocate(
        self,
        dims: Sequence[int],
        dtype: torch.dtype,
        device: str = HOST_DEVICE,
        *,
        pinned_by: DeviceRuntime | None = None,
    ) -> torch.Tensor:
        """A zeroed, contiguous tensor, page-locked by `pinned_by`. Shows progress above 1 GiB."""
        if pinned_by is not None:
            return allocate_pinned(nbytes(dims, dtype), pinned_by).view(dtype).view(tuple(dims))
        tensor = torch.empty(tuple(dims), dtype=dtype, device=device)
        touch(tensor)
        return tensor


class MooncakeHostTensorAllocator(HostTensorAllocator):
    """Allocates shared memory, which Mooncake's clients can map, from `MooncakeHostMemAllocator`. A
    block is freed together with its tensor."""

    def __init__(self) -> None:
        """Raises ValueError if Mooncake cannot be loaded."""
        self._source = load_mooncake().MooncakeHostMemAllocator()

    def allocate(
        self,
        dims: Sequence[int],
        dtype: torch.dtype,
        device: str = HOST_DEVICE,
        *,
        pinned_by: DeviceRuntime | None = None,
    ) -> torch.Tensor:
        if device != HOST_DEVICE:
            raise ValueError(f"allocator_type mooncake gives host memory only, not {device!r}")
        size = nbytes(dims, dtype)
        address: int = self._source.alloc(size)
        if not address:
            raise MemoryError(f"Mooncake could not allocate {size} bytes of host memory")
        block = (ctypes.c_uint8 * size).from_address(address)
        # torch keeps `block` alive as long as the tensor or a view of it.
        finalizer = weakref.finalize(block, _give_back, self._source, address, pinned_by)
        if pinned_by is not None:
            # At exit the process frees both, and the driver may already have shut down.
            finalizer.atexit = False
            touch_and_lock(address, size, pinned_by)
        tensor = torch.frombuffer(block, dtype=dtype).view(tuple(dims))
        if pinned_by is None:
            touch(tensor)
        return tensor


def _give_back(source: Any, address: int, pinned_by: DeviceRuntime | None) -> None:
    if pinned_by is not None:
        pinned_by.unregister_host_memory(address)
    source.free(address)


_ALLOCATORS: Final = {"default": HostTensorAllocator, "mooncake": MooncakeHostTensorAllocator}
"""Classes by `allocator_type`."""


def get_allocator_from_storage(allocator_type: str) -> HostTensorAllocator:
    """The allocator called `allocator_type`: `default`, or that of a storage backend.

    Raises:
        ValueError: No allocator has that name, or its library cannot be loaded.
    """
    if allocator_type not in _ALLOCATORS:
        raise ValueError(f"allocator_type {allocator_type!r}: use {' or '.join(_ALLOCATORS)}")
    return _ALLOCATORS[allocator_type]()


def touch(tensor: torch.Tensor) -> None:
    """Zero `tensor` (contiguous) piece by piece, with a progress bar above 1 GiB."""
    raw = tensor.view(-1).view(torch.uint8)
    with _progress(raw.numel()) as bar:
        for start in range(0, raw.numel(), _TOUCH_BYTES):
            piece = raw[start : start + _TOUCH_BYTES]
            piece.zero_()
            bar.update(piece.numel())


def _progress(size: int) -> Any:
    """A progress bar in the log, from 1 GiB on."""
    return progress_bar(
        logger.info,
        total=size,
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        desc="host cache memory",
        disable=size <= GIB,
    )


def available_host_bytes() -> int:
    """Bytes that this process may still take: the machine's, or its control group's if fewer."""
    return host_memory()[0]


def spare_host_bytes() -> int:
    """`available_host_bytes()` less HICACHE_HOST_MEMORY_RESERVE_BYTES, which stay free."""
    return max(0, available_host_bytes() - envs.HICACHE_HOST_MEMORY_RESERVE_BYTES.get())


def check_fits_host_memory(needed: int, what: str, remedy: str) -> None:
    """Raise ValueError, naming `remedy`, if `needed` bytes would not leave the reserve free."""
    reserve = envs.HICACHE_HOST_MEMORY_RESERVE_BYTES.get()
    available = available_host_bytes()
    if needed > available - reserve:
        raise ValueError(
            f"{what} needs {needed / GIB:.2f} GiB of host memory, but only "
            f"{max(0, available - reserve) / GIB:.2f} GiB can be taken ({available / GIB:.2f} GiB "
            f"available, HICACHE_HOST_MEMORY_RESERVE_BYTES={reserve}); {remedy}"
        )


def nbytes(dims: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes of a tensor of this shape."""
    return math.prod(dims) * dtype.itemsize


# -- page-locked memory --------------------------------------------------------------------------


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
    with (
        _progress(size) as bar,
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
