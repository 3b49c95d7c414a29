"""The trace simulator: token prefixes, division into tiers, and hits counted by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rigs.bench.belady import belady_hits, unlimited_hits
from rigs.bench.cache_simulation import (
    Arrangement,
    CacheSizes,
    ReplayResult,
    SimulatedCache,
    TracePrompts,
    replay,
)
from rigs.bench.page_trace import page_trace_of, several
from sglang.benchmark.workload import (
    TokenMaker,
    TraceRequest,
    TraceScale,
    read_trace,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")

EXCERPT = Path(__file__).parents[4] / "benchmark/data/mooncake_synthetic_excerpt.jsonl"
SCALE = TraceScale(length=4 / 512)
"""A block is 4 tokens, which is a page below."""
PAGE = 4


def request(*blocks: int) -> TraceRequest:
    """A prompt of whole blocks and half a block, so that all whole blocks may hit."""
    return TraceRequest(0, len(blocks) * 512 + 256, 1, (*blocks, 10_000 + blocks[-1]))


def run(
    trace: list[TraceRequest], sizes: CacheSizes, arrangement: Arrangement, policy: str = "lru"
) -> ReplayResult:
    cache = SimulatedCache(sizes, page_size=PAGE, policy=policy, arrangement=arrangement)
    result = ReplayResult()
    for so_far in replay(cache, TracePrompts(trace, SCALE, PAGE)):
        result = so_far
    cache.close()
    return result


def test_hits_in_one_tier_by_hand() -> None:
    trace = [request(1, 2), request(3), request(1, 2), request(4), request(1, 2), request(3)]
    # 3 pages: (1 2) and 3 stay; 4 pushes 3 out, which is the least recently used.
    got = run(trace, CacheSizes(l1_pages=3, l2_pages=0), Arrangement.ONE_TIER)
    assert (got.device_tokens, got.host_tokens, got.page_tokens) == (4 * PAGE, 0, 9 * PAGE)


def test_a_policy_that_counts_uses_keeps_frequent_pages() -> None:
    trace = [request(1), request(1), request(2), request(3), request(1)]
    sizes = CacheSizes(l1_pages=2, l2_pages=0)
    assert run(trace, sizes, Arrangement.ONE_TIER, "lru").hit_tokens == PAGE
    assert run(trace, sizes, Arrangement.ONE_TIER, "lfu").hit_tokens == 2 * PAGE


def test_pages_evicted_from_l1_hit_in_l2() -> None:
    trace = [request(1), request(2), request(1), request(1)]
    sizes = CacheSizes(l1_pages=1, l2_pages=2)
    for arrangement in (Arrangement.WRITE_THROUGH, Arrangement.WRITE_BACK):
        got = run(trace, sizes, arrangement)
        assert (got.device_tokens, got.host_tokens) == (PAGE, PAGE), arrangement


def test_write_through_duplicates_l1_in_l2_and_write_back_does_not() -> None:
    # At the second 1, L2 holds 2 and 3 under write_through, 1 and 2 under write_back (3 in L1).
    trace = [request(1), request(2), request(3), request(1)]
    sizes = CacheSizes(l1_pages=1, l2_pages=2)
    assert run(trace, sizes, Arrangement.WRITE_THROUGH).hit_tokens == 0
    assert run(trace, sizes, Arrangement.WRITE_BACK).hit_tokens == PAGE


@pytest.mark.parametrize("policy", ["lru", "lfu", "fifo", "slru"])
def test_the_real_tree_never_beats_belady_and_hits_all_at_full_size(policy: str) -> None:
    trace = read_trace(EXCERPT, 120)
    pages = page_trace_of(trace, SCALE, PAGE)
    longest, ideal = pages.longest_pages, unlimited_hits(pages).hit_pages
    assert ideal > 0
    for arrangement in (Arrangement.ONE_TIER, Arrangement.WRITE_THROUGH):
        sizes = CacheSizes.divide(longest + 100, arrangement, ratio=2, longest_pages=longest)
        got = run(trace, sizes, arrangement, policy)
        assert got.hit_tokens <= belady_hits(pages, longest + 100).hit_pages * PAGE
        assert got.page_tokens == sum(len(one.pages) for one in pages.requests) * PAGE
    full = CacheSizes(l1_pages=pages.num_pages, l2_pages=0)
    assert run(trace, full, Arrangement.ONE_TIER, policy).hit_tokens == ideal * PAGE


def test_memory_is_divided_into_tiers() -> None:
    def divide(total: int, arrangement: Arrangement) -> tuple[int, int]:
        sizes = CacheSizes.divide(total, arrangement, ratio=2, longest_pages=10)
        return sizes.l1_pages, sizes.l2_pages

    assert divide(60, Arrangement.ONE_TIER) == (60, 0)
    assert divide(60, Arrangement.WRITE_BACK) == (20, 40)
    assert divide(12, Arrangement.WRITE_THROUGH) == (10, 2)  # the longest request has to fit L1
    with pytest.raises(ValueError, match="longest request has 10"):
        divide(10, Arrangement.WRITE_THROUGH)


def test_only_equal_ids_give_equal_prefixes() -> None:
    maker = TokenMaker(np.arange(100, 1100, dtype=np.uint32), 8)
    first, second = maker.prompt([7, 8, 9], 20), maker.prompt([7, 8, 5], 24)
    assert len(first) == 20 and len(second) == 24
    assert (first[:16] == second[:16]).all() and (first[16:] != second[16:20]).any()
    again = TokenMaker(np.arange(100, 1100, dtype=np.uint32), 8)
    assert (again.prompt([7, 8, 9], 20) == first).all()
    assert first.min() >= 100


def test_lengths_are_scaled_to_at_least_a_token() -> None:
    one = TraceRequest(0, 512 + 256, 100, (1, 2))
    assert TraceScale(length=1 / 8).prompt_tokens(one) == 64 + 32
    assert TraceScale(length=1 / 512).prompt_tokens(one) == 1
    assert TraceScale(output=0.001).output_tokens(one) == 1
    with pytest.raises(ValueError, match=r"at least 0\.00195"):
        TraceScale(length=1 / 600)
    with pytest.raises(ValueError, match="not a whole number of pages"):
        page_trace_of([one], TraceScale(length=1 / 8), 48)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1: not a trace request"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 1}', "hash_ids"),
        (
            '{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1]}',
            "needs 2 hash_ids, there are 1",
        ),
    ],
)
def test_errors_name_a_file_that_is_not_a_trace(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ValueError, match=message):
        read_trace(path)


def test_groups_of_users_share_no_prompts_and_take_turns() -> None:
    trace = [request(1, 2), request(1, 3), request(0)]
    both = several(trace, 2)
    assert [one.hash_ids[0] % 10_004 for one in both] == [1, 1, 1, 1, 0, 0]
    assert both[::2] == trace
    ids = [{block for one in both[group::2] for block in one.hash_ids} for group in range(2)]
    assert not ids[0] & ids[1]
    unlimited = CacheSizes(l1_pages=50, l2_pages=0)
    hits = [run(one, unlimited, Arrangement.ONE_TIER).hit_tokens for one in (trace, both)]
    assert hits == [PAGE, 2 * PAGE]
