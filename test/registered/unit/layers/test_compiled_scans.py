"""Kernels of Mamba-2 as Triton compiles them for Hopper, which needs no GPU: what they take."""

from __future__ import annotations

import re
from typing import Any, Final

import pytest
import triton.knobs

from rigs.layers.compiled_kernels import compile_kernel, usage_of
from sglang.srt.layers.triton_ops.mamba import chunks, finish, tokens
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=12, suite="base-a-test-cpu")

if triton.knobs.runtime.interpret:
    pytest.skip("interpreted kernels are not compiled", allow_module_level=True)

SHARED_BYTES: Final = 227 << 10
"""Shared memory of one program on Hopper."""
NANO: Final = {"HEADS": 64, "GROUPS": 8, "HEAD_DIM": 64, "STATE": 128}
"""Nemotron-3-Nano's shape on one rank."""
VALUES, CHANNELS = 4096, 6144
FP32: Final = re.compile("steps|totals|weight|bias|a_log|skip|temporal|scanned")
INDICES: Final = re.compile("read|write|track|bounds|requests_ptr|firsts")


def type_of(name: str) -> str:
    """Triton's name for the type of an argument."""
    if name.endswith("_ptr"):
        return "*i64" if INDICES.search(name) else "*fp32" if FP32.search(name) else "*bf16"
    return "fp32" if name == "eps" else "i32"


SCAN: Final = NANO | {"KERNEL": 4, "BLOCK_N": 128, "TRACK": False, "EARLY": 0}
CHUNK: Final = NANO | {"CHUNK": 128, "BLOCK_N": 64}
CASES: Final[dict[str, tuple[Any, dict[str, Any], int]]] = {
    "a token of one request": (tokens._scan_kernel, SCAN | {"BLOCK_P": 16, "EACH": 1}, 2),
    "a token of many": (tokens._scan_kernel, SCAN | {"BLOCK_P": 32, "EACH": 1}, 2),
    "some tokens": (tokens._scan_kernel, SCAN | {"BLOCK_P": 32, "EACH": 0, "TRACK": True}, 4),
    "norm": (
        finish._finish_kernel,
        {
            "GROUPS": 8, "VALUES": VALUES, "CHANNELS": CHANNELS, "KERNEL": 4, "BLOCK_V": 512,
            "BLOCK_C": 256, "PAST": 4, "PARTS": 3, "EACH": 0, "TRACK": True, "EARLY": 0,
        },
        2,
    ),
    "time steps": (
        chunks._steps_kernel,
        {"HEADS": 64, "DT0": VALUES + CHANNELS, "CHUNK": 128, "BLOCK_H": 16},
        4,
    ),
    "convolution": (
        chunks._convolve_kernel,
        {
            "FIRST": VALUES, "CHANNELS": CHANNELS, "KERNEL": 4, "CHUNK": 128, "TAPS": 4, "ROWS": 8,
            "BLOCK_D": 128,
        },
        8,
    ),
    "states": (chunks._advance_kernel, CHUNK | {"BLOCK_P": 32}, 4),
    "outputs": (chunks._output_kernel, CHUNK | {"BLOCK_T": 64}, 4),
    "outputs of larger heads": (
        chunks._output_kernel, CHUNK | {"BLOCK_T": 64, "HEAD_DIM": 128, "STATE": 256}, 4,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_program_keeps_everything_in_registers_and_fits(name: str) -> None:
    kernel, constants, warps = CASES[name]
    pointers = {arg for arg in kernel.arg_names if arg.endswith("_ptr")}
    aligned = {arg for arg in pointers if not INDICES.search(arg)}
    found = usage_of(compile_kernel(kernel, constants, type_of, aligned=aligned, warps=warps))
    assert found.spilled == 0 and found.shared <= SHARED_BYTES, found
