"""One peer in this process: its connection, its budget, its calls in progress, and the workers that
move its transfers."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final
from weakref import WeakSet

from sglang.srt.distributed.device_communicators.engine_pool import EnginePool, PooledEngine
from sglang.srt.distributed.device_communicators.transfer_types import (
    LEAST_RATE,
    Batch,
    BatchFailed,
    BlockOutcome,
    PeerError,
    PeerStalled,
    PeerUnreachable,
    Request,
    SliceBudget,
    Transfer,
    TransferError,
    TransferOp,
    cut_batches,
    one_by_one,
    split_merged,
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
    def __init__(self, code: int, seconds: float, num_requests: int) -> None:
        super().__init__(f"code {code} after {seconds:.0f} s")
        self.seconds = seconds
        self.num_requests = num_requests
        self.is_stall = seconds >= _stall_seconds()
        """True if the call took as long as the transport waits for progress of the peer. A call
        that moves bytes may take as long and fail for another reason; see `Peer.why_failed`."""
        self.may_go_on = num_requests > 1 or self.is_stall


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
        self._gone: WeakSet[PooledEngine] = WeakSet()
        """Engines that have ended, or were lent to another peer since then."""
        self._leaving: dict[PooledEngine, Callable[[], None]] = {}
        """Run after an engine's last call: ends the engine, or returns it to the pool."""
        self._connecting = threading.Lock()
        self._calls: dict[object, tuple[PooledEngine, float, int]] = {}
        """Engine, start time and number of bytes of each library call in progress."""
        self._succeeded = 0.0
        self._is_forgotten = False
        self._lock = threading.Lock()

    def check_moving(self) -> None:
        """Raise PeerStalled if a call to this peer hangs, because another one would hang too."""
        with self._lock:
            now = time.monotonic()
            calls = list(self._calls.values())
        if not calls:
            return
        began = min(started for _, started, _ in calls)
        # Mooncake itself ends a call after a timeout.
        moving_s = min(
            sum(num_bytes for *_, num_bytes in calls) / LEAST_RATE, envs.MC_TRANSFER_TIMEOUT.get()
        )
        seconds = now - max(began, self._succeeded)
        if seconds > STALLED_AFTER_S + moving_s:
            raise PeerStalled(self.name, f"has not answered a call for {seconds:.0f} s")

    def connect(self, deadline: float | None) -> PooledEngine | None:
        """The engine object with an open connection; None: another thread's attempt lasts beyond
        `deadline`. The caller's own attempt blocks until the peer answers. Raises PeerUnreachable
        if no process accepts connections at its address, or the peer was forgotten."""
        timeout = -1.0 if deadline is None else max(0.0, deadline - time.monotonic())
        if not self._connecting.acquire(timeout=timeout):  # -1: no limit
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
            if code := engine.move(op, self.name, requests):
                failure = CallFailed(code, time.monotonic() - started, len(requests))
                if failure.may_go_on:
                    self._mark_retired(engine)
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
            self._leaving[engine] = lambda: self._pool.put_back(engine, spoiled_for=self.name)
        self._let_go(engine)

    def _mark_retired(self, engine: PooledEngine) -> None:
        if engine.is_home:
            self._pool.put_back(engine, spoiled_for=self.name)
        with self._lock:
            was_used = self._engine is engine
            if was_used:
                self._engine = None
            if engine.is_home:
                # The budget no longer has the engine's requests, so no call may follow.
                self._gone.add(engine)
            elif engine not in self._gone:
                self._leaving[engine] = lambda: self._pool.discard(engine)
        if was_used:
            logger.warning("the connection to peer %s is closed after a failed call", self.name)

    def _let_go(self, engine: PooledEngine) -> None:
        """End an engine or give it back after its last call, if it is to leave."""
        with self._lock:
            if any(used is engine for used, *_ in self._calls.values()):
                return
            leave = self._leaving.pop(engine, None)
            if leave is not None:
                self._gone.add(engine)
        if leave is not None:
            leave()

    @contextmanager
    def _calling(self, engine: PooledEngine, num_bytes: int = 0) -> Iterator[float]:
        token, started = object(), time.monotonic()
        with self._lock:
            if engine in self._gone:
                raise ConnectionGone
            self._calls[token] = engine, started, num_bytes
        try:
            yield started
        finally:
            with self._lock:
                del self._calls[token]
            self._let_go(engine)


OnFailure = Callable[[PooledEngine, Batch, CallFailed], bool]
"""Handles a failed call. Returns False if there was not enough time for all of its requests."""


@dataclass(slots=True, eq=False)
class TransferWorker:
    """Moves one transfer's requests to or from one peer, and records an outcome for each block.

    A call of the transport has one code for all its requests, and returns at the first failure.
    After an error, the worker first ends the requests that the call left in flight. Then it makes a
    new connection (the old one may be broken, or lead to a dead process) and sends the requests one
    by one, to find the ones that fail.
    """

    _peer: Peer
    _op: TransferOp
    _transfer: Transfer
    _requests: Sequence[Request]
    """Requests for all blocks of the transfer."""
    _deadline: float | None
    """`time.monotonic()` seconds after which no request is begun; None: no deadline."""
    _batch_bytes: int
    _has_left: bool = False
    """True if blocks stay in flight for good."""

    def run(self) -> None:
        """Move all requests that can begin in time. Never raises: errors go to the transfer."""
        error: Exception | None = None
        try:
            for batch in cut_batches(self._requests, most_bytes=self._batch_bytes):
                if not self._move(batch):
                    break
        except TransferError as known:
            error = known
        except Exception as unknown:
            logger.exception("a transfer with peer %s failed", self._peer.name)
            error = TransferError(f"{type(unknown).__name__}: {unknown}")
        if not self._has_left:
            self._transfer.settle(error)
            return
        assert error is not None, "a failure left them"
        logger.error(
            "%s; %d blocks stay in flight with peer %s until this process ends",
            error,
            len(self._transfer.in_flight),
            self._peer.name,
        )
        self._transfer.leave(error)

    def _move(self, batch: Batch) -> bool:
        """Move one batch. False: there was not enough time to begin it."""
        num_slices = len(batch.requests)
        # Connect first, to hold no budget while waiting for a peer's first answer.
        if self._peer.connect(self._deadline) is None:
            return False
        if not self._peer.budget.acquire(num_slices, self._deadline):
            return False
        try:
            return self._call(batch, self._split_batch)
        finally:
            self._peer.budget.release(num_slices)

    def _call(self, batch: Batch, on_failure: OnFailure) -> bool:
        engine = self._peer.connect(self._deadline)
        if engine is None:
            return False
        if not self._transfer.begin(batch.first, batch.last, self._deadline):
            return False
        try:
            self._peer.call(engine, self._op, batch.requests)
        except ConnectionGone:
            self._end(batch, BlockOutcome.NOT_SENT)
            return self._call(batch, on_failure)
        except CallFailed as failure:
            return on_failure(engine, batch, failure)
        self._end(batch, BlockOutcome.DONE)
        return True

    def _split_batch(self, engine: PooledEngine, batch: Batch, failure: CallFailed) -> bool:
        self._retire(engine, batch, failure)
        return all(self._call(single, self._split_request) for single in one_by_one(batch))

    def _split_request(self, engine: PooledEngine, single: Batch, failure: CallFailed) -> bool:
        """Repeat a refused request block by block, if it has several blocks."""
        if failure.is_stall or not self._peer.is_listening():
            self._retire(engine, single, failure)
        blocks = split_merged(single, self._transfer.blocks)
        self._end(single, BlockOutcome.NOT_SENT if blocks else BlockOutcome.FAILED)
        return all(self._call(block, self._split_request) for block in blocks)

    def _retire(self, engine: PooledEngine, batch: Batch, failure: CallFailed) -> None:
        """End the requests that a failed batch left in flight. Raises PeerError if the peer caused
        the failure, or if they cannot be ended."""
        has_ended = self._peer.retire(engine, failure)
        if has_ended:
            self._end(batch, BlockOutcome.NOT_SENT)
        self._has_left |= not has_ended
        error = self._peer.why_failed(engine, failure)
        if error is None and not has_ended:
            error = BatchFailed(
                self._peer.name,
                f"failed a batch of {failure.num_requests} requests ({failure}): it refuses an "
                "address, or broke the connection",
            )
        if error is not None:
            raise error

    def _end(self, batch: Batch, outcome: BlockOutcome) -> None:
        self._transfer.end(batch.first, batch.last, outcome)
        if outcome is BlockOutcome.DONE and not batch.is_last_whole:
            self._transfer.end(batch.last, batch.last, BlockOutcome.NOT_SENT)


def _stall_seconds() -> float:
    """Seconds without progress after which the transport ends a call."""
    return float(min(envs.MC_TCP_PROGRESS_TIMEOUT_SEC.get(), envs.MC_TCP_STATUS_TIMEOUT_SEC.get()))


def parse_session_id(session_id: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT`. Raises ValueError for anything else."""
    host, _, port = session_id.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{session_id!r} is no session id; it is HOST:PORT, see get_session_id")
    return host.strip("[]"), int(port)
