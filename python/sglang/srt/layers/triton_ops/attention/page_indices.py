"""Page tables in the form of libraries: the page numbers of all requests, concatenated."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024


@triton.jit(do_not_specialize_on_alignment=["rows_ptr", "indptr_ptr"])
def _page_indices_kernel(
    table_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    indptr_ptr: tl.tensor,
    out_ptr: tl.tensor,
    row_stride: tl.tensor,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid `(bs, pages / BLOCK)`: one program writes BLOCK page numbers of one request."""
    request = tl.program_id(0)
    begin = tl.load(indptr_ptr + request)
    count = tl.load(indptr_ptr + request + 1) - begin
    page = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows_ptr + request).to(tl.int64)
    slot = tl.load(table_ptr + row * row_stride + page * PAGE_SIZE, mask=page < count, other=0)
    tl.store(out_ptr + begin + page, slot // PAGE_SIZE, mask=page < count)


def page_indices(
    table: torch.Tensor,
    rows: torch.Tensor,
    indptr: torch.Tensor,
    *,
    total: int,
    longest: int,
    page_size: int,
) -> torch.Tensor:
    """Page numbers of each request's context.

    Args:
        table: int32 `[table rows, tokens]`: slots.
        rows: int64 `[bs]`: the table row of each request.
        indptr: int32 `[bs + 1]`: begin and end of each request's pages in the result.
        total: `indptr[-1]`, at least 1.
        longest: Most pages of one request.

    Returns:
        int32 `[total]` on the table's device.
    """
    out = torch.empty(total, dtype=torch.int32, device=table.device)
    _page_indices_kernel[len(rows), triton.cdiv(longest, _BLOCK)](
        table, rows, indptr, out, table.stride(0), PAGE_SIZE=page_size, BLOCK=_BLOCK
    )
    return out
