"""Host pool memory from Mooncake's own allocator (shared memory that its clients can map)."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from sglang.srt.distributed.device_communicators.mooncake_library import load_mooncake
from sglang.srt.mem_cache.host.host_memory import HostTensorAllocator, nbytes, touch
from sglang.srt.mem_cache.host.pinned_memory import touch_and_lock
from sglang.srt.utils.device import unregister_host_memory


class MooncakeHostTensorAllocator(HostTensorAllocator):
    """Allocates from `MooncakeHostMemAllocator`; a block goes back when its tensor does."""

    def __init__(self) -> None:
        """Raises ValueError where Mooncake cannot be loaded."""
        self._source = load_mooncake().MooncakeHostMemAllocator()

    def allocate(
        self, dims: Sequence[int], dtype: torch.dtype, device: str = "cpu", *, pin: bool = False
    ) -> torch.Tensor:
        if device != "cpu":
            raise ValueError(f"allocator_type mooncake gives host memory only, not {device!r}")
        size = nbytes(dims, dtype)
        address: int = self._source.alloc(size)
        if not address:
            raise MemoryError(f"Mooncake could not allocate {size} bytes of host memory")
        block = (ctypes.c_uint8 * size).from_address(address)
        # torch keeps `block` alive as long as any view of the tensor.
        finalizer = weakref.finalize(block, _release, self._source, address, pin)
        if pin:
            # At exit both go with the process, and the driver may be gone before.
            finalizer.atexit = False
            touch_and_lock(address, size)
        tensor = torch.frombuffer(block, dtype=dtype).view(tuple(dims))
        if not pin:
            touch(tensor)
        return tensor


def _release(source: Any, address: int, is_locked: bool) -> None:
    if is_locked:
        unregister_host_memory(address)
    source.free(address)
