"""Which ranges of a split tensor ranks hold, and where a range is at another split. Pure.

A tensor is split along one dimension, which is made of runs that are split one by one (queries,
keys and values in one matrix are three). A rank holds a range of each run, one after the other.
Indices are those of the whole tensor's dimension.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, TypeAlias

Range: TypeAlias = tuple[int, int]
"""Begin and end."""

GRID_SIZES: Final = (1, 2, 4, 8)
"""Numbers of ranks at whose bounds checksums are taken, whatever the split of the seed."""


@dataclass(frozen=True, slots=True)
class HeldRanges:
    """The part of a dimension that one rank holds.

    Attributes:
        ranges: The range held of each run, ascending; empty ones are left out.
        grid: Bounds between checksums, ascending.
    """

    ranges: tuple[Range, ...]
    grid: tuple[int, ...]

    @classmethod
    def of(cls, ranges: Iterable[Range], runs: Sequence[int]) -> HeldRanges:
        """Args:
        ranges: One for each run.
        runs: Lengths of the runs; empty: the dimension is never split.
        """
        held = tuple((begin, end) for begin, end in ranges if begin < end)
        return cls(held, tuple(grid_of(runs)))

    @property
    def size(self) -> int:
        """How many elements of the dimension it holds."""
        return sum(end - begin for begin, end in self.ranges)

    def cells(self) -> list[Range]:
        """The parts of which checksums are taken, ascending."""
        return cut_at(self.ranges, self.grid)

    def offset_of(self, part: Range) -> int | None:
        """Index of the first element of `part` among those held; None: not all of it is held."""
        offset = 0
        for begin, end in self.ranges:
            if begin <= part[0] and part[1] <= end:
                return offset + part[0] - begin
            offset += end - begin
        return None


def grid_of(runs: Sequence[int]) -> list[int]:
    """Bounds of the shares of each number of ranks of `GRID_SIZES`, in all runs."""
    grid: set[int] = set()
    for begin, length in zip(accumulate(runs, initial=0), runs, strict=False):
        for count in GRID_SIZES:
            share = -(-length // count)
            grid.update(begin + min(share * place, length) for place in range(count + 1))
    return sorted(grid)


def cut_at(ranges: Iterable[Range], cuts: Sequence[int]) -> list[Range]:
    """The same ranges in smaller parts, none of which goes over one of `cuts`, ascending."""
    parts = []
    for begin, end in ranges:
        within = cuts[bisect_right(cuts, begin) : bisect_left(cuts, end)]
        parts += list(zip((begin, *within), (*within, end), strict=True))
    return parts


def common_parts(wanted: HeldRanges, holders: Sequence[HeldRanges]) -> list[Range]:
    """Cut `wanted` into parts of which each holder has all or nothing."""
    bounds = {bound for holder in holders for part in holder.ranges for bound in part}
    return cut_at(wanted.ranges, sorted(bounds))


class EvenSpread:
    """Chooses among replicas: the one that was asked for the fewest bytes until now.

    Args:
        num_holders: Number of replicas.
        first: The replica that is preferred among equals; after it the next ones.
    """

    def __init__(self, num_holders: int, first: int) -> None:
        self.num_bytes = [0] * num_holders
        self._first = first

    def choose(self, candidates: Sequence[int], num_bytes: int) -> int:
        """The one of `candidates` that is going to give these bytes."""
        count = len(self.num_bytes)
        chosen = min(
            candidates,
            key=lambda holder: (self.num_bytes[holder], (holder - self._first) % count),
        )
        self.num_bytes[chosen] += num_bytes
        return chosen
