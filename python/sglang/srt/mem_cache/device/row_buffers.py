"""Buffers of rows, in fp8 (`fp8_rows.py`) or as values: storing and gathering at slots.

Rows in fp8 are rounded when they are stored. On a GPU, kernels store and gather them
(`fp8_rows_triton.py`).
"""

from __future__ import annotations

import torch

from sglang.srt.mem_cache.device.fp8_rows import pack, read_rows


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
    if buffer.is_cuda:
        from sglang.srt.mem_cache.device import fp8_rows_triton

        fp8_rows_triton.store_rows(buffer, slots, values, elements)
        return
    rows = pack(values.reshape(len(values), values.shape[-1]), elements)
    buffer.index_copy_(0, slots, rows.view(len(rows), *buffer.shape[1:]))


def gather_rows(
    buffer: torch.Tensor, slots: torch.Tensor, elements: int, dtype: torch.dtype
) -> torch.Tensor:
    """Values at slots, `[n, ..., elements + rest]` of `dtype`; arguments as in `store_rows`."""
    if buffer.is_cuda and buffer.dtype is torch.uint8:
        from sglang.srt.mem_cache.device import fp8_rows_triton

        return fp8_rows_triton.gather_rows(buffer, slots, elements, dtype)
    return read_rows(buffer.index_select(0, slots), elements, dtype)
