"""Any part of a quantized weight equals that part of the whole."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from rigs.models.scaled_products import dequantized
from sglang.srt.configs.quantization_config import Packing
from sglang.srt.layers.quantization import quantized_tensor
from sglang.srt.layers.quantization.quantized_tensor import (
    BlockFloatTensor,
    PackedTensor,
    QuantizedTensor,
    ScaledTensor,
    unpack_words,
)
from sglang.srt.layers.triton_ops.arguments import ScaledWeight
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

OUTPUTS, INPUTS, GROUP = 40, 64, 16


def packed(packing: Packing, bits: int) -> PackedTensor:
    generator = torch.Generator().manual_seed(bits)
    count = 32 // bits
    shape = {
        Packing.ROWS: (OUTPUTS, INPUTS // count),
        Packing.COLUMNS: (INPUTS // count, OUTPUTS),
        Packing.INTERLEAVED: (INPUTS, OUTPUTS // count),
    }[packing]
    limits = torch.iinfo(torch.int32)
    words = torch.randint(limits.min, limits.max, shape, generator=generator, dtype=torch.int32)
    groups = torch.randint(0, INPUTS // GROUP, (INPUTS,), generator=generator)
    scales = torch.rand((OUTPUTS, INPUTS // GROUP), generator=generator)
    zeros = torch.randint(0, 1 << bits, scales.shape, generator=generator)
    return PackedTensor(
        words,
        (OUTPUTS, INPUTS),
        packing,
        bits,
        scales=scales,
        zeros=zeros,
        groups=groups,
        dtype=torch.float32,
        device="cpu",
    )


def scaled(*lead: int) -> ScaledTensor:
    generator = torch.Generator().manual_seed(1)
    raw = torch.randn((*lead, OUTPUTS, INPUTS), generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand((*lead, 4, 3), generator=generator)
    return ScaledTensor(raw, scales, (12, 24), torch.float32, "cpu")


def block_floats(*lead: int) -> BlockFloatTensor:
    generator = torch.Generator().manual_seed(2)
    shape = (*lead, OUTPUTS, INPUTS // 32, 16)
    blocks = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    scales = torch.randint(100, 150, shape[:-1], generator=generator, dtype=torch.uint8)
    return BlockFloatTensor(blocks, scales, 32, torch.float32, "cpu")


def whole(tensor: QuantizedTensor) -> torch.Tensor:
    return tensor[(slice(None),) * len(tensor.shape)]


TENSORS = {
    "rows-4": packed(Packing.ROWS, 4),
    "rows-8": packed(Packing.ROWS, 8),
    "columns-4": packed(Packing.COLUMNS, 4),
    "columns-8": packed(Packing.COLUMNS, 8),
    "interleaved-4": packed(Packing.INTERLEAVED, 4),
    "scaled": scaled(),
    "stack": scaled(3),
    "floats": block_floats(),
    "stack of floats": block_floats(3),
}


@pytest.mark.parametrize("name", TENSORS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_part_equals_that_part_of_the_whole(name: str, data: st.DataObject) -> None:
    tensor = TENSORS[name]
    ends = [sorted(data.draw(st.tuples(*[st.integers(0, size)] * 2))) for size in tensor.shape]
    index = tuple(slice(*pair) for pair in ends)
    assert torch.equal(tensor[index], whole(tensor)[index])


@pytest.mark.parametrize("name", TENSORS)
def test_a_weight_is_dequantized_tile_by_tile(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    want = whole(TENSORS[name])
    monkeypatch.setattr(quantized_tensor, "_TILE_ELEMENTS", 7 * INPUTS)
    assert torch.equal(whole(TENSORS[name]), want)


def test_values_are_rounded_once() -> None:
    """The product of fp32 numbers is rounded to bf16, not the factors."""
    raw, scales = torch.full((1, 2), 1.125).to(torch.float8_e4m3fn), torch.tensor([1.0038])
    tensor = ScaledTensor(raw, scales, None, torch.bfloat16, "cpu")
    exact = (raw.double() * scales.double()).to(torch.bfloat16)
    assert torch.equal(whole(tensor), exact)
    assert not torch.equal(exact, raw.to(torch.bfloat16) * scales.to(torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_block_floats_equal_those_of_transformers(dtype: torch.dtype) -> None:
    """All bytes with all exponents, bit for bit."""
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).expand(255, 16, 16).contiguous()
    scales = torch.arange(255, dtype=torch.uint8).view(255, 1).expand(255, 16).contiguous()
    got = whole(BlockFloatTensor(blocks.unsqueeze(0), scales.unsqueeze(0), 32, dtype, "cpu"))
    want = convert_moe_packed_tensors(blocks.unsqueeze(0), scales.unsqueeze(0), dtype=dtype)
    assert torch.equal(got, want.transpose(1, 2))
    assert got[0, 127, :4].tolist() == [0.0, 0.0, 0.5, 0.0] and got[0, 0, 2] == 2.0**-128


def test_block_floats_are_kept_in_memorys_order() -> None:
    tensor = block_floats(3)
    stored = tensor.stored(1, 32)
    kept = ScaledWeight(elements=stored.elements[(slice(None),) * 3], scales=stored.scales)
    assert kept.is_fp4 and kept.shape == tensor.shape and kept.group == 32
    assert torch.equal(dequantized(kept), whole(tensor))


def test_words_are_unpacked_from_the_lowest_bits() -> None:
    word = torch.tensor([[0x76543210 - (1 << 32) + (8 << 28)]], dtype=torch.int32)
    assert unpack_words(word, 4, dim=1).tolist() == [[0, 1, 2, 3, 4, 5, 6, 0xF]]
    assert unpack_words(word, 8, dim=0).tolist() == [[0x10], [0x32], [0x54], [0xF6]]
