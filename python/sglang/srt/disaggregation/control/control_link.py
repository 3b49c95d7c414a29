"""Control connections: the secret, frames, the handshake that opens one, and the client's end.

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
import hashlib
import hmac
import secrets
import select
import socket
import time
from typing import Annotated, Final, TypeAlias
from urllib.parse import urlsplit

import msgspec

from sglang.srt.constants import KIB, MIB
from sglang.srt.utils.bad_messages import MALFORMED

SOURCES: Final = "--disaggregation-secret-file or SGLANG_DISAGGREGATION_SECRET"
"""The settings that give a server its secret, for errors."""
NONCE_BYTES: Final = 32
_SALT: Final = b"sglang deployment secret"
_ROUNDS: Final = 100_000
"""Makes guessing a secret from a proof slow; 0.05 s at the start."""
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


class DeploymentSecret:
    """The secret that all prefill and decode servers of a deployment have: proofs that their maker
    knows it. The secret itself is never sent. Any thread."""

    def __init__(self, text: str) -> None:
        self._key = hashlib.pbkdf2_hmac("sha256", text.encode(), _SALT, _ROUNDS)

    @classmethod
    def of(cls, text: str | None) -> DeploymentSecret | None:
        return None if text is None else cls(text)

    def proof(self, purpose: str, *parts: bytes) -> bytes:
        """32 bytes that only holders of the secret can compute.

        Args:
            purpose: Names the kind of proof, so that no proof passes for another kind.
            parts: What the proof is about. A nonce of the other side makes it a new one.
        """
        mac = hmac.new(self._key, digestmod=hashlib.sha256)
        for part in (purpose.encode(), *parts):
            mac.update(len(part).to_bytes(8, "big") + part)
        return mac.digest()

    def is_proof(self, given: bytes, purpose: str, *parts: bytes) -> bool:
        """True if `given` is `proof(purpose, *parts)`. Takes the same time for each wrong one."""
        return hmac.compare_digest(given, self.proof(purpose, *parts))

    def is_hex_proof(self, given: str, purpose: str, *parts: bytes) -> bool:
        """Like `is_proof`, for a proof in hex digits, or any other text."""
        try:
            return self.is_proof(bytes.fromhex(given), purpose, *parts)
        except ValueError:
            return False


class Greeting(msgspec.Struct, frozen=True, tag=True):
    version: int
    nonce: Nonce
    wants_proof: bool


class Proof(msgspec.Struct, frozen=True, tag=True):
    nonce: Nonce
    mac: Mac


class Welcome(msgspec.Struct, frozen=True, tag=True):
    mac: Mac


class Refused(msgspec.Struct, frozen=True, tag=True):
    reason: Annotated[str, msgspec.Meta(max_length=512)]


PROOF_DECODER: Final = msgspec.msgpack.Decoder(Proof)
OPENING_DECODER: Final = msgspec.msgpack.Decoder(Greeting | Welcome | Refused)


class FrameTooLong(ValueError):
    """A peer has announced a frame with more bytes than it may have."""


def as_frame(message: bytes) -> bytes:
    return len(message).to_bytes(_LENGTH_BYTES, "big") + message


class FrameBuffer:
    """Received bytes that were not taken yet; frames have at most `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._held = bytearray()

    def add(self, part: bytes | memoryview) -> None:
        self._held += part

    def take(self) -> bytes | None:
        """Take the message of the next frame; None: the frame is not whole yet. Raises FrameTooLong
        if it will never be whole."""
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
        secret: The secret that both ends prove; None: neither has one.
        waker: A non-blocking socket. When it becomes readable, it is emptied and `receive` returns.
    """

    def __init__(
        self, endpoint: str, secret: DeploymentSecret | None, waker: socket.socket | None = None
    ) -> None:
        """Raises ValueError if the endpoint is no such address."""
        self._address = parse_endpoint(endpoint)
        self._secret = secret
        self._waker = waker
        self._num_attempts = 0
        self._socket: socket.socket | None = None
        self._retry_at = 0.0
        self._unsent: bytes | None = None
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
        readable. Raises HandshakeFailed if the secrets differ, or no such server is there."""
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
        self._unsent = None
        self._break()

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
        """Take the next step of the handshake. Raises HandshakeFailed."""
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
