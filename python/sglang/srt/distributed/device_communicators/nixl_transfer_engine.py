"""NIXL as the engine of transfers: registered memory, peers and reads, behind checks.

An agent of this process is read by peers. Each peer is read through a further agent. NIXL cannot
end a read: `release` and `remove_remote_agent` return at once and without an error, while bytes
still arrive. Only the end of the agent ends its reads, and so the memory of a read that failed or
hangs is free again once its agent has ended.
"""

from __future__ import annotations

import atexit
import base64
import binascii
import contextlib
import logging
import re
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from sglang.srt.constants import MIB
from sglang.srt.distributed.device_communicators.engine_pool import KnownPeers, MemoryRegistry
from sglang.srt.distributed.device_communicators.nixl_library import (
    MakeAgent,
    NixlAgent,
    RemoteFailed,
    UnknownRemoteRange,
    export_ucx_settings,
    load_nixl,
)
from sglang.srt.distributed.device_communicators.transfer_types import (
    LEAST_RATE,
    Batch,
    Block,
    BlockOutcome,
    PeerError,
    PeerStalled,
    PeerUnreachable,
    RegistrationError,
    Request,
    Transfer,
    TransferError,
    TransferOp,
    cut_batches,
    merge_blocks,
)
from sglang.srt.utils.background_call import CallThreads
from sglang.srt.utils.logging_utils import RateLimitedLogger
from sglang.srt.utils.network import wait_until

logger = logging.getLogger(__name__)

BATCH_BYTES: Final = 64 * MIB
"""Most bytes of one read. A read over shared memory is one call, which cannot be abandoned."""
STALLED_AFTER_S: Final = 10.0
"""Seconds after which a read ends that has not come, plus those of its bytes at `LEAST_RATE`."""
_KIND: Final = "nixl"
_NAME: Final = re.compile(r"[\w.:%-]{1,255}#[0-9a-f]{32}", re.ASCII)
"""Names of agents: the host, and a random number. Logs and errors show those of peers."""
_MAX_ENCODED: Final = 4 * MIB
"""Most characters of a peer's metadata. 130 ranges have 8,200."""
_PROGRESS_S: Final = 0.005
"""Seconds between two chances for peers to connect; a connection takes a few."""
_CLOSE_S: Final = 5.0
"""Most seconds that `close` waits for transfers; they end with their next look at a read."""
_POLL_S: Final = (0.0002, 0.004)
"""Least and most seconds between two looks at a read."""


@dataclass(eq=False, slots=True)
class _Link:
    """The agent that reads from one peer."""

    agent: NixlAgent
    remote: str
    num_users: int = 0
    is_broken: bool = False
    has_read: bool = False
    """True if a read has come over this link."""
    ended: threading.Event = field(default_factory=threading.Event)


class NixlTransferEngine:
    """Registered memory, and reads from the memory of peers. Any thread may call all methods.

    Threads: one for each transfer in flight, named `nixl-transfer`; `nixl-progress`, in which peers
    connect; one of UCX for this process and for each peer. A peer that hangs delays only its own
    reads.

    Args:
        hostname: Address under which peers reach this process.
        ib_device: See `export_ucx_settings`.
        make_agent: Makes agents; None: the library's.

    Attributes:
        stays_on_host: True if peers on other hosts are out of reach.

    Raises:
        ValueError: The package or its plugin is missing, or a setting cannot work here.
        RuntimeError: UCX does not start.
    """

    def __init__(
        self, hostname: str, ib_device: str | None = None, *, make_agent: MakeAgent | None = None
    ) -> None:
        if make_agent is None:
            library = load_nixl()
            export_ucx_settings(hostname, ib_device)
            make_agent = _maker(library)
        self.stays_on_host = False
        self._make_agent = make_agent
        self._name = f"{hostname}#{uuid.uuid4().hex}"
        self._home = make_agent(self._name)
        self._registry = MemoryRegistry()
        self._peers = KnownPeers(lambda session_id: _Peer(self, *parse_session_id(session_id)))
        self._links: list[_Link] = []
        """All links whose agents have not ended."""
        self._num_links = 0
        self._threads = CallThreads("nixl-transfer")
        self._lock = threading.RLock()
        """Guards the links; held while memory is registered."""
        self._ends = threading.Event()
        self._progress = threading.Thread(target=self._make_progress, name="nixl-progress")
        self._progress.daemon = True
        self._progress.start()
        logger.info("NIXL: agent %s over UCX", self._name)

    # -- description -----------------------------------------------------------------------------

    def get_session_id(self) -> str:
        """The metadata of this process's agent, by which peers read the memory registered so
        far."""
        with self._lock:
            metadata = self._home.metadata()
        return f"{_KIND}:{self._name}:{base64.b64encode(metadata).decode()}"

    def describe(self) -> dict[str, Any]:
        """The transport's settings and its current memory and peers, for the server info."""
        ranges = self._registry.ranges()
        with self._lock:
            return {
                "session_id": self._name,
                "protocol": _KIND,
                "registered_bytes": sum(length for _, length in ranges),
                "registered_ranges": len(ranges),
                "transfers_under_way": self._threads.num_busy,
                "engine_objects": 1 + len(self._links),
            }

    # -- memory ----------------------------------------------------------------------------------

    def batch_register(self, ptrs: Sequence[int], lengths: Sequence[int]) -> int:
        """Register several ranges of CPU memory, all or none. Returns 0. Raises like
        `MemoryRegistry.add`, or RegistrationError if NIXL refuses."""
        with self._lock:
            self._registry.add(ptrs, lengths)
            done: list[NixlAgent] = []
            try:
                for agent in self._agents():
                    agent.register(dict(zip(ptrs, lengths, strict=True)))
                    done.append(agent)
            except RuntimeError as error:
                for agent in done:
                    for ptr in ptrs:
                        agent.unregister(ptr)
                self._registry.remove(ptrs)
                raise RegistrationError(str(error)) from error
        return 0

    def is_registered(self, ptr: int, length: int) -> bool:
        """True if these bytes are within one registered range."""
        return self._registry.holds(ptr, length)

    def batch_deregister(self, ptrs: Sequence[int]) -> int:
        """Deregister several ranges, all or none. Returns 0. Raises like
        `MemoryRegistry.remove`."""
        with self._lock:
            self._registry.remove(ptrs)
            for agent in self._agents():
                for ptr in ptrs:
                    agent.unregister(ptr)
        return 0

    def _agents(self) -> list[NixlAgent]:
        return [self._home, *(link.agent for link in self._links)]

    # -- transfers -------------------------------------------------------------------------------

    def begin(
        self, peer: str, op: TransferOp, blocks: Sequence[Block], *, timeout: float | None
    ) -> Transfer:
        """Begin to read from a peer without waiting; the result has its outcomes and its error.

        Args:
            peer: The peer's `get_session_id`.
            op: `READ`; no process writes to another's memory.
            timeout: Seconds after which no more bytes are asked for; None: no limit.

        Raises:
            UnknownRange: A local address is not registered; no bytes were asked for.
            ValueError: A block has no bytes, or `peer` is no session id of NIXL.
            TransferError: The system has no thread for it; no bytes were asked for.
        """
        assert op is TransferOp.READ, "no process writes to another's memory"
        remote = self._peers.of(peer)
        ranges = self._registry.pin(blocks)
        transfer = Transfer(blocks, on_settled=lambda: self._registry.unpin(ranges))
        deadline = None if timeout is None else time.monotonic() + timeout
        reader = _Reader(remote, transfer, merge_blocks(blocks, ranges), deadline)
        try:
            self._threads.submit(reader.run)
        except RuntimeError as error:
            failure = TransferError(f"no thread for the transfer: {error}")
            transfer.settle(failure)  # Unpins the ranges.
            raise failure from error
        return transfer

    def forget_peer(self, session_id: str) -> None:
        """Give up the connection to a peer that is gone. Idempotent."""
        self._peers.forget(session_id)

    def close(self) -> None:
        """End the engine, its transfers and its threads. Idempotent; only `close` may be called
        afterwards.

        It has to be called before the process ends: Python ends threads in the middle of a call of
        NIXL, and C++ then ends the process by SIGABRT.
        """
        if self._peers.close(self._threads):
            self._ends.set()
            with self._lock:
                for link in self._links:
                    link.is_broken = True
            self._progress.join()
            if not wait_until(lambda: not self._threads.num_busy, _CLOSE_S):
                logger.warning("%d transfers do not end", self._threads.num_busy)
            self._home.end()

    def _make_progress(self) -> None:
        log = RateLimitedLogger(logger)
        while not self._ends.wait(_PROGRESS_S):
            try:
                self._home.progress()
            except Exception as error:  # noqa: BLE001 - a peer's fault, logged at most every 10 s
                log.warning("progress", "a peer may have failed to connect: %r", error)

    # -- links, for peers ------------------------------------------------------------------------

    def open_link(self, metadata: bytes) -> _Link:
        """A new agent that is connected to a peer. Raises RemoteFailed, or RuntimeError if UCX does
        not start or refuses the memory."""
        with self._lock:
            if self._ends.is_set():
                raise RemoteFailed("this process shuts down")
            self._num_links += 1
            link = _Link(self._make_agent(f"{self._name}-{self._num_links}"), "")
            self._links.append(link)
            try:
                link.agent.register(dict(self._registry.ranges()))
            except RuntimeError:
                self.end_link(link)
                raise
        try:
            link.remote = link.agent.connect(metadata)
        except (RemoteFailed, UnknownRemoteRange) as error:
            self.end_link(link)
            raise RemoteFailed(str(error)) from error
        return link

    def end_link(self, link: _Link) -> None:
        """End a link that has no users."""
        with self._lock:
            self._links.remove(link)
            link.agent.end()
        link.ended.set()


class _Peer:
    """A peer, and the link to it. Threads of transfers call it."""

    def __init__(self, engine: NixlTransferEngine, name: str, metadata: bytes) -> None:
        self.name = name
        self._engine = engine
        self._metadata = metadata
        self._link: _Link | None = None
        self._is_forgotten = False
        self._connecting = threading.Lock()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def link(self) -> Iterator[_Link]:
        """Context manager: a link that lasts. If it broke, no byte is in flight afterwards. Raises
        PeerUnreachable."""
        link = self._take()
        try:
            yield link
        finally:
            with self._lock:
                link.num_users -= 1
                is_last = link is not self._link and not link.num_users
            if is_last:
                self._engine.end_link(link)
            elif link.is_broken:
                link.ended.wait()

    def _take(self) -> _Link:
        with self._connecting:
            with self._lock:
                if (link := self._link) is not None:
                    link.num_users += 1
                    return link
            try:
                link = self._engine.open_link(self._metadata)
            except RemoteFailed as error:
                raise PeerUnreachable(
                    self.name, f"cannot be connected to ({error}): it is not running"
                ) from error
            except RuntimeError as error:
                raise TransferError(str(error)) from error
            with self._lock:
                link.num_users = 1
                self._link = None if self._is_forgotten else link
                return link

    def break_link(self, link: _Link) -> None:
        """Use a link no more; its users leave it soon."""
        with self._lock:
            link.is_broken = True
            if self._link is link:
                self._link = None
                logger.warning("the connection to peer %s is closed after a failed read", self.name)

    def close(self) -> None:
        """Close the link for good. Reads in progress keep it until they end or fail."""
        with self._lock:
            self._is_forgotten = True
            link, self._link = self._link, None
            is_unused = link is not None and not link.num_users
        if is_unused:
            assert link is not None
            self._engine.end_link(link)


@dataclass(slots=True, eq=False)
class _Reader:
    """Reads one transfer's requests from one peer, and records an outcome for each block."""

    _peer: _Peer
    _transfer: Transfer
    _requests: Sequence[Request]
    _deadline: float | None

    def run(self) -> None:
        """Read all requests that can begin in time. Never raises: errors go to the transfer."""
        error: Exception | None = None
        try:
            for batch in cut_batches(self._requests, most_bytes=BATCH_BYTES):
                if not self._move(batch):
                    break
        except TransferError as known:
            error = known
        except Exception as unknown:
            logger.exception("a transfer with peer %s failed", self._peer.name)
            error = TransferError(f"{type(unknown).__name__}: {unknown}")
        self._transfer.settle(error)

    def _move(self, batch: Batch) -> bool:
        """Read one batch. False: there was not enough time to begin it."""
        with self._peer.link() as link:
            if not self._transfer.begin(batch.first, batch.last, self._deadline):
                return False
            try:
                self._read(link, batch)
            except UnknownRemoteRange as error:
                # Asking for each block alone would write a line of NIXL's for each into the log.
                raise PeerError(
                    self._peer.name, f"has not registered the addresses that it named ({error})"
                ) from error
            except RemoteFailed as error:
                self._peer.break_link(link)
                raise PeerUnreachable(self._peer.name, _why_failed(link, error)) from error
            link.has_read = True
            self._end(batch)
            return True

    def _read(self, link: _Link, batch: Batch) -> None:
        started = time.monotonic()
        number = link.agent.begin_read(link.remote, batch.requests)
        limit = STALLED_AFTER_S + sum(one.length for one in batch.requests) / LEAST_RATE
        pause, most = _POLL_S
        while not link.agent.is_read(number):
            if link.is_broken:
                raise RemoteFailed("another read has failed")
            if time.monotonic() - started > limit:
                self._peer.break_link(link)
                raise PeerStalled(self._peer.name, f"has not answered a read for {limit:.0f} s")
            time.sleep(pause)
            pause = min(2 * pause, most)

    def _end(self, batch: Batch) -> None:
        self._transfer.end(batch.first, batch.last, BlockOutcome.DONE)
        if not batch.is_last_whole:
            self._transfer.end(batch.last, batch.last, BlockOutcome.NOT_SENT)


def _maker(library: Any) -> MakeAgent:
    return lambda name: NixlAgent(library, name)


def _why_failed(link: _Link, error: RemoteFailed) -> str:
    if link.has_read:
        return f"ended during a transfer ({error})"
    return (
        f"ended during a transfer, or UCX cannot read its memory ({error}; the log has UCX's "
        "words): servers need RDMA between them, or have to run on one host as one user; "
        "UCX_PROTO_EMULATION_ENABLE=y reads over TCP, see docs/transports.md"
    )


def parse_session_id(session_id: str) -> tuple[str, bytes]:
    """Name and metadata of a peer's agent. Raises ValueError for anything else."""
    kind, _, rest = session_id.partition(":")
    name, _, encoded = rest.rpartition(":")
    metadata = b""
    if kind == _KIND and _NAME.fullmatch(name) and len(encoded) <= _MAX_ENCODED:
        with contextlib.suppress(binascii.Error):
            metadata = base64.b64decode(encoded.encode(), validate=True)
    if not metadata:
        raise ValueError(
            f"{session_id[:64]!r}, {len(session_id)} characters, is no session id of NIXL, see "
            "get_session_id"
        )
    return name, metadata


_engine: NixlTransferEngine | None = None


def init_nixl_transfer_engine(hostname: str, ib_device: str | None) -> NixlTransferEngine:
    """Start the engine of this process, once; it ends with the process. Raises like
    `NixlTransferEngine`."""
    global _engine
    assert _engine is None, "started already"
    _engine = NixlTransferEngine(hostname, ib_device)
    atexit.register(_engine.close)
    return _engine


def get_nixl_transfer_engine() -> NixlTransferEngine | None:
    """The engine of this process; None before `init_nixl_transfer_engine`."""
    return _engine
