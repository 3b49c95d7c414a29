"""The Transfer Engine objects of a process: the one that peers know, and those that connect to
peers.

A peer that hangs during a connection attempt blocks all transfers of the engine object that
connects to it, and a connection that a peer broke stays broken. Over TCP an object costs two
threads and two ports, and registration is free, so each peer gets its own object. Over other
transports devices and memory are registered with the process's object, and all peers share it until
one breaks it.
"""

from __future__ import annotations

import bisect
import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

from sglang.srt.distributed.device_communicators.engine_settings import EngineSettings
from sglang.srt.distributed.device_communicators.mooncake_library import PEER_TO_PEER, listening_at
from sglang.srt.distributed.device_communicators.transfer_types import (
    Block,
    OverlappingRange,
    RangeInUse,
    RegistrationError,
    Request,
    TransferOp,
    UnknownRange,
)
from sglang.srt.utils.background_call import CallThreads

logger = logging.getLogger(__name__)

_MAX_IDLE: Final = 4
"""Most engine objects to keep without a peer. Ending one holds the GIL for a second."""
_START_TRIES: Final = 4
"""Most starts of an engine object. Mooncake chooses a free port before it binds it, and another
process may take it in between."""


@dataclass(slots=True, eq=False)
class MemoryRange:
    """Registered bytes `[start, end)`."""

    start: int
    end: int
    users: int = 0


class MemoryRegistry:
    """Registered ranges, disjoint and sorted by address. Any thread.

    Only their addresses may reach the transport: over TCP Mooncake accepts any address, and reads
    its memory or crashes.
    """

    def __init__(self) -> None:
        self._keep([])
        self._lock = threading.Lock()

    def ranges(self) -> list[tuple[int, int]]:
        """(address, bytes) of all registered ranges."""
        with self._lock:
            return [(known.start, known.end - known.start) for known in self._ranges]

    def add(self, ptrs: Sequence[int], lengths: Sequence[int]) -> None:
        """Add all ranges or none.

        Raises:
            ValueError: A length is below 1, an address is not positive, or the lists differ in
                length.
            OverlappingRange: Bytes are registered already, or occur twice.
        """
        if len(ptrs) != len(lengths):
            raise ValueError(f"{len(ptrs)} addresses with {len(lengths)} lengths")
        for ptr, length in zip(ptrs, lengths, strict=True):
            if length < 1 or ptr < 1:
                raise ValueError(f"cannot register {length} bytes at {ptr:#x}")
        new = [MemoryRange(ptr, ptr + length) for ptr, length in zip(ptrs, lengths, strict=True)]
        with self._lock:
            ranges = sorted([*self._ranges, *new], key=lambda one: one.start)
            for before, after in itertools.pairwise(ranges):
                if after.start < before.end:
                    raise OverlappingRange(
                        f"{after.end - after.start} bytes at {after.start:#x} overlap the "
                        f"registered range of {before.end - before.start} bytes at "
                        f"{before.start:#x}"
                    )
            self._keep(ranges)

    def remove(self, ptrs: Sequence[int]) -> None:
        """Remove all ranges or none.

        Raises:
            UnknownRange: No range begins at one of the addresses, or one occurs twice.
            RangeInUse: A transfer in flight may still access one.
        """
        with self._lock:
            if len(set(ptrs)) != len(ptrs):
                raise UnknownRange("a range occurs twice")
            for ptr in ptrs:
                known = self._at(ptr)
                if known is None or known.start != ptr:
                    raise UnknownRange(f"no registered range begins at {ptr:#x}")
                if known.users:
                    raise RangeInUse(
                        f"the range at {ptr:#x} is in use by {known.users} transfers; wait until "
                        "they are settled (Transfer.wait)"
                    )
            self._keep([known for known in self._ranges if known.start not in ptrs])

    def holds(self, ptr: int, length: int) -> bool:
        """True if these bytes are within one range."""
        with self._lock:
            known = self._at(ptr)
            return known is not None and ptr + length <= known.end

    def pin(self, blocks: Sequence[Block]) -> list[MemoryRange]:
        """Pin the range of each block until `unpin`, and return the ranges.

        Raises:
            UnknownRange: Not all bytes of a block are in one range; no range is pinned.
            ValueError: A block has no bytes, or a negative address at the peer.
        """
        with self._lock:
            ranges = []
            for index, block in enumerate(blocks):
                if block.length < 1 or block.remote < 0:
                    raise ValueError(
                        f"block {index}: {block.length} bytes at the peer's {block.remote}; a "
                        "block has at least one byte and no negative address"
                    )
                known = self._at(block.local)
                if known is None or block.local + block.length > known.end:
                    raise UnknownRange(
                        f"block {index}: {block.length} bytes at {block.local:#x} are not within "
                        "one registered range; register the memory first"
                    )
                ranges.append(known)
            for known in set(ranges):
                known.users += 1
            return ranges

    def unpin(self, ranges: Sequence[MemoryRange]) -> None:
        with self._lock:
            for known in set(ranges):
                known.users -= 1

    def _at(self, address: int) -> MemoryRange | None:
        index = bisect.bisect_right(self._starts, address) - 1
        if index < 0 or address >= self._ranges[index].end:
            return None
        return self._ranges[index]

    def _keep(self, ranges: list[MemoryRange]) -> None:
        self._ranges = ranges
        self._starts = [known.start for known in ranges]


class ClosablePeer(Protocol):
    """A connection to a peer."""

    def close(self) -> None: ...


P = TypeVar("P", bound=ClosablePeer)


class KnownPeers(Generic[P]):
    """The peers of an engine by session id, until it is closed. Any thread.

    Args:
        connect: Makes a peer of its session id; it connects later. Raises ValueError if it is no
            session id.
    """

    def __init__(self, connect: Callable[[str], P]) -> None:
        self._connect = connect
        self._peers: dict[str, P] = {}
        self._closed = False
        self._lock = threading.Lock()

    def of(self, session_id: str) -> P:
        """The peer, from now on known. Raises RuntimeError after `close`."""
        with self._lock:
            if self._closed:
                raise RuntimeError("the transfer engine of this process was closed")
            if session_id not in self._peers:
                self._peers[session_id] = self._connect(session_id)
            return self._peers[session_id]

    def all(self) -> list[P]:
        with self._lock:
            return list(self._peers.values())

    def forget(self, session_id: str) -> None:
        """Give up the connection to a peer that is gone. Idempotent."""
        with self._lock:
            peer = self._peers.pop(session_id, None)
        if peer is not None:
            peer.close()

    def close(self, threads: CallThreads) -> bool:
        """End the engine's threads of transfers, and all connections. False: that was done."""
        with self._lock:
            was_closed, self._closed = self._closed, True
            peers, self._peers = list(self._peers.values()), {}
        if was_closed:
            return False
        threads.close()
        for peer in peers:
            peer.close()
        return True


class RawEngine(Protocol):
    """The part of `mooncake.engine.TransferEngine` that is used here. Code 0 means success."""

    def initialize(self, local_name: str, metadata: str, protocol: str, device: str) -> int: ...
    def get_rpc_port(self) -> int: ...
    def batch_register_memory(self, ptrs: list[int], lengths: list[int]) -> int: ...
    def unregister_memory(self, ptr: int) -> int: ...
    def batch_transfer_sync_write(
        self, peer: str, buffers: list[int], peer_buffers: list[int], lengths: list[int]
    ) -> int: ...
    def batch_transfer_sync_read(
        self, peer: str, buffers: list[int], peer_buffers: list[int], lengths: list[int]
    ) -> int: ...


class PooledEngine:
    """One engine object, its end, and the peers for which it must not be used any more."""

    def __init__(self, raw: RawEngine, *, is_home: bool = False) -> None:
        self._raw: RawEngine | None = raw
        self.is_home = is_home
        self.spoiled: set[str] = set()
        self.ended = threading.Event()

    @property
    def raw(self) -> RawEngine:
        """Mooncake's object. It does not end while a reference to it exists."""
        assert self._raw is not None, "ended"
        return self._raw

    def move(self, op: TransferOp, peer: str, requests: Sequence[Request]) -> int:
        """Move one batch, and return Mooncake's code. Blocks; releases the GIL."""
        raw = self._raw
        assert raw is not None, "ended"
        call = (
            raw.batch_transfer_sync_write
            if op is TransferOp.WRITE
            else raw.batch_transfer_sync_read
        )
        return call(
            peer,
            [request.local for request in requests],
            [request.remote for request in requests],
            [request.length for request in requests],
        )

    def end(self) -> None:
        """End the object and all its transfers. No call may be in progress. Holds the GIL for up to
        a second, until Mooncake's threads notice."""
        self._raw = None
        self.ended.set()


class EnginePool:
    """Makes engine objects, lends them to peers, and keeps their registrations equal. Any
    thread."""

    def __init__(
        self,
        settings: EngineSettings,
        new_engine: Callable[[], RawEngine],
        registry: MemoryRegistry,
    ) -> None:
        """Start the process's own engine. Raises RuntimeError if the engine does not start."""
        self._settings = settings
        self._new_engine = new_engine
        self._registry = registry
        self._lock = threading.Lock()
        """Held while memory is registered, but not while an engine starts."""
        self.home = PooledEngine(self._start(), is_home=True)
        self._all = [self.home]
        self._idle: list[PooledEngine] = []
        self._closed = False

    @property
    def num_engines(self) -> int:
        return len(self._all)

    def take(self, peer: str) -> PooledEngine:
        """An engine object for a connection to `peer`.

        Raises:
            RuntimeError: A new object does not start.
            RegistrationError: It cannot register this process's memory.
        """
        with self._lock:
            if self._settings.protocol != "tcp" and peer not in self.home.spoiled:
                return self.home
            for engine in self._idle:
                if peer not in engine.spoiled:
                    self._idle.remove(engine)
                    return engine
        engine = PooledEngine(self._start())
        with self._lock:
            known = self._registry.ranges()
            _register(engine.raw, [ptr for ptr, _ in known], [length for _, length in known])
            self._all.append(engine)
        return engine

    def put_back(self, engine: PooledEngine, spoiled_for: str) -> None:
        """Take back an engine object, for other peers than `spoiled_for`. Calls may still use it
        only if it is the process's own object."""
        with self._lock:
            engine.spoiled.add(spoiled_for)
            if engine.is_home:
                return
            if self._closed:
                ended: PooledEngine | None = engine
            else:
                self._idle.append(engine)
                ended = self._idle.pop(0) if len(self._idle) > _MAX_IDLE else None
            if ended in self._all:
                self._all.remove(ended)
        if ended is not None:
            ended.end()

    def discard(self, engine: PooledEngine) -> None:
        """End an engine object. No call may use it."""
        with self._lock:
            if engine in self._all:
                self._all.remove(engine)
        engine.end()

    def register(self, ptrs: Sequence[int], lengths: Sequence[int]) -> None:
        """Register memory with all engine objects, and add it to the registry: all ranges or none.
        Raises like `MemoryRegistry.add`, or RegistrationError if the transport refuses."""
        with self._lock:
            self._registry.add(ptrs, lengths)
            done: list[PooledEngine] = []
            try:
                for engine in self._all:
                    _register(engine.raw, ptrs, lengths)
                    done.append(engine)
            except RegistrationError:
                for engine in done:
                    _unregister(engine.raw, ptrs)
                self._registry.remove(ptrs)
                raise

    def unregister(self, ptrs: Sequence[int]) -> None:
        """Undo `register`. Raises like `MemoryRegistry.remove`; then no range was removed."""
        with self._lock:
            self._registry.remove(ptrs)
            for engine in self._all:
                _unregister(engine.raw, ptrs)

    def close(self) -> None:
        """End all engine objects. Objects in use end with their calls."""
        with self._lock:
            self._closed = True
            ended = [self.home, *self._idle]
            self._all, self._idle = [], []
        for engine in ended:
            engine.end()

    def _start(self) -> RawEngine:
        settings = self._settings
        for left in reversed(range(_START_TRIES)):
            engine = self._new_engine()
            try:
                with listening_at(settings.hostname):
                    code = engine.initialize(
                        settings.local_name, PEER_TO_PEER, settings.protocol, settings.ib_device
                    )
                break
            except RuntimeError as error:
                if not left or "in use" not in str(error):
                    raise
        if code:
            raise RuntimeError(
                f"Mooncake's Transfer Engine does not start (code {code}) over "
                f"{settings.protocol} at {settings.local_name}, devices "
                f"{settings.ib_device or 'of its choice'}: check that the address is this host's "
                "and its ports 15000 to 17000 are not all taken (MC_MIN_RPC_PORT, "
                "MC_MAX_RPC_PORT), or set MOONCAKE_PROTOCOL to what this host has"
            )
        return engine


def _register(engine: RawEngine, ptrs: Sequence[int], lengths: Sequence[int]) -> None:
    if not ptrs:
        return
    code = engine.batch_register_memory(list(ptrs), list(lengths))
    if code:
        _unregister(engine, ptrs)
        raise RegistrationError(
            f"Mooncake refused to register {sum(lengths)} bytes in {len(ptrs)} ranges (code "
            f"{code}); over nvlink only device memory can be registered, and over rdma and efa "
            "`ulimit -l` must allow it"
        )


def _unregister(engine: RawEngine, ptrs: Sequence[int]) -> None:
    for ptr in ptrs:
        # One by one, because a batch stops at the first unknown range.
        engine.unregister_memory(ptr)
