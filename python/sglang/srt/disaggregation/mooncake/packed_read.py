"""The decode server's side of a packing: units are read whole, and unpacked into its own pages.

While one unit is read, later ones are packed and announced, and the one before it is unpacked. The
reader's numbers of read units (`done`) and known units (`known`) only grow, and so does the number
of packed units: questions and answers may be lost, doubled or late.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import msgspec
import torch

from sglang.srt.disaggregation.common.geometry import CutBuffer, WholeBuffer
from sglang.srt.disaggregation.common.staging import StagingBuffer, rounds, unit_bytes_of
from sglang.srt.disaggregation.control.control_client import (
    POLL_S,
    ControlClient,
    RoomFailed,
)
from sglang.srt.disaggregation.control.protocol import Pack, Packed
from sglang.srt.distributed.device_communicators.transfer_types import Block, Transfer

if TYPE_CHECKING:
    from sglang.srt.disaggregation.mooncake.shard_receiver import ShardReceiver

MOST_BUFFERS: Final = 3
"""Most buffers of this server that one prompt takes: one is unpacked while two reads are in flight.
The server has more, so that a prompt that hangs cannot hold all of them."""
_SOON_S: Final = 1e-4
"""Seconds between the first checks for further units while one is read."""
_RARER: Final = 1.1
"""Factor by which the pause between checks grows. A unit takes a fraction of a millisecond; a peer
that hangs is asked less and less often."""


class PackedRead:
    """Reads pages of all buffers in units. For one thread; `run` is called once.

    Args:
        first: The first question, with `done` and `known` 0.
        buffers: Buffers of this rank that correspond to `first.buffers`.
        own: This server's pages, `first.num_pages` of them.
    """

    def __init__(
        self,
        first: Pack,
        buffers: Sequence[WholeBuffer | CutBuffer],
        own: Sequence[int],
        *,
        connection: ControlClient,
        shard: ShardReceiver,
    ) -> None:
        self._first = first
        self._buffers = buffers
        self._own = own
        self._connection = connection
        self._shard = shard
        sizes = [one.page_bytes for one in buffers]
        self._units = list(rounds(sizes, len(own), first.unit_bytes))
        self._places: list[int] = []
        """Addresses of the known units, in order; 0 for units that were read before they were
        announced again."""
        self._num_done = 0
        self._in_flight: deque[tuple[Transfer, StagingBuffer]] = deque()
        """Reads of the units from `_num_done` on, in order."""
        self._free: list[StagingBuffer] = []
        self._num_buffers = 0
        self._nap = _SOON_S
        self._is_asked = False
        """True if a question is unanswered, assuming that no message was lost."""

    def run(self, timeout: float) -> bool:
        """Read all pages. False: no memory was free on one of the sides within `timeout` seconds,
        and no page was read. Raises RoomFailed."""
        began = time.monotonic()
        if not self._take_buffer(timeout):
            return False
        index = self._shard.staging.index(self._own)
        self._connection.begin(self._question())
        self._is_asked = True
        moved = time.monotonic()
        while self._num_done < len(self._units):
            before = len(self._places), self._num_done
            self._begin_reads()
            if self._in_flight:
                self._wait_for_unit(index)
            else:
                left = began + timeout - time.monotonic()
                if not self._places and left <= 0:
                    self._decline()
                    return False
                self._receive_status(POLL_S if self._places else min(POLL_S, left))
            if before != (len(self._places), self._num_done):
                moved = time.monotonic()
            elif not self._in_flight and time.monotonic() >= moved + self._shard.timeout:
                raise RoomFailed("the prefill server has not packed more pages in time")
        self._give_buffers_back()
        return True

    @property
    def _num_begun(self) -> int:
        return self._num_done + len(self._in_flight)

    def _question(self) -> Pack:
        return msgspec.structs.replace(self._first, done=self._num_done, known=len(self._places))

    def _advance(self) -> None:
        self._connection.advance(self._question())
        self._is_asked = True

    def _begin_reads(self) -> None:
        while self._num_begun < len(self._places) and (self._free or self._take_buffer(0)):
            unit, buffer = self._num_begun, self._free.pop()
            length = unit_bytes_of(self._units[unit])
            block = Block(buffer.address, self._places[unit], length)
            self._in_flight.append((self._shard.begin([block]), buffer))

    def _wait_for_unit(self, index: torch.Tensor) -> None:
        """Wait for the oldest read. Returns earlier if another read may begin."""
        transfer, buffer = self._in_flight[0]
        has_room = bool(self._free) or self._num_buffers < MOST_BUFFERS
        if self._num_begun < len(self._units) and has_room:
            if not self._shard.is_read(transfer, self._nap):
                self._nap = min(_RARER * self._nap, POLL_S)
                self._receive_status(0.0)
                return
        else:
            self._shard.finish(transfer, lambda: self._receive_status(0.0))
        self._in_flight.popleft()
        self._nap = _SOON_S
        pieces = self._units[self._num_done]
        self._num_done += 1
        self._advance()
        buffer.unpack(self._buffers, pieces, index)
        self._free.append(buffer)

    def _receive_status(self, timeout: float) -> None:
        """Process an answer of the prefill server, and ask again for units that it has not
        announced."""
        if not self._is_asked and len(self._places) < len(self._units):
            self._advance()
        answer = self._connection.keep_alive(self._question(), Packed, timeout)
        if answer is None:
            return
        self._is_asked = False
        if answer.failure is not None:
            raise RoomFailed(f"the prefill server ended the request: {answer.failure}")
        if answer.first > len(self._places) or answer.number != self._first.number:
            raise RoomFailed("the prefill server answered for other pages than were asked for")
        known = len(self._places) - answer.first
        self._places += answer.places[known:]
        if len(self._places) > len(self._units):
            raise RoomFailed("the prefill server packed more pages than were asked for")

    def _take_buffer(self, timeout: float) -> bool:
        if self._num_buffers >= MOST_BUFFERS:
            return False
        buffer = self._shard.take(timeout)
        if buffer is None:
            return False
        self._num_buffers += 1
        self._free.append(buffer)
        return True

    def _give_buffers_back(self) -> None:
        for buffer in self._free:
            self._shard.give_back(buffer)

    def _decline(self) -> None:
        """Decline all units of the question, which may be packed already."""
        self._num_done = len(self._units)
        self._advance()
        self._give_buffers_back()
