"""What this process keeps about one peer: its connection, its budget, and the calls under way."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from sglang.srt.distributed.device_communicators.engine_pool import EnginePool, PooledEngine
from sglang.srt.distributed.device_communicators.slice_budget import SliceBudget
from sglang.srt.distributed.device_communicators.transfer_plan import Request
from sglang.srt.distributed.device_communicators.transfer_types import (
    PeerStalled,
    PeerUnreachable,
    TransferOp,
)
from sglang.srt.environ import envs
from sglang.srt.utils.network import can_connect

logger = logging.getLogger(__name__)

STALLED_AFTER_S: Final = 5.0
"""A healthy call takes a second or so. One that takes this long keeps others from beginning."""
_CONNECT_S: Final = 1.5
"""TCP repeats a lost packet after one second."""


class CallFailed(Exception):
    """Mooncake's call returned an error soon: the connection, or a request of it, is bad."""


class TransfersLeft(Exception):
    """Mooncake's call gave up and left its transfers under way; they end with the process."""


class Peer:
    """One peer, by its session id. Its calls come from worker threads and block no other's."""

    def __init__(self, name: str, pool: EnginePool) -> None:
        self.name = name
        self.budget = SliceBudget()
        """Requests in flight to it, of all users in this process."""
        self._address = parse_session_id(name)
        self._pool = pool
        self._engine: PooledEngine | None = None
        """Connected. Replaced as a whole; calls keep the one that they began with."""
        self._dropped: set[PooledEngine] = set()
        """Given up with calls still under way."""
        self._connecting = threading.Lock()
        self._calls: dict[object, float] = {}
        """Calls of the library under way, and when each began."""
        self._lock = threading.Lock()

    def check_moving(self) -> None:
        """Raise PeerStalled where a call to this peer hangs: another would only hang too."""
        seconds = self._longest_call()
        if seconds > STALLED_AFTER_S:
            raise PeerStalled(self.name, f"has not answered a call for {seconds:.0f} s")

    def connect(self, deadline: float | None) -> PooledEngine | None:
        """The engine object with an open connection; None where another thread's attempt lasts
        beyond `deadline`. An attempt of one's own blocks for as long as the peer does not answer.

        Raises:
            PeerUnreachable: Nothing accepts connections at its address.
        """
        if not self._connecting.acquire(timeout=_seconds_until(deadline)):
            return None
        try:
            if self._engine is None:
                self._engine = self._connect()
            return self._engine
        finally:
            self._connecting.release()

    def _connect(self) -> PooledEngine:
        if not self.is_listening():
            raise PeerUnreachable(self.name, "accepts no connection: it is not running")
        engine = self._pool.take(self.name)
        with self._calling(engine):
            # Nothing to move: only what comes before the first transfer.
            code = engine.raw.batch_transfer_sync_read(self.name, [], [], [])
        if code:
            self._pool.put_back(engine, spoiled_for=self.name)
            raise PeerUnreachable(self.name, f"ended its first contact (code {code})")
        return engine

    def is_listening(self) -> bool:
        """Whether it accepts connections. One that is stopped does, for a while."""
        return can_connect(*self._address, timeout=_CONNECT_S)

    def call(self, engine: PooledEngine, op: TransferOp, requests: Sequence[Request]) -> None:
        """Move one batch, over the connection of `engine`. Returns when all of it has arrived.

        Raises:
            CallFailed: Not all has; nothing is in flight.
            PeerStalled: Nothing moved until the transport gave up; nothing is in flight.
            TransfersLeft: The requests are still in flight, and stay so.
        """
        move: Callable[[str, list[int], list[int], list[int]], int]
        raw = engine.raw
        move = (
            raw.batch_transfer_sync_write
            if op is TransferOp.WRITE
            else raw.batch_transfer_sync_read
        )
        with self._calling(engine) as started:
            code = move(
                self.name,
                [request.local for request in requests],
                [request.remote for request in requests],
                [request.length for request in requests],
            )
        if code == 0:
            return
        seconds = time.monotonic() - started
        num_bytes = sum(request.length for request in requests)
        if seconds >= envs.MC_TRANSFER_TIMEOUT.get() + num_bytes / 1e9:
            self.drop(engine)
            raise TransfersLeft(f"the call gave up after {seconds:.0f} s")
        if seconds >= _stall_seconds():
            self.drop(engine)
            raise PeerStalled(self.name, f"moved nothing for {seconds:.0f} s")
        raise CallFailed(f"code {code}")

    def drop(self, engine: PooledEngine) -> None:
        """Use this connection no more; the next call makes a new one. Idempotent.

        Other peers get the engine object once this one's calls have returned: a call that
        connects again by itself holds it up.
        """
        with self._lock:
            if self._engine is not engine:
                return
            self._engine = None
            is_free = engine.num_calls == 0
            if not is_free:
                self._dropped.add(engine)
        logger.warning("the connection to peer %s is given up", self.name)
        if is_free:
            self._pool.put_back(engine, spoiled_for=self.name)

    def close(self) -> None:
        """Give the connection up."""
        engine = self._engine
        if engine is not None:
            self.drop(engine)

    @contextmanager
    def _calling(self, engine: PooledEngine) -> Iterator[float]:
        token, started = object(), time.monotonic()
        with self._lock:
            self._calls[token] = started
            engine.num_calls += 1
        try:
            yield started
        finally:
            with self._lock:
                del self._calls[token]
                engine.num_calls -= 1
                was_dropped = engine.num_calls == 0 and engine in self._dropped
                if was_dropped:
                    self._dropped.remove(engine)
            if was_dropped:
                self._pool.put_back(engine, spoiled_for=self.name)

    def _longest_call(self) -> float:
        with self._lock:
            return time.monotonic() - min(self._calls.values(), default=time.monotonic())


def _seconds_until(deadline: float | None) -> float:
    """For `Lock.acquire`: -1 waits without bound."""
    return -1 if deadline is None else max(0.0, deadline - time.monotonic())


def _stall_seconds() -> float:
    """How long a call takes that the transport ends for want of progress."""
    return float(min(envs.MC_TCP_PROGRESS_TIMEOUT_SEC.get(), envs.MC_TCP_STATUS_TIMEOUT_SEC.get()))


def parse_session_id(session_id: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT`. Raises ValueError for anything else."""
    host, _, port = session_id.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{session_id!r} is no session id; it is HOST:PORT, see get_session_id")
    return host.strip("[]"), int(port)
