"""Weights with scales, and what their products are in fp64."""

from __future__ import annotations

import torch

from rigs.models import interpreted_fp8  # noqa: F401 - rounding in the interpreter
from rigs.models.kernel_layers import DEVICE, HALF
from rigs.models.scaled_products import floats_of, integers_of
from sglang.srt.layers.triton_ops.arguments import ScaledWeight


def fp8_weight(*shape: int, height: int = 1, group: int = 128, seed: int = 0) -> ScaledWeight:
    """fp8 `[..., outputs, inputs]` of about unit variance per 64 inputs."""
    numbers = torch.Generator().manual_seed(seed)
    *lead, outputs, inputs = shape
    elements = (torch.randn(*shape, generator=numbers) * 64).clamp_(-448, 448)
    scales = torch.rand(*lead, outputs // height, inputs // group, generator=numbers) + 0.5
    return ScaledWeight(
        elements=elements.to(torch.float8_e4m3fn).to(DEVICE), scales=(scales / 512).to(DEVICE)
    )


def int4_weight(
    *shape: int, group: int = 32, has_zeros: bool = False, seed: int = 0
) -> ScaledWeight:
    """4-bit `[..., outputs, inputs]`."""
    numbers = torch.Generator().manual_seed(seed)
    *lead, inputs = shape
    elements = torch.randint(0, 256, (*lead, inputs // 2), generator=numbers, dtype=torch.uint8)
    scales = (torch.rand(*lead, inputs // group, generator=numbers) + 0.5) / 32
    zeros = torch.randint(0, 16, scales.shape, generator=numbers, dtype=torch.uint8)
    return ScaledWeight(
        elements=elements.to(DEVICE),
        scales=scales.to(DEVICE, HALF),
        zeros=zeros.to(DEVICE) if has_zeros else None,
    )


def fp4_weight(*shape: int, seed: int = 0) -> ScaledWeight:
    """MXFP4 `[..., outputs, inputs]` in groups of 32."""
    numbers = torch.Generator().manual_seed(seed)
    *lead, inputs = shape
    elements = torch.randint(0, 256, (*lead, inputs // 2), generator=numbers, dtype=torch.uint8)
    scales = torch.randint(120, 124, (*lead, inputs // 32), generator=numbers, dtype=torch.uint8)
    return ScaledWeight(elements=elements.to(DEVICE), scales=scales.to(DEVICE))


def dequantized(weight: ScaledWeight) -> torch.Tensor:
    """The weight in fp64."""
    if weight.is_fp4:
        return floats_of(weight)
    scales = weight.scales.double()
    scales = scales.repeat_interleave(weight.height, -2).repeat_interleave(weight.group, -1)
    if weight.is_fp8:
        return weight.elements.double() * scales
    elements = integers_of(weight).double()
    if weight.zeros is None:
        return (elements - 8) * scales
    return (elements - weight.zeros.double().repeat_interleave(weight.group, -1)) * scales


def rounded(x: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """fp8 rows of `x` and their fp32 scales. The code multiplies by inverses, because torch's
    division by a number does so on a GPU but not on a CPU."""
    groups = x.float().view(len(x), -1, group)
    most = groups.abs().amax(-1)
    scales = torch.where(most > 1e-30, most * (1 / 448), 1.0)
    return (groups * scales.reciprocal().unsqueeze(-1)).to(torch.float8_e4m3fn).flatten(1), scales


def operand(x: torch.Tensor, weight: ScaledWeight) -> torch.Tensor:
    """The operand of a product with `weight` that stands for `x`, in fp64."""
    if not weight.is_fp8:
        return x.double()
    elements, scales = rounded(x, weight.group)
    return elements.double() * scales.double().repeat_interleave(weight.group, 1)


def product(x: torch.Tensor, weight: ScaledWeight) -> torch.Tensor:
    """`x @ weight.T` in fp64 of the operands that kernels multiply."""
    return operand(x, weight) @ dequantized(weight).t()
