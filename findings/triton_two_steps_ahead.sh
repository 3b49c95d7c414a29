#!/usr/bin/env bash
# triton 3.6.0: a value that a loop carries over two steps takes the async copies from all loads of
# the loop, without a warning.
#
# Expected: a scale that is loaded two steps before its use changes nothing for the tiles of a
# product: with num_stages=4 they come by cp.async, as they do when the scale is loaded in the step
# itself, or one step before.
# Seen (compiled for sm_90; no GPU is needed): 32 async copies and 65,536 bytes of shared memory
# with the scale loaded in the step or one step ahead; none and 16,384 bytes with `scale, after =
# after, tl.load(...)`. The product is right and waits for each of its loads.
#
# Exit status 0: as described. 1: this version behaves otherwise now.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check --no-deps triton==3.6.0
cat > "$folder/loops.py" <<'PYTHON'
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TILE = 64


@triton.jit
def in_step(a, b, scales, out, steps, TILE: tl.constexpr):
    row, col = tl.arange(0, TILE)[:, None], tl.arange(0, TILE)[None, :]
    total = tl.zeros((TILE, TILE), tl.float32)
    for step in range(steps):
        left = tl.load(a + row * 4096 + step * TILE + col)
        right = tl.load(b + (step * TILE + row) * 4096 + col)
        total += tl.dot(left, right) * tl.load(scales + step)
    tl.store(out + row * TILE + col, total)


@triton.jit
def one_ahead(a, b, scales, out, steps, TILE: tl.constexpr):
    row, col = tl.arange(0, TILE)[:, None], tl.arange(0, TILE)[None, :]
    total = tl.zeros((TILE, TILE), tl.float32)
    scale = tl.load(scales)
    for step in range(steps):
        left = tl.load(a + row * 4096 + step * TILE + col)
        right = tl.load(b + (step * TILE + row) * 4096 + col)
        total += tl.dot(left, right) * scale
        scale = tl.load(scales + step + 1)
    tl.store(out + row * TILE + col, total)


@triton.jit
def two_ahead(a, b, scales, out, steps, TILE: tl.constexpr):
    row, col = tl.arange(0, TILE)[:, None], tl.arange(0, TILE)[None, :]
    total = tl.zeros((TILE, TILE), tl.float32)
    scale, after = tl.load(scales), tl.load(scales + 1)
    for step in range(steps):
        left = tl.load(a + row * 4096 + step * TILE + col)
        right = tl.load(b + (step * TILE + row) * 4096 + col)
        total += tl.dot(left, right) * scale
        scale, after = after, tl.load(scales + step + 2)
    tl.store(out + row * TILE + col, total)


def compiled(kernel):
    """Async copies, and bytes of shared memory."""
    types = {"a": "*fp16", "b": "*fp16", "scales": "*fp32", "out": "*fp32", "steps": "i32"}
    aligned = {(at,): [["tt.divisibility", 16]] for at in (0, 1)}
    source = ASTSource(kernel, types | {"TILE": "constexpr"}, {(5,): TILE}, aligned)
    target, options = GPUTarget("cuda", 90, 32), {"num_stages": 4, "num_warps": 4}
    made = triton.compile(source, target=target, options=options)
    found = made.asm["ptx"].count("cp.async.cg"), made.metadata.shared
    print(f"{kernel.__name__}: {found[0]} async copies, {found[1]} bytes of shared memory")
    return found


assert compiled(in_step) == (32, 65536), "otherwise now"
assert compiled(one_ahead) == (32, 65536), "otherwise now"
assert compiled(two_ahead) == (0, 16384), "otherwise now"
PYTHON
"$folder/venv/bin/python" "$folder/loops.py"
