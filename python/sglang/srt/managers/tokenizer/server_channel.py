"""The server process's sockets, and control requests, whose answers are matched by id."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeAlias

import zmq

from sglang.srt.constants import LONGEST_STORAGE_CHANGE_S
from sglang.srt.managers.tokenizer.dp_groups import joined
from sglang.srt.managers.tokenizer.generate_request import EngineUnavailable
from sglang.srt.messages.io_struct import (
    SERVER_DECODER,
    ControlReq,
    ControlReqOutput,
    GetInternalStateReq,
    Message,
    ShutdownReq,
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


_Answer: TypeAlias = Coroutine[Any, Any, ControlReqOutput]


class ControlClient:
    """Sends control requests through `send`, to one DP group each, and waits for their answers."""

    def __init__(self, send: Callable[[Message, int], None], num_groups: int = 1) -> None:
        self._send = send
        self._num_groups = num_groups
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
        """Ask every DP group, and wait for their answers, which are `joined`. Raises
        EngineUnavailable if one does not come within `timeout` seconds, or the engine died."""
        if self._num_groups == 1:
            return await self.ask_one(message, 0, timeout)
        return joined(await self.ask_each(message, timeout))

    async def ask_each(
        self, message: ControlReq, timeout: float = QUICK_TIMEOUT
    ) -> list[ControlReqOutput]:
        """The answers of all DP groups, in order; raises as `ask`."""
        return list(await asyncio.gather(*self.send_each(message, timeout)))

    def send_each(self, message: ControlReq, timeout: float) -> list[_Answer]:
        """Send `message` to every DP group now. Returns what waits for their answers; waiting for
        one, and this, raise as `ask`."""
        return [self.ask_one(message, dp_rank, timeout) for dp_rank in range(self._num_groups)]

    def ask_one(self, message: ControlReq, dp_rank: int, timeout: float = QUICK_TIMEOUT) -> _Answer:
        """Send `message` to one DP group now, with a fresh id. Returns what waits for the answer;
        both raise as `ask`."""
        message.req_id = req_id = uuid.uuid4().hex
        name = type(message).__name__
        which = "" if self._num_groups == 1 else f" of dp_rank {dp_rank}"
        future: asyncio.Future[ControlReqOutput] = asyncio.get_running_loop().create_future()
        self._waiting[req_id] = future
        try:
            self._send(message, dp_rank)
        except BaseException:
            del self._waiting[req_id]
            raise

        async def wait() -> ControlReqOutput:
            try:
                return await asyncio.wait_for(future, timeout)
            except TimeoutError:
                raise EngineUnavailable(
                    f"the scheduler{which} did not answer {name} within {timeout:g} s: it is busy "
                    "or stuck, see its log; try again"
                ) from None
            finally:
                del self._waiting[req_id]

        return wait()


async def internal_states(control: ControlClient) -> list[dict[str, Any]]:
    """The state of each DP group's scheduler, in order; raises as `ControlClient.ask`."""
    return [answer.data for answer in await control.ask_each(GetInternalStateReq())]


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
        num_groups: int = 1,
    ) -> None:
        """Nothing is opened before `start`. `on_message` gets each message, and ends the reading if
        it raises; `on_failure` gets the reason why no further message will come; `num_groups` is
        the number of DP groups, each of which gets a socket."""
        self._ipc = ipc
        self._on_message = on_message
        self._on_failure = on_failure
        self._bad = BadMessages(logger, "message")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._source: zmq.Socket[bytes] | None = None
        self._sinks: list[zmq.Socket[bytes]] = []
        self._outboxes: list[list[bytes]] = [[] for _ in range(num_groups)]
        """Encoded messages for the scheduler of each DP group, until `_flush`."""
        self._held: list[list[bytes]] | None = None
        """Like `_outboxes`: messages of requests that are sent later; None: none are held."""
        self._will_flush = False

    @property
    def is_open(self) -> bool:
        """True if `send` may be called."""
        return bool(self._sinks)

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        self._source = pull_socket(self._context, self._ipc.server_input)
        self._sinks = [
            push_socket(self._context, self._ipc.scheduler_input(dp_rank))
            for dp_rank in range(len(self._outboxes))
        ]
        self._loop.add_reader(self._source.fileno(), self._read)
        self._read()  # Messages that came before the loop watched do not wake it.

    async def close(self) -> None:
        """Send the remaining messages and close the sockets. Idempotent."""
        self._stop_reading()
        self._flush()
        if self._context is not None:
            # A little time for the last message; the peer may be gone already.
            for sink in self._sinks:
                sink.close(linger=200)
            self._context.destroy(linger=200)
            self._context = None
            self._sinks = []

    def send(self, message: Message, dp_rank: int | None = None) -> None:
        """Let `message` leave at the end of this turn of the event loop, to one DP group or (None)
        to each.

        The messages of one turn go together: one wake-up of the scheduler, and one prefill batch
        for requests that came together.

        Raises:
            EngineUnavailable: The channel is not open.
        """
        if self._loop is None or not self._sinks:
            raise EngineUnavailable("the engine has been shut down")
        # Encoded here, so that a message that cannot be encoded fails only its sender.
        encoded = encode(message)
        held = None if isinstance(message, ControlReq | ShutdownReq) else self._held
        boxes = self._outboxes if held is None else held
        if not self._will_flush:
            self._will_flush = True
            self._loop.call_soon(self._flush)
        for outbox in boxes if dp_rank is None else (boxes[dp_rank],):
            outbox.append(encoded)

    @contextmanager
    def requests_held(self) -> Iterator[None]:
        """Inside, only control requests leave; the other messages do when it ends, in order."""
        assert self._held is None, "one at a time"
        self._held = [[] for _ in self._outboxes]
        try:
            yield
        finally:
            for outbox, held in zip(self._outboxes, self._held, strict=True):
                outbox += held
            self._held = None
            self._flush()

    def call_soon_threadsafe(self, callback: Callable[[str], None], argument: str) -> None:
        """Call on the event loop, from any thread; nothing where the loop has ended."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback, argument)

    def _flush(self) -> None:
        """Send the collected messages. The sockets never block."""
        self._will_flush = False
        for sink, outbox in zip(self._sinks, self._outboxes, strict=False):
            if outbox:
                sink.send(frame_of(outbox), zmq.NOBLOCK)
                outbox.clear()

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
