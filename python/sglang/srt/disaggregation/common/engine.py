"""The part of the Transfer Engine that transfers of KV use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from sglang.srt.distributed.device_communicators.transfer_types import Block, Transfer, TransferOp


class Engine(Protocol):
    """See `MooncakeTransferEngine`. Any thread."""

    def batch_register(self, ptrs: Sequence[int], lengths: Sequence[int]) -> int: ...
    def is_registered(self, ptr: int, length: int) -> bool: ...
    def get_session_id(self) -> str: ...
    @property
    def stays_on_host(self) -> bool: ...
    def begin(
        self, peer: str, op: TransferOp, blocks: Sequence[Block], *, timeout: float | None
    ) -> Transfer: ...
    def forget_peer(self, session_id: str) -> None: ...


def register_new(engine: Engine, ranges: Mapping[int, int]) -> None:
    """Register the allocations, address to bytes, that the engine does not know yet: on a GPU,
    pools, buffers, rows of metadata, and weights that other servers read can share one."""
    new = {ptr: size for ptr, size in ranges.items() if not engine.is_registered(ptr, size)}
    if new:
        engine.batch_register(list(new), list(new.values()))
