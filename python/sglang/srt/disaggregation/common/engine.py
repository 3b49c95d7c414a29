"""The part of the Transfer Engine that transfers of KV use."""

from __future__ import annotations

from collections.abc import Sequence
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
