"""Kernels that do in one launch what torch does in several; for the kinds of device that have them.

Layers ask here, and compute with torch's operations, which every device has, where there are none.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch

from sglang.srt.distributed.tensor_group import PeerParts, TensorGroup
from sglang.srt.hardware_backend.device_kinds import device_kind
from sglang.srt.layers.placement import Share

GemvConfig: TypeAlias = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedKernels:
    """Functions on tensors of the device. Their contracts are where they are made."""

    silu_and_mul: Callable[[torch.Tensor], torch.Tensor]
    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    add_rms_norm_: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], None]
    add_parts_rms_norm_: Callable[[PeerParts, torch.Tensor, torch.Tensor, float], torch.Tensor]
    look_up_share: Callable[[torch.Tensor, torch.Tensor, Share], torch.Tensor]
    argmax_of_ranks: Callable[[torch.Tensor, Share, TensorGroup], torch.Tensor | None]
    plan_gemv: Callable[[int, int], GemvConfig | None]
    gemv: Callable[
        [torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor, GemvConfig], None
    ]
    """A product of one row."""
    gated_gemv: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, GemvConfig], None]
    """A product of one row with a gate and what it gates."""
    normalise_rotate_store_: Callable[
        [
            torch.Tensor,
            tuple[torch.Tensor, float] | None,
            tuple[torch.Tensor, torch.Tensor],
            torch.Tensor,
            torch.Tensor,
            torch.Tensor,
        ],
        None,
    ]
    rows_added_in_product: int
    """From so many rows on a product adds the residual itself."""
    has_grouped_mm: bool
    """Whether `torch._grouped_mm` takes bf16 on the device, reading nothing back."""
    runs_fla: bool
    """Whether the kernels of flash-linear-attention run on the device, if they are installed."""


_MODULES: Final[dict[str, str | None]] = {
    "cpu": None,
    "cuda": "sglang.srt.layers.triton_ops.fused",
    "npu": None,
}
"""By kind of device: the module whose `KERNELS` they are. None: it has none of its own."""


# Cached in C: layers that know no device before they run ask in each step.
@functools.cache
def fused_kernels(device: torch.device | str) -> FusedKernels | None:
    """The fused kernels of `device`; None: it has none.

    Raises:
        ValueError: The kind of device is not known.
    """
    module = _MODULES[device_kind(str(device)).name]
    if module is None:
        return None
    kernels = importlib.import_module(module).KERNELS
    assert isinstance(kernels, FusedKernels)
    return kernels
