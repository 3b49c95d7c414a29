"""Checksums of pages of a device pool: xxh3-128 of a page's bytes, in the byte order of its copies
on the host and in L3.

They are computed on the device that has the page, before or after its bytes travel. Here is the
hasher of pages in CPU memory; `page_digests_cuda.py` has the one for pages on CUDA.

A hasher belongs to one pool. It is called where the bytes move: inside a `CopyStream`'s work, or on
the scheduler's thread.
"""

from __future__ import annotations

import importlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from sglang.srt.hardware_backend.device_runtime import HostCopies, device_runtime

logger = logging.getLogger(__name__)

DIGEST_BYTES: Final = 16
Parts: TypeAlias = Sequence[Sequence[torch.Tensor]]
"""For each part of a page (keys, values, latent rows) its layers, `[slots, *item]`."""


class EvenShare:
    """Chooses an evenly spaced share of what comes one after the other: of loads, of pages."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._count = 0

    def takes_next(self) -> bool:
        """True if the next one belongs to the share."""
        before, now = int(self._count * self._share), int((self._count + 1) * self._share)
        self._count += 1
        return now > before


class PageHasher(ABC):
    """Hashes whole pages of one pool.

    Attributes:
        page_size: Items of a page.
    """

    page_size: int

    def __init__(self, device: torch.device, page_size: int) -> None:
        self._runtime = device_runtime(device)
        self.page_size = page_size

    def digests(self, slots: torch.Tensor) -> HostCopies:
        """Begin to hash pages, in order with the current stream.

        Args:
            slots: int64 `[pages * page_size]`, the items of whole pages, on the device or the CPU.

        Returns:
            One tensor, uint8 `[pages, 16]`: digests, the most significant byte first.
        """
        count = len(slots) // self.page_size
        digests = self._runtime.empty_on_host(count * DIGEST_BYTES, torch.uint8)
        self.hash_into(digests, self._runtime.stage_to_device(slots))
        hashed = self._runtime.make_event()
        hashed.record()
        return HostCopies([digests.view(count, DIGEST_BYTES)], hashed)

    @abstractmethod
    def hash_into(self, digests: torch.Tensor, slots: torch.Tensor) -> None:
        """Like `digests`; without an event.

        Args:
            digests: uint8 `[pages * 16]` from `DeviceRuntime.empty_on_host`.
            slots: As of `digests`, on the device.
        """


class CpuPageHasher(PageHasher):
    """Hashes pages of a pool in CPU memory, in the caller's thread. Long pages release the GIL."""

    def __init__(self, parts: Parts, page_size: int, *, by_token: bool) -> None:
        """Args:
        by_token: True if the bytes of a part are token by token; False: layer by layer.
        """
        super().__init__(parts[0][0].device, page_size)
        self._by_token = by_token
        self._parts = [[_pages_of(layer, page_size) for layer in layers] for layers in parts]

    def hash_into(self, digests: torch.Tensor, slots: torch.Tensor) -> None:
        pages = (slots[:: self.page_size] // self.page_size).tolist()
        digests.numpy()[:] = np.frombuffer(b"".join(map(self._digest, pages)), np.uint8)

    def _digest(self, page: int) -> bytes:
        digest = xxhash.xxh3_128()
        for layers in self._parts:
            if self._by_token:
                digest.update(np.stack([layer[page] for layer in layers], axis=1).data)
                continue
            for layer in layers:
                digest.update(np.ascontiguousarray(layer[page]).data)
        return digest.digest()


def _pages_of(layer: torch.Tensor, page_size: int) -> npt.NDArray[np.uint8]:
    """The memory of whole pages of a layer, uint8 `[pages, page_size, bytes]`."""
    whole = len(layer) // page_size
    rows = layer[: whole * page_size].view(whole, page_size, -1)
    raw: npt.NDArray[np.uint8] = rows.view(torch.uint8).numpy()
    return raw


_HASHERS: Final = {
    "cpu": (__name__, "CpuPageHasher"),
    "cuda": ("sglang.srt.mem_cache.device.page_digests_cuda", "CudaPageHasher"),
}
"""Module and class by kind of device."""


class UnfitPages(ValueError):
    """Pages that a hasher cannot hash. The message has the remedy."""


def make_page_hasher(
    parts: Parts, page_size: int, *, by_token: bool, pool: str
) -> PageHasher | None:
    """The hasher of a pool's pages; None, with a line in the log: they are not hashed."""
    kind = parts[0][0].device.type
    if kind not in _HASHERS:
        logger.warning("pages of pool %s get no checksums: %s cannot hash them yet", pool, kind)
        return None
    module, name = _HASHERS[kind]
    try:
        made: PageHasher = getattr(importlib.import_module(module), name)(
            parts, page_size, by_token=by_token
        )
    except UnfitPages as error:
        logger.warning("pages of pool %s get no checksums: %s", pool, error)
        return None
    return made
