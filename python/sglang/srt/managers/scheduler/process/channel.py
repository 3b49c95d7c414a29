"""The scheduler's sockets: one to receive on, two to send to."""

from __future__ import annotations

import logging
from typing import Final

import zmq

from sglang.srt.managers.messages.io_struct import (
    SCHEDULER_DECODER,
    BatchTokenIDOutput,
    ControlReqOutput,
    ToScheduler,
    encode,
)
from sglang.srt.managers.messages.ipc import IpcAddresses, pull_socket, push_socket
from sglang.srt.utils.bad_messages import MALFORMED, BadMessages

logger = logging.getLogger(__name__)

_LINGER_MS: Final = 2000
_MAX_MESSAGES_PER_TICK: Final = 1024
"""A limit, because a flood of messages must not keep running requests waiting."""


class ZmqChannel:
    """Rank 0's channel. One thread uses it.

    Args:
        ipc: Addresses to listen on and to send to.
    """

    def __init__(self, ipc: IpcAddresses) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._source = pull_socket(self._context, ipc.scheduler_input)
        self._to_detokenizer = push_socket(self._context, ipc.detokenizer_input)
        self._to_server = push_socket(self._context, ipc.server_input)
        self._bad = BadMessages(logger, "message")

    def receive(self, timeout_ms: int) -> list[ToScheduler]:
        """Messages that are there, after waiting at most `timeout_ms` for the first."""
        messages: list[ToScheduler] = []
        self._source.set(zmq.RCVTIMEO, timeout_ms)
        flags = 0
        while len(messages) < _MAX_MESSAGES_PER_TICK:
            try:
                payload = self._source.recv(flags)
            except zmq.Again:
                break
            flags = zmq.NOBLOCK
            try:
                messages += SCHEDULER_DECODER.decode(payload)
            except MALFORMED as error:
                self._bad.add(error)
        return messages

    def send(self, output: BatchTokenIDOutput | ControlReqOutput) -> None:
        """Tokens to the detokenizer, answers to the server. Never blocks."""
        is_tokens = isinstance(output, BatchTokenIDOutput)
        (self._to_detokenizer if is_tokens else self._to_server).send(encode(output))

    def close(self) -> None:
        """Send the remaining messages within a bounded time, and close."""
        self._context.destroy(linger=_LINGER_MS)
