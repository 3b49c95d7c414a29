"""The weight of a layer in memory: plain, or with scales where the checkpoint quantizes it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import torch

from sglang.srt.layers.placement import NamedSlots, Share, TensorPlacement, WeightSlot
from sglang.srt.layers.triton_ops.arguments import ScaledWeight, Weight
from sglang.srt.layers.weight_format import BLOCK, WeightFormat

SCALES: Final = "_scale"
ZEROS: Final = "_zero_point"
"""Suffixes of the slots of scales and zero points. The elements' slot has the weight's name."""


def kept_format(
    placement: TensorPlacement, names: Sequence[str], *inputs: Share
) -> WeightFormat | None:
    """The format that some weights keep in memory, all or none of them; None: their values have the
    placement's dtype. Counts those that are dequantized.

    Args:
        names: Names of the weights in the checkpoint.
        inputs: This rank's inputs of the weights, in any order.
    """
    if placement.formats is None:
        return None
    found = [placement.formats.of(name) for name in names]
    quantized = [one for one in found if one is not None]
    if not quantized:
        return None
    first = quantized[0]
    reasons = [one.why_dequantized for one in quantized if one.why_dequantized is not None]
    if any(one != first for one in found):
        reasons.append("merged with weights of another format")
    reasons += [
        f"groups of {first.block[1]} inputs do not fit {share.size} on a rank"
        for share in inputs
        if first.group(share.size, share.total) is None
    ]
    if not reasons:
        return first
    placement.formats.dequantized[reasons[0]] += len(quantized)
    return None


def share_for(placement: TensorPlacement, names: Sequence[str], even: Share) -> Share:
    """This rank's inputs of some weights: `even`, or, where that cuts a group of 4-bit elements,
    whole groups, which kernels take. Ranks then have unequal parts."""
    format_ = None if placement.formats is None else placement.formats.of(names[0])
    if format_ is None or format_.bits != 4 or format_.block[1] < 0:
        return even
    if format_.group(even.size, even.total) is not None:
        return even
    return placement.group_share(even, format_.block[1])


def new_weight(
    module: torch.nn.Module,
    attribute: str,
    placement: TensorPlacement,
    format_: WeightFormat | None,
    outputs: Sequence[Share],
    inputs: Share,
    *,
    lead: tuple[int, ...] = (),
) -> Weight:
    """An uninitialised weight for the loader to fill, whose tensors are parameters of `module`.

    Args:
        attribute: Name of the weight in the module.
        format_: From `kept_format`.
        outputs: This rank's outputs of each run of each of the weights that are merged.
        inputs: This rank's inputs.
        lead: Sizes of the dimensions before outputs and inputs.

    Returns:
        `[*lead, outputs, inputs]`.
    """
    rows = sum(share.size for share in outputs)
    if format_ is None:
        weight = placement.empty(*lead, rows, inputs.size)
        module.register_parameter(attribute, weight)
        return weight
    group = format_.group(inputs.size, inputs.total)
    assert group is not None, "it has been checked"
    is_whole = not any(size % BLOCK for share in outputs for size in (share.size, share.total))
    height = BLOCK if format_.block[0] == BLOCK and is_whole else 1
    is_fp8, groups = format_.bits == 8, inputs.size // group
    scaled = ScaledWeight(
        elements=(
            placement.empty(*lead, rows, inputs.size, dtype=torch.float8_e4m3fn)
            if is_fp8
            else placement.empty(*lead, rows, inputs.size // 2, dtype=torch.uint8)
        ),
        scales=placement.empty(*lead, rows // height, groups, dtype=format_.scales),
        zeros=(
            placement.empty(*lead, rows, groups, dtype=torch.uint8) if format_.has_zeros else None
        ),
    )
    for suffix, tensor, _ in _tensors(scaled):
        assert isinstance(tensor, torch.nn.Parameter)
        module.register_parameter(f"{attribute}{suffix or '_elements'}", tensor)
    return scaled


def _tensors(weight: ScaledWeight) -> Iterator[tuple[str, torch.Tensor, tuple[int, int]]]:
    """Suffix of the name of each of a weight's tensors, the tensor, and the outputs and inputs that
    one of its elements stands for."""
    yield "", weight.elements, (1, 1 if weight.is_fp8 else 2)
    yield SCALES, weight.scales, (weight.height, weight.group)
    if weight.zeros is not None:
        yield ZEROS, weight.zeros, (1, weight.group)


def _suffixed(weight: Weight) -> list[tuple[str, torch.Tensor]]:
    """Suffix of the name of each of a weight's tensors, and the tensor."""
    if isinstance(weight, torch.Tensor):
        return [("", weight)]
    return [(suffix, tensor) for suffix, tensor, _ in _tensors(weight)]


def rows_of(weight: Weight, begin: int, end: int) -> Weight:
    """Outputs `[begin, end)` of a weight, as views. Whole blocks, if scales have blocks."""
    if isinstance(weight, torch.Tensor):
        return weight[..., begin:end, :]
    height = weight.height
    assert begin % height == 0 and end % height == 0, (begin, end, height)
    return ScaledWeight(
        elements=weight.elements[..., begin:end, :],
        scales=weight.scales[..., begin // height : end // height, :],
        zeros=None if weight.zeros is None else weight.zeros[..., begin:end, :],
    )


def matrices_of(weight: Weight) -> Iterator[Weight]:
    """The matrices `[outputs, inputs]` of a stack, as views."""
    if isinstance(weight, torch.Tensor):
        yield from weight
        return
    for place, elements in enumerate(weight.elements):
        zeros = None if weight.zeros is None else weight.zeros[place]
        yield ScaledWeight(elements=elements, scales=weight.scales[place], zeros=zeros)


def slots_of(
    name: str,
    weight: Weight,
    outputs: tuple[Share, ...] = (),
    inputs: Share | None = None,
    parts: tuple[str, ...] = (),
) -> NamedSlots:
    """The slot of a checkpoint's weight, and those of its scales and zero points.

    Args:
        name: Name of the weight in the checkpoint.
        weight: This rank's part of it.
        outputs: This rank's part of each run of the outputs; empty: all are here.
        inputs: This rank's part of the inputs, if they are split and the outputs are not.
        parts: See `WeightSlot.parts`.
    """
    shares = outputs if inputs is None else (inputs,)
    if isinstance(weight, torch.Tensor):
        dim = weight.dim() - (2 if inputs is None else 1)
        yield name, WeightSlot.of_runs(weight, shares, dim if shares else 0, parts)
        return
    dim = len(weight.shape) - (2 if inputs is None else 1)
    for suffix, tensor, sizes in _tensors(weight):
        size = sizes[0 if inputs is None else 1]
        yield (
            f"{name}{suffix}",
            WeightSlot.of_runs(
                tensor,
                tuple(share.over(size) for share in shares),
                dim if shares else 0,
                tuple(f"{part}{suffix}" for part in parts),
            ),
        )


def stacked_slots_of(name: str, stack: Weight, own: Share, parts: tuple[str, ...]) -> NamedSlots:
    """`slots_of` a checkpoint's stack of which this rank has some matrices whole.

    Args:
        own: The matrices that this rank has.
    """
    for suffix, tensor in _suffixed(stack):
        own_parts = tuple(f"{part}{suffix}" for part in parts)
        yield f"{name}{suffix}", WeightSlot.of_runs(tensor, (own,), 0, own_parts)


def empty_slots_of(name: str, like: Weight) -> NamedSlots:
    """`slots_of` a checkpoint's weight of which this rank takes nothing; `like` has its shape."""
    for suffix, tensor in _suffixed(like):
        nothing = Share(0, 0, len(tensor))
        yield f"{name}{suffix}", WeightSlot.of(tensor[:0], nothing)


def alternating_slots_of(
    name: str,
    weight: Weight,
    outputs: Share,
    parts: tuple[str, ...],
    lead: Share | None = None,
) -> NamedSlots:
    """`slots_of` a checkpoint's weight in which the outputs of several weights alternate, which lie
    one after the other in memory.

    Args:
        weight: This rank's part, `[..., count * outputs, inputs]`; scales of single outputs.
        outputs: This rank's outputs of one of them.
        lead: This rank's part of the first dimension; None: all.
    """
    dim = len(weight.shape) - 2
    for suffix, tensor in _suffixed(weight):
        assert tensor.shape[dim] == weight.shape[dim], "a scale belongs to one output"
        *before, _, columns = tensor.shape
        by_output = tensor.view(*before, -1, outputs.size, columns).transpose(dim, dim + 1)
        own = tuple(f"{part}{suffix}" for part in parts)
        yield f"{name}{suffix}", WeightSlot.of_alternating(by_output, outputs, dim, own, lead)


def weight_shape(slot: WeightSlot) -> tuple[int, ...]:
    """Shape of the weight that fills a slot, in values: two for each byte of 4-bit integers."""
    *lead, columns = slot.shape
    return (*lead, 2 * columns) if slot.dest.dtype == torch.uint8 else slot.shape
