"""Layouts of quantized weights in memory, and the parts that keep their format."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rigs.caches.memory_ranks import PlaceInGroup
from sglang.srt.layers.layer_weight import kept_format, new_weight, slots_of, weight_shape
from sglang.srt.layers.linear import ProjectionsByFormat
from sglang.srt.layers.linear_attention.delta_layer import DeltaNetHeads, DeltaNetOptions
from sglang.srt.layers.linear_attention.delta_net import DeltaNetProjections
from sglang.srt.layers.placement import Share, TensorPlacement, slots_in
from sglang.srt.layers.triton_ops.arguments import ScaledWeight
from sglang.srt.layers.weight_format import EXPONENTS, WeightFormat, WeightFormats
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

BLOCKS = WeightFormat(block=(128, 128))
CHANNELS = WeightFormat(block=(1, -1))
INT4 = WeightFormat(bits=4, block=(1, 32), scales=torch.bfloat16, has_zeros=True)

FP4 = WeightFormat(bits=4, block=(1, 32), scales=EXPONENTS)


@pytest.mark.parametrize(
    ("format_", "share", "total", "group"),
    [
        (BLOCKS, 512, 512, 128),
        (BLOCKS, 256, 512, 128),
        # Parts of one block, and of the only one.
        (BLOCKS, 64, 512, 64),
        (BLOCKS, 96, 96, 96),
        (BLOCKS, 48, 96, 48),
        # The last block is not whole; a part lies in two blocks.
        (BLOCKS, 192, 192, None),
        (BLOCKS, 96, 192, None),
        (CHANNELS, 192, 192, 192),
        (CHANNELS, 96, 192, 96),
        (WeightFormat(block=(64, 64)), 128, 128, None),
        (FP4, 2880, 2880, 32),
        (FP4, 736, 2880, 32),
        (FP4, 720, 2880, None),
        (INT4, 96, 96, 32),
        (INT4, 48, 96, None),
        (INT4, 16, 96, None),
        (WeightFormat(bits=4, block=(1, 128)), 64, 512, 64),
        (WeightFormat(bits=4, block=(1, 16)), 96, 96, None),
        (WeightFormat(bits=4, block=(1, -1)), 96, 96, 96),
        # 32 inputs are packed together.
        (WeightFormat(bits=4, block=(1, -1)), 48, 144, None),
    ],
)
def test_inputs_of_a_rank_share_scales(
    format_: WeightFormat, share: int, total: int, group: int | None
) -> None:
    assert format_.group(share, total) == group


@pytest.mark.parametrize(
    ("total", "group", "size", "parts"),
    [
        # gpt-oss: 90 groups.
        (2880, 32, 4, [736, 704, 736, 704]),
        (2880, 32, 8, [384, 352, 352, 352, 384, 352, 352, 352]),
        # The largest would be a fifth or more larger; a group is not whole.
        (160, 32, 2, [80, 80]),
        (96, 32, 6, [16] * 6),
        (2880, 128, 4, [720] * 4),
    ],
)
def test_ranks_may_have_whole_groups(total: int, group: int, size: int, parts: list[int]) -> None:
    shares = []
    for rank in range(size):
        placement = replace(placement_of(), tp_group=PlaceInGroup(rank, size))
        even = placement.share(total, "features")
        shares.append(placement.group_share(even, group))
    assert [share.size for share in shares] == parts
    assert [share.begin for share in shares[1:]] == [share.end for share in shares[:-1]]
    assert shares[0].begin == 0 and shares[-1].end == total
    assert all(share.total == total for share in shares)


def placement_of(**formats: WeightFormat) -> TensorPlacement:
    found = WeightFormats(of=formats.get)
    return TensorPlacement(dtype=torch.bfloat16, device="cpu", formats=found)


def test_weights_keep_a_format_together_or_not_at_all() -> None:
    placement = placement_of(a=BLOCKS, b=BLOCKS, c=CHANNELS)
    inputs, ragged = Share(0, 256, 256), Share(0, 192, 192)
    assert kept_format(placement, ["a", "b"], inputs) == BLOCKS
    assert kept_format(placement, ["plain", "other"], inputs) is None
    assert placement.formats is not None and not placement.formats.dequantized
    assert kept_format(placement, ["a", "c"], inputs) is None
    assert kept_format(placement, ["a", "b", "plain"], inputs) is None
    assert kept_format(placement, ["a", "b"], inputs, ragged) is None
    assert placement.formats.dequantized == {
        "merged with weights of another format": 4,
        "groups of 128 inputs do not fit 192 on a rank": 2,
    }


def test_all_tensors_of_a_weight_are_parameters_with_slots() -> None:
    module, placement = torch.nn.Module(), placement_of()
    outputs, inputs = Share(8, 16, 24), Share(64, 128, 192)
    weight = new_weight(module, "weight", placement, INT4, [outputs], inputs, lead=(3,))
    assert isinstance(weight, ScaledWeight)
    assert (weight.shape, weight.height, weight.group) == ((3, 8, 64), 1, 32)
    found = {name: (tuple(one.shape), one.dtype) for name, one in module.named_parameters()}
    assert found == {
        "weight_elements": ((3, 8, 32), torch.uint8),
        "weight_scale": ((3, 8, 2), torch.bfloat16),
        "weight_zero_point": ((3, 8, 2), torch.uint8),
    }
    by_rows = {name: slot.shape for name, slot in slots_of("w", weight, (outputs,))}
    assert by_rows == {"w": (3, 24, 32), "w_scale": (3, 24, 2), "w_zero_point": (3, 24, 2)}
    by_columns = dict(slots_of("w", weight, inputs=inputs))
    assert by_columns["w_scale"].shape == (3, 8, 6)
    assert by_columns["w_scale"].ranges == [(2, 4)]
    assert by_columns["w"].ranges == [(32, 64)]
    assert weight_shape(by_columns["w"]) == (3, 8, 192)


def test_runs_of_whole_blocks_have_a_scale_for_each() -> None:
    module, placement = torch.nn.Module(), placement_of()
    inputs, whole = Share(0, 256, 256), Share(128, 256, 384)
    for shares, height in (([whole, whole], 128), ([whole, Share(0, 192, 192)], 1)):
        weight = new_weight(module, f"of_{height}", placement, BLOCKS, shares, inputs)
        assert isinstance(weight, ScaledWeight)
        assert (weight.height, weight.scales.dtype) == (height, torch.float32)


@pytest.mark.parametrize("is_grouped", [True, False])
def test_projections_of_two_formats_lie_side_by_side(is_grouped: bool) -> None:
    """A delta net has a product for each format: one token's write one tensor, others are
    joined."""
    options = DeltaNetOptions(
        hidden_size=32, num_key_heads=2, num_heads=4, key_dim=8, value_dim=8, kernel=4, eps=1e-6,
        is_grouped=is_grouped,
    )  # fmt: skip
    quantized = WeightFormat(why_dequantized="this test has no checkpoint")
    formats = WeightFormats(of=lambda name: quantized if "qkv" in name or "_z" in name else None)
    plain = TensorPlacement(dtype=torch.float32, device="cpu")
    heads = DeltaNetHeads.of(options, plain)
    joined, apart = (
        DeltaNetProjections(options, heads, placement)
        for placement in (plain, replace(plain, formats=formats))
    )
    whole = torch.randn(sum(joined.sizes), 32)
    for layer in (joined, apart):
        weights = list(layer.parameters())
        for weight, part in zip(
            weights, torch.split(whole, [len(one) for one in weights]), strict=True
        ):
            weight.copy_(part)
    assert [len(list(layer.parameters())) for layer in (joined, apart)] == [1, 2]
    for tokens in (1, 3):
        x = torch.randn(tokens, 32)
        torch.testing.assert_close(apart.columns(x), joined.columns(x))


def test_groups_of_projections_share_a_product_if_their_formats_are_the_same() -> None:
    """The outputs keep their order."""
    quantized = WeightFormat(why_dequantized="this test has no checkpoint")
    formats = WeightFormats(of=lambda name: quantized if "q" in name else None)
    placement = TensorPlacement(dtype=torch.float32, device="cpu", prefix="layer", formats=formats)
    sizes = {"qa": 3, "qb": 2, "plain": 5, "q.c": 4, "mixed": 1, "q_of_mixed": 6}
    groups = [["qa", "qb"], ["plain"], ["q.c"], ["mixed", "q_of_mixed"]]
    layer = ProjectionsByFormat(
        8, [[(name, Share(0, sizes[name], sizes[name])) for name in group] for group in groups],
        placement=placement,
    )  # fmt: skip
    assert [len(weight) for weight in layer.parameters()] == [9, 5, 7]
    slots = dict(slots_in(layer))
    weights = {name: torch.randn(size, 8) for name, size in sizes.items()}
    for name, weight in weights.items():
        slots[f"layer.{name}.weight"].dest.copy_(weight)
    x = torch.randn(2, 8)
    for got, group in zip(layer(x), groups, strict=True):
        torch.testing.assert_close(got, x @ torch.cat([weights[name] for name in group]).t())
    whole = ProjectionsByFormat(
        8,
        [[("a", Share(0, 3, 3))], [("b", Share(0, 2, 2))]],
        placement=replace(placement, formats=None),
    )
    assert [len(weight) for weight in whole.parameters()] == [5]
