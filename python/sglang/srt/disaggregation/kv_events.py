"""Publishes the events of KV blocks over ZMQ, for routers that choose servers by their caches.

Frames of a batch: topic, number (8 bytes, big-endian), and msgpack of `[ts, events, attn_dp_rank]`.
Numbers count up by 1 from 0, so a subscriber sees when it missed some. It may then ask the replay
socket, by a DEALER socket: a request is an empty frame and the first number that it wants, 8 bytes.
The answer is a message for each batch that is kept from there on: an empty frame, number, payload;
at last number -1 with an empty payload.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Final
from urllib.parse import urlsplit

import msgspec
import zmq

from sglang.srt.arg_groups.kv_events_config import FLAG, KVEventsConfig
from sglang.srt.mem_cache.tree.kv_events import AllBlocksCleared as AllBlocksCleared
from sglang.srt.mem_cache.tree.kv_events import BlockRemoved as BlockRemoved
from sglang.srt.mem_cache.tree.kv_events import BlockStored as BlockStored
from sglang.srt.mem_cache.tree.kv_events import EventBatch as EventBatch
from sglang.srt.mem_cache.tree.kv_events import KVCacheEvent as KVCacheEvent
from sglang.srt.mem_cache.tree.kv_events import KVEventBatch as KVEventBatch
from sglang.srt.mem_cache.tree.kv_events import StorageMedium as StorageMedium
from sglang.srt.utils.bad_messages import BadMessages

logger = logging.getLogger(__name__)

_END_OF_REPLAY: Final = (-1).to_bytes(8, "big", signed=True)
_MOST_BYTES_RECEIVED: Final = 4096
"""Limit of what subscribers and askers send: topics and numbers."""
_REPLAYS_WAITING: Final = 16
"""Requests for old batches that wait for their turn, of each asker."""
_WAIT_S: Final = 0.05
"""Most time between two looks at the replay socket."""
_LINGER_MS: Final = 1000


class ZmqEventPublisher:
    """Sends batches in the order of `publish`. Owns a daemon thread, `kv-events`.

    `publish` and `shutdown` are for one thread. A slow subscriber loses batches, and delays nobody.
    """

    def __init__(self, config: KVEventsConfig) -> None:
        """Raises ValueError: an endpoint cannot be bound; in one line, with the remedy."""
        self._topic = config.topic.encode()
        self._queue: queue.Queue[tuple[int, float, Sequence[KVCacheEvent]] | None]
        self._queue = queue.Queue(config.max_queue_size)
        self._next = 0
        """Number of the next batch."""
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._lost = BadMessages(logger, "batch of KV events")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._pub = self._open(zmq.PUB, "endpoint", config.endpoint, config.hwm)
        self._replay: zmq.Socket[bytes] | None = None
        if config.replay_endpoint is not None:
            self._replay = self._open(
                zmq.ROUTER, "replay_endpoint", config.replay_endpoint, config.buffer_steps + 1
            )
            self._replay.setsockopt(zmq.RCVHWM, _REPLAYS_WAITING)
        self._bad = BadMessages(logger, "request for KV events")
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def _open(self, kind: int, field: str, endpoint: str, hwm: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, hwm)
        socket.setsockopt(zmq.LINGER, _LINGER_MS)
        socket.setsockopt(zmq.MAXMSGSIZE, _MOST_BYTES_RECEIVED)
        socket.setsockopt(zmq.IPV6, "[" in endpoint)
        try:
            if _is_own(endpoint):
                socket.bind(endpoint)
            else:
                socket.connect(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ValueError(
                f"{FLAG}: {field} {endpoint!r}: {error}: name a free port of this machine, or "
                "another host to connect to"
            ) from None
        return socket

    def publish(self, events: Sequence[KVCacheEvent]) -> None:
        """Send a batch soon. Never blocks: if too many batches wait, this one is lost, and its
        number is not used again."""
        number, self._next = self._next, self._next + 1
        try:
            now = time.time()  # noqa: TID251 - subscribers compare it with that of other servers
            self._queue.put_nowait((number, now, events))
        except queue.Full:
            self._lost.add(f"{self._queue.maxsize} wait already: raise max_queue_size")

    def shutdown(self) -> None:
        """Send what waits, for at most a second, and close the sockets."""
        try:
            self._queue.put(None, timeout=_LINGER_MS / 1000)
        except queue.Full:
            return  # The thread is a daemon, and ends with the process.
        self._thread.join(timeout=2 * _LINGER_MS / 1000)

    def _run(self) -> None:
        encoder = msgspec.msgpack.Encoder()
        while True:
            self._answer()
            try:
                waiting = self._queue.get(timeout=None if self._replay is None else _WAIT_S)
            except queue.Empty:
                continue
            if waiting is None:
                self._context.destroy(linger=_LINGER_MS)
                return
            number, ts, events = waiting
            payload = encoder.encode(EventBatch(ts=ts, events=events, attn_dp_rank=0))
            if self._replay is not None:
                self._kept.append((number, payload))
            # A PUB socket drops what a subscriber does not take.
            self._pub.send_multipart((self._topic, number.to_bytes(8, "big"), payload))

    def _answer(self) -> None:
        """Answer one request for old batches, if there is any."""
        if self._replay is None:
            return
        try:
            frames = self._replay.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        if len(frames) != 3 or len(frames[2]) != 8:
            self._bad.add("it must be a number of 8 bytes after an empty frame")
            return
        asker, empty, wanted = frames
        first = int.from_bytes(wanted, "big")
        # A ROUTER socket drops what an asker does not take.
        for number, payload in self._kept:
            if number >= first:
                parts = (asker, empty, number.to_bytes(8, "big"), payload)
                self._replay.send_multipart(parts, zmq.NOBLOCK)
        self._replay.send_multipart((asker, empty, _END_OF_REPLAY, b""), zmq.NOBLOCK)


def _is_own(endpoint: str) -> bool:
    """True for an address of this machine, which is bound."""
    url = urlsplit(endpoint)
    host = url.netloc.rpartition(":")[0].strip("[]")
    return (
        url.scheme == "ipc"
        or host in ("*", "", "0.0.0.0", "::", "localhost", "::1")
        or (host.startswith("127."))
    )
