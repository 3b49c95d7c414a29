"""Host pools of latent attention (MLA) and of the indexer of sparse attention (DSA).

Both have one part, so that `page_first_kv_split`, which keeps parts in buffers of their own, is
refused: it would be `page_first_direct`.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple, Protocol, Self

from sglang.srt.mem_cache.device.base_device_pool import PagedDevicePool
from sglang.srt.mem_cache.host.host_layout import HostLayout
from sglang.srt.mem_cache.host.paged_host_pool import PagedPoolHost
from sglang.srt.mem_cache.host.parted_host_pool import WITHOUT_SPLIT


class MLATokenToKVPoolHost(PagedPoolHost):
    """Mirrors an `MLATokenToKVPool`: a page is its latent rows."""

    LAYOUTS: ClassVar[tuple[HostLayout, ...]] = WITHOUT_SPLIT


class HasPages(Protocol):
    """What a pool without slots of its own needs to know of the pool whose slots it shares."""

    @property
    def page_num(self) -> int:
        """Pages on the host."""

    @property
    def page_size(self) -> int:
        """Tokens of a page."""


class _Pages(NamedTuple):
    page_num: int
    page_size: int


class NSAIndexerPoolHost(PagedPoolHost):
    """Mirrors an `NSAIndexerPool`: a page is its indexer keys. Slots are the anchor's."""

    LAYOUTS: ClassVar[tuple[HostLayout, ...]] = WITHOUT_SPLIT

    def __init__(
        self,
        device_pool: PagedDevicePool,
        anchor_host: HasPages,
        layout: str,
        pin_memory: bool = True,
        device: str = "cpu",
        allocator_type: str = "default",
    ) -> None:
        """As `HostKVCache`, with as many pages as `anchor_host`.

        Raises:
            ValueError: The pages of the two device pools are not equally long, or as
                `PagedPoolHost`.
        """
        if anchor_host.page_size != device_pool.page_size:
            raise ValueError(
                f"indexer pages of {device_pool.page_size} tokens do not share the slots of pages "
                f"of {anchor_host.page_size}"
            )
        super().__init__(
            device_pool,
            0.0,
            0.0,
            device_pool.page_size,
            layout,
            pin_memory,
            device,
            allocator_type,
            page_num=anchor_host.page_num,
        )

    @classmethod
    def make(
        cls,
        device_pool: PagedDevicePool,
        *,
        page_num: int,
        layout: str,
        allocator_type: str = "default",
    ) -> Self:
        pages = _Pages(page_num, device_pool.page_size)
        return cls(device_pool, pages, layout, allocator_type=allocator_type)


DSAIndexerPoolHost = NSAIndexerPoolHost
"""The later name of the same attention."""
