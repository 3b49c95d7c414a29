"""Clients that do not read, leave, or send what nobody waits for; on real connections."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Final

import pytest

from sglang.srt.entrypoints.http import protocol
from sglang.srt.entrypoints.http.application import Application, Route
from sglang.srt.entrypoints.http.body import read_body
from sglang.srt.entrypoints.http.request import Request, Response
from sglang.srt.entrypoints.http_server import BoundedServer
from sglang.srt.utils import bounded_listener
from sglang.srt.utils.network import get_free_port, wait_until
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")

GET: Final = b"GET %s HTTP/1.1\r\nHost: x\r\n\r\n"
LARGE: Final = bytes(8 << 20)
"""An answer that the kernel's buffers do not hold."""
WAIT_S: Final = 20.0


class Served(Application):
    """A server of small endpoints, and what they saw."""

    def __init__(self) -> None:
        get = [Route(f"/{one.__name__}", one, methods=["GET"]) for one in (
            self.large, self.small, self.late, self.wait, self.hold, self.pour,
        )]  # fmt: skip
        super().__init__([*get, Route("/read", self.read, methods=["POST"])])
        self.server = BoundedServer(self, port=get_free_port())
        self.state = self.server.server_state
        self.num_large = self.num_reading = self.num_waiting = self.num_left = 0
        self.num_poured = 0
        self.is_late = threading.Event()

    async def large(self, request: Request) -> Response:
        self.num_large += 1
        return Response(LARGE)

    async def small(self, request: Request) -> Response:
        return Response(b"small")

    async def late(self, request: Request) -> Response:
        while not self.is_late.is_set():
            await asyncio.sleep(0.01)
        return Response(b"small")

    async def read(self, request: Request) -> Response:
        self.num_reading += 1
        return Response(await read_body(request))

    async def wait(self, request: Request) -> Response:
        self.num_waiting += 1
        async with asyncio.timeout(WAIT_S):
            await asyncio.shield(request.gone)
        self.num_left += 1
        return Response()

    async def hold(self, request: Request) -> Response:
        """A stream that stalls within, with a terabyte of output behind."""
        request.held = [SimpleNamespace(num_bytes=1 << 40)]
        request.begin(200, {})
        request.write(LARGE)
        return await self.wait(request)

    async def pour(self, request: Request) -> Response:
        """A stream that always has more output."""
        request.begin(200, {})
        while not request.gone.done():
            await request.drain()
            self.num_poured += 1
            request.write(LARGE)
            await asyncio.sleep(0)  # Writing to a connection that ends does not wait.
        return Response()

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.server.port), timeout=WAIT_S)


@pytest.fixture
def served() -> Iterator[Served]:
    with serving() as one:
        yield one


@contextmanager
def serving() -> Iterator[Served]:
    served = Served()
    thread = threading.Thread(target=served.server.run)
    thread.start()
    try:
        assert wait_until(lambda: served.server.started, WAIT_S)
        yield served
    finally:
        served.server.should_exit = True
        thread.join()


def read_answer(peer: socket.socket) -> bytes:
    """The body of the next answer, of a known length."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += _received(peer, 1)
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    body = bytearray()
    while len(body) < length:
        body += _received(peer, length - len(body))
    return bytes(body)


def _received(peer: socket.socket, most: int) -> bytes:
    data = peer.recv(most)
    assert data, "the server has ended the connection"
    return data


def test_who_asks_on_without_reading_gets_no_more_answers(served: Served) -> None:
    count = 20
    with served.connect() as deaf, served.connect() as other:
        deaf.sendall(GET % b"/large" * count)
        assert wait_until(
            lambda: any(one.drained is not None for one in list(served.state.connections)), WAIT_S
        )
        for _ in range(4 * count):
            other.sendall(GET % b"/small")
            assert read_answer(other) == b"small"
        assert 0 < served.num_large < count
        assert all(read_answer(deaf) == LARGE for _ in range(count))


@pytest.mark.parametrize(
    "behind", [b"", b"\r\n", b"GET /small HT", GET % b"/small" * 3, bytes(1 << 20)]
)
def test_a_client_that_leaves_is_noticed_whatever_it_sent_ahead(
    served: Served, behind: bytes
) -> None:
    with served.connect() as peer:
        peer.sendall(GET % b"/wait" + behind)
        assert wait_until(lambda: served.num_waiting == 1, WAIT_S)
    assert wait_until(lambda: served.num_left == 1, WAIT_S / 2)
    assert wait_until(lambda: not (served.state.connections or served.state.tasks), WAIT_S)


def test_who_sends_too_much_ahead_gets_one_answer_and_the_end(served: Served) -> None:
    count = protocol.MAX_AHEAD_BYTES // len(GET % b"/small") + 2
    with served.connect() as peer:
        peer.sendall(GET % b"/late")
        peer.sendall(GET % b"/small" * count)
        assert wait_until(lambda: all(one._discarded for one in served.state.connections), WAIT_S)
        served.is_late.set()
        answer = b"".join(iter(lambda: peer.recv(65536), b""))
        assert len(served.state.connections) == 1, "a close would reset it if more comes"
    assert answer.count(b"HTTP/1.1 200") == 1 and b"connection: close" in answer


def test_who_sends_much_ahead_gets_all_answers(served: Served) -> None:
    count = protocol.MAX_AHEAD_BYTES // len(GET % b"/small")
    with served.connect() as peer:
        peer.sendall(GET % b"/late")
        peer.sendall(GET % b"/small" * count)
        assert wait_until(lambda: any(one._ahead for one in served.state.connections), WAIT_S)
        served.is_late.set()
        assert all(read_answer(peer) == b"small" for _ in range(1 + count))


def test_who_never_stops_sending_ahead_is_let_go(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "DISCARD_BYTES", 1 << 20)
    with served.connect() as peer:
        peer.sendall(GET % b"/wait")
        with pytest.raises(OSError, match=r"reset|pipe"):
            peer.sendall(bytes(64 << 20))
    assert wait_until(lambda: served.num_left == 1, WAIT_S)


@pytest.mark.parametrize(
    ("version", "path", "is_told"), [("1.1", "/read", True), ("1.0", "/read", False),
    ("1.1", "/none", False)]
)  # fmt: skip
def test_who_waits_for_a_word_gets_it_before_the_body(
    served: Served, version: str, path: str, is_told: bool
) -> None:
    with served.connect() as peer:
        peer.sendall(
            f"POST {path} HTTP/{version}\r\nHost: x\r\nConnection: close\r\n"
            "Expect: 100-continue\r\nContent-Length: 1\r\n\r\n".encode()
        )
        assert wait_until(lambda: served.num_reading == 1 or path == "/none", WAIT_S)
        told = peer.recv(65536) if is_told else b""
        peer.sendall(b"a")
        answer = b"".join(iter(lambda: peer.recv(65536), b""))
    assert (told == b"HTTP/1.1 100 Continue\r\n\r\n") is is_told
    assert answer.startswith(b"HTTP/1.1 404 " if path == "/none" else b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "asked", [GET % b"/large" * 9, (GET % b"/large").replace(b"1.1", b"1.0")], ids=["more", "last"]
)
def test_who_never_reads_is_let_go(asked: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_listener, "UNREAD_SECONDS", 0.5)
    with serving() as served, served.connect() as peer:
        peer.sendall(asked)
        assert wait_until(lambda: served.num_large > 0, WAIT_S)
        assert wait_until(lambda: not (served.state.connections or served.state.tasks), WAIT_S)


def test_answers_that_nobody_reads_are_bounded_over_all_connections(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "MAX_WAITING_BYTES", len(LARGE))
    monkeypatch.setattr(protocol, "WAITING_SECONDS", 0.0)
    state, count = served.state, 6
    with ExitStack() as stack:
        deaf = [stack.enter_context(served.connect()) for _ in range(count)]
        for number, peer in enumerate(deaf):
            peer.sendall(GET % b"/large")
            assert wait_until(lambda: served.num_large == number + 1, WAIT_S)  # noqa: B023
        assert wait_until(lambda: state.slow_readers.count > 0, WAIT_S)
        assert sum(map(len, iter(partial(deaf[0].recv, 1 << 20), b""))) < len(LARGE)
        assert read_answer(deaf[-1]) == LARGE, "the last one has not waited for long"


def looks_for_slow_readers(served: Served, patch: pytest.MonkeyPatch) -> list[None]:
    """An item for each time that the server has looked for slow readers."""
    calls: list[None] = []
    end = served.state.end_slow_readers
    patch.setattr(served.state, "end_slow_readers", lambda: calls.append(end()))
    return calls


@pytest.mark.parametrize(("deaf", "seconds"), [(1, 0.0), (3, 60.0)])
def test_a_single_answer_and_fresh_ones_may_wait(
    served: Served, monkeypatch: pytest.MonkeyPatch, deaf: int, seconds: float
) -> None:
    monkeypatch.setattr(protocol, "MAX_WAITING_BYTES", 1)
    monkeypatch.setattr(protocol, "WAITING_SECONDS", seconds)
    with ExitStack() as stack:
        peers = [stack.enter_context(served.connect()) for _ in range(deaf)]
        for peer in peers:
            peer.sendall(GET % b"/large")
        assert wait_until(lambda: len(served.state.waiting) == deaf, WAIT_S)
        calls = looks_for_slow_readers(served, monkeypatch)
        assert wait_until(lambda: len(calls) > 1, WAIT_S)
        assert all(read_answer(peer) == LARGE for peer in peers)


def test_who_reads_less_than_comes_waits_on(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = served.state
    monkeypatch.setattr(state, "end_slow_readers", lambda: None)
    with served.connect() as peer:
        peer.sendall(GET % b"/pour")
        assert wait_until(lambda: len(state.waiting) == 1, WAIT_S)
        since = dict(state.waiting)
        while served.num_poured < 4:
            _received(peer, 1 << 20)
        assert state.waiting == since, "it does not begin anew with each part"


def test_who_has_caught_up_does_not_wait(served: Served) -> None:
    with served.connect() as peer:
        peer.sendall(GET % b"/large")
        assert wait_until(lambda: len(served.state.waiting) == 1, WAIT_S)
        assert read_answer(peer) == LARGE
        assert wait_until(lambda: not served.state.waiting, WAIT_S)


def test_who_has_not_read_all_waits_and_who_leaves_does_not(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, end = served.state, served.state.end_slow_readers
    monkeypatch.setattr(state, "end_slow_readers", lambda: None)
    done = threading.Event()
    with served.connect() as peer:
        peer.sendall(GET % b"/large")
        assert wait_until(lambda: len(state.waiting) == 1, WAIT_S)
        (one,) = state.waiting
        # More may be written once anything is read; the kernel does not take the rest.
        one.loop.call_soon_threadsafe(one.transport.set_write_buffer_limits, len(LARGE), len(LARGE))
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        while one.drained is not None:
            _received(peer, 1 << 10)
        one.loop.call_soon_threadsafe(end)
        one.loop.call_soon_threadsafe(done.set)
        assert done.wait(WAIT_S) and list(state.waiting) == [one]
    assert wait_until(lambda: not state.waiting, WAIT_S)


def test_output_that_a_stream_holds_counts_as_waiting(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "MAX_WAITING_BYTES", 1 << 40)
    monkeypatch.setattr(protocol, "WAITING_SECONDS", 0.0)
    with served.connect() as first, served.connect() as second:
        for peer in (first, second):
            peer.sendall(GET % b"/hold")
        assert wait_until(lambda: served.num_left == 1, WAIT_S), "one of the two is let go"
        assert served.state.slow_readers.count == 1
