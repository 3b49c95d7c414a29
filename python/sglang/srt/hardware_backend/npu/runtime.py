"""Ascend NPUs through `torch_npu`, whose `torch.npu` has the names of `torch.cuda`.

Only this file imports `torch_npu`. It is written against the library's documented interface and
tested with a module that records its calls. It has not run on hardware.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from sglang.srt.hardware_backend.accelerator import AcceleratorRuntime
from sglang.srt.hardware_backend.device_kinds import NPU


class NpuRuntime(AcceleratorRuntime):
    """One NPU; `npu` without an index is the current one."""

    kind = NPU

    def __init__(self, device: str) -> None:
        """Raises ValueError, with the packages to install, if `torch_npu` cannot be imported."""
        index = device.partition(":")[2]
        self._name = device
        super().__init__(int(index) if index else None, load_torch_npu().npu)

    def why_absent(self) -> str | None:
        return None if self._api.is_available() else "torch_npu sees no NPU here"

    def stage_to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_cpu:
            return tensor
        # torch's cache owns the page-locked copy, and reuses it only after the transfer.
        return tensor.pin_memory().to(self._name, non_blocking=True)

    def handle_of(self, stream: Any) -> int:
        """The `aclrtStream`."""
        return int(stream.npu_stream)


def load_torch_npu(user: str = f"--device {NPU.name}") -> Any:
    """The module `torch_npu`, which adds `npu` to torch's devices when it is imported.

    Args:
        user: The flag that needs it, for the message.

    Raises:
        ValueError: It is not installed, or does not load; with the cause and what to install.
    """
    missing = NPU.missing_package()
    if missing is not None:
        raise ValueError(f"{user}: {missing}")
    try:
        module = importlib.import_module("torch_npu")
        _ = module.npu
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        raise ValueError(
            f"{user}: torch_npu does not load ({error}); {NPU.package_remedy}"
        ) from error
    return module
