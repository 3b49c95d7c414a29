"""Memory for pages of ranks that have other heads than this one.

Heads of a page are a strip for each token there, and the transport moves strips of a kilobyte a
hundred times slower than pages. So whole pages are read into a buffer here, and the heads that this
rank needs are copied from there into its own pages.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from sglang.srt.constants import MIB
from sglang.srt.disaggregation.common.geometry import STAGING_BYTES, CutBuffer
from sglang.srt.distributed.device_communicators.transfer_types import Block
from sglang.srt.hardware_backend.device_runtime import device_runtime

logger = logging.getLogger(__name__)

NUM_BUFFERS: Final = 4
"""At most; prompts that need one more wait."""


class Registry(Protocol):
    """What makes memory known to the transport."""

    def batch_register(self, ptrs: Sequence[int], lengths: Sequence[int]) -> int: ...


@dataclass(frozen=True, slots=True)
class Piece:
    """Pages of one buffer of a pool, and where they are in a staging buffer.

    Attributes:
        offset: Bytes, of the first page.
        theirs: Pages there.
        own: The same here.
    """

    cut: CutBuffer
    offset: int
    theirs: Sequence[int]
    own: Sequence[int]

    def blocks(self, base: int) -> Iterator[Block]:
        """What to read into a staging buffer at `base`: pages that follow one another at once."""
        size, begin = self.cut.page_bytes, 0
        for at in range(1, len(self.theirs) + 1):
            if at == len(self.theirs) or self.theirs[at] != self.theirs[at - 1] + 1:
                local = base + self.offset + begin * size
                remote = self.cut.address + self.theirs[begin] * size
                yield Block(local, remote, (at - begin) * size)
                begin = at


def rounds(
    cuts: Sequence[CutBuffer], theirs: Sequence[int], own: Sequence[int], capacity: int
) -> Iterator[list[Piece]]:
    """Pages of all buffers, in as few rounds as fit into `capacity` bytes each."""
    pieces: list[Piece] = []
    used = 0
    for cut in cuts:
        done = 0
        while done < len(own):
            count = min(len(own) - done, (capacity - used) // cut.page_bytes)
            if count:
                span = slice(done, done + count)
                pieces.append(Piece(cut, used, theirs[span], own[span]))
                # What follows begins at whole words too.
                used += -(-count * cut.page_bytes // 8) * 8
                done += count
            else:
                assert pieces, "a page fits into a buffer"
                yield pieces
                pieces, used = [], 0
    if pieces:
        yield pieces


class StagingBuffer:
    """One of them. The thread of the prompt that took it uses it."""

    def __init__(self, memory: torch.Tensor, staging: Staging) -> None:
        self._memory = memory
        self._staging = staging

    def blocks(self, pieces: Sequence[Piece]) -> list[Block]:
        """What to read for `pieces`."""
        base = self._memory.data_ptr()
        return [block for piece in pieces for block in piece.blocks(base)]

    def unpack(self, pieces: Sequence[Piece]) -> None:
        """Copy the heads of `pieces`, which have been read, into this rank's pages. On the device,
        beside the scheduler's steps; blocks until it is done."""
        with self._staging.beside_steps():
            for piece in pieces:
                end = piece.offset + len(piece.own) * piece.cut.page_bytes
                piece.cut.unpack(self._memory[piece.offset : end], piece.own)

    def give_back(self) -> None:
        """Nothing reads into it any more."""
        self._staging.give_back(self)


class Staging:
    """The buffers of a rank. Made in the scheduler's thread; others take and give back buffers,
    which are made when they are first needed, or by `prepare`.

    Args:
        registry: The transport.
        device: Where the pools are.
        registered: Addresses of the allocations that the transport knows already.
    """

    def __init__(
        self, registry: Registry, device: torch.device, registered: Iterable[int] = ()
    ) -> None:
        self._registry = registry
        self._registered = set(registered)
        self._device = device
        self._runtime = device_runtime(device)
        # Of this thread's device: those of the prompts have another current one.
        self._stream = self._runtime.make_side_stream()
        self._free: list[StagingBuffer] = []
        self._num_made = 0
        self._changed = threading.Condition()

    def prepare(self) -> None:
        """Make all buffers now, while nothing is transferred. Once a server was ended by SIGSEGV
        when it made its first; whether registering beside transfers was the cause is not known."""
        with self._changed:
            while self._num_made < NUM_BUFFERS:
                self._free.append(self._make())

    def take(self, timeout: float) -> StagingBuffer | None:
        """A buffer; None: all were in use for `timeout` seconds."""
        with self._changed:
            if not self._free and self._num_made < NUM_BUFFERS:
                self._free.append(self._make())
            if not self._changed.wait_for(lambda: bool(self._free), timeout):
                return None
            return self._free.pop()

    def give_back(self, buffer: StagingBuffer) -> None:
        """See `StagingBuffer`."""
        with self._changed:
            self._free.append(buffer)
            self._changed.notify()

    @contextlib.contextmanager
    def beside_steps(self) -> Iterator[None]:
        """What is queued inside runs beside the scheduler's steps, and has run at the end."""
        with self._stream.use():
            yield
            event = self._runtime.make_event()
            event.record()
        event.synchronize()

    def _make(self) -> StagingBuffer:
        memory = torch.empty(STAGING_BYTES, dtype=torch.uint8, device=self._device)
        # It may lie in an allocation that the pools are in too.
        ranges = self._runtime.allocations_of([memory])
        new = [begin for begin in ranges if begin not in self._registered]
        if new:
            self._registry.batch_register(new, [ranges[begin] for begin in new])
            self._registered.update(new)
        self._num_made += 1
        logger.info(
            "staging buffer %d of at most %d for pages of other heads: %d MiB",
            self._num_made,
            NUM_BUFFERS,
            STAGING_BYTES // MIB,
        )
        return StagingBuffer(memory, self)
