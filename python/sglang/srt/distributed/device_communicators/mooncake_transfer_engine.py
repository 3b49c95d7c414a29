"""The Mooncake Transfer Engine of a process: the only place that moves memory between engines.

    init_mooncake_transfer_engine("10.0.0.1", gpu_id=0)      once, after the device is set
    engine = get_mooncake_transfer_engine()
    engine.batch_register(ptrs, lengths)
    transfer = engine.transfer(peer, TransferOp.WRITE, blocks, timeout=2.0)
    transfer.outcomes                                        one a block; see `Transfer`

No address outside the registered memory reaches the library, no peer gets more requests at once
than its transport can take, and no caller waits longer than its time limit.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Final

from sglang.srt.distributed.device_communicators.engine_pool import (
    EnginePool,
    KnownPeers,
    MemoryRegistry,
    RawEngine,
)
from sglang.srt.distributed.device_communicators.engine_settings import (
    EngineSettings,
    settle_engine,
)
from sglang.srt.distributed.device_communicators.mooncake_library import load_transfer_engine
from sglang.srt.distributed.device_communicators.mooncake_protocol import (
    get_ib_devices_for_gpu,
    list_rdma_devices,
    parse_ib_device_config,
    wheel_protocols,
)
from sglang.srt.distributed.device_communicators.peer import Peer, TransferWorker
from sglang.srt.distributed.device_communicators.transfer_types import (
    Block,
    Transfer,
    TransferError,
    TransferOp,
    merge_blocks,
)
from sglang.srt.distributed.device_context import require_device_set
from sglang.srt.environ import envs
from sglang.srt.utils.background_call import CallThreads

__all__ = [
    "MooncakeTransferEngine",
    "get_ib_devices_for_gpu",
    "get_mooncake_transfer_engine",
    "init_mooncake_transfer_engine",
    "parse_ib_device_config",
]

logger = logging.getLogger(__name__)

_SYNC_TIMEOUT_S: Final = 60.0
"""Time limit in seconds for callers without a deadline, after which no more bytes are sent."""


class MooncakeTransferEngine:
    """Registered memory, peers, and transfers between them. Any thread may call all methods.

    Threads: one for each transfer in flight, named `mooncake-transfer` (`CallThreads`); two of
    Mooncake for each engine object. A peer that hangs delays only the calls to that peer.
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
        """Start the engine.

        Args:
            hostname: Name or address under which peers reach this process.
            gpu_id: Index of this rank's device.
            ib_device: See `get_ib_devices_for_gpu`; None: the value of MOONCAKE_DEVICE.
            new_engine: Makes an engine object of Mooncake; None: the library's.
            supported: Protocols of such objects; None: those of the installed wheel.
            rdma_root: Directory in which sysfs lists InfiniBand devices.

        Raises:
            RuntimeError: No device is set in this process yet, or the engine does not start; names
                transport, address and remedy.
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
        device_name = get_ib_devices_for_gpu(config, gpu_id) or ""
        self._registry = MemoryRegistry()
        # Over NVLink Mooncake maps the peer's memory for the current device of the calling thread.
        # If that is not the pools' device, bytes go through host memory, at a tenth of the rate.
        self._threads = CallThreads("mooncake-transfer", lambda: _enter_thread(device))
        self._peers = KnownPeers(lambda session_id: Peer(session_id, self._pool))
        self._settings: EngineSettings
        self._pool: EnginePool
        self.initialize(hostname, device_name)

    def initialize(self, hostname: str, device_name: str) -> None:
        """Settle the protocol and start the engine; the constructor does it."""
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
        self.protocol = self._settings.protocol
        """The transport in use, one of `SUPPORTED_PROTOCOLS`."""
        self.stays_on_host = self._settings.stays_on_host
        """True if peers on other hosts are out of reach."""
        self._settings.export()
        self._pool = EnginePool(self._settings, self._new_engine, self._registry)
        logger.info(
            "Mooncake's Transfer Engine: %s over %s", self.get_session_id(), self._settings.protocol
        )

    # -- description -----------------------------------------------------------------------------

    def get_session_id(self) -> str:
        """`HOST:PORT`, by which peers address this process."""
        host = self._settings.hostname
        bracketed = f"[{host}]" if ":" in host else host
        return f"{bracketed}:{self._pool.home.raw.get_rpc_port()}"

    def get_engine(self) -> RawEngine:
        """Mooncake's engine object that peers know. Calls to it bypass all checks."""
        return self._pool.home.raw

    def get_ib_device(self) -> str:
        """InfiniBand devices in use, comma separated; empty: the transport chooses."""
        return self._settings.ib_device

    def describe(self) -> dict[str, Any]:
        """The transport's settings and its current memory and peers, for the server info."""
        ranges = self._registry.ranges()
        return {
            "session_id": self.get_session_id(),
            "protocol": self._settings.protocol,
            "requested_protocol": self._settings.requested,
            "is_fallback": self._settings.is_fallback,
            "ib_device": self._settings.ib_device,
            "registered_bytes": sum(length for _, length in ranges),
            "registered_ranges": len(ranges),
            "requests_in_flight": {peer.name: peer.budget.in_flight for peer in self._peers.all()},
            "transfers_under_way": self._threads.num_busy,
            "engine_objects": self._pool.num_engines,
        }

    # -- memory ----------------------------------------------------------------------------------

    def register(self, ptr: int, length: int) -> None:
        """Register `length` bytes at `ptr` for transfers and for access by peers.

        The owner keeps the memory alive until `deregister`.

        Raises:
            ValueError: The address or the length is not positive.
            OverlappingRange: Some of them are registered already.
            RegistrationError: The transport refused.
        """
        self.batch_register([ptr], [length])

    def batch_register(self, ptrs: Sequence[int], lengths: Sequence[int]) -> int:
        """Register several ranges, all or none. Returns 0."""
        self._pool.register(ptrs, lengths)
        return 0

    def is_registered(self, ptr: int, length: int) -> bool:
        """True if these bytes are within one registered range."""
        return self._registry.holds(ptr, length)

    def deregister(self, ptr: int) -> None:
        """Undo `register`; see `MemoryRegistry.remove`."""
        self.batch_deregister([ptr])

    def batch_deregister(self, ptrs: Sequence[int]) -> int:
        """Deregister several ranges, all or none. Returns 0."""
        self._pool.unregister(ptrs)
        return 0

    # -- transfers -------------------------------------------------------------------------------

    def transfer(
        self, peer: str, op: TransferOp, blocks: Sequence[Block], *, timeout: float | None
    ) -> Transfer:
        """Move blocks to or from a peer, and wait for them at most `timeout` seconds. The returned
        transfer is settled unless the time was up.

        Args:
            blocks: The blocks to move; neighbours move together.
            timeout: Seconds after which no more bytes are sent; blocks that the transport has stay
                in flight until it lets go of them (`Transfer.in_flight`, `Transfer.wait`). None:
                wait until it does.

        Raises:
            PeerError: The peer is unreachable, or moves no bytes. No block is in flight, unless a
                failed batch cannot be ended (see `Peer.retire`): its local memory then stays in use
                (`deregister` raises RangeInUse). `begin` gives a transfer that tells its blocks.
            UnknownRange: A local address is not registered; no bytes were sent.
            ValueError: A block has no bytes, or `peer` is no session id.
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
        """Begin a transfer without waiting for it; the result has its outcomes and its error.

        Args:
            timeout: Seconds after which no more bytes are sent; None: no limit.

        Raises:
            PeerStalled, UnknownRange, ValueError: `transfer` raises them; no bytes were sent.
            TransferError: The system has no thread for it; no bytes were sent.
        """
        remote = self._peers.of(peer)
        remote.check_moving()
        ranges = self._registry.pin(blocks)
        transfer = Transfer(blocks, on_settled=lambda: self._registry.unpin(ranges))
        deadline = None if timeout is None else time.monotonic() + timeout
        requests = merge_blocks(blocks, ranges, self._settings.request_bytes)
        worker = TransferWorker(
            remote, op, transfer, requests, deadline, self._settings.batch_bytes
        )
        try:
            self._threads.submit(worker.run)
        except RuntimeError as error:
            failure = TransferError(f"no thread for the transfer: {error}")
            transfer.settle(failure)  # Unpins the ranges: no read or write is in flight.
            raise failure from error
        return transfer

    def transfer_sync(
        self, session_id: str, buffer: int, peer_buffer_address: int, length: int
    ) -> int:
        """Write one block and wait until it has arrived. Returns 0, or -1 if it has not. Raises
        UnknownRange if the local address is not registered."""
        return self.batch_transfer_sync(session_id, [buffer], [peer_buffer_address], [length])

    def batch_transfer_sync(
        self,
        session_id: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
    ) -> int:
        """Write blocks and wait until none is in flight. Returns 0, or -1 if not all have arrived.

        A peer that stops answering blocks the caller until the transport gives up; `transfer` has a
        time limit and gives the outcome of each block.

        Raises:
            UnknownRange: A local address is not registered.
            ValueError: The lists differ in length, or a block has no bytes.
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
        """Return 0 if the peer accepts a connection within 1.5 s, else -1. A stopped peer still
        accepts.

        Mooncake's own probe waits for an answer without a limit, and holds the interpreter
        meanwhile.
        """
        return 0 if self._peers.of(peer_session_id).is_listening() else -1

    def forget_peer(self, session_id: str) -> None:
        """Give up the connection to a peer that is gone. Idempotent."""
        self._peers.forget(session_id)

    def close(self) -> None:
        """End the engine, which takes a second per engine object. Calls in progress end by
        themselves.

        Idempotent. Only `close` may be called afterwards.
        """
        if self._peers.close(self._threads):
            self._pool.close()


_engine: MooncakeTransferEngine | None = None
_engine_arguments: tuple[str, int | None, str | None] | None = None
_engine_lock = threading.Lock()


def _enter_thread(device: str) -> None:
    # Imported here, because it imports torch, which a process that only lends memory does not need.
    from sglang.srt.hardware_backend.device_runtime import device_runtime

    device_runtime(device).enter_thread()


def init_mooncake_transfer_engine(
    hostname: str, gpu_id: int | None = None, ib_device: str | None = None
) -> MooncakeTransferEngine:
    """The engine of this process, started by the first call; see `MooncakeTransferEngine`. Raises
    ValueError if a setting cannot work here, or the engine runs already with other arguments."""
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
