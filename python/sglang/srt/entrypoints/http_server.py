"""The HTTP server: one process with uvicorn in front of the engine's processes. Its connections are
bounded by the limit of open files, and it drains."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from types import FrameType
from typing import Any, Final

import uvicorn
from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from sglang.srt.entrypoints import (
    control_routes,
    hicache_routes,
    native_routes,
    openapi,
    server_routes,
)
from sglang.srt.entrypoints.anthropic import serving_messages
from sglang.srt.entrypoints.engine import WRITE_BACK_SECONDS, EngineFront
from sglang.srt.entrypoints.http.errors import install_error_handlers
from sglang.srt.entrypoints.http.protocol import bounded_protocol
from sglang.srt.entrypoints.http.server_context import ServerContext
from sglang.srt.entrypoints.openai import routes as openai_routes
from sglang.srt.environ import envs
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.auth import add_api_key_middleware
from sglang.srt.utils.bounded_listener import Listener, most_connections
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


class BoundedServer(uvicorn.Server):
    """uvicorn with `Listener`, and with draining. Its protocol is made by `bounded_protocol`.

    A draining server goes on listening, so that the application can serve requests for a while, and
    then refuse them with an answer. Each answer ends its connection. The server shuts down as soon
    as no request is under way.
    """

    _listener: Listener | None = None
    _num_answered = 0
    _last_used = -math.inf
    """`time.monotonic()` seconds at which a request was last seen."""
    _drain_begin = 0.0
    _drain_end: float | None = None
    """`time.monotonic()` seconds between which a draining server shuts down; None: it does not
    drain."""

    def drain(self, listen_until: float, at_most: float) -> None:
        """Begin to drain. May be called by a signal handler. The server goes on listening until
        `listen_until`, by `time.monotonic()`, even if no request is under way. Requests under way
        have to end within `at_most` seconds."""
        self._drain_end = time.monotonic() + at_most
        self._drain_begin = min(listen_until, self._drain_end)
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
            if now >= self._drain_begin:
                self.refuse_requests()
            is_idle = not self.server_state.tasks and now >= self._drain_begin
            self.should_exit = self.should_exit or is_idle or now >= self._drain_end
        return await super().on_tick(counter)

    def _note_use(self) -> None:
        """Note whether requests came since the last call."""
        state = self.server_state
        if state.tasks or state.total_requests != self._num_answered:
            self._num_answered, self._last_used = state.total_requests, time.monotonic()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application, then accept. Raises ValueError if `host` and `port` cannot be
        listened on."""
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
            tls=config.ssl,
        )

    def refuse_requests(self) -> None:
        """Hook: refuse all further requests. Called ten times a second, once a drain listens only
        because of requests under way."""

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


EXIT_FAILED: Final = 1
READY_LINE: Final = "The server is fired up and ready to roll!"
"""SGLang's log line, for which scripts that start a server wait (docs/api.md)."""
KEEP_ALIVE_SECONDS: Final = 75
"""Seconds for which an idle connection stays open. Clients close theirs earlier (after 5 to 15 s):
a server that closes first breaks a request that is just being sent."""
NOTICE_SECONDS: Final = 5.0
"""Seconds for a router to notice SIGTERM. Probes get 503 at once, and a server that was probed
serves requests meanwhile. A server that was never probed refuses requests at once, because clients
can notice only refusals. It stops listening this many seconds after the last request before the
signal."""
PROBED_SECONDS: Final = 10.0
"""Most seconds between the last probe and SIGTERM for a server that counts as probed: two periods
of Kubernetes' probes in docker/k8s."""
DEATH_GRACE_SECONDS: Final = CLOSE_SECONDS + 2.0
"""Seconds to send errors to clients after the engine has died; then the server ends in any case."""


def create_app(
    context: ServerContext, stop: Callable[[], Awaitable[None]] | None = None
) -> Starlette:
    """The application of one server. It starts `context.manager` on the loop that serves it, and
    awaits `stop` when serving ends; None: it closes the manager.

    Bare Starlette: `http/body.py` decodes bodies, and FastAPI's additions to each request
    (dependencies, validation, documentation) have no use here.
    """

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await context.manager.start()
        yield
        await (stop or context.manager.close)()

    # Each request is compared with one route after the other, twice: prompts come first.
    apis = (
        serving_messages,
        native_routes,
        openai_routes,
        control_routes,
        server_routes,
        hicache_routes,
        openapi,
    )
    routes = [route for api in apis for route in api.ROUTES]
    app = Starlette(routes=routes, lifespan=lifespan)
    # A redirect would use the client's own Host header, and always http.
    app.router.redirect_slashes = False
    app.state.context = context
    install_error_handlers(app)
    add_api_key_middleware(
        app, api_key=context.args.api_key, admin_api_key=context.args.admin_api_key
    )
    if context.manager.tracer is not None:
        from sglang.srt.observability.tracing import TraceMiddleware

        paths = frozenset(route.path for route in routes)
        app.add_middleware(TraceMiddleware, tracer=context.manager.tracer, routes=paths)
    # Around the check of keys: preflights have no key, and a page must be able to read the reason
    # of a refusal.
    app.add_middleware(_CrossOriginMiddleware)
    return app


class _CrossOriginMiddleware:
    """Lets pages of any origin read answers (CORS); requests without an `Origin` bypass it.

    Any origin is allowed, as in SGLang. A page without the key gains no access, because a page has
    to send the bearer token itself. Credentials that browsers add by themselves, such as cookies,
    are not allowed with such requests: the server does not read them, but a proxy in front of it
    may.
    """

    def __init__(self, app: ASGIApp) -> None:
        methods = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS")
        self._app = app
        self._for_pages = CORSMiddleware(
            app, allow_origins=("*",), allow_methods=methods, allow_headers=("*",)
        )

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Handle one request. Not a coroutine, since each event of a stream would pass through
        it."""
        if scope["type"] == "http":
            for name, _ in scope["headers"]:
                if name == b"origin":
                    return self._for_pages(scope, receive, send)
        return self._app(scope, receive, send)


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


def _tls_factory(args: ServerArgs) -> Callable[..., ssl.SSLContext] | None:
    """Makes uvicorn's TLS context; None: the server speaks http."""
    certfile, keyfile = args.ssl_certfile, args.ssl_keyfile
    if certfile is None or keyfile is None:
        return None
    return lambda *_: tls_context(certfile, keyfile, args.ssl_keyfile_password)


def _without_query(record: logging.LogRecord) -> bool:
    """Filter of uvicorn's access log: clients send keys in queries, too."""
    if isinstance(record.args, tuple) and len(record.args) == 5:
        client, method, path, *rest = record.args
        record.args = (client, method, str(path).partition("?")[0], *rest)
    return True


class HttpServer(BoundedServer):
    """uvicorn with this engine's shutdown.

    The first SIGTERM or SIGINT drains. Probes fail at once. New requests are refused; after SIGTERM
    routers first have time to notice (`NOTICE_SECONDS`). Requests under way may finish, and then
    the scheduler writes back what L3 lacks. A second signal kills.
    """

    def __init__(self, front: EngineFront) -> None:
        args = front.context.args
        logging.getLogger("uvicorn.access").addFilter(_without_query)
        super().__init__(
            uvicorn.Config(
                create_app(front.context, self._stop),
                host=args.host,
                port=args.port,
                http=bounded_protocol(),
                ws="none",
                log_config=None,
                log_level=None if args.log_level == "debug" else "warning",
                access_log=args.log_level == "debug",
                timeout_graceful_shutdown=int(DEATH_GRACE_SECONDS),
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                server_header=False,
                # The client's address is not used.
                proxy_headers=False,
                ssl_context_factory=_tls_factory(args),
            )
        )
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

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._front.processes.watch(self._on_death)
            logger.info("%s %s", READY_LINE, self._front.context.args.url)

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

    async def on_tick(self, counter: int) -> bool:
        if self._signalled:
            self._front.manager.resume_at_end()
        return await super().on_tick(counter)

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

    async def _stop(self) -> None:
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
