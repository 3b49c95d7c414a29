"""Questions of a decode server to a prefill server, with time limits for the answers."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

import msgspec

from sglang.srt.disaggregation.common.protocol import (
    ANSWERED_DECODER,
    Answer,
    Asked,
    BootstrapStatus,
    KVLayout,
    Packed,
    Question,
    Released,
    RoomStatus,
)
from sglang.srt.disaggregation.control.control_link import (
    ControlLink,
    DeploymentSecret,
    HandshakeFailed,
)
from sglang.srt.environ import EnvField, envs
from sglang.srt.utils.bad_messages import MALFORMED

logger = logging.getLogger(__name__)

REPEAT_S: Final = 1.0
"""Seconds without an answer after which a question is repeated; fewer if `silence` is short."""
POLL_S: Final = 0.1
"""Seconds within which an abort is noticed."""
_T = TypeVar("_T")
_A = TypeVar("_A", KVLayout, BootstrapStatus, RoomStatus, Packed, Released)


class RoomFailed(RuntimeError):
    """The prompt cannot be received; the message names the failed step and the reason."""


class NotAnswered(RoomFailed):
    """The prefill server has not answered in time."""


class Replaced(RoomFailed):
    """Another instance answers at the prefill server's address."""


def take_within(
    timeout: float, take: Callable[[float], _T | None], heartbeat: Callable[[], None], what: str
) -> _T:
    """The first thing that `take` gives within `timeout` seconds. Calls `heartbeat` meanwhile.
    Raises RoomFailed if there is none."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if (taken := take(POLL_S)) is not None:
            return taken
        heartbeat()
    raise RoomFailed(f"no {what} was free in {timeout:g} s")


def incompatible(where: str, refusal: str) -> RoomFailed:
    """The error for servers of a pair that do not fit each other."""
    return RoomFailed(f"the prefill server at {where} cannot serve this one: {refusal}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Time limits of a room, in seconds."""

    bootstrap: float
    """Time until the prefill server knows the room, from its first answer that it does not."""
    waiting: float
    """Time until the next pages, once the prefill server knows the room."""
    silence: float
    """Time until any answer of the prefill server."""

    @classmethod
    def from_environment(cls) -> Timeouts:
        """The time limits of this process. Raises ValueError if one is not positive."""
        return cls(
            bootstrap=seconds(envs.SGLANG_DISAGGREGATION_UNKNOWN_ROOM_TIMEOUT),
            waiting=seconds(envs.SGLANG_DISAGGREGATION_WAITING_TIMEOUT),
            silence=silence_s(),
        )

    @property
    def repeat(self) -> float:
        """Seconds for an answer before a question is repeated."""
        return min(REPEAT_S, self.silence / 4)


def seconds(field: EnvField[int]) -> int:
    """The value of a time limit in the environment. Raises ValueError if the value is not
    positive."""
    value = field.get()
    if value < 1:
        raise ValueError(f"environment variable {field.name}={value}: it must be at least 1")
    return value


def silence_s() -> int:
    """Seconds without a message after which the other server counts as gone."""
    interval = seconds(envs.SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL)
    return interval * seconds(envs.SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE)


class ControlConnection(ControlLink):
    """Questions to one prefill server, one at a time, over a link of its own.

    Args:
        instance_id: The instance that has to answer.
        why_cancelled: Reason why the answers are not wanted any more, or None.
    """

    def __init__(
        self,
        endpoint: str,
        secret: DeploymentSecret | None,
        timeouts: Timeouts,
        instance_id: str,
        *,
        waker: socket.socket | None = None,
        why_cancelled: Callable[[], str | None] = lambda: None,
    ) -> None:
        """Raises RoomFailed if the endpoint is no such address."""
        self._endpoint = endpoint
        self._timeouts = timeouts
        self._why_cancelled = why_cancelled
        self._number = 0
        self._heard = time.monotonic()
        """Time of the prefill server's last answer, or of the first question."""
        self._sent = 0.0
        self._overdue: float | None = None
        """Time at which the limit for an answer was first seen to be over; None: it is not."""
        self._instance_id = instance_id
        try:
            super().__init__(endpoint, secret, waker)
        except ValueError as error:
            raise RoomFailed(f"the prefill server has a wrong endpoint: {error}") from None

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
        self._note_heard()
        self.advance(question)

    def advance(self, question: Question) -> None:
        """Send the last question with the asker's new progress, at once."""
        self.send(msgspec.msgpack.encode(Asked(self._number, question)))
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
                    f"the prefill server at {self._endpoint} has not answered for "
                    f"{self._timeouts.silence:g} s"
                )
        if now >= self._sent + self._timeouts.repeat:
            self.advance(question)
        answer = self.receive_answer(timeout)
        return answer if isinstance(answer, kind) else None

    def receive_answer(self, timeout: float) -> Answer | None:
        """The answer to the last question, after at most `timeout` seconds; None: none has come.
        Raises RoomFailed if another instance answers, or the server refuses this client."""
        try:
            raw = self.receive(timeout)
        except HandshakeFailed as error:
            raise RoomFailed(f"the prefill server at {self._endpoint} {error}") from None
        if raw is None:
            return None
        try:
            message = ANSWERED_DECODER.decode(raw)
        except MALFORMED as error:
            logger.warning("a bad message of the prefill server at %s: %s", self._endpoint, error)
            return None
        if self._instance_id != message.instance_id:
            raise Replaced("the prefill server was replaced by another instance")
        self._note_heard()
        return message.answer if message.number == self._number else None

    def _note_heard(self) -> None:
        self._heard = time.monotonic()
        self._overdue = None
