"""Kernels of ranks with whole experts as Triton compiles them for Hopper, which needs no GPU."""

from __future__ import annotations

from typing import Any, Final

import pytest
import triton.knobs

from rigs.layers.compiled_kernels import compile_kernel
from sglang.srt.layers.triton_ops import expert_order, routed_experts
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

if triton.knobs.runtime.interpret:
    pytest.skip("interpreted kernels are not compiled", allow_module_level=True)

CONSTANTS: Final[dict[str, Any]] = {
    "EXPERTS": 32, "HIDDEN": 7168, "TOP_K": 8, "TILE_ROWS": 64, "BLOCK_E": 32, "BLOCK": 1024,
}  # fmt: skip
"""A rank of eight with DeepSeek-V3.2's experts."""


def ptx_of(kernel: Any, *, has_others: bool) -> str:
    def type_of(name: str) -> str:
        if name in ("parts_ptr", "out_ptr"):
            return "*bf16"
        return "*i32" if name.endswith("_ptr") else "i32"

    constants = CONSTANTS | {"OTHERS": has_others}
    compiled = compile_kernel(kernel, constants, type_of, aligned=kernel.arg_names)
    text: str = compiled.asm["ptx"]
    return text


def test_the_sum_reads_no_ids_if_a_rank_has_all_experts() -> None:
    alone, shared = (
        ptx_of(routed_experts._sum_kernel, has_others=has_others) for has_others in (False, True)
    )
    assert alone.count("ld.global.b32") < shared.count("ld.global.b32")
    assert "setp" in shared


@pytest.mark.parametrize("has_others", [False, True])
@pytest.mark.parametrize("name", ["_order_few_kernel", "_rank_kernel", "_put_kernel"])
def test_uses_are_ordered_without_those_of_other_ranks(name: str, has_others: bool) -> None:
    text = ptx_of(getattr(expert_order, name), has_others=has_others)
    assert ".entry" in text
