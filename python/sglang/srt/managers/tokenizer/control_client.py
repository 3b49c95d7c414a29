"""Control requests to the scheduler and their answers, matched by id. Event loop thread only."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from typing import Final

from sglang.srt.constants import LONGEST_STORAGE_CHANGE_S
from sglang.srt.managers.messages.io_struct import ControlReq, ControlReqOutput, Message
from sglang.srt.managers.tokenizer.generate_request import EngineUnavailable

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
        """Send `message` with a fresh id, and wait for the answer.

        Raises:
            EngineUnavailable: No answer within `timeout` seconds, or the engine died.
        """
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
