"""4-bit products as Triton compiles them for Hopper, which needs no GPU."""

from __future__ import annotations

from typing import Any

import pytest
import triton
import triton.knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sglang.srt.layers.triton_ops.scaled import product, routed_experts
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="base-a-test-cpu")

if triton.knobs.runtime.interpret:
    pytest.skip("interpreted kernels are not compiled", allow_module_level=True)

HOPPER = GPUTarget("cuda", 90, 32)
WEIGHT = {
    "N": 4096, "K": 7168, "FP8": False, "ZEROS": False, "HEIGHT": 1, "BLOCK_N": 128, "BLOCK_K": 128,
    "TILES": 4, "TMA": False, "CUDA": True,
}  # fmt: skip
CONSTANTS: dict[str, dict[str, Any]] = {
    "product": WEIGHT
    | {"GROUP": 128, "BLOCK": 128, "SPLITS": 1, "BLOCK_T": 64, "BIAS": False, "EARLY": False},
    "routed_experts": WEIGHT
    | {"GROUP": 32, "BLOCK": 32, "TOP_K": 8, "USES": 8, "FACTORS": False, "TILE_ROWS": 64},
}
BYTES = ("weight_ptr", "zeros_ptr")
INDICES = ("order_ptr", "table_ptr", "count_ptr", "arrivals_ptr")


def type_of(name: str) -> str:
    """Triton's name for the type of an argument."""
    if not name.endswith("_ptr"):
        return "i32"
    return "*u8" if name in BYTES else "*i32" if name in INDICES else "*bf16"


@pytest.mark.parametrize("name", CONSTANTS)
def test_a_step_ends_its_product_before_the_next_step(name: str) -> None:
    """The left operand is in registers, which the next step writes to."""
    kernel = {"product": product, "routed_experts": routed_experts}[name]._product_kernel
    constants = CONSTANTS[name]
    names = kernel.arg_names
    compiled = triton.compile(
        ASTSource(
            kernel,
            {arg: "constexpr" if arg in constants else type_of(arg) for arg in names},
            constexprs={(names.index(arg),): value for arg, value in constants.items()},
            attrs={
                (i,): [["tt.divisibility", 16]]
                for i, arg in enumerate(names)
                if arg.endswith("_ptr") or arg == "stride"
            },
        ),
        target=HOPPER,
        options={"num_warps": 4, "num_stages": 3},
    )
    step, _ = compiled.asm["ptx"].split("// =>This Inner Loop Header")[1].split(" bra ", 1)
    products = step.split("wgmma.commit_group")
    assert len(products) == 3, "one for the low integers, one for the high ones"
    assert all("wgmma.wait_group.sync.aligned 0" in text for text in products[1:])


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
