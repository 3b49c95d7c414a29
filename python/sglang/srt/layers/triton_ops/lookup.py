"""Lookup in a table that is split over ranks: this rank's rows, and zeros for other ranks' rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang.srt.layers.placement import Share


@triton.jit
def _look_up_kernel(
    ids_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    begin: tl.tensor,
    count: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid `(ids, size / BLOCK)`: one program copies BLOCK columns of one row."""
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(ids_ptr + token) - begin
    # A vector, because Triton's interpreter takes no scalar masks.
    places = place + tl.zeros([BLOCK], tl.int64)
    is_here = (places >= 0) & (places < count) & (cols < SIZE)
    row = tl.load(weight_ptr + place * SIZE + cols, mask=is_here, other=0.0)
    tl.store(out_ptr + token * SIZE + cols, row, mask=cols < SIZE)


def look_up_share(ids: torch.Tensor, weight: torch.Tensor, rows: Share) -> torch.Tensor:
    """Look up a row for each id: a new tensor `[n, size]`.

    Args:
        ids: int64 `[n]`, dense: row indices in the whole table.
        weight: Contiguous `[at least rows.size, size]`.
    """
    assert weight.is_contiguous() and ids.stride(0) == 1
    size = weight.shape[1]
    out = torch.empty((len(ids), size), dtype=weight.dtype, device=weight.device)
    block = min(2048, triton.next_power_of_2(size))
    _look_up_kernel[(len(ids), triton.cdiv(size, block))](
        ids, weight, out, rows.begin, rows.size, SIZE=size, BLOCK=block, num_warps=4
    )
    return out
