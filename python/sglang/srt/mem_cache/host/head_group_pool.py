"""A group of a host pool's heads, as a pool of its own to an L3 backend.

Servers that split heads over different numbers of ranks share objects that hold fewer heads than
some of them have on a rank. In no layout are such heads of a page one run of bytes: they are
gathered and scattered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple, NoReturn

import torch

from sglang.srt.mem_cache.host.host_page_list import whole_pages
from sglang.srt.mem_cache.host.host_pool import HostKVCache
from sglang.srt.mem_cache.host.page_copier import (
    PagePair,
    PageView,
    gather_views,
    page_view,
    scatter_views,
)

_REMEDY: Final = (
    "leave tp_lcm_size out of the extra config, or give the number of ranks that split the heads "
    "of this server"
)


class _Part(NamedTuple):
    """The group's share of one buffer of the pool's spec."""

    begin: int
    end: int
    """Bytes `[begin, end)` of a page of the group."""
    outer: tuple[int, ...]
    """Layers and tokens of a page, in the order of the pool's layout."""
    length: int
    """Length of the share along the dimension that is split by heads."""
    strips: tuple[tuple[PageView, int], ...]
    """Runs of the pool `[page, *outer, part of length, bytes]`, and where each is in `length`."""


def _cut(
    items: torch.Tensor, lengths: Sequence[int], index: int, num_groups: int, begin: int
) -> _Part:
    """The `index`-th of `num_groups` equal pieces of each run of `lengths`.

    Args:
        items: See `HostKVCache.buffers_by_page`.
        lengths: See `StateBuffer.head_parts`.
        index: Index of the piece, from 0.
        num_groups: Divides each of `lengths`.
        begin: First byte of the share in a page of the group.
    """
    strips, run, at = [], 0, 0
    for length in lengths:
        own = length // num_groups
        first = run + index * own
        strips.append((page_view(items[..., first : first + own, :]), at))
        run, at = run + length, at + own
    size = items[0, ..., :at, :].numel()
    return _Part(begin, begin + size, tuple(items.shape[1:-2]), at, tuple(strips))


class HeadGroupPool:
    """A `StoragePool` of one of several equal groups of the heads of a host pool.

    A page's bytes are those that a rank with just these heads has, in the same byte order. Threads:
    as the pool's `gather_pages` and `scatter_pages`.

    Args:
        pool: The host pool, of any layout.
        index: Index of the group, from 0, in the order of heads.
        num_groups: Number of groups that the pool's heads are cut into.

    Raises:
        ValueError: This kind of state cannot be cut into these groups. Names the pool and the
            remedy.
    """

    def __init__(self, pool: HostKVCache, index: int, num_groups: int) -> None:
        spec = pool.device_pool.spec
        for buffer in spec.buffers:
            if not buffer.head_parts or any(length % num_groups for length in buffer.head_parts):
                raise ValueError(
                    f"pool {spec.name}: its buffer {buffer.name} {list(buffer.shape)} cannot be "
                    f"cut into {num_groups} groups of heads; {_REMEDY}"
                )
        self._pool = pool
        self._parts: list[_Part] = []
        self.page_bytes = 0
        """Bytes of the group in one page, without the L3 trailer."""
        for items, buffer in zip(pool.buffers_by_page(), spec.buffers, strict=True):
            part = _cut(items, buffer.head_parts, index, num_groups, self.page_bytes)
            self._parts.append(part)
            self.page_bytes = part.end

    @property
    def page_size(self) -> int:
        """Slots of a page."""
        return self._pool.page_size

    @property
    def is_zero_copy(self) -> bool:
        """Never: a group's bytes are in many pieces."""
        return False

    def check_pages(self, indices: torch.Tensor) -> None:
        """See `HostKVCache.check_pages`."""
        self._pool.check_pages(indices)

    def get_hybrid_pool_buffer(self) -> list[torch.Tensor]:
        """Empty, because no transport reads or writes the pool itself."""
        return []

    def gather_pages(self, indices: torch.Tensor, out: torch.Tensor) -> None:
        """Copy the group's part of pages into the rows of `out`, uint8 `[pages, page_bytes]`."""
        numbers = whole_pages(indices, self.page_size, self._pool.page_num)
        gather_views(self._pairs(out), numbers)

    def scatter_pages(self, indices: torch.Tensor, pages: torch.Tensor) -> None:
        """The inverse of `gather_pages`; other heads of the pages stay as they are."""
        numbers = whole_pages(indices, self.page_size, self._pool.page_num)
        scatter_views(self._pairs(pages), numbers)

    def known_checksums(self, indices: torch.Tensor) -> list[bytes | None]:
        """Return None for each page: only whole pages have checksums."""
        return [None] * (len(indices) // self.page_size)

    def keep_checksums(self, indices: torch.Tensor, known: Sequence[bytes | None]) -> None:
        """Note that the checksums of these pages are not known; `known` has only parts of them."""
        self._pool.keep_checksums(indices, [None] * len(known))

    def get_page_buffer_meta(self, indices: torch.Tensor) -> NoReturn:
        """Refused with ValueError: the bytes are in too many pieces to be moved in place."""
        raise ValueError("a group of heads is scattered over its page; copy it with gather_pages")

    def get_page_views(self, indices: torch.Tensor) -> NoReturn:
        """Raises like `get_page_buffer_meta`."""
        self.get_page_buffer_meta(indices)

    def _pairs(self, flat: torch.Tensor) -> Iterator[PagePair]:
        """The strips, and where they are in flat pages (uint8 `[n, page_bytes]`, rows)."""
        for part in self._parts:
            rows = flat[:, part.begin : part.end]
            region = page_view(rows.view(len(flat), *part.outer, part.length, -1))
            for own, at in part.strips:
                yield own, region[..., at : at + own.shape[-2], :]
