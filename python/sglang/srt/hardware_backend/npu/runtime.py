"""Ascend NPUs through `torch_npu`, whose `torch.npu` has the names of `torch.cuda`.

It is written against the library's documented interface and tested with a module that records its
calls. It has not run on hardware.
"""

from __future__ import annotations

import torch

from sglang.srt.hardware_backend.accelerator import AcceleratorRuntime
from sglang.srt.hardware_backend.device_kinds import NPU
from sglang.srt.hardware_backend.npu.library import load_torch_npu


class NpuRuntime(AcceleratorRuntime):
    """One NPU; `npu` without an index is the current one."""

    kind = NPU

    def __init__(self, device: str) -> None:
        """Raises ValueError, with the packages to install, if `torch_npu` cannot be imported."""
        index = device.partition(":")[2]
        self._index = int(index) if index else None
        self._name = device
        super().__init__(self._index, load_torch_npu().npu)

    def why_absent(self) -> str | None:
        return None if self._api.is_available() else "torch_npu sees no NPU here"

    def enter_thread(self) -> None:
        index = self._index
        self.set_device(self._api.current_device() if index is None else index)

    def stage_to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_cpu:
            return tensor
        # torch's cache owns the page-locked copy, and reuses it only after the transfer.
        return tensor.pin_memory().to(self._name, non_blocking=True)

    def current_stream_handle(self) -> int:
        """The `aclrtStream` of the current stream."""
        return int(self._api.current_stream(self._index).npu_stream)
