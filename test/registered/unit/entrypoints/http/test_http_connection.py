"""One connection without a socket: what is written for what arrives, and when it is paused."""

from __future__ import annotations

import asyncio
from typing import Final

import pytest

from sglang.srt.entrypoints.http.protocol import (
    MAX_UNREAD_BYTES,
    App,
    BoundedProtocol,
    ServerState,
)
from sglang.srt.entrypoints.http.request import Request
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")

GET: Final = b"GET /%d HTTP/1.1\r\nHost: x\r\n\r\n"
CHUNKED: Final = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


class Transport(asyncio.Transport):
    """Keeps what is written. The connection is lost at the write of that number."""

    def __init__(self, lost_at: int = 1000) -> None:
        super().__init__()
        self._lost_at = lost_at
        self.written: list[bytes] = []
        self.pauses = 0
        self.is_paused = False

    def pause_reading(self) -> None:
        self.pauses, self.is_paused = self.pauses + 1, True

    def resume_reading(self) -> None:
        self.is_paused = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written.append(bytes(data))

    def can_write_eof(self) -> bool:
        return False

    def is_closing(self) -> bool:
        return len(self.written) >= self._lost_at

    def close(self) -> None:
        """Does nothing: this object holds no resource."""


async def stream(request: Request) -> None:
    request.begin(200, {})
    if request.method == "HEAD":
        request.end()
        return
    for body in (b"one", b"two"):
        await request.drain()
        request.write(body)
    request.end()


def connect(app: App, transport: Transport) -> BoundedProtocol:
    connection = BoundedProtocol(ServerState(app))
    connection.state.date = "date: now"
    connection.connection_made(transport)
    return connection


def writes_of(*pieces: bytes, lost_at: int = 1000) -> list[bytes]:
    """The answers to `pieces`, which arrive before any task runs."""

    async def run() -> list[bytes]:
        transport = Transport(lost_at)
        connection = connect(stream, transport)
        for piece in pieces:
            connection.data_received(piece)
        while connection.state.tasks:
            await asyncio.gather(*connection.state.tasks)
        connection.connection_lost(None)
        return transport.written

    return asyncio.run(run())


def test_the_head_of_a_response_goes_out_with_its_body() -> None:
    first, *rest = writes_of(GET % 1)
    assert first.startswith(b"HTTP/1.1 200 OK\r\n")
    assert first.endswith(b"\r\n\r\n3\r\none\r\n")
    assert rest == [b"3\r\ntwo\r\n", b"0\r\n\r\n"]


def test_a_head_may_come_byte_by_byte() -> None:
    request = GET % 1
    pieces = [request[at : at + 1] for at in range(len(request))]
    assert writes_of(*pieces) == writes_of(request) != []


def test_a_body_that_has_ended_is_no_longer_too_much() -> None:
    """The last look at the overhead comes with data behind the body, which is none of it."""
    chunks = b"1\r\na\r\n" * 13_500 + b"0\r\n\r\n"
    answers = writes_of(CHUNKED + chunks + GET % 1 * 100)
    assert len(answers) > 1, answers


def test_requests_behind_chunks_are_all_answered() -> None:
    """More data than one look at the overhead of chunks takes."""
    behind = (GET % 1)[:-2] + b"X: " + b"a" * 1000 + b"\r\n\r\n"
    answers = writes_of(CHUNKED + b"1\r\na\r\n0\r\n\r\n" + behind * 20)
    assert len(answers) == 21 * len(writes_of(GET % 1))


def test_a_body_that_nobody_reads_is_discarded_behind_its_answer() -> None:
    async def run() -> None:
        transport = Transport()
        connection = connect(stream, transport)
        head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (1 << 30)
        connection.data_received(head + bytes(MAX_UNREAD_BYTES + 1))
        open_now = connection.state.open_connections
        assert transport.is_paused and open_now.num_idle == 0
        await asyncio.gather(*connection.state.tasks)
        assert not transport.is_paused, "its client reads the answer once it has sent all"
        assert open_now.num_idle == 1, "it gives way like an idle one"
        connection.connection_lost(None)

    asyncio.run(run())


def test_nothing_is_written_to_a_client_that_is_gone() -> None:
    assert writes_of(GET % 1, lost_at=2) == writes_of(GET % 1)[:2]


def test_an_answer_that_is_cancelled_while_it_waits_leaves_the_connection_whole() -> None:
    async def run() -> None:
        connection = connect(stream, Transport())
        connection.pause_writing()
        connection.data_received(GET % 1)
        await asyncio.sleep(0)
        (task,) = connection.state.tasks
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        connection.resume_writing()
        connection.connection_lost(None)

    asyncio.run(run())


def test_a_response_without_a_body_has_a_head() -> None:
    (only,) = writes_of((GET % 1).replace(b"GET", b"HEAD"))
    assert only.startswith(b"HTTP/1.1 200 OK\r\n")
    assert only.endswith(b"\r\n\r\n")


@pytest.mark.parametrize(("size", "pauses"), [(MAX_UNREAD_BYTES, 0), (MAX_UNREAD_BYTES + 1, 1)])
def test_a_body_that_is_not_read_waits_once_it_is_large(size: int, pauses: int) -> None:
    seen = bytearray()

    async def read(request: Request) -> None:
        while request.more_body:
            seen.extend(await request.receive())
        request.begin(200, {})
        request.end()

    async def run() -> None:
        transport = Transport()
        connection = connect(read, transport)
        head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (size + 1)
        connection.data_received(head + bytes(size))
        assert (transport.pauses, transport.is_paused) == (pauses, bool(pauses))
        while len(seen) < size:
            await asyncio.sleep(0)
        assert not transport.is_paused, "its endpoint has read it"
        connection.data_received(b"x")
        await asyncio.gather(*connection.state.tasks)
        assert transport.pauses == pauses
        connection.connection_lost(None)

    asyncio.run(asyncio.wait_for(run(), 30))
    assert bytes(seen) == bytes(size) + b"x"


def test_a_whole_body_that_is_not_read_hides_no_client_that_leaves() -> None:
    async def run() -> None:
        transport = Transport()
        connection = connect(stream, transport)
        connection.pause_writing()  # Its endpoint waits for the client to read.
        size = MAX_UNREAD_BYTES + 2
        connection.data_received(
            b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % size + bytes(size)
        )
        assert not transport.is_paused
        connection.connection_lost(None)
        await asyncio.gather(*connection.state.tasks)

    asyncio.run(asyncio.wait_for(run(), 30))


@pytest.mark.parametrize(
    ("behind", "awaits_head"), [(b"", False), (b"\r\n", False), (b"\r\nG", True)]
)
def test_empty_lines_behind_a_request_begin_no_head(behind: bytes, awaits_head: bool) -> None:
    """A client that keeps its connection has longer than one whose head is under way."""

    async def run() -> bool:
        connection = connect(stream, Transport())
        connection.data_received(GET % 1 + behind)
        await asyncio.gather(*connection.state.tasks)
        found = connection._awaits_head
        connection.connection_lost(None)
        return found

    assert asyncio.run(run()) is awaits_head
