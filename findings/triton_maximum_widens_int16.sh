#!/usr/bin/env bash
# Triton 3.6.0: tl.maximum and tl.minimum of an int16 and a Python number give 32 bits, + gives 16.
#
# Expected: one rule for a number beside a tensor, whatever the operation: it takes the tensor's
# type if that can hold it. Triton 3.9.0 does so.
# Seen: with 3.6.0, which torch 2.11 goes with, x + 64 of an int16 x stays int16, and
# tl.maximum(x, 64) is int32. A bitcast of that to bfloat16, which 3.9.0 compiles, is refused for its
# size: a kernel that is written with a new Triton fails on a host with the older one.
# No GPU is needed: kernels are compiled for compute capability 9.0.
#
# Exit status 0: as described. 1: these versions behave otherwise now.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/kernels.py" <<'PYTHON'
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def add(x_ptr, out_ptr):
    at = tl.arange(0, 128)
    sums = tl.load(x_ptr + at) + 64
    tl.store(out_ptr + at, sums.to(tl.bfloat16, bitcast=True))


@triton.jit
def maximum(x_ptr, out_ptr):
    at = tl.arange(0, 128)
    most = tl.maximum(tl.load(x_ptr + at), 64)
    tl.store(out_ptr + at, most.to(tl.bfloat16, bitcast=True))


@triton.jit
def minimum(x_ptr, out_ptr):
    at = tl.arange(0, 128)
    least = tl.minimum(tl.load(x_ptr + at), 64)
    tl.store(out_ptr + at, least.to(tl.bfloat16, bitcast=True))


print("Triton", triton.__version__)
seen = {}
for kernel in (add, maximum, minimum):
    source = ASTSource(kernel, {"x_ptr": "*i16", "out_ptr": "*bf16"}, constexprs={})
    try:
        triton.compile(source, target=GPUTarget("cuda", 90, 32))
        seen[kernel.__name__] = "16 bits"
    except Exception as error:
        text = str(error.__cause__ or error)
        assert "size 32 to data-type of size 16" in text, text
        seen[kernel.__name__] = "32 bits"
    print(f"{kernel.__name__} of an int16 and 64: {seen[kernel.__name__]}")
wide = "32 bits" if triton.__version__ == "3.6.0" else "16 bits"
assert seen == {"add": "16 bits", "maximum": wide, "minimum": wide}, "otherwise now"
PYTHON
for version in 3.6.0 3.9.0; do
    python3 -m venv "$folder/$version"
    "$folder/$version/bin/pip" install --quiet --disable-pip-version-check "triton==$version"
    TRITON_CACHE_DIR="$folder/cache" "$folder/$version/bin/python" "$folder/kernels.py"
done
