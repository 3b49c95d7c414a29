"""Registered memory: what overlaps, what is unknown, what is in use."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang.srt.distributed.device_communicators.engine_pool import MemoryRegistry
from sglang.srt.distributed.device_communicators.transfer_types import (
    Block,
    OverlappingRange,
    RangeInUse,
    UnknownRange,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")


@pytest.fixture
def registry() -> MemoryRegistry:
    made = MemoryRegistry()
    made.add([1000, 3000], [100, 500])
    return made


@pytest.mark.parametrize(
    ("ptr", "length"), [(1000, 100), (1099, 1), (999, 2), (900, 300), (1010, 5), (3499, 10)]
)
def test_overlaps_are_refused(registry: MemoryRegistry, ptr: int, length: int) -> None:
    with pytest.raises(OverlappingRange, match="overlap the registered range of"):
        registry.add([5000, ptr], [10, length])
    assert registry.ranges() == [(1000, 100), (3000, 500)]


def test_neighbours_do_not_overlap(registry: MemoryRegistry) -> None:
    registry.add([900, 1100], [100, 1900])
    assert registry.ranges() == [(900, 100), (1000, 100), (1100, 1900), (3000, 500)]
    with pytest.raises(OverlappingRange):
        registry.add([1], [899 + 1])


@pytest.mark.parametrize(("ptrs", "lengths"), [([5], [0]), ([0], [5]), ([5], [-1]), ([5], [])])
def test_what_is_no_range(registry: MemoryRegistry, ptrs: list[int], lengths: list[int]) -> None:
    with pytest.raises(ValueError, match=r"cannot register|1 addresses with 0 lengths"):
        registry.add(ptrs, lengths)


def test_only_whole_known_ranges_are_removed(registry: MemoryRegistry) -> None:
    for ptrs in ([1001], [1000, 1000], [1000, 9]):
        with pytest.raises(UnknownRange):
            registry.remove(ptrs)
    assert len(registry.ranges()) == 2
    registry.remove([3000, 1000])
    assert registry.ranges() == []
    with pytest.raises(UnknownRange, match="no registered range begins at 0x3e8"):
        registry.remove([1000])


def test_a_range_in_use_stays(registry: MemoryRegistry) -> None:
    twice = [registry.pin([Block(1000, 0, 10), Block(1020, 50, 10)]) for _ in range(2)]
    for ranges in twice:
        with pytest.raises(RangeInUse, match="wait until they are settled"):
            registry.remove([3000, 1000])
        registry.unpin(ranges)
    registry.remove([3000, 1000])


def test_a_refused_pin_keeps_nothing(registry: MemoryRegistry) -> None:
    with pytest.raises(UnknownRange, match="block 1: 101 bytes at 0x3e8"):
        registry.pin([Block(1000, 0, 10), Block(1000, 0, 101)])
    registry.remove([1000])


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(-1, 12)), max_size=8),
    st.integers(-5, 80),
    st.integers(-1, 20),
)
def test_what_is_pinned_is_registered(
    added: list[tuple[int, int]], local: int, length: int
) -> None:
    """Against a set of addresses, one a byte; a block stays within one range."""
    registry = MemoryRegistry()
    kept: list[range] = []
    for ptr, size in added:
        new = range(ptr, ptr + max(size, 0))
        fits = size > 0 and ptr > 0 and not any(set(new) & set(known) for known in kept)
        try:
            registry.add([ptr], [size])
        except ValueError:
            assert not fits
        else:
            assert fits
            kept.append(new)
    wanted = set(range(local, local + length))
    allowed = length > 0 and any(wanted <= set(known) for known in kept)
    try:
        registry.pin([Block(local, 0, length)])
    except ValueError:
        assert not allowed
    else:
        assert allowed
