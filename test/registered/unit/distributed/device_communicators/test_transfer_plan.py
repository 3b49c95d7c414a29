"""Blocks to requests to batches: every byte once, neighbours together, within the bounds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sglang.srt.constants import MIB
from sglang.srt.distributed.device_communicators.engine_pool import MemoryRange
from sglang.srt.distributed.device_communicators.transfer_types import (
    BATCH_BYTES,
    BATCH_REQUESTS,
    COPIES_BYTES,
    COPY_BYTES,
    REQUEST_BYTES,
    Block,
    Request,
    cut_batches,
    merge_blocks,
    one_by_one,
    split_merged,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

ONE = MemoryRange(1, 1 << 40)
OTHER = MemoryRange(1 << 40, 1 << 41)


def merged(*blocks: Block) -> list[tuple[int, int, int, int, int]]:
    requests = merge_blocks(blocks, [ONE] * len(blocks))
    return [(r.local, r.remote, r.length, r.first, r.last) for r in requests]


def test_neighbours_on_both_sides_are_one_request() -> None:
    blocks = (Block(100, 500, 10), Block(110, 510, 20), Block(130, 530, 5))
    assert merged(*blocks) == [(100, 500, 35, 0, 2)]


def test_neighbours_on_one_side_are_not() -> None:
    assert len(merged(Block(100, 500, 10), Block(110, 600, 10))) == 2
    assert len(merged(Block(100, 500, 10), Block(120, 510, 10))) == 2
    assert len(merged(Block(110, 510, 10), Block(100, 500, 10))) == 2


def test_a_request_stays_in_one_range() -> None:
    blocks = [Block((1 << 40) - 10, 0, 10), Block(1 << 40, 10, 10)]
    assert len(merge_blocks(blocks, [ONE, OTHER])) == 2


def test_large_blocks_are_cut_and_small_ones_joined_up_to_the_bound() -> None:
    assert merged(Block(0, 0, 40 * MIB)) == [
        (0, 0, 16 * MIB, 0, 0),
        (16 * MIB, 16 * MIB, 16 * MIB, 0, 0),
        (32 * MIB, 32 * MIB, 8 * MIB, 0, 0),
    ]
    small = [Block(i * MIB, i * MIB, MIB) for i in range(33)]
    assert [(first, last) for *_, first, last in merged(*small)] == [(0, 15), (16, 31), (32, 32)]


def test_the_bound_may_be_as_large_as_that_of_a_call() -> None:
    blocks = [Block(0, 0, 300 * MIB)]
    requests = merge_blocks(blocks, [ONE], BATCH_BYTES)
    assert [r.length for r in requests] == [256 * MIB, 44 * MIB]
    assert [len(batch.requests) for batch in cut_batches(requests)] == [1, 1]


def test_batches_hold_what_a_call_takes() -> None:
    tiny = [Request(i * 10, i * 10, 1, i, i) for i in range(1200)]
    assert [len(batch.requests) for batch in cut_batches(tiny)] == [512, 512, 176]
    batches = list(cut_batches(merge_blocks([Block(0, 0, 300 * MIB), Block(0, 0, 1)], [ONE] * 2)))
    assert [sum(r.length for r in batch.requests) for batch in batches] == [
        256 * MIB,
        44 * MIB + 1,
    ]
    assert [(b.first, b.last, b.is_last_whole) for b in batches] == [
        (0, 0, False),
        (0, 1, True),
    ]


def test_copies_between_devices_are_one_call() -> None:
    """72 buffers of a prompt, 16 MB each: between calls the link would be idle."""
    blocks = [Block(i * 32 * MIB, i * 32 * MIB, 16 * MIB) for i in range(72)]
    requests = merge_blocks(blocks, [ONE] * len(blocks), COPY_BYTES)
    (batch,) = cut_batches(requests, most_bytes=COPIES_BYTES)
    assert batch.requests == requests
    assert len(list(cut_batches(requests))) == 5


def test_a_batch_is_taken_apart_request_by_request_and_those_block_by_block() -> None:
    blocks = [Block(0, 0, 40 * MIB), Block(100 * MIB, 500, 10), Block(100 * MIB + 10, 510, 20)]
    (batch,) = cut_batches(merge_blocks(blocks, [ONE] * 3))
    singles = list(one_by_one(batch))
    assert [(s.first, s.last, s.is_last_whole) for s in singles] == [
        (0, 0, False),
        (0, 0, False),
        (0, 0, True),
        (1, 2, True),
    ]
    assert split_merged(singles[0], blocks) == []
    assert [part.requests for part in split_merged(singles[3], blocks)] == [
        [Request(100 * MIB, 500, 10, 1, 1)],
        [Request(100 * MIB + 10, 510, 20, 2, 2)],
    ]


def test_the_last_piece_of_a_batch_may_go_on_in_the_next() -> None:
    first, *_ = cut_batches(merge_blocks([Block(0, 0, 300 * MIB)], [ONE]))
    assert not any(single.is_last_whole for single in one_by_one(first))


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 3), st.sampled_from((1, 7, MIB, 20 * MIB))),
        max_size=40,
    )
)
def test_every_byte_moves_once_to_where_it_belongs(steps: list[tuple[int, int, int]]) -> None:
    blocks, local, remote = [], 1, 1
    for gap_here, gap_there, length in steps:
        local, remote = local + gap_here, remote + gap_there
        blocks.append(Block(local, remote, length))
        local, remote = local + length, remote + length
    batches = list(cut_batches(merge_blocks(blocks, [ONE] * len(blocks)), most=7))
    cursor = 0
    moved = [0] * len(blocks)
    for batch in batches:
        assert len(batch.requests) <= min(7, BATCH_REQUESTS)
        assert sum(request.length for request in batch.requests) <= BATCH_BYTES
        for request in batch.requests:
            assert request.length <= REQUEST_BYTES
            offset = 0
            while offset < request.length:
                block = blocks[cursor]
                assert request.first <= cursor <= request.last
                assert request.local + offset == block.local + moved[cursor]
                assert request.remote + offset == block.remote + moved[cursor]
                step = min(block.length - moved[cursor], request.length - offset)
                moved[cursor] += step
                offset += step
                cursor += moved[cursor] == block.length
    assert cursor == len(blocks)
