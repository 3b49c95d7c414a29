"""State of one peer in this process: its connection, its budget, and the calls under way."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final
from weakref import WeakSet

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

STALLED_AFTER_S: Final = 20.0
"""Calls under way for so long, of which none succeeds, keep others from beginning."""
_CONNECT_S: Final = 1.5
"""TCP repeats a lost packet after one second."""


class CallFailed(Exception):
    """Mooncake's call returned an error."""

    def __init__(self, code: int, seconds: float, num_requests: int) -> None:
        super().__init__(f"code {code} after {seconds:.0f} s")
        self.seconds = seconds
        self.is_stall = seconds >= _stall_seconds()
        """It took as long as the transport waits for a sign of the peer."""
        self.may_go_on = num_requests > 1 or self.is_stall
        """Requests of it may still move."""


class ConnectionGone(Exception):
    """The connection was given up before the call began."""


class TransfersLeft(Exception):
    """Transfers that a failed call left under way cannot be ended without ending the shared
    engine."""


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
        self._num_calls: Counter[PooledEngine] = Counter()
        self._gone: WeakSet[PooledEngine] = WeakSet()
        """Engines that have ended, or belong to another peer by now."""
        self._retired: set[PooledEngine] = set()
        """Engines to be ended after their last call."""
        self._shelved: set[PooledEngine] = set()
        """Engines to go back to the pool after their last call."""
        self._connecting = threading.Lock()
        self._calls: dict[object, float] = {}
        """Calls of the library under way, and when each began."""
        self._succeeded = 0.0
        """When the last call did."""
        self._is_forgotten = False
        self._lock = threading.Lock()

    def check_moving(self) -> None:
        """Raise PeerStalled where a call to this peer hangs: another would only hang too."""
        seconds = self._seconds_without_success()
        if seconds > STALLED_AFTER_S:
            raise PeerStalled(self.name, f"has not answered a call for {seconds:.0f} s")

    def connect(self, deadline: float | None) -> PooledEngine | None:
        """The engine object with an open connection; None where another thread's attempt lasts
        beyond `deadline`. An attempt of one's own blocks for as long as the peer does not answer.

        Raises:
            PeerUnreachable: Nothing accepts connections at its address, or it was forgotten.
        """
        if not self._connecting.acquire(timeout=_seconds_until(deadline)):
            return None
        try:
            if self._engine is not None:
                return self._engine
            engine = self._connect()
            with self._lock:
                if not self._is_forgotten:
                    self._engine = engine
                    return engine
            self._pool.put_back(engine, spoiled_for=self.name)
            raise PeerUnreachable(self.name, "was forgotten by this process")
        finally:
            self._connecting.release()

    def _connect(self) -> PooledEngine:
        if not self.is_listening():
            raise PeerUnreachable(self.name, "accepts no connection: it is not running")
        engine = self._pool.take(self.name)
        with self._calling(engine):
            # Nothing to move: only what comes before the first transfer.
            code = engine.move(TransferOp.READ, self.name, [])
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
            CallFailed: Not all has. Where it was more than one request, or nothing moved for long,
                the others may go on, now or when the peer does: see `retire`.
            ConnectionGone: The connection was given up meanwhile; nothing was sent.
        """
        with self._calling(engine) as started:
            code = engine.move(op, self.name, requests)
            failure = CallFailed(code, time.monotonic() - started, len(requests))
            if code and failure.may_go_on:
                self._mark_retired(engine)
        if code:
            raise failure
        self._succeeded = time.monotonic()

    def retire(self, engine: PooledEngine, failure: CallFailed) -> None:
        """Use this connection no more; return once nothing of the failed call touches memory.

        Mooncake returns at the first request that fails; those behind it in the connections'
        queues stay there, and move as soon as the peer takes them. They end with their engine
        object, after its other calls: one of these may hang for as long as the peer does.

        Raises:
            TransfersLeft: All peers share the engine object, which therefore cannot be ended.
        """
        if engine.is_home:
            self._mark_retired(engine)
            self._pool.put_back(engine, spoiled_for=self.name)
            if failure.may_go_on:
                raise TransfersLeft
            return
        self._mark_retired(engine)
        self._let_go(engine)
        if failure.may_go_on:
            engine.ended.wait()

    def close(self) -> None:
        """Give the connection up for good; calls under way keep it until they return."""
        with self._lock:
            self._is_forgotten = True
            engine, self._engine = self._engine, None
            if engine is None:
                return
            self._shelved.add(engine)
        self._let_go(engine)

    def _mark_retired(self, engine: PooledEngine) -> None:
        with self._lock:
            was_used = self._engine is engine
            if was_used:
                self._engine = None
            if not engine.is_home and engine not in self._gone:
                self._shelved.discard(engine)
                self._retired.add(engine)
        if was_used:
            logger.warning("the connection to peer %s is given up", self.name)

    def _let_go(self, engine: PooledEngine) -> None:
        """After the last call: end it, or let other peers have it."""
        with self._lock:
            if self._num_calls[engine]:
                return
            is_retired, is_shelved = engine in self._retired, engine in self._shelved
            if is_retired or is_shelved:
                self._gone.add(engine)
                del self._num_calls[engine]
            self._retired.discard(engine)
            self._shelved.discard(engine)
        if is_retired:
            self._pool.discard(engine)
        elif is_shelved:
            self._pool.put_back(engine, spoiled_for=self.name)

    @contextmanager
    def _calling(self, engine: PooledEngine) -> Iterator[float]:
        token, started = object(), time.monotonic()
        with self._lock:
            if engine in self._gone:
                raise ConnectionGone
            self._calls[token] = started
            self._num_calls[engine] += 1
        try:
            yield started
        finally:
            with self._lock:
                del self._calls[token]
                self._num_calls[engine] -= 1
            self._let_go(engine)

    def _seconds_without_success(self) -> float:
        """Since the last call that succeeded, or the first one under way began."""
        with self._lock:
            now = time.monotonic()
            return now - max(min(self._calls.values(), default=now), self._succeeded)


def _seconds_until(deadline: float | None) -> float:
    """Timeout for `Lock.acquire`, in seconds: -1 waits without bound."""
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
