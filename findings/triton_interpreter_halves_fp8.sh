#!/usr/bin/env bash
# triton 3.9.0: a kernel that is interpreted halves numbers that fp8 rounds up to a power of two.
#
# Expected: a kernel under TRITON_INTERPRET=1 rounds as the compiled one does with its instruction
# cvt.rn.satfinite: to the nearest, a tie to the even one, at most 448. torch 2.13.0 casts so too.
# Seen: 7.95 becomes 4 in float8e4nv, where the nearest is 8. The carry of the mantissa does not reach
# the exponent. One number in forty loses half of its size; in float8e5 one in twenty does. A tie goes
# up. 1000 and infinity become 256, and a NaN becomes the number 384. A test on the CPU of a kernel
# that quantizes to fp8 fails for sound code, or does not show that the GPU would keep the NaN.
#
# The compiled kernel is only read, so no GPU is needed.
# Exit status 0: as described. 1: these versions behave otherwise now.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check --no-deps triton==3.9.0
cat > "$folder/cast.py" <<'PYTHON'
import os
import sys

import torch
import triton
import triton.language as tl

interpreted = os.environ.get("TRITON_INTERPRET") == "1"


@triton.jit
def cast(from_ptr, to_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(to_ptr + at, tl.load(from_ptr + at).to(to_ptr.dtype.element_ty))


if not interpreted:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {"from_ptr": "*fp32", "to_ptr": "*fp8e4nv", "SIZE": "constexpr"}
    source = ASTSource(cast, types, constexprs={"SIZE": 1024})
    code = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    found = "cvt.rn.satfinite.e4m3x2.f32" in code
    print("compiled: cvt.rn.satfinite.e4m3x2.f32:", found)
    raise SystemExit(not found)

inf, nan = float("inf"), float("nan")
chosen = torch.tensor([7.95, -0.497, 1.0625, 1000.0, inf, nan, 448.0, 1.2])
rounded = torch.empty_like(chosen, dtype=torch.float8_e4m3fn)
cast[(1,)](chosen, rounded, 8)
print("from        ", chosen.tolist())
print("interpreted ", rounded.float().tolist())
print("torch       ", chosen.to(torch.float8_e4m3fn).float().tolist())
held = rounded.float().tolist() == [4.0, -0.25, 1.125, 256.0, 256.0, 384.0, 448.0, 1.25]
numbers = torch.randn(4096, generator=torch.Generator().manual_seed(0)) * 10
for kind, least, most in (torch.float8_e4m3fn, 0.015, 0.035), (torch.float8_e5m2, 0.035, 0.065):
    rounded = torch.empty_like(numbers, dtype=kind)
    cast[(1,)](numbers, rounded, 4096)
    halved = (rounded.float() * 2 == numbers.to(kind).float()).float().mean().item()
    print(f"{kind}: {halved:.1%} of normal random numbers are half of torch's")
    held &= least < halved < most
raise SystemExit(not held)
PYTHON
export TRITON_CACHE_DIR="$folder/cache" TRITON_DEFAULT_FP_FUSION=1
"$folder/venv/bin/python" "$folder/cast.py"
TRITON_INTERPRET=1 "$folder/venv/bin/python" "$folder/cast.py"
