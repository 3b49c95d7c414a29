"""Which bytes of a seed's ranks make up the weights of this rank. Moves nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from sglang.srt.distributed.device_communicators.transfer_types import Block
from sglang.srt.layers.weight_slot import WeightSlot
from sglang.srt.model_loader.weight_offer import SeedAnswer, TensorPart, WeightsDigest, place_of
from sglang.srt.model_loader.weight_ranges import (
    EvenSpread,
    HeldRanges,
    Range,
    common_parts,
    cut_at,
)


@dataclass(frozen=True, slots=True)
class PartRead:
    """A part of one tensor on its way from one rank of a seed.

    Attributes:
        holder: The rank.
        remote: Address of the first row in that rank's process.
        row_bytes: Bytes of a row there.
        skipped: Bytes of a row before those that are wanted.
        dest: uint8 `[rows, bytes]` of the slot; rows are apart where the slot is split by columns.
    """

    holder: int
    remote: int
    row_bytes: int
    skipped: int
    dest: torch.Tensor

    @property
    def is_direct(self) -> bool:
        """Whether the part is contiguous on both sides. If not, whole rows are read elsewhere, and
        the part is copied from there: blocks of a part of a row each would take far longer."""
        rows, width = self.dest.shape
        return rows == 1 or (width == self.row_bytes and self.dest.is_contiguous())

    @property
    def num_bytes(self) -> int:
        """Bytes that the seed has to give, at least one."""
        return self.dest.numel() if self.is_direct else len(self.dest) * self.row_bytes

    def block(self, base: int | None = None) -> Block:
        """The block to read: the part itself, or whole rows to the address `base`."""
        if base is None:
            remote = self.remote + self.skipped
            return Block(self.dest.data_ptr(), remote, self.dest.numel())
        return Block(base, self.remote, self.num_bytes)

    def rows(self, begin: int, end: int) -> PartRead:
        """Some of the rows alone."""
        return replace(self, remote=self.remote + begin * self.row_bytes, dest=self.dest[begin:end])

    def copy_from(self, rows: torch.Tensor) -> None:
        """Take the part from whole rows, uint8 and as many as they have bytes."""
        end = self.skipped + self.dest.shape[1]
        self.dest.copy_(rows.view(-1, self.row_bytes)[:, self.skipped : end])


@dataclass(frozen=True, slots=True)
class Cell:
    """Bytes of a slot that are compared with a checksum.

    Attributes:
        holder: The rank of the seed that gave them.
        index: Index of their checksum among that rank's checksums of the tensor.
        data: uint8 `[rows, bytes]`.
    """

    holder: int
    index: int
    data: torch.Tensor


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """How one slot is filled."""

    name: str
    slot: WeightSlot
    reads: tuple[PartRead, ...]
    cells: tuple[Cell, ...]


def rows_of(slot: WeightSlot) -> torch.Tensor:
    """A slot's part, or the first copy of it, as uint8 `[rows, bytes]`.

    A row is all that has the same place in the dimensions before the one that is split.
    """
    first = slot.copies[0]
    place_of(first)
    rows = prod(first.shape[: slot.dim])
    if not first.numel():
        return first.new_empty((rows, 0), dtype=torch.uint8)
    return first.view(-1).view(torch.uint8).view(rows, -1)


def cell_views(slot: WeightSlot) -> list[torch.Tensor]:
    """uint8 `[rows, bytes]` of each of a slot's cells."""
    held = TensorPart.of(slot).held()
    data = rows_of(slot)
    return [_columns(data, held, cell) for cell in held.cells()]


def plan_reads(
    answers: Sequence[SeedAnswer], slots: Mapping[str, WeightSlot], *, rank: int
) -> list[TensorPlan]:
    """Plan how to fill all slots, sorted by address here. Replicas of the seed give equally much.

    Args:
        answers: Answers of all ranks of the seed, in their order, for the same model
            (`check_offer`).
        slots: Slots of the model here.
        rank: Rank of this server; ranks begin with different replicas.

    Raises:
        ValueError: Seed and model differ; names the first tensor, the difference and the remedy.
    """
    planner = _Planner(answers, rank % len(answers))
    names = {*slots, *(name for answer in answers for name in answer.weights.tensors)}
    plans = [planner.plan(name, slots.get(name)) for name in sorted(names)]
    return sorted(plans, key=lambda plan: plan.slot.dest.data_ptr())


class _Held:
    """Ranges that a rank of the seed holds of tensors that are alike, and its cells."""

    def __init__(self, part: TensorPart) -> None:
        self.ranges = part.held()
        self.cells = {cell: index for index, cell in enumerate(self.ranges.cells())}
        dim = part.split_dim if part.split_runs else 0
        others = [size for at, size in enumerate(part.shape) if at != dim]
        self.num_elements = self.ranges.size * prod(others)


class _Planner:
    """Plans one tensor after the other.

    Args:
        answers: See `plan_reads`.
        first: The replica that begins.
    """

    def __init__(self, answers: Sequence[SeedAnswer], first: int) -> None:
        self._answers = answers
        self._spread = EvenSpread(len(answers), first)
        self._held: dict[TensorPart, _Held] = {}
        """Layers have the same shapes."""

    def plan(self, name: str, slot: WeightSlot | None) -> TensorPlan:
        """How a slot is filled. Raises as `plan_reads`."""
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
        """Ranks that can give a part, with its cells' checksums. Raises ValueError: none can."""
        having = [at for at, held in enumerate(holders) if held.ranges.offset_of(part) is not None]
        if not having:
            raise ValueError(f"tensor {name!r}: {part[0]} to {part[1]} is on none of its ranks")
        fitting = [at for at in having if all(cell in holders[at].cells for cell in cells)]
        if not fitting:
            raise ValueError(
                f"tensor {name!r}: {part[0]} to {part[1]}, which this rank needs, is no part that "
                f"the seed with --tp-size {len(holders)} has checksums of: start this server with "
                "the same --tp-size, or with 1, 2, 4 or 8"
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
            ValueError: It has no such tensor, or another one, or is split in other directions.
        """
        theirs, place = answer.weights.tensors.get(name), answer.places.get(name)
        if theirs is None or place is None:
            raise _not_in("the seed", name)
        _check_alike(name, theirs, ours)
        held = self._held_of(theirs)
        count = held.num_elements
        # Some have several copies.
        if place[2] != itemsize or (place[1] % count if count else place[1]):
            raise ValueError(
                f"tensor {name!r} has {place[1]} elements of {place[2]} bytes on rank "
                f"{answer.rank} of the seed, not {count} of {itemsize}: start both with the same "
                "release"
            )
        return held


def _check_alike(name: str, theirs: TensorPart, ours: TensorPart) -> None:
    """Raises ValueError: the tensors are not the same, or are split in other directions."""
    if (theirs.dtype, theirs.shape) != (ours.dtype, ours.shape):
        raise ValueError(
            f"tensor {name!r} is {theirs} there and {ours} here: start both with the same model "
            "and --dtype"
        )
    splits = {(part.split_dim, part.split_runs) for part in (theirs, ours) if part.split_runs}
    one_is_whole = not (theirs.split_runs and ours.split_runs)
    if len(splits) > 1 or (one_is_whole and any(dim for dim, _ in splits)):
        raise ValueError(
            f"tensor {name!r} is split in another way there (dimension {theirs.split_dim}, runs of "
            f"{list(theirs.split_runs)}) than here (dimension {ours.split_dim}, runs of "
            f"{list(ours.split_runs)}): start both with the same release"
        )


def _columns(data: torch.Tensor, held: HeldRanges, part: Range) -> torch.Tensor:
    """A part of what is held, of `rows_of`."""
    offset = held.offset_of(part)
    assert offset is not None, "it is held"
    each = data.shape[1] // held.size
    return data[:, offset * each : (offset + part[1] - part[0]) * each]


def _not_in(where: str, name: str) -> ValueError:
    return ValueError(
        f"tensor {name!r} is not in {where}: start both with the same model and release"
    )


def check_checksums(
    plan: TensorPlan, ours: Sequence[str], digests: Sequence[WeightsDigest]
) -> None:
    """Compare what arrived with what the seed has.

    Args:
        ours: Checksum of each of the plan's cells.
        digests: Digest of each rank of the seed.

    Raises:
        ValueError: Names the tensor, if it differs or has no checksum.
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
