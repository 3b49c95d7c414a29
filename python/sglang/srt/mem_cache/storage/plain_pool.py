"""Host pools of third parties, which have `get_page_buffer_meta` and no more, as storage pools."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any, Final, cast

import numpy as np
import torch

from sglang.srt.mem_cache.host.host_page_list import whole_pages
from sglang.srt.mem_cache.storage.types import PlainHostPool, StoragePool

_NAMES: Final = tuple(
    name for kind in (PlainHostPool, StoragePool) for name in vars(kind) if not name.startswith("_")
)
_ANY_PAGE: Final = 1 << 40


def as_storage_pool(pool: PlainHostPool, known: StoragePool | None = None) -> StoragePool:
    """`pool`, or a `PlainPool` of it if it lacks a part of `StoragePool`.

    Args:
        known: Result of an earlier call for the registered pool, which is returned again for the
            same pool.

    Raises:
        ValueError: The pool lacks what a `PlainPool` needs; names it.
    """
    if all(hasattr(pool, name) for name in _NAMES):
        return cast(StoragePool, pool)
    if isinstance(known, PlainPool) and known.wrapped is pool:
        return known
    return PlainPool(pool)


class PlainPool:
    """A `StoragePool` over the addresses that `get_page_buffer_meta` of another pool returns.

    Other attributes are that pool's own.

    Args:
        pool: Has `page_size` (tokens), `get_page_buffer_meta(indices)`, and its memory as
            `kv_buffer` or `get_hybrid_pool_buffer()`: contiguous tensors on the CPU.

    Raises:
        ValueError: It has not.
    """

    is_zero_copy = True

    def __init__(self, pool: PlainHostPool) -> None:
        for name in ("page_size", "get_page_buffer_meta"):
            if not hasattr(pool, name):
                raise ValueError(f"host pool {type(pool).__name__}: it has no {name}")
        self.wrapped = pool
        self.page_size = int(pool.page_size)
        self._buffers = _memory_of(pool)
        self._bounds = [(one.data_ptr(), one.data_ptr() + one.nbytes) for one in self._buffers]
        pages = getattr(pool, "size", _ANY_PAGE * self.page_size) // self.page_size
        self._page_num = int(pages)
        self.page_bytes = sum(self.get_page_buffer_meta(torch.arange(self.page_size))[1])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wrapped, name)

    def check_pages(self, indices: torch.Tensor) -> None:
        """Raise ValueError if `indices` are not whole, aligned pages inside the pool."""
        whole_pages(indices, self.page_size, self._page_num)

    def get_hybrid_pool_buffer(self) -> list[torch.Tensor]:
        """The contiguous tensors to register with a transport."""
        return self._buffers

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        """Addresses and bytes of all parts of the first page, then of the second, and so on.

        Raises:
            ValueError: A slot is outside the pool or not page-aligned, or the pool answered an
                address outside its memory, which must not reach C++.
        """
        self.check_pages(indices)
        if not len(indices):
            return [], []
        ptrs, sizes = self.wrapped.get_page_buffer_meta(indices)
        ptrs, sizes = [int(one) for one in ptrs], [int(one) for one in sizes]
        count = len(indices) // self.page_size
        if not ptrs or len(ptrs) != len(sizes) or len(ptrs) % count:
            raise ValueError(
                f"{type(self.wrapped).__name__}.get_page_buffer_meta answered {len(ptrs)} "
                f"addresses and {len(sizes)} sizes for {count} pages"
            )
        for ptr, size in zip(ptrs, sizes, strict=True):
            if size <= 0 or not any(a <= ptr and ptr + size <= b for a, b in self._bounds):
                raise ValueError(
                    f"{type(self.wrapped).__name__}.get_page_buffer_meta answered {size} bytes at "
                    f"{ptr:#x}, which are not in its kv_buffer"
                )
        return ptrs, sizes

    def get_page_views(self, indices: torch.Tensor) -> list[list[memoryview]]:
        """Per page its parts, writable. Checked as `get_page_buffer_meta`."""
        ptrs, sizes = self.get_page_buffer_meta(indices)
        if not ptrs:
            return []
        views = [
            memoryview((ctypes.c_uint8 * size).from_address(ptr)).cast("B")
            for ptr, size in zip(ptrs, sizes, strict=True)
        ]
        parts = len(views) * self.page_size // len(indices)
        return [views[begin : begin + parts] for begin in range(0, len(views), parts)]

    def gather_pages(self, indices: torch.Tensor, out: torch.Tensor) -> None:
        """Copy pages into the rows of `out`, uint8 `[pages, page_bytes]`, part after part."""
        for row, view in self._rows(indices, out):
            row[:] = np.frombuffer(view, dtype=np.uint8)

    def scatter_pages(self, indices: torch.Tensor, pages: torch.Tensor) -> None:
        """The inverse of `gather_pages`."""
        for row, view in self._rows(indices, pages):
            view[:] = row.tobytes()

    def known_checksums(self, indices: torch.Tensor) -> list[bytes | None]:
        """Return None for each page: such a pool keeps no checksums."""
        return [None] * (len(indices) // self.page_size)

    def keep_checksums(self, indices: torch.Tensor, known: Sequence[bytes | None]) -> None:
        """No effect: such a pool keeps no checksums."""

    def _rows(self, indices: torch.Tensor, pages: torch.Tensor) -> Iterator[tuple[Any, memoryview]]:
        for row, views in zip(pages.numpy(), self.get_page_views(indices), strict=True):
            begin = 0
            for view in views:
                yield row[begin : begin + len(view)], view
                begin += len(view)


def _memory_of(pool: PlainHostPool) -> list[torch.Tensor]:
    get_buffers = getattr(pool, "get_hybrid_pool_buffer", None)
    memory = get_buffers() if get_buffers is not None else getattr(pool, "kv_buffer", None)
    buffers = [memory] if isinstance(memory, torch.Tensor) else memory
    if (
        not isinstance(buffers, Sequence)
        or not buffers
        or not all(isinstance(one, torch.Tensor) and one.is_contiguous() for one in buffers)
    ):
        raise ValueError(
            f"host pool {type(pool).__name__}: its memory is not known; give it kv_buffer or "
            "get_hybrid_pool_buffer(), contiguous tensors"
        )
    return list(buffers)
