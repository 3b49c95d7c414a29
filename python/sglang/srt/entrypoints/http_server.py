"""The HTTP server: one process in front of the engine's processes. Its connections are bounded by
the limit of open files, and it drains."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import ssl
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Final

from sglang.srt.entrypoints import (
    control_routes,
    hicache_routes,
    native_routes,
    openapi,
    server_routes,
)
from sglang.srt.entrypoints.anthropic import serving_messages
from sglang.srt.entrypoints.engine import WRITE_BACK_SECONDS, EngineFront
from sglang.srt.entrypoints.http.application import Application
from sglang.srt.entrypoints.http.protocol import App, BoundedProtocol, ServerState
from sglang.srt.entrypoints.http.server_context import ServerContext
from sglang.srt.entrypoints.openai import routes as openai_routes
from sglang.srt.environ import envs
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.auth import add_api_key_middleware
from sglang.srt.utils.bounded_listener import MAX_IDLE_CONNECTIONS, Listener, most_connections
from sglang.srt.utils.logging_utils import configure_logger
from sglang.srt.utils.network import (
    check_port_available,
    listening_sockets,
    tls_context,
    warn_of_open_server,
)
from sglang.srt.utils.process import freeze_heap, raise_file_limit

logger = logging.getLogger(__name__)

CLOSE_SECONDS: Final = 5
"""Seconds for clients to read their answers when the server ends; then connections are cut."""
_CANCEL_SECONDS: Final = 2
"""Seconds for requests to notice that their connection was cut; then they are cancelled."""
_TICK_SECONDS: Final = 0.1
_BACKLOG: Final = 2048


class BoundedServer:
    """Serves an application on `Listener`, and drains.

    A draining server goes on listening, so that the application can serve requests for a while, and
    then refuse them with an answer. Each answer ends its connection. The server shuts down as soon
    as no request is under way.

    Attributes:
        started: It accepts connections.
        should_exit: Any thread may set it: shut down now.
    """

    def __init__(
        self,
        app: App,
        *,
        host: str = "127.0.0.1",
        port: int,
        tls: ssl.SSLContext | None = None,
        max_idle: int = MAX_IDLE_CONNECTIONS,
    ) -> None:
        self.app = app
        self.server_state = ServerState(app, max_idle)
        self.started = self.should_exit = False
        self.port = port
        self._host, self._tls = host, tls
        self._listener: Listener | None = None
        self._num_answered = 0
        self._last_used = -math.inf
        """`time.monotonic()` seconds at which a request was last seen."""
        self._drain_begin = 0.0
        self._drain_end: float | None = None
        """`time.monotonic()` seconds between which a draining server shuts down; None: it does not
        drain."""

    def run(self) -> None:
        """Serve until a signal or `should_exit`. Raises ValueError if the address cannot be
        listened on."""
        asyncio.run(self.serve())

    async def serve(self) -> None:
        """The same on the running loop."""
        with self._signals():
            await self.startup()
            while not self.on_tick():
                await asyncio.sleep(_TICK_SECONDS)
            await self.shutdown()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        signals = (signal.SIGINT, signal.SIGTERM)
        before = {sig: signal.signal(sig, self.handle_exit) for sig in signals}
        try:
            yield
        finally:
            for sig, handler in before.items():
                signal.signal(sig, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Shut down. A signal handler."""
        self.should_exit = True

    def drain(self, listen_until: float, at_most: float) -> None:
        """Begin to drain. May be called by a signal handler. The server goes on listening until
        `listen_until`, by `time.monotonic()`, even if no request is under way. Requests under way
        have to end within `at_most` seconds."""
        self._drain_end = time.monotonic() + at_most
        self._drain_begin = min(listen_until, self._drain_end)
        self.server_state.open_connections.end_with_answer = True
        for connection in list(self.server_state.connections):
            connection.end_with_answer()

    def on_tick(self) -> bool:
        """Called ten times a second. True: shut down."""
        self.server_state.note_time()
        self.server_state.end_slow_readers()
        self._note_use()
        if self._drain_end is not None:
            now = time.monotonic()
            if now >= self._drain_begin:
                self.refuse_requests()
            is_idle = not self.server_state.tasks and now >= self._drain_begin
            self.should_exit = self.should_exit or is_idle or now >= self._drain_end
        return self.should_exit

    def _note_use(self) -> None:
        """Note whether requests came since the last call."""
        state = self.server_state
        if state.tasks or state.num_answered != self._num_answered:
            self._num_answered, self._last_used = state.num_answered, time.monotonic()

    async def startup(self) -> None:
        """Start the application, then accept. Raises ValueError if the address cannot be listened
        on."""
        sockets = listening_sockets(self._host, self.port, _BACKLOG)
        await self.on_startup()
        state = self.server_state
        self._listener = Listener(
            sockets,
            lambda: BoundedProtocol(state),
            count=lambda: len(state.connections),
            connections=state.open_connections,
            most=most_connections(),
            tls=self._tls,
        )
        self.started = True

    async def on_startup(self) -> None:
        """Hook: start the application, before the first connection."""

    async def on_shutdown(self) -> None:
        """Hook: end the application, after the last connection."""

    def refuse_requests(self) -> None:
        """Hook: refuse all further requests. Called ten times a second, once a drain listens only
        because of requests under way."""

    async def end_requests(self) -> None:
        """Hook: end the requests under way, so that their answers come soon."""

    async def shutdown(self) -> None:
        """Stop listening, end the requests under way and their connections, then the
        application."""
        if self._listener is not None:
            self._listener.close()
        await self.end_requests()
        state = self.server_state
        for connection in list(state.connections):
            connection.shut_down()
        cut = asyncio.get_running_loop().time() + CLOSE_SECONDS
        while state.connections or state.tasks:
            await asyncio.sleep(_TICK_SECONDS / 2)
            if asyncio.get_running_loop().time() >= cut:
                await self._cut_connections()
                break
        await self.on_shutdown()

    async def _cut_connections(self) -> None:
        """Let go of clients that do not read, then of requests that go on without a client."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        if tasks := self.server_state.tasks:
            await asyncio.wait(tasks, timeout=_CANCEL_SECONDS)
        for task in self.server_state.tasks:
            task.cancel()


EXIT_FAILED: Final = 1
READY_LINE: Final = "The server is fired up and ready to roll!"
"""SGLang's log line, for which scripts that start a server wait (docs/api.md)."""
NOTICE_SECONDS: Final = 5.0
"""Seconds for a router to notice SIGTERM. Probes get 503 at once, and a server that was probed
serves requests meanwhile. A server that was never probed refuses requests at once, because clients
can notice only refusals. It stops listening this many seconds after the last request before the
signal."""
PROBED_SECONDS: Final = 10.0
"""Most seconds between the last probe and SIGTERM for a server that counts as probed: two periods
of Kubernetes' probes in docker/k8s."""
DEATH_GRACE_SECONDS: Final = CLOSE_SECONDS + _CANCEL_SECONDS
"""Seconds to send errors to clients after the engine has died; then the server ends in any case."""


def create_app(context: ServerContext) -> Application:
    """The application of one server."""
    apis = (
        serving_messages,
        native_routes,
        openai_routes,
        control_routes,
        server_routes,
        hicache_routes,
        openapi,
    )
    app = Application((route for api in apis for route in api.ROUTES), context)
    args = context.args
    add_api_key_middleware(app, api_key=args.api_key, admin_api_key=args.admin_api_key)
    return app


def launch_server(server_args: ServerArgs) -> None:
    """Serve until a signal or the engine's death, for programs that start servers of their own,
    like `sglang_router.launch_server`. Call it in the main thread of a process of its own.
    `server_args` are not resolved yet. Keys in files and in the environment are read.

    Raises:
        ValueError: Settings or files are wrong, or the port is in use.
        StartError: The engine could not start.
        SystemExit: The server has ended with an error.
    """
    raise_file_limit()
    configure_logger(server_args.log_level, style=server_args.log_format)
    args = server_args.with_keys().resolve()
    envs.SGLANG_DISAGGREGATION_SECRET.clear()  # The processes that need it get it with `args`.
    if status := run_server(args):
        raise SystemExit(status)


def run_server(args: ServerArgs) -> int:
    """Serve until a signal or the engine's death; return the process's exit status. `args` are
    resolved. Raises as `launch_server`."""
    check_port_available(args.host, args.port)
    warn_of_open_server(logger, args.host, has_key=args.api_key is not None)
    front = EngineFront(args)
    try:
        server = HttpServer(front)
        freeze_heap()
        return server.serve_blocking()
    finally:
        front.processes.kill()


def _tls(args: ServerArgs) -> ssl.SSLContext | None:
    """None: the server speaks http."""
    if args.ssl_certfile is None or args.ssl_keyfile is None:
        return None
    return tls_context(args.ssl_certfile, args.ssl_keyfile, args.ssl_keyfile_password)


class HttpServer(BoundedServer):
    """A server with this engine's shutdown.

    The first SIGTERM or SIGINT drains. Probes fail at once. New requests are refused; after SIGTERM
    routers first have time to notice (`NOTICE_SECONDS`). Requests under way may finish, and then
    the scheduler writes back what L3 lacks. A second signal kills.
    """

    def __init__(self, front: EngineFront) -> None:
        args = front.context.args
        app = create_app(front.context)
        super().__init__(app, host=args.host, port=args.port, tls=_tls(args))
        self._front = front
        self._cause: str | None = None
        """Cause of the engine's death, if it has died."""
        self._ended_well = True
        self._signalled = False

    def serve_blocking(self) -> int:
        self.run()
        if self._cause is not None:
            logger.critical("%s; the server ends", self._cause)
        ended_well = self._cause is None and self.started and self._ended_well
        return 0 if ended_well else EXIT_FAILED

    async def startup(self) -> None:
        await super().startup()
        self._front.processes.watch(self._on_death)
        logger.info("%s %s", READY_LINE, self._front.context.args.url)

    async def on_startup(self) -> None:
        await self._front.manager.start()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain on the first signal, end at once on the second."""
        if self._signalled:
            self._front.processes.kill()
            os._exit(128 + sig)
        self._signalled = True
        manager, context = self._front.manager, self._front.context
        seconds = context.args.drain_seconds
        manager.ending = "the server is shutting down: send the request to another one"
        self._note_use()
        serves, listen_until = 0.0, time.monotonic()
        if sig == signal.SIGTERM and listen_until - context.probed_at <= PROBED_SECONDS:
            # The second half of a short drain is left for requests that come in the first one.
            serves = min(NOTICE_SECONDS, seconds / 2)
            listen_until += serves
        elif sig == signal.SIGTERM:
            listen_until = self._last_used + NOTICE_SECONDS
        if not serves:
            self.refuse_requests()
        self.drain(listen_until, seconds)
        logger.info(
            "%s: draining for up to %.0f s, refusing requests in %.0f s (%d under way), again to "
            "kill",
            signal.Signals(sig).name,
            seconds,
            serves,
            manager.num_requests,
        )

    def on_tick(self) -> bool:
        if self._signalled:
            self._front.manager.resume_at_end()
        return super().on_tick()

    def refuse_requests(self) -> None:
        manager = self._front.manager
        manager.refusal = manager.refusal or manager.ending

    async def end_requests(self) -> None:
        """End the requests that have outlasted the drain."""
        manager = self._front.manager
        if manager.num_requests and self._cause is None:
            seconds = self._front.context.args.drain_seconds
            logger.warning("%d requests have not ended in time", manager.num_requests)
            manager.fail_all(
                "the server is shutting down, and the request has not ended within "
                f"{seconds:g} s: send it to another one"
            )
            await manager.abort_all()

    async def on_shutdown(self) -> None:
        if self._cause is None:
            self._ended_well = await self._front.drain(WRITE_BACK_SECONDS)
        else:
            await self._front.manager.close()

    def _on_death(self, cause: str) -> None:
        """Send errors to the clients, then end the server. Runs in the thread `engine-watch`."""
        logger.critical("%s", cause)
        self._cause = cause
        self._front.manager.fail_all_threadsafe(cause)
        self.should_exit = True
        # A client that does not read its error must not keep the process alive.
        timer = threading.Timer(DEATH_GRACE_SECONDS, self._end_now)
        timer.daemon = True
        timer.start()

    def _end_now(self) -> None:
        logger.critical("%s; the server ends", self._cause)
        self._front.processes.kill()
        os._exit(EXIT_FAILED)
