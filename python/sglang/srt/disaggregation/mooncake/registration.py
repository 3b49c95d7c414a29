"""Registers the memory of a rank with the Transfer Engine."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

import torch

from sglang.srt.disaggregation.base.conn import AuxBuffers
from sglang.srt.disaggregation.common.geometry import PoolGeometry
from sglang.srt.disaggregation.common.sessions import Peers
from sglang.srt.disaggregation.common.transfer_context import Mover
from sglang.srt.hardware_backend.device_runtime import device_runtime

logger = logging.getLogger(__name__)


class Engine(Mover, Peers, Protocol):
    """The part of the Transfer Engine that transfers use; see `MooncakeTransferEngine`."""

    def batch_register(self, ptrs: Sequence[int], lengths: Sequence[int]) -> int: ...
    def is_registered(self, ptr: int, length: int) -> bool: ...
    def get_session_id(self) -> str: ...
    @property
    def stays_on_host(self) -> bool: ...


def register_memory(
    engine: Engine, geometry: PoolGeometry, device: torch.device, rows: AuxBuffers | None
) -> dict[int, int]:
    """Register pools and rows of metadata.

    Args:
        device: Device of the pools.
        rows: Rows of metadata; None: there are none.

    Returns:
        The allocations that have this memory, address to bytes.

    Raises:
        RuntimeError: The transport refuses the memory.
    """
    # Whole allocations, since over NVLink a peer on the same host can map nothing smaller.
    ranges = device_runtime(device).allocations_of(geometry.tensors)
    assert all(
        any(begin <= address < begin + size for begin, size in ranges.items())
        for address in geometry.addresses
    ), "a pool has memory that its geometry does not name"
    _register(engine, ranges)
    if rows is None:
        return ranges
    allocations = rows.allocations()
    try:
        _register(engine, allocations)
    except RuntimeError as error:
        raise RuntimeError(
            f"metadata in memory of {rows.device}: {error}; set SGLANG_MOONCAKE_SEND_AUX_TCP=1 to "
            "send it over the control connection, or "
            "SGLANG_MOONCAKE_CUSTOM_MEM_POOL=INTRA_NODE_NVLINK to keep it beside the pages"
        ) from error
    logger.info("metadata is in rows in memory of %s, and is read as pages are", rows.device)
    return ranges | allocations


def _register(engine: Engine, allocations: dict[int, int]) -> None:
    """Register what is not registered yet: on a GPU pools, rows of metadata, and weights that other
    servers may read can share an allocation."""
    new = {
        address: size
        for address, size in allocations.items()
        if not engine.is_registered(address, size)
    }
    if new:
        engine.batch_register(list(new), list(new.values()))
