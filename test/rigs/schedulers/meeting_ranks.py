"""Kernels in which ranks meet, interpreted on a CPU: one process per rank, and memory that all map.

    TRITON_INTERPRET=1 python -m rigs.schedulers.meeting_ranks 2 3

Each rank makes sums in norms and looks for greatest logits, in turn, and compares them with what
they must be. Ends with 0 if all were right and no flag is left.
"""

from __future__ import annotations

import mmap
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F

from rigs.caches.memory_ranks import PlaceInGroup
from rigs.layers.quick_interpreter import quicken_interpreter
from sglang.srt.distributed.tensor_group import (
    LOW_LATENCY_ROWS,
    MOST_PROGRAMS,
    PeerParts,
    low_latency_bytes,
)
from sglang.srt.layers.triton_ops import norm, vocab

ROWS: Final = 3
SUMS: Final = tuple(
    (rows, dtype)
    for rows in (ROWS, LOW_LATENCY_ROWS, LOW_LATENCY_ROWS + 1)
    for dtype in (torch.float32, torch.bfloat16)
)
"""Tokens and dtypes of the sums, in turn: some are sent, others read."""
ROUNDS: Final = len(SUMS)
WIDTH: Final = 96
VOCAB: Final = 9001
"""Vocabulary size: three keys for each of two ranks; not divisible."""
EPS: Final = 1e-6
_BYTES: Final = 16 << 20
_KEYS: Final = 512 << 10
"""Offset of the memory for keys, in bytes; the memory for sums is before it."""
_PLACE: Final = 64 << 10


class MappedGroup(PlaceInGroup):
    """The ranks that were forked from this process, after it was made."""

    def __init__(self, memories: list[torch.Tensor], rank: int) -> None:
        super().__init__(rank, len(memories))
        self._memories = memories
        self.flags = _BYTES - MOST_PROGRAMS * self.size * 4
        self.low_latency = self.flags - low_latency_bytes(self.size)
        self._calls = 0

    def place(self, offset: int) -> PeerParts:
        addresses = tuple(memory.data_ptr() for memory in self._memories)
        return PeerParts(addresses, self.flags, self.rank, self.size, offset, self.low_latency)

    def own(self, offset: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """`[count]` of this rank's memory."""
        return self._memories[self.rank][offset : offset + count * dtype.itemsize].view(dtype)

    def shared_keys(self, count: int) -> tuple[torch.Tensor, PeerParts]:
        offset = _KEYS + self._calls % 2 * _PLACE
        self._calls += 1
        return self.own(offset, count, torch.int64), self.place(offset)


def logits(generator: torch.Generator, width: int, size: int) -> torch.Tensor:
    """Logits of all ranks, with garbage after the last token."""
    found = torch.randn(ROWS, width * size, generator=generator)
    found[0, 17] = found[0, VOCAB - 1] = 50.0
    found[1] = float("-inf")
    found[2, 100], found[2, 4500], found[2, VOCAB - 2] = float("inf"), float("nan"), float("nan")
    found[:, VOCAB:] = 99.0
    return found


def work(group: MappedGroup) -> None:
    """One rank's work. Raises AssertionError if a result is wrong."""
    generator = torch.Generator().manual_seed(1)
    rank, size = group.rank, group.size
    weight = torch.randn(WIDTH, generator=generator)
    width = -(-VOCAB // size)
    for number in range(ROUNDS):
        # Each is the last to come at some time.
        time.sleep(0.02 * ((number + rank) % size))
        rows, dtype = SUMS[number % len(SUMS)]
        parts = torch.randn(size, rows, WIDTH, generator=generator).to(dtype)
        residual = torch.randn(rows, WIDTH, generator=generator).to(dtype)
        offset = number % 2 * _PLACE
        group.own(offset, rows * WIDTH, dtype).copy_(parts[rank].flatten())
        right = (residual.float() + parts.float().sum(0)).to(dtype)
        normed = norm.add_parts_rms_norm_(group.place(offset), residual, weight, EPS, False)
        torch.testing.assert_close(residual, right)
        wanted = F.rms_norm(right.float(), (WIDTH,), None, EPS) * weight
        bound = 1e-5 if dtype is torch.float32 else 2e-2
        torch.testing.assert_close(normed.float(), wanted, rtol=bound, atol=bound)
        whole = logits(generator, width, size)
        begin, end = rank * width, (rank + 1) * width
        found = vocab.argmax_of_ranks(whole[:, begin:end], begin, min(end, VOCAB) - begin, group)
        assert found is not None
        assert found.tolist() == whole[:, :VOCAB].argmax(-1).tolist() == [17, 0, 4500]


def forked(act: Callable[[], None]) -> int:
    """The id of a process that ends with 0 if `act` raises nothing."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        act()
        status = 0
    except Exception:  # noqa: BLE001 - the parent sees the status
        traceback.print_exc()
    finally:
        os._exit(status)


def run(size: int) -> bool:
    """True if all `size` ranks got right results and left no flag set."""
    maps = [mmap.mmap(-1, _BYTES) for _ in range(size)]
    memories = [torch.from_numpy(np.frombuffer(one, dtype=np.uint8)) for one in maps]
    groups = [MappedGroup(memories, rank) for rank in range(size)]
    ranks = [forked(lambda group=group: work(group)) for group in groups]  # type: ignore[misc]
    failed = sum(os.waitpid(pid, 0)[1] != 0 for pid in ranks)
    left = sum(int(one[groups[0].flags :].count_nonzero()) for one in memories)
    print(f"{failed} of {size} ranks failed, {left} flags left")
    return not failed and not left


def main(sizes: list[int]) -> int:
    torch.set_num_threads(1)
    quicken_interpreter()
    return 0 if all(list(map(run, sizes))) else 1


if __name__ == "__main__":
    raise SystemExit(main([int(size) for size in sys.argv[1:]]))
