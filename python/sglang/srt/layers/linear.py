"""Linear layers. Projections that read the same input are merged into one matmul at load.

The names say how tensor parallelism splits their weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
import torch.nn.functional as F

from sglang.srt.distributed.tensor_group import ToAdd
from sglang.srt.layers.fused_kernels import fused_kernels
from sglang.srt.layers.layer_weight import (
    kept_format,
    new_weight,
    rows_of,
    slots_of,
)
from sglang.srt.layers.placement import (
    NamedSlots,
    Share,
    TensorPlacement,
    WeightedLayer,
    WeightSlot,
)
from sglang.srt.layers.triton_ops.arguments import RoundedRows, ScaledWeight, Weight
from sglang.srt.layers.weight_format import WeightFormat

_MAX_UNPADDED_ROWS: Final = 32
"""Batches up to this size are not padded: padding would cost more than compiling for each size."""

_ROWS_OF_PARTS: Final = 1024
"""Fewest rows of bf16 for which an fp32 weight is split. The product in fp32 takes 72 to 119
microseconds for so many rows, and 349 to 764 for 8,192, most of it on slower cores."""


def apply_linear(
    x: torch.Tensor | RoundedRows,
    weight: Weight,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Compute `x @ weight.T + bias` with the best kernel for the device and the number of rows.

    Args:
        x: `[num_tokens, input_size]`, or rounded for this weight.
        weight: `[output_size, input_size]`. If it is fp32, so is the result, whatever the dtype of
            `x`. A weight with scales needs a device with fused kernels; they round `x` as
            `FusedKernels.multiply_scaled` says.
        bias: `[output_size]`.
        out: Tensor for the result, `[num_tokens, output_size]` of `out_dtype`; None: a new one.
        out_dtype: Dtype of the result; None: that of `x`. On CUDA the sums are not rounded to the
            dtype of `x` in between.
    """
    if isinstance(weight, ScaledWeight):
        kernels = fused_kernels(weight.elements.device)
        assert kernels is not None, "other devices dequantize weights at load"
        return kernels.multiply_scaled(x, weight, bias, out=out, out_dtype=out_dtype)
    assert isinstance(x, torch.Tensor), "only weights with scales take rounded activations"
    kernels = fused_kernels(x.device)
    is_wide = weight.dtype == torch.float32 and x.dtype in (torch.bfloat16, torch.float16)
    if is_wide:
        is_many = kernels is not None and len(x) >= _ROWS_OF_PARTS
        if is_many and x.dtype == torch.bfloat16 and bias is None and out is None:
            return _multiply_by_parts(x, weight)
        out_dtype = torch.float32
    config = kernels.plan_gemv(*weight.shape) if kernels is not None and len(x) == 1 else None
    if kernels is not None and config is not None:
        if out is None:
            shape = (1, weight.shape[0])
            out = torch.empty(shape, dtype=out_dtype or x.dtype, device=x.device)
        kernels.gemv(x, weight, bias, out, config)
        return out
    if is_wide:
        x = x.float()
    if kernels is not None:
        if out_dtype not in (None, x.dtype) and bias is None:
            if out is not None:
                return torch.mm(x, weight.t(), out_dtype=out_dtype, out=out)
            return torch.mm(x, weight.t(), out_dtype=out_dtype)
        if out is not None and out.dtype == x.dtype and bias is None:
            return torch.mm(x, weight.t(), out=out)
    is_padded = x.is_cpu and x.dtype != torch.float32
    result = _padded_linear(x, weight, bias) if is_padded else F.linear(x, weight, bias)
    if out_dtype is not None:
        result = result.to(out_dtype)
    return result if out is None else out.copy_(result)


def apply_by_group(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply each group of a token's features with a matrix of its own.

    Args:
        x: `[num_tokens, groups, inputs]`, contiguous.
        weight: `[groups, outputs, inputs]`, contiguous.

    Returns:
        `[num_tokens, groups, outputs]`.
    """
    num_tokens, groups, inputs = x.shape
    outputs = weight.shape[1]
    out = x.new_empty((num_tokens, groups, outputs))
    kernels = fused_kernels(x.device)
    if kernels is not None and num_tokens == 1 and outputs % 8 == 0:
        config = kernels.plan_gemv(groups * outputs, inputs)
        if config is not None:
            flat = weight.view(-1, inputs)
            kernels.gemv(x.view(1, -1), flat, None, out.view(1, -1), config, groups=groups)
            return out
    torch.bmm(x.transpose(0, 1), weight.transpose(1, 2), out=out.transpose(0, 1))
    return out


def _multiply_by_parts(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`x @ weight.T` in fp32, of bf16 and fp32, as two products on bf16 tensor cores.

    A weight becomes the sum of two numbers in bf16, which have 16 of its 24 significant bits: all
    of them if the checkpoint is in bf16. Tensor cores add exact products with about as many bits.
    """
    parts = torch.empty((2, *weight.shape), dtype=x.dtype, device=x.device)
    parts[0].copy_(weight)
    torch.sub(weight, parts[0], out=parts[1])
    high, low = torch.mm(x, parts.flatten(0, 1).t(), out_dtype=torch.float32).chunk(2, dim=1)
    return high + low


def _padded_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """`F.linear`, padded with rows of zeros to fewer different sizes.

    oneDNN, which multiplies 16-bit numbers, compiles code for each number of rows: 0.4 ms and
    0.5 MB. Numbers above 32 are rounded up to one of four sizes in each power of two.
    """
    rows = x.shape[0]
    step = 1 << max(0, (rows - 1).bit_length() - 3)
    missing = -rows % step
    if rows <= _MAX_UNPADDED_ROWS or not missing:
        return F.linear(x, weight, bias)
    return F.linear(F.pad(x, (0, 0, 0, missing)), weight, bias)[:rows]


class MergedColumnParallelLinear(WeightedLayer):
    """Several projections of one input as a single matmul, outputs side by side.

    Each rank has some of the outputs of each projection.
    """

    def __init__(
        self,
        input_size: int,
        parts: Sequence[tuple[str, Share | tuple[Share, ...]]],
        *,
        bias: bool,
        placement: TensorPlacement,
    ) -> None:
        """Args:
        input_size: Features of the input.
        parts: For each projection, its name in the checkpoint and this rank's output features: one
            share, or one of each of several consecutive runs.
        placement: The enclosing layer's; checkpoints have no name for the merged projection.
        """
        super().__init__(placement)
        self.parts = [
            (name, (shares,) if isinstance(shares, Share) else shares) for name, shares in parts
        ]
        runs = [share for _, shares in self.parts for share in shares]
        output_size = sum(share.size for share in runs)
        inputs = Share(0, input_size, input_size)
        names = [f"{self.prefix}.{name}.weight" for name, _ in self.parts]
        format_ = kept_format(placement, names, inputs)
        self.weight = new_weight(self, "weight", placement, format_, runs, inputs)
        self.bias = placement.empty(output_size) if bias else None

    def forward(
        self, x: torch.Tensor | RoundedRows, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`[num_tokens, input_size]`, perhaps rounded, to `[num_tokens, sum of the parts]`.

        Args:
            out: Tensor for the result; None: a new one.
        """
        return apply_linear(x, self.weight, self.bias, out=out)

    def weight_slots(self) -> NamedSlots:
        begin = 0
        for name, shares in self.parts:
            end = begin + sum(share.size for share in shares)
            weight = rows_of(self.weight, begin, end)
            yield from slots_of(f"{self.prefix}.{name}.weight", weight, shares)
            if self.bias is not None:
                bias = self.bias[begin:end]
                yield f"{self.prefix}.{name}.bias", WeightSlot.of_runs(bias, shares)
            begin = end


class ProjectionsByFormat(torch.nn.Module):
    """Groups of projections of one input: one product for all groups whose weights have the same
    formats. Products of one token may share a launch. Every rank has all outputs."""

    def __init__(
        self,
        input_size: int,
        groups: Sequence[Sequence[tuple[str, Share]]],
        *,
        placement: TensorPlacement,
    ) -> None:
        """Args:
        groups: Of each group, the `parts` of `MergedColumnParallelLinear`.
        """
        super().__init__()
        formats, found = placement.formats, list[tuple[list[WeightFormat | None], list[int]]]()
        for nth, group in enumerate(groups):
            own: list[WeightFormat | None] = []
            for name, _ in group:
                one = None if formats is None else formats.of(f"{placement.prefix}.{name}.weight")
                if one not in own:
                    own.append(one)
            members = next((members for known, members in found if known == own), None)
            if members is None:
                found.append((own, [nth]))
            else:
                members.append(nth)
        self._members = [members for _, members in found]
        self._sizes = [
            [sum(share.size for _, share in groups[nth]) for nth in members]
            for members in self._members
        ]
        self._products = [
            MergedColumnParallelLinear(
                input_size,
                [part for nth in members for part in groups[nth]],
                bias=False,
                placement=placement,
            )
            for members in self._members
        ]
        self.products = torch.nn.ModuleList(self._products)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        """`[num_tokens, input_size]` to `[num_tokens, outputs]` of each group, with dense rows."""
        kernels, found = fused_kernels(x.device), None
        if kernels is not None:
            found = kernels.multiply_together(x, [product.weight for product in self._products])
        if found is None:
            found = [product.forward(x) for product in self._products]
        outs: dict[int, torch.Tensor] = {}
        for out, members, sizes in zip(found, self._members, self._sizes, strict=True):
            outs |= zip(members, torch.split(out, sizes, dim=1), strict=True)
        return [outs[nth] for nth in range(len(outs))]


class RowParallelLinear(WeightedLayer):
    """A projection whose input features are split over the ranks.

    Each rank computes a partial sum of the output; only the first rank adds the bias.
    """

    def __init__(
        self, inputs: Share, output_size: int, *, bias: bool, placement: TensorPlacement
    ) -> None:
        """Args:
        inputs: The input features that this rank has.
        """
        super().__init__(placement)
        self.inputs = inputs
        self._group = placement.tp_group
        self._dtype, self._device = placement.dtype, placement.device
        outputs = Share(0, output_size, output_size)
        format_ = kept_format(placement, [f"{self.prefix}.weight"], inputs)
        self.weight = new_weight(self, "weight", placement, format_, [outputs], inputs)
        self.has_bias = bias
        self.bias = placement.empty(output_size) if bias and placement.tp_rank == 0 else None
        kernels = fused_kernels(placement.device)
        self._rows_added: int | None = None
        """Fewest rows for which the product adds the residual itself; None: never."""
        is_plain = isinstance(self.weight, torch.Tensor)
        if kernels is not None and is_plain and self.bias is None and self._group.size == 1:
            self._rows_added = kernels.rows_added_in_product

    def forward(
        self, x: torch.Tensor | RoundedRows, residual: torch.Tensor
    ) -> tuple[ToAdd, torch.Tensor]:
        """Project, and add the result to the residual if the matrix product can do that.

        Args:
            x: `[num_tokens, input_size]`, or rounded for this weight.
            residual: `[num_tokens, output_size]`; its memory may be used.

        Returns:
            The tensor that remains to be added to the residual (None: nothing), and the residual.
        """
        if self._rows_added is not None and len(x) >= self._rows_added:
            assert isinstance(self.weight, torch.Tensor) and isinstance(x, torch.Tensor)
            return None, residual.addmm_(x, self.weight.t())
        if self._group.size == 1:
            return self.part(x), residual
        out = self._group.empty_part((len(x), self.weight.shape[0]), residual)
        return self._group.sum_later(self.part(x, out)), residual

    def part(self, x: torch.Tensor | RoundedRows, out: torch.Tensor | None = None) -> torch.Tensor:
        """Project `[num_tokens, input_size]` to this rank's partial sum,
        `[num_tokens, output_size]`.

        Args:
            out: Tensor for the result; None: a new one.
        """
        return apply_linear(x, self.weight, self.bias, out=out)

    def weight_slots(self) -> NamedSlots:
        yield from slots_of(f"{self.prefix}.weight", self.weight, inputs=self.inputs)
        name = f"{self.prefix}.bias"
        if self.bias is not None:
            yield name, WeightSlot.of(self.bias)
        elif self.has_bias:
            nothing = torch.empty(0, dtype=self._dtype, device=self._device)
            yield name, WeightSlot.of(nothing, Share(0, 0, self.weight.shape[0]))
