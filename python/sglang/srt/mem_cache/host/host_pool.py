"""Base of host pools (L2): pages of one kind of state in host memory.

A pool hands out token slots in whole pages. Slots are int64 CPU tensors; sizes are tokens unless
a name says pages or bytes. `alloc`, `free` and `clear` belong to the scheduler's thread; copies
run in a copy thread and L3 transfers in storage threads, each on pages that their caller has
locked, so pools themselves need no lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Self

import numpy as np
import numpy.typing as npt
import torch

from sglang.srt.constants import GB
from sglang.srt.hardware_backend.device_runtime import DeviceRuntime, device_runtime
from sglang.srt.mem_cache.device.base_device_pool import BaseDevicePool
from sglang.srt.mem_cache.device.page_digests import PageHasher, make_page_hasher
from sglang.srt.mem_cache.host.host_layout import (
    HostLayout,
    PageByteOrder,
    check_layout_of_kind,
    is_zero_copy,
    page_byte_order,
    parse_layout,
)
from sglang.srt.mem_cache.host.host_memory import (
    available_host_bytes,
    check_fits_host_memory,
    get_allocator_from_storage,
)
from sglang.srt.mem_cache.host.host_page_list import HostPageList, whole_pages
from sglang.srt.mem_cache.host.page_checksums import NO_CHECKSUM, PageChecksums, as_rows
from sglang.srt.mem_cache.host.page_copier import (
    PageCopier,
    PageLoad,
    PagePair,
    PoolPair,
    gather_views,
    make_page_copier,
    page_view,
    scatter_views,
)


class HostKVCache(HostPageList):
    """A pool of pages in host memory that mirrors one device pool, part by part, and their free
    list.

    A *part* is one buffer of the device pool's spec, or some columns of it, over all layers: keys,
    values, latent rows, states. A page's bytes are its parts, one after the other.

    Args:
        device_pool: The pool that pages are copied from and to.
        host_to_device_ratio: Tokens here per token there, where `host_size` is 0.
        host_size: Size in GB (10^9 bytes); wins over the ratio.
        page_size: Tokens per page.
        layout: One of `HostLayout`.
        pin_memory: Page-lock the buffers where `device_pool`'s device gains from that.
        device: Device of the buffers: `cpu`.
        allocator_type: `default`, or `mooncake` for memory from Mooncake's own allocator.
        page_num: Pages; wins over ratio and size. A pool that shares the slots of another has as
            many as that.

    Attributes:
        is_zero_copy: True if L3 moves pages in place; otherwise through `gather_pages` and
            `scatter_pages`.
        checksums: Checksums of the pages, in the byte order of `page_byte_order`.

    Raises:
        ValueError: The layout or allocator is unknown, this kind of state has no such layout, or
            the pool is too small or does not fit.
    """

    LAYOUTS: ClassVar[tuple[HostLayout, ...]] = tuple(HostLayout)
    """Layouts that this kind of state has."""
    kv_buffer: list[torch.Tensor]
    _parts: tuple[torch.Tensor, ...]
    """Layer by layer in `layer_first`, else page by page; each contiguous."""
    _copier: tuple[BaseDevicePool, PageCopier] | None = None
    _hasher: tuple[BaseDevicePool, PageHasher | None] | None = None

    def __init__(
        self,
        device_pool: BaseDevicePool,
        host_to_device_ratio: float,
        host_size: float,
        page_size: int,
        layout: str,
        pin_memory: bool = True,
        device: str = "cpu",
        allocator_type: str = "default",
        *,
        page_num: int | None = None,
    ) -> None:
        self.device_pool = device_pool
        self.page_size = page_size
        self.layout = parse_layout(layout).value
        self.is_zero_copy = is_zero_copy(self.layout)
        check_layout_of_kind(self.layout, self.LAYOUTS, type(self).__name__)
        self.device = device
        runtime = device_runtime(device_pool.device)
        self.pin_memory = pin_memory and runtime.pins_memory
        self._pinned_by: DeviceRuntime | None = runtime if self.pin_memory else None
        self.allocator = get_allocator_from_storage(allocator_type)
        self.dtype = device_pool.store_dtype
        self.layer_num = device_pool.layer_num
        self.start_layer = device_pool.start_layer
        self.end_layer = device_pool.end_layer
        self.page_items = page_size // device_pool.spec.stride
        """Items of a page: `page_size`, unless an item stands for several tokens."""
        self.size_per_token = self.get_size_per_token()
        self.page_bytes = self.size_per_token * self.page_items
        """Bytes of one page, all its buffers, without the L3 trailer."""
        self.page_num = page_num or self._size_in_pages(host_to_device_ratio, host_size)
        self.size = self.page_num * page_size
        self.nbytes = self.page_num * self.page_bytes
        """Bytes of host memory."""
        check_fits_host_memory(
            self.nbytes,
            f"{type(self).__name__} of {self.size} slots",
            "lower --hicache-size or --hicache-ratio",
        )
        self.kv_buffer = self.init_kv_buffer()
        self.checksums = PageChecksums(self.page_num)
        HostPageList.__init__(self, self.page_num, page_size)

    def _size_in_pages(self, ratio: float, size_gb: float) -> int:
        wanted = size_gb * GB or ratio * device_bytes(self.device_pool, self.size_per_token)
        setting = f"--hicache-size {size_gb} GB" if size_gb else f"--hicache-ratio {ratio}"
        return pages_in(wanted, self.page_bytes, type(self).__name__, setting)

    @classmethod
    def make(
        cls,
        device_pool: BaseDevicePool,
        *,
        page_num: int,
        layout: str,
        allocator_type: str = "default",
    ) -> Self:
        """A pool of `page_num` pages, each as long as the device pool's. Raises as the class."""
        pool = cls.__new__(cls)
        HostKVCache.__init__(
            pool,
            device_pool,
            0.0,
            0.0,
            device_pool.page_size,
            layout,
            allocator_type=allocator_type,
            page_num=page_num,
        )
        return pool

    # -- what a kind of pool may redefine ----------------------------------------------------------

    def _device_parts(self, device_pool: BaseDevicePool) -> tuple[tuple[torch.Tensor, ...], ...]:
        """For each part of a page its layers on the device, `[slots, *item]`: buffers or views."""
        return tuple(map(tuple, device_pool.parts))

    def _part_shape(self, item: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of a part in host memory; `item`: shape of an item in a layer."""
        match self.layout:
            case HostLayout.LAYER_FIRST:
                return (self.layer_num, self.page_num * self.page_items, *item)
            case HostLayout.PAGE_FIRST:
                return (self.page_num * self.page_items, self.layer_num, *item)
            case _:
                return (self.page_num, self.layer_num, self.page_items, *item)

    @classmethod
    def item_bytes(cls, device_pool: BaseDevicePool) -> int:
        """Bytes of one item over all layers, known before any memory is taken."""
        return device_pool.spec.num_bytes

    @classmethod
    def shortest_part_bytes(cls, device_pool: BaseDevicePool) -> int:
        """Bytes of one item over all layers in the shortest part of a page (keys or values). They
        decide layout and I/O."""
        spec = device_pool.spec
        return min(buffer.num_bytes for buffer in spec.buffers) * len(spec.layers)

    def get_size_per_token(self) -> int:
        """Bytes of one item over all layers: a token's state, or that of several."""
        return self.item_bytes(self.device_pool)

    def get_ksize_per_token(self) -> int:
        """Bytes of the first part of a page (keys), per item, over all layers."""
        return self._parts[0].nbytes // (self.page_num * self.page_items)

    def init_kv_buffer(self) -> list[torch.Tensor]:
        """Allocate the buffers: contiguous tensors that hold whole pages."""
        firsts = [layers[0] for layers in self._device_parts(self.device_pool)]
        buffers = [
            self.allocator.allocate(
                self._part_shape(first.shape[1:]),
                first.dtype,
                self.device,
                pinned_by=self._pinned_by,
            )
            for first in firsts
        ]
        self._parts = tuple(buffers)
        return buffers

    # -- copies ------------------------------------------------------------------------------------

    def begin_load(
        self,
        device_pool: BaseDevicePool,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        io_backend: str,
        staged: torch.Tensor | None = None,
        steps: Sequence[range] | None = None,
    ) -> PageLoad:
        """Prepare a load of whole pages to the device pool; the caller issues its layers (0-based
        in this pool). The indices must not change until the last layer is issued. `staged` and
        `steps` as of `PageCopier`."""
        copier = self._copier_of(device_pool)
        return copier.begin_load(host_indices, device_indices, io_backend, staged, steps)

    def load_steps(
        self, device_pool: BaseDevicePool, num_slots: int, io_backend: str, load_bytes: int
    ) -> tuple[range, ...]:
        """The layers (0-based in this pool) that a load of so many slots issues together.
        `load_bytes` as of `PageCopier`."""
        num_pages = num_slots // self.page_size
        return self._copier_of(device_pool).load_steps(num_pages, io_backend, load_bytes)

    def load_to_device_per_layer(
        self,
        device_pool: BaseDevicePool,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        layer_id: int,
        io_backend: str,
    ) -> None:
        """Copy one layer (0-based in this pool) of whole pages to the device pool.

        For several layers `begin_load` is faster, since it checks the indices once.
        """
        self.begin_load(device_pool, host_indices, device_indices, io_backend).issue(layer_id)

    def backup_from_device_all_layer(
        self,
        device_pool: BaseDevicePool,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        io_backend: str,
        staged: torch.Tensor | None = None,
    ) -> None:
        """Copy all layers of whole pages from the device pool. `device_indices` are on its device,
        or on the CPU; `staged` as of `PageCopier`."""
        self._copier_of(device_pool).backup(host_indices, device_indices, io_backend, staged)

    def loads_straight(
        self, device_pool: BaseDevicePool, device_indices: torch.Tensor, io_backend: str
    ) -> bool:
        """True if a load needs no slots on the device."""
        num_slots = device_indices.shape[0]
        copier = self._copier_of(device_pool)
        return device_indices.is_cpu and copier.loads_straight(num_slots, io_backend)

    def prefers_cpu_slots(self, device_pool: BaseDevicePool, io_backend: str) -> bool:
        """True if backups are faster with their `device_indices` on the CPU."""
        return self._copier_of(device_pool).prefers_cpu_slots(io_backend)

    def _copier_of(self, device_pool: BaseDevicePool) -> PageCopier:
        """The copier between this pool and `device_pool`, made on first use."""
        if self._copier is None or self._copier[0] is not device_pool:
            self._copier = (device_pool, make_page_copier(self._paired_with(device_pool)))
        return self._copier[1]

    def hasher_of(self, device_pool: BaseDevicePool) -> PageHasher | None:
        """The hasher of the pages of `device_pool`, made on first use; None: they are not
        hashed."""
        if self._hasher is None or self._hasher[0] is not device_pool:
            parts = self._device_parts(device_pool)
            by_token = page_byte_order(self.layout) == PageByteOrder.TOKEN_MAJOR
            hasher = make_page_hasher(
                parts, self.page_items, by_token=by_token, pool=device_pool.spec.name
            )
            self._hasher = (device_pool, hasher)
        return self._hasher[1]

    def _paired_with(self, device_pool: BaseDevicePool) -> PoolPair:
        """The pages of this pool and of `device_pool`, layer by layer."""
        layers = range(self.layer_num)
        return PoolPair(
            host=tuple(
                tuple(self._layer_pages(part, layer) for layer in layers) for part in self._parts
            ),
            device=self._device_parts(device_pool),
            page_size=self.page_size,
            stride=device_pool.spec.stride,
            host_pages=self.page_num,
            device_pages=device_pool.size // self.page_size + 1,
        )

    def _layer_pages(self, part: torch.Tensor, layer: int) -> torch.Tensor:
        """A layer of a part by pages, a view `[page, item, elements]`."""
        match self.layout:
            case HostLayout.LAYER_FIRST:
                pages = part[layer]
            case HostLayout.PAGE_FIRST:
                pages = part.view(self.page_num, self.page_items, *part.shape[1:])[:, :, layer]
            case _:
                pages = part[:, layer]
        return pages.view(self.page_num, self.page_items, -1)

    # -- bytes, for L3 -----------------------------------------------------------------------------

    @property
    def page_byte_order(self) -> str:
        """The order of a page's bytes in L3. Pools of one kind with the same order share pages."""
        return page_byte_order(self.layout)

    @property
    def page_format(self) -> str:
        """Everything that decides the meaning of a page's bytes, except their order; part of the
        namespace. The same on all ranks, however many split the heads."""
        page_bytes = self._over_all_heads(self.page_bytes)
        return f"{self.dtype} {self.layer_num} {self.page_items} {page_bytes}"

    def _over_all_heads(self, size: int) -> int:
        """`size`, a number for this rank's heads, scaled to all heads of the model."""
        share = self.device_pool.spec.share
        return size * share.total // (share.end - share.begin)

    def get_hybrid_pool_buffer(self) -> list[torch.Tensor]:
        """The contiguous tensors to register with a transport."""
        return self.kv_buffer

    def check_pages(self, indices: torch.Tensor) -> None:
        """Raise ValueError if `indices` are not whole, aligned pages inside the pool."""
        whole_pages(indices, self.page_size, self.page_num)

    def get_page_views(self, indices: torch.Tensor) -> list[list[memoryview]]:
        """Per page its buffers, writable, in page byte order. Checked as `get_page_buffer_meta`."""
        pages = self._zero_copy_pages(indices).tolist()
        parts = [(raw, size) for raw, size, _ in self._page_parts()]
        return [[raw[page * size : (page + 1) * size] for raw, size in parts] for page in pages]

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        """Addresses and byte counts of pages, K then V of the first page, then of the second.

        Args:
            indices: int64 `[pages * page_size]` on CPU, whole pages.

        Raises:
            ValueError: A slot is outside the pool or not page-aligned, or the layout scatters
                pages. Nothing unchecked reaches C++.
        """
        pages = self._zero_copy_pages(indices)
        parts = self._page_parts()
        ptrs = np.stack([base + pages * size for _, size, base in parts], axis=1)
        return ptrs.reshape(-1).tolist(), [size for _, size, _ in parts] * len(pages)

    def is_stride_page_aligned(self, page_size_bytes: int = 4096) -> bool:
        """True if each page's buffers start and end on memory pages of `page_size_bytes`."""
        return self.is_zero_copy and all(
            size % page_size_bytes == 0 and base % page_size_bytes == 0
            for _, size, base in self._page_parts()
        )

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        """A zeroed flat page, `dtype`."""
        return torch.zeros(self.page_bytes, dtype=torch.uint8).view(self.dtype)

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        """A copy of the page that starts at slot `index`, in page byte order.

        Flat `[elements]` of `dtype`; otherwise in the shape of the byte order.
        """
        page = self.get_dummy_flat_data_page()
        self.gather_pages(self._page_slots(index), page.view(torch.uint8).view(1, -1))
        return page if flat else page.view(self._page_shape())

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        """Write a page that `get_data_page` returned, to the page that starts at slot `index`."""
        raw = data_page.contiguous().view(-1).view(torch.uint8)
        if raw.numel() != self.page_bytes:
            raise ValueError(f"data_page: {raw.numel()} bytes, a page has {self.page_bytes}")
        self.scatter_pages(self._page_slots(index), raw.view(1, -1))

    def _page_slots(self, index: int) -> torch.Tensor:
        return torch.arange(index, index + self.page_size)

    def _zero_copy_pages(self, indices: torch.Tensor) -> npt.NDArray[np.int64]:
        if not self.is_zero_copy:
            raise ValueError(
                f"layout {self.layout} scatters a page over the layers; copy it with gather_pages"
            )
        return whole_pages(indices, self.page_size, self.page_num)

    def _page_parts(self) -> list[tuple[memoryview, int, int]]:
        """Per part of a page: all bytes of that part, bytes a page, address."""
        return [
            (
                part.view(-1).view(torch.uint8).numpy().data,
                part.nbytes // self.page_num,
                part.data_ptr(),
            )
            for part in self._parts
        ]

    def _page_shape(self) -> tuple[int, ...]:
        """Shape of an unflattened page."""
        items = [layers[0].shape[1:] for layers in self._device_parts(self.device_pool)]
        if items != [items[0]] * len(items):
            raise ValueError("a page of unlike parts has only its flat form")
        parts = (len(items),) if len(items) > 1 else ()
        if page_byte_order(self.layout) == PageByteOrder.TOKEN_MAJOR:
            return (*parts, self.page_items, self.layer_num, *items[0])
        return (*parts, self.layer_num, self.page_items, *items[0])

    def gather_pages(self, indices: torch.Tensor, out: torch.Tensor) -> None:
        """Copy pages into the rows of `out`, uint8 `[pages, page_bytes]`, in page byte order."""
        numbers = whole_pages(indices, self.page_size, self.page_num)
        gather_views(self._flat_pairs(out), numbers)

    def scatter_pages(self, indices: torch.Tensor, pages: torch.Tensor) -> None:
        """The inverse of `gather_pages`."""
        numbers = whole_pages(indices, self.page_size, self.page_num)
        scatter_views(self._flat_pairs(pages), numbers)

    def _flat_pairs(self, flat: torch.Tensor) -> list[PagePair]:
        """The pool's parts, and where they are in flat pages (uint8 `[n, page_bytes]`, rows)."""
        pairs: list[PagePair] = []
        begin = 0
        for part in self._parts:
            end = begin + part.nbytes // self.page_num
            region, begin = flat[:, begin:end], end
            if self.is_zero_copy:
                pairs.append((page_view(part.view(self.page_num, -1)), page_view(region)))
                continue
            by_layer = part.view(self.layer_num, self.page_num, -1).transpose(0, 1)
            layers = region.view(len(flat), self.layer_num, -1)
            pairs.append((page_view(by_layer), page_view(layers)))
        return pairs

    def known_checksums(self, indices: torch.Tensor) -> list[bytes | None]:
        """The checksum of each page, 16 bytes; None: it is not known."""
        checksums = self.checksums.of(whole_pages(indices, self.page_size, self.page_num))
        return [None if one == NO_CHECKSUM else one for one in checksums]

    def keep_checksums(self, indices: torch.Tensor, known: Sequence[bytes | None]) -> None:
        """Set the checksum of each page, 16 bytes; None: it is not known."""
        pages = whole_pages(indices, self.page_size, self.page_num)
        self.checksums.keep(pages, as_rows([one or NO_CHECKSUM for one in known]))

    def buffers_by_page(self) -> list[torch.Tensor]:
        """For each buffer of the spec a view of its bytes: uint8 `[page, *outer, length, bytes]`,
        where `length` is the first dimension of an item and `outer` are layers and items in the
        order of the layout. Each buffer must be one part here."""
        found = []
        for part, buffer in zip(self._parts, self.device_pool.spec.buffers, strict=True):
            raw, length = part.view(-1).view(torch.uint8), buffer.shape[0]
            if self.is_zero_copy:
                outer = self.layer_num * self.page_items
                found.append(raw.view(self.page_num, outer, length, -1))
                continue
            by_layer = raw.view(self.layer_num, self.page_num, self.page_items, length, -1)
            found.append(by_layer.transpose(0, 1))
        return found


def device_bytes(pool: BaseDevicePool, item_bytes: int) -> int:
    """Bytes of the slots of `pool` that requests can own."""
    return pool.size // pool.spec.stride * item_bytes


def pages_in(budget: float, page_bytes: int, pool: str, setting: str) -> int:
    """How many pages fit in `budget` bytes, which `setting` gives to `pool`.

    Raises:
        ValueError: Not one page fits.
    """
    pages = int(budget // page_bytes)
    if pages < 1:
        raise ValueError(
            f"{setting}: pool {pool} gets {max(0, int(budget))} bytes of host memory and one page "
            f"takes {page_bytes}; raise --hicache-size or --hicache-ratio, up to "
            f"{available_host_bytes() / GB:.1f} GB available"
        )
    return pages
