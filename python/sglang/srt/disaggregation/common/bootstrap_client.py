"""Client of bootstrap servers: prefill ranks register their routes, decode servers find them."""

from __future__ import annotations

import http.client
from typing import Final
from urllib.parse import urlencode

import msgspec

from sglang.srt.constants import KIB
from sglang.srt.disaggregation.common.bootstrap_route import (
    ROUTE_DECODER,
    ROUTE_PATH,
    Registration,
    Route,
)
from sglang.srt.utils.background_call import BackgroundCall
from sglang.srt.utils.error_answers import error_text
from sglang.srt.utils.network import base_url

REGISTER_TIMEOUT_S: Final = 10.0
_MAX_ANSWER_BYTES: Final = 64 * KIB


class BootstrapError(RuntimeError):
    """A request to a bootstrap server failed; the message, one line, names the server and the
    reason."""


def register(host: str, port: int, token: str, route: Route) -> None:
    """Register a rank at its own server's bootstrap server. Blocks for at most ten seconds.

    Args:
        host: Host of the bootstrap server.
        port: Port of the bootstrap server.
        token: The token that the bootstrap server has drawn.
        route: Replaces the route that was registered for this rank.

    Raises:
        BootstrapError: The server does not answer, or refuses.
    """
    body = msgspec.json.encode(Registration(token=token, **msgspec.structs.asdict(route)))
    _ask(host, port, "PUT", ROUTE_PATH, body, REGISTER_TIMEOUT_S)


def find(host: str, port: int, rank: int, timeout: float) -> Route:
    """Find a rank of the prefill server whose bootstrap server is at `host`:`port`. Any thread;
    blocks.

    Asks once. A server that has just been started may not answer yet: call again.

    Args:
        host: Host of the bootstrap server.
        port: Port of the bootstrap server.
        rank: Rank of the prefill server.
        timeout: Seconds for the whole request.

    Raises:
        BootstrapError: There is no answer in time, the rank is not registered, or the server is no
            bootstrap server.
    """
    path = f"{ROUTE_PATH}?{urlencode({'rank': rank})}"
    answer = _ask(host, port, "GET", path, None, timeout)
    try:
        route = ROUTE_DECODER.decode(answer)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _error(host, port, f"its answer is not understood ({error}): start both servers with "
                     "the same release") from None  # fmt: skip
    if route.rank != rank:
        raise _error(host, port, f"it was asked for rank {rank} and answered for {route.rank}")
    return route


def _ask(host: str, port: int, method: str, path: str, body: bytes | None, timeout: float) -> bytes:
    """The body of a 200 within `timeout` seconds."""

    def work() -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(host, port, timeout=timeout)
        try:
            connection.request(method, path, body)
            response = connection.getresponse()
            return response.status, response.read(_MAX_ANSWER_BYTES)
        finally:
            connection.close()

    # The connection's own timeout is for each part of the answer; slow parts may come without end.
    expected = (OSError, http.client.HTTPException, ValueError)
    call = BackgroundCall("ask-bootstrap", work, expected=expected)
    if not call.wait(timeout) or isinstance(call.error, TimeoutError):
        raise _error(
            host, port, f"it has not answered for {timeout:g} s: it is stopped, or its host is away"
        )
    if isinstance(call.error, http.client.HTTPException):
        raise _error(
            host,
            port,
            f"it does not speak HTTP ({type(call.error).__name__}): bootstrap_port has to be the "
            "prefill server's --disaggregation-bootstrap-port",
        )
    if call.error is not None:
        raise _error(
            host,
            port,
            f"it cannot be reached ({call.error or type(call.error).__name__}): check that the "
            "prefill server runs, its --host, and its --disaggregation-bootstrap-port",
        )
    status, answer = call.result
    if status != 200:
        raise _error(host, port, f"it answers with status {status}: {error_text(answer)}")
    return answer


def _error(host: str, port: int, cause: str) -> BootstrapError:
    return BootstrapError(f"the bootstrap server at {base_url(host, port)}: {cause}")
