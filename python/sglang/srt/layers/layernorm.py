"""Root-mean-square normalisation."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from sglang.srt.distributed.tensor_group import PendingSum, ToAdd
from sglang.srt.layers.fused_kernels import fused_kernels
from sglang.srt.layers.placement import (
    NamedSlots,
    Share,
    TensorPlacement,
    WeightedLayer,
    WeightSlot,
)
from sglang.srt.layers.triton_ops.arguments import RoundedRows, Weight, takes_rounded


class RMSNorm(WeightedLayer):
    """Normalises in fp32, rounds to the input's dtype, then multiplies by the weight, as
    transformers does."""

    is_centered = False
    """If true, multiply by (1 + weight) in fp32, then round."""

    def __init__(self, size: int, eps: float, *, placement: TensorPlacement) -> None:
        super().__init__(placement)
        self.eps = eps
        self.weight = placement.empty(size)
        self._kernels = fused_kernels(placement.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension of `x`."""
        if self._kernels is not None:
            return self._kernels.rms_norm(x, self.weight, self.eps, self.is_centered)
        return self._by_torch(x)

    def _by_torch(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, None, self.eps).mul_(self.weight)

    def add_(self, x: ToAdd, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add `x` to the residual, and normalise the sum.

        Args:
            x: `[num_tokens, size]`, overwritten, or partial sums of the ranks; None: nothing to
                add.
            residual: `[num_tokens, size]`, overwritten.

        Returns:
            The normalised sum, and the sum itself.
        """
        if x is None:
            return self.forward(residual), residual
        if isinstance(x, PendingSum):
            if self._kernels is not None:
                normed = self._kernels.add_parts_rms_norm_(
                    x.peers, residual, self.weight, self.eps, self.is_centered
                )
                return normed, residual
            x = x.sum()
        if self._kernels is not None:
            self._kernels.add_rms_norm_(x, residual, self.weight, self.eps, self.is_centered)
            return x, residual
        residual = x.add_(residual)
        return self.forward(residual), residual

    def add_and_round_(
        self, x: ToAdd, residual: torch.Tensor, consumer: Weight | None
    ) -> tuple[torch.Tensor | RoundedRows, torch.Tensor]:
        """`add_`, with the normalised sum rounded for a product with `consumer` if one launch can
        do both.

        Args:
            consumer: The only weight that multiplies the normalised sum; None: it has others.
        """
        if self._kernels is None or isinstance(x, PendingSum):
            return self.add_(x, residual)
        scaled = takes_rounded(consumer, len(residual))
        if scaled is None:
            return self.add_(x, residual)
        rounded = self._kernels.add_and_round_(
            x, residual, self.weight, self.eps, scaled, self.is_centered
        )
        return rounded, residual

    def weight_slots(self) -> NamedSlots:
        yield f"{self.prefix}.weight", WeightSlot.of(self.weight)


class ZeroCenteredRMSNorm(RMSNorm):
    """Normalises and multiplies by (1 + weight) in fp32, then rounds."""

    is_centered = True

    def _by_torch(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.weight.float() + 1.0
        return F.rms_norm(x.float(), scale.shape, scale, self.eps).to(x.dtype)


class WideRMSNorm(RMSNorm):
    """Normalises and multiplies by a weight of fp32 in fp32, then rounds. It has no kernel."""

    def __init__(self, size: int, eps: float, *, placement: TensorPlacement) -> None:
        super().__init__(size, eps, placement=replace(placement, dtype=torch.float32))
        self._kernels = None

    def _by_torch(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps).to(x.dtype)


class QKNorm(WeightedLayer):
    """Per-head normalisation of queries and keys in one pass; they lie side by side."""

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        eps: float,
        *,
        placement: TensorPlacement,
    ) -> None:
        super().__init__(placement)
        self.eps = eps
        self.num_heads = num_heads
        # A row for each head, although all queries share a weight and all keys another: this takes
        # one multiplication instead of two and a concatenation.
        self.weight = placement.empty(num_heads + num_kv_heads, head_dim)

    def forward(self, qk: torch.Tensor) -> torch.Tensor:
        """Normalise `[num_tokens, num_heads + num_kv_heads, head_dim]` over its last dimension."""
        return F.rms_norm(qk, self.weight.shape[-1:], None, self.eps).mul_(self.weight)

    def weight_slots(self) -> NamedSlots:
        shape = (self.weight.shape[-1],)
        yield f"{self.prefix}.q_norm.weight", WeightSlot(self.weight[: self.num_heads], shape)
        yield f"{self.prefix}.k_norm.weight", WeightSlot(self.weight[self.num_heads :], shape)


class ProjectionQKNorm(WeightedLayer):
    """Normalisation of a token's queries as one vector, and of its keys as another.

    Ranks have some of the heads each, and add up the squares of all heads.
    """

    def __init__(
        self,
        heads: Share,
        kv_heads: Share,
        head_dim: int,
        eps: float,
        *,
        placement: TensorPlacement,
    ) -> None:
        super().__init__(placement)
        self.eps = eps
        self._group = placement.tp_group
        self._heads = {"q_norm": heads, "k_norm": kv_heads}
        self._sizes = [heads.size, kv_heads.size]
        self.weight = placement.empty(heads.size + kv_heads.size, head_dim)

    def normalise_(self, qk: torch.Tensor) -> None:
        """Normalise `[num_tokens, num_heads + num_kv_heads, head_dim]` in place.

        Several ranks make one sum over them.
        """
        parts = torch.split(qk, self._sizes, dim=1)
        squares = [part.float().square().mean(dim=(1, 2)) for part in parts]
        means = torch.stack(squares, dim=1)
        if self._group.size > 1:
            # All ranks have equally many heads, even where several have the same. The zeros make
            # rows of 16 bytes: other sizes take GPUs longer to sum.
            means = self._group.all_reduce(F.pad(means, (0, 2)))[:, :2] / self._group.size
        scales = (means + self.eps).rsqrt_()
        for place, part in enumerate(parts):
            part.copy_(part * scales[:, place, None, None])
        qk.mul_(self.weight)

    def weight_slots(self) -> NamedSlots:
        rows = torch.split(self.weight, self._sizes)
        for (name, heads), own in zip(self._heads.items(), rows, strict=True):
            features = heads.times(own.shape[1])
            yield f"{self.prefix}.{name}.weight", WeightSlot.of(own.view(-1), features)


class GatedRMSNorm(WeightedLayer):
    """Norm of linear attention, head by head, times SiLU of a gate, in fp32. Heads share the
    weight.

    Args:
        by_sigmoid: The gate's sigmoid multiplies instead of its SiLU.
    """

    def __init__(
        self, size: int, eps: float, *, placement: TensorPlacement, by_sigmoid: bool = False
    ) -> None:
        super().__init__(placement)
        self.eps = eps
        self._activation = torch.sigmoid if by_sigmoid else F.silu
        self.weight = placement.empty(size)

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension of `x`; `gate` has the same shape and the result's dtype."""
        normed = F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps)
        return (normed * self._activation(gate.float())).to(gate.dtype)

    def weight_slots(self) -> NamedSlots:
        yield f"{self.prefix}.weight", WeightSlot.of(self.weight)
