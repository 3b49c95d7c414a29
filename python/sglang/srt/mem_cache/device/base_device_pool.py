"""Base of device pools: slots of one kind of state, and the layers that have it.

A pool is called from the scheduler thread; copy streams read and write its buffers as well, and
the layer counter keeps their order.
"""

from __future__ import annotations

from typing import ClassVar, Protocol, TypeAlias

import torch

from sglang.srt.mem_cache.device.state_spec import StateSpec, check_page_size

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


class HasLayerId(Protocol):
    """The part of an attention layer that pools use."""

    @property
    def layer_id(self) -> int:
        """The layer's place in the model, from 0."""


LayerOrId: TypeAlias = HasLayerId | int


class LayerTransferCounter(Protocol):
    """Orders the readers of a layer after the load from L2 that fills it."""

    def set_consumer(self, index: int) -> None:
        """Name the load that the next forward has to wait for; -1: none."""

    def wait_until(self, threshold: int) -> None:
        """Order the caller after model layer `threshold` (from 0) of that load."""


class BaseDevicePool:
    """Slots of one kind of state in device memory.

    Attributes:
        spec: Spec of the state, with the model's layers that have it.
        size: Slots that can be handed out.
        page_size: Slots of a page: tokens, or 1 if a slot holds the state of a prefix or a request.
        dtype: Dtype of the values as they are read.
        store_dtype: Dtype of the buffers.
        layer_transfer_counter: Orders readers after loads; None: there are no loads.
        parts: For each buffer of the spec its layers, each contiguous `[items, *shape]`, with the
            padding. fp8 is stored as bytes. A subclass makes them.
    """

    host_pool: ClassVar[str | None] = None
    """Dotted path of the class that mirrors it on the host, a `HostKVCache`. None: the hierarchical
    cache is refused."""
    parts: tuple[list[torch.Tensor], ...]

    def __init__(
        self, spec: StateSpec, size: int, device: torch.device | str, page_size: int = 1
    ) -> None:
        self.spec = spec
        self.size = size
        self.page_size = page_size
        self.dtype = spec.dtype
        self.store_dtype = _stored_dtype(spec.dtype)
        self.device = torch.device(device)
        self.layer_transfer_counter: LayerTransferCounter | None = None
        self._place = {layer: place for place, layer in enumerate(spec.layers)}

    @property
    def page_items(self) -> int:
        """Items of a page: `page_size`, unless an item stands for several tokens."""
        return self.page_size // self.spec.stride

    def items_of(self, slots: torch.Tensor) -> torch.Tensor:
        """Items of whole pages: int64 `[pages * page_items]`.

        Args:
            slots: int64 `[pages * page_size]`, on any device: the pages' slots in order.
        """
        return whole_items(slots, self.spec.stride)

    @property
    def auxiliary_pools(self) -> tuple[BaseDevicePool, ...]:
        """Pools of other kinds of state in the same slots that were made with this one."""
        return ()

    @property
    def start_layer(self) -> int:
        """The first model layer held here."""
        return self.spec.layers[0]

    @property
    def end_layer(self) -> int:
        """The last model layer held here."""
        return self.spec.layers[-1]

    @property
    def layer_num(self) -> int:
        """Layers held here."""
        return len(self.spec.layers)

    def register_layer_transfer_counter(self, layer_transfer_counter: LayerTransferCounter) -> None:
        """Register a counter: readers of a layer then wait for the load that it names."""
        self.layer_transfer_counter = layer_transfer_counter

    def wait_for_layer(self, layer_id: int) -> int:
        """Wait for the load of a layer; return the index of its buffers. On CUDA only work that is
        queued later may read them.

        Raises:
            KeyError: The layer has none of this state.
        """
        if self.layer_transfer_counter is not None:
            self.layer_transfer_counter.wait_until(layer_id)
        return self._place[layer_id]

    def place_to_write(self, layer: LayerOrId) -> int:
        """Index of the layer's buffers, to store new tokens. Does not wait, since a load and a
        forward fill different slots.

        Raises:
            KeyError: The layer has none of this state.
        """
        return self._place[layer if isinstance(layer, int) else layer.layer_id]

    def get_contiguous_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
        """All layers of the first buffer, then of the next: address, bytes, bytes of a page (or of
        one state)."""
        layers = [layer for part in self.parts for layer in part]
        return (
            [layer.data_ptr() for layer in layers],
            [layer.nbytes for layer in layers],
            [layer[0].nbytes * self.page_items for layer in layers],
        )


class PagedDevicePool(BaseDevicePool):
    """Token slots in pages: one zeroed tensor for each buffer of the spec, cut into its layers.

    Slots `[0, page_size)` are the padding page, which has no owner: padded batches write there.
    Slots `[page_size, size + page_size)` are handed out by an allocator. Slot s lies in item
    `s // spec.stride`; a layer has `(size + page_size) // spec.stride` items.
    """

    host_pool = "sglang.srt.mem_cache.host.host_pool.HostKVCache"

    def __init__(
        self, spec: StateSpec, size: int, page_size: int, device: torch.device | str
    ) -> None:
        """
        Args:
            spec: Spec of the state, whose item is a token, or several.
            size: Token slots besides the padding page.
            page_size: Tokens per page.

        Raises:
            ValueError: A size is not positive, `size` is not whole pages, or see `check_page_size`.
        """
        if min(size, page_size) < 1 or size % page_size:
            raise ValueError(f"need size and page_size >= 1 and whole pages: {size=}, {page_size=}")
        check_page_size((spec,), page_size)
        super().__init__(spec, size, device, page_size)
        # Zeroed, since padded batches read the padding page, and garbage may be NaN. Layers are
        # equally far apart, so that one copy takes a page of all of them.
        self.parts = tuple(
            list(
                torch.zeros(
                    (len(spec.layers), (size + page_size) // spec.stride, *buffer.shape),
                    dtype=_stored_dtype(buffer.dtype),
                    device=self.device,
                ).unbind(0)
            )
            for buffer in spec.buffers
        )

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """Copy slots `src_loc` to `tgt_loc` (int64 `[n]`) in every layer; whole pages if an item
        stands for several."""
        target, source = self.items_of(tgt_loc), self.items_of(src_loc)
        for part in self.parts:
            for buffer in part:
                buffer[target] = buffer[source]


def whole_items(slots: torch.Tensor, stride: int) -> torch.Tensor:
    """The items of whole pages; see `BaseDevicePool.items_of`."""
    return slots if stride == 1 else slots[::stride] // stride


def held_layers(layer_num: int, start_layer: int | None, end_layer: int | None) -> tuple[int, ...]:
    """Ids of the consecutive model layers that a pool with SGLang's arguments holds.

    Args:
        start_layer: First layer; 0 by default.
        end_layer: Last layer; follows from `layer_num` by default.

    Raises:
        ValueError: The arguments contradict each other.
    """
    first = start_layer or 0
    held = tuple(range(first, first + layer_num))
    if end_layer not in (None, *held[-1:]):
        raise ValueError(f"layers do not fit together: {layer_num=}, {start_layer=}, {end_layer=}")
    return held


def refuse_memory_saver(enabled: bool) -> None:
    """Raise ValueError if `enabled`: pools do not support a memory saver."""
    if enabled:
        raise ValueError("enable_memory_saver is not supported: pass False")


def _stored_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of the buffers: uint8 for fp8, for which not all devices have index operations."""
    return torch.uint8 if dtype in FP8_DTYPES else dtype
