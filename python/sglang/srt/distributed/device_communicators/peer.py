"""State of one peer in this process: its connection, its budget, and its calls in progress."""

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
from sglang.srt.distributed.device_communicators.transfer_plan import LEAST_RATE, Request
from sglang.srt.distributed.device_communicators.transfer_types import (
    PeerError,
    PeerStalled,
    PeerUnreachable,
    TransferOp,
)
from sglang.srt.environ import envs
from sglang.srt.utils.background_call import BackgroundCall
from sglang.srt.utils.network import can_connect

logger = logging.getLogger(__name__)

STALLED_AFTER_S: Final = 20.0
"""Seconds without a successful call, while calls are in progress, after which no further call
begins; plus the time that the calls' bytes take at `LEAST_RATE`."""
_CONNECT_S: Final = 1.5
"""Seconds for a connection attempt. TCP repeats a lost packet after one second."""
_ANSWER_S: Final = 2.0
"""Seconds for an answer to a first contact that only tests if the peer runs."""


class CallFailed(Exception):
    """Mooncake's call returned an error."""

    def __init__(self, code: int, seconds: float, num_requests: int) -> None:
        super().__init__(f"code {code} after {seconds:.0f} s")
        self.seconds = seconds
        self.num_requests = num_requests
        self.is_stall = seconds >= _stall_seconds()
        """True if the call took as long as the transport waits for progress of the peer. A call
        that moves bytes may take as long and fail for another reason; see `Peer.why_failed`."""
        self.may_go_on = num_requests > 1 or self.is_stall
        """True if requests of the call may still move bytes."""


class ConnectionGone(Exception):
    """The connection was closed before the call began."""


class Peer:
    """One peer, by its session id. Worker threads call it; calls to one peer do not block calls to
    others."""

    def __init__(self, name: str, pool: EnginePool) -> None:
        self.name = name
        self.budget = SliceBudget()
        """Budget of the requests in flight to the peer, shared by all users in this process. It
        does not count requests that a failed call left in the shared engine, because no further
        call to this peer goes through that engine."""
        self._address = parse_session_id(name)
        self._pool = pool
        self._engine: PooledEngine | None = None
        """The connected engine. A new connection replaces it; calls keep the engine with which they
        began."""
        self._num_calls: Counter[PooledEngine] = Counter()
        self._gone: WeakSet[PooledEngine] = WeakSet()
        """Engines that have ended, or were lent to another peer since then."""
        self._retired: set[PooledEngine] = set()
        """Engines to end after their last call."""
        self._shelved: set[PooledEngine] = set()
        """Engines to give back to the pool after their last call."""
        self._connecting = threading.Lock()
        self._calls: dict[object, tuple[float, int]] = {}
        """Start time and number of bytes of each library call in progress."""
        self._succeeded = 0.0
        """Time of the last successful call."""
        self._is_forgotten = False
        self._lock = threading.Lock()

    def check_moving(self) -> None:
        """Raise PeerStalled if a call to this peer hangs, because another one would hang too."""
        seconds, limit = self._seconds_without_success()
        if seconds > limit:
            raise PeerStalled(self.name, f"has not answered a call for {seconds:.0f} s")

    def connect(self, deadline: float | None) -> PooledEngine | None:
        """The engine object with an open connection; None: another thread's attempt lasts beyond
        `deadline`. The caller's own attempt blocks until the peer answers.

        Raises:
            PeerUnreachable: No process accepts connections at its address, or the peer was
                forgotten.
        """
        if not self._connecting.acquire(timeout=_seconds_until(deadline)):
            return None
        try:
            if self._engine is not None:
                return self._engine
            engine = self._connect()
            with self._lock:
                if not self._is_forgotten:
                    if engine not in self._gone:
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
        try:
            with self._calling(engine):
                # An empty transfer, which only opens the connection.
                code = engine.move(TransferOp.READ, self.name, [])
        except ConnectionGone:  # a failed call has just closed the shared engine's connection
            return self._connect()
        if code:
            self._pool.put_back(engine, spoiled_for=self.name)
            raise PeerUnreachable(self.name, f"ended its first contact (code {code})")
        return engine

    def is_listening(self) -> bool:
        """True if the peer accepts connections. A stopped peer does so for a while."""
        return can_connect(*self._address, timeout=_CONNECT_S)

    def call(self, engine: PooledEngine, op: TransferOp, requests: Sequence[Request]) -> None:
        """Move one batch over the connection of `engine`. Returns when all of it has arrived.

        Raises:
            CallFailed: Not all of it has arrived. If there was more than one request, or the call
                stalled, requests may still move bytes, now or when the peer continues; see
                `retire`.
            ConnectionGone: The connection was closed in the meantime; no bytes were sent.
        """
        with self._calling(engine, sum(one.length for one in requests)) as started:
            code = engine.move(op, self.name, requests)
            failure = CallFailed(code, time.monotonic() - started, len(requests))
            if code and failure.may_go_on:
                self._mark_retired(engine)
        if code:
            raise failure
        self._succeeded = time.monotonic()

    def why_failed(self, engine: PooledEngine, failure: CallFailed) -> PeerError | None:
        """Error of a call that failed because of the peer; None: the peer runs, but refused a
        request or broke the connection. Call `retire` first. Blocks for up to four seconds."""
        if not self.is_listening():
            return PeerUnreachable(self.name, "ended during a transfer")
        if not failure.is_stall:
            return None
        # Requests over the shared engine are not repeated, so a contact would be of no use.
        if failure.num_requests > 1 and not engine.is_home and self._answers():
            return None
        return PeerStalled(self.name, f"moved nothing for {failure.seconds:.0f} s")

    def _answers(self) -> bool:
        """True if the peer soon answers a first contact. A stopped peer accepts connections but
        does not answer."""
        deadline = time.monotonic() + _ANSWER_S
        contact = BackgroundCall(
            "mooncake-contact", lambda: self.connect(deadline), expected=(PeerError,)
        )
        has_ended = contact.wait(_ANSWER_S + 1.0)
        return has_ended and contact.error is None and contact.result is not None

    def retire(self, engine: PooledEngine, failure: CallFailed) -> bool:
        """Close the connection after a failed call, and return once no request of that call
        accesses memory. False: some may do so forever, because the engine object is shared by all
        peers, and cannot be ended.

        Mooncake returns at the first request that fails. Later requests stay in the connections'
        queues, and move when the peer takes them. They end with their engine object, which ends
        after its other calls; one of these may hang as long as the peer does.
        """
        self._mark_retired(engine)
        if engine.is_home:
            return not failure.may_go_on
        self._let_go(engine)
        if failure.may_go_on:
            engine.ended.wait()
        return True

    def close(self) -> None:
        """Close the connection for good. Calls in progress keep it until they return."""
        with self._lock:
            self._is_forgotten = True
            engine, self._engine = self._engine, None
            if engine is None:
                return
            self._shelved.add(engine)
        self._let_go(engine)

    def _mark_retired(self, engine: PooledEngine) -> None:
        if engine.is_home:
            self._pool.put_back(engine, spoiled_for=self.name)
        with self._lock:
            was_used = self._engine is engine
            if was_used:
                self._engine = None
            if engine.is_home:
                # Its requests are no longer in the budget, so no call may follow.
                self._gone.add(engine)
            elif engine not in self._gone:
                self._shelved.discard(engine)
                self._retired.add(engine)
        if was_used:
            logger.warning("the connection to peer %s is closed after a failed call", self.name)

    def _let_go(self, engine: PooledEngine) -> None:
        """After the last call, end a retired engine, or give a shelved one back to the pool."""
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
    def _calling(self, engine: PooledEngine, num_bytes: int = 0) -> Iterator[float]:
        token, started = object(), time.monotonic()
        with self._lock:
            if engine in self._gone:
                raise ConnectionGone
            self._calls[token] = started, num_bytes
            self._num_calls[engine] += 1
        try:
            yield started
        finally:
            with self._lock:
                del self._calls[token]
                self._num_calls[engine] -= 1
            self._let_go(engine)

    def _seconds_without_success(self) -> tuple[float, float]:
        """Seconds since the last successful call, or since the start of the first call in progress
        if that is later; and the limit for a peer that makes progress."""
        with self._lock:
            now = time.monotonic()
            calls = list(self._calls.values())
        began = min((started for started, _ in calls), default=now)
        # Mooncake itself ends a call after a timeout.
        moving_s = min(
            sum(num_bytes for _, num_bytes in calls) / LEAST_RATE, envs.MC_TRANSFER_TIMEOUT.get()
        )
        return now - max(began, self._succeeded), STALLED_AFTER_S + moving_s


def _seconds_until(deadline: float | None) -> float:
    """Timeout for `Lock.acquire`, in seconds; -1: no limit."""
    return -1 if deadline is None else max(0.0, deadline - time.monotonic())


def _stall_seconds() -> float:
    """Seconds without progress after which the transport ends a call."""
    return float(min(envs.MC_TCP_PROGRESS_TIMEOUT_SEC.get(), envs.MC_TCP_STATUS_TIMEOUT_SEC.get()))


def parse_session_id(session_id: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT`. Raises ValueError for anything else."""
    host, _, port = session_id.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{session_id!r} is no session id; it is HOST:PORT, see get_session_id")
    return host.strip("[]"), int(port)
