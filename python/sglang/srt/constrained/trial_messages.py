"""Messages between the engine and its compile process: msgpack over a pipe, never pickle."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Final, TypeVar

import msgspec

from sglang.srt.constrained.constraint import ConstraintKind
from sglang.srt.constrained.limits import GrammarLimits
from sglang.srt.constrained.vocabulary import Vocabulary

T = TypeVar("T")


class Hello(msgspec.Struct, frozen=True):
    """First message to the process."""

    vocabulary: Vocabulary
    limits: GrammarLimits
    any_whitespace: bool


class Task(msgspec.Struct, frozen=True):
    """Each later message to the process: a constraint to try, or, without a kind, the order to stop
    the trial that runs. Each trial has one answer, even if it is stopped."""

    kind: ConstraintKind | None = None
    text: str = ""


class TrialResult(msgspec.Struct, frozen=True):
    """An answer to a `Task` or to `Hello`. `error` is None on success."""

    error: str | None = None
    has_died: bool = False
    """The trial ended without an answer, by itself or because it was stopped."""


HELLO_DECODER: Final = msgspec.msgpack.Decoder(Hello)
TASK_DECODER: Final = msgspec.msgpack.Decoder(Task)
RESULT_DECODER: Final = msgspec.msgpack.Decoder(TrialResult)


def send(pipe: Connection, message: msgspec.Struct) -> None:
    """Send one message; blocks while the pipe is full.

    Raises:
        OSError: The other end is closed.
    """
    pipe.send_bytes(msgspec.msgpack.encode(message))


def receive(
    pipe: Connection, decoder: msgspec.msgpack.Decoder[T], seconds: float | None = None
) -> T:
    """Receive one message.

    Args:
        decoder: The decoder of the expected message.
        seconds: Longest time until the message; None waits for ever.

    Raises:
        EOFError: The other end is closed.
        TimeoutError: No message came in time.
    """
    if not pipe.poll(seconds):
        raise TimeoutError
    return decoder.decode(pipe.recv_bytes())
