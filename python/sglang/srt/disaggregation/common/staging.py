"""Staging: registered memory for pages that are not read from pool to pool.

If the ranks of the prefill server have other heads, a decode server reads whole pages into a
buffer, and copies the heads that it needs from there. In a page they are a piece in each token, and
the transport moves pieces of a kilobyte a hundred times slower than pages. A link that is fast only
for large blocks has buffers on both sides: pages are packed into a buffer of the prefill
server (`Packer`), read at once into a buffer of the decode server (`PackedRead`), and copied from
there.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final, TypeVar

import torch

from sglang.srt.constants import MIB
from sglang.srt.disaggregation.common.geometry import STAGING_BYTES, CutBuffer, WholeBuffer
from sglang.srt.disaggregation.common.sessions import Engine
from sglang.srt.disaggregation.control.control_client import POLL_S, RoomFailed
from sglang.srt.distributed.device_communicators.transfer_types import Block
from sglang.srt.hardware_backend.device_runtime import device_runtime

logger = logging.getLogger(__name__)

NUM_BUFFERS: Final = 4
"""Most buffers of a rank; prompts that need one more wait."""
UNIT_BYTES: Final = 128 * MIB
"""Bytes of a unit of packed pages, which is read at once. Its read takes longer than the messages
about it, and a prompt of thousands of tokens has several units, whose reads overlap."""
_T = TypeVar("_T")
_ALIGNMENT: Final = 8
"""Alignment of pieces in a buffer, in bytes: they begin at whole words."""


@dataclass(frozen=True, slots=True)
class LinkCosts:
    """A link on which packing may pay.

    Attributes:
        block_s: Seconds of overhead per block that is read from pool to pool.
        bytes_per_s: Bandwidth of one large block, in bytes per second.
        packing_s: Seconds until the first unit is packed and its reader knows it, plus seconds
            after the last is read.
        unit_s: Seconds of overhead per unit.
    """

    block_s: float
    bytes_per_s: float
    packing_s: float
    unit_s: float

    def direct_s(self, num_blocks: int, num_bytes: int) -> float:
        return num_blocks * self.block_s + num_bytes / self.bytes_per_s

    def packed_s(self, num_bytes: int, unit_bytes: int) -> float:
        num_units = -(-num_bytes // unit_bytes)
        return self.packing_s + num_units * self.unit_s + num_bytes / self.bytes_per_s

    def packing_pays(self, num_blocks: int, num_bytes: int, unit_bytes: int) -> bool:
        return self.packed_s(num_bytes, unit_bytes) < self.direct_s(num_blocks, num_bytes)


LINKS: Final[Mapping[str, LinkCosts]] = {
    # Two H200s (benchmark/results/2026-11-23-gpu-pd.md): 9,216 blocks of 128 KB in 46 to 58 ms, 72
    # of 16 MB in 4 ms, while a peer copy has 394 GB/s. Packed in units of 64 to 256 MiB, 1.2 GB
    # take 7.6 to 10.4 ms and 4.8 GB take 18 to 34 ms: this line fits all six within 15%.
    "nvlink_intra": LinkCosts(block_s=5e-6, bytes_per_s=390e9, packing_s=2.5e-3, unit_s=0.3e-3),
}
"""Costs by protocol. Over other protocols blocks are queued, and pages are read from pool to
pool."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Pages of one buffer of a pool, and their place in a staging buffer.

    Attributes:
        place: Index of the pool's buffer in the list of buffers that are read.
        offset: Offset of the first page, in bytes.
        begin: First of the pages `[begin, end)`, counted among those that are read.
        page_bytes: Bytes of a page.
    """

    place: int
    offset: int
    begin: int
    end: int
    page_bytes: int

    @property
    def num_bytes(self) -> int:
        return (self.end - self.begin) * self.page_bytes

    def blocks(self, base: int, address: int, theirs: Sequence[int]) -> Iterator[Block]:
        """Blocks to read into a staging buffer at `base`; consecutive pages are one block.

        Args:
            address: Address of the pool's buffer on the other side.
            theirs: All pages that are read.
        """
        size, first = self.page_bytes, self.begin
        for at in range(first + 1, self.end + 1):
            if at == self.end or theirs[at] != theirs[at - 1] + 1:
                local = base + self.offset + (first - self.begin) * size
                yield Block(local, address + theirs[first] * size, (at - first) * size)
                first = at

    def span(self, memory: torch.Tensor) -> torch.Tensor:
        return memory[self.offset : self.offset + self.num_bytes]


def rounds(page_bytes: Sequence[int], num_pages: int, capacity: int) -> Iterator[list[Piece]]:
    """Divide the pages of all buffers into rounds of at most `capacity` bytes, as few as possible.

    Args:
        page_bytes: Bytes of a page of each buffer; at most `capacity`.
    """
    pieces: list[Piece] = []
    used = 0
    for place, size in enumerate(page_bytes):
        done = 0
        while done < num_pages:
            count = min(num_pages - done, (capacity - used) // size)
            if count > 0:
                pieces.append(Piece(place, used, done, done + count, size))
                used += -(-count * size // _ALIGNMENT) * _ALIGNMENT
                done += count
            else:
                assert pieces, "a page fits into a buffer"
                yield pieces
                pieces, used = [], 0
    if pieces:
        yield pieces


def unit_bytes_of(pieces: Sequence[Piece]) -> int:
    """Bytes from the start of a round's buffer to the end of its last piece."""
    return pieces[-1].offset + pieces[-1].num_bytes


def register_new(engine: Engine, ranges: Mapping[int, int]) -> None:
    """Register the allocations, address to bytes, that the engine does not know yet: on a GPU,
    pools, buffers, rows of metadata, and weights that other servers read can share one."""
    new = {ptr: size for ptr, size in ranges.items() if not engine.is_registered(ptr, size)}
    if new:
        engine.batch_register(list(new), list(new.values()))


class StagingBuffer:
    """One staging buffer. The thread that took it uses it."""

    def __init__(self, memory: torch.Tensor, staging: Staging) -> None:
        self.memory = memory
        """uint8 `[bytes]` on the device."""
        self.address = memory.data_ptr()
        self._staging = staging

    def unpack(
        self, buffers: Sequence[WholeBuffer | CutBuffer], pieces: Sequence[Piece], own: torch.Tensor
    ) -> None:
        """Copy `pieces`, which were read into the buffer, to this rank's pages. The copy runs on
        the device, beside the scheduler's steps; blocks until it is done.

        Args:
            own: int64 on the device: this rank's pages for all pages that are read, in order.
        """
        with self._staging.beside_steps():
            for piece in pieces:
                target = buffers[piece.place]
                target.unpack(piece.span(self.memory), own[piece.begin : piece.end])

    def pack(
        self, rows: Sequence[torch.Tensor], pieces: Sequence[Piece], own: torch.Tensor
    ) -> None:
        """Copy `pieces` of this rank's pages into the buffer, in the same way as `unpack`.

        Args:
            rows: The pools' buffers as words `[pages, words of a page]`.
            own: int64 on the device: all pages to pack, in order.
        """
        with self._staging.beside_steps():
            for piece in pieces:
                source, index = rows[piece.place], own[piece.begin : piece.end]
                target = piece.span(self.memory).view(source.dtype).view(len(index), -1)
                torch.index_select(source, 0, index, out=target)

    def give_back(self) -> None:
        """Give the buffer back; no read into it or from it is in flight."""
        self._staging.give_back(self)


class Staging:
    """The buffers of a rank. Constructed in the scheduler's thread; other threads take and give
    back buffers, which are made when they are first needed, or by `prepare`."""

    def __init__(
        self, engine: Engine, device: torch.device, num_bytes: int = STAGING_BYTES
    ) -> None:
        self.device = device
        self.num_bytes = num_bytes
        self._engine = engine
        self._runtime = device_runtime(device)
        # Set for this thread's device: in the threads of prompts another device is current.
        self._stream = self._runtime.make_side_stream()
        self._free: list[StagingBuffer] = []
        self._num_made = 0
        self._changed = threading.Condition()

    def prepare(self) -> None:
        """Make all buffers now, while no transfer is in flight. A server was once ended by SIGSEGV
        when it made its first buffer. The cause is not known: 60,000 registrations during transfers
        over TCP did not reproduce it."""
        with self._changed:
            while self._num_made < NUM_BUFFERS:
                self._free.append(self._make())

    def take(self, timeout: float) -> StagingBuffer | None:
        """Take a buffer; None: all were in use for `timeout` seconds."""
        with self._changed:
            if not self._free and self._num_made < NUM_BUFFERS:
                self._free.append(self._make())
            if not self._changed.wait_for(lambda: bool(self._free), timeout):
                return None
            return self._free.pop()

    def give_back(self, buffer: StagingBuffer) -> None:
        with self._changed:
            self._free.append(buffer)
            self._changed.notify()

    def index(self, pages: Sequence[int]) -> torch.Tensor:
        """Pages as int64 on the device. Blocks until they are there."""
        with self.beside_steps():
            return torch.tensor(pages, dtype=torch.int64, device=self.device)

    def beside_steps(self) -> AbstractContextManager[None]:
        """Run the work queued inside beside the scheduler's steps; wait for it at the end."""
        return self._runtime.waiting_for(self._stream)

    def _make(self) -> StagingBuffer:
        memory = torch.empty(self.num_bytes, dtype=torch.uint8, device=self.device)
        register_new(self._engine, self._runtime.allocations_of([memory]))
        self._num_made += 1
        logger.info(
            "staging buffer %d of at most %d: %d MiB",
            self._num_made,
            NUM_BUFFERS,
            self.num_bytes // MIB,
        )
        return StagingBuffer(memory, self)


def take_within(
    timeout: float, take: Callable[[float], _T | None], heartbeat: Callable[[], None], what: str
) -> _T:
    """The first thing that `take` gives within `timeout` seconds. Calls `heartbeat` meanwhile.
    Raises RoomFailed if there is none."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if (taken := take(POLL_S)) is not None:
            return taken
        heartbeat()
    raise RoomFailed(f"no {what} was free in {timeout:g} s")
