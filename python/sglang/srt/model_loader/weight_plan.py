"""Plans the reads from a seed's ranks that make up this rank's weights. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from sglang.srt.distributed.device_communicators.transfer_types import Block
from sglang.srt.layers.placement import WeightSlot
from sglang.srt.model_loader.seed_answer import (
    EvenSpread,
    HeldRanges,
    Range,
    SeedAnswer,
    TensorPart,
    WeightsDigest,
    common_parts,
    cut_at,
    place_of,
)


@dataclass(frozen=True, slots=True)
class PartRead:
    """The read of a part of one tensor from one rank of a seed.

    Attributes:
        holder: The rank of the seed.
        remote: Address of the first row in that rank's process.
        row_bytes: Bytes of a row in that rank's memory.
        skipped: Bytes of a row before the wanted ones.
        dest: uint8 `[rows, bytes]` of the slot; rows are not contiguous if the slot is split by
            columns.
    """

    holder: int
    remote: int
    row_bytes: int
    skipped: int
    dest: torch.Tensor

    @property
    def is_direct(self) -> bool:
        """True if the part is contiguous on both sides. Otherwise whole rows are read into staging
        memory and copied from there, because reads of parts of rows would take far longer."""
        rows, width = self.dest.shape
        return rows == 1 or (width == self.row_bytes and self.dest.is_contiguous())

    @property
    def num_bytes(self) -> int:
        """Bytes to read from the seed, at least one."""
        return self.dest.numel() if self.is_direct else len(self.dest) * self.row_bytes

    def block(self, base: int | None = None) -> Block:
        """The block to read: the part itself, or, with `base`, whole rows to that address."""
        if base is None:
            remote = self.remote + self.skipped
            return Block(self.dest.data_ptr(), remote, self.dest.numel())
        return Block(base, self.remote, self.num_bytes)

    def rows(self, begin: int, end: int) -> PartRead:
        """The read of only rows `[begin, end)`."""
        return replace(self, remote=self.remote + begin * self.row_bytes, dest=self.dest[begin:end])

    def copy_from(self, rows: torch.Tensor) -> None:
        """Copy the part out of whole rows, uint8 `[rows * row_bytes]`."""
        end = self.skipped + self.dest.shape[1]
        self.dest.copy_(rows.view(-1, self.row_bytes)[:, self.skipped : end])


@dataclass(frozen=True, slots=True)
class Cell:
    """Bytes of a slot that have one checksum.

    Attributes:
        holder: The rank of the seed that the bytes are read from.
        index: Index of the checksum among that rank's checksums of the tensor.
        data: uint8 `[rows, bytes]`.
    """

    holder: int
    index: int
    data: torch.Tensor


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """The reads that fill one slot, and its cells to check."""

    name: str
    slot: WeightSlot
    reads: tuple[PartRead, ...]
    cells: tuple[Cell, ...]


def rows_of(slot: WeightSlot) -> torch.Tensor:
    """A slot's part, or the first copy of it, as uint8 `[rows, bytes]`.

    A row has the elements with equal indices in the dimensions before the split one.
    """
    first = slot.copies[0]
    place_of(first)
    rows = prod(first.shape[: slot.dim])
    if not first.numel():
        return first.new_empty((rows, 0), dtype=torch.uint8)
    return first.view(-1).view(torch.uint8).view(rows, -1)


def cell_views(slot: WeightSlot) -> list[torch.Tensor]:
    """The cells of a slot, each as uint8 `[rows, bytes]`."""
    held = TensorPart.of(slot).held()
    data = rows_of(slot)
    return [_columns(data, held, cell) for cell in held.cells()]


def plan_reads(
    answers: Sequence[SeedAnswer], slots: Mapping[str, WeightSlot], *, rank: int
) -> list[TensorPlan]:
    """Plan the reads for all slots, sorted by address. Reads are spread evenly over replicas of the
    seed.

    Args:
        answers: Answers of all ranks of the seed, in the order of ranks, for the same model
            (`check_seed`).
        slots: Slots of this server's model.
        rank: Rank of this server; different ranks begin with different replicas.

    Raises:
        ValueError: Seed and model differ; with the first tensor, the difference and the remedy.
    """
    planner = _Planner(answers, rank % len(answers))
    names = {*slots, *(name for answer in answers for name in answer.weights.tensors)}
    plans = [planner.plan(name, slots.get(name)) for name in sorted(names)]
    return sorted(plans, key=lambda plan: plan.slot.dest.data_ptr())


class _Held:
    """Ranges that a rank of the seed holds of equally split tensors, and its cells."""

    def __init__(self, part: TensorPart) -> None:
        self.ranges = part.held()
        self.cells = {cell: index for index, cell in enumerate(self.ranges.cells())}
        dim = part.split_dim if part.split_runs else 0
        others = [size for at, size in enumerate(part.shape) if at != dim]
        self.num_elements = self.ranges.size * prod(others)


class _Planner:
    """Plans tensor by tensor.

    Args:
        answers: See `plan_reads`.
        first: The replica that begins.
    """

    def __init__(self, answers: Sequence[SeedAnswer], first: int) -> None:
        self._answers = answers
        self._spread = EvenSpread(len(answers), first)
        self._held: dict[TensorPart, _Held] = {}
        """Cache by part, since layers have the same shapes."""

    def plan(self, name: str, slot: WeightSlot | None) -> TensorPlan:
        """The plan of one slot. Raises what `plan_reads` raises."""
        if slot is None:
            raise _not_in("this server's model", name)
        ours = TensorPart.of(slot)
        holders = [
            self._held_by(answer, name, ours, slot.dest.element_size()) for answer in self._answers
        ]
        wanted = self._held_of(ours).ranges
        data = rows_of(slot)
        each = data.shape[1] // wanted.size if wanted.size else 0
        reads: list[PartRead] = []
        cells: list[Cell] = []
        for part in common_parts(wanted, [held.ranges for held in holders]):
            own_cells = cut_at([part], wanted.grid)
            candidates = self._candidates(name, part, own_cells, holders)
            holder = self._spread.choose(candidates, len(data) * (part[1] - part[0]) * each)
            held = holders[holder]
            offset = held.ranges.offset_of(part)
            assert offset is not None, "a candidate holds it"
            reads.append(
                PartRead(
                    holder=holder,
                    remote=self._answers[holder].places[name][0],
                    row_bytes=held.ranges.size * each,
                    skipped=offset * each,
                    dest=_columns(data, wanted, part),
                )
            )
            cells += [
                Cell(holder, held.cells[cell], _columns(data, wanted, cell)) for cell in own_cells
            ]
        return TensorPlan(name, slot, tuple(reads), tuple(cells))

    def _candidates(
        self, name: str, part: Range, cells: Sequence[Range], holders: Sequence[_Held]
    ) -> list[int]:
        """Ranks that have a part and the checksums of its cells. Raises ValueError: there are
        none."""
        having = [at for at, held in enumerate(holders) if held.ranges.offset_of(part) is not None]
        if not having:
            raise ValueError(f"tensor {name!r}: no rank has {part[0]} to {part[1]}")
        fitting = [at for at in having if all(cell in holders[at].cells for cell in cells)]
        if not fitting:
            raise ValueError(
                f"tensor {name!r}: the seed with --tp-size {len(holders)} has no checksums of "
                f"{part[0]} to {part[1]}, which this rank needs: start this server with the same "
                "--tp-size, or with 1, 2, 4 or 8"
            )
        return fitting

    def _held_of(self, part: TensorPart) -> _Held:
        held = self._held.get(part)
        if held is None:
            held = self._held[part] = _Held(part)
        return held

    def _held_by(self, answer: SeedAnswer, name: str, ours: TensorPart, itemsize: int) -> _Held:
        """Ranges that a rank of the seed holds of a tensor.

        Raises:
            ValueError: The rank lacks the tensor, has a different one, or splits it differently.
        """
        theirs, place = answer.weights.tensors.get(name), answer.places.get(name)
        if theirs is None or place is None:
            raise _not_in("the seed", name)
        _check_alike(name, theirs, ours)
        held = self._held_of(theirs)
        count = held.num_elements
        # Slots may have several copies of a part.
        if place[2] != itemsize or (place[1] % count if count else place[1]):
            raise ValueError(
                f"tensor {name!r} has {place[1]} elements of {place[2]} bytes on rank "
                f"{answer.rank} of the seed, not {count} of {itemsize}: start both with the same "
                "release"
            )
        return held


def _check_alike(name: str, theirs: TensorPart, ours: TensorPart) -> None:
    """Raises ValueError: the tensors differ, or are split differently."""
    if (theirs.dtype, theirs.shape) != (ours.dtype, ours.shape):
        raise ValueError(
            f"tensor {name!r} is {theirs} there and {ours} here: start both with the same model "
            "and --dtype, and quantized weights with the same --tp-size"
        )
    splits = {(part.split_dim, part.split_runs) for part in (theirs, ours) if part.split_runs}
    one_is_whole = not (theirs.split_runs and ours.split_runs)
    if len(splits) > 1 or (one_is_whole and any(dim for dim, _ in splits)):
        raise ValueError(
            f"tensor {name!r} is split differently there (dimension {theirs.split_dim}, runs of "
            f"{list(theirs.split_runs)}) than here (dimension {ours.split_dim}, runs of "
            f"{list(ours.split_runs)}): start both with the same release"
        )


def _columns(data: torch.Tensor, held: HeldRanges, part: Range) -> torch.Tensor:
    """The columns of `part` in `data` (see `rows_of`), whose columns are the ranges `held`."""
    offset = held.offset_of(part)
    assert offset is not None, "it is held"
    each = data.shape[1] // held.size
    return data[:, offset * each : (offset + part[1] - part[0]) * each]


def _not_in(where: str, name: str) -> ValueError:
    return ValueError(
        f"tensor {name!r} is not in {where}: start both with the same model, release "
        "and --speculative-algorithm"
    )


def check_checksums(
    plan: TensorPlan, ours: Sequence[str], digests: Sequence[WeightsDigest]
) -> None:
    """Compare the checksums of the read bytes with those of the seed.

    Args:
        ours: Checksum of each of the plan's cells.
        digests: Digest of each rank of the seed.

    Raises:
        ValueError: A tensor differs or has no checksum; names it.
    """
    for cell, checksum in zip(plan.cells, ours, strict=True):
        theirs = digests[cell.holder].checksums.get(plan.name, [])
        theirs_of_cell = theirs[cell.index] if cell.index < len(theirs) else "missing"
        if theirs_of_cell != checksum:
            raise ValueError(
                f"tensor {plan.name!r} arrived with checksum {checksum}, rank {cell.holder} of the "
                f"seed has {theirs_of_cell}: start again; if it repeats, one of the hosts damages "
                "memory"
            )
