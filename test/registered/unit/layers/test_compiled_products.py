"""Products with quantized weights as Triton compiles them for Hopper, which needs no GPU."""

from __future__ import annotations

import itertools
import types
from typing import Any

import pytest
import torch
import triton.knobs

from rigs.layers.compiled_kernels import Usage, compile_kernel, usage_of
from sglang.srt.layers.triton_ops.arguments import ClampedGate, ScaledWeight
from sglang.srt.layers.triton_ops.gemv import plan as plan_plain
from sglang.srt.layers.triton_ops.scaled import (
    few_experts,
    gemv,
    product,
    routed_experts,
    shared_expert,
)
from sglang.srt.layers.triton_ops.scaled.tiles import kind_of
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=30, suite="base-a-test-cpu")

if triton.knobs.runtime.interpret:
    pytest.skip("interpreted kernels are not compiled", allow_module_level=True)

WEIGHT = {
    "N": 4096, "K": 7168, "FP8": False, "ZEROS": False, "HEIGHT": 1, "BLOCK_N": 128, "BLOCK_K": 128,
    "DEPTH": 1, "TILES": 4, "TMA": False, "CUDA": True,
    "HALVES": False, "GATED": False, "LIMIT": 0.0, "ALPHA": 0.0,
}  # fmt: skip
CONSTANTS: dict[str, dict[str, Any]] = {
    "product": WEIGHT
    | {"GROUP": 128, "BLOCK": 128, "SPLITS": 1, "BLOCK_T": 64, "BIAS": False, "EARLY": False},
    "routed_experts": WEIGHT
    | {
        "GROUP": 32,
        "BLOCK": 32,
        "TOP_K": 8,
        "USES": 8,
        "BIAS": False,
        "FACTORS": False,
        "TILE_ROWS": 64,
    },
}
BYTES = ("weight_ptr", "zeros_ptr")
INDICES = ("order_ptr", "table_ptr", "count_ptr", "arrivals_ptr")
REGISTERS = 65_536
"""Registers of a multiprocessor."""
LOOP = "// =>This Inner Loop Header"


def type_of(name: str) -> str:
    """Triton's name for the type of an argument."""
    if not name.endswith("_ptr"):
        return "i32"
    return "*u8" if name in BYTES else "*i32" if name in INDICES else "*bf16"


def ptx_of(kernel: Any, constants: dict[str, Any], types: dict[str, str], stages: int) -> str:
    """The code of a kernel. `types` are those of arguments for which `type_of` is wrong."""
    aligned = {"stride"} | {
        arg for arg in kernel.arg_names if arg.endswith("_ptr") and "desc" not in types.get(arg, "")
    }
    compiled = compile_kernel(
        kernel, constants, lambda arg: types.get(arg, type_of(arg)), aligned=aligned, stages=stages
    )
    text: str = compiled.asm["ptx"]
    return text


def test_a_step_of_4_bit_floats_ends_its_product_before_the_next_step() -> None:
    constants = CONSTANTS["routed_experts"] | {"HEIGHT": 1}
    kernel = routed_experts._product_kernel
    step, _ = ptx_of(kernel, constants, {"scales_ptr": "*u8"}, 3).split(LOOP)[1].split(" bra ", 1)
    assert step.count("cp.async.cg") > 1, "weights and rows are copied ahead"
    before, after = step.split("wgmma.commit_group")
    assert "wgmma.wait_group.sync.aligned 0" in after
    assert before.count("mul.rn.bf16x2") == 128 * 128 // 2 // 128, "one for two weights"


@pytest.mark.parametrize("name", CONSTANTS)
def test_a_step_ends_its_product_before_the_next_step(name: str) -> None:
    """The left operand is in registers, which the next step writes to."""
    kernel = {"product": product, "routed_experts": routed_experts}[name]._product_kernel
    step, _ = ptx_of(kernel, CONSTANTS[name], {}, 3).split(LOOP)[1].split(" bra ", 1)
    products = step.split("wgmma.commit_group")
    assert len(products) == 3, "one for the low integers, one for the high ones"
    assert all("wgmma.wait_group.sync.aligned 0" in text for text in products[1:])


MOE: Any = {"HIDDEN": 2880, "FEATURES": 2880, "TOP_K": 4, "PLACES": 4}
GATE: Any = {"BIAS": True, "LIMIT": 7.0, "ALPHA": 1.702, "SHIFT": 1.0}


def fp4_weight(outputs: int, inputs: int) -> ScaledWeight:
    """A stack of gpt-oss-120b's, without memory."""
    return ScaledWeight(
        elements=torch.empty(128, outputs, inputs // 2, dtype=torch.uint8, device="meta"),
        scales=torch.empty(128, outputs, inputs // 32, dtype=torch.uint8, device="meta"),
    )


def usage_of_fp4(kernel: Any, constants: dict[str, Any], warps: int, stages: int = 3) -> Usage:
    fp32 = ("weights_ptr", "factors_ptr")

    def own_type(name: str) -> str:
        if name in fp32:
            return "*fp32"
        of_weight = name.startswith("shared") or name in ("weight_ptr", "scales_ptr", "zeros_ptr")
        return "*u8" if of_weight else "*i32" if name == "ids_ptr" else type_of(name)

    aligned = {"stride"} | {name for name in kernel.arg_names if name.endswith("_ptr")}
    return usage_of(
        compile_kernel(kernel, constants, own_type, aligned=aligned, warps=warps, stages=stages)
    )


@pytest.mark.parametrize("tokens", [1, 8])
def test_few_tokens_of_gpt_oss_spill_no_registers(tokens: int) -> None:
    """Two programs or more of the second product run on a multiprocessor at once."""
    first, second = fp4_weight(5760, 2880), fp4_weight(2880, 2880)
    plan: dict[str, Any] = {**few_experts.plan_gate_up(first, tokens)}
    warps = plan.pop("num_warps")
    kind = {**kind_of(first), "PACKED": True, "EARLY": True}
    sizes = MOE | GATE | plan | {"ONE": tokens == 1, "BLOCK_I": 4 * tokens}
    used = usage_of_fp4(few_experts._gate_up_kernel, kind | sizes, warps)
    assert used.spilled == 0 and used.registers * 32 * warps * 2 <= REGISTERS
    if tokens > 1:
        return
    plan = {**few_experts.plan_down(second, 4)}
    warps = plan.pop("num_warps")
    used = usage_of_fp4(
        few_experts._down_kernel, kind | MOE | plan | {"BIAS": True, "ADDED": False}, warps
    )
    assert used.spilled == 0 and used.registers * 32 * warps * 2 <= REGISTERS


@pytest.mark.parametrize(("outputs", "with_factors"), [(5760, False), (2880, True)])
def test_many_tokens_of_gpt_oss_spill_no_registers(outputs: int, with_factors: bool) -> None:
    weight = fp4_weight(outputs, 2880)
    plan = routed_experts.plan_of(1000.0, weight)
    used = usage_of_fp4(
        routed_experts._product_kernel,
        {
            **WEIGHT, "N": outputs, "K": 2880, "GROUP": 32, "BLOCK": 32, "TOP_K": 4,
            "USES": 1 if with_factors else 4, "FACTORS": with_factors, "BIAS": True,
            "TILE_ROWS": plan.tile_rows, "BLOCK_N": plan.outputs, "BLOCK_K": plan.block,
            "TILES": plan.group, "HALVES": plan.has_halves,
            "GATED": plan.has_gates and not with_factors, **GATE,
        },
        plan.warps, plan.stages,
    )  # fmt: skip
    assert used.spilled == 0 and used.shared <= 113 << 10, "two programs on a multiprocessor"


FP8 = {"FP8": True, "HEIGHT": 128, "GROUP": 128, "BLOCK": 128, "TMA": True}
TYPES_OF_FP8 = {"zeros_ptr": "*fp8e4nv", "x_scales_ptr": "*fp32", "scales_ptr": "*fp32"}


@pytest.mark.parametrize(("tokens", "depth", "stages"), [(64, 2, 3), (64, 1, 4), (16, 2, 4)])
def test_a_step_of_fp8_waits_once_and_loads_scales_of_the_next(
    tokens: int, depth: int, stages: int
) -> None:
    """Scales are loaded before the first step, then before the products of each. Operands of all
    steps but one are on their way before the first."""
    constants = CONSTANTS["product"] | FP8 | {"BLOCK_N": 64, "BLOCK_T": tokens, "DEPTH": depth}
    types = TYPES_OF_FP8 | {
        "x_ptr": f"tensordesc<fp8e4nv[{tokens},128]>",
        "weight_ptr": "tensordesc<fp8e4nv[64,128]>",
    }
    before, after = ptx_of(product._product_kernel, constants, types, stages).split(LOOP)
    step = after.split("bra \t$L__BB")[0]
    assert step.count("mbarrier.try_wait") == 1
    loads, products = step.split("wgmma.mma_async", 1)
    # A thread has two tokens of the left operand, four of sixteen of the right one.
    scales = (2 if tokens == 64 else 4) + 1
    assert loads.count("ld.global") == before.count("ld.global") == scales * depth
    assert "ld.global" not in products
    assert before.count("cp.async.bulk.tensor") == 2 * depth * (stages - 1)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_step_of_fp8_experts_loads_scales_of_the_next(depth: int) -> None:
    constants = CONSTANTS["routed_experts"] | FP8 | {"DEPTH": depth}
    types = TYPES_OF_FP8 | {"x_ptr": "*fp8e4nv", "weight_ptr": "tensordesc<fp8e4nv[128,128]>"}
    before, after = ptx_of(routed_experts._product_kernel, constants, types, 3).split(LOOP)
    step = after.split("bra \t$L__BB")[0]
    assert step.count("mbarrier.try_wait") == 1
    loads, products = step.split("wgmma.mma_async", 1)
    # Two tokens of the left operand, and the scale that all outputs share.
    assert loads.count("ld.global") == 3 * depth and "ld.global" not in products
    assert before.count("cp.async.bulk.tensor") == 2 * depth


@pytest.mark.parametrize("kib", [100, 164, 228])
def test_programs_of_fp8_have_shared_memory(kib: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Consumer GPUs have 100 KiB, an A100 164, Hopper 228."""
    for tokens, programs in itertools.product((16, 32, 64), (96, 132, 224, 300, 448, 600)):
        depth, stages = product.depth_of(programs, product.Tiles(64, tokens, 8, 4, 1), kib << 10)
        assert depth * stages * 128 * (64 + tokens) <= (kib - 1) << 10
    runtime = types.SimpleNamespace(shared_memory=kib << 10)
    monkeypatch.setattr(routed_experts, "device_runtime", lambda device: runtime)
    weight = ScaledWeight(
        elements=torch.empty(2, 128, 128, dtype=torch.float8_e4m3fn), scales=torch.ones(2, 1, 1)
    )
    for uses in (1.0, 20.0, 90.0, 199.0, 1000.0):
        plan = routed_experts.plan_of(uses, weight)
        inputs = plan.stages * plan.depth * plan.block
        assert (plan.tile_rows + plan.outputs) * inputs <= (kib - 1) << 10
        assert uses <= plan.most_uses or kib < 228


def test_all_programs_of_a_product_run_at_once_on_hopper() -> None:
    """132 multiprocessors have room for one, two, three or four programs each."""
    tiles, shared = product.Tiles(64, 64, 8, 4, 1), 228 << 10
    found = [product.depth_of(programs, tiles, shared) for programs in (132, 264, 396, 528, 600)]
    assert found == [(2, 4), (2, 3), (1, 4), (1, 3), (1, 4)]


def meta_fp8(outputs: int, inputs: int) -> ScaledWeight:
    return ScaledWeight(
        elements=torch.empty(outputs, inputs, dtype=torch.float8_e4m3fn, device="meta"),
        scales=torch.empty(outputs // 128, inputs // 128, device="meta"),
    )


CHOICE: dict[str, Any] = {
    "EXPERTS": 256, "TOP_K": 6, "PLACES": 7, "GROUPS": 1, "TOP_GROUPS": 1, "BLOCK_E": 256,
    "BLOCK_P": 8, "BLOCK_G": 1, "BLOCK_S": 256, "SCORING": "sqrt_softplus", "BIAS": True,
    "RENORMALIZE": True, "TWO_OF_GROUP": False, "GATE": False, "TAGS": False, "TABLE": False,
}  # fmt: skip
_GEMV, _CHOOSE = gemv._scaled_gemv_kernel, shared_expert._choose_and_multiply_kernel
TOGETHER: dict[str, tuple[Any, ScaledWeight, ClampedGate | None, dict[str, Any]]] = {
    "shared expert and router": (_GEMV, meta_fp8(4096, 4096), ClampedGate(limit=10.0), {"n": 256}),
    "latents and compressors": (_GEMV, meta_fp8(1536, 4096), None, {"n": 2560}),
    "shared expert and choice": (_CHOOSE, meta_fp8(4096, 2048), None, CHOICE),
}


@pytest.mark.parametrize("name", TOGETHER)
def test_launches_of_two_products_of_deepseek_v4_spill_no_registers(name: str) -> None:
    kernel, weight, activation, others = TOGETHER[name]
    constants = {**gemv.constants_of(weight, None, activation), "BIAS": False, **others, "EARLY": 1}
    warps = constants.pop("num_warps")
    if "n" in others:
        plan = plan_plain(constants.pop("n"), constants["K"])
        assert plan is not None
        rows, cols, _ = plan
        constants |= {"BESIDE": others["n"] // rows, "PLAIN_N": rows, "PLAIN_K": cols}
    types = {
        "weight_ptr": "*fp8e4nv", "zeros_ptr": "*fp8e4nv", "scales_ptr": "*fp32", "factor": "fp32",
        "ids_ptr": "*i32", "table_ptr": "*i32", "tokens_ptr": "*i32", "weights_ptr": "*fp32",
    }  # fmt: skip
    if kernel is _CHOOSE:
        types["bias_ptr"] = "*fp32"
    aligned = {arg for arg in kernel.arg_names if arg.endswith("_ptr")}
    compiled = compile_kernel(
        kernel, constants, lambda arg: types.get(arg, type_of(arg)), aligned=aligned, warps=warps
    )
    assert usage_of(compiled).spilled == 0
