"""Batches in which the parts of weights are read. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from sglang.srt.distributed.device_communicators.transfer_types import Block
from sglang.srt.model_loader.weight_plan import PartRead, TensorPlan

_WORD = 8


@dataclass(frozen=True, slots=True)
class Step:
    """One read of a batch.

    Attributes:
        name: Name of the tensor.
        offset: Byte offset of its rows in the staging memory; None: read directly into place.
    """

    name: str
    read: PartRead
    offset: int | None

    def block(self, staging: int) -> Block:
        """The block that the transport moves, with staging memory at the address `staging`."""
        return self.read.block(None if self.offset is None else staging + self.offset)


@dataclass(slots=True)
class ReadBatch:
    """Reads in flight at the same time.

    Attributes:
        steps: Reads, tensor by tensor.
        done: The tensors that are complete after the batch.
        num_bytes: Bytes to read from the seed.
        staged: Bytes of staging memory of the batch.
    """

    steps: list[Step] = field(default_factory=list)
    done: list[TensorPlan] = field(default_factory=list)
    num_bytes: int = 0
    staged: int = 0

    def add(self, name: str, read: PartRead) -> None:
        """Add a read. It takes staging memory unless it is direct."""
        self.steps.append(Step(name, read, None if read.is_direct else self.staged))
        self.num_bytes += read.num_bytes
        if not read.is_direct:
            self.staged += _aligned(read.num_bytes)

    def of_holders(self) -> dict[int, list[Step]]:
        """The reads of each rank of the seed."""
        found: dict[int, list[Step]] = {}
        for step in self.steps:
            found.setdefault(step.read.holder, []).append(step)
        return found


def staging_bytes(plans: Sequence[TensorPlan], most: int) -> int:
    """Bytes of staging memory for one batch: half of the largest part that needs it, at most
    `most`, but at least a row. Two batches alternate."""
    staged = [read for plan in plans for read in plan.reads if not read.is_direct]
    if not staged:
        return 0
    half = max(-(-len(read.dest) // 2) * read.row_bytes for read in staged)
    return _aligned(max(min(half, most), *(read.row_bytes for read in staged)))


def cut_batches(
    plans: Sequence[TensorPlan], most_bytes: int, most_staged: int
) -> Iterator[ReadBatch]:
    """Cut plans into batches of about `most_bytes`. A larger direct read is a batch by itself.

    Args:
        most_staged: Most bytes of staging memory of one batch; see `staging_bytes`.
    """
    batch = ReadBatch()
    for plan in plans:
        for read in plan.reads:
            begin, rows = 0, len(read.dest)
            while begin < rows:
                count = rows
                if not read.is_direct:
                    count = min(rows - begin, (most_staged - batch.staged) // read.row_bytes)
                part = read.rows(begin, begin + count)
                if not count or (batch.steps and batch.num_bytes + part.num_bytes > most_bytes):
                    assert batch.steps, "a row fits into the staging memory"
                    yield batch
                    batch = ReadBatch()
                    continue
                batch.add(plan.name, part)
                begin += count
        batch.done.append(plan)
    if batch.done:
        yield batch


def _aligned(num_bytes: int) -> int:
    """`num_bytes`, rounded up to whole words."""
    return -(-num_bytes // _WORD) * _WORD
