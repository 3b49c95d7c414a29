"""Buffers of rows, in fp8 (`fp8_rows.py`) or as values: storing and gathering at slots.

Rows in fp8 are rounded when they are stored. Devices with kernels for that use them.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType
from typing import Final

import torch

from sglang.srt.hardware_backend.device_kinds import device_kind
from sglang.srt.mem_cache.device.fp8_rows import pack, read_rows

_KERNELS: Final[dict[str, str | None]] = {
    "cpu": None,
    "cuda": "sglang.srt.mem_cache.device.fp8_rows_triton",
    "npu": None,
}
"""Module with `store_rows` and `gather_rows` of buffers in fp8, by kind of device; None: torch's
operations do it."""


@functools.cache
def _kernels(device: torch.device) -> ModuleType | None:
    module = _KERNELS[device_kind(str(device)).name]
    return None if module is None else importlib.import_module(module)


def store_rows(
    buffer: torch.Tensor, slots: torch.Tensor, values: torch.Tensor, elements: int
) -> None:
    """Store values at slots: in fp8 if the buffer is, else in its dtype.

    Args:
        buffer: `[slots of the pool, ..., width]`; `width` as `stored` in `read_rows`.
        slots: int64 `[n]`.
        values: `[n, ..., elements + rest]`, any float dtype; the middle dimensions are 1.
    """
    if buffer.dtype is not torch.uint8:
        buffer.index_copy_(0, slots, values.to(buffer.dtype))
        return
    kernels = _kernels(buffer.device)
    if kernels is not None:
        kernels.store_rows(buffer, slots, values, elements)
        return
    rows = pack(values.reshape(len(values), values.shape[-1]), elements)
    buffer.index_copy_(0, slots, rows.view(len(rows), *buffer.shape[1:]))


def gather_rows(
    buffer: torch.Tensor, slots: torch.Tensor, elements: int, dtype: torch.dtype
) -> torch.Tensor:
    """Values at slots, `[n, ..., elements + rest]` of `dtype`; arguments as in `store_rows`."""
    kernels = _kernels(buffer.device)
    if kernels is not None and buffer.dtype is torch.uint8:
        found: torch.Tensor = kernels.gather_rows(buffer, slots, elements, dtype)
        return found
    return read_rows(buffer.index_select(0, slots), elements, dtype)
