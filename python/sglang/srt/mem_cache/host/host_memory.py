"""Memory for host pools: how much there is, and where buffers come from.

Buffers are touched when they are allocated, so that a machine without enough memory fails at
start and the first copies do not pay for page faults.
"""

from __future__ import annotations

import importlib
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import psutil
import torch

from sglang.srt.constants import GIB, MIB
from sglang.srt.environ import envs
from sglang.srt.hardware_backend.device_runtime import DeviceRuntime
from sglang.srt.mem_cache.host.pinned_memory import allocate_pinned
from sglang.srt.utils.progress import progress_bar

logger = logging.getLogger(__name__)

HOST_DEVICE: Final = "cpu"
"""Device of host pools."""
_CGROUP = Path("/sys/fs/cgroup")
_TOUCH_BYTES = 64 * MIB


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


_ALLOCATORS: Final = {
    "default": (__name__, "HostTensorAllocator"),
    "mooncake": (
        "sglang.srt.mem_cache.storage.mooncake_store.host_allocator",
        "MooncakeHostTensorAllocator",
    ),
}
"""Module and class by `allocator_type`. Modules of storage backends are in a layer above this one,
and are imported when they are asked for."""


def get_allocator_from_storage(allocator_type: str) -> HostTensorAllocator:
    """The allocator called `allocator_type`: `default`, or that of a storage backend.

    Raises:
        ValueError: No allocator has that name, or its library cannot be loaded.
    """
    if allocator_type not in _ALLOCATORS:
        raise ValueError(f"allocator_type {allocator_type!r}: use {' or '.join(_ALLOCATORS)}")
    module, name = _ALLOCATORS[allocator_type]
    allocator = getattr(importlib.import_module(module), name)()
    assert isinstance(allocator, HostTensorAllocator)
    return allocator


def touch(tensor: torch.Tensor) -> None:
    """Zero `tensor` (contiguous) piece by piece, with a progress bar above 1 GiB."""
    raw = tensor.view(-1).view(torch.uint8)
    bar = progress_bar(
        logger.info,
        total=raw.numel(),
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        desc="host cache memory",
        disable=raw.numel() <= GIB,
    )
    with bar:
        for start in range(0, raw.numel(), _TOUCH_BYTES):
            piece = raw[start : start + _TOUCH_BYTES]
            piece.zero_()
            bar.update(piece.numel())


def available_host_bytes() -> int:
    """Bytes that this process may still take: the machine's, or its control group's if fewer."""
    return min(psutil.virtual_memory().available, _cgroup_headroom())


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


def _cgroup_headroom() -> int:
    """Bytes left under the control group's limit; reclaimable file cache does not count as used."""
    for limit, usage, reclaimable in (
        ("memory.max", "memory.current", "inactive_file"),
        (
            "memory/memory.limit_in_bytes",
            "memory/memory.usage_in_bytes",
            "total_inactive_file",
        ),
    ):
        try:
            text = (_CGROUP / limit).read_text().strip()
            if text == "max":
                continue
            used = int((_CGROUP / usage).read_text())
            stat = (_CGROUP / usage).with_name("memory.stat").read_text()
        except (OSError, ValueError):
            continue
        words = dict(line.split(maxsplit=1) for line in stat.splitlines() if " " in line)
        return max(0, int(text) - used + int(words.get(reclaimable, "0")))
    return 1 << 62


def nbytes(dims: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes of a tensor of this shape."""
    return math.prod(dims) * dtype.itemsize
