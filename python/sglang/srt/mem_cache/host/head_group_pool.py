"""Some of the heads of a host pool, as a pool of its own to a backend of L3.

Servers that split heads over different numbers of ranks share objects that hold fewer heads than
some of them have on a rank. In no layout are such heads of a page one run of bytes: they are
gathered and scattered.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple, NoReturn

import torch

from sglang.srt.mem_cache.host.host_copy import PageView, page_view
from sglang.srt.mem_cache.host.host_page_list import whole_pages
from sglang.srt.mem_cache.host.host_pool import AnyHostPool
from sglang.srt.mem_cache.host.parted_host_pool import PartedPoolHost

_REMEDY: Final = (
    "leave tp_lcm_size out of the extra config, or give the number of ranks that split the heads "
    "of this server"
)


class _Part(NamedTuple):
    """One buffer of the pool's spec, and where its bytes are in a page of the group."""

    begin: int
    end: int
    outer: tuple[int, ...]
    """Layers and tokens of a page, in the order of the pool's layout."""
    length: int
    """Of the group along the dimension that is split."""
    strips: tuple[tuple[PageView, int], ...]
    """Of the pool `[page, *outer, some of length, bytes]`, and where each begins in `length`."""


class HeadGroupPool:
    """A `StoragePool` of one of several equal groups of the heads of a host pool.

    A page's bytes are those that a rank with just these heads has, in the same byte order. Threads:
    as the pool's `gather_pages` and `scatter_pages`.

    Args:
        pool: The pool, of whatever layout.
        index: Which group, from 0, in the order of heads.
        num_groups: Into how many the pool's heads are cut.

    Raises:
        ValueError: This kind of state cannot be cut so. Names the pool and what to do.
    """

    def __init__(self, pool: AnyHostPool, index: int, num_groups: int) -> None:
        name = pool.device_pool.spec.name
        if not isinstance(pool, PartedPoolHost):
            raise ValueError(f"pool {name}: {type(pool).__name__} has no heads to cut; {_REMEDY}")
        self._pool: PartedPoolHost[Any] = pool
        self._parts: list[_Part] = []
        self.page_bytes = 0
        """Bytes of the group in one page, without the L3 trailer."""
        for items, buffer in zip(pool.page_items(), pool.device_pool.spec.buffers, strict=True):
            lengths = buffer.head_parts
            if not lengths or any(length % num_groups for length in lengths):
                raise ValueError(
                    f"pool {name}: its buffer {buffer.name} {list(buffer.shape)} cannot be cut "
                    f"into {num_groups} groups of heads; {_REMEDY}"
                )
            self._add(items, lengths, index, num_groups)

    def _add(
        self, items: torch.Tensor, lengths: tuple[int, ...], index: int, num_groups: int
    ) -> None:
        """A part whose parts of `lengths` along the dimension before the last are cut evenly."""
        strips, first, at = [], 0, 0
        for length in lengths:
            own = length // num_groups
            begin = first + index * own
            strips.append((page_view(items[..., begin : begin + own, :]), at))
            first, at = first + length, at + own
        outer = tuple(items.shape[1:-2])
        begin = self.page_bytes
        self.page_bytes += items[0, ..., :at, :].numel()
        self._parts.append(_Part(begin, self.page_bytes, outer, at, tuple(strips)))

    @property
    def page_size(self) -> int:
        """Slots of a page."""
        return self._pool.page_size

    @property
    def is_zero_copy(self) -> bool:
        """Never: a group's bytes are in many pieces."""
        return False

    def check_pages(self, indices: torch.Tensor) -> None:
        """As the pool's."""
        self._pool.check_pages(indices)

    def get_hybrid_pool_buffer(self) -> list[torch.Tensor]:
        """Nothing: no transport reads or writes the pool itself."""
        return []

    def gather_pages(self, indices: torch.Tensor, out: torch.Tensor) -> None:
        """Copy the group's part of pages into the rows of `out`, uint8 `[pages, page_bytes]`."""
        pages = whole_pages(indices, self.page_size, self._pool.page_num).tolist()
        for own, rows in self._pairs(out):
            for row, page in zip(rows, pages, strict=True):
                row[...] = own[page]

    def scatter_pages(self, indices: torch.Tensor, pages: torch.Tensor) -> None:
        """The inverse of `gather_pages`; other heads of the pages stay as they are."""
        slots = whole_pages(indices, self.page_size, self._pool.page_num).tolist()
        for own, rows in self._pairs(pages):
            for row, page in zip(rows, slots, strict=True):
                own[page] = row

    def get_page_buffer_meta(self, indices: torch.Tensor) -> NoReturn:
        """Refused with ValueError: the bytes are in too many pieces to be moved in place."""
        raise ValueError("a group of heads is scattered over its page; copy it with gather_pages")

    def get_page_views(self, indices: torch.Tensor) -> NoReturn:
        """As `get_page_buffer_meta`."""
        self.get_page_buffer_meta(indices)

    def _pairs(self, flat: torch.Tensor) -> Iterator[tuple[PageView, PageView]]:
        """Pieces of the pool's pages, and where they are in flat pages (uint8, rows)."""
        for part in self._parts:
            rows = flat[:, part.begin : part.end]
            region = page_view(rows.view(len(flat), *part.outer, part.length, -1))
            for own, at in part.strips:
                yield own, region[..., at : at + own.shape[-2], :]
