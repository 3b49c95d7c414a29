"""Kernels of windows and sinks as Triton compiles them for Hopper, which needs no GPU."""

from __future__ import annotations

from typing import Any, Final

import pytest
import triton.knobs

from rigs.layers.compiled_kernels import compile_kernel, usage_of
from sglang.srt.layers.triton_ops.attention import (
    decode_attention,
    extend_attention,
    window_decode,
    window_extend,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

if triton.knobs.runtime.interpret:
    pytest.skip("interpreted kernels are not compiled", allow_module_level=True)

OSS: Final = {"NUM_KV_HEADS": 8, "GROUP": 8, "HEAD_DIM": 64, "BLOCK_D": 64, "WINDOW": 128}
"""gpt-oss-120b's shape on one rank."""
LARGE: Final = {"HEAD_DIM": 128, "BLOCK_D": 128, "BLOCK_N": 32}
DECODE: Final = {"ROWS": 16, "EARLY": 1}
TURNED: Final = {"cos_ptr": None, "sin_ptr": None}
"""Queries and keys are rotated already."""
PAGED: Final = {"ROWS": 16, "JOINED_ROWS": 8, "JOINED_PARTS": 8, "BLOCK": 64, "GATED": False} | {
    "APART": False, "EARLY": 1, "EARLY_KV": True, "SPLIT": True,
}  # fmt: skip
KERNELS: Final[dict[str, tuple[Any, dict[str, Any], int, int]]] = {
    "decode": (window_decode._decode_kernel, DECODE | {"BLOCK": 128}, 4, 1),
    "copy": (window_decode._decode_kernel, {"ROWS": 16, "EARLY": 0, "BLOCK": 128}, 4, 1),
    "decode of long windows": (
        window_decode._decode_kernel, DECODE | TURNED | {"BLOCK": 128, "WINDOW": 1000}, 4, 1,
    ),
    "short prefill": (window_extend._extend_kernel, {"ROWS": 16, "BLOCK_N": 64}, 4, 3),
    "prefill": (window_extend._extend_kernel, {"ROWS": 128, "BLOCK_N": 32}, 8, 3),
    "prefill of large heads": (window_extend._extend_kernel, LARGE | {"ROWS": 128}, 8, 3),
    "last tokens": (
        window_extend._extend_kernel, {"ROWS": 16, "BLOCK_N": 64, "blocks_ptr": None}, 4, 3,
    ),
    "store": (window_extend._store_kernel, {"BLOCK": 64}, 4, 3),
    "paged decode": (decode_attention._decode_kernel, PAGED, 4, 2),
    "paged prefill": (
        extend_attention._extend_kernel, {"ROWS": 128, "BLOCK_N": 64, "SPLIT": False}, 4, 3,
    ),
}  # fmt: skip
"""Kernel, its own constants, warps, stages; with sinks."""
INDICES: Final = frozenset(
    f"{name}_ptr" for name in "rows lens slots first read track positions bounds track_lens".split()
)
INT32: Final = frozenset(("blocks_ptr", "table_ptr", "arrivals_ptr"))
FP32: Final = frozenset(("sinks_ptr", "parts_ptr", "lse_ptr", "scale"))


def type_of(name: str) -> str:
    """Triton's name for the type of an argument."""
    if name in FP32:
        return "*fp32" if name.endswith("_ptr") else "fp32"
    if not name.endswith("_ptr"):
        return "i32"
    return "*i64" if name in INDICES else "*i32" if name in INT32 else "*bf16"


ALONE: Final = frozenset({"prefill of large heads"})
"""Kernels of which a multiprocessor has room for one program."""


@pytest.mark.parametrize("name", KERNELS)
def test_nothing_is_spilled_and_two_programs_share_a_multiprocessor(name: str) -> None:
    kernel, own, warps, stages = KERNELS[name]
    aligned = {arg for arg in kernel.arg_names if arg.endswith(("_ptr", "stride"))} - INDICES
    found = usage_of(
        compile_kernel(kernel, OSS | own, type_of, aligned=aligned, warps=warps, stages=stages)
    )
    programs = 1 if name in ALONE else 2
    assert found.spilled == 0, found
    assert programs * found.registers * 32 * warps <= 1 << 16, found
    assert programs * found.shared <= 227 << 10, found
