"""Accepting connections up to the process's limit of open files, and closing idle ones.

asyncio's own accept loop has no such limit. Without a free file it tries again some thousand times
a second, logs two lines each time, and does not close idle connections to make room.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from sglang.srt.utils.logging_utils import RateLimitedLogger

logger = logging.getLogger(__name__)

MAX_IDLE_CONNECTIONS: Final = 4096
"""Most connections without a request; beyond that the longest idle are closed."""
ACCEPTS_AT_ONCE: Final = 64
"""Most connections accepted in one turn of the event loop."""
PAUSE_SECONDS: Final = 0.1
"""Seconds without accepting when there is no room."""
LEAST_IDLE_SECONDS: Final = 0.25
"""Seconds for which a connection must be idle before it may be closed: its first request may be on
its way."""
HANDSHAKE_SECONDS: Final = 10.0
"""Most seconds of a TLS handshake."""
UNREAD_SECONDS: Final = 300.0
"""Seconds for which a client may read nothing of an answer, or be out of reach. Then the kernel
ends its connection, which would otherwise keep its memory, its file and its request."""
SPARE_FILES: Final = 256
"""Number of files kept free for other uses, and for connections that were just closed."""
_NO_ROOM: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_LOG_AGAIN_SECONDS: Final = 60.0


class Connection(Protocol):
    """A connection that can be closed while it is idle."""

    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport


class OpenConnections:
    """The idle connections of one server, longest idle first. Event loop thread only.

    Attributes:
        end_with_answer: True while the server drains: each answer then ends its connection.
    """

    def __init__(self, max_idle: int = MAX_IDLE_CONNECTIONS) -> None:
        self.end_with_answer = False
        self._max_idle = max_idle
        self._idle: dict[Connection, float] = {}
        """Time of the event loop at which each connection became idle, ascending."""

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def add_idle(self, connection: Connection) -> None:
        """Add `connection`, which has become idle; close the longest idle ones beyond the limit."""
        self._idle.pop(connection, None)
        self._idle[connection] = connection.loop.time()
        while len(self._idle) > self._max_idle:
            self.close_longest_idle()

    def remove_idle(self, connection: Connection) -> None:
        self._idle.pop(connection, None)

    def close_longest_idle(self, least_seconds: float = 0.0) -> bool:
        """Close the longest idle connection; False: none has been idle for `least_seconds`."""
        for connection, since in self._idle.items():
            if connection.loop.time() - since < least_seconds:
                break
            del self._idle[connection]
            connection.transport.close()
            return True
        return False


def most_connections() -> int:
    """Number of connections that fit this process's present limit of open files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(soft - SPARE_FILES, soft // 2)


class Listener:
    """Accepts on `sockets` until `close`, with TLS if there is a context for it. Event loop thread
    only.

    At the limit a new connection takes the place of one that has been idle for a while. If none is
    idle, it waits, which is logged once a minute.
    """

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        make_protocol: Callable[[], asyncio.BaseProtocol],
        *,
        count: Callable[[], int],
        connections: OpenConnections,
        most: int,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._sockets = sockets
        self._make_protocol = make_protocol
        self._count = count
        self._connections = connections
        self._most = most
        self._opening: set[asyncio.Task[Any]] = set()
        self._warn = RateLimitedLogger(logger, _LOG_AGAIN_SECONDS)
        self._closed = False
        for sock in sockets:
            # Connections inherit it.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(UNREAD_SECONDS * 1e3))
            self._accept_from(sock)

    def close(self) -> None:
        """Stop listening. Open connections stay."""
        self._closed = True
        for sock in self._sockets:
            self._loop.remove_reader(sock)
            sock.close()

    def _accept_from(self, sock: socket.socket) -> None:
        if not self._closed:
            self._loop.add_reader(sock, self._on_readable, sock)

    def _pause(self, sock: socket.socket, why: str) -> None:
        """Stop listening for a while: a socket with waiting connections stays readable."""
        self._warn.warning("no-room", "%s; new connections wait until others end", why)
        self._loop.remove_reader(sock)
        self._loop.call_later(PAUSE_SECONDS, self._accept_from, sock)

    def _on_readable(self, sock: socket.socket) -> None:
        for _ in range(ACCEPTS_AT_ONCE):
            open_now = self._count() + len(self._opening)
            if open_now >= self._most and not self._make_room():
                self._pause(sock, f"{open_now} of {self._most} connections are open, none is idle")
                return
            try:
                peer, _ = sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    raise
                self._make_room()
                self._pause(sock, f"no connection can be accepted ({error.strerror}: ulimit -n)")
                return
            peer.setblocking(False)
            opening = self._loop.create_task(self._open(peer))
            self._opening.add(opening)
            opening.add_done_callback(self._opening.discard)

    def _make_room(self) -> bool:
        return self._connections.close_longest_idle(LEAST_IDLE_SECONDS)

    async def _open(self, peer: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(
                self._make_protocol,
                peer,
                ssl=self._tls,
                ssl_handshake_timeout=None if self._tls is None else HANDSHAKE_SECONDS,
            )
        except OSError:
            peer.close()  # The client left at once, or does not speak TLS.
