"""The server's end of the engine's sockets: what comes is passed on, all of it and in order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
import zmq

from sglang.srt.managers.tokenizer.generate_request import EngineUnavailable
from sglang.srt.managers.tokenizer.server_channel import ServerChannel
from sglang.srt.messages.io_struct import ControlReqOutput, ToServer, encode
from sglang.srt.messages.ipc import IpcAddresses, make_ipc_directory
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")


@dataclass
class Engine:
    """The engine's end, and what the channel has received and reported."""

    sink: zmq.Socket[bytes]
    channel: ServerChannel
    came: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def send(self, *names: str) -> None:
        for name in names:
            self.sink.send(encode(ControlReqOutput(req_id=name, success=True)))

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                await asyncio.sleep(0.001)


@asynccontextmanager
async def engine(handle: Callable[[str], None] = lambda name: None) -> AsyncIterator[Engine]:
    """An open channel; `handle` gets each message's name after it was noted."""
    directory = make_ipc_directory()
    ipc = IpcAddresses(directory.path)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sink = context.socket(zmq.PUSH)
    sink.connect(ipc.server_input)

    def on_message(message: ToServer) -> None:
        assert isinstance(message, ControlReqOutput)
        one.came.append(message.req_id)
        handle(message.req_id)

    one = Engine(sink, ServerChannel(ipc, on_message, lambda reason: one.failures.append(reason)))
    try:
        await one.channel.start()
        yield one
        await one.channel.close()
    finally:
        sink.close(linger=0)
        context.term()
        directory.remove()


def test_messages_that_wait_for_a_busy_loop_come_all_and_in_order() -> None:
    async def run() -> None:
        async with engine() as one:
            rounds = [[f"{number}-{index}" for index in range(300)] for number in range(3)]
            for count, names in enumerate(rounds, start=1):
                one.send(*names)
                await one.until(lambda count=count: len(one.came) == 300 * count)  # type: ignore[misc]
            assert one.came == [name for names in rounds for name in names]

    asyncio.run(run())


def test_messages_that_come_one_by_one_wake_the_loop_each_time() -> None:
    async def run() -> None:
        async with engine() as one:
            for number in range(200):
                one.send(str(number))
                await one.until(lambda number=number: len(one.came) == number + 1)  # type: ignore[misc]

    asyncio.run(run())


def test_a_message_that_nothing_can_handle_ends_the_reading_and_is_told() -> None:
    def handle(name: str) -> None:
        if name == "bad":
            raise KeyError(name)

    async def run() -> None:
        async with engine(handle) as one:
            one.send("good", "bad", "never")
            await one.until(lambda: bool(one.failures))
            assert one.came == ["good", "bad"]
            assert len(one.failures) == 1 and "failed to read" in one.failures[0]
            await asyncio.sleep(0)
            assert one.came == ["good", "bad"], "the loop does not watch the socket any more"

    asyncio.run(run())


def test_a_closed_channel_reads_and_sends_nothing() -> None:
    async def run() -> None:
        async with engine() as one:
            await one.channel.close()
            assert not one.channel.is_open
            with pytest.raises(EngineUnavailable, match="shut down"):
                one.channel.send(ControlReqOutput(req_id="x", success=True))
            await one.channel.close()

    asyncio.run(run())
