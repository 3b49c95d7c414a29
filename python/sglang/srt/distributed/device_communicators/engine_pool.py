"""The Transfer Engine objects of a process: the one that peers know, and those that go to peers.

A peer that hangs while it is connected to blocks every transfer of the engine object that connects
to it, and one that broke a connection keeps it broken. Over TCP, where an object costs two threads
and two ports and registration costs nothing, each peer therefore gets one of its own. Over other
transports all share the process's, where devices and memory are registered, until a peer breaks it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from sglang.srt.distributed.device_communicators.engine_settings import EngineSettings
from sglang.srt.distributed.device_communicators.memory_book import MemoryBook
from sglang.srt.distributed.device_communicators.transfer_plan import Request
from sglang.srt.distributed.device_communicators.transfer_types import (
    RegistrationError,
    TransferOp,
)

logger = logging.getLogger(__name__)

_METADATA: Final = "P2PHANDSHAKE"
"""Engines ask each other; there is no metadata server."""
_MAX_IDLE: Final = 4
"""Engine objects without a peer that are kept. Ending one holds the interpreter for a second."""


class RawEngine(Protocol):
    """The part of `mooncake.engine.TransferEngine` that is used. Code 0 is success."""

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
    """One engine object, the peers that it must not be used for any more, and its end."""

    def __init__(self, raw: RawEngine, *, is_home: bool = False) -> None:
        self._raw: RawEngine | None = raw
        self.is_home = is_home
        self.spoiled: set[str] = set()
        self.ended = threading.Event()

    @property
    def raw(self) -> RawEngine:
        """Mooncake's object. Who keeps it keeps it from ending."""
        assert self._raw is not None, "ended"
        return self._raw

    def move(self, op: TransferOp, peer: str, requests: Sequence[Request]) -> int:
        """Move one batch and return Mooncake's code. Blocks; releases the interpreter."""
        raw = self.raw
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
        """End it, and with it all its transfers. No call may be under way.

        Holds the interpreter for up to a second, in which Mooncake's threads look up.
        """
        self._raw = None
        self.ended.set()


class EnginePool:
    """Makes engine objects, lends them to peers, keeps their registrations alike. Any thread."""

    def __init__(
        self, settings: EngineSettings, new_engine: Callable[[], RawEngine], book: MemoryBook
    ) -> None:
        """Start the process's own engine.

        Raises:
            RuntimeError: It does not start.
        """
        self._settings = settings
        self._new_engine = new_engine
        self._book = book
        self._lock = threading.Lock()
        """Held while memory is registered, not while an engine starts."""
        self.home = PooledEngine(self._start(), is_home=True)
        self._all = [self.home]
        self._idle: list[PooledEngine] = []
        self._closed = False

    @property
    def num_engines(self) -> int:
        """Engine objects that there are, lent or not."""
        return len(self._all)

    def take(self, peer: str) -> PooledEngine:
        """An engine object for connecting to `peer`.

        Raises:
            RuntimeError: A new one does not start.
            RegistrationError: It does not take this process's memory.
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
            known = self._book.ranges()
            _register(engine.raw, [ptr for ptr, _ in known], [length for _, length in known])
            self._all.append(engine)
        return engine

    def put_back(self, engine: PooledEngine, spoiled_for: str) -> None:
        """Give up an engine object for a peer; others may still get it. No call uses it."""
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
        """End an engine object that no call uses."""
        with self._lock:
            if engine in self._all:
                self._all.remove(engine)
        engine.end()

    def register(self, ptrs: Sequence[int], lengths: Sequence[int]) -> None:
        """Make memory known to every engine object, and enter it into the book: all or nothing.

        Raises:
            ValueError, OverlappingRange: See `MemoryBook.add`.
            RegistrationError: The transport refused.
        """
        with self._lock:
            self._book.add(ptrs, lengths)
            done: list[PooledEngine] = []
            try:
                for engine in self._all:
                    _register(engine.raw, ptrs, lengths)
                    done.append(engine)
            except RegistrationError:
                for engine in done:
                    _unregister(engine.raw, ptrs)
                self._book.remove(ptrs)
                raise

    def unregister(self, ptrs: Sequence[int]) -> None:
        """Undo `register`.

        Raises:
            UnknownRange, RangeInUse: See `MemoryBook.remove`; nothing has changed.
        """
        with self._lock:
            self._book.remove(ptrs)
            for engine in self._all:
                _unregister(engine.raw, ptrs)

    def close(self) -> None:
        """End all engine objects but those that calls use; these end with the calls."""
        with self._lock:
            self._closed = True
            ended = [self.home, *self._idle]
            self._all, self._idle = [], []
        for engine in ended:
            engine.end()

    def _start(self) -> RawEngine:
        settings = self._settings
        engine = self._new_engine()
        code = engine.initialize(
            settings.local_name, _METADATA, settings.protocol, settings.ib_device
        )
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
        # One by one: a batch stops at the first that is not known.
        engine.unregister_memory(ptr)
