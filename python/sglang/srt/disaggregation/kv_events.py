"""Publishes the events of KV blocks over ZMQ, for routers that choose servers by their caches.

Frames of a batch: topic, number (8 bytes, big-endian), and msgpack of `[ts, events, attn_dp_rank]`.
Numbers count up by 1 from 0, so a subscriber sees when it missed some. It may then ask the replay
socket, by a DEALER socket: a request is an empty frame and the first number that it wants, 8 bytes.
The answer is a message for each batch that is kept from there on: an empty frame, number, payload;
at last number -1 with an empty payload.

Memory is bounded in bytes, whatever subscribers and askers do: of batches that wait for the thread
(`_MOST_WAITING`), that are kept (`_MOST_KEPT`), and that ZMQ has not sent yet (`_MOST_UNREAD`,
`_MOST_UNREAD_REPLAY`). A subscriber that stops reading is disconnected soon.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

import msgspec
import psutil
import zmq

from sglang.srt.arg_groups.kv_events_config import FLAG, KVEventsConfig
from sglang.srt.constants import MIB
from sglang.srt.mem_cache.tree.kv_events import AllBlocksCleared as AllBlocksCleared
from sglang.srt.mem_cache.tree.kv_events import BlockRemoved as BlockRemoved
from sglang.srt.mem_cache.tree.kv_events import BlockStored as BlockStored
from sglang.srt.mem_cache.tree.kv_events import EventBatch as EventBatch
from sglang.srt.mem_cache.tree.kv_events import KVCacheEvent as KVCacheEvent
from sglang.srt.mem_cache.tree.kv_events import KVEventBatch as KVEventBatch
from sglang.srt.mem_cache.tree.kv_events import StorageMedium as StorageMedium
from sglang.srt.utils.bad_messages import BadMessages
from sglang.srt.utils.network import ALL_ADDRESSES, addresses_of, own_addresses_of

logger = logging.getLogger(__name__)

_END_OF_REPLAY: Final = (-1).to_bytes(8, "big", signed=True)
_MOST_BYTES_RECEIVED: Final = 4096
"""Limit of what subscribers and askers send: topics and numbers."""
_MOST_WAITING: Final = 2_000_000
"""Most hashes and tokens in the batches that wait for the thread: about 80 MB."""
_MOST_KEPT: Final = 128 * MIB
"""Most bytes of the batches that are kept."""
_MOST_UNREAD: Final = 128 * MIB
"""Most bytes that wait for subscribers, all together. Beyond it batches are kept, but not sent."""
_MOST_UNREAD_REPLAY: Final = MIB
"""Bytes that wait for an asker, beyond which it gets nothing more until it reads."""
_MOST_ANSWERED: Final = 64
"""Most askers that are answered at once. Others wait for their turn."""
_MOST_ASKERS: Final = 1024
"""Most askers. Requests of others are dropped."""
_QUESTIONS_WAITING: Final = 16
"""Requests for old batches that wait for their turn, of each asker."""
_BATCH_BYTES: Final = 256
"""Memory of a batch besides its payload."""
_STUCK_MS: Final = 10_000
"""Milliseconds after which a peer that takes no bytes is disconnected."""
_WAIT_S: Final = 0.05
"""Most time between two looks at the replay socket."""
_LINGER_MS: Final = 1000
_ALL_ADDRESSES: Final = ALL_ADDRESSES | {"*"}


class _Unread:
    """Bytes of batches that ZMQ has taken and neither sent nor dropped. It shares them with
    `_kept`, so they take memory once.

    `frame` and `size` are for one thread; ZMQ's own thread reports what it has let go of.
    """

    def __init__(self) -> None:
        self._size = 0
        self._freed: deque[int] = deque()

    def frame(self, payload: bytes) -> zmq.Frame:
        """A frame with `payload`, which counts until ZMQ lets go of it."""
        view = memoryview(payload)
        size = len(payload) + _BATCH_BYTES
        self._size += size
        weakref.finalize(view, self._freed.append, size).atexit = False
        return zmq.Frame(view, copy=False, copy_threshold=0)

    def size(self) -> int:
        """Bytes now."""
        while self._freed:
            self._size -= self._freed.popleft()
        return self._size


@dataclass(slots=True)
class _Asker:
    """One who gets old batches."""

    wanted: deque[int] = field(default_factory=deque)
    """For each of its requests, in order, the number of the next batch."""
    unread: _Unread = field(default_factory=_Unread)


class ZmqEventPublisher:
    """Sends batches in the order of `publish`. Owns a daemon thread, `kv-events`.

    `publish` and `shutdown` are for one thread. A slow subscriber loses batches, and delays nobody.
    """

    def __init__(self, config: KVEventsConfig, dp_rank: int = 0) -> None:
        """`config` is the server's; `dp_rank` is the DP group that publishes. Raises ValueError: an
        endpoint cannot be bound; in one line, with the remedy."""
        config, self._dp_rank = config.of_dp_rank(dp_rank), dp_rank
        self._topic = config.topic.encode()
        self._queue: queue.Queue[tuple[int, float, Sequence[KVCacheEvent], int] | None]
        self._queue = queue.Queue(config.max_queue_size)
        self._num_put = self._num_taken = 0
        """Hashes and tokens of the batches that have been put into the queue, and taken from it by
        the thread."""
        self._next = 0
        """Number of the next batch."""
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._buffer_steps = config.buffer_steps
        self._lost = BadMessages(logger, "batch of KV events")
        self._unread = _Unread()
        self._askers: dict[bytes, _Asker] = {}
        """Askers by identity, the first to ask first; one leaves when all its requests are
        answered."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.setsockopt(zmq.SNDHWM, config.hwm)
        self._open(self._pub, "endpoint", config.endpoint)
        self._replay: zmq.Socket[bytes] | None = None
        if config.replay_endpoint is not None:
            self._replay = self._context.socket(zmq.ROUTER)
            self._replay.setsockopt(zmq.SNDHWM, config.buffer_steps + 1)
            self._replay.setsockopt(zmq.RCVHWM, _QUESTIONS_WAITING)
            self._replay.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self._open(self._replay, "replay_endpoint", config.replay_endpoint)
        self._bad = BadMessages(logger, "request for KV events")
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def _open(self, socket: zmq.Socket[bytes], field: str, endpoint: str) -> None:
        socket.setsockopt(zmq.LINGER, _LINGER_MS)
        socket.setsockopt(zmq.MAXMSGSIZE, _MOST_BYTES_RECEIVED)
        socket.setsockopt(zmq.TCP_MAXRT, _STUCK_MS)
        own = endpoints_to_bind(endpoint)
        hosts = list(map(_host_of, own)) or addresses_of(_host_of(endpoint))
        # ZMQ uses IPv4 alone if the option is unset, and prefers IPv6 in connects if it is set.
        are_ipv6 = [":" in one for one in hosts]
        socket.setsockopt(zmq.IPV6, any(are_ipv6) if own else all(are_ipv6) and bool(hosts))
        try:
            for one in own:
                socket.bind(one)
            if not own:
                socket.connect(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ValueError(
                f"{FLAG}: {field} {endpoint!r}: {error}: name a free port of this machine, or "
                "another host to connect to"
            ) from None
        if any(_host_of(one) in _ALL_ADDRESSES for one in own):
            logger.warning(
                "%s: %s %s is open on all addresses: anyone who reaches it reads the tokens of "
                "prompts; name an address that only routers reach, or keep it behind a firewall",
                FLAG, field, endpoint,
            )  # fmt: skip

    def publish(self, events: Sequence[KVCacheEvent]) -> None:
        """Send a batch soon. Never blocks: if too much waits, this one is lost, and its number is
        not used again."""
        number, self._next = self._next, self._next + 1
        size = sum(event.num_numbers for event in events)
        waiting = self._num_put - self._num_taken
        if waiting and waiting + size > _MOST_WAITING:
            self._lost.add(f"{waiting} hashes and tokens wait already, of at most {_MOST_WAITING}")
            return
        try:
            now = time.time()  # noqa: TID251 - subscribers compare it with that of other servers
            self._queue.put_nowait((number, now, events, size))
            self._num_put += size
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
        unsent = BadMessages(logger, "batch of KV events")
        while True:
            goes_on = self._answer()
            try:
                waiting = self._queue.get(timeout=self._patience(goes_on=goes_on))
            except queue.Empty:
                continue
            if waiting is None:
                self._context.destroy(linger=_LINGER_MS)
                return
            number, ts, events, size = waiting
            payload = encoder.encode(EventBatch(ts=ts, events=events, attn_dp_rank=self._dp_rank))
            self._num_taken += size
            if self._replay is not None:
                self._keep(number, payload)
            if (unread := self._unread.size()) and unread + len(payload) > _MOST_UNREAD:
                # ZMQ lets go of the batches of peers that have left when the socket is used.
                self._pub.getsockopt(zmq.EVENTS)
                unsent.add(f"subscribers have not read {unread} bytes of earlier ones")
                continue
            # A PUB socket drops what a subscriber does not take.
            frames = (self._topic, number.to_bytes(8, "big"), self._unread.frame(payload))
            self._pub.send_multipart(frames, copy=False)

    def _patience(self, *, goes_on: bool) -> float | None:
        """Seconds for which the thread may wait for a batch; None: for ever."""
        if self._replay is None:
            return None
        return 0.0 if goes_on else _WAIT_S

    def _keep(self, number: int, payload: bytes) -> None:
        self._kept.append((number, payload))
        self._kept_bytes += len(payload) + _BATCH_BYTES
        while len(self._kept) > self._buffer_steps or (
            self._kept_bytes > _MOST_KEPT and len(self._kept) > 1
        ):
            _, oldest = self._kept.popleft()
            self._kept_bytes -= len(oldest) + _BATCH_BYTES

    def _answer(self) -> bool:
        """Take a request for old batches, if there is any, and go on with the answers. False: none
        can go on now."""
        if self._replay is None:
            return False
        goes_on = self._take_request(self._replay)
        for identity, asker in list(islice(self._askers.items(), _MOST_ANSWERED)):
            try:
                goes_on |= self._send_kept(self._replay, identity, asker)
            except zmq.Again:
                continue
            except zmq.ZMQError:
                asker.wanted.clear()  # The asker has left.
            if not asker.wanted:
                del self._askers[identity]
        return goes_on

    def _take_request(self, socket: zmq.Socket[bytes]) -> bool:
        """Take a request. False: there is none."""
        try:
            frames = socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return False
        if len(frames) != 3 or len(frames[2]) != 8:
            self._bad.add("it must be a number of 8 bytes after an empty frame")
            return True
        identity, _, wanted = frames
        if identity not in self._askers and len(self._askers) >= _MOST_ASKERS:
            self._bad.add(f"{_MOST_ASKERS} askers wait already")
            return True
        asker = self._askers.setdefault(identity, _Asker())
        if len(asker.wanted) >= _QUESTIONS_WAITING:
            self._bad.add(f"{_QUESTIONS_WAITING} of the same asker wait already")
        else:
            asker.wanted.append(int.from_bytes(wanted, "big"))
        return True

    def _send_kept(self, socket: zmq.Socket[bytes], identity: bytes, asker: _Asker) -> bool:
        """Send what an asker may have now. False: that is nothing, since it has to read first.

        Raises:
            zmq.Again: It has to read first.
            zmq.ZMQError: It has left.
        """
        sent = False
        while asker.wanted:
            for number, payload in self._kept_from(asker.wanted[0]):
                if asker.unread.size() >= _MOST_UNREAD_REPLAY:
                    return sent
                parts = (identity, b"", number.to_bytes(8, "big"), asker.unread.frame(payload))
                socket.send_multipart(parts, zmq.NOBLOCK, copy=False)
                asker.wanted[0], sent = number + 1, True
            socket.send_multipart((identity, b"", _END_OF_REPLAY, b""), zmq.NOBLOCK)
            asker.wanted.popleft()
        return sent

    def _kept_from(self, wanted: int) -> Iterator[tuple[int, bytes]]:
        """The kept batches from number `wanted` on."""
        if not self._kept:
            return iter(())
        # Numbers grow by 1, or by more where batches were lost.
        first = max(0, min(wanted - self._kept[0][0], len(self._kept)))
        while first and self._kept[first - 1][0] >= wanted:
            first -= 1
        return islice(self._kept, first, None)


def endpoints_to_bind(endpoint: str) -> list[str]:
    """The endpoints of this machine that `endpoint` means; []: it is connected to.

    Paths (`ipc`), `*` and names of interfaces are bound. A host, name or address, is bound at its
    addresses that this machine has, and connected to if there is none. Looks names up.
    """
    host, port = _host_of(endpoint), endpoint.rpartition(":")[2]
    if not endpoint.startswith("tcp://") or host in ("", "*") or host in psutil.net_if_addrs():
        return [endpoint]
    return [
        f"tcp://[{one}]:{port}" if ":" in one else f"tcp://{one}:{port}"
        for one in own_addresses_of(host)
    ]


def _host_of(endpoint: str) -> str:
    """The host in a `tcp` endpoint, without brackets."""
    host = endpoint.removeprefix("tcp://").rpartition(":")[0]
    return host.removeprefix("[").removesuffix("]")
