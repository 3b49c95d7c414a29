"""Staging memory for a seed's rows if this rank needs only some of their columns."""

from __future__ import annotations

import torch

from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import (
    MooncakeTransferEngine,
)
from sglang.srt.hardware_backend.device_runtime import device_runtime
from sglang.srt.model_loader.read_batches import ReadBatch


class StagingMemory:
    """Two halves, used by alternate batches: one is filled while the other is copied from.

    Args:
        engine: The engine that the memory is registered with.
        num_bytes: Bytes of each half; 0: no batch needs staging memory.
        device: Device of the weights.
        known: Addresses of allocations that are registered with the engine already.

    Raises:
        RegistrationError: The transport refused.
    """

    def __init__(
        self,
        engine: MooncakeTransferEngine,
        num_bytes: int,
        device: torch.device,
        known: set[int],
    ) -> None:
        self._engine = engine
        self._memory = torch.empty(2 * num_bytes, dtype=torch.uint8, device=device)
        self._halves = torch.split(self._memory, num_bytes) if num_bytes else (self._memory,) * 2
        self._runtime = device_runtime(device)
        # It may be in the same allocation as weights.
        ranges = self._runtime.allocations_of([self._memory]) if num_bytes else {}
        self._own = {begin: size for begin, size in ranges.items() if begin not in known}
        if self._own:
            engine.batch_register(list(self._own), list(self._own.values()))

    def half(self, index: int) -> torch.Tensor:
        """The half for the batch with this index, as uint8."""
        return self._halves[index % 2]

    def unpack(self, batch: ReadBatch, index: int) -> None:
        """Copy the staged rows of `batch`, which has this index, into place. Any thread. The copies
        are complete on return."""
        half = self.half(index)
        for step in batch.steps:
            if step.offset is not None:
                step.read.copy_from(half[step.offset : step.offset + step.read.num_bytes])
        if batch.staged:
            self._runtime.synchronize()

    def release(self) -> None:
        """Deregister the memory. No read into it may be in flight."""
        if self._own:
            self._engine.batch_deregister(list(self._own))
