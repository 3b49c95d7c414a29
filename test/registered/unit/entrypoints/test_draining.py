"""A server that ends: what it answers while it drains, and how its last requests end (row F5)."""

from __future__ import annotations

import json
import logging
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from types import SimpleNamespace
from typing import Any, Final

import httpx
import pytest

from rigs.disaggregation.desk_rig import Clock
from rigs.servers.fake_engine import FrontServer, front_server
from sglang.srt.entrypoints import http_server, server_routes
from sglang.srt.entrypoints.http.errors import RETRY_AFTER_SECONDS
from sglang.srt.messages.io_struct import AbortReq, DeclineRoomReq, ShutdownReq
from sglang.srt.utils.network import is_port_available, wait_until
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=12, suite="base-a-test-cpu")

BODY: Final[dict[str, Any]] = {"text": "hello", "sampling_params": {"max_new_tokens": 8}}
CHAT: Final[dict[str, Any]] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
SHUTS_DOWN: Final = "the server is shutting down"
END_S: Final = 30.0


class Asking(threading.Thread):
    """A request in a thread, with its response."""

    def __init__(self, server: FrontServer, path: str, body: dict[str, Any]) -> None:
        super().__init__()
        self._ask = path, body
        self._url = server.url
        self.response: httpx.Response | None = None
        self.start()

    def run(self) -> None:
        path, body = self._ask
        self.response = httpx.post(self._url + path, json=body, timeout=END_S)

    def end(self) -> httpx.Response:
        self.join(END_S)
        assert self.response is not None, "there is no answer"
        return self.response


@contextmanager
def holding(**args: Any) -> Iterator[FrontServer]:
    """A server whose requests get no tokens while `scheduler.hold` is set."""
    with front_server(**args) as server:
        server.scheduler.hold.set()
        yield server
        server.scheduler.hold.clear()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time of the server and of its probes, which stands still unless it is moved."""
    found = Clock()
    for module in (http_server, server_routes):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=found))
    return found


def begin(server: FrontServer, path: str = "/generate", **fields: Any) -> Asking:
    """A request that the scheduler has."""
    before = len(server.scheduler.running)
    asking = Asking(server, path, {**(BODY if path == "/generate" else CHAT), **fields})
    assert wait_until(lambda: len(server.scheduler.running) > before, END_S)
    return asking


def has_ended(server: FrontServer) -> bool:
    return not server.thread.is_alive() and is_port_available("127.0.0.1", port_of(server))


def port_of(server: FrontServer) -> int:
    return int(server.url.rpartition(":")[2])


def test_what_runs_goes_on_and_what_comes_is_refused() -> None:
    with holding() as server:
        assert httpx.get(f"{server.url}/v1/models").headers.get("connection") != "close"
        running = begin(server)
        server.signal()
        for path in ("/health", "/health_generate"):
            assert httpx.get(server.url + path).status_code == 503
        for path, body in (("/generate", BODY), ("/v1/chat/completions", {**CHAT, "stream": True})):
            refused = httpx.post(server.url + path, json=body)
            assert refused.status_code == 503
            assert refused.json()["error"]["message"].startswith(SHUTS_DOWN)
            assert refused.headers["retry-after"] == str(RETRY_AFTER_SECONDS)
            assert refused.headers["connection"] == "close"
        assert httpx.get(f"{server.url}/v1/models").headers["connection"] == "close"
        assert not server.server.should_exit
        server.scheduler.hold.clear()
        answer = running.end()
        assert (answer.status_code, answer.json()["text"]) == (200, "hellohel")
        assert answer.headers["connection"] == "close"


def test_a_probe_of_a_moment_ago_does_not_make_a_draining_server_healthy() -> None:
    with front_server() as server, httpx.Client(base_url=server.url) as client:
        assert client.get("/health_generate").status_code == 200
        server.signal()
        assert client.get("/health_generate").status_code == 503


def test_an_open_connection_gets_one_more_answer() -> None:
    with holding() as server:
        connection = HTTPConnection("127.0.0.1", port_of(server), timeout=END_S)
        for status in (200, 503):
            connection.request("GET", "/health")
            response = connection.getresponse()
            response.read()
            assert response.status == status
            if status == 200:
                running = begin(server)
                server.signal()
        assert connection.sock is None  # The answer has said that the connection ends.
        server.scheduler.hold.clear()
        assert running.end().status_code == 200


def test_it_ends_when_the_last_request_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "NOTICE_SECONDS", 0.0)
    with holding() as server:
        running = begin(server)
        idle = socket.create_connection(("127.0.0.1", port_of(server)))
        server.signal()
        server.scheduler.hold.clear()
        assert running.end().status_code == 200
        assert wait_until(lambda: has_ended(server), END_S)
        idle.close()
        # The scheduler reads in a thread of its own, perhaps after the server has ended.
        received = server.scheduler.received
        assert wait_until(lambda: any(isinstance(m, ShutdownReq) for m in received), END_S)
        assert AbortReq(abort_all=True) not in received


@pytest.mark.parametrize("path", ["/generate", "/health", "/health_generate"])
@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_routers_get_time_to_notice_unless_it_is_ctrl_c(
    sig: signal.Signals, path: str, clock: Clock
) -> None:
    with front_server() as server:
        server.signal(sig)
        assert wait_until(lambda: has_ended(server), END_S), "nobody used it"
    with front_server() as server:
        method = "POST" if path == "/generate" else "GET"
        assert httpx.request(method, server.url + path, json=BODY).status_code == 200
        server.signal(sig)
        if sig == signal.SIGINT:
            assert wait_until(lambda: has_ended(server), END_S)
        else:
            clock.now += http_server.NOTICE_SECONDS - 0.1
            assert not wait_until(lambda: has_ended(server), 0.7)
            # Refusals are all that a client notices that does not probe.
            status = 503 if path == "/generate" else 200
            assert httpx.post(f"{server.url}/generate", json=BODY).status_code == status
            clock.now += 0.2
            assert wait_until(lambda: has_ended(server), END_S)


def test_a_probed_server_serves_until_its_router_has_noticed(clock: Clock) -> None:
    with holding() as server:
        assert httpx.get(f"{server.url}/health").status_code == 200
        running = begin(server)
        server.signal()
        for path in ("/health", "/health_generate"):
            refused = httpx.get(server.url + path)
            assert refused.status_code == 503
            assert refused.json()["error"]["message"].startswith(SHUTS_DOWN)
        late = begin(server)
        # Neither requests nor probes lengthen it.
        clock.now += http_server.NOTICE_SECONDS
        assert wait_until(lambda: server.context.manager.refusal is not None, END_S)
        assert httpx.post(f"{server.url}/generate", json=BODY).status_code == 503
        assert not has_ended(server)
        server.scheduler.hold.clear()
        for one in (running, late):
            answer = one.end()
            assert (answer.status_code, answer.json()["text"]) == (200, "hellohel")
            assert answer.headers["connection"] == "close"
        assert wait_until(lambda: has_ended(server), END_S)


@pytest.mark.parametrize("ago", [9.0, 11.0])
def test_a_probe_long_ago_is_none(ago: float, clock: Clock) -> None:
    with front_server() as server:
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert server.context.probed_at == clock.now
        clock.now += ago
        server.signal()
        assert (server.context.manager.refusal is None) == (ago < http_server.PROBED_SECONDS)
        clock.now += http_server.NOTICE_SECONDS
        assert wait_until(lambda: has_ended(server), END_S)


def test_half_of_a_short_drain_is_left_for_requests_that_came_in_it(clock: Clock) -> None:
    with holding(drain_seconds=4.0) as server:
        assert httpx.get(f"{server.url}/health").status_code == 200
        server.signal()
        running = begin(server)
        clock.now += 2.0
        assert wait_until(lambda: server.context.manager.refusal is not None, END_S)
        clock.now += 1.9
        assert not wait_until(lambda: has_ended(server), 0.7)
        clock.now += 0.2
        answer = running.end()
        assert answer.status_code == 503
        assert "has not ended within 4 s" in answer.json()["error"]["message"]


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_rooms_are_declined(mode: str) -> None:
    room: dict[str, Any] = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 7, "bootstrap_room": 3}
    with holding(disaggregation_mode=mode) as server:
        running = begin(server, **{**room, "bootstrap_room": 2})
        server.signal()
        assert httpx.post(f"{server.url}/generate", json={**BODY, **room}).status_code == 503

        def declined() -> list[DeclineRoomReq]:
            return [m for m in server.scheduler.received if isinstance(m, DeclineRoomReq)]

        assert wait_until(lambda: bool(declined()), END_S)
        (message,) = declined()
        assert message.bootstrap.room == 3 and message.reason.startswith(SHUTS_DOWN)
        server.scheduler.hold.clear()
        assert running.end().status_code == 200


def test_requests_that_outlast_the_drain_get_an_error(caplog: pytest.LogCaptureFixture) -> None:
    with holding(drain_seconds=0.3) as server:
        paths = "/generate", "/v1/chat/completions"
        server.scheduler.hold_after = 2
        server.scheduler.hold.clear()
        streams = [begin(server, path, stream=True) for path in paths]
        assert wait_until(
            lambda: all(one.sent == 2 for one in list(server.scheduler.running.values())), END_S
        )
        server.scheduler.hold.set()
        whole = [begin(server, path) for path in paths]
        server.signal()
        for one in whole:
            answer = one.end()
            assert answer.status_code == 503
            assert answer.json()["error"]["message"].startswith(f"{SHUTS_DOWN}, and the request")
        for one in streams:
            answer = one.end()
            assert answer.status_code == 200
            *_, error, done = [line for line in answer.text.split("\n\n") if line]
            assert done == "data: [DONE]"
            message = json.loads(error.removeprefix("data: "))["error"]["message"]
            assert "has not ended within 0.3 s" in message
        assert wait_until(lambda: has_ended(server), END_S)
        # The scheduler must not spend time on requests whose clients have left.
        received = server.scheduler.received
        assert wait_until(lambda: AbortReq(abort_all=True) in received, END_S)
    assert not [one for one in caplog.records if one.exc_info or one.levelno >= logging.ERROR]


def test_a_client_that_never_ends_its_request_is_let_go(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(http_server, "CLOSE_SECONDS", 0.3)
    with front_server(drain_seconds=0.0) as server:
        upload = socket.create_connection(("127.0.0.1", port_of(server)))
        upload.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
        assert wait_until(lambda: bool(server.server.server_state.tasks), END_S)
        server.signal()
        assert wait_until(lambda: has_ended(server), END_S)
        assert not upload.recv(4096)
        upload.close()
    assert not [one for one in caplog.records if one.exc_info or one.levelno >= logging.ERROR]
