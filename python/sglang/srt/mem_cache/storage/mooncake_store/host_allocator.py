"""Host pool memory from Mooncake's allocator: shared memory that its clients can map."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from sglang.srt.distributed.device_communicators.mooncake_library import load_mooncake
from sglang.srt.hardware_backend.device_runtime import DeviceRuntime
from sglang.srt.mem_cache.host.host_memory import (
    HOST_DEVICE,
    HostTensorAllocator,
    nbytes,
    touch,
    touch_and_lock,
)


class MooncakeHostTensorAllocator(HostTensorAllocator):
    """Allocates from `MooncakeHostMemAllocator`. A block is freed together with its tensor."""

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
        finalizer = weakref.finalize(block, _release, self._source, address, pinned_by)
        if pinned_by is not None:
            # At exit the process frees both, and the driver may already have shut down.
            finalizer.atexit = False
            touch_and_lock(address, size, pinned_by)
        tensor = torch.frombuffer(block, dtype=dtype).view(tuple(dims))
        if pinned_by is None:
            touch(tensor)
        return tensor


def _release(source: Any, address: int, pinned_by: DeviceRuntime | None) -> None:
    if pinned_by is not None:
        pinned_by.unregister_host_memory(address)
    source.free(address)
