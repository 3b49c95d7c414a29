"""Control connections: their frames, the handshake that opens one, and the client's end.

    server: Greeting
    client: Proof                    with a secret
    server: Welcome, or Refused      with a secret

A frame is its length, four bytes in network order, and that many bytes. All further frames are
messages of the connection's users. A client without a secret sends them without waiting for the
greeting.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
import select
import socket
import time
from typing import Annotated, Final, TypeAlias
from urllib.parse import urlsplit

import msgspec

from sglang.srt.constants import KIB, MIB
from sglang.srt.disaggregation.control.deployment_secret import (
    NONCE_BYTES,
    SOURCES,
    DeploymentSecret,
)
from sglang.srt.utils.bad_messages import MALFORMED

VERSION: Final = 1
MAX_PROOF_BYTES: Final = 256
MAX_QUESTION_BYTES: Final = 96 * KIB
"""Most bytes of a frame to the server. The longest question names some thousand rooms, and gives
reasons for 32 of them."""
MAX_ANSWER_BYTES: Final = 64 * MIB
"""Most bytes of a frame to the client; pages of a million tokens have 9 MiB."""
OF_CLIENT: Final = "client of a control connection"
OF_SERVER: Final = "server of a control connection"
"""Purposes of the proofs. Each is about both nonces, the server's first."""
_LENGTH_BYTES: Final = 4

Nonce: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
Mac: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=64)]
LINGER_S: Final = 1.0
"""Most seconds for which `ControlLink.close` waits until the last message can be sent."""
_RETRY_S: Final = 0.1
"""Seconds from the end of a connection to the next attempt."""
_READ_BYTES: Final = 64 * KIB
_SAME: Final = f"give both servers the same {SOURCES}"


class Greeting(msgspec.Struct, frozen=True, tag=True):
    """The server's first frame."""

    version: int
    nonce: Nonce
    wants_proof: bool


class Proof(msgspec.Struct, frozen=True, tag=True):
    """The client knows the secret."""

    nonce: Nonce
    mac: Mac


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The server knows the secret too, and answers questions."""

    mac: Mac


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The server answers no question of this connection."""

    reason: Annotated[str, msgspec.Meta(max_length=512)]


PROOF_DECODER: Final = msgspec.msgpack.Decoder(Proof)
OPENING_DECODER: Final = msgspec.msgpack.Decoder(Greeting | Welcome | Refused)


class FrameTooLong(ValueError):
    """A peer has announced a frame with more bytes than it may have."""


def as_frame(message: bytes) -> bytes:
    """The frame of `message`."""
    return len(message).to_bytes(_LENGTH_BYTES, "big") + message


class FrameBuffer:
    """Received bytes that were not taken yet.

    Attributes:
        max_bytes: Most bytes of a frame.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._held = bytearray()

    def add(self, part: bytes | memoryview) -> None:
        """Add the bytes that came next."""
        self._held += part

    def take(self) -> bytes | None:
        """Take the message of the next frame; None: the frame is not whole yet.

        Raises:
            FrameTooLong: It will never be.
        """
        if len(self._held) < _LENGTH_BYTES:
            return None
        length = int.from_bytes(self._held[:_LENGTH_BYTES], "big")
        if length > self.max_bytes:
            raise FrameTooLong(f"a frame of {length} bytes; at most {self.max_bytes} are read")
        end = _LENGTH_BYTES + length
        if len(self._held) < end:
            return None
        message = bytes(self._held[_LENGTH_BYTES:end])
        del self._held[:end]
        return message


class HandshakeFailed(RuntimeError):
    """The server refuses this client, or does not prove the secret. The message is one line that
    follows the server's name, and has the remedy."""


def parse_endpoint(endpoint: str) -> tuple[str, int]:
    """Host and port of `tcp://HOST:PORT`. Raises ValueError if it is no such address."""
    parts = urlsplit(endpoint)
    if parts.scheme != "tcp" or not parts.hostname or not parts.port:
        raise ValueError(f"{endpoint[:256]!r} is not of the form tcp://HOST:PORT")
    return parts.hostname, parts.port


class ControlLink:
    """A connection to a server, made anew whenever it breaks. For one thread.

    A message may get lost on the way; its sender repeats it.

    Args:
        endpoint: `tcp://HOST:PORT` of the server.
        secret: The secret that both ends prove; None: neither has one.
        waker: A non-blocking socket. When it becomes readable, it is emptied and `receive` returns.
    """

    def __init__(
        self,
        endpoint: str,
        secret: DeploymentSecret | None,
        waker: socket.socket | None = None,
    ) -> None:
        """Raises ValueError if the endpoint is no such address."""
        self._address = parse_endpoint(endpoint)
        self._secret = secret
        self._waker = waker
        self._num_attempts = 0
        self._socket: socket.socket | None = None
        self._retry_at = 0.0
        self._unsent: bytes | None = None
        """The last message, if it came before the connection was open."""
        self._connect()

    def send(self, message: bytes) -> None:
        """Send `message`, now or when the connection is open; another one takes its place then.
        Does not block."""
        if self._is_open:
            self._write(message)
        else:
            self._unsent = message

    def receive(self, timeout: float) -> bytes | None:
        """The next message, after at most `timeout` seconds; None: none has come, or the waker was
        readable.

        Raises:
            HandshakeFailed: The secrets differ, or no such server is there.
        """
        end = time.monotonic() + timeout
        while (message := self._take()) is None:
            left = end - time.monotonic()
            if not self._wait(max(left, 0.0)):
                return None
            if left <= 0.0:
                return self._take()
        return message

    def close(self) -> None:
        """Close the connection, after at most `LINGER_S` if its last message waits for it."""
        end = time.monotonic() + LINGER_S
        with contextlib.suppress(HandshakeFailed):
            while self._unsent is not None and (left := end - time.monotonic()) > 0:
                self.receive(left)
        self._break()

    def drop(self) -> None:
        """Close the connection at once."""
        self._unsent = None
        self._break()

    # --------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        self._held = FrameBuffer(MAX_ANSWER_BYTES)
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._greeting: Greeting | None = None
        self._is_connected = self._is_open = self._is_greeted = False
        try:
            found = socket.getaddrinfo(*self._address, type=socket.SOCK_STREAM)
            family, kind, protocol, _, address = found[self._num_attempts % len(found)]
            self._num_attempts += 1
            self._socket = socket.socket(family, kind, protocol)
            self._socket.setblocking(False)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._socket.connect_ex(address) not in (0, errno.EINPROGRESS):
                self._break()
        except OSError:
            self._break()

    def _break(self) -> None:
        self._retry_at = time.monotonic() + _RETRY_S
        self._is_open = False
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _wait(self, timeout: float) -> bool:
        """Wait until anything happens, for at most `timeout` seconds; False: nothing has, or the
        waker was readable."""
        poll = select.poll()
        if self._waker is not None:
            poll.register(self._waker, select.POLLIN)
        pause = max(self._retry_at - time.monotonic(), 0.0)
        if self._socket is None:
            ready = dict(poll.poll(min(pause, timeout) * 1000))
        else:
            poll.register(self._socket, select.POLLIN if self._is_connected else select.POLLOUT)
            ready = dict(poll.poll(timeout * 1000))
        if self._waker is not None and self._waker.fileno() in ready:
            with contextlib.suppress(BlockingIOError):
                while self._waker.recv(4096):
                    pass
            return False
        if self._socket is None:
            if pause <= timeout:
                self._connect()
            return pause <= timeout
        if not ready:
            return False
        if self._is_connected:
            self._read()
        elif self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._break()
        else:
            self._is_connected = True
            if self._secret is None:
                self._open()
        return True

    def _read(self) -> None:
        assert self._socket is not None
        try:
            part = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        if part:
            self._held.add(part)
        else:
            self._break()

    def _open(self) -> None:
        """Messages may be sent from now on. Send the one that waits."""
        self._is_open = True
        message, self._unsent = self._unsent, None
        if message is not None:
            self._write(message)

    def _write(self, message: bytes) -> None:
        assert self._socket is not None
        frame = as_frame(message)
        try:
            sent = self._socket.send(frame)
        except BlockingIOError:
            return  # The server does not read. The message is repeated.
        except OSError:
            sent = 0
        if sent < len(frame):
            self._break()

    def _take(self) -> bytes | None:
        """The next message that has come."""
        try:
            while (message := self._held.take()) is not None:
                if self._is_greeted:
                    return message
                self._shake_hands(message)
        except (FrameTooLong, *MALFORMED) as error:
            raise self._handshake_failed(
                f"is none that this release understands ({error}): start both servers with the "
                "same release"
            ) from error
        return None

    def _handshake_failed(self, why: str) -> HandshakeFailed:
        self._unsent = None  # It would never be sent.
        self._break()
        return HandshakeFailed(why)

    def _shake_hands(self, message: bytes) -> None:
        """Take the next step of the handshake.

        Raises:
            HandshakeFailed: It fails.
        """
        step = OPENING_DECODER.decode(message)
        if isinstance(step, Refused):
            raise self._handshake_failed(f"refuses this server, which {step.reason}")
        if isinstance(step, Greeting):
            self._greeting = step
            if self._secret is None:
                self._is_greeted = not step.wants_proof  # Else a refusal follows.
            elif step.wants_proof:
                mac = self._secret.proof(OF_CLIENT, step.nonce, self._nonce)
                self._write(msgspec.msgpack.encode(Proof(self._nonce, mac)))
            else:
                raise self._handshake_failed(f"has no secret, and this server has one: {_SAME}")
            return
        nonce = b"" if self._greeting is None else self._greeting.nonce
        if self._secret is None or not self._secret.is_proof(
            step.mac, OF_SERVER, nonce, self._nonce
        ):
            raise self._handshake_failed(f"does not prove the secret of this server: {_SAME}")
        self._is_greeted = True
        self._open()
