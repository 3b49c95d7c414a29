"""The bootstrap server: who may register, who finds what, and clients that misbehave."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import msgspec
import pytest

from sglang.srt.disaggregation.common import bootstrap_server
from sglang.srt.disaggregation.common.bootstrap_client import find, register
from sglang.srt.disaggregation.common.bootstrap_route import Route
from sglang.srt.disaggregation.common.bootstrap_server import (
    MAX_CONNECTIONS,
    MAX_REQUEST_BYTES,
    BootstrapServer,
)
from sglang.srt.utils.network import get_free_port, is_port_available, wait_until
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

HOST = "127.0.0.1"
ROUTE = Route(
    rank=0, endpoint="tcp://10.0.0.1:5555", instance_id="one", num_ranks=2, attn_tp_size=2
)
JSON = msgspec.to_builtins(ROUTE)


class Running:
    """A server on a port of its own."""

    def __init__(self) -> None:
        self.port = get_free_port()
        self.server = BootstrapServer(HOST, self.port)

    def ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=20)
        try:
            connection.request(method, path, body)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def put(self, **changes: object) -> tuple[int, str]:
        """The answer to a registration that is right but for `changes`; None leaves a field out."""
        body = {**JSON, "token": self.server.token, **changes}
        sent = {name: value for name, value in body.items() if value is not None}
        status, answer = self.ask("PUT", "/route", json.dumps(sent).encode())
        return status, answer.decode()


@pytest.fixture
def running() -> Iterator[Running]:
    one = Running()
    yield one
    one.server.close()


def error_of(answer: bytes) -> str:
    return str(json.loads(answer)["error"]["message"])


def test_a_rank_is_found_once_it_is_registered(running: Running) -> None:
    assert running.ask("GET", "/health") == (200, b"OK")
    status, answer = running.ask("GET", "/route?rank=0")
    assert status == 404
    assert error_of(answer).startswith("rank 0 is not registered here: the server is still start")
    register(HOST, running.port, running.server.token, ROUTE)
    status, answer = running.ask("GET", "/route?rank=0")
    assert (status, json.loads(answer)) == (200, JSON), "the token is not told"
    assert running.ask("GET", "/route?rank=1")[0] == 404
    running.server.register(
        Route(rank=1, endpoint="tcp://10.0.0.1:6", instance_id="two", num_ranks=2, attn_tp_size=2)
    )
    assert find(HOST, running.port, 1, 20).endpoint == "tcp://10.0.0.1:6"
    assert find(HOST, running.port, 0, 20) == ROUTE


@pytest.mark.parametrize(
    ("changes", "status", "message"),
    [
        ({"token": "x" * 32}, 403, "token: only processes of this server register here"),
        ({"token": "\u00e9"}, 403, "only processes of this server"),
        ({"token": None}, 400, "missing required field `token`"),
        ({"rank": -1}, 400, "$.rank"),
        ({"rank": "0"}, 400, "Expected `int`"),
        ({"endpoint": ""}, 400, "$.endpoint"),
        ({"endpoint": "x" * 2000}, 400, "$.endpoint"),
        ({"instance_id": None}, 400, "instance_id"),
        ({"more": 1}, 400, "unknown field `more`"),
    ],
)
def test_wrong_registrations_are_refused(
    running: Running, changes: dict[str, object], status: int, message: str
) -> None:
    told, answer = running.put(**changes)
    assert (told, message in answer) == (status, True), answer
    assert running.ask("GET", "/route?rank=0")[0] == 404
    assert running.put()[0] == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/route", 400),
        ("GET", "/route?rank=", 400),
        ("GET", "/route?rank=-1", 400),
        ("GET", "/route?rank=x", 400),
        ("GET", "/route?rank=100000", 400),
        ("GET", "/route?rank=0&rank=1", 400),
        ("GET", "/route?" + "&".join(f"a{i}" for i in range(500)), 400),
        ("POST", "/route", 405),
        ("PUT", "/health", 405),
        ("PUT", "/route", 400),
        ("GET", "/generate", 404),
        ("GET", "/" + "x" * MAX_REQUEST_BYTES, 413),
    ],
)
def test_wrong_questions_are_refused(running: Running, method: str, path: str, status: int) -> None:
    told, answer = running.ask(method, path)
    assert told == status
    assert error_of(answer)


def answer_to(port: int, sent: bytes, *, half_close: bool = False) -> bytes:
    with socket.create_connection((HOST, port), timeout=20) as sock:
        sock.sendall(sent)
        if half_close:
            sock.shutdown(socket.SHUT_WR)
        received = b""
        while part := sock.recv(4096):
            received += part
        return received


def test_garbage_is_answered_and_ends(running: Running) -> None:
    for sent in (b"\x16\x03\x01\x02\x00\x01", b"GET\r\n\r\n", b"GET /route HTTP/9.9\r\n\r\n"):
        assert answer_to(running.port, sent).startswith(b"HTTP/1.1 400 ")
    broken = b"PUT /route HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nhalf"
    assert b"the request is not complete" in answer_to(running.port, broken, half_close=True)
    chunked = b"PUT /route HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    endless = chunked + b"4000\r\n" + b"x" * 0x4000
    assert answer_to(running.port, endless).startswith(b"HTTP/1.1 413 ")
    assert running.ask("GET", "/health") == (200, b"OK")


def test_slow_clients_hold_up_nobody_and_are_dropped(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap_server, "PATIENCE_S", 0.3)
    with ExitStack() as stack:
        slow = [
            stack.enter_context(socket.create_connection((HOST, running.port), timeout=20))
            for _ in range(20)
        ]
        for sock in slow:
            sock.sendall(b"GET /route?rank=0 HTTP/1.1\r\n")
        assert running.ask("GET", "/health") == (200, b"OK")
        for sock in slow:
            # A client that goes on sending, one header after the other, is dropped all the same.
            with pytest.raises(OSError, match=r"reset|Broken pipe"):
                send_until_dropped(sock)


def send_until_dropped(sock: socket.socket) -> None:
    sock.settimeout(0.05)
    for _ in range(200):
        sock.sendall(b"X: y\r\n")
        try:
            if sock.recv(1) == b"":
                raise ConnectionResetError("reset")
        except TimeoutError:
            continue
    raise AssertionError("a slow client was kept")


def test_connections_are_bounded(running: Running) -> None:
    with ExitStack() as stack:
        for _ in range(MAX_CONNECTIONS):
            stack.enter_context(socket.create_connection((HOST, running.port), timeout=20))
        assert wait_until(lambda: not is_answered(running), 20)
    assert wait_until(lambda: is_answered(running), 20), "they have left"


def is_answered(running: Running) -> bool:
    try:
        return running.ask("GET", "/health") == (200, b"OK")
    except (OSError, http.client.HTTPException):
        return False


def test_a_taken_port_is_refused_by_name(running: Running) -> None:
    with pytest.raises(
        ValueError, match=f"^--disaggregation-bootstrap-port {running.port}: cannot"
    ):
        BootstrapServer(HOST, running.port)


def test_a_closed_server_leaves_its_port() -> None:
    one = Running()
    with socket.create_connection((HOST, one.port), timeout=20) as idle:
        assert one.ask("GET", "/health")[0] == 200
        one.server.close()
        one.server.close()
        assert is_port_available(HOST, one.port)
        assert idle.recv(1) == b""


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
