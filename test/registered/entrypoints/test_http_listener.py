"""The listener as others meet it: without files idle connections give way, and the router's
question whether HTTP/2 is spoken is no bad request."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import pytest

from sglang.embedded_router import Router
from sglang.srt.utils.network import get_free_port, listening_sockets, wait_until
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-b-test-cpu")

MOST: Final = 150
"""Connections of a process that may open 300 files."""
SERVER: Final = """
import asyncio, logging, os, resource, sys
from sglang.srt.entrypoints.http_server import BoundedServer
from sglang.srt.utils.bounded_listener import most_connections

async def app(request):
    if request.path == "/hold":
        while not os.path.exists(sys.argv[3]):
            await asyncio.sleep(0.02)
    request.begin(200, {}, 2)
    request.end(b"ok")

logging.basicConfig(level=logging.INFO)
resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))
assert most_connections() == 150
others = [open(os.devnull) for _ in range(int(sys.argv[2]))]
BoundedServer(app, port=int(sys.argv[1])).run()
"""


class Process:
    """A server that may open 300 files, `others` of which are taken."""

    def __init__(self, folder: Path, others: int) -> None:
        self.port = get_free_port()
        self.let_go = folder / "let-go"
        self.log_path = folder / "log"
        command = [sys.executable, "-c", SERVER, str(self.port), str(others), str(self.let_go)]
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(command, stderr=log)

    def connect(self, path: str = "") -> socket.socket:
        """A connection, with a request for `path` where there is one."""
        peer = socket.create_connection(("127.0.0.1", self.port), timeout=20)
        if path:
            peer.sendall(b"GET %s HTTP/1.1\r\nHost: x\r\n\r\n" % path.encode())
        return peer

    def answers(self) -> bool:
        try:
            with self.connect("/") as peer:
                return peer.recv(65536).startswith(b"HTTP/1.1 200 ")
        except OSError:
            return False

    def lines_about_room(self) -> list[str]:
        lines = self.log_path.read_text().splitlines()
        return [line for line in lines if "new connections wait" in line or "accept" in line]


@contextmanager
def serving(folder: Path, others: int = 0) -> Iterator[Process]:
    server = Process(folder, others)
    try:
        assert wait_until(server.answers, 30), server.log_path.read_text()
        yield server
    finally:
        server.process.kill()
        server.process.wait()


def test_connections_without_a_request_give_way(tmp_path: Path) -> None:
    with serving(tmp_path) as server, ExitStack() as stack:
        idle = [stack.enter_context(server.connect()) for _ in range(2 * MOST)]
        assert server.answers()
        idle[0].settimeout(30)
        assert idle[0].recv(1) == b""
        assert len(server.lines_about_room()) <= 1


@pytest.mark.parametrize("others", [0, 240], ids=["bound", "no-file-left"])
def test_without_room_accepting_pauses_and_says_so_once(tmp_path: Path, others: int) -> None:
    with serving(tmp_path, others) as server, ExitStack() as stack:
        busy = [stack.enter_context(server.connect("/hold")) for _ in range(MOST + 50)]
        assert wait_until(lambda: bool(server.lines_about_room()), 20)
        busy[0].settimeout(0.5)
        with pytest.raises(TimeoutError):
            busy[0].recv(1)  # it waits for its answer, not for room
        assert len(server.lines_about_room()) == 1
        server.let_go.touch()
        for peer in busy:
            peer.settimeout(20)
            assert peer.recv(65536).startswith(b"HTTP/1.1 200 ")
            peer.close()
        assert server.answers()
        assert len(server.lines_about_room()) == 1


def test_the_router_asks_and_nothing_is_logged_as_bad(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        url = f"http://127.0.0.1:{server.port}"
        router = Router([], [], port=get_free_port(), log_dir=tmp_path, plain=[url])
        try:
            router.start()  # it has asked all its questions once it is ready
        finally:
            router.stop()
        with server.connect() as peer:
            peer.sendall(b"\x16\x03")
            assert peer.recv(65536).startswith(b"HTTP/1.1 400 ")
        (line,) = [one for one in server.log_path.read_text().splitlines() if "bad HTTP" in one]
    assert "(1 so far)" in line


def test_every_address_of_a_name_is_listened_on() -> None:
    port = get_free_port()
    names = {sock.getsockname()[0] for sock in listening_sockets("localhost", port, 1)}
    assert "127.0.0.1" in names


def test_an_address_that_is_taken_is_named() -> None:
    (taken,) = listening_sockets("127.0.0.1", get_free_port(), 1)
    with taken, pytest.raises(ValueError, match=r"cannot listen on 127\.0\.0\.1:\d+: Address"):
        listening_sockets("127.0.0.1", taken.getsockname()[1], 1)
