"""The Mooncake Transfer Engine of a process: the one place that moves memory between engines.

    init_mooncake_transfer_engine("10.0.0.1", gpu_id=0)      once, after the device is set
    engine = get_mooncake_transfer_engine()
    engine.batch_register(ptrs, lengths)
    transfer = engine.transfer(peer, TransferOp.WRITE, blocks, timeout=2.0)
    transfer.outcomes                                        one a block; see `Transfer`

No address outside the registered memory reaches the library, no peer gets more requests at once
than its transport takes, and no caller waits longer than it says.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Final

from sglang.srt.distributed.device_communicators.call_threads import CallThreads
from sglang.srt.distributed.device_communicators.engine_pool import EnginePool, RawEngine
from sglang.srt.distributed.device_communicators.engine_settings import (
    EngineSettings,
    settle_engine,
)
from sglang.srt.distributed.device_communicators.ib_devices import (
    get_ib_devices_for_gpu,
    parse_ib_device_config,
)
from sglang.srt.distributed.device_communicators.memory_book import MemoryBook
from sglang.srt.distributed.device_communicators.mooncake_library import load_transfer_engine
from sglang.srt.distributed.device_communicators.mooncake_protocol import (
    list_rdma_devices,
    wheel_protocols,
)
from sglang.srt.distributed.device_communicators.peer import Peer, parse_session_id
from sglang.srt.distributed.device_communicators.transfer_plan import merge_blocks
from sglang.srt.distributed.device_communicators.transfer_types import (
    Block,
    Transfer,
    TransferError,
    TransferOp,
)
from sglang.srt.distributed.device_communicators.transfer_worker import TransferWorker
from sglang.srt.distributed.device_context import require_device_set
from sglang.srt.environ import envs

__all__ = [
    "MooncakeTransferEngine",
    "get_ib_devices_for_gpu",
    "get_mooncake_transfer_engine",
    "init_mooncake_transfer_engine",
    "parse_ib_device_config",
]

logger = logging.getLogger(__name__)

_SYNC_TIMEOUT_S: Final = 60.0
"""Seconds for callers without a deadline; after them nothing more is sent."""


class MooncakeTransferEngine:
    """Registered memory, peers, and transfers between them. Any thread may call anything.

    Threads: one a transfer under way, named `mooncake-transfer` (`CallThreads`); Mooncake's own,
    two for each of its engine objects. A peer's trouble holds up calls to that peer alone.
    """

    def __init__(
        self,
        hostname: str,
        gpu_id: int | None = None,
        ib_device: str | None = None,
        *,
        new_engine: Callable[[], RawEngine] | None = None,
        supported: Collection[str] | None = None,
        rdma_root: str | Path = "/sys/class/infiniband",
    ) -> None:
        """Start it.

        Args:
            hostname: Name or address under which peers reach this process.
            gpu_id: This rank's device.
            ib_device: See `get_ib_devices_for_gpu`; None: the value of MOONCAKE_DEVICE.
            new_engine: Makes an engine object of Mooncake's; absent: loads the library.
            supported: Protocols that this makes; absent: those of the installed wheel.
            rdma_root: Directory in which sysfs lists InfiniBand devices.

        Raises:
            RuntimeError: No device is set in this process yet, or the engine does not start.
            ValueError: A setting cannot work here; one line with the remedy.
        """
        device = require_device_set("Mooncake's Transfer Engine")
        self._device = device
        self._gpu_id = gpu_id
        self._rdma_root = rdma_root
        if new_engine is None:
            new_engine = load_transfer_engine().TransferEngine
        assert new_engine is not None
        self._new_engine = new_engine
        self._supported = wheel_protocols() if supported is None else supported
        config = envs.MOONCAKE_DEVICE.get() if ib_device is None else ib_device
        if gpu_id is None and parse_ib_device_config(config) is not None:
            raise ValueError(
                "--disaggregation-ib-device (or MOONCAKE_DEVICE) has devices by GPU, and this "
                "process has none: use a list like mlx5_0,mlx5_1"
            )
        device_name = get_ib_devices_for_gpu(config, gpu_id or 0) or ""
        self._book = MemoryBook()
        self._threads = CallThreads("mooncake-transfer")
        self._peers: dict[str, Peer] = {}
        self._closed = False
        self._lock = threading.Lock()
        self._settings: EngineSettings
        self._pool: EnginePool
        self.initialize(hostname, device_name)

    def initialize(self, hostname: str, device_name: str) -> None:
        """Settle the protocol and start the engine; the constructor does it.

        Raises:
            RuntimeError: It does not start; names transport, address and remedy.
            ValueError: A setting cannot work here; nothing was started.
        """
        if hasattr(self, "_pool"):
            raise RuntimeError("the Transfer Engine of this process runs already")
        self._settings = settle_engine(
            hostname,
            device=self._device,
            gpu_id=self._gpu_id,
            ib_device=device_name,
            devices=list_rdma_devices(self._rdma_root),
            supported=self._supported,
        )
        self._settings.export()
        self._pool = EnginePool(self._settings, self._new_engine, self._book)
        logger.info(
            "Mooncake's Transfer Engine: %s over %s", self.get_session_id(), self._settings.protocol
        )

    # -- what it is ------------------------------------------------------------------------------

    def get_session_id(self) -> str:
        """`HOST:PORT`, by which peers address this process."""
        host = self._settings.hostname
        bracketed = f"[{host}]" if ":" in host else host
        return f"{bracketed}:{self._pool.home.raw.get_rpc_port()}"

    @property
    def protocol(self) -> str:
        """The transport in use, one of `SUPPORTED_PROTOCOLS`."""
        return self._settings.protocol

    def get_engine(self) -> RawEngine:
        """The engine object of Mooncake's that peers know. A call of it bypasses all checks."""
        return self._pool.home.raw

    def get_ib_device(self) -> str:
        """InfiniBand devices in use, comma separated; empty: the transport chooses."""
        return self._settings.ib_device

    @property
    def stays_on_host(self) -> bool:
        """Whether peers on other hosts are out of reach."""
        return self._settings.protocol == "nvlink_intra"

    def describe(self) -> dict[str, Any]:
        """The transport's settings and its current memory and peers, for the server info."""
        ranges = self._book.ranges()
        with self._lock:
            peers = list(self._peers.values())
        return {
            "session_id": self.get_session_id(),
            "protocol": self._settings.protocol,
            "requested_protocol": self._settings.requested,
            "is_fallback": self._settings.is_fallback,
            "ib_device": self._settings.ib_device,
            "registered_bytes": sum(length for _, length in ranges),
            "registered_ranges": len(ranges),
            "requests_in_flight": {peer.name: peer.budget.in_flight for peer in peers},
            "transfers_under_way": self._threads.num_busy,
            "engine_objects": self._pool.num_engines,
        }

    # -- memory ----------------------------------------------------------------------------------

    def register(self, ptr: int, length: int) -> None:
        """Let peers access `length` bytes at `ptr`, and transfers use them.

        The owner keeps the memory alive until `deregister`.

        Raises:
            ValueError: There are no such bytes.
            OverlappingRange: Some of them are registered already.
            RegistrationError: The transport refused.
        """
        self.batch_register([ptr], [length])

    def batch_register(self, ptrs: Sequence[int], lengths: Sequence[int]) -> int:
        """`register` for several ranges, all or none. Returns 0."""
        self._pool.register(ptrs, lengths)
        return 0

    def is_registered(self, ptr: int, length: int) -> bool:
        """Whether these bytes are within one registered range."""
        return self._book.holds(ptr, length)

    def deregister(self, ptr: int) -> None:
        """Undo `register`.

        Raises:
            UnknownRange: No registered range begins at `ptr`.
            RangeInUse: A transfer in flight may still access it.
        """
        self.batch_deregister([ptr])

    def batch_deregister(self, ptrs: Sequence[int]) -> int:
        """`deregister` for several ranges, all or none. Returns 0."""
        self._pool.unregister(ptrs)
        return 0

    # -- transfers -------------------------------------------------------------------------------

    def transfer(
        self, peer: str, op: TransferOp, blocks: Sequence[Block], *, timeout: float | None
    ) -> Transfer:
        """Move blocks to or from a peer, and wait for them as long as the caller likes.

        Args:
            peer: Its session id.
            op: The direction.
            blocks: The blocks to move; neighbours move together.
            timeout: Seconds. Then nothing more is sent, and what the transport has is in flight
                until it lets go (`Transfer.in_flight`, `Transfer.wait`); None: wait for that.

        Returns:
            The transfer, with an outcome a block. It is settled unless the time was up, or a batch
            failed that cannot be ended (see `Peer.retire`).

        Raises:
            PeerError: The peer is not there, or moves nothing. Nothing is in flight.
            UnknownRange: A local address is not registered; nothing was sent.
            ValueError: A block without bytes, or `peer` is no session id.
        """
        transfer = self.begin(peer, op, blocks, timeout=timeout)
        if not transfer.wait(timeout):
            transfer.abandon()
        if transfer.error is not None:
            raise transfer.error
        return transfer

    def begin(
        self, peer: str, op: TransferOp, blocks: Sequence[Block], *, timeout: float | None
    ) -> Transfer:
        """`transfer` without waiting: the transfer has its outcome and its error.

        Args:
            timeout: Seconds after which nothing more is sent; None: everything is.

        Raises:
            PeerStalled, UnknownRange, ValueError: As `transfer`; nothing was sent.
        """
        remote = self._peer(peer)
        remote.check_moving()
        ranges = self._book.pin(blocks)
        transfer = Transfer(blocks, on_settled=lambda: self._book.unpin(ranges))
        deadline = None if timeout is None else time.monotonic() + timeout
        requests = merge_blocks(blocks, ranges, self._settings.request_bytes)
        worker = TransferWorker(remote, op, transfer, requests, deadline)
        self._threads.submit(worker.run)
        return transfer

    def transfer_sync(
        self, session_id: str, buffer: int, peer_buffer_address: int, length: int
    ) -> int:
        """Write one block and wait until it has arrived. 0, or -1 where it has not.

        Raises:
            UnknownRange: The local address is not registered.
        """
        return self.batch_transfer_sync(session_id, [buffer], [peer_buffer_address], [length])

    def batch_transfer_sync(
        self,
        session_id: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
    ) -> int:
        """Write blocks and wait until nothing is in flight. 0, or -1 where not all have arrived.

        A peer that stops answering holds the caller up until the transport gives up; `transfer`
        takes a deadline and tells what is left.

        Raises:
            UnknownRange: A local address is not registered.
            ValueError: Lists of unlike lengths, or a block without bytes.
        """
        blocks = [
            Block(local, remote, length)
            for local, remote, length in zip(buffers, peer_buffer_addresses, lengths, strict=True)
        ]
        try:
            transfer = self.transfer(session_id, TransferOp.WRITE, blocks, timeout=_SYNC_TIMEOUT_S)
        except TransferError as error:
            logger.warning("%s", error)
            return -1
        transfer.wait()
        return 0 if transfer.is_done else -1

    def send_probe(self, peer_session_id: str) -> int:
        """0 where the peer accepts a connection within 1.5 s, else -1. A stopped one still does.

        Mooncake's own probe waits for an answer without bound and holds the interpreter meanwhile.
        """
        return 0 if self._peer(peer_session_id).is_listening() else -1

    def forget_peer(self, session_id: str) -> None:
        """Give up the connection to a peer that is gone. Idempotent."""
        with self._lock:
            peer = self._peers.pop(session_id, None)
        if peer is not None:
            peer.close()

    def close(self) -> None:
        """End the engine, a second for each engine object. Calls under way end by themselves.

        Idempotent. Nothing but `close` may be called afterwards.
        """
        with self._lock:
            was_closed, self._closed = self._closed, True
            peers, self._peers = list(self._peers.values()), {}
        if was_closed:
            return
        self._threads.close()
        for peer in peers:
            peer.close()
        self._pool.close()

    def _peer(self, session_id: str) -> Peer:
        parse_session_id(session_id)
        with self._lock:
            if self._closed:
                raise RuntimeError("the Transfer Engine of this process was closed")
            if session_id not in self._peers:
                self._peers[session_id] = Peer(session_id, self._pool)
            return self._peers[session_id]


_engine: MooncakeTransferEngine | None = None
_engine_arguments: tuple[str, int | None, str | None] | None = None
_engine_lock = threading.Lock()


def init_mooncake_transfer_engine(
    hostname: str, gpu_id: int | None = None, ib_device: str | None = None
) -> MooncakeTransferEngine:
    """The engine of this process, started by the first call; see `MooncakeTransferEngine`.

    Raises:
        ValueError: Also where it runs already with other arguments.
    """
    global _engine, _engine_arguments
    arguments = (hostname, gpu_id, ib_device)
    with _engine_lock:
        if _engine is None:
            _engine = MooncakeTransferEngine(*arguments)
            _engine_arguments = arguments
        elif _engine_arguments != arguments:
            raise ValueError(
                f"this process has a Transfer Engine for {_engine_arguments}; it cannot have a "
                f"second one for {arguments}"
            )
        return _engine


def get_mooncake_transfer_engine() -> MooncakeTransferEngine | None:
    """The engine of this process; None before `init_mooncake_transfer_engine`."""
    return _engine
