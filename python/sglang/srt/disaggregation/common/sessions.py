"""Sessions of prefill servers' Transfer Engines, and the end of those whose servers are gone.

A connection to a peer costs an engine object: threads, ports, registered memory. A decode server
does not notice the end of a prefill server from which no prompt comes. Sessions without prompts are
therefore probed when a new one is entered, when a prompt has failed, and once a minute while
prompts come. A session is forgotten if its server accepts no control connection. The Transfer
Engine's own port says less: a stranger can silence it (`mooncake_library.py`), while its
connections go on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from sglang.srt.disaggregation.control.control_client import accepts_connections
from sglang.srt.distributed.device_communicators.transfer_types import Block, Transfer, TransferOp
from sglang.srt.utils.background_call import BackgroundCall

logger = logging.getLogger(__name__)

MAX_IDLE: Final = 64
"""Most sessions without prompts. Beyond that, those used longest ago are forgotten."""
PROBE_EVERY_S: Final = 60.0
"""Seconds after which a prompt makes all idle sessions be probed again."""


class Engine(Protocol):
    """The part of `MooncakeTransferEngine` that transfers of KV use. Any thread."""

    def batch_register(self, ptrs: Sequence[int], lengths: Sequence[int]) -> int: ...
    def is_registered(self, ptr: int, length: int) -> bool: ...
    def get_session_id(self) -> str: ...

    stays_on_host: bool

    def begin(
        self, peer: str, op: TransferOp, blocks: Sequence[Block], *, timeout: float | None
    ) -> Transfer: ...
    def forget_peer(self, session_id: str) -> None: ...


@dataclass(slots=True)
class _Session:
    instance_id: str
    endpoint: str
    """Endpoint of its server's control connections, `tcp://HOST:PORT`."""
    num_users: int = 0
    """Number of parts of prompts that may have transfers in flight."""


class Sessions:
    """Sessions that a decode rank has read from. Any thread.

    Args:
        runs: True if a server runs, by its endpoint.
    """

    def __init__(self, engine: Engine, runs: Callable[[str], bool] | None = None) -> None:
        self._engine = engine
        self._runs = runs or accepts_connections
        self._known: dict[str, _Session] = {}
        """Sessions by id, the most recently used last."""
        self._lock = threading.Lock()
        """Held while a session is forgotten, so that no read of it begins meanwhile."""
        self._probing = threading.Lock()
        self._turns = threading.BoundedSemaphore(2)
        """One turn for the thread that probes, one for a thread that waits for it."""
        self._probed = time.monotonic()

    @property
    def known(self) -> list[str]:
        with self._lock:
            return list(self._known)

    def enter(self, session_id: str, instance_id: str, endpoint: str) -> None:
        """Keep a session until `leave`: transfers of it begin."""
        with self._lock:
            session = self._known.pop(session_id, None)
            if session is not None and session.instance_id != instance_id:
                # Another process has the address now. If reads of the old one are still in flight,
                # the engine ends their connection when they fail.
                if not session.num_users:
                    self._engine.forget_peer(session_id)
                    session = None
                else:
                    session.instance_id, session.endpoint = instance_id, endpoint
            is_due = session is None or time.monotonic() >= self._probed + PROBE_EVERY_S
            if session is None:
                session = _Session(instance_id, endpoint)
            self._known[session_id] = session
            session.num_users += 1
            for name in self._idle()[:-MAX_IDLE]:
                self._forget(name)
        if is_due:
            self.probe()

    def leave(self, session_id: str) -> None:
        """Undo `enter`: no transfer is in flight."""
        with self._lock:
            self._known[session_id].num_users -= 1

    def probe(self) -> None:
        """Probe idle sessions in a thread, and forget sessions whose servers are gone."""
        BackgroundCall("disagg-sessions", self._probe_all)

    def _probe_all(self) -> None:
        if not self._turns.acquire(blocking=False):
            return  # Another thread waits, and will probe all that this one would.
        try:
            with self._probing:
                with self._lock:
                    self._probed = time.monotonic()
                    idle = {name: self._known[name].endpoint for name in self._idle()}
                for session_id, endpoint in idle.items():
                    # The lock is not held here: a host that is away takes long to answer.
                    if not self._runs(endpoint):
                        self._on_gone(session_id)
        finally:
            self._turns.release()

    def _on_gone(self, session_id: str) -> None:
        with self._lock:
            session = self._known.get(session_id)
            if session is None or session.num_users:
                return
            self._forget(session_id)
        logger.info("the prefill server at %s is gone", session.endpoint)

    def _idle(self) -> list[str]:
        return [name for name, session in self._known.items() if not session.num_users]

    def _forget(self, session_id: str) -> None:
        del self._known[session_id]
        self._engine.forget_peer(session_id)
