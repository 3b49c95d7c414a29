"""The memory of weights: registration with the transport, and checksums."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import xxhash

from sglang.srt.constants import MIB
from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import (
    MooncakeTransferEngine,
)
from sglang.srt.hardware_backend.device_runtime import device_runtime
from sglang.srt.layers.weight_slot import WeightSlot

_PIECE_BYTES = 16 * MIB
"""Bytes of a tensor that are copied to the host at once."""


def register_weights(engine: MooncakeTransferEngine, slots: Iterable[WeightSlot]) -> None:
    """Register the memory of all slots of one model, for as long as the process lives.

    Whole allocations are registered, since over NVLink a peer on the same host can map nothing
    smaller.

    Raises:
        RegistrationError: The transport refused.
        OverlappingRange: Part of the memory is registered already.
    """
    tensors = [slot.dest for slot in slots if slot.dest.numel()]
    if tensors:
        ranges = device_runtime(tensors[0].device).allocations_of(tensors)
        engine.batch_register(list(ranges), list(ranges.values()))


def checksum(data: torch.Tensor) -> str:
    """xxh3-128 of the bytes of a tensor, row by row, 32 hexadecimal digits. Any device and thread.

    It runs beside the device's computations: copies have a stream of their own, and hashing
    releases the interpreter.

    Args:
        data: uint8 `[rows, bytes]`; the bytes of a row are contiguous.
    """
    digest = xxhash.xxh3_128()
    runtime = device_runtime(data.device)
    stream = runtime.make_side_stream()
    stream.follow()
    with stream.use():
        for piece in _pieces(data):
            (copy,) = runtime.copy_to_host([piece]).wait()
            assert copy is not None
            digest.update(copy.numpy().data)
    return digest.hexdigest()


def _pieces(data: torch.Tensor) -> Iterator[torch.Tensor]:
    """All bytes in contiguous tensors of at most `_PIECE_BYTES`."""
    if data.is_contiguous():
        yield from torch.split(data.view(-1), _PIECE_BYTES)
        return
    count = max(_PIECE_BYTES // data.shape[1], 1)
    for rows in torch.split(data, count):
        yield from torch.split(rows.reshape(-1), _PIECE_BYTES)
