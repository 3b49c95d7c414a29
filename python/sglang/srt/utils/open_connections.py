"""The idle connections of a server, and the order in which they are closed."""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

MAX_IDLE_CONNECTIONS: Final = 4096
"""Most connections without a request; beyond that the longest idle are closed."""


class Connection(Protocol):
    """A connection that can be closed while it is idle."""

    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport


class OpenConnections:
    """The idle connections of one server, longest idle first. Event loop thread only.

    Attributes:
        end_with_answer: Whether the next answer ends its connection, because the server drains.
    """

    def __init__(self, max_idle: int = MAX_IDLE_CONNECTIONS) -> None:
        self.end_with_answer = False
        self._max_idle = max_idle
        self._idle: dict[Connection, float] = {}
        """Time of the event loop at which each connection became idle, ascending."""

    @property
    def num_idle(self) -> int:
        """Number of connections without a request."""
        return len(self._idle)

    def add_idle(self, connection: Connection) -> None:
        """Add `connection`, which has become idle; close the longest idle ones beyond the limit."""
        self._idle.pop(connection, None)
        self._idle[connection] = connection.loop.time()
        while len(self._idle) > self._max_idle:
            self.close_longest_idle()

    def remove_idle(self, connection: Connection) -> None:
        """Remove `connection`, which has a request or has ended."""
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
