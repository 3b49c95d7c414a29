"""Pools of memory for KV that Mooncake's transports export; see SGLANG_MOONCAKE_CUSTOM_MEM_POOL."""

from __future__ import annotations

import importlib
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from sglang.srt.environ import envs
from sglang.srt.hardware_backend.device_kinds import CUDA, device_kind
from sglang.srt.utils.spelling import did_you_mean

if TYPE_CHECKING:
    from sglang.srt.hardware_backend.device_runtime import MemPool


class CustomMemPool(StrEnum):
    """Values of SGLANG_MOONCAKE_CUSTOM_MEM_POOL. They are compared for equality, since one contains
    another."""

    NVLINK = "NVLINK"
    """Mooncake's allocator for NVLink between nodes."""
    BAREX = "BAREX"
    """Mooncake's allocator for Barex."""
    INTRA_NODE_NVLINK = "INTRA_NODE_NVLINK"
    """Plain memory: the transport within a node exports only memory of `cudaMalloc`. Metadata is on
    the same device as the pages, and is read like them."""


_ALLOCATORS: Final = {
    CustomMemPool.NVLINK: "NVLinkAllocator",
    CustomMemPool.BAREX: "BarexAllocator",
}


def check_mooncake_custom_mem_pool_enabled() -> CustomMemPool | None:
    """The pool that SGLANG_MOONCAKE_CUSTOM_MEM_POOL names; None: it is not set. Raises ValueError
    if there is no such pool."""
    name = envs.SGLANG_MOONCAKE_CUSTOM_MEM_POOL.get()
    if name is None:
        return None
    names = [pool.value for pool in CustomMemPool]
    if name not in names:
        raise ValueError(
            f"SGLANG_MOONCAKE_CUSTOM_MEM_POOL={name!r} is unknown; use one of: "
            f"{', '.join(names)}{did_you_mean(name, names)}"
        )
    return CustomMemPool(name)


def init_mooncake_custom_mem_pool(device: str) -> MemPool | None:
    """The pool for tensors of KV on `device`, which must live as long as they; None: torch's
    memory. Raises ValueError if the device is no GPU, or the installed wheel lacks the
    allocator."""
    pool = check_mooncake_custom_mem_pool_enabled()
    if pool is None or pool not in _ALLOCATORS:
        return None
    import torch  # Callers that only check the name need no torch.

    from sglang.srt.hardware_backend.device_runtime import device_runtime

    setting = f"SGLANG_MOONCAKE_CUSTOM_MEM_POOL={pool.value}"
    if device_kind(device) is not CUDA:
        raise ValueError(f"{setting} is memory of CUDA devices, and this is {device}: unset it")
    try:
        module = importlib.import_module("mooncake.allocator")
        allocator = getattr(module, _ALLOCATORS[pool]).get_allocator(torch.device(device))
    except (ImportError, AttributeError, OSError) as error:
        raise ValueError(
            f"{setting}: the installed mooncake wheel does not have this allocator ({error}): "
            "install one that does, or unset it"
        ) from error
    return device_runtime(device).make_mem_pool(allocator.allocator())
