"""Ranges of split tensors: whatever splits and replicas, the parts are exactly the tensor."""

from __future__ import annotations

import itertools
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang.srt.layers.placement import Share
from sglang.srt.model_loader.seed_answer import (
    EvenSpread,
    HeldRanges,
    common_parts,
    cut_at,
    grid_of,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")

SIZES = (1, 2, 4, 8)


def test_the_grid_has_the_bounds_of_all_sizes() -> None:
    assert grid_of([]) == []
    assert grid_of([16]) == list(range(0, 17, 2))
    # Rows that do not divide: each size rounds up for itself. Three of eight have none.
    assert grid_of([9]) == [0, 2, 3, 4, 5, 6, 8, 9]
    assert grid_of([2, 4]) == [0, 1, 2, 3, 4, 5, 6]


def test_ranges_are_cut_at_the_given_places() -> None:
    assert cut_at([(0, 4), (6, 9)], [0, 2, 4, 5, 8, 12]) == [(0, 2), (2, 4), (6, 8), (8, 9)]
    assert cut_at([(3, 5)], []) == [(3, 5)]
    assert cut_at([], [1]) == []


def test_where_a_part_is_in_memory() -> None:
    held = HeldRanges.of([(2, 4), (5, 5), (10, 14)], [5, 5, 10])
    assert held.ranges == ((2, 4), (10, 14))
    assert held.size == 6
    assert [held.offset_of(part) for part in ((2, 4), (3, 4), (10, 12), (12, 14))] == [0, 1, 2, 4]
    assert [held.offset_of(part) for part in ((1, 3), (3, 5), (4, 10), (2, 14))] == [None] * 4


def test_parts_end_where_a_holder_ends() -> None:
    def one(begin: int, end: int) -> HeldRanges:
        return HeldRanges.of([(begin, end)], [10])

    assert common_parts(one(2, 8), [one(0, 5), one(5, 10)]) == [(2, 5), (5, 8)]
    assert common_parts(one(2, 8), [one(0, 10), one(0, 10)]) == [(2, 8)]
    assert common_parts(one(4, 4), [one(0, 10)]) == []


def test_replicas_give_equally_much() -> None:
    spread = EvenSpread(4, first=2)
    assert [spread.choose([0, 1, 2, 3], 10) for _ in range(5)] == [2, 3, 0, 1, 2]
    assert spread.choose([0], 100) == 0
    assert [spread.choose([0, 1], 30) for _ in range(3)] == [1, 1, 1]
    assert spread.num_bytes == [110, 100, 20, 10]


Split = tuple[list[list[tuple[int, int]]], list[int]]


def even(total: int, size: int) -> list[Share]:
    """Share of each rank, if the ranks divide `total`."""
    each = total // size
    return [Share(rank * each, (rank + 1) * each, total) for rank in range(size)]


def rounded_up(total: int, size: int) -> list[Share]:
    """Share of each rank, as a vocabulary is split: the last ranks have fewer."""
    each = -(-total // size)
    bounds = [min(rank * each, total) for rank in range(size + 1)]
    return [Share(begin, end, total) for begin, end in itertools.pairwise(bounds)]


def heads(count: int, dim: int, size: int) -> list[Share]:
    """Share of each rank; several ranks have the same head if there are too few."""
    if size <= count:
        return [share.times(dim) for share in even(count, size)]
    return [
        Share(rank * count // size, rank * count // size + 1, count).times(dim)
        for rank in range(size)
    ]


@st.composite
def tensors(draw: st.DrawFn) -> tuple[list[str], list[tuple[int, int]]]:
    """Runs of a dimension: how each is split, and its numbers."""
    kinds = draw(st.lists(st.sampled_from(["even", "rows", "heads"]), min_size=1, max_size=3))
    numbers = [
        (draw(st.sampled_from([1, 2, 4, 8])), draw(st.integers(1, 9)))
        if kind == "heads"
        else (8 * draw(st.integers(1, 5)), 1)
        if kind == "even"
        else (draw(st.integers(1, 60)), 1)
        for kind in kinds
    ]
    return kinds, numbers


def shares_of(
    kinds: list[str], numbers: list[tuple[int, int]], size: int
) -> tuple[list[HeldRanges], int]:
    """Ranges that each rank of a server holds, and the length of the dimension."""
    runs: list[list[Share]] = []
    for kind, (count, dim) in zip(kinds, numbers, strict=True):
        if kind == "heads":
            runs.append(heads(count, dim, size))
        else:
            runs.append(even(count, size) if kind == "even" else rounded_up(count, size))
    totals = [run[0].total for run in runs]
    firsts = [sum(totals[:at]) for at in range(len(totals))]
    held = [
        HeldRanges.of(
            [
                (first + run[rank].begin, first + run[rank].end)
                for first, run in zip(firsts, runs, strict=True)
            ],
            totals,
        )
        for rank in range(size)
    ]
    return held, sum(totals)


def memory_of(held: HeldRanges, whole: np.ndarray) -> np.ndarray:
    """Memory of a rank that holds these ranges."""
    return np.concatenate([whole[:0], *(whole[begin:end] for begin, end in held.ranges)])


@given(tensors(), st.sampled_from(SIZES), st.sampled_from(SIZES), st.randoms())
def test_parts_of_any_replicas_are_the_tensor(
    tensor: tuple[list[str], list[tuple[int, int]]],
    there: int,
    here: int,
    random: Random,
) -> None:
    """Each reader's memory, put together from holders at random, is what it would read from a
    file; and checksums taken there are of the same cells as those taken here."""
    holders, total = shares_of(*tensor, there)
    readers, _ = shares_of(*tensor, here)
    whole = np.arange(total) + 1
    memories = [memory_of(held, whole) for held in holders]
    for reader in readers:
        got = np.zeros(reader.size, int)
        for part in common_parts(reader, holders):
            offsets = {at: held.offset_of(part) for at, held in enumerate(holders)}
            candidates = [at for at, offset in offsets.items() if offset is not None]
            assert candidates, "somebody has it"
            holder = random.choice(candidates)
            begin, place, length = offsets[holder], reader.offset_of(part), part[1] - part[0]
            assert begin is not None and place is not None
            assert not got[place : place + length].any(), "twice"
            got[place : place + length] = memories[holder][begin : begin + length]
            cells = cut_at([part], reader.grid)
            assert set(cells) <= set(holders[holder].cells())
        assert got.tolist() == memory_of(reader, whole).tolist()


@pytest.mark.parametrize("size", SIZES)
def test_cells_are_few(size: int) -> None:
    (first, *_), _ = shares_of(["even"], [(4096, 1)], size)
    assert len(first.cells()) == 8 // size
