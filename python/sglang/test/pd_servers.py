"""Prefill and decode servers of the built-in model behind the real router, on loopback."""

from __future__ import annotations

import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Final

from sglang.srt.utils.network import get_free_port, wait_until
from sglang.test.engine_server import EngineServer

TCP: Final = {"MOONCAKE_PROTOCOL": "tcp", "MOONCAKE_LOCAL_HOSTNAME": "127.0.0.1"}
_START_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class Halves:
    """Servers that share the work on each request."""

    prefill: list[EngineServer]
    decode: list[EngineServer]
    url: str
    """Of the router."""


def prefill_server(*args: str, model: str | None = None) -> tuple[EngineServer, int]:
    """A prefill server that is not started yet, and its bootstrap port."""
    port = get_free_port()
    flags = ("--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", str(port))
    return EngineServer(*flags, "--page-size", "16", *args, env=TCP, model=model), port


def decode_server(*args: str, model: str | None = None) -> EngineServer:
    """A decode server that is not started yet."""
    flags = ("--disaggregation-mode", "decode", "--page-size", "16")
    return EngineServer(*flags, *args, env=TCP, model=model)


@contextmanager
def router(
    prefill: Sequence[tuple[EngineServer, int]], decode: Sequence[EngineServer]
) -> Iterator[str]:
    """The URL of `sglang_router` in front of servers that are up; it ends with the block."""
    port = get_free_port()
    command = [sys.executable, "-m", "sglang_router.launch_router", "--pd-disaggregation"]
    for server, bootstrap_port in prefill:
        command += ["--prefill", server.url, str(bootstrap_port)]
    for server in decode:
        command += ["--decode", server.url]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    # Another port for its metrics than the default, which may be taken.
    command += ["--prometheus-port", str(get_free_port()), "--log-level", "error"]
    url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        up = wait_until(lambda: process.poll() is not None or _is_ready(url), _START_S)
        assert up and process.poll() is None, "the router did not start"
        yield url
    finally:
        process.kill()
        process.wait()


def _is_ready(url: str) -> bool:
    """Whether the router has found its workers."""
    try:
        with urllib.request.urlopen(f"{url}/readiness", timeout=5) as response:
            return int(response.status) == 200
    except (OSError, urllib.error.URLError):
        return False


@contextmanager
def halves(
    num_prefill: int = 1, num_decode: int = 1, prefill_args: Sequence[str] = ()
) -> Iterator[Halves]:
    """Servers with the built-in model, and the router in front of them."""
    with ExitStack() as stack:
        prefill = [prefill_server(*prefill_args) for _ in range(num_prefill)]
        decode = [decode_server() for _ in range(num_decode)]
        for server in (*(one for one, _ in prefill), *decode):
            stack.enter_context(server)
        url = stack.enter_context(router(prefill, decode))
        yield Halves([one for one, _ in prefill], decode, url)
