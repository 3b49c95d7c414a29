"""Data before an answer is bounded: heads, chunks, data after a request or a refusal."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final

import pytest

from sglang.srt.entrypoints.http.protocol import DISCARD_BYTES, ServerState
from sglang.srt.entrypoints.http.request import Request
from sglang.srt.entrypoints.http_server import BoundedServer
from sglang.srt.utils.bounded_listener import OpenConnections
from sglang.srt.utils.http_head import MAX_HEAD_BYTES
from sglang.srt.utils.network import get_free_port, wait_until
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="base-a-test-cpu")

GET: Final = b"GET /%d HTTP/1.1\r\nHost: x\r\n\r\n"
CHUNKED: Final = b"POST /%s HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


@dataclass
class Served:
    """A server of a small application, and what that saw."""

    port: int
    state: ServerState = field(init=False)
    seen: list[tuple[str, bytes]] = field(default_factory=list)
    """Path and body of each request; of one that is refused, no body."""
    at_once: int = 0
    most_at_once: int = 0
    hold: threading.Event = field(default_factory=threading.Event)

    async def __call__(self, request: Request) -> None:
        """Answers with the path. `/refuse` reads no body; `/hold` waits while `hold` is set."""
        path, body, more = request.path, b"", request.path != "/refuse"
        self.at_once += 1
        self.most_at_once = max(self.at_once, self.most_at_once)
        while more:
            part = await request.receive()
            if request.gone.done():
                self.at_once -= 1
                return
            body += part
            more = request.more_body
        while path == "/hold" and self.hold.is_set():
            await asyncio.sleep(0.01)
        self.seen.append((path, body))
        text = path.encode()
        await asyncio.sleep(0)
        self.at_once -= 1
        request.begin(200, {}, len(text))
        request.end(text)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)

    def ask(self, data: bytes) -> bytes:
        """All that comes back for `data` until the server ends the connection."""
        with self.connect() as peer:
            peer.sendall(data)
            return read_all(peer)

    @property
    def bad_requests(self) -> int:
        return self.state.bad_requests.count

    @property
    def open_connections(self) -> OpenConnections:
        return self.state.open_connections


def read_all(peer: socket.socket) -> bytes:
    return b"".join(iter(lambda: peer.recv(65536), b""))


def sent_until_refused(peer: socket.socket, piece: bytes, most: int) -> int:
    """Bytes that `peer` took of up to `most`, before it closed or its buffers were full."""
    sent = 0
    with suppress(OSError):
        while sent < most:
            sent += peer.send(piece)
    return sent


@contextmanager
def serving(
    max_idle: int = 64, discard_seconds: float = 60.0, head_seconds: float = 60.0
) -> Iterator[Served]:
    served = Served(get_free_port())
    server = BoundedServer(served, port=served.port, max_idle=max_idle)
    served.state = server.server_state
    served.state.discard_seconds = discard_seconds
    served.state.head_seconds = head_seconds
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        assert wait_until(lambda: server.started, 30)
        yield served
    finally:
        served.hold.clear()
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def shared() -> Iterator[Served]:
    with serving() as served:
        yield served


@pytest.fixture
def served(shared: Served) -> Served:
    shared.seen.clear()
    shared.state.bad_requests.count = 0
    return shared


def head_of(size: int, last: bool = True) -> bytes:
    """A request of just `size` bytes."""
    close = b"Connection: close\r\n" if last else b""
    begin = b"GET /long HTTP/1.1\r\nHost: x\r\n" + close + b"X: "
    return begin + b"a" * (size - len(begin) - 4) + b"\r\n\r\n"


def error_of(answer: bytes, status: int) -> dict[str, Any]:
    head, body = answer.split(b"\r\n\r\n", 1)
    assert head.startswith(b"HTTP/1.1 %d " % status), answer[:200]
    error = json.loads(body)["error"]
    assert error["code"] == status
    assert isinstance(error, dict)
    return error


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("before", [0, 1], ids=["first", "second"])
def test_the_bound_of_a_head_is_exact(served: Served, parts: int, before: int) -> None:
    for size, fits in ((MAX_HEAD_BYTES, True), (MAX_HEAD_BYTES + 1, False)):
        served.seen.clear()
        data = GET % 1 * before + head_of(size)
        with served.connect() as peer:
            if parts == 1:
                peer.sendall(data)
            else:
                # Cut within the empty line, which the bound depends on.
                for piece in (data[:-parts], data[-parts:]):
                    peer.sendall(piece)
            answer = read_all(peer)
        paths = [path for path, _ in served.seen]
        assert paths == ["/1"] * before + ["/long"] * fits
        if not fits:
            answer = answer[answer.rindex(b"HTTP/1.1") :]
            assert str(MAX_HEAD_BYTES) in error_of(answer, 431)["message"]


def test_an_answer_before_the_end_of_the_body_ends_the_connection(served: Served) -> None:
    with served.connect() as peer:
        peer.sendall(CHUNKED % b"refuse" + b"1\r\na\r\n")
        # The server announces the close and ends its output, without another word from the client.
        answer = read_all(peer)
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert b"\r\nconnection: close\r\n" in answer
        # The bytes that follow are no HTTP, and the server does not parse them.
        peer.sendall(b"zz\r\n" * 1000)
        assert served.bad_requests == 0
    assert served.seen == [("/refuse", b"")]


def test_a_client_that_sends_all_before_it_reads_gets_its_answer(served: Served) -> None:
    size = DISCARD_BYTES // 4
    length = b"POST /refuse HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % size
    assert served.ask(length + b" " * size).endswith(b"\r\n\r\n/refuse")


def test_what_is_thrown_away_behind_an_answer_is_bounded(served: Served) -> None:
    with served.connect() as peer:
        peer.sendall(CHUNKED % b"refuse")
        sent = sent_until_refused(peer, b" " * (1 << 20), 4 * DISCARD_BYTES)
    assert DISCARD_BYTES <= sent < DISCARD_BYTES + (32 << 20)


def test_a_client_that_sends_nothing_more_is_not_waited_for() -> None:
    with serving(discard_seconds=0.2) as served, served.connect() as peer:
        peer.sendall(CHUNKED % b"refuse")
        read_all(peer)
        open_now = served.open_connections
        assert wait_until(lambda: open_now.num_idle == 0, 30)


@pytest.mark.parametrize("begin", [b"", b"GET / HT"])
def test_a_head_that_does_not_come_is_not_waited_for(begin: bytes) -> None:
    with serving(head_seconds=0.2) as served, served.connect() as peer:
        peer.sendall(begin)
        assert read_all(peer) == b""
        assert served.bad_requests == 1


def test_a_whole_body_keeps_the_connection(served: Served) -> None:
    with served.connect() as peer:
        for _ in range(2):
            peer.sendall(b"POST /refuse HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nab")
            answer = peer.recv(65536)
            assert answer.endswith(b"/refuse")
            assert b"close" not in answer


@pytest.mark.parametrize(
    ("chunk", "count", "fits"),
    [
        (b"a", 8_000, True),
        (b"a", 20_000, False),
        (b"a" * 16, 20_000, False),
        (b"a" * 512, 20_000, True),
    ],
)
def test_small_chunks_are_few(served: Served, chunk: bytes, count: int, fits: bool) -> None:
    body = b"%x\r\n%s\r\n" % (len(chunk), chunk) * count
    answer = served.ask(
        (CHUNKED % b"read").replace(b"Host", b"Connection: close\r\nHost") + body + b"0\r\n\r\n"
    )
    if fits:
        assert answer.endswith(b"/read")
        assert served.seen == [("/read", chunk * count)]
    else:
        assert "larger ones" in error_of(answer, 400)["message"]


@pytest.mark.parametrize(
    "tail", [b"1;%s\r\na\r\n", b"0\r\nX: %s\r\n"], ids=["extension", "trailer"]
)
def test_what_stands_beside_chunks_is_bounded_like_them(served: Served, tail: bytes) -> None:
    error = error_of(served.ask(CHUNKED % b"read" + tail % (b"x" * 100_000)), 400)
    assert "larger ones" in error["message"]


def test_trailers_are_no_headers(served: Served) -> None:
    body = b"1\r\na\r\n0\r\nAuthorization: Bearer x\r\n\r\n"
    with served.connect() as peer:
        peer.sendall(CHUNKED % b"read" + body)
        assert peer.recv(65536).endswith(b"/read")
        peer.sendall(GET % 2)
        assert peer.recv(65536).endswith(b"/2")


def test_requests_of_one_connection_are_answered_one_by_one(served: Served) -> None:
    served.most_at_once = 0
    paths = [f"/{number}" for number in range(500)]
    with served.connect() as peer:
        peer.sendall(b"".join(GET % number for number in range(500)) + b"garbage\r\n\r\n")
        answer = read_all(peer)
    assert [path for path, _ in served.seen] == paths
    assert served.most_at_once == 1
    assert answer.count(b"HTTP/1.1 200 ") == 500
    error_of(answer[answer.rindex(b"HTTP/1.1") :], 400)


def test_what_follows_a_request_is_not_read_before_that_is_answered() -> None:
    with serving() as served, served.connect() as peer:
        served.hold.set()
        peer.sendall(GET.replace(b"%d", b"hold"))
        peer.settimeout(0.2)
        # The server stops reading, so the kernel's buffers fill.
        sent = sent_until_refused(peer, GET % 7 * 1000, 256 << 20)
        served.hold.clear()
    assert sent < 256 << 20


POST: Final = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n"


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "Host"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n", "Host"),
        (b"GET / HTTP/2.0\r\nHost: x\r\n\r\n", "HTTP"),
        (b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n", "HTTP"),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n", "Transfer-Encoding"),
        (POST + b"Content-Length: 2\r\n\r\n", "Content-Length"),
        (b"\x16\x03\x01\x02\x00\x01", "method"),
    ],
)
def test_what_is_no_request_is_answered_and_counted(served: Served, data: bytes, word: str) -> None:
    assert word in error_of(served.ask(data), 400)["message"]
    assert served.bad_requests == 1
    assert served.seen == []


HTTP2: Final = b"PRI * HTTP/2.0\r\n\r\n"


def test_a_question_in_http2_is_answered_and_no_bad_request(served: Served) -> None:
    # `sglang_router` then sends the rest of the preface, and settings.
    rest = b"SM\r\n\r\n" + bytes((0, 0, 24, 4)) + bytes(29)
    for data in (HTTP2 + rest, HTTP2):
        assert "send HTTP/1.1" in error_of(served.ask(data), 505)["message"]
    with served.connect() as peer:
        peer.sendall(HTTP2[:5])
        peer.sendall(HTTP2[5:])
        error_of(read_all(peer), 505)
    assert served.bad_requests == 0
    assert served.seen == []


@pytest.mark.parametrize(
    "data",
    [
        HTTP2.replace(b"2.0", b"2.1"),
        HTTP2.replace(b"\r\n\r\n", b"\r\nHost: x\r\n\r\n"),
        GET % 1 + HTTP2.lower(),
    ],
)
def test_what_is_like_that_question_is_a_bad_request(served: Served, data: bytes) -> None:
    assert b"HTTP/1.1 400 " in served.ask(data)
    assert served.bad_requests == 1


def test_an_upgrade_is_answered_as_what_it_is(served: Served) -> None:
    upgrade = b"Upgrade: h2c\r\nConnection: Upgrade\r\nContent-Length: 2\r\n\r\nab"
    with served.connect() as peer:
        peer.sendall(b"POST /read HTTP/1.1\r\nHost: x\r\n" + upgrade)
        assert peer.recv(65536).endswith(b"/read")
        peer.sendall(GET % 3)
        assert peer.recv(65536).endswith(b"/3")
    assert served.seen == [("/read", b"ab"), ("/3", b"")]


def test_idle_connections_are_few_and_the_longest_idle_goes() -> None:
    with serving(max_idle=3) as served:
        served.hold.set()
        busy = served.connect()
        busy.sendall(GET.replace(b"%d", b"hold"))
        open_now = served.open_connections
        peers = []
        for number in range(4):
            peers.append(served.connect())
            assert wait_until(lambda n=number: open_now.num_idle == min(n + 1, 3), 30)  # type: ignore[misc]
        assert peers[0].recv(1) == b""
        served.hold.clear()
        assert busy.recv(65536).endswith(b"/hold")  # which had a request
        # `busy` is now the newest idle connection; the oldest one is closed to make room.
        assert peers[1].recv(1) == b""
        for peer in (peers[2], peers[3]):
            peer.sendall(GET % 5)
            assert peer.recv(65536).endswith(b"/5")
        for peer in (busy, *peers):
            peer.close()


def test_a_server_that_ends_lets_go_of_its_port() -> None:
    with serving() as served:
        peer = served.connect()
    with closing(peer), pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", served.port), timeout=5)
