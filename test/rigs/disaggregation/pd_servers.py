"""Prefill and decode servers of the built-in model behind the real router, on loopback."""

from __future__ import annotations

import itertools
import math
import secrets
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx

from rigs.servers.engine_server import EXACT, EngineServer
from rigs.servers.forked_servers import ForkedServer
from rigs.servers.rolling_restart import Load, restart_each
from sglang.embedded_router import RESTART_FLAGS, Router
from sglang.srt.environ import envs
from sglang.srt.utils.network import get_free_port

TCP: Final = {"MOONCAKE_PROTOCOL": "tcp", "MOONCAKE_LOCAL_HOSTNAME": "127.0.0.1"}
ROUTER: Final = envs.SGLANG_TEST_ROUTER.get()
"""Package of the router in front of servers; `SMG` in nightly runs."""
_START_S: Final = 120.0
_ROOMS: Final = itertools.count(1)


@dataclass(frozen=True, slots=True)
class ServerPair:
    """Servers that share the work on each request."""

    prefill: list[EngineServer]
    decode: list[EngineServer]
    url: str
    """URL of the router."""
    secret: str


def prefill_server(
    *args: str, model: str | None = None, env: Mapping[str, str] = TCP
) -> tuple[EngineServer, int]:
    """A prefill server that is not started yet, and its bootstrap port."""
    port = get_free_port()
    flags = ("--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", str(port))
    return ForkedServer(*flags, "--page-size", "16", *EXACT, *args, env=env, model=model), port


def decode_server(
    *args: str, model: str | None = None, env: Mapping[str, str] = TCP
) -> EngineServer:
    """A decode server that is not started yet."""
    flags = ("--disaggregation-mode", "decode", "--page-size", "16")
    return ForkedServer(*flags, *EXACT, *args, env=env, model=model)


@contextmanager
def router(
    prefill: Sequence[tuple[EngineServer, int]], decode: Sequence[EngineServer], *flags: str
) -> Iterator[str]:
    """The URL of the router in front of servers that are up; it ends with the block.

    It never retries and ignores earlier failures of servers, so that clients see their answers.
    """
    with ExitStack() as stack:
        log_dir = stack.enter_context(tempfile.TemporaryDirectory())
        process = Router(
            [(server.url, port) for server, port in prefill],
            [server.url for server in decode],
            port=get_free_port(),
            log_dir=Path(log_dir),
            flags=("--disable-retries", "--disable-circuit-breaker", *flags),
            package=ROUTER,
        )
        stack.callback(process.kill)
        process.start(_START_S)
        yield process.url


def ask_both(
    prefill: EngineServer,
    bootstrap: tuple[str, int],
    decode: EngineServer,
    body: Mapping[str, Any],
    timeout: float = 60.0,
    *,
    groups: tuple[int | None, int | None] = (None, None),
) -> tuple[httpx.Response, httpx.Response]:
    """Answers of both servers to a request of `/generate`, sent as a router would send it. A
    connection that breaks is status 599.

    Args:
        bootstrap: Host and port of the prefill server's bootstrap server.
        groups: DP group of each server; None: the server chooses.
    """
    host, port = bootstrap
    room = {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": next(_ROOMS)}

    def post(server: EngineServer, dp_rank: int | None) -> httpx.Response:
        whole = {**body, **room, "routed_dp_rank": dp_rank}
        try:
            return httpx.post(f"{server.url}/generate", json=whole, timeout=timeout)
        except httpx.TransportError as error:
            return httpx.Response(599, text=str(error))

    with ThreadPoolExecutor(2) as pool:
        first, second = map(pool.submit, (post, post), (prefill, decode), groups)
        return first.result(), second.result()


@contextmanager
def server_pair(
    num_prefill: int = 1, num_decode: int = 1, prefill_args: Sequence[str] = ()
) -> Iterator[ServerPair]:
    """Servers with the built-in model and a secret, and the router in front of them."""
    secret = secrets.token_hex(32)
    env = {**TCP, envs.SGLANG_DISAGGREGATION_SECRET.name: secret}
    with ExitStack() as stack:
        prefill = [prefill_server(*prefill_args, env=env) for _ in range(num_prefill)]
        decode = [decode_server(env=env) for _ in range(num_decode)]
        for server in (*(one for one, _ in prefill), *decode):
            stack.enter_context(server)
        url = stack.enter_context(router(prefill, decode))
        yield ServerPair([one for one, _ in prefill], decode, url, secret)


def assert_alike(found: Any, expected: Any) -> None:
    """Assert that lists of log probabilities are equal, but for last digits: batches differ."""
    if isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_alike(one, other)
    elif isinstance(expected, float):
        assert math.isclose(found, expected, rel_tol=0, abs_tol=1e-3), (found, expected)
    else:
        assert found == expected


def assert_restarts_cost_nothing(num_prefill: int, num_decode: int, restarted: str) -> None:
    """Restart servers of both kinds, or of one, under load behind a router that never repeats a
    request: no request fails.

    Args:
        restarted: `prefill`, `decode`, or "" for all of both kinds.
    """
    with ExitStack() as stack:
        log_dir = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        prefill = [prefill_server() for _ in range(num_prefill)]
        decode = [decode_server() for _ in range(num_decode)]
        servers = {"prefill": [server for server, _ in prefill], "decode": decode}
        for server in (*servers["prefill"], *decode):
            stack.enter_context(server)
        process = Router(
            [(server.url, port) for server, port in prefill],
            [server.url for server in decode],
            port=get_free_port(),
            log_dir=log_dir,
            flags=(*RESTART_FLAGS, "--disable-retries"),
            package=ROUTER,
        )
        stack.callback(process.kill)
        process.start(_START_S)
        with Load(process.url, rate=3) as load:
            for kind, some in servers.items():
                if restarted in ("", kind):
                    restart_each(load, process, some)
        assert not load.failures, load.failures
        print(f"{load.num_sent} requests, the slowest {max(load.seconds):.1f} s")
        assert len(load.seconds) == load.num_sent > 40
