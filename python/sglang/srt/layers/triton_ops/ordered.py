"""Numbers as integers of the same order, for kernels that choose by bits."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def ordered(x: tl.tensor) -> tl.tensor:
    """fp32 to int32 of the same order; -0 and 0 are equal. NaN is beyond all, by its sign."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    # The other bits of negative numbers are in reverse order.
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
