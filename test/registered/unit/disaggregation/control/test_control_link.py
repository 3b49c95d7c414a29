"""Both ends of a control connection: the handshake, breaks, and what a peer may not do."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec
import pytest

from rigs.disaggregation.desk_rig import Link
from rigs.running_clock import RunningClock
from sglang.srt.disaggregation.base.deployment_secret import DeploymentSecret
from sglang.srt.disaggregation.control import control_client, control_listener
from sglang.srt.disaggregation.control.control_client import RoomFailed
from sglang.srt.disaggregation.control.control_listener import (
    FRAMES_A_SECOND,
    FRAMES_AT_ONCE,
    MAX_UNKEPT,
    UNKEPT_FRAMES_A_SECOND,
    UNKEPT_FRAMES_AT_ONCE,
    ControlListener,
    ControlPeer,
)
from sglang.srt.disaggregation.control.frames import (
    MAX_PROOF_BYTES,
    MAX_QUESTION_BYTES,
    OF_CLIENT,
    OF_SERVER,
    FrameTooLong,
    Greeting,
    Proof,
    Refused,
    Welcome,
    as_frame,
    take_frame,
)
from sglang.srt.utils.network import wait_until
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

SECRET: Final = DeploymentSecret("the secret of this deployment")
OTHER: Final = DeploymentSecret("the secret of another deployment")
SILENT_S: Final = 300.0
BURST: Final = FRAMES_AT_ONCE + FRAMES_A_SECOND
"""More frames than one connection may send at once."""
OPENING: Final = msgspec.msgpack.Decoder(Greeting | Welcome | Refused)


class Echo:
    """A server that answers each message with itself. A thread."""

    def __init__(self, secret: DeploymentSecret | None = None, silent_s: float = SILENT_S) -> None:
        self.taken: list[bytes] = []
        self.keeps = False
        """True if connections are kept once they have sent anything."""
        self.is_paused = False
        """True if no frame is taken."""
        self.listener = ControlListener(
            "127.0.0.1", secret=secret, silent_s=silent_s, on_frames=lambda: None
        )
        self.port = self.listener.port
        self.endpoint = f"tcp://127.0.0.1:{self.port}"
        self._loop = asyncio.new_event_loop()
        self._ending = asyncio.Event()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._started.wait(10)

    def close(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._ending.set)
            self._thread.join(10)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self.listener.start()
        self._started.set()
        while not self._ending.is_set():
            if not self.is_paused:
                for _ in range(len(self.listener.ready)):
                    peer = self.listener.ready.popleft()
                    if (message := peer.take()) is not None:
                        self._answer(peer, message)
            await asyncio.sleep(0.001)
        await self.listener.close(1.0)

    def _answer(self, peer: ControlPeer, message: bytes) -> None:
        self.taken.append(message)
        if self.keeps:
            peer.keep()
        peer.send(message)


@pytest.fixture
def new_echo() -> Iterator[Callable[..., Echo]]:
    with contextlib.ExitStack() as stack:

        def new(secret: DeploymentSecret | None = None, silent_s: float = SILENT_S) -> Echo:
            echo = Echo(secret, silent_s)
            stack.callback(echo.close)
            return echo

        yield new


@pytest.fixture
def echo(new_echo: Callable[..., Echo]) -> Echo:
    return new_echo()


@pytest.fixture
def link_to() -> Iterator[Callable[[Echo, DeploymentSecret | None], Link]]:
    with contextlib.ExitStack() as stack:

        def new(echo: Echo, secret: DeploymentSecret | None = None) -> Link:
            link = Link(echo.endpoint, secret)
            stack.callback(link.close)
            return link

        yield new


LinkTo = Callable[..., Link]


def connect(stack: contextlib.ExitStack, port: int) -> socket.socket:
    return stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))


def send_for_ever(sock: socket.socket, part: bytes) -> None:
    for _ in range(0, 1 << 28, len(part)):
        sock.sendall(part)
    raise AssertionError("all of it was read")


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / (1 << 20)


# ---- the handshake -----------------------------------------------------------------------------


@pytest.mark.parametrize("secret", [None, SECRET])
def test_equal_secrets_connect(
    new_echo: Callable[..., Echo], link_to: LinkTo, secret: DeploymentSecret | None
) -> None:
    link = link_to(new_echo(secret), secret)
    link.send(b"a question before there is a connection")
    assert link.receive(10) == b"a question before there is a connection"
    link.send(b"x" * MAX_QUESTION_BYTES)
    assert link.receive(10) == b"x" * MAX_QUESTION_BYTES


@pytest.mark.parametrize(
    ("theirs", "mine", "why", "logged"),
    [
        (SECRET, OTHER, "refuses this server, which has another secret: give both", "has another"),
        (SECRET, None, "refuses this server, which has no secret: give both", "has no secret: giv"),
        (None, SECRET, "has no secret, and this server has one: give both", None),
    ],
)
def test_unlike_secrets_do_not_and_the_remedy_is_named(
    new_echo: Callable[..., Echo],
    link_to: LinkTo,
    caplog: pytest.LogCaptureFixture,
    theirs: DeploymentSecret | None,
    mine: DeploymentSecret | None,
    why: str,
    logged: str | None,
) -> None:
    caplog.set_level(logging.WARNING)
    echo = new_echo(theirs)
    link = link_to(echo, mine)
    link.send(b"a question")
    says = f"^the prefill server at {echo.endpoint} {why}"
    with pytest.raises(RoomFailed, match=f"{says}.*--disaggregation-secret-file or SGLANG_DIS"):
        link.receive(10)
    assert not echo.taken
    lines = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert [logged in line and "127.0.0.1" in line for line in lines if logged] == (
        [True] if logged else []
    )


def opening(sock: socket.socket) -> Greeting | Welcome | Refused:
    """The next frame of a server's handshake."""
    (length,) = struct.unpack(">I", sock.recv(4, socket.MSG_WAITALL))
    step: Greeting | Welcome | Refused = OPENING.decode(sock.recv(length, socket.MSG_WAITALL))
    return step


def test_a_proof_is_of_one_connection(new_echo: Callable[..., Echo]) -> None:
    """A proof that was overheard, or coaxed from a client, is refused on another connection."""
    echo = new_echo(SECRET)
    with contextlib.ExitStack() as stack:
        first, second = connect(stack, echo.port), connect(stack, echo.port)
        greetings = [opening(sock) for sock in (first, second)]
        assert isinstance(greetings[0], Greeting) and isinstance(greetings[1], Greeting)
        assert greetings[0].nonce != greetings[1].nonce
        nonce = b"n" * 32
        mac = SECRET.proof(OF_CLIENT, greetings[0].nonce, nonce)
        proof = as_frame(msgspec.msgpack.encode(Proof(nonce, mac)))
        first.sendall(proof)
        welcome = opening(first)
        assert isinstance(welcome, Welcome)
        assert SECRET.is_proof(welcome.mac, OF_SERVER, greetings[0].nonce, nonce)
        assert not SECRET.is_proof(welcome.mac, OF_CLIENT, greetings[0].nonce, nonce)
        second.sendall(proof)
        assert isinstance(opening(second), Refused)
        assert second.recv(1) == b""


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xc1",
        b"\x81" * 100,
        msgspec.msgpack.encode({"type": "Proof"}),
        msgspec.msgpack.encode(Proof(b"n" * 31, b"")),
        msgspec.msgpack.encode(Proof(b"n" * 32, b"m" * 65)),
        msgspec.msgpack.encode(Proof(b"n" * 32, b"")),
        msgspec.msgpack.encode(Greeting(1, b"n" * 32, False)),
    ],
)
def test_garbage_is_no_proof(new_echo: Callable[..., Echo], raw: bytes) -> None:
    echo = new_echo(SECRET)
    with contextlib.ExitStack() as stack:
        sock = connect(stack, echo.port)
        opening(sock)
        sock.sendall(as_frame(raw) + as_frame(b"a question"))
        assert isinstance(opening(sock), Refused)
    assert not echo.taken


def test_a_server_that_does_not_prove_the_secret_is_not_believed(link_to: LinkTo) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        link = Link(f"tcp://127.0.0.1:{listener.getsockname()[1]}", SECRET)
        link.send(b"a question")
        peer, _ = listener.accept()
        with peer:
            peer.sendall(as_frame(msgspec.msgpack.encode(Greeting(1, b"n" * 32, True))))
            assert link.receive(0.1) is None
            peer.sendall(as_frame(msgspec.msgpack.encode(Welcome(b"m" * 32))))
            with pytest.raises(
                RoomFailed, match="does not prove the secret of this server: give b"
            ):
                link.receive(10)
        link.close()


@pytest.mark.parametrize(
    "sent",
    [b"SSH-2.0-OpenSSH\r\n", b"HTTP/1.1 400 Bad Request\r\n\r\n", as_frame(b"\x81" * 2000)],
)
def test_another_kind_of_server_is_said(sent: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        link = Link(f"tcp://127.0.0.1:{listener.getsockname()[1]}", None)
        peer, _ = listener.accept()
        with peer:
            peer.sendall(sent)
            with pytest.raises(RoomFailed, match=r"is none that this release understands .* start"):
                link.receive(10)
        link.close()


@pytest.mark.parametrize("endpoint", ["", "a:1", "tcp://", "tcp://a", "http://a:1", "ipc://a:1"])
def test_an_endpoint_is_an_address(endpoint: str) -> None:
    with pytest.raises(RoomFailed, match=r"wrong endpoint: .* is not of the form tcp://HOST:PORT"):
        Link(endpoint, None)


# ---- breaks ------------------------------------------------------------------------------------


def test_a_link_connects_anew(new_echo: Callable[..., Echo], link_to: LinkTo) -> None:
    first = new_echo()
    link = link_to(first)
    link.send(b"one")
    assert link.receive(10) == b"one"
    first.close()
    assert link.receive(0.3) is None
    link.send(b"two")
    assert link.receive(0.3) is None, "nobody is there"
    echo = new_echo()
    link._address = ("127.0.0.1", echo.port)
    assert link.receive(10) == b"two", "the last message waits"


def test_nothing_blocks_while_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_client, "LINGER_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        link = Link(f"tcp://127.0.0.1:{silent.getsockname()[1]}", SECRET)
        with RunningClock() as clock:
            link.send(b"a question")
            assert link.receive(0.0) is None
            assert link.receive(0.05) is None
            link.close()
            assert clock() < 5


def test_the_last_message_leaves(echo: Echo) -> None:
    link = Link(echo.endpoint, None)
    link.send(b"goodbye")
    link.close()
    assert wait_until(lambda: echo.taken == [b"goodbye"], 60)


# ---- what a stranger can do --------------------------------------------------------------------


def test_one_connection_cannot_blind_the_others(echo: Echo, link_to: LinkTo) -> None:
    """However much one sends, each connection's turn comes, and the flood is not even read."""
    echo.keeps = True
    flooding = threading.Event()
    flooding.set()

    def flood() -> None:
        with socket.create_connection(("127.0.0.1", echo.port)) as sock:
            sock.settimeout(0.05)
            frames = as_frame(b"flood") * 1000
            while flooding.is_set():
                with contextlib.suppress(TimeoutError):
                    sock.send(frames)
                with contextlib.suppress(TimeoutError):
                    sock.recv(1 << 16)

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        assert wait_until(lambda: echo.taken.count(b"flood") > BURST, 60)
        link = link_to(echo)
        began, before = time.monotonic(), echo.taken.count(b"flood")
        while (took := time.monotonic() - began) < 1.5:
            link.send(b"a question")
            assert link.receive(10) == b"a question"
            time.sleep(0.002)
        floods = echo.taken.count(b"flood") - before
        # A loop that was late catches up, if the machine stood still by as much as it may at once.
        assert floods <= FRAMES_A_SECOND * took + FRAMES_AT_ONCE
    finally:
        flooding.clear()
        thread.join()


def test_a_stranger_is_taken_from_even_less(echo: Echo) -> None:
    """Else new connections, each with a burst of its own, would be a flood."""
    with contextlib.ExitStack() as stack:
        began = time.monotonic()
        sock = connect(stack, echo.port)
        sock.sendall(as_frame(b"x") * 1000)
        assert wait_until(lambda: len(echo.taken) > 2 * UNKEPT_FRAMES_AT_ONCE, 60)
        taken, took = len(echo.taken), time.monotonic() - began
        assert taken <= UNKEPT_FRAMES_AT_ONCE + UNKEPT_FRAMES_A_SECOND * took


def test_a_message_without_an_end_is_not_kept(echo: Echo) -> None:
    before = resident_mib()
    with contextlib.ExitStack() as stack:
        sock = connect(stack, echo.port)
        with pytest.raises(OSError, match=r"reset|Broken pipe"):
            send_for_ever(sock, struct.pack(">I", 1 << 31) + b"x" * (1 << 16))
    with contextlib.ExitStack() as stack:
        echo.is_paused = True
        sock = connect(stack, echo.port)
        sock.settimeout(0.5)
        with pytest.raises(TimeoutError):
            send_for_ever(sock, as_frame(b"x" * 60_000))
    assert resident_mib() - before < 64


def test_before_the_proof_hardly_anything_is_read(new_echo: Callable[..., Echo]) -> None:
    echo = new_echo(SECRET)
    with contextlib.ExitStack() as stack:
        sock = connect(stack, echo.port)
        opening(sock)
        sock.sendall(struct.pack(">I", MAX_PROOF_BYTES + 1))
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(1) == b""


def test_idle_connections_make_room(
    echo: Echo, link_to: LinkTo, monkeypatch: pytest.MonkeyPatch
) -> None:
    echo.listener.unkept._max_idle = 20
    echo.keeps = True
    kept = link_to(echo)
    kept.send(b"keep me")
    assert kept.receive(10) == b"keep me"
    before = open_files()
    with contextlib.ExitStack() as stack:
        idle = [connect(stack, echo.port) for _ in range(100)]
        late = link_to(echo)
        late.send(b"hello")
        assert late.receive(10) == b"hello"
        assert wait_until(lambda: len(echo.listener.peers) <= 22, 60)
        opening(idle[0])
        assert idle[0].recv(1) == b"", "the one that was silent for longest was closed"
        kept.send(b"still here")
        assert kept.receive(10) == b"still here"
    assert wait_until(lambda: open_files() <= before + 3, 60)
    assert MAX_UNKEPT >= 1000


def test_silent_connections_end(
    new_echo: Callable[..., Echo], link_to: LinkTo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_listener, "_SWEEP_S", 0.05)
    echo = new_echo(silent_s=0.5)
    echo.keeps = True
    with contextlib.ExitStack() as stack:
        silent, half = connect(stack, echo.port), connect(stack, echo.port)
        opening(silent), opening(half)
        link = link_to(echo)
        deadline = time.monotonic() + 20
        half.settimeout(0.05)
        while True:
            assert time.monotonic() < deadline
            link.send(b"alive")
            assert link.receive(10) == b"alive"
            with contextlib.suppress(TimeoutError):
                half.sendall(b"x")
                if half.recv(1) == b"":
                    break  # Parts of a frame do not count.
        assert silent.recv(1) == b""
    assert link._num_attempts == 1, "who speaks stays"


def test_a_server_that_stood_still_drops_nobody(
    new_echo: Callable[..., Echo], link_to: LinkTo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server answers messages that came during the pause."""
    monkeypatch.setattr(control_listener, "_SWEEP_S", 0.05)
    echo = new_echo(silent_s=0.5)
    link = link_to(echo)
    link.send(b"before")
    assert link.receive(10) == b"before"
    echo._loop.call_soon_threadsafe(time.sleep, 1.0)
    link.send(b"meanwhile")
    assert link.receive(10) == b"meanwhile"
    assert link._num_attempts == 1


def test_who_does_not_read_gets_no_more(echo: Echo) -> None:
    with contextlib.ExitStack() as stack:
        sock = connect(stack, echo.port)
        sock.settimeout(0.2)
        message = as_frame(b"x" * 60_000)
        for _ in range(FRAMES_A_SECOND):
            with contextlib.suppress(TimeoutError):
                sock.sendall(message)
        (peer,) = echo.listener.peers
        assert peer.transport.get_write_buffer_size() <= len(message)


def test_frames_come_whole_however_they_are_cut() -> None:
    received = bytearray()
    got = []
    for byte in as_frame(b"") + as_frame(b"abc") + as_frame(b"defgh"):
        received.append(byte)
        while (message := take_frame(received, 5)) is not None:
            got.append(message)
    assert got == [b"", b"abc", b"defgh"]
    received += as_frame(b"123456")
    with pytest.raises(FrameTooLong, match="6 bytes; at most 5"):
        take_frame(received, 5)
