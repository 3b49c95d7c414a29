"""Products with scaled weights by plain torch, and models that keep such weights on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

from sglang.srt.layers import fused_kernels, linear
from sglang.srt.layers.activation import clamped_gate
from sglang.srt.layers.moe import experts
from sglang.srt.layers.triton_ops.arguments import (
    ClampedGate,
    ExpertActivation,
    ExpertBiases,
    ScaledWeight,
    Weight,
    inputs_of_bytes,
)
from sglang.srt.model_loader import loader


def dequantized(weight: ScaledWeight) -> torch.Tensor:
    """fp32 `[..., outputs, inputs]`: the values that the elements stand for."""
    if weight.is_fp4:
        return floats_of(weight).float()
    if weight.is_fp8:
        elements = weight.elements.float()
    else:
        zeros = 8 if weight.zeros is None else weight.zeros.repeat_interleave(weight.group, -1)
        elements = integers_of(weight).float() - zeros
    scales = weight.scales.float().repeat_interleave(weight.height, -2)
    return elements * scales.repeat_interleave(weight.group, -1)


def floats_of(weight: ScaledWeight) -> torch.Tensor:
    """fp64 `[..., outputs, inputs]`: the values of 4-bit floats."""
    integers = fp4_of(weight)
    exponent, fraction = integers >> 1 & 3, integers & 1
    # Numbers below 1 have no leading bit.
    mantissas = torch.where(exponent == 0, fraction, 2 + fraction).double()
    values = mantissas * 2.0 ** (exponent.clamp(min=1) - 2) * (1 - 2 * (integers >> 3))
    scales = 2.0 ** (weight.scales.double() - 127)
    return values * scales.repeat_interleave(weight.group, -1)


def fp4_of(weight: ScaledWeight) -> torch.Tensor:
    """int32 `[..., outputs, inputs]`: the bits of 4-bit floats, by input."""
    halves = weight.elements.view(torch.int16).int()
    found = torch.stack(
        [
            halves >> magnitude & 7 | (halves >> sign & 1) << 3
            for magnitude, sign in ((6, 15), (3, 12), (0, 14), (9, 13))
        ],
        -1,
    )
    # Dimensions: block, lane, half of its word, place in the half.
    blocks = found.view(*found.shape[:-2], -1, 4, 2, 4)
    return blocks.movedim(-1, -3).flatten(-4)


def integers_of(weight: ScaledWeight) -> torch.Tensor:
    """uint8 `[..., outputs, inputs]`: the 4-bit integers of a weight, by input."""
    elements, half = weight.elements, weight.block // 2
    blocks = elements.view(*elements.shape[:-1], elements.shape[-1] // half, half)
    halves = torch.stack((blocks & 15, blocks >> 4), -2)
    order = inputs_of_bytes(weight.block).argsort().to(halves.device)
    return halves[..., order].flatten(-3)


def rounded_activations(x: torch.Tensor, group: int) -> torch.Tensor:
    """`x` as fp32, rounded to e4m3 with a scale for `group` inputs of a token."""
    groups = x.float().reshape(*x.shape[:-1], x.shape[-1] // group, group)
    most = groups.abs().amax(-1, keepdim=True)
    # The kernels compute scales the same way; see `rounding.py`.
    scales = torch.where(most > 1e-30, most * (1 / 448), 1.0)
    return ((groups * scales.reciprocal()).to(torch.float8_e4m3fn).float() * scales).flatten(-2)


class ReferenceKernels:
    """The kernels of products, for a CPU.

    Args:
        rounds: If true, activations are rounded, as on a GPU.
    """

    rows_added_in_product = 512

    def __init__(self, rounds: bool) -> None:
        self._rounds = rounds
        self.num_scaled = 0
        """Number of products with scaled weights, those of experts not included."""

    @staticmethod
    def plan_gemv(n: int, k: int) -> None:
        return None

    def multiply_scaled(
        self,
        x: torch.Tensor,
        weight: ScaledWeight,
        bias: torch.Tensor | None,
        *,
        out: torch.Tensor | None,
        out_dtype: torch.dtype | None,
    ) -> torch.Tensor:
        self.num_scaled += 1
        product = self._product(x, weight)
        found = (product if bias is None else product + bias.float()).to(out_dtype or x.dtype)
        return found if out is None else out.copy_(found)

    @staticmethod
    def multiply_together(x: torch.Tensor, weights: Sequence[Weight]) -> None:
        return None

    def run_routed_experts(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        gate_up: Weight,
        down: Weight,
        *,
        activation: ExpertActivation = "silu",
        biases: ExpertBiases | None = None,
        num_experts: int | None = None,
    ) -> torch.Tensor:
        assert activation != "squared_relu", "those experts are dequantized"
        out = torch.zeros(x.shape, device=x.device)
        for expert in range(gate_up.shape[0]):
            tokens, places = torch.where(ids == expert)
            both = self._product(x[tokens], of(gate_up, expert))
            if biases is not None:
                both += biases.gate_up[expert]
            if isinstance(activation, ClampedGate):
                inner = clamped_gate(both, activation)
            else:
                gate, up = both.chunk(2, dim=-1)
                inner = F.silu(gate) * up
            found = self._product(inner, of(down, expert))
            if biases is not None and biases.down is not None:
                found += biases.down[expert]
            out.index_add_(0, tokens, found * weights[tokens, places].unsqueeze(1))
        return out.to(x.dtype)

    def _product(self, x: torch.Tensor, weight: Weight) -> torch.Tensor:
        if isinstance(weight, torch.Tensor):
            return F.linear(x.float(), weight.float())
        is_rounded = weight.is_fp8 and self._rounds
        own = rounded_activations(x, weight.group) if is_rounded else x.float()
        return F.linear(own, dequantized(weight))


def of(weight: Weight, expert: int) -> Weight:
    """The weight of one expert."""
    if isinstance(weight, torch.Tensor):
        return weight[expert]
    zeros = None if weight.zeros is None else weight.zeros[expert]
    return ScaledWeight(elements=weight.elements[expert], scales=weight.scales[expert], zeros=zeros)


def _mm(
    mm: Callable[..., torch.Tensor],
    x: torch.Tensor,
    y: torch.Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    **args: Any,
) -> torch.Tensor:
    """`torch.mm`, whose `out_dtype` is for GPUs alone, on any device."""
    return mm(x, y, **args) if out_dtype is None else mm(x.to(out_dtype), y.to(out_dtype), **args)


@contextmanager
def scaled_products(*, rounds: bool = False) -> Iterator[ReferenceKernels]:
    """Models of any dtype that are built meanwhile keep quantized weights as a GPU does. They run
    only meanwhile, also on a GPU, by torch's operations except for attention."""
    kernels = ReferenceKernels(rounds)
    with ExitStack() as stack:
        stack.callback(fused_kernels.fused_kernels.cache_clear)
        stack.enter_context(mock.patch.dict(fused_kernels._MODULES, {"cuda": None}))
        fused_kernels.fused_kernels.cache_clear()
        stack.enter_context(mock.patch.object(torch, "mm", partial(_mm, torch.mm)))
        dtypes = loader.KEPT_DTYPES | {torch.float32}
        stack.enter_context(mock.patch.object(loader, "KEPT_DTYPES", dtypes))
        for module in (loader, linear, experts):
            stack.enter_context(mock.patch.object(module, "fused_kernels", return_value=kernels))
        yield kernels


def scaled_weights(module: torch.nn.Module) -> Iterator[tuple[str, Weight]]:
    """Each weight of a module's layers that formats may concern, by the name of its attribute."""
    for name, layer in module.named_modules():
        for attribute in ("weight", "gate_up", "down", "query_weight", "key_weight"):
            weight = getattr(layer, attribute, None)
            if isinstance(weight, torch.Tensor | ScaledWeight):
                yield f"{name}.{attribute}", weight
