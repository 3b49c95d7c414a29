"""Registration of weights' memory with the transport, and checksums of weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import (
    MooncakeTransferEngine,
)
from sglang.srt.hardware_backend.device_runtime import device_runtime
from sglang.srt.hardware_backend.leaf_hash import join_leaves
from sglang.srt.layers.weight_slot import WeightSlot


def register_weights(engine: MooncakeTransferEngine, slots: Iterable[WeightSlot]) -> None:
    """Register the memory of all slots of one model, for as long as the process lives.

    Whole allocations are registered, because over NVLink a peer on the same host cannot map less.

    Raises:
        RegistrationError: The transport refused.
        OverlappingRange: Part of the memory is registered already.
    """
    tensors = [slot.dest for slot in slots if slot.dest.numel()]
    if tensors:
        ranges = device_runtime(tensors[0].device).allocations_of(tensors)
        engine.batch_register(list(ranges), list(ranges.values()))


def checksums(cells: Sequence[torch.Tensor]) -> list[str]:
    """Hash the bytes of each tensor, row by row (`leaf_hash`): 32 hexadecimal digits. Any thread.

    Args:
        cells: uint8 `[rows, bytes]` on one device; the bytes of a row are contiguous.
    """
    filled = [cell for cell in cells if cell.numel()]
    digests = iter(device_runtime(cells[0].device).leaf_digests(filled) if filled else ())
    return [join_leaves(next(digests) if cell.numel() else b"", cell.numel()) for cell in cells]
