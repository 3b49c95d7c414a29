"""What every device pool is: slots of one kind of state, and the layers that have it.

A pool is called from the scheduler thread; copy streams read and write its buffers as well, and
the layer counter keeps their order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import torch

from sglang.srt.mem_cache.device.state_spec import StateSpec

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


class LayerTransferCounter(Protocol):
    """Orders the readers of a layer after the load from L2 that fills it."""

    def set_consumer(self, index: int) -> None:
        """Name the load that the next forward has to wait for; -1: none."""

    def wait_until(self, threshold: int) -> None:
        """Order the caller after model layer `threshold` (from 0) of that load."""


class BaseDevicePool(ABC):
    """Slots of one kind of state in device memory.

    Attributes:
        spec: What a slot stores, and in which of the model's layers.
        size: Slots that can be handed out.
        page_size: Slots of a page: tokens, or 1 where a slot stands for a whole prefix.
        dtype: Of the values, as they are read.
        store_dtype: Of the buffers.
        device: Where the buffers are.
        layer_transfer_counter: Orders readers after loads; None: nothing loads.
    """

    def __init__(
        self, spec: StateSpec, size: int, device: torch.device | str, page_size: int = 1
    ) -> None:
        self.spec = spec
        self.size = size
        self.page_size = page_size
        self.dtype = spec.dtype
        # Index operations on fp8 are not implemented everywhere; bytes are.
        self.store_dtype = torch.uint8 if spec.dtype in FP8_DTYPES else spec.dtype
        self.device = torch.device(device)
        self.layer_transfer_counter: LayerTransferCounter | None = None
        self._place = {layer: place for place, layer in enumerate(spec.layers)}

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
        """From now on readers of a layer wait for the load that the counter names."""
        self.layer_transfer_counter = layer_transfer_counter

    def wait_for_layer(self, layer_id: int) -> int:
        """Index of the layer's buffers, once they may be read: on CUDA, by what is queued next.

        Args:
            layer_id: The model's layer.

        Raises:
            KeyError: The layer has none of this state.
        """
        if self.layer_transfer_counter is not None:
            self.layer_transfer_counter.wait_until(layer_id)
        return self._place[layer_id]

    @abstractmethod
    def get_contiguous_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
        """For each buffer of each layer: address, bytes, bytes of a page (or of one state)."""
