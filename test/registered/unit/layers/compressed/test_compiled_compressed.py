"""Kernels of DeepSeek-V4's attention as Triton compiles them for Hopper, which needs no GPU."""

from __future__ import annotations

from typing import Any, Final

import pytest
import triton
import triton.knobs

from rigs.layers.compiled_kernels import compile_kernel, usage_of
from sglang.srt.layers.triton_ops.compressed import attention, groups, rotated_norm
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=20, suite="base-a-test-cpu")

if triton.knobs.runtime.interpret:
    pytest.skip("interpreted kernels are not compiled", allow_module_level=True)

ATTENTION: Final = {
    "NUM_HEADS": 64, "DIM": 512, "ROTARY": 64, "WINDOW": 128, "RATIO": 4, "TOPK": 512,
    "HEADS": 64, "BLOCK_D": 512, "BLOCK": 64, "SPLIT": False, "EARLY": 0,
    "tokens_ptr": None, "lists_ptr": None,
}  # fmt: skip
"""DeepSeek-V4-Flash's shape on one rank."""
DECODE: Final = {"requests_ptr": None, "prefixes_ptr": None}
SPLIT: Final = DECODE | {"HEADS": 16, "SPLIT": True, "EARLY": 1}
NO_ROWS: Final = {"rows_ptr": None, "table_ptr": None, "TOPK": 0}
SPARSE: Final = {
    "RATIO": 4, "DIMS": (512, 128), "WIDTHS": (1024, 256), "ROTARY": 64, "PLACES": 4, "TOKENS": 4,
    "BLOCKS_D": (512, 128), "BLOCKS_C": (1024, 256), "KINDS": 2, "EARLY": 0,
}  # fmt: skip
HEAVY: Final = SPARSE | {
    "RATIO": 128, "DIMS": (512,), "WIDTHS": (512,), "PLACES": 128, "TOKENS": 8,
    "BLOCKS_D": (512,), "BLOCKS_C": (1024,), "KINDS": 1, "kept": (None,),
}  # fmt: skip
KEPT: Final = {"RATIO": 4, "DIM": 512, "WIDTH": 1024, "PLACES": 4, "BLOCK_C": 256}
ONE_TOKEN: Final = {"bounds_ptr": None, "EARLY": 1}
NORMS: Final = {
    "NUM_HEADS": 64, "DIM": 512, "RANK": 1024, "ROTARY": 64, "ROWS": 8, "BLOCK_D": 512,
    "BLOCK_R": 1024, "NORM": True, "EARLY": 0,
}  # fmt: skip
KERNELS: Final[dict[str, tuple[Any, dict[str, Any], int, int]]] = {
    "chosen rows": (attention._attention_kernel, ATTENTION, 8, 2),
    "all rows": (
        attention._attention_kernel, ATTENTION | {"lists_ptr": "", "TOPK": 0, "RATIO": 128}, 8, 2,
    ),
    "window": (attention._attention_kernel, ATTENTION | NO_ROWS, 8, 2),
    "decode": (attention._attention_kernel, ATTENTION | DECODE, 8, 2),
    "decode of few": (attention._attention_kernel, ATTENTION | SPLIT | {"EARLY": 0}, 4, 2),
    "decode of one": (attention._attention_kernel, ATTENTION | SPLIT | {"BLOCK": 32}, 4, 2),
    "decode on two ranks": (
        attention._attention_kernel, ATTENTION | DECODE | {"NUM_HEADS": 32, "HEADS": 32}, 8, 2,
    ),
    "rows of 4": (groups._rows_kernel, SPARSE, 4, 3),
    "rows of 4, decode": (groups._rows_kernel, SPARSE | ONE_TOKEN, 4, 3),
    "rows of 128": (groups._rows_kernel, HEAVY, 4, 3),
    "rows of 128, decode": (groups._rows_kernel, HEAVY | ONE_TOKEN, 4, 3),
    "groups of 4": (groups._keep_kernel, KEPT, 4, 3),
    "groups of 128": (
        groups._keep_kernel,
        {**KEPT, "RATIO": 128, "WIDTH": 512, "PLACES": 8, "kept_ptr": None}, 4, 3,
    ),
    "heads": (rotated_norm._heads_kernel, NORMS, 4, 3),
    "latents": (rotated_norm._latents_kernel, NORMS, 4, 3),
}  # fmt: skip
"""Kernel, its own constants, warps, stages. "" in place of None: the pointer is given."""
INDICES: Final = frozenset(
    f"{name}_ptr"
    for name in (
        "tokens positions requests prefixes slots lists bounds lens owners read loc track "
        "track_lens"
    ).split()
)
FP32: Final = frozenset(("sinks_ptr", "parts_ptr", "lse_ptr", "apes", "norms", "scale", "eps")) | {
    "latent_weight_ptr",
    "key_weight_ptr",
}
TUPLES: Final = frozenset(("tokens", "opened", "kept", "rows", "apes", "norms", "strides"))
"""Arguments with an element of each kind of row."""
"""`tokens_ptr` has indices for attention alone."""


MOST_SPILLED: Final = 128 if triton.__version__.startswith("3.6.") else 800
"""Bytes of a thread of attention: sums of 64 heads of 512 fill half of the registers. Triton 3.9
spills 600 to 740 of them, Triton 3.6 at most 112."""


@pytest.mark.parametrize("name", KERNELS)
def test_hardly_anything_is_spilled_and_a_program_fits(name: str) -> None:
    kernel, own, warps, stages = KERNELS[name]
    is_attention = kernel is attention._attention_kernel
    indices = INDICES if is_attention else INDICES - {"tokens_ptr"}

    def type_of(arg: str) -> str | tuple[str, ...]:
        if arg in TUPLES:
            one = "i32" if arg == "strides" else "*fp32" if arg in FP32 else "*bf16"
            return (one,) * int(own["KINDS"])
        if arg in FP32:
            return "*fp32" if arg.endswith("_ptr") else "fp32"
        if not arg.endswith("_ptr"):
            return "i32"
        return "*i64" if arg in indices else "*i32" if arg == "table_ptr" else "*bf16"

    given = {arg: value for arg, value in own.items() if value != ""}
    aligned = {arg for arg in kernel.arg_names if arg.endswith(("_ptr", "stride"))} - indices
    aligned |= TUPLES
    found = usage_of(
        compile_kernel(kernel, given, type_of, aligned=aligned, warps=warps, stages=stages)
    )
    assert found.spilled <= (MOST_SPILLED if is_attention else 8), found
    assert found.registers * 32 * warps <= 1 << 16, found
    assert found.shared <= 227 << 10, found
