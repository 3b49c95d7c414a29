"""Kernels of GLM-5.3-Flash and DeepSeek-V4 as Triton compiles them for Hopper, without a GPU."""

from __future__ import annotations

from typing import Any, Final

import pytest
import triton
import triton.knobs

from rigs.layers.compiled_kernels import Usage, compile_kernel, usage_of
from sglang.srt.layers.triton_ops import expert_choice
from sglang.srt.layers.triton_ops.attention import latent_rows, pooled_keys
from sglang.srt.layers.triton_ops.hyper import streams
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=30, suite="base-a-test-cpu")

if triton.knobs.runtime.interpret:
    pytest.skip("interpreted kernels are not compiled", allow_module_level=True)

JOIN: Final = {
    "STREAMS": 4, "HIDDEN": 4096, "OUTPUTS": 24, "BLOCK_O": 32, "BLOCK_S": 4, "JOIN": True,
    "REST": True, "SAME": False, "SPLIT": True,
}  # fmt: skip
FIRST: Final = {**JOIN, "JOIN": False, "REST": False, "SAME": True}
SPLIT: Final = {
    "STREAMS": 4, "HIDDEN": 4096, "ITERATIONS": 20, "BLOCK_S": 4, "BLOCK_H": 4096, "BLOCK_O": 32,
    "SPANS": 128, "WIDE": False, "EARLY": 2,
}  # fmt: skip
HEAD: Final = {
    "STREAMS": 4, "HIDDEN": 4096, "BLOCK_S": 4, "BLOCK_H": 4096, "BLOCK_O": 16, "SPANS": 128,
    "WIDE": True, "EARLY": 2,
}  # fmt: skip
OF_HEAD: Final = {**JOIN, "OUTPUTS": 4, "BLOCK_O": 16, "BLOCK_T": 16, "BLOCK_C": 64, "EARLY": 1}
POOL: Final = {"RATIO": 16, "DIM": 128, "BLOCK_R": 16, "BLOCK_D": 128}
ROWS: Final = {
    "NUM_HEADS": 64, "LATENT": 512, "ROPE": 0, "ROW": 512, "ROPE_ROW": 512, "ROPE_AT": 512,
    "GROUPS": 0, "MOST": 2048, "GROUP": 16, "HEADS": 64, "BLOCK_L": 512, "BLOCK_R": 16, "BLOCK": 64,
    "EARLY": 0,
}  # fmt: skip
CHOICE: Final = {
    "EXPERTS": 256, "TOP_K": 6, "PLACES": 7, "HIDDEN": 4096, "GROUPS": 1, "TOP_GROUPS": 1,
    "BLOCK_E": 256, "BLOCK_P": 8, "BLOCK_H": 2048, "BLOCK_G": 1, "BLOCK_S": 256,
    "SCORING": "sqrt_softplus", "RENORMALIZE": True, "TWO_OF_GROUP": False, "GATE": False,
    "TAGS": False, "EARLY": 1,
}  # fmt: skip
LOOP: Final = "// =>This Inner Loop Header"
_JOIN, _SPLIT, _HEAD = streams._join_kernel, streams._split_kernel, streams._head_kernel
_EACH = streams._join_each_kernel
_POOL, _ROWS = pooled_keys._pool_kernel, latent_rows._latent_kernel
_CHOICE = expert_choice._choose_kernel
KERNELS: Final[dict[str, tuple[Any, dict[str, Any], int, int, int]]] = {
    "join of few": (_JOIN, {**JOIN, "BLOCK_T": 16, "BLOCK_C": 64, "EARLY": 1}, 4, 2, 47),
    "join of many": (_JOIN, {**JOIN, "BLOCK_T": 64, "BLOCK_C": 32, "EARLY": 0}, 4, 2, 56),
    "streams of few": (_JOIN, {**FIRST, "BLOCK_T": 16, "BLOCK_C": 64, "EARLY": 1}, 4, 2, 47),
    "streams of one": (_EACH, {**FIRST, "BLOCK_C": 32, "EARLY": 1}, 4, 3, 8),
    "join of one": (_EACH, {**JOIN, "BLOCK_C": 32, "EARLY": 1}, 4, 3, 8),
    "split": (_SPLIT, SPLIT, 4, 3, 8),
    "split of many": (_SPLIT, {**SPLIT, "EARLY": 0}, 8, 3, 8),
    "join of a head": (_JOIN, OF_HEAD, 4, 2, 47),
    "head": (_HEAD, HEAD, 4, 3, 8),
    "keys of one token": (_POOL, {**POOL, "BOUNDS": False, "EARLY": 1}, 4, 3, 8),
    "keys of tokens": (_POOL, {**POOL, "BOUNDS": True, "EARLY": 0}, 4, 3, 8),
    "parts of rows": (_ROWS, {**ROWS, "SPLIT": True}, 8, 2, 227),
    "rows": (_ROWS, {**ROWS, "SPLIT": False}, 8, 3, 227),
    "choice": (_CHOICE, {**CHOICE, "BIAS": True, "TABLE": False}, 1, 3, 8),
    "table": (_CHOICE, {**CHOICE, "BIAS": False, "TABLE": True}, 1, 3, 8),
}
"""Kernel, constants, warps, stages, most KiB of shared memory, at the sizes of the models."""
INT64: Final = frozenset(
    f"{name}_ptr"
    for name in "bounds context_rows ids lens positions rows slots table tokens".split()
)
EXACT: Final = frozenset(
    f"{name}_ptr" for name in "base bias fn lse parts position scale weights".split()
)
UNALIGNED: Final = {
    *("tokens", "spans", "splits", "least"),
    *(f"{name}_ptr" for name in "bounds context_rows lens positions rows slots tokens".split()),
}


def compiled(name: str) -> Any:
    kernel, constants, warps, stages, _ = KERNELS[name]

    def type_of(arg: str) -> str:
        if not arg.endswith("_ptr"):
            return "fp32" if arg in ("scale", "eps", "norm_eps", "input_eps", "factor") else "i32"
        is_slots = kernel is _ROWS and arg in ("table_ptr", "contexts_ptr")
        if is_slots or (kernel is _CHOICE and arg == "ids_ptr"):
            return "*i32"
        return "*i64" if arg in INT64 else "*fp32" if arg in EXACT else "*bf16"

    names = {arg for arg in kernel.arg_names if not type_of(arg).startswith("fp32")}
    return compile_kernel(
        kernel, constants, type_of, aligned=names - UNALIGNED, warps=warps, stages=stages
    )


SPILLED: Final = (
    {} if triton.__version__.startswith("3.6.") else {"rows": 240, "parts of rows": 384}
)
"""Bytes of a thread that may be spilled. Triton 3.6, which torch 2.11 goes with, spills none."""


@pytest.mark.parametrize("name", KERNELS)
def test_hardly_anything_is_spilled_and_programs_fit_a_multiprocessor(name: str) -> None:
    found: Usage = usage_of(compiled(name))
    assert found.spilled <= SPILLED.get(name, 0), found
    assert found.shared <= KERNELS[name][4] << 10


def test_a_step_of_a_join_ends_its_products_before_it_writes_new_streams() -> None:
    """Streams are left operands in registers; assemblers before CUDA 13.3 give those away before a
    product that ends in a later step has read them."""
    step, _ = compiled("join of many").asm["ptx"].split(LOOP)[1].split(" bra ", 1)
    products = step.split("wgmma.commit_group")
    assert len(products) == 1 + 3 * JOIN["STREAMS"], "three parts of a weight for each stream"
    assert all("wgmma.wait_group.sync.aligned 0" in text for text in products[1:])
