"""Kernels of Kimi Delta Attention as Triton compiles them for Hopper, which needs no GPU."""

from __future__ import annotations

from typing import Any, Final

import pytest
import triton.knobs

from rigs.layers.compiled_kernels import Usage, compile_kernel, usage_of
from sglang.srt.layers.triton_ops import chunked_convolution, chunked_delta_net
from sglang.srt.layers.triton_ops.kda import chunks, tokens
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=20, suite="base-a-test-cpu")

if triton.knobs.runtime.interpret:
    pytest.skip("interpreted kernels are not compiled", allow_module_level=True)

DIM: Final = 128
CONSTANTS: Final[dict[str, Any]] = {
    "Q0": 0, "K0": 32 * DIM, "V0": 64 * DIM, "B0": 98 * DIM, "HEADS": 32, "DIM": DIM, "KERNEL": 4,
    "CHUNK": 64, "LEVELS": 6, "BLOCK": DIM, "BLOCK_K": DIM, "BLOCK_V": 32, "PAST": 4, "BOUND": 0.0,
}  # fmt: skip
"""Kimi-Linear-48B-A3B's."""
ONE: Final = {"EACH": 1, "TRACK": False, "EARLY": 1}
SHORT: Final = {"EACH": 0, "TRACK": True, "EARLY": 0}
CONVOLUTION: Final = {
    "QK_STEP": DIM, "V_STEP": DIM, "KEY_HEADS": 32, "REPEATS": 1, "KEY_DIM": DIM, "VALUE_DIM": DIM,
    "TAPS": 4, "ROWS": 4, "BLOCK_D": DIM,
}  # fmt: skip
KERNELS: Final[dict[str, tuple[Any, dict[str, Any], int, int]]] = {
    "convolution": (chunked_convolution._convolve_kernel, CONVOLUTION, 4, 40),
    "gates": (chunks._gates_kernel, {}, 4, 40),
    "bounded gates": (chunks._gates_kernel, {"BOUND": -5.0}, 4, 40),
    "products": (chunks._products_kernel, {"BLOCK_D": 64}, 8, 112),
    "inverse": (chunked_delta_net._invert_kernel, {}, 4, 40),
    "solve": (chunks._solve_kernel, {"BLOCK_D": 32}, 4, 40),
    "advance": (chunks._advance_kernel, {}, 4, 112),
    "output": (chunks._output_kernel, {}, 4, 112),
    "one token": (tokens._rule_kernel, {**ONE, "BLOCK_V": 16}, 2, 8),
    "tokens": (tokens._rule_kernel, SHORT, 2, 8),
    "bounded tokens": (tokens._rule_kernel, {**SHORT, "BOUND": -5.0}, 2, 8),
    "norm": (tokens._finish_kernel, ONE, 1, 8),
}
"""Kernel, its own constants, warps, most KiB of shared memory: half of a multiprocessor's 228, so
that two programs run at once, or less."""
INDICES: Final = frozenset(
    f"{name}_ptr" for name in "bounds firsts read requests track track_lens write".split()
)
EXACT: Final = frozenset(
    f"{name}_ptr"
    for name in "a_log attended decays dt_bias inverse system temporal totals weight".split()
)


def usage(name: str) -> Usage:
    kernel, own, warps, _ = KERNELS[name]

    def type_of(arg: str) -> str:
        if not arg.endswith("_ptr"):
            return "fp32" if arg in ("scale", "eps") else "i32"
        if arg == "out_ptr" and kernel is tokens._rule_kernel:
            return "*fp32"
        return "*i64" if arg in INDICES else "*fp32" if arg in EXACT else "*bf16"

    aligned = {arg for arg in kernel.arg_names if arg.endswith("_ptr")} - INDICES
    stages = {"advance": 2, "solve": 1}.get(name, 3)
    return usage_of(
        compile_kernel(
            kernel, CONSTANTS | own, type_of, aligned=aligned, warps=warps, stages=stages
        )
    )


@pytest.mark.parametrize("name", KERNELS)
def test_nothing_is_spilled_and_two_programs_share_a_multiprocessor(name: str) -> None:
    found = usage(name)
    assert found.spilled == 0, found
    assert found.shared <= KERNELS[name][3] << 10
