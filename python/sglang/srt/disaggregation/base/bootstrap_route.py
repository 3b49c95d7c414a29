"""Routes to the ranks of a prefill server, and the client of the bootstrap server that gives them.

Both sides prove the deployment's secret. The question has `Authorization: Proof NONCE MAC`, the
answer `Proof: MAC`; nonce and MACs are hex. Needs no torch.
"""

from __future__ import annotations

import contextlib
import http
import http.client
import secrets
import socket
import threading
from typing import Annotated, Final, TypeAlias
from urllib.parse import urlencode

import msgspec

from sglang.srt.constants import KIB, MAX_PREFILL_GROUPS
from sglang.srt.disaggregation.base.deployment_secret import NONCE_BYTES, SOURCES, DeploymentSecret
from sglang.srt.utils.background_call import BackgroundCall
from sglang.srt.utils.error_answers import error_text
from sglang.srt.utils.network import base_url

ROUTE_PATH: Final = "/route"
PROOF_SCHEME: Final = "Proof"
"""Scheme of the question's `Authorization`, and name of the answer's header."""
OF_QUESTION: Final = "question to a bootstrap server"
"""Purpose of a proof about nonce and target of the request."""
OF_ANSWER: Final = "answer of a bootstrap server"
"""Purpose of a proof about the question's nonce and the body of the answer."""
MAX_RANKS: Final = 1024
MAX_RANK: Final = MAX_RANKS - 1
MAX_DP_RANK: Final = MAX_PREFILL_GROUPS - 1

Rank: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_RANK)]
DPRank: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_DP_RANK)]
Text: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
_MAX_ANSWER_BYTES: Final = 64 * KIB


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """Address and identity of one rank of a prefill server, for decode servers. Ranks are counted
    within their DP group."""

    rank: Rank
    endpoint: Text
    """Address in ZMQ's form: `tcp://HOST:PORT`."""
    instance_id: Text
    """Id drawn at the server's start: a different id at the same address is another server."""
    num_ranks: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]
    attn_tp_size: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]
    """Number of ranks over which the heads of attention are split; see `RankGroup`."""
    dp_rank: DPRank = 0
    """DP group of the rank."""
    dp_size: Annotated[int, msgspec.Meta(ge=1, le=MAX_PREFILL_GROUPS)] = 1
    """DP groups of the server. Each has the rooms of other requests."""


ROUTE_DECODER: Final = msgspec.json.Decoder(Route)


class BootstrapError(RuntimeError):
    """A request to a bootstrap server failed; the message, one line, names the server and the
    reason."""


class WrongSecret(BootstrapError):
    """The servers have different secrets; another request would fail too."""


def find(
    host: str,
    port: int,
    rank: int,
    dp_rank: int = 0,
    *,
    timeout: float,
    secret: DeploymentSecret | None = None,
) -> Route:
    """Find a rank in a DP group of the prefill server whose bootstrap server is at `host`:`port`.
    Any thread; blocks.

    Asks once. A server that has just been started may not answer yet: call again.

    Args:
        timeout: Seconds for the whole request.
        secret: The secret that both servers prove; None: neither has one.

    Raises:
        WrongSecret: Only one of them has a secret, or they differ.
        BootstrapError: There is no answer in time, the rank is not registered, or the server is no
            bootstrap server.
    """
    path = f"{ROUTE_PATH}?{urlencode({'rank': rank, 'dp_rank': dp_rank})}"
    nonce = secrets.token_bytes(NONCE_BYTES)
    headers = {}
    if secret is not None:
        mac = secret.proof(OF_QUESTION, nonce, path.encode())
        headers["Authorization"] = f"{PROOF_SCHEME} {nonce.hex()} {mac.hex()}"
    status, proof, answer = _ask(host, port, path, headers, timeout)
    if status == http.HTTPStatus.UNAUTHORIZED:
        raise _error(host, port, error_text(answer), WrongSecret)
    if status != http.HTTPStatus.OK:
        raise _error(host, port, f"it answers with status {status}: {error_text(answer)}")
    if secret is not None and not secret.is_hex_proof(proof, OF_ANSWER, nonce, answer):
        why = f"its answer does not prove the secret of this server: give both the same {SOURCES}"
        raise _error(host, port, why, WrongSecret)
    try:
        route = ROUTE_DECODER.decode(answer)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _error(host, port, f"its answer is not understood ({error}): start both servers with "
                     "the same release") from None  # fmt: skip
    if (route.dp_rank, route.rank) != (dp_rank, rank):
        raise _error(
            host,
            port,
            f"it was asked for rank {rank} of dp_rank {dp_rank}, and answered for rank "
            f"{route.rank} of dp_rank {route.dp_rank}",
        )
    return route


def _ask(
    host: str, port: int, path: str, headers: dict[str, str], timeout: float
) -> tuple[int, str, bytes]:
    """Status, proof and body of the answer to a GET, within `timeout` seconds."""
    connection = http.client.HTTPConnection(host, port, timeout=timeout)
    given_up = threading.Event()
    sockets: list[socket.socket] = []
    """The connection's socket, which the connection itself lets go of before the body is read."""

    def work() -> tuple[int, str, bytes]:
        try:
            connection.connect()
            sockets.append(connection.sock)
            if given_up.is_set():
                raise TimeoutError
            connection.request("GET", path, headers=headers)
            response = connection.getresponse()
            proof = response.getheader(PROOF_SCHEME, "")
            return response.status, proof, response.read(_MAX_ANSWER_BYTES)
        finally:
            connection.close()

    # The connection's own timeout is for each part of the answer; slow parts may come without end.
    expected = (OSError, http.client.HTTPException, ValueError)
    call = BackgroundCall("ask-bootstrap", work, expected=expected)
    if call.wait(timeout):
        error = call.error
    else:
        error = TimeoutError()
        given_up.set()
        for sock in sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # Ends the thread.
    if error is None:
        return call.result
    why = (
        f"it cannot be reached ({error or type(error).__name__}): check that the prefill server "
        "runs, its --host, and its --disaggregation-bootstrap-port"
    )
    if isinstance(error, TimeoutError):
        why = f"it has not answered for {timeout:g} s: it is stopped, or its host is away"
    elif isinstance(error, http.client.HTTPException):
        why = (
            f"it does not speak HTTP ({type(error).__name__}): bootstrap_port has to be the "
            "prefill server's --disaggregation-bootstrap-port"
        )
    raise _error(host, port, why)


def _error(
    host: str, port: int, cause: str, kind: type[BootstrapError] = BootstrapError
) -> BootstrapError:
    return kind(f"the bootstrap server at {base_url(host, port)}: {cause}")
