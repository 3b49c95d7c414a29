"""4-bit floats (e2m1) with exponents (e8m0) as scales, as parts of kernels.

Twice a float is an integer from -12 to 12. A GPU finds it, plus 16, in two tables of eight bytes,
one for each sign; then it is an integer with zero point 16 and half of the scale. Four bytes of a
weight have eight floats: bytes 0 and 2 of a result of the tables are of low bits, the others of
high bits.

Source: OCP Microscaling Formats (MX) Specification 1.0, sections 5.3.3 and 5.4.1.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

ZERO: Final = tl.constexpr(16)
"""Zero point of the integers in the tables."""
_LOOK_UP: Final = """
.reg .b32 m, n, p, q, s, t, u;
and.b32 m, PACKED, 0x77777777;
shr.u32 n, m, 16;
prmt.b32 p, 0x13121110, 0x1C181614, m;
prmt.b32 q, 0x0D0E0F10, 0x04080A0C, m;
shl.b32 u, PACKED, 4;
prmt.b32 s, u, PACKED, 0xD9C8;
lop3.b32 t, p, q, s, 0xD8;
prmt.b32 p, 0x13121110, 0x1C181614, n;
prmt.b32 q, 0x0D0E0F10, 0x04080A0C, n;
prmt.b32 s, u, PACKED, 0xFBEA;
lop3.b32 u, p, q, s, 0xD8;
"""
"""Bytes 0 and 1 of the weight to t, bytes 2 and 3 to u; s has ones where floats are negative."""
FP4_TO_FLOATS: Final = tl.constexpr(
    "{"
    + _LOOK_UP.replace("PACKED", "$8")
    + """
prmt.b32 $0, t, 0x43000000, 0x7044;
prmt.b32 $1, t, 0x43000000, 0x7244;
prmt.b32 $2, u, 0x43000000, 0x7044;
prmt.b32 $3, u, 0x43000000, 0x7244;
prmt.b32 $4, t, 0x43000000, 0x7144;
prmt.b32 $5, t, 0x43000000, 0x7344;
prmt.b32 $6, u, 0x43000000, 0x7144;
prmt.b32 $7, u, 0x43000000, 0x7344;
}
"""
)
"""Four bytes to four low and four high integers, each plus 128 in fp32; see `tiles`."""
FP4_TO_BF16: Final = tl.constexpr(
    "{"
    + _LOOK_UP.replace("PACKED", "$4")
    + """
.reg .b32 half, zero, a, b, c, d;
mov.b32 half, 0x3F003F00;
mov.b32 zero, 0xC290C290;
prmt.b32 a, t, 0x43434343, 0x4240;
prmt.b32 b, u, 0x43434343, 0x4240;
prmt.b32 c, t, 0x43434343, 0x4341;
prmt.b32 d, u, 0x43434343, 0x4341;
fma.rn.bf16x2 a, a, half, zero;
fma.rn.bf16x2 b, b, half, zero;
fma.rn.bf16x2 c, c, half, zero;
fma.rn.bf16x2 d, d, half, zero;
mul.rn.bf16x2 $0, a, $5;
mul.rn.bf16x2 $1, b, $6;
mul.rn.bf16x2 $2, c, $5;
mul.rn.bf16x2 $3, d, $6;
}
"""
)
"""Four bytes, times bf16 scales, to four low and four high numbers. (128 + 16 + twice) / 2 - 72 is
the float, and all but the last product are exact."""


@triton.jit
def twice_fp4(bits: tl.tensor) -> tl.tensor:
    """Twice the floats whose bits these are, fp32."""
    magnitude = bits & 7
    # The lowest bit is the fraction. Floats below 1 have no leading bit.
    wide = (2 + (magnitude & 1)) << (tl.maximum(magnitude >> 1, 1) - 1)
    twice = tl.where(magnitude < 2, magnitude, wide).to(tl.float32)
    return tl.where(bits >= 8, -twice, twice)


@triton.jit
def power_of_two(bits: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """The values of e8m0 scales, in fp32 or bf16: both have eight bits of exponent. 2^-127 is
    subnormal there, and has one bit of the fraction."""
    if DTYPE is tl.bfloat16:
        # Triton 3.6 widens the maximum of an int16 and a number to 32 bits.
        scales = tl.maximum(bits.to(tl.int16) << 7, 1 << 6).to(tl.int16)
        scales = scales.to(tl.bfloat16, bitcast=True)
    else:
        scales = tl.maximum(bits.to(tl.int32) << 23, 1 << 22).to(tl.float32, bitcast=True)
    return scales
