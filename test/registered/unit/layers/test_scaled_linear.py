"""Products with quantized weights are near those of the same operands in fp64."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from rigs.models.kernel_layers import DEVICE, HALF, randn, relative_error
from rigs.models.scaled_weights import (
    dequantized,
    fp4_weight,
    fp8_weight,
    int4_weight,
    operand,
    product,
    rounded,
)
from sglang.srt.layers.activation import clamped_gate
from sglang.srt.layers.cuda_kernels import KERNELS
from sglang.srt.layers.quantization.quantized_tensor import E2M1, E8M0
from sglang.srt.layers.triton_ops.arguments import (
    MOST_FP4_SCALE,
    ClampedGate,
    RoundedRows,
    ScaledWeight,
    fp4_words,
)
from sglang.srt.layers.triton_ops.norm import rounded_norm_
from sglang.srt.layers.triton_ops.rounding import (
    empty_rounded,
    quantize_activations,
    quantize_gated,
)
from sglang.srt.layers.triton_ops.scaled.gemv import GemvPlan, scaled_gemv
from sglang.srt.layers.triton_ops.scaled.int4 import dequantize_int4
from sglang.srt.layers.triton_ops.scaled.linear import round_rows
from sglang.srt.layers.triton_ops.scaled.product import (
    Tiles,
    _arrivals,
    multiply_fp8_by_library,
    multiply_on_tensor_cores,
)
from sglang.test.ci.ci_register import register_cuda_ci

register_cuda_ci(est_time=60, suite="base-b-test-1-gpu-large")

UNIT = 8e-3 if DEVICE == "cuda" else 2e-3
"""About the error of a result in 16 bits."""
FP8_SUMS = 1e-3 if DEVICE == "cuda" else 1e-5
"""About the error of sums in fp32: tensor cores add products of fp8 with fewer bits."""
WEIGHTS = {
    "fp8 blocks": fp8_weight(128, 384, height=128),
    "fp8 blocks of one output": fp8_weight(52, 384),
    "fp8 rows of one block": fp8_weight(48, 128),
    "fp8, one block": fp8_weight(128, 128, height=128),
    "fp8 rows": fp8_weight(48, 200, group=200),
    "fp8 rows that no tensor core takes": fp8_weight(20, 90, group=90),
    "int4 groups of 32": int4_weight(36, 256),
    "int4 groups of 64 with zeros": int4_weight(36, 320, group=64, has_zeros=True),
    "int4 groups of 128": int4_weight(36, 384, group=128),
    "int4 rows with zeros": int4_weight(36, 224, group=224, has_zeros=True),
    "fp4": fp4_weight(36, 352),
}


def same_bits(got: torch.Tensor, want: torch.Tensor) -> bool:
    return torch.equal(got.view(torch.uint8), want.view(torch.uint8))


def all_floats(scales: tuple[int, ...]) -> tuple[ScaledWeight, torch.Tensor]:
    """Each 4-bit float at each place of a block, `[16, inputs]`, and the weight in fp64."""
    floats = (torch.arange(16).unsqueeze(1) + torch.arange(32 * len(scales))) % 16
    weight = ScaledWeight(
        elements=fp4_words(floats.to(torch.uint8)).to(DEVICE),
        scales=torch.tensor(scales, dtype=torch.uint8).expand(16, -1).contiguous().to(DEVICE),
    )
    factors = torch.tensor(E8M0, dtype=torch.float64)[torch.tensor(scales)].repeat_interleave(32)
    return weight, torch.tensor(E2M1).double()[floats] * factors


def test_4_bit_floats_are_dequantized_exactly() -> None:
    """0.5 is a subnormal number before it is multiplied."""
    weight, want = all_floats((40, 120, 127, MOST_FP4_SCALE))
    got = dequantize_int4(weight, torch.bfloat16)
    assert same_bits(got, want.to(got))
    weight, want = all_floats((110, 120, 127))
    got = dequantize_int4(weight, torch.float16)
    assert same_bits(got, want.to(got))


def test_scales_of_groups_of_zeros_give_zeros() -> None:
    weight, _ = all_floats((0, 1, 20))
    assert not dequantize_int4(weight, torch.bfloat16).isnan().any()
    weight.elements.zero_()
    x = randn(3, 96, seed=1, dtype=HALF)
    for tokens in (1, 3):
        assert not KERNELS.multiply_scaled(x[:tokens], weight).any()


@pytest.mark.parametrize("x", [1.0, -3e-9, 3e9])
def test_one_token_times_4_bit_floats_is_exact(x: float) -> None:
    weight, want = all_floats((120, 130))
    one = torch.tensor(x, dtype=torch.bfloat16, device=DEVICE)
    for place in (*range(32), 47):
        token = torch.zeros(1, 64, dtype=torch.bfloat16, device=DEVICE)
        token[0, place] = one
        got = KERNELS.multiply_scaled(token, weight, out_dtype=torch.float32)[0]
        assert torch.equal(got.double(), want[:, place].to(DEVICE) * one.double())


def values(rows: RoundedRows) -> torch.Tensor:
    """The activations in fp64, with the rows after the tokens."""
    per_scale = rows.elements.shape[1] // rows.scales.shape[1]
    return rows.elements.double() * rows.scales.double().repeat_interleave(per_scale, 1)


@pytest.mark.parametrize("tokens", [1, 3, 40, 150])
@pytest.mark.parametrize("kind", WEIGHTS)
def test_products_are_near_fp64(kind: str, tokens: int) -> None:
    """Cases: with and without bias, new and given output tensors, rows cut out of longer ones."""
    weight = WEIGHTS[kind]
    outputs, inputs = weight.shape
    x = randn(tokens, inputs + 8, seed=tokens, dtype=HALF)[:, :inputs]
    x[tokens // 2] *= 1000
    want, bias = product(x, weight), randn(outputs, seed=1, dtype=HALF)
    got = KERNELS.multiply_scaled(x, weight)
    assert got.dtype == HALF and relative_error(got, want) < UNIT
    wide = KERNELS.multiply_scaled(x, weight, bias, out_dtype=torch.float32)
    assert wide.dtype == torch.float32
    assert relative_error(wide, want + bias.double()) < (FP8_SUMS if weight.is_fp8 else UNIT)
    out = torch.full((tokens, outputs), torch.nan, dtype=HALF, device=DEVICE)
    assert KERNELS.multiply_scaled(x, weight, bias, out=out) is out
    assert relative_error(out, want + bias.double()) < UNIT


@pytest.mark.skipif(DEVICE != "cuda", reason="too large for the interpreter")
@pytest.mark.parametrize("tokens", [16, 64, 128])
@pytest.mark.parametrize("outputs", [4096, 16384])
def test_4_bit_products_give_the_same_bits_in_each_run(outputs: int, tokens: int) -> None:
    weight = int4_weight(outputs, 4096, group=128)
    x = randn(tokens, 4096, seed=2, dtype=HALF)
    first = KERNELS.multiply_scaled(x, weight)
    assert relative_error(first, product(x, weight)) < UNIT
    for _ in range(20):
        assert torch.equal(KERNELS.multiply_scaled(x, weight), first)


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize(
    "config",
    [
        (Tiles(64, 16, 2, 4, 3), 1),
        (Tiles(128, 32, 1, 4, 3), 3),
        (Tiles(32, 64, 1, 4, 3), 2),
        (Tiles(64, 64, 1, 4, 2, depth=2), 1),
        (Tiles(64, 16, 1, 4, 2, depth=2), 3),
    ],
)
def test_tiles_and_splits_leave_only_the_order_of_sums(
    kind: str, config: tuple[Tiles, int]
) -> None:
    weight = WEIGHTS[kind]
    x = randn(35, weight.shape[1], seed=2, dtype=HALF)
    bias = randn(weight.shape[0], seed=1, dtype=HALF)
    out = torch.empty(35, weight.shape[0], device=DEVICE)
    given = round_rows(x, weight) if weight.is_fp8 else x
    tiles, splits = config
    if not weight.is_fp8:
        config = replace(tiles, depth=1), splits
    for one in (None, bias):
        want = product(x, weight) + (0 if one is None else one.double())
        multiply_on_tensor_cores(given, weight, one, out, config)
        assert relative_error(out, want) < (FP8_SUMS if weight.is_fp8 else UNIT)
    stream = torch.accelerator.current_stream().stream_id if DEVICE == "cuda" else 0
    assert not _arrivals(x.device, stream).any(), "the next product counts from zero"


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize(("rows", "columns"), [(4, 128), (16, 256)])
def test_programs_may_have_any_rows_and_columns(kind: str, rows: int, columns: int) -> None:
    weight = WEIGHTS[kind]
    x, out = randn(1, weight.shape[1], seed=3, dtype=HALF), torch.empty(1, weight.shape[0])
    out = out.to(DEVICE)
    plan: GemvPlan = {"BLOCK_N": rows, "BLOCK_K": columns, "num_warps": 2}
    scaled_gemv(x, weight, None, out, plan)
    assert relative_error(out, product(x, weight)) < 2e-6


@pytest.mark.parametrize("kind", WEIGHTS)
def test_gate_and_up_of_one_token_equal_the_definition(kind: str) -> None:
    weight = WEIGHTS[kind]
    x = randn(1, weight.shape[1], seed=4, dtype=HALF)
    out = torch.empty(1, weight.shape[0] // 2, dtype=HALF, device=DEVICE)
    KERNELS.scaled_gated_gemv(x, weight, out)
    both = product(x, weight)
    gate, up = both.chunk(2, dim=1)
    assert relative_error(out, F.silu(gate) * up) < 2 * UNIT
    rule = ClampedGate(limit=float(both.abs().mean()), alpha=1.7, shift=0.5)
    KERNELS.scaled_gated_gemv(x, weight, out, activation=rule)
    assert relative_error(out, clamped_gate(both.cpu(), rule).to(DEVICE)) < 2 * UNIT


def test_int4_weights_are_rounded_once() -> None:
    for kind, weight in WEIGHTS.items():
        if not weight.is_fp8:
            assert torch.equal(dequantize_int4(weight, HALF), dequantized(weight).to(HALF)), kind


# Rounded activations.


@pytest.mark.parametrize("group", [128, 640])
def test_activations_are_rounded_as_by_torch(group: int) -> None:
    x = randn(19, 648, seed=5, dtype=HALF)[:, :640] * 3
    x[4] = 0
    x[5, 130:] = 0
    elements, scales = quantize_activations(x, group)
    want, want_scales = rounded(x, group)
    assert same_bits(elements, want) and torch.equal(scales, want_scales)
    assert (scales[4] == 1).all() and (elements[4].float() == 0).all()
    if group == 128:
        padded, scales = quantize_activations(x, group, more_rows=1)
        assert padded.shape == (20, 640) and scales.stride() == (1, 20)
        assert same_bits(padded[:19], want) and torch.equal(scales[:19], want_scales)
        assert (scales[19] == 1).all() and (padded[19].float() == 0).all()


@pytest.mark.parametrize("group", [128, 256])
def test_rounding_behind_the_gate_is_that_of_its_two_parts(group: int) -> None:
    gate_up = randn(7, 512, seed=6, dtype=HALF)
    elements, scales = quantize_gated(gate_up, group)
    want, want_scales = quantize_activations(KERNELS.silu_and_mul(gate_up), group)
    assert same_bits(elements, want) and torch.equal(scales, want_scales)


@pytest.mark.parametrize("tokens", [2, 40, 150])
@pytest.mark.parametrize("kind", [kind for kind in WEIGHTS if kind.startswith("fp8")])
def test_a_product_takes_what_the_gate_has_rounded(kind: str, tokens: int) -> None:
    weight = WEIGHTS[kind]
    outputs, inputs = weight.shape
    gate_up, bias = (
        randn(tokens, 2 * inputs, seed=9, dtype=HALF),
        randn(outputs, seed=1, dtype=HALF),
    )
    want = KERNELS.multiply_scaled(KERNELS.silu_and_mul(gate_up), weight, bias)
    given = KERNELS.round_rows(gate_up, weight, is_gated=True)
    assert len(given) == tokens and given.dtype == HALF
    assert torch.equal(KERNELS.multiply_scaled(given, weight, bias), want)
    out = torch.empty(tokens, outputs, device=DEVICE)
    KERNELS.multiply_scaled(given, weight, bias, out=out)
    assert relative_error(out, want) < UNIT


@pytest.mark.parametrize("tokens", [2, 150])
@pytest.mark.parametrize("adds", [True, False], ids=["sum", "residual"])
@pytest.mark.parametrize("is_centered", [True, False])
@pytest.mark.parametrize("kind", [kind for kind in WEIGHTS if kind.startswith("fp8")])
def test_a_norm_that_rounds_is_its_two_parts(
    kind: str, is_centered: bool, adds: bool, tokens: int
) -> None:
    """On a GPU the two norms add their squares in different orders."""
    weight = WEIGHTS[kind]
    size = weight.shape[1]
    scale = randn(size, seed=3, dtype=HALF)
    x, residual = (randn(tokens, size, seed=seed, dtype=HALF) for seed in (4, 5))
    total = residual + x if adds else residual.clone()
    want = KERNELS.round_rows(KERNELS.rms_norm(total, scale, 1e-5, is_centered), weight)
    got = KERNELS.add_and_round_(x if adds else None, residual, scale, 1e-5, weight, is_centered)
    assert torch.equal(residual, total)
    assert (len(got), got.dtype) == (tokens, HALF)
    assert got.scales.stride() == want.scales.stride()
    if DEVICE == "cuda":
        assert relative_error(values(got), values(want)) < UNIT
    else:
        assert same_bits(got.elements, want.elements) and torch.equal(got.scales, want.scales)


def test_a_norm_that_rounds_writes_zeros_after_the_tokens() -> None:
    x, scale = randn(6, 256, seed=4, dtype=HALF), randn(256, seed=3, dtype=HALF)
    elements, scales = (tensor.fill_(3) for tensor in empty_rounded(8, 256, 128, x.device))
    out = RoundedRows(elements=elements, scales=scales, num_tokens=5, dtype=HALF)
    rounded_norm_(None, x[:5], scale, 1e-5, out)
    assert elements[:5].double().abs().amax(1).min() > 0
    assert not elements[5:].double().any() and (scales[5:] == 1).all()


@pytest.mark.parametrize("group", [128, 256])
def test_every_product_rounds_to_the_same_bits(group: int) -> None:
    """A weight that is 1 at one input of each output shows the rounded activations."""
    inputs = 256
    unit = ScaledWeight(
        elements=torch.eye(inputs).to(torch.float8_e4m3fn).to(DEVICE),
        scales=torch.ones(inputs, inputs // group, device=DEVICE),
    )
    x = randn(20, inputs, seed=7, dtype=HALF)
    want = operand(x, unit).float()
    out = torch.empty(20, inputs, device=DEVICE)
    scaled_gemv(x[:1], unit, None, out[:1])
    assert torch.equal(out[:1], want[:1])
    multiply_on_tensor_cores(round_rows(x, unit), unit, None, out)
    assert torch.equal(out, want)
    if DEVICE == "cuda":
        library = multiply_fp8_by_library(round_rows(x, unit), unit, None, torch.float32)
        assert torch.equal(library, want)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("kind", ["fp8 blocks", "fp8 rows", "int4 groups of 32"])
def test_nan_and_infinity_stay_visible_in_their_row(kind: str, bad: float) -> None:
    weight = WEIGHTS[kind]
    for tokens in (1, 3, 40):
        x = randn(tokens, weight.shape[1], seed=8, dtype=HALF)
        x[-1, 7] = bad
        got = KERNELS.multiply_scaled(x, weight)
        assert not got[-1].isfinite().any()
        assert got[:-1].isfinite().all()


def test_no_tokens_give_no_rows_and_wrong_dtypes_are_refused() -> None:
    weight = WEIGHTS["fp8 blocks"]
    assert KERNELS.multiply_scaled(randn(0, 384, seed=1, dtype=HALF), weight).shape == (0, 128)
    with pytest.raises(AssertionError, match="float32"):
        KERNELS.multiply_scaled(randn(2, 384, seed=1), weight)


# Shapes of models.


@functools.cache
def weights_of_model(outputs: int, inputs: int, height: int) -> list[ScaledWeight]:
    kinds = [fp8_weight(outputs, inputs, height=height), int4_weight(outputs, inputs, group=128)]
    return kinds if height > 1 else [*kinds, fp8_weight(outputs, inputs, group=inputs)]


@pytest.mark.skipif(DEVICE != "cuda", reason="too large for the interpreter")
@pytest.mark.parametrize("tokens", [1, 16, 64, 129, 1001])
@pytest.mark.parametrize(
    ("outputs", "inputs", "height"), [(6144, 4096, 128), (576, 7168, 1), (1000, 4096, 1)]
)
def test_shapes_of_models_are_right(outputs: int, inputs: int, height: int, tokens: int) -> None:
    """Few and many tokens, and outputs that are no multiple of a block."""
    for weight in weights_of_model(outputs, inputs, height):
        x = randn(tokens, inputs, seed=tokens, dtype=HALF)
        want = product(x, weight)
        assert relative_error(KERNELS.multiply_scaled(x, weight), want) < UNIT
