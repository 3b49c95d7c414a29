#!/usr/bin/env bash
# triton 3.6.0 and 3.9.0: what is stored and multiplied twice is computed three times.
#
# Expected: a tile that a program computes, stores and gives to two products is computed once, and
# converted to the layout of the products' operand.
# Seen (compiled for sm_90 with 8 warps; no GPU is needed): the whole sum behind the tile is there
# once for the store and once for each product's layout, 96 multiply-adds a thread instead of 32, and
# its inputs go through shared memory to each layout. Nothing says so; registers run out. A move in
# inline assembly that counts as impure (`is_pure=False`) keeps it at one.
#
# Exit status 0: as described. 1: these versions behave otherwise now.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/mix.py" <<'PYTHON'
import re

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def mix(x_ptr, factors_ptr, weights_ptr, mixed_ptr, sums_ptr, COLS: tl.constexpr, MOVED: tl.constexpr):
    rows, cols, outs = tl.arange(0, 64), tl.arange(0, 32), tl.arange(0, 32)
    sums = tl.zeros([64, 32], tl.float32)
    for start in range(0, COLS, 32):
        at = rows[:, None] * COLS + start + cols[None, :]
        mixed = tl.zeros([64, 32], tl.float32)
        for source in tl.static_range(4):
            factor = tl.load(factors_ptr + source * 64 + rows)
            mixed += tl.load(x_ptr + source * 64 * COLS + at).to(tl.float32) * factor[:, None]
        tile = mixed.to(tl.bfloat16)
        tl.store(mixed_ptr + at, tile)
        if MOVED:
            tile = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [tile], tile.dtype, False, 2)
        weight = tl.load(weights_ptr + (start + cols)[:, None] * 32 + outs[None, :])
        high = weight.to(tl.bfloat16)
        low = (weight - high.to(tl.float32)).to(tl.bfloat16)
        sums = tl.dot(tile, low, sums)
        sums = tl.dot(tile, high, sums)
    tl.store(sums_ptr + rows[:, None] * 32 + outs[None, :], sums)


def layouts_and_steps(moved):
    """Layouts in which the tile is rounded, and multiply-adds of a thread."""
    types = {name: "*bf16" for name in ("x_ptr", "mixed_ptr")}
    types |= {name: "*fp32" for name in ("factors_ptr", "weights_ptr", "sums_ptr")}
    types |= {"COLS": "constexpr", "MOVED": "constexpr"}
    types = {name: types[name] for name in mix.arg_names}
    source = ASTSource(
        mix, types, constexprs={"COLS": 4096, "MOVED": moved},
        attrs={(place,): [["tt.divisibility", 16]] for place in range(5)},
    )
    code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8}).asm
    rounded = re.findall(r"arith\.truncf .*tensor<64x32xf32, (.+?)> to", code["ttgir"])
    return len(set(rounded)), len(re.findall(r"\b(?:fma\.rn|mul|add)\.f32", code["ptx"]))


plain, moved = layouts_and_steps(False), layouts_and_steps(True)
print(f"triton {triton.__version__}: layouts of the tile, multiply-adds of a thread")
print("as it is written     ", *plain)
print("with an opaque move  ", *moved)
raise SystemExit(plain != (3, 96) or moved != (1, 32))
PYTHON
for version in 3.6.0 3.9.0; do
  python3 -m venv "$folder/$version"
  "$folder/$version/bin/pip" install --quiet --disable-pip-version-check --no-deps "triton==$version"
  TRITON_CACHE_DIR="$folder/cache-$version" TRITON_DEFAULT_FP_FUSION=1 \
    "$folder/$version/bin/python" "$folder/mix.py"
done
