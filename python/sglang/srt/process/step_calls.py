"""Calls of the first rank of a DP group to those of the others, to take part in a step."""

from __future__ import annotations

from typing import Any

import zmq

from sglang.srt.messages.io_struct import StepCall, encode, frame_of
from sglang.srt.messages.ipc import IpcAddresses, push_socket


class StepCalls:
    """Sockets to the other groups of a server on one machine. Scheduler thread only."""

    def __init__(self, ipc: IpcAddresses, dp_rank: int, dp_size: int) -> None:
        context: zmq.Context[Any] = zmq.Context.instance()
        others = [other for other in range(dp_size) if other != dp_rank]
        self._sockets = [push_socket(context, ipc.scheduler_input(other)) for other in others]
        for socket in self._sockets:
            socket.linger = 0  # At the end the others have left their loops.

    def __call__(self, number: int) -> None:
        """Call for the round of that number. Never blocks."""
        frame = frame_of([encode(StepCall(number=number))])
        for socket in self._sockets:
            socket.send(frame)
