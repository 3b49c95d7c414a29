"""Which connections of a server have no request, and which of them gives way first."""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

MAX_IDLE_CONNECTIONS: Final = 4096
"""Connections without a request; beyond that the longest idle are closed."""


class Connection(Protocol):
    """A connection that can be idle, and be closed."""

    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport


class OpenConnections:
    """The idle connections of one server, longest idle first. Event loop thread only."""

    def __init__(self, max_idle: int = MAX_IDLE_CONNECTIONS) -> None:
        self._max_idle = max_idle
        self._idle: dict[Connection, float] = {}
        """Each with the event loop's time when it fell idle; in the order of these times."""

    @property
    def num_idle(self) -> int:
        """Connections without a request."""
        return len(self._idle)

    def add_idle(self, connection: Connection) -> None:
        """`connection` has no request from now on; closes the longest idle beyond the bound."""
        self._idle.pop(connection, None)
        self._idle[connection] = connection.loop.time()
        while len(self._idle) > self._max_idle:
            self.close_longest_idle()

    def remove_idle(self, connection: Connection) -> None:
        """`connection` has a request, or has ended."""
        self._idle.pop(connection, None)

    def close_longest_idle(self, least_seconds: float = 0.0) -> bool:
        """Make room for another; False where none has been idle for `least_seconds`."""
        for connection, since in self._idle.items():
            if connection.loop.time() - since < least_seconds:
                break
            del self._idle[connection]
            connection.transport.close()
            return True
        return False
