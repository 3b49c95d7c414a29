"""The prefill server's side of a packing: pages are copied into units for decode servers to read.

A unit is a staging buffer with pages of several buffers of a pool, in the order of `rounds`. It
belongs to one part of one room from its start until its reader confirms the read or begins another
packing, or the room ends. A reader whose room has ended may still read from it: it then learns that
its room was not held, and discards what it has read.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from sglang.srt.disaggregation.common.staging import Piece, Staging, StagingBuffer, rounds
from sglang.srt.disaggregation.control.protocol import Pack, Packed

logger = logging.getLogger(__name__)

WINDOW: Final = 3
"""Most units of a packing that are packed and not read: one is read while others are packed and
announced. Fewer than all buffers, so that a stuck reader cannot hold all of them."""


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
