"""Rank 0's channel: a tick gets the messages that are there, and waits for the first alone."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import zmq

from sglang.srt.messages.io_struct import AbortReq, Message, encode, frame_of
from sglang.srt.messages.ipc import IpcAddresses, make_ipc_directory
from sglang.srt.process.run import ZmqChannel
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")

LONG_MS = 60_000


@pytest.fixture(name="ends")
def _ends() -> Iterator[tuple[ZmqChannel, zmq.Socket[bytes]]]:
    """The channel, and the server's end."""
    directory = make_ipc_directory()
    ipc = IpcAddresses(directory.path)
    channel, context = ZmqChannel(ipc), zmq.Context[zmq.Socket[bytes]]()
    sink = context.socket(zmq.PUSH)
    sink.connect(ipc.scheduler_input())
    yield channel, sink
    sink.close(linger=0)
    context.term()
    channel.close()
    directory.remove()


def frame(*names: str) -> bytes:
    return frame_of([encode(AbortReq(rid=name)) for name in names])


def names_of(messages: list[Message]) -> list[str]:
    return [message.rid for message in messages if isinstance(message, AbortReq)]


def test_only_the_first_message_is_waited_for(ends: tuple[ZmqChannel, zmq.Socket[bytes]]) -> None:
    channel, sink = ends
    assert channel.receive(0) == channel.receive(1) == []
    sink.send(frame("a", "b"))
    began = time.monotonic()
    assert names_of([*channel.receive(LONG_MS)]) == ["a", "b"]
    assert time.monotonic() - began < LONG_MS / 2e3


def test_all_frames_that_are_there_come_in_order_but_the_bad_ones(
    ends: tuple[ZmqChannel, zmq.Socket[bytes]],
) -> None:
    channel, sink = ends
    for one in (frame("a"), b"no message", frame("b", "c"), frame("d")):
        sink.send(one)
    came: list[str] = []
    while len(came) < 4:
        came += names_of([*channel.receive(LONG_MS)])
    assert came == ["a", "b", "c", "d"]
    assert channel.receive(0) == []
