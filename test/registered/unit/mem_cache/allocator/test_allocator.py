"""Device slot allocators: examples, and a random walk beside a model made of Python sets."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rigs.torch_launches import TorchLaunches
from sglang.srt.mem_cache.allocator import (
    BaseTokenToKVPoolAllocator,
    PagedTokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
    make_allocator,
)
from sglang.srt.mem_cache.device.memory_pool import MHATokenToKVPool
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")


def make(page_size: int, num_pages: int) -> BaseTokenToKVPoolAllocator:
    size = page_size * num_pages
    if page_size == 1:
        return TokenToKVPoolAllocator(size, torch.float32, "cpu", None)
    return PagedTokenToKVPoolAllocator(size, page_size, torch.float32, "cpu", None)


def extend(
    allocator: BaseTokenToKVPoolAllocator, prefix: list[int], seq: list[int], last: list[int]
) -> list[int] | None:
    got = allocator.alloc_extend(
        torch.tensor(prefix),
        prefix,
        torch.tensor(seq),
        seq,
        torch.tensor(last),
        sum(seq) - sum(prefix),
    )
    return None if got is None else got.tolist()


def test_extend_fills_the_last_page_then_takes_new_ones() -> None:
    allocator = make(4, 8)
    assert extend(allocator, [0, 0], [6, 3], [-1, -1]) == [4, 5, 6, 7, 8, 9, 12, 13, 14]
    # The first goes on in slot 10, the second in 15; then pages 4 and 5.
    assert extend(allocator, [6, 3], [9, 5], [9, 14]) == [10, 11, 16, 15, 20]
    assert allocator.available_size() == 12


def test_extend_inside_one_page_takes_none() -> None:
    allocator = make(4, 1)
    assert extend(allocator, [0], [1], [-1]) == [4]
    assert extend(allocator, [1], [4], [4]) == [5, 6, 7]
    assert extend(allocator, [4], [5], [7]) is None
    assert allocator.available_size() == 0


def test_decode_opens_a_page_only_at_its_first_token() -> None:
    allocator = make(4, 4)
    extend(allocator, [0, 0], [4, 5], [-1, -1])
    seq = [5, 6]
    slots = allocator.alloc_decode(torch.tensor(seq), seq, torch.tensor([7, 12]))
    assert slots is not None
    assert slots.tolist() == [16, 13]
    assert allocator.alloc_decode(torch.tensor([9]), [9], torch.tensor([19])) is None


@pytest.mark.parametrize("page_size", [1, 4])
def test_warming_up_leaves_every_page_free_and_in_order(page_size: int) -> None:
    allocator = make(page_size, 3)
    allocator.warm_up()
    assert [ids.tolist() for ids in allocator.free_page_ids()] == [[1, 2, 3]]
    assert allocator.available_size() == 3 * page_size
    allocator.alloc(page_size)
    with pytest.raises(AssertionError, match="in use"):
        allocator.warm_up()


def test_page_zero_is_never_handed_out() -> None:
    for page_size in (1, 4):
        slots = make(page_size, 3).alloc(3 * page_size)
        assert slots is not None
        assert slots.min() == page_size


def test_returned_pages_come_out_in_order_once_they_are_sorted() -> None:
    allocator = make(2, 4)
    slots = allocator.alloc(8)
    assert slots is not None
    allocator.free(slots[6:])
    allocator.free(slots[:4])
    first = allocator.alloc(2)  # Nothing else is free: it does not wait for the list to be sorted.
    assert first is not None
    assert first.tolist() == [8, 9]
    allocator.free(first)
    allocator.merge_and_sort_free()
    again = allocator.alloc(6)
    assert again is not None
    assert again.tolist() == [2, 3, 4, 5, 8, 9]


def test_room_is_taken_from_returned_pages_in_two_launches() -> None:
    allocator = make(4, 8)
    allocator._is_free = None  # As on a device.
    slots = allocator.alloc(32)
    assert slots is not None
    allocator.free_in_order(slots[16:])
    allocator.free_in_order(slots[:16])
    with TorchLaunches() as launches:
        taken = allocator.alloc(24)
    assert launches.names == ["cat", "add"]
    assert taken is not None
    assert taken.tolist() == [*range(20, 36), *range(4, 12)]


@pytest.mark.parametrize("page_size", [1, 4])
def test_double_free_is_caught(page_size: int) -> None:
    allocator = make(page_size, 3)
    slots = allocator.alloc(2 * page_size)
    assert slots is not None
    allocator.free(slots[:page_size])
    with pytest.raises(AssertionError, match=r"freed twice: \[1\]"):
        allocator.free(slots)
    with pytest.raises(AssertionError, match=r"freed twice: \[3\]"):
        allocator.free(torch.tensor([3 * page_size]))


def test_a_device_catches_a_double_free_when_it_sorts() -> None:
    allocator = make(4, 3)
    allocator._is_free = None  # As on a device, whose check must not wait.
    slots = allocator.alloc(8)
    assert slots is not None
    allocator.free_in_order(slots)
    assert [ids.tolist() for ids in allocator.free_page_ids()] == [[3], [1, 2]]
    allocator.free_in_order(slots[4:])
    with pytest.raises(RuntimeError):
        allocator.merge_and_sort_free()


def test_a_free_group_counts_a_page_once() -> None:
    allocator = make(4, 2)
    slots = allocator.alloc(8)
    assert slots is not None
    allocator.free_group_begin()
    for part in (slots[:3], slots[3:6], slots[6:]):
        allocator.free(part)
    assert allocator.available_size() == 0
    allocator.free_group_end()
    assert allocator.available_size() == 8


def test_the_pool_decides_which_allocator() -> None:
    for page_size, kind in ((1, TokenToKVPoolAllocator), (2, PagedTokenToKVPoolAllocator)):
        pool = MHATokenToKVPool(8, page_size, torch.float32, 1, 1, 1, "cpu")
        allocator = make_allocator(pool)
        assert type(allocator) is kind
        assert allocator.get_kvcache() is pool
    with pytest.raises(ValueError, match="size=7"):
        PagedTokenToKVPoolAllocator(7, 2, torch.float32, "cpu", None)


class AllocatorWalk(RuleBasedStateMachine):
    """Requests grow, split and leave; the model knows each one's slots by heart."""

    @initialize(page_size=st.sampled_from([1, 2, 4]), num_pages=st.integers(1, 12))
    def start(self, page_size: int, num_pages: int) -> None:
        self.page_size = page_size
        self.num_pages = num_pages
        self.allocator = make(page_size, num_pages)
        self.rows: list[list[int]] = []

    def pages_of(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def free_pages(self) -> int:
        return self.num_pages - sum(self.pages_of(len(row)) for row in self.rows)

    @rule(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=3))
    def prefill(self, lengths: list[int]) -> None:
        zeros = [0] * len(lengths)
        slots = extend(self.allocator, zeros, lengths, zeros)
        if sum(map(self.pages_of, lengths)) > self.free_pages():
            assert slots is None
            return
        assert slots is not None
        for length in lengths:
            self.rows.append(slots[:length])
            slots = slots[length:]

    @precondition(lambda self: self.rows)
    @rule(growth=st.lists(st.integers(1, 9), min_size=1, max_size=3))
    def next_chunk(self, growth: list[int]) -> None:
        rows = self.rows[: len(growth)]
        prefix = [len(row) for row in rows]
        seq = [p + g for p, g in zip(prefix, growth, strict=False)]
        slots = extend(self.allocator, prefix, seq, [row[-1] for row in rows])
        need = sum(self.pages_of(s) - self.pages_of(p) for p, s in zip(prefix, seq, strict=True))
        if need > self.free_pages():
            assert slots is None
            return
        assert slots is not None
        for row, p, s in zip(rows, prefix, seq, strict=True):
            row.extend(slots[: s - p])
            slots = slots[s - p :]

    @precondition(lambda self: self.rows)
    @rule()
    def decode(self) -> None:
        seq = [len(row) + 1 for row in self.rows]
        last = torch.tensor([row[-1] for row in self.rows])
        slots = self.allocator.alloc_decode(torch.tensor(seq), seq, last)
        if sum(self.pages_of(s) - self.pages_of(s - 1) for s in seq) > self.free_pages():
            assert slots is None
            return
        assert slots is not None
        for row, slot in zip(self.rows, slots.tolist(), strict=True):
            row.append(slot)

    @precondition(lambda self: self.rows)
    @rule(which=st.integers(0, 99))
    def leave(self, which: int) -> None:
        self.allocator.free(torch.tensor(self.rows.pop(which % len(self.rows))))

    @rule()
    def sort(self) -> None:
        self.allocator.merge_and_sort_free()

    @invariant()
    def books_agree(self) -> None:
        assert self.allocator.available_size() == self.free_pages() * self.page_size
        held = [{slot // self.page_size for slot in row} for row in self.rows]
        free = torch.cat([*self.allocator.free_page_ids()]).tolist()
        pages = [*free, *(page for of_row in held for page in of_row)]
        assert sorted(pages) == list(range(1, self.num_pages + 1)), "one owner for each page"
        for row in self.rows:
            assert [slot % self.page_size for slot in row] == [
                position % self.page_size for position in range(len(row))
            ]


TestAllocatorWalk = AllocatorWalk.TestCase
TestAllocatorWalk.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
