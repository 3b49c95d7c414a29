"""CUDA devices through `torch.cuda`."""

from __future__ import annotations

import bisect
import functools
import importlib.util
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final

import torch
from torch.profiler import ProfilerActivity

from sglang.srt.hardware_backend.accelerator import AcceleratorRuntime
from sglang.srt.hardware_backend.device_kinds import CUDA
from sglang.srt.hardware_backend.device_runtime import MemPool

_EARLY_STARTS_FROM: Final = (9, 0)
"""Compute capability of Hopper."""
_PCI_DEVICES: Final = Path("/sys/bus/pci/devices")


class CudaRuntime(AcceleratorRuntime):
    """One CUDA device; `cuda` without an index is the current one."""

    kind = CUDA

    def __init__(self, device: str, api: Any = torch.cuda) -> None:
        """Args:
        api: `torch.cuda`, or a recorder in a test.
        """
        self._target = torch.device(device)
        super().__init__(self._target, api)

    def why_absent(self) -> str | None:
        return None if self._api.is_available() else "torch sees no CUDA device here"

    def stage_to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_cuda:
            return tensor
        from sglang.srt.hardware_backend.cuda import small_copies

        if small_copies.suits(tensor):
            return small_copies.upload(tensor, self._target)
        # torch's cache owns the page-locked copy, and reuses it only after the transfer.
        return tensor.pin_memory().to(self._target, non_blocking=True)

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        from sglang.srt.hardware_backend.cuda import small_copies

        if small_copies.suits(tensor):
            return small_copies.download(tensor)
        return super().download(tensor)

    def leaf_digests(self, matrices: Sequence[torch.Tensor]) -> list[bytes]:
        from sglang.srt.hardware_backend.cuda import xxh3

        self._hash_stream.follow()
        with self._api.device(self._target), self._hash_stream.use():
            return xxh3.leaf_digests(matrices)

    def handle_of(self, stream: Any) -> int:
        """The `cudaStream_t`."""
        return int(stream.cuda_stream)

    @property
    def pins_memory(self) -> bool:
        return bool(self._api.is_available())

    def register_host_memory(self, address: int, size: int) -> None:
        """See `DeviceRuntime.register_host_memory`. Releases the GIL."""
        code = self._api.cudart().cudaHostRegister(address, size, 0)
        if int(code):
            raise MemoryError(
                f"cudaHostRegister of {size} bytes failed with CUDA error {int(code)}"
            )

    def unregister_host_memory(self, address: int) -> None:
        self._api.cudart().cudaHostUnregister(address)

    @property
    def starts_kernels_early(self) -> bool:
        return bool(self._api.get_device_capability(self._target) >= _EARLY_STARTS_FROM)

    @functools.cached_property
    def shared_memory(self) -> int:
        gpu: Any = self._api.get_device_properties(self._target)
        return int(gpu.shared_memory_per_multiprocessor)

    @property
    def profiled_activity(self) -> ProfilerActivity:
        return ProfilerActivity.CUDA

    def on_kernel_compiled(self, report: Callable[[str], None]) -> None:
        if importlib.util.find_spec("triton") is None:
            return
        from triton import knobs

        def compiled(*, fn: Any, **_: Any) -> None:
            report(fn.name)

        knobs.runtime.jit_post_compile_hook = compiled

    def can_read(self, index: int) -> bool:
        return bool(self._api.can_device_access_peer(self._target, index))

    def allocations_of(self, tensors: Iterable[torch.Tensor]) -> dict[int, int]:
        """Segments of torch's allocator: each is one allocation of the driver, and holds many
        tensors. Memory from elsewhere is taken to be an allocation by itself."""
        segments = sorted(
            (segment["address"], segment["total_size"]) for segment in self._api.memory_snapshot()
        )
        found: dict[int, int] = {}
        for address, size in super().allocations_of(tensors).items():
            index = bisect.bisect_right(segments, (address, sys.maxsize)) - 1
            start, length = segments[index] if index >= 0 else (0, 0)
            is_inside = start <= address and address + size <= start + length
            found.update([(start, length) if is_inside else (address, size)])
        return found

    def make_mem_pool(self, allocator: object) -> MemPool:
        return _CudaMemPool(self._api, allocator, self._target)

    def host_cpus_near_device(self) -> frozenset[int]:
        """CPUs of the current device's NUMA node; empty: unknown."""
        # torch's type stubs lack some of the properties.
        gpu: Any = self._api.get_device_properties(self._api.current_device())
        try:
            address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
            ranges = (_PCI_DEVICES / address / "local_cpulist").read_text().strip()
            return frozenset(
                cpu
                for first, _, last in (part.partition("-") for part in ranges.split(","))
                for cpu in range(int(first), int(last or first) + 1)
            )
        except (OSError, ValueError, AttributeError):
            return frozenset()


class _CudaMemPool:
    def __init__(self, api: Any, allocator: object, device: torch.device) -> None:
        self._api = api
        self._device = None if device.index is None else device
        """None means the current device: torch accepts no device without an index here."""
        self._pool = api.MemPool(allocator)

    def use(self) -> AbstractContextManager[Any]:
        used: AbstractContextManager[Any] = self._api.use_mem_pool(self._pool, self._device)
        return used
