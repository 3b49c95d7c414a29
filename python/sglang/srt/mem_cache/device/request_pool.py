"""State of running requests that has no snapshots: a state that is empty at each page boundary, so
that no prefix needs it.

An example is the unfinished group of a model that compresses several tokens to one row. No tier
caches such a state. It moves between a prefill and a decode server. A request that starts again
begins at a page boundary, with zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch

from sglang.srt.hardware_backend.device_runtime import on_device
from sglang.srt.mem_cache.device.base_device_pool import BaseDevicePool
from sglang.srt.mem_cache.device.state_spec import ItemKind, StateSpec


class RequestPool(BaseDevicePool):
    """A slot for each row of `ReqToTokenPool`, which zeroes it when a request gets the row.

    Attributes:
        buffers: For each buffer of the spec a tensor `[layers, size + 1, *shape]`. The last slot is
            for requests that only pad a batch.
    """

    def __init__(self, spec: StateSpec, size: int, device: torch.device | str) -> None:
        """
        Args:
            spec: Spec of the state, whose item is a request.
            size: Rows besides padding.

        Raises:
            ValueError: `size` is not positive, or an item of `spec` is not a request.
        """
        if size < 1 or spec.item is not ItemKind.REQUEST:
            raise ValueError(
                f"state '{spec.name}', one for each {spec.item}, cannot have {size} rows of "
                "requests"
            )
        super().__init__(spec, size, device)
        self.buffers = tuple(
            torch.zeros(
                (self.layer_num, size + 1, *buffer.shape), dtype=buffer.dtype, device=self.device
            )
            for buffer in spec.buffers
        )
        self.parts = tuple(map(list, self.buffers))

    @classmethod
    def from_spec(
        cls, spec: StateSpec, size: int, page_size: int, device: torch.device | str
    ) -> Self:
        """The pool of `size` rows. A page is one state; `page_size` is ignored."""
        return cls(spec, size, device)

    def zero(self, rows: Sequence[int]) -> None:
        """Zero the states of `rows`, in order with the current stream."""
        slots = on_device(rows, self.device, torch.int64)
        for buffer in self.buffers:
            buffer.index_fill_(1, slots, 0)
