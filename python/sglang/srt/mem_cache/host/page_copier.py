"""Copiers of pages between a host pool and its device pool, by kind of device.

A copier belongs to one pair of pools. Its methods run where copies are issued: inside a
`CopyStream`'s work.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from sglang.srt.mem_cache.host.host_page_list import whole_pages


@dataclass(frozen=True, slots=True)
class PoolPair:
    """A host pool and a device pool, as their copier sees them: parts of a page (K and V, latent
    vectors and rotated parts), each by layers."""

    host: tuple[tuple[torch.Tensor, ...], ...]
    """Views `[host_pages, page_size, elements]` of host memory, equally far apart in each part."""
    device: tuple[tuple[torch.Tensor, ...], ...]
    """Layers on the device, `[slots, ...]`: contiguous rows, equally far apart in the layers of a
    part. They adjoin, unless a part is some columns of a buffer."""
    page_size: int
    """Tokens."""
    host_pages: int
    device_pages: int
    """The padding page included."""

    def pages(
        self, host_indices: torch.Tensor, device_indices: torch.Tensor
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64] | None]:
        """Page numbers on both sides, checked; None for slots that are on the device.

        Raises ValueError if slots that the CPU can see are not whole pages of their pool, or the
        two sides have not equally many.
        """
        if len(host_indices) != len(device_indices):
            raise ValueError(
                f"{len(host_indices)} host_indices for {len(device_indices)} device_indices"
            )
        host = whole_pages(host_indices, self.page_size, self.host_pages)
        if not device_indices.is_cpu:
            return host, None
        return host, whole_pages(device_indices, self.page_size, self.device_pages)


class PageLoad(ABC):
    """One set of pages on its way to the device. Its index tensors must not change meanwhile."""

    @abstractmethod
    def issue(self, layer: int) -> None:
        """Copy one layer; those that follow may come with it. Layers may be left out."""


class PageCopier(ABC):
    """Copies whole pages between two pools.

    Slots on the host are int64 `[tokens]` on the CPU; those on the device, equally many, on the
    CPU or the device. `io_backend` is one of `IoBackend`.
    """

    @abstractmethod
    def backup(
        self, host_indices: torch.Tensor, device_indices: torch.Tensor, io_backend: str
    ) -> None:
        """Copy all layers of the pages of these slots to the host.

        Raises ValueError as `PoolPair.pages`, or if the device has no such `io_backend`.
        """

    @abstractmethod
    def begin_load(
        self, host_indices: torch.Tensor, device_indices: torch.Tensor, io_backend: str
    ) -> PageLoad:
        """Check and stage the slots of a load once for all of its layers. Raises as `backup`."""

    def prefers_cpu_slots(self, io_backend: str) -> bool:
        """True if backups are faster with their `device_indices` on the CPU."""
        return False


CopierFactory: TypeAlias = Callable[[PoolPair], PageCopier]

_BUILT_IN: Final = {
    "cpu": ("sglang.srt.mem_cache.host.host_copy", "CpuPageCopier"),
    "cuda": ("sglang.srt.mem_cache.host.host_copy_cuda", "CudaPageCopier"),
    "npu": ("sglang.srt.mem_cache.host.host_copy_npu", "NpuPageCopier"),
}
_REGISTERED: Final[dict[str, CopierFactory]] = {}


def register_page_copier(kind: str, factory: CopierFactory) -> None:
    """Register `factory` for the copiers of devices whose type is `kind`."""
    _REGISTERED[kind] = factory


def check_has_copier(device: torch.device | str) -> None:
    """Raise ValueError if pages of `device` cannot be copied; lists the devices that can."""
    kind = str(device).partition(":")[0]
    known = (*_BUILT_IN, *_REGISTERED)
    if kind not in known:
        raise ValueError(
            f"the hierarchical cache has no copies on {kind} yet, only on "
            f"{', '.join(known)}: start without --enable-hierarchical-cache"
        )


def make_page_copier(pools: PoolPair) -> PageCopier:
    """The copier of the device that `pools.device` is on. Raises as `check_has_copier`."""
    device = pools.device[0][0].device
    check_has_copier(device)
    if device.type in _REGISTERED:
        return _REGISTERED[device.type](pools)
    module, name = _BUILT_IN[device.type]
    factory: CopierFactory = getattr(importlib.import_module(module), name)
    return factory(pools)
