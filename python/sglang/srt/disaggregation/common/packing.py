"""Packing, both sides: a prefill server copies pages into units, a decode server reads the units.

A unit is a staging buffer with pages of several buffers of a pool, in the order of `rounds`. It
belongs to one part of one room from its start until its reader confirms the read or begins another
packing, or the room ends. A reader whose room has ended may still read from it: it then learns that
its room was not held, and discards what it has read.

The decode server reads units whole, and unpacks them into its own pages. While one unit is read,
later ones are packed and announced, and the one before it is unpacked. The reader's numbers of read
units (`done`) and known units (`known`) only grow, and so does the number of packed units:
questions and answers may be lost, doubled or late.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import msgspec
import torch

from sglang.srt.disaggregation.common.geometry import CutBuffer, WholeBuffer
from sglang.srt.disaggregation.common.staging import (
    Piece,
    Staging,
    StagingBuffer,
    rounds,
    unit_bytes_of,
)
from sglang.srt.disaggregation.control.control_client import POLL_S, ControlClient, RoomFailed
from sglang.srt.disaggregation.control.protocol import Pack, Packed
from sglang.srt.distributed.device_communicators.transfer_types import Block, Transfer

logger = logging.getLogger(__name__)

WINDOW: Final = 3
"""Most units of a packing that are packed and not read: one is read while others are packed and
announced. Fewer than all buffers, so that a stuck reader cannot hold all of them."""

MOST_BUFFERS: Final = 3
"""Most buffers of this server that one prompt takes: one is unpacked while two reads are in flight.
The server has more, so that a prompt that hangs cannot hold all of them."""
_SOON_S: Final = 1e-4
"""Seconds between the first checks for further units while one is read."""
_RARER: Final = 1.1
"""Factor by which the pause between checks grows. A unit takes a fraction of a millisecond; a peer
that hangs is asked less and less often."""


@dataclass(slots=True)
class _Packing:
    """The pages that one part of a room reads."""

    number: int
    pages: Sequence[int]
    end_page: int
    """Index in the prompt of the page after `pages`."""
    rows: Sequence[torch.Tensor]
    units: list[list[Piece]]
    done: int = 0
    next: int = 0
    packed: dict[int, StagingBuffer] = field(default_factory=dict)
    """Buffers of units that have not been read yet, by unit."""
    index: torch.Tensor | None = None
    failure: str | None = None
    has_ended: bool = False

    def give_back(self, done: int) -> None:
        """Free the buffers of the first `done` units, which were read."""
        self.done = max(self.done, min(done, len(self.units)))
        self.next = max(self.next, self.done)
        for unit in [unit for unit in self.packed if unit < self.done]:
            self.packed.pop(unit).give_back()

    @property
    def wants_buffer(self) -> bool:
        return (
            self.failure is None and self.next < len(self.units) and self.next < self.done + WINDOW
        )


_Key = tuple[int, int]
"""A room and a part of its reader."""


class Packer:
    """Packs pages. Any thread may call; a thread of its own, `disagg-pack`, copies.

    Args:
        rows: The pools' buffers by address; see `PoolGeometry.page_rows`.
    """

    def __init__(self, rows: Mapping[int, torch.Tensor], staging: Staging) -> None:
        self._rows = rows
        self._staging = staging
        self.unit_bytes = staging.num_bytes
        self._packings: dict[_Key, _Packing] = {}
        """Packings in progress; the first is served next, and then moves to the end."""
        self._on_packed: Callable[[], None] = lambda: None
        self._is_closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._serve, name="disagg-pack", daemon=True)

    def start(self, on_packed: Callable[[], None]) -> None:
        """Start the thread.

        Args:
            on_packed: Called in the packer's thread when there are new units or a failure.
        """
        self._on_packed = on_packed
        self._thread.start()

    def ask(self, ask: Pack, pages: Sequence[int]) -> Packed:
        """Begin the packing of `pages`, or note the reader's progress; return the units for the
        reader."""
        key = ask.room, ask.part
        with self._changed:
            packing = self._packings.get(key)
            if packing is None or packing.number < ask.number:
                refusal = self._why_not(ask, pages)
                if refusal is not None:
                    return Packed(ask.room, ask.number, failure=refusal)
                self._end(key)
                packing = self._begin(ask, pages)
                self._packings[key] = packing
            elif packing.number > ask.number:
                return Packed(ask.room, ask.number)  # A message that was late.
            packing.give_back(ask.done)
            self._changed.notify()
            # Units are packed in order, so these are consecutive.
            places = [packing.packed[unit].address for unit in sorted(packing.packed)]
            return Packed(ask.room, ask.number, packing.done, places, packing.failure)

    def note_read(self, room: int, part: int, have_pages: int) -> None:
        """Note that the reader has the prompt's pages up to `have_pages`: a packing of these is
        over, even if the question that says so was lost."""
        with self._changed:
            packing = self._packings.get((room, part))
            if packing is not None and have_pages >= packing.end_page:
                packing.give_back(len(packing.units))
                self._changed.notify()

    def end(self, room: int) -> None:
        """Free the units of a room that has ended. Idempotent."""
        with self._changed:
            for key in [key for key in self._packings if key[0] == room]:
                self._end(key)
            self._changed.notify()

    def close(self) -> None:
        """End the thread. Idempotent."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    def _begin(self, ask: Pack, pages: Sequence[int]) -> _Packing:
        rows = [self._rows[address] for address in ask.buffers]
        sizes = [_page_bytes(one) for one in rows]
        units = list(rounds(sizes, len(pages), ask.unit_bytes))
        end_page = ask.first_page + len(pages)
        return _Packing(ask.number, list(pages), end_page, rows, units)

    def _why_not(self, ask: Pack, pages: Sequence[int]) -> str | None:
        if len(pages) != ask.num_pages:
            return "pages were to be packed that are not computed"
        if not ask.buffers or any(address not in self._rows for address in ask.buffers):
            return "pages of unknown buffers were to be packed"
        most = max(_page_bytes(self._rows[address]) for address in ask.buffers)
        if not most <= ask.unit_bytes <= self.unit_bytes:
            return f"pages of {most} bytes were to be packed into units of {ask.unit_bytes}"
        return None

    def _end(self, key: _Key) -> None:
        packing = self._packings.pop(key, None)
        if packing is not None:
            packing.has_ended = True
            for buffer in packing.packed.values():
                buffer.give_back()

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closing or self._has_work())
                if self._is_closing:
                    return
                key, packing = next(one for one in self._packings.items() if one[1].wants_buffer)
                buffer = self._take_buffer(packing)
                if buffer is None and packing.failure is None:
                    # All buffers are with readers: `ask` and `end` notify when one comes back.
                    self._changed.wait()
                    continue
                unit = packing.next
                packing.next += 1
                self._packings[key] = self._packings.pop(key)
            if buffer is not None:
                self._pack(packing, unit, buffer)
            self._on_packed()

    def _take_buffer(self, packing: _Packing) -> StagingBuffer | None:
        try:
            return self._staging.take(0)
        except Exception as error:
            logger.exception("there is no memory for packed pages")
            packing.failure = f"packing pages failed: {type(error).__name__}: {error}"
            return None

    def _has_work(self) -> bool:
        return any(packing.wants_buffer for packing in self._packings.values())

    def _pack(self, packing: _Packing, unit: int, buffer: StagingBuffer) -> None:
        failure = None
        try:
            if packing.index is None:
                packing.index = self._staging.index(packing.pages)
            buffer.pack(packing.rows, packing.units[unit], packing.index)
        except Exception as error:
            logger.exception("pages could not be packed")
            failure = f"packing pages failed: {type(error).__name__}: {error}"
        with self._changed:
            packing.failure = failure
            if failure is None and not packing.has_ended and unit >= packing.done:
                packing.packed[unit] = buffer
            else:
                buffer.give_back()


def _page_bytes(rows: torch.Tensor) -> int:
    return rows.shape[1] * rows.element_size()


class Reads(Protocol):
    """Reads in flight of a shard, and the buffers that it has taken; see `ShardRead`."""

    staging: Staging
    timeout: float

    def begin(self, blocks: Sequence[Block]) -> Transfer: ...
    def is_read(self, transfer: Transfer, timeout: float) -> bool: ...
    def finish(self, transfer: Transfer, heartbeat: Callable[[], None]) -> None: ...
    def take(self, timeout: float) -> StagingBuffer | None: ...
    def give_back(self, buffer: StagingBuffer) -> None: ...


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
        client: ControlClient,
        reads: Reads,
    ) -> None:
        self._first = first
        self._buffers = buffers
        self._own = own
        self._client = client
        self._reads = reads
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
        index = self._reads.staging.index(self._own)
        self._client.begin(self._question())
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
            elif not self._in_flight and time.monotonic() >= moved + self._reads.timeout:
                raise RoomFailed("the prefill server has not packed more pages in time")
        self._give_buffers_back()
        return True

    @property
    def _num_begun(self) -> int:
        return self._num_done + len(self._in_flight)

    def _question(self) -> Pack:
        return msgspec.structs.replace(self._first, done=self._num_done, known=len(self._places))

    def _advance(self) -> None:
        self._client.advance(self._question())
        self._is_asked = True

    def _begin_reads(self) -> None:
        while self._num_begun < len(self._places) and (self._free or self._take_buffer(0)):
            unit, buffer = self._num_begun, self._free.pop()
            length = unit_bytes_of(self._units[unit])
            block = Block(buffer.address, self._places[unit], length)
            self._in_flight.append((self._reads.begin([block]), buffer))

    def _wait_for_unit(self, index: torch.Tensor) -> None:
        """Wait for the oldest read. Returns earlier if another read may begin."""
        transfer, buffer = self._in_flight[0]
        has_room = bool(self._free) or self._num_buffers < MOST_BUFFERS
        if self._num_begun < len(self._units) and has_room:
            if not self._reads.is_read(transfer, self._nap):
                self._nap = min(_RARER * self._nap, POLL_S)
                self._receive_status(0.0)
                return
        else:
            self._reads.finish(transfer, lambda: self._receive_status(0.0))
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
        answer = self._client.keep_alive(self._question(), Packed, timeout)
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
        buffer = self._reads.take(timeout)
        if buffer is None:
            return False
        self._num_buffers += 1
        self._free.append(buffer)
        return True

    def _give_buffers_back(self) -> None:
        for buffer in self._free:
            self._reads.give_back(buffer)

    def _decline(self) -> None:
        """Decline all units of the question, which may be packed already."""
        self._num_done = len(self._units)
        self._advance()
        self._give_buffers_back()
