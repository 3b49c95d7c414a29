"""Rooms that a decode server declines: their prefill servers hear of it, one after the other."""

from __future__ import annotations

import logging
import threading
import uuid
from collections import deque
from typing import TYPE_CHECKING, Final

from sglang.srt.disaggregation.common.conversation import (
    Cancellation,
    Conversation,
    Patience,
    RoomFailed,
)
from sglang.srt.disaggregation.common.protocol import GiveUp, Released
from sglang.srt.disaggregation.common.whole_prompt import FindRank, found
from sglang.srt.disaggregation.control.deployment_secret import DeploymentSecret
from sglang.srt.distributed.device_communicators.call_threads import CallThreads
from sglang.srt.utils.logging_utils import RateLimitedLogger

if TYPE_CHECKING:
    from sglang.srt.managers.messages.io_struct import Bootstrap

logger = logging.getLogger(__name__)

MAX_SERVERS: Final = 32
"""Most prefill servers that are told of rooms at once."""
MAX_ROOMS: Final = 4096
"""Most rooms that wait to be told to one prefill server."""


class Declines:
    """Tells prefill servers which prompts will not be read. Any thread.

    A thread `disagg-decline` serves each prefill server, over one connection, until no room is
    left. A room that cannot be told is dropped: its prefill server waits in vain until its time
    limit.

    Args:
        find_rank: Finds ranks of prefill servers.
        patience: A server that does not answer in time is told nothing more.
        secret: See `ControlLink`.
    """

    def __init__(
        self, find_rank: FindRank, patience: Patience, secret: DeploymentSecret | None
    ) -> None:
        self._find_rank = find_rank
        self._patience = patience
        self._secret = secret
        self._lock = threading.Lock()
        self._queues: dict[tuple[str, int], deque[tuple[int, str]]] = {}
        """Rooms with reasons, by host and port of the bootstrap servers that have a thread."""
        self._threads = CallThreads("disagg-decline")
        self._warn = RateLimitedLogger(logger)
        self.num_dropped = 0

    def add(self, meeting: Bootstrap, reason: str) -> None:
        """Tell the prefill server of `meeting` soon. Does not block."""
        server, room = (meeting.host, meeting.port), (meeting.room, reason)
        why = "too many wait"
        with self._lock:
            queue = self._queues.get(server)
            if queue is None and len(self._queues) < MAX_SERVERS:
                try:
                    self._threads.submit(lambda: self._serve(meeting))
                    queue = self._queues[server] = deque()
                except RuntimeError as error:
                    why = f"no thread: {error}"
            if queue is not None and len(queue) < MAX_ROOMS:
                queue.append(room)
                return
        self._drop(1, server, why)

    def close(self) -> None:
        """Accept no more rooms. Threads end by themselves."""
        self._threads.close()

    def _serve(self, meeting: Bootstrap) -> None:
        server = meeting.host, meeting.port
        cancelled = Cancellation()
        try:
            endpoint = found(self._find_rank, meeting, 0, self._patience, cancelled).endpoint
            with Conversation(endpoint, self._secret, self._patience, cancelled) as talk:
                while (one := self._first(server)) is not None:
                    room, reason = one
                    talk.ask(GiveUp(room, uuid.uuid4().hex, reason), Released)
                    self._queues[server].popleft()
        except RoomFailed as error:
            self._end(server, str(error))
        except Exception as error:
            logger.exception("rooms could not be declined")
            self._end(server, f"{type(error).__name__}: {error}")

    def _first(self, server: tuple[str, int]) -> tuple[int, str] | None:
        """The room to tell next; None: there is none left, and the thread ends."""
        with self._lock:
            if queue := self._queues[server]:
                return queue[0]
            del self._queues[server]
            return None

    def _end(self, server: tuple[str, int], why: str) -> None:
        """Drop the rooms of a server that cannot be told."""
        with self._lock:
            left = self._queues.pop(server, ())
        self._drop(len(left), server, why)

    def _drop(self, count: int, server: tuple[str, int], why: str) -> None:
        with self._lock:
            self.num_dropped += count
        self._warn.warning(
            "dropped",
            "%d rooms of the prefill server at %s:%d could not be declined, %d in all: %s",
            count,
            *server,
            self.num_dropped,
            why,
        )
