"""Fused kernels by kind of device: one launch instead of several of torch's.

On devices without fused kernels, layers use torch's operations.
"""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Final

import torch

from sglang.srt.hardware_backend.device_kinds import device_kind

if TYPE_CHECKING:
    from sglang.srt.layers.cuda_kernels import FusedKernels

_MODULES: Final[dict[str, str | None]] = {
    "cpu": None,
    "cuda": "sglang.srt.layers.cuda_kernels",
    "npu": None,
}
"""Module with the `KERNELS` of each kind of device; None: no fused kernels."""
_SHAPES_ALONE: Final = "meta"
"""torch's type of devices whose tensors have no memory."""


# Cached in C, because layers that are made without a device ask in each step.
@functools.cache
def fused_kernels(device: torch.device | str) -> FusedKernels | None:
    """Fused kernels of `device`; None: it has none, or nothing is computed on it.

    Raises:
        ValueError: The kind of device is not known.
    """
    if str(device) == _SHAPES_ALONE:
        return None
    module = _MODULES[device_kind(str(device)).name]
    if module is None:
        return None
    kernels: FusedKernels = importlib.import_module(module).KERNELS
    return kernels
