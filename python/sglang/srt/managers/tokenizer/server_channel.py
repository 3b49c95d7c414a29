"""The server process's two sockets, and control requests, whose answers are matched by id."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable
from typing import Final

import zmq

from sglang.srt.constants import LONGEST_STORAGE_CHANGE_S
from sglang.srt.managers.tokenizer.generate_request import EngineUnavailable
from sglang.srt.messages.io_struct import (
    SERVER_DECODER,
    ControlReq,
    ControlReqOutput,
    Message,
    ToServer,
    encode,
    frame_of,
)
from sglang.srt.messages.ipc import IpcAddresses, pull_socket, push_socket
from sglang.srt.utils.bad_messages import MALFORMED, BadMessages

logger = logging.getLogger(__name__)

QUICK_TIMEOUT: Final = 10.0
"""Seconds for control requests that the scheduler answers between two forwards."""
STORAGE_TIMEOUT: Final = LONGEST_STORAGE_CHANGE_S + 20.0
"""Seconds for changes of L3: connecting and registering memory takes a while."""


class ControlClient:
    """Sends control requests through `send` and waits for their answers."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send
        self._waiting: dict[str, asyncio.Future[ControlReqOutput]] = {}

    def deliver(self, answer: ControlReqOutput) -> None:
        """Hand an answer to the caller that waits for it; a late answer is dropped."""
        future = self._waiting.get(answer.req_id)
        if future is not None and not future.done():
            future.set_result(answer)

    def fail_all(self, error: Exception) -> None:
        """End all pending control requests with `error`: no answer will come any more."""
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)

    async def ask(self, message: ControlReq, timeout: float = QUICK_TIMEOUT) -> ControlReqOutput:
        """Send `message` with a fresh id, and wait for the answer. Raises EngineUnavailable if none
        comes within `timeout` seconds, or the engine died."""
        message.req_id = req_id = uuid.uuid4().hex
        future: asyncio.Future[ControlReqOutput] = asyncio.get_running_loop().create_future()
        self._waiting[req_id] = future
        try:
            self._send(message)
            return await asyncio.wait_for(future, timeout)
        except TimeoutError:
            raise EngineUnavailable(
                f"the scheduler did not answer {type(message).__name__} within {timeout:g} s: "
                "it is busy or stuck, see its log; try again"
            ) from None
        finally:
            del self._waiting[req_id]


class ServerChannel:
    """Sends the messages of one turn of the event loop in one frame, and reads when a socket wakes
    the loop.

    The sockets are plain ones, and neither waits. `zmq.asyncio` would need another future, task and
    turn of the loop for each message.

    Only the event loop that called `start` may use it, except for `call_soon_threadsafe`.
    """

    def __init__(
        self,
        ipc: IpcAddresses,
        on_message: Callable[[ToServer], None],
        on_failure: Callable[[str], None],
    ) -> None:
        """Nothing is opened before `start`. `on_message` gets each message, and ends the reading if
        it raises; `on_failure` gets the reason why no further message will come."""
        self._ipc = ipc
        self._on_message = on_message
        self._on_failure = on_failure
        self._bad = BadMessages(logger, "message")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._source: zmq.Socket[bytes] | None = None
        self._sink: zmq.Socket[bytes] | None = None
        self._outbox: list[bytes] = []
        """Encoded messages for the scheduler, until `_flush`."""

    @property
    def is_open(self) -> bool:
        """True if `send` may be called."""
        return self._sink is not None

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        self._source = pull_socket(self._context, self._ipc.server_input)
        self._sink = push_socket(self._context, self._ipc.scheduler_input)
        self._loop.add_reader(self._source.fileno(), self._read)
        self._read()  # Messages that came before the loop watched do not wake it.

    async def close(self) -> None:
        """Send the remaining messages and close the sockets. Idempotent."""
        self._stop_reading()
        self._flush()
        if self._context is not None:
            # A little time for the last message; the peer may be gone already.
            if self._sink is not None:
                self._sink.close(linger=200)
            self._context.destroy(linger=200)
            self._context = None
            self._sink = None

    def send(self, message: Message) -> None:
        """Let `message` leave at the end of this turn of the event loop.

        The messages of one turn go together: one wake-up of the scheduler, and one prefill batch
        for requests that came together.

        Raises:
            EngineUnavailable: The channel is not open.
        """
        if self._loop is None or self._sink is None:
            raise EngineUnavailable("the engine has been shut down")
        # Encoded here, so that a message that cannot be encoded fails only its sender.
        encoded = encode(message)
        if not self._outbox:
            self._loop.call_soon(self._flush)
        self._outbox.append(encoded)

    def call_soon_threadsafe(self, callback: Callable[[str], None], argument: str) -> None:
        """Call on the event loop, from any thread; nothing where the loop has ended."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback, argument)

    def _flush(self) -> None:
        """Send the collected messages. The socket never blocks."""
        if self._outbox and self._sink is not None:
            self._sink.send(frame_of(self._outbox), zmq.NOBLOCK)
        self._outbox.clear()

    def _read(self) -> None:
        """Pass on all messages. It reads until the socket is empty, because the descriptor wakes
        the loop only for messages that come after that."""
        assert self._source is not None, "it is open while the loop watches it"
        try:
            while True:
                try:
                    message = SERVER_DECODER.decode(self._source.recv(zmq.NOBLOCK))
                except zmq.Again:
                    return
                except MALFORMED as error:
                    self._bad.add(error)
                    continue
                self._on_message(message)
        except Exception:
            logger.critical("the reader of engine messages failed", exc_info=True)
            self._stop_reading()
            self._on_failure("the server failed to read the engine's messages; see its log")

    def _stop_reading(self) -> None:
        if self._source is not None and self._loop is not None:
            self._loop.remove_reader(self._source.fileno())
            self._source.close(linger=0)
            self._source = None
