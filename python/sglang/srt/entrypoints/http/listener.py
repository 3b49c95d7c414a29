"""uvicorn with connections bounded by the process's limit of open files, and with draining."""

from __future__ import annotations

import asyncio
import math
import socket
import time
from typing import Any, Final

import uvicorn

from sglang.srt.utils.bounded_listener import Listener, most_connections
from sglang.srt.utils.network import listening_sockets

CLOSE_SECONDS: Final = 5
"""Seconds for clients to read their answers when the server ends; then connections are cut."""


class BoundedServer(uvicorn.Server):
    """uvicorn with `Listener`, and with draining. Its protocol is made by `bounded_protocol`.

    A draining server goes on listening, so that the application can refuse requests with an answer,
    which ends the connection. It shuts down as soon as no request is under way.
    """

    _listener: Listener | None = None
    _num_answered = 0
    _last_used = -math.inf
    """`time.monotonic()` seconds at which a request was last seen."""
    _drain_begin = 0.0
    _drain_end: float | None = None
    """`time.monotonic()` seconds between which a draining server shuts down; None: it does not
    drain."""

    def drain(self, notice: float, at_most: float) -> None:
        """Begin to drain. May be called by a signal handler.

        Args:
            notice: Seconds for which the server goes on listening after the last request before the
                drain, even if no request is under way.
            at_most: Seconds after which requests under way have to end.
        """
        self._note_use()
        self._drain_end = time.monotonic() + at_most
        self._drain_begin = min(self._last_used + notice, self._drain_end)
        protocol: Any = self.config.http_protocol_class
        protocol.open_connections.end_with_answer = True
        connections: Any = list(self.server_state.connections)
        for connection in connections:
            connection.end_with_answer()

    async def on_tick(self, counter: int) -> bool:
        """uvicorn's hook, ten times a second: shut down once the drain is over."""
        self._note_use()
        if self._drain_end is not None:
            now = time.monotonic()
            is_idle = not self.server_state.tasks and now >= self._drain_begin
            self.should_exit = self.should_exit or is_idle or now >= self._drain_end
        return await super().on_tick(counter)

    def _note_use(self) -> None:
        state = self.server_state
        if state.tasks or state.total_requests != self._num_answered:
            self._num_answered, self._last_used = state.total_requests, time.monotonic()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application, then accept.

        Raises:
            ValueError: The server cannot listen on `host` and `port`.
        """
        config = self.config
        own = listening_sockets(config.host, config.port, config.backlog)
        await super().startup(sockets=[])
        if not self.started:
            return
        protocol: Any = config.http_protocol_class

        def make_protocol() -> asyncio.Protocol:
            made: asyncio.Protocol = protocol(
                config=config, server_state=self.server_state, app_state=self.lifespan.state
            )
            return made

        self._listener = Listener(
            own,
            make_protocol,
            count=lambda: len(self.server_state.connections),
            connections=protocol.open_connections,
            most=most_connections(),
        )

    async def end_requests(self) -> None:
        """Hook: end the requests under way, so that their answers come soon."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening, end the requests under way and their connections, then the
        application."""
        if self._listener is not None:
            self._listener.close()
        await self.end_requests()
        cut = asyncio.get_running_loop().call_later(CLOSE_SECONDS, self._cut_connections)
        try:
            await super().shutdown(sockets)
        finally:
            cut.cancel()

    def _cut_connections(self) -> None:
        """Let go of clients that do not read; uvicorn would cancel their requests with a
        traceback."""
        connections: Any = list(self.server_state.connections)
        for connection in connections:
            connection.transport.abort()
