"""Messages between the engine and its compile process: a length, then msgpack, over two pipes."""

from __future__ import annotations

import os
import select
import struct
import time
from typing import Final, TypeVar

import msgspec

from sglang.srt.constrained.constraint import ConstraintKind
from sglang.srt.constrained.limits import GrammarLimits
from sglang.srt.constrained.vocabulary import Vocabulary

_LENGTH: Final = struct.Struct("<I")

T = TypeVar("T")


class Hello(msgspec.Struct, frozen=True):
    """First message to the process."""

    vocabulary: Vocabulary
    limits: GrammarLimits
    any_whitespace: bool


class Task(msgspec.Struct, frozen=True):
    """A later message to the process: a constraint to try. Without a kind: stop the trial, if one
    runs. Each trial has one answer, also if it is stopped."""

    kind: ConstraintKind | None = None
    text: str = ""


class Verdict(msgspec.Struct, frozen=True):
    """An answer to a `Task` or to `Hello`. `error` is None on success."""

    error: str | None = None
    has_died: bool = False
    """The trial ended without an answer, by itself or because it was stopped."""


HELLO_DECODER: Final = msgspec.msgpack.Decoder(Hello)
TASK_DECODER: Final = msgspec.msgpack.Decoder(Task)
VERDICT_DECODER: Final = msgspec.msgpack.Decoder(Verdict)


class FrameTimeout(Exception):
    """The deadline passed before a whole message arrived."""


def write_frame(fd: int, message: msgspec.Struct) -> None:
    """Send one message; blocks while the pipe is full.

    Raises:
        OSError: The other end is closed.
    """
    body = msgspec.msgpack.encode(message)
    rest = memoryview(_LENGTH.pack(len(body)) + body)
    while rest:
        rest = rest[os.write(fd, rest) :]


def wait_readable(*fds: int, seconds: float | None = None) -> set[int]:
    """Wait up to `seconds` for a message or the end of a pipe; None waits for ever.

    Returns:
        The readable file descriptors; empty after a timeout.
    """
    poller = select.poll()
    for fd in fds:
        poller.register(fd, select.POLLIN)
    return {fd for fd, _ in poller.poll(None if seconds is None else seconds * 1000)}


def read_frame(fd: int, decoder: msgspec.msgpack.Decoder[T], deadline: float | None = None) -> T:
    """Receive one message.

    Args:
        fd: The reading end of a pipe.
        decoder: The decoder of the expected message.
        deadline: `time.monotonic()` seconds; None waits for ever.

    Raises:
        EOFError: The other end is closed.
        FrameTimeout: The deadline passed.
    """
    (length,) = _LENGTH.unpack(_read_exactly(fd, _LENGTH.size, deadline))
    return decoder.decode(_read_exactly(fd, length, deadline))


def _read_exactly(fd: int, count: int, deadline: float | None) -> bytes:
    parts = bytearray()
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    while len(parts) < count:
        if deadline is not None:
            left = deadline - time.monotonic()
            if left <= 0 or not poller.poll(left * 1000):
                raise FrameTimeout
        chunk = os.read(fd, min(count - len(parts), 1 << 20))
        if not chunk:
            raise EOFError("the other end of the pipe is closed")
        parts += chunk
    return bytes(parts)
