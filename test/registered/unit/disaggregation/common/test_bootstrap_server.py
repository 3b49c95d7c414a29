"""The bootstrap server: who finds what, who is refused, and clients that misbehave."""

from __future__ import annotations

import http.client
import json
import logging
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack

import msgspec
import pytest

from rigs.running_clock import RunningClock
from sglang.srt.disaggregation.base.bootstrap_route import (
    OF_ANSWER,
    OF_QUESTION,
    BootstrapError,
    Route,
    WrongSecret,
    find,
)
from sglang.srt.disaggregation.base.deployment_secret import DeploymentSecret
from sglang.srt.disaggregation.common import bootstrap_server
from sglang.srt.disaggregation.common.bootstrap_server import (
    MAX_CONNECTIONS,
    REQUEST_TIMEOUT_S,
    CommonKVBootstrapServer,
)
from sglang.srt.utils.http_head import MAX_HEAD_BYTES
from sglang.srt.utils.network import get_free_port, is_port_available
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

HOST = "127.0.0.1"
ROUTE = Route(
    rank=0, endpoint="tcp://10.0.0.1:5555", instance_id="one", num_ranks=2, attn_tp_size=2
)
JSON = msgspec.to_builtins(ROUTE)


class Running:
    """A server on a port of its own."""

    def __init__(self, secret: DeploymentSecret | None = None) -> None:
        self.port = get_free_port()
        self.server = CommonKVBootstrapServer(HOST, self.port, secret)

    def ask(
        self, method: str, path: str, headers: Mapping[str, str] | None = None
    ) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=20)
        try:
            connection.request(method, path, headers=dict(headers or {}))
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()


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
    running.server.register(ROUTE)
    status, answer = running.ask("GET", "/route?rank=0")
    assert (status, json.loads(answer)) == (200, JSON)
    assert running.ask("GET", "/route?rank=1")[0] == 404
    running.server.register(
        Route(rank=1, endpoint="tcp://10.0.0.1:6", instance_id="two", num_ranks=2, attn_tp_size=2)
    )
    assert find(HOST, running.port, 1, timeout=20).endpoint == "tcp://10.0.0.1:6"
    assert find(HOST, running.port, 0, timeout=20) == ROUTE


def test_ranks_of_several_groups_have_the_same_numbers(running: Running) -> None:
    routes = [
        msgspec.structs.replace(
            ROUTE, endpoint=f"tcp://10.0.0.1:{dp_rank}", dp_rank=dp_rank, dp_size=2
        )
        for dp_rank in (0, 1)
    ]
    for route in routes:
        running.server.register(route)
    for dp_rank in (0, 1):
        assert find(HOST, running.port, 0, dp_rank, timeout=20) == routes[dp_rank]
    _, answer = running.ask("GET", "/route?rank=0")
    assert json.loads(answer)["endpoint"] == "tcp://10.0.0.1:0", "as before there were groups"
    status, answer = running.ask("GET", "/route?rank=0&dp_rank=2")
    assert status == 404
    assert error_of(answer).startswith("rank 0 of dp_rank 2 is not registered here")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/route", 400),
        ("GET", "/route?rank=0&dp_rank=64", 400),
        ("GET", "/route?rank=0&dp_rank=-1", 400),
        ("GET", "/route?rank=0&dp_rank=0&dp_rank=1", 400),
        ("GET", "/route?rank=1024", 400),
        ("GET", "/route?rank=", 400),
        ("GET", "/route?rank=-1", 400),
        ("GET", "/route?rank=x", 400),
        ("GET", "/route?rank=100000", 400),
        ("GET", "/route?rank=0&rank=1", 400),
        ("GET", "/route?" + "&".join(f"a{i}" for i in range(500)), 400),
        ("POST", "/route", 405),
        ("PUT", "/health", 405),
        ("PUT", "/route", 405),
        ("GET", "/generate", 404),
        ("GET", "/" + "x" * MAX_HEAD_BYTES, 413),
    ],
)
def test_wrong_questions_are_refused(running: Running, method: str, path: str, status: int) -> None:
    found, answer = running.ask(method, path)
    assert found == status
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
    monkeypatch.setattr(bootstrap_server, "REQUEST_TIMEOUT_S", 0.3)
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


def test_idle_connections_make_room_for_a_question(running: Running) -> None:
    """Else 300 of them would stop all new prompts."""
    with ExitStack() as stack:
        idle = [
            stack.enter_context(socket.create_connection((HOST, running.port), timeout=20))
            for _ in range(MAX_CONNECTIONS + 44)
        ]
        with RunningClock() as clock:
            for _ in range(20):
                assert running.ask("GET", "/health") == (200, b"OK")
            assert clock() < REQUEST_TIMEOUT_S / 2, "it does not wait for their end"
        assert idle[0].recv(1) == b"", "the oldest one was closed"
        assert len(running.server._open) <= MAX_CONNECTIONS


# ---- the deployment's secret -------------------------------------------------------------------

SECRET = DeploymentSecret("the secret of this deployment")
OTHER = DeploymentSecret("the secret of another deployment")


@pytest.fixture
def secretive() -> Iterator[Running]:
    one = Running(SECRET)
    one.server.register(ROUTE)
    yield one
    one.server.close()


def test_who_proves_the_secret_gets_a_route(secretive: Running) -> None:
    assert find(HOST, secretive.port, 0, timeout=20, secret=SECRET) == ROUTE
    assert secretive.ask("GET", "/health") == (200, b"OK")
    with pytest.raises(BootstrapError, match="status 404: rank 1 is not"):
        find(HOST, secretive.port, 1, timeout=20, secret=SECRET)


@pytest.mark.parametrize(
    ("theirs", "why"),
    [
        (OTHER, "has another secret than this prefill server"),
        (None, "has no secret, and this prefill server has one"),
    ],
)
def test_others_are_refused_and_both_sides_name_the_remedy(
    secretive: Running,
    theirs: DeploymentSecret | None,
    why: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    line = f"{why}: give both servers the same --disaggregation-secret-file or SGLANG_DIS"
    with pytest.raises(WrongSecret, match=line):
        find(HOST, secretive.port, 0, timeout=20, secret=theirs)
    (logged,) = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert f"the decode server at {HOST} {line}" in logged


def test_a_server_without_a_secret_refuses_one(running: Running) -> None:
    running.server.register(ROUTE)
    with pytest.raises(WrongSecret, match="has a secret, and this prefill server has none: give"):
        find(HOST, running.port, 0, timeout=20, secret=SECRET)


@pytest.mark.parametrize(
    "given",
    [
        "",
        "Bearer the secret of this deployment",
        "Proof",
        "Proof  ",
        "Proof x y",
        f"Proof {'00' * 32} {'00' * 32}",
        f"Proof {'00' * 32} \u00e9",
        f"Proof {'00' * 5000} 00",
        f"Proof {'00' * 32} {SECRET.proof(OF_ANSWER, bytes(32), b'/route?rank=0').hex()}",
        f"Proof {'00' * 32} {SECRET.proof(OF_QUESTION, bytes(32), b'/route?rank=1').hex()}",
        f"Proof {'00' * 31} {SECRET.proof(OF_QUESTION, bytes(31), b'/route?rank=0').hex()}",
    ],
)
def test_what_is_no_proof_is_refused(secretive: Running, given: str) -> None:
    found, answer = secretive.ask("GET", "/route?rank=0", headers={"Authorization": given})
    assert (found, b"endpoint" in answer) == (401, False)


def test_a_proof_is_about_one_question_and_the_answer_about_its_nonce(secretive: Running) -> None:
    mac = SECRET.proof(OF_QUESTION, bytes(32), b"/route?rank=0").hex()
    headers = {"Authorization": f"Proof {'00' * 32} {mac}"}
    connection = http.client.HTTPConnection(HOST, secretive.port, timeout=20)
    connection.request("GET", "/route?rank=0", headers=headers)
    response = connection.getresponse()
    body = response.read()
    assert (response.status, json.loads(body)) == (200, JSON)
    given = bytes.fromhex(response.getheader("Proof", ""))
    assert SECRET.is_proof(given, OF_ANSWER, bytes(32), body)
    assert not SECRET.is_proof(given, OF_ANSWER, b"1" * 32, body)
    connection.close()


# ---- its port ----------------------------------------------------------------------------------


def test_a_taken_port_is_refused_by_name(running: Running) -> None:
    with pytest.raises(
        ValueError, match=f"^--disaggregation-bootstrap-port {running.port}: cannot"
    ):
        CommonKVBootstrapServer(HOST, running.port)


def test_a_closed_server_leaves_its_port() -> None:
    one = Running()
    with socket.create_connection((HOST, one.port), timeout=20) as idle:
        assert one.ask("GET", "/health")[0] == 200
        one.server.close()
        one.server.close()
        assert is_port_available(HOST, one.port)
        assert idle.recv(1) == b""
