"""Maps fp32 numbers to integers in the same order, for kernels that compare bits."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def ordered(x: tl.tensor) -> tl.tensor:
    """fp32 to int32 in the same order; -0 equals 0. NaN is first or last, by its sign."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    # The other bits of negative numbers are in reverse order.
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
