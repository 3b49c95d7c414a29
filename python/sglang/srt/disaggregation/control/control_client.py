"""The decode server's end of control connections: a client that asks, repeats, and times out."""

from __future__ import annotations

import contextlib
import errno
import logging
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Final, TypeVar
from urllib.parse import urlsplit

import msgspec

from sglang.srt.constants import KIB
from sglang.srt.disaggregation.base.deployment_secret import (
    NONCE_BYTES,
    SOURCES,
    DeploymentSecret,
)
from sglang.srt.disaggregation.base.timeouts import Timeouts
from sglang.srt.disaggregation.control.frames import (
    MAX_ANSWER_BYTES,
    OF_CLIENT,
    OF_SERVER,
    OPENING_DECODER,
    FrameTooLong,
    Greeting,
    Proof,
    Refused,
    as_frame,
    take_frame,
)
from sglang.srt.disaggregation.control.protocol import (
    ANSWERED_DECODER,
    Answer,
    Asked,
    KVLayout,
    Packed,
    Question,
    Released,
    RoomsStatus,
    RoomStatus,
)
from sglang.srt.utils.bad_messages import MALFORMED
from sglang.srt.utils.network import can_connect

logger = logging.getLogger(__name__)

REPEAT_S: Final = 1.0
"""Seconds without an answer after which a question is repeated; fewer if `silence` is short."""
POLL_S: Final = 0.1
"""Seconds within which an abort is noticed."""
MAX_SPARE: Final = 16
"""Most open connections of a prefill server that wait for the next prompt."""
LINGER_S: Final = 1.0
"""Most seconds for which `ControlClient.close` waits until the last message can be sent."""
_RETRY_S: Final = 0.1
"""Seconds from the end of a connection to the next attempt."""
_READ_BYTES: Final = 64 * KIB
_SAME: Final = f"give both servers the same {SOURCES}"
_A = TypeVar("_A", KVLayout, RoomsStatus, RoomStatus, Packed, Released)


class RoomFailed(RuntimeError):
    """The prompt cannot be received; the message names the failed step and the reason."""


class NotAnswered(RoomFailed):
    """The prefill server has not answered in time."""


class Replaced(RoomFailed):
    """Another instance answers at the prefill server's address."""


def incompatible(where: str, refusal: str) -> RoomFailed:
    """The error for servers of a pair that do not fit each other."""
    return RoomFailed(f"the prefill server at {where} cannot serve this one: {refusal}")


def repeat_s(timeouts: Timeouts) -> float:
    """Seconds for an answer before a question is repeated."""
    return min(REPEAT_S, timeouts.silence / 4)


def parse_endpoint(endpoint: str) -> tuple[str, int]:
    """Host and port of `tcp://HOST:PORT`. Raises ValueError if it is no such address."""
    parts = urlsplit(endpoint)
    if parts.scheme != "tcp" or not parts.hostname or not parts.port:
        raise ValueError(f"{endpoint[:256]!r} is not of the form tcp://HOST:PORT")
    return parts.hostname, parts.port


def accepts_connections(endpoint: str) -> bool:
    """True if connections to an endpoint are accepted. One may be lost on a busy host."""
    address = parse_endpoint(endpoint)
    return any(can_connect(*address) for _ in range(2))


class ControlClient:
    """Questions to one prefill rank, one at a time, over a connection that is made anew whenever it
    breaks. For one thread.

    A message may get lost on the way; it is repeated.

    Args:
        instance_id: The instance that has to answer.
        secret: The secret that both ends prove; None: neither has one.
        waker: Socket that does not block. Any byte to it ends the wait for an answer, now or the
            next one.
        why_cancelled: Reason why the answers are not wanted any more, or None.

    Attributes:
        layout: Layout of the instance, once a user of the client has asked for it, and can read it.
    """

    def __init__(
        self,
        endpoint: str,
        instance_id: str,
        secret: DeploymentSecret | None,
        timeouts: Timeouts,
        *,
        waker: socket.socket | None = None,
        why_cancelled: Callable[[], str | None] = lambda: None,
    ) -> None:
        """Raises RoomFailed: `endpoint` is not `tcp://HOST:PORT`."""
        try:
            self._address = parse_endpoint(endpoint)
        except ValueError as error:
            raise RoomFailed(f"the prefill server has a wrong endpoint: {error}") from None
        self.layout: KVLayout | None = None
        self.endpoint = endpoint
        self.instance_id = instance_id
        self._secret = secret
        self._timeouts = timeouts
        self._waker = waker
        self._why_cancelled = why_cancelled
        self._repeat_s = repeat_s(timeouts)
        self._number = 0
        self._heard = time.monotonic()
        """Time of the prefill server's last answer, or of the first question."""
        self._sent = 0.0
        self._overdue: float | None = None
        """Time at which the limit for an answer was first seen to be over; None: it is not."""
        self._num_attempts = 0
        self._socket: socket.socket | None = None
        self._retry_at = 0.0
        self._unsent: bytes | None = None
        """Message that waits until the connection is open; another one takes its place."""
        self._connect()

    def resume(self, why_cancelled: Callable[[], str | None]) -> bool:
        """Begin to ask for another prompt. False: the connection is closed, or will be soon."""
        self._why_cancelled = why_cancelled
        if time.monotonic() >= self._heard + self._timeouts.silence / 2:
            return False  # The server closes those that are silent for long.
        with contextlib.suppress(RoomFailed):
            while self._receive(0.0) is not None:
                pass  # A late answer to the last prompt.
        return self._is_open

    def ask(self, question: Question, kind: type[_A]) -> _A:
        """Ask, and repeat the question until there is an answer of type `kind`. Raises RoomFailed
        if there is no answer in time, another instance answers, or the room was cancelled."""
        self.begin(question)
        while (answer := self.keep_alive(question, kind, POLL_S)) is None:
            pass
        return answer

    def begin(self, question: Question) -> None:
        """Ask, without waiting. All questions until the next `begin` are one question with growing
        progress of the asker: an answer to any of them counts."""
        self._number += 1
        self._heard, self._overdue = time.monotonic(), None
        self.advance(question)

    def advance(self, question: Question) -> None:
        """Send the last question with the asker's new progress, at once, or when the connection is
        open. Does not block."""
        message = msgspec.msgpack.encode(Asked(self._number, question))
        if self._is_open:
            self._write(message)
        else:
            self._unsent = message
        self._sent = time.monotonic()

    def keep_alive(self, question: Question, kind: type[_A], timeout: float = 0.0) -> _A | None:
        """Repeat the question if it is due, and wait at most `timeout` seconds for an answer to it
        or to an earlier one. Raises RoomFailed like `ask`; its time limit begins with the last
        answer. An answer that is there counts, however late it is looked at: this server may have
        stood still."""
        if (why := self._why_cancelled()) is not None:
            raise RoomFailed(why)
        now = time.monotonic()
        if now >= self._heard + self._timeouts.silence:
            if self._overdue is None:
                self._overdue = now
            elif now >= self._overdue + POLL_S:
                raise NotAnswered(
                    f"the prefill server at {self.endpoint} has not answered for "
                    f"{self._timeouts.silence:g} s"
                )
        if now >= self._sent + self._repeat_s:
            self.advance(question)
        answer = self.receive_answer(timeout)
        return answer if isinstance(answer, kind) else None

    def receive_answer(self, timeout: float) -> Answer | None:
        """The answer to the last question, after at most `timeout` seconds; None: none has come.
        Raises RoomFailed if another instance answers, or the server refuses this client."""
        raw = self._receive(timeout)
        if raw is None:
            return None
        try:
            message = ANSWERED_DECODER.decode(raw)
        except MALFORMED as error:
            logger.warning("a bad message of the prefill server at %s: %s", self.endpoint, error)
            return None
        if self.instance_id != message.instance_id:
            raise Replaced("the prefill server was replaced by another instance")
        self._heard, self._overdue = time.monotonic(), None
        return message.answer if message.number == self._number else None

    def close(self, until: float | None = None) -> None:
        """Close the connection. Its last message may wait for it until a time by
        `time.monotonic`, or `LINGER_S` from now."""
        end = time.monotonic() + LINGER_S if until is None else until
        with contextlib.suppress(RoomFailed):
            while self._unsent is not None and (left := end - time.monotonic()) > 0:
                self._receive(left)
        self._break()

    def drop(self) -> None:
        self._unsent = None
        self._break()

    # -- the connection --------------------------------------------------------------------------

    def _receive(self, timeout: float) -> bytes | None:
        """The next message, after at most `timeout` seconds; None: none has come, or the waker was
        woken. Raises RoomFailed if the secrets differ, or no such server is there."""
        end = time.monotonic() + timeout
        while (message := self._take()) is None:
            left = end - time.monotonic()
            if not self._wait(max(left, 0.0)):
                return None
            if left <= 0.0:
                return self._take()
        return message

    def _connect(self) -> None:
        self._received = bytearray()
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
                while self._waker.recv(_READ_BYTES):
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
            self._received += part
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
            while (message := take_frame(self._received, MAX_ANSWER_BYTES)) is not None:
                if self._is_greeted:
                    return message
                self._shake_hands(message)
        except (FrameTooLong, *MALFORMED) as error:
            raise self._handshake_failed(
                f"is none that this release understands ({error}): start both servers with the "
                "same release"
            ) from error
        return None

    def _handshake_failed(self, why: str) -> RoomFailed:
        """The error for a server that refuses this client, or does not prove the secret. `why` has
        the remedy."""
        self._unsent = None  # The message will never be sent.
        self._break()
        return RoomFailed(f"the prefill server at {self.endpoint} {why}")

    def _shake_hands(self, message: bytes) -> None:
        """Take the next step of the handshake. Raises RoomFailed."""
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


class ClientPool:
    """Clients of a prefill server's ranks, each lent to one prompt. Any thread.

    The open ones that no prompt uses wait for the next prompt, at most `MAX_SPARE`.
    """

    def __init__(self, secret: DeploymentSecret | None, timeouts: Timeouts) -> None:
        self._secret = secret
        self._timeouts = timeouts
        self._spare: list[ControlClient] = []
        """The one that waits for longest comes first: those that wait for too long are closed."""
        self._is_open = False
        self._lock = threading.Lock()

    def lend(
        self, endpoint: str, instance_id: str, why_cancelled: Callable[[], str | None]
    ) -> ControlClient:
        """A client for the caller alone until it closes it, or gives it back. Raises RoomFailed if
        the endpoint is no address. See `ControlClient`."""
        peer = endpoint, instance_id
        while True:
            with self._lock:
                fit = [one for one in self._spare if (one.endpoint, one.instance_id) == peer]
                if not fit:
                    break
                self._spare.remove(fit[0])
            if fit[0].resume(why_cancelled):
                return fit[0]
            fit[0].drop()
        return ControlClient(
            endpoint, instance_id, self._secret, self._timeouts, why_cancelled=why_cancelled
        )

    def give_back(self, client: ControlClient) -> None:
        """Keep a client for the next prompt. All its questions are answered."""
        with self._lock:
            keeps = self._is_open and len(self._spare) < MAX_SPARE
            if keeps:
                self._spare.append(client)
        if not keeps:
            client.drop()

    def open(self) -> None:
        """Keep clients from now on."""
        self._is_open = True

    def close(self) -> None:
        """Keep none from now on."""
        with self._lock:
            self._is_open = False
            spare, self._spare = self._spare, []
        for client in spare:
            client.drop()
