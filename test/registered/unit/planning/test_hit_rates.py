"""Hit rates by stack distances: by hand, and against replays on the engine's own tree."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from rigs.bench.cache_simulation import (
    Arrangement,
    CacheSizes,
    ReplayResult,
    SimulatedCache,
    TracePrompts,
    replay,
)
from sglang.benchmark.workload import TraceRequest, TraceScale, read_trace
from sglang.planning.hit_rates import stack_distances
from sglang.srt.mem_cache.tree import pool_tier
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")

EXCERPT: Final = Path(__file__).parents[4] / "benchmark/data/mooncake_synthetic_excerpt.jsonl"
BLOCK: Final = 512
SCALE: Final = TraceScale(length=8 / BLOCK)
"""A block of the replay has 8 tokens, which is a page; the pages of the trace have 512."""


def request(*blocks: int) -> TraceRequest:
    """Whole blocks and one token."""
    return TraceRequest(0, len(blocks) * BLOCK + 1, 1, (*blocks, -1))


def rate(trace: list[TraceRequest], blocks: float) -> float:
    return stack_distances(trace, BLOCK).hit_rate(blocks * BLOCK)


def test_a_page_is_found_if_the_cache_holds_all_that_was_used_since() -> None:
    trace = [request(1, 2), request(3), request(1, 2)]
    # 1 and 2 are followed by 3, so that they end at 2 and 3 blocks.
    assert [rate(trace, blocks) for blocks in (1, 2, 3, math.inf)] == [0, 1 / 5, 2 / 5, 2 / 5]


def test_a_prefix_that_branches_keeps_the_shared_part_in_front() -> None:
    trace = [request(1, 2), request(1, 3), request(1, 2)]
    # The list is then 1 3 2: the second request finds 1, the third finds 1 at 1 block and 2 at 3.
    assert [rate(trace, blocks) for blocks in (1, 2, 3)] == [2 / 6, 2 / 6, 3 / 6]


def test_equal_blocks_behind_different_ones_are_different_pages() -> None:
    assert rate([request(1, 2), request(3, 2)], math.inf) == 0


def test_the_last_token_of_a_prompt_is_computed_and_partial_pages_are_not_kept() -> None:
    whole = TraceRequest(0, BLOCK, 1, (1,))
    found = stack_distances([whole, whole], 64)
    assert found.prompt_tokens == 2 * BLOCK
    assert found.hit_rate(math.inf) == (BLOCK - 64) / (2 * BLOCK)
    short = TraceRequest(0, 100, 1, (1,))
    found = stack_distances([short, short], 64)
    assert (found.prompt_tokens, found.distinct_tokens) == (128, 64)
    assert found.hit_rate(math.inf) == 0.5


def test_a_trace_without_whole_pages_has_no_hits() -> None:
    assert stack_distances([TraceRequest(0, 10, 1, (1,))] * 2, 64).hit_rate(math.inf) == 0


def test_answers_take_room_behind_their_prompts() -> None:
    answered = dataclasses.replace(request(3), output_length=2 * BLOCK)
    trace = [request(1, 2), answered, request(1, 2), request(3)]
    # 1 and 2 are followed by 3 and two blocks of its answer; 3 by 1 and 2 alone.
    assert [rate(trace, blocks) for blocks in (2, 3, 4, 5)] == [0, 1 / 6, 2 / 6, 3 / 6]
    assert stack_distances(trace, BLOCK).distinct_tokens == 5 * BLOCK
    # Its last token is not cached.
    short = dataclasses.replace(answered, output_length=BLOCK - 1)
    assert stack_distances([short], BLOCK).distinct_tokens == BLOCK
    assert stack_distances([short], BLOCK - 1).distinct_tokens == 2 * (BLOCK - 1)


TRACE: Final = [dataclasses.replace(one, output_length=1) for one in read_trace(EXCERPT)]
"""The replays below cache no answers, except where they say so."""


@pytest.fixture(autouse=True)
def _evictions_leave_no_more_than_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_tier, "LEAST_LEAVING", 8)


def replayed(sizes: CacheSizes, arrangement: Arrangement) -> tuple[float, float]:
    """Shares of the prompts' tokens in L1 and in L2 on the engine's tree."""
    cache = SimulatedCache(sizes, page_size=8, policy="lru", arrangement=arrangement)
    result = ReplayResult()
    for so_far in replay(cache, TracePrompts(TRACE, SCALE, 8)):
        result = so_far
    cache.close()
    return (
        result.device_tokens / result.page_tokens,
        result.host_tokens / result.page_tokens,
    )


@pytest.mark.parametrize("pages", [300, 900])
def test_the_engines_tree_of_one_tier_finds_as_much(pages: int) -> None:
    device, _ = replayed(CacheSizes(l1_pages=pages, l2_pages=0), Arrangement.ONE_TIER)
    assert device > 0.2
    assert rate(TRACE, pages) == device


@pytest.mark.parametrize(
    ("arrangement", "both"), [(Arrangement.WRITE_THROUGH, 900), (Arrangement.WRITE_BACK, 1200)]
)
def test_the_engines_two_tiers_find_as_much(arrangement: Arrangement, both: int) -> None:
    device, host = replayed(CacheSizes(l1_pages=300, l2_pages=900), arrangement)
    assert host > 0.1
    assert rate(TRACE, 300) == device
    assert rate(TRACE, both) == pytest.approx(device + host, rel=0.1)


def test_the_engines_tree_with_answers_finds_as_much() -> None:
    pages, answer_pages = 900, 16
    trace = [dataclasses.replace(one, output_length=answer_pages * BLOCK) for one in TRACE]
    sizes = CacheSizes(l1_pages=pages, l2_pages=0)
    cache = SimulatedCache(sizes, page_size=8, policy="lru", arrangement=Arrangement.ONE_TIER)
    generator = np.random.default_rng(4)
    found = total = 0
    for ids, _ in TracePrompts(trace, SCALE, 8):
        answer = generator.integers(1, 1 << 16, answer_pages * 8 - 1, dtype=np.uint32)
        found += cache.serve_with_answer(ids, answer)[0]
        total += len(ids) // 8 * 8
    cache.close()
    assert rate(trace, pages) == pytest.approx(found / total, rel=0.005)
    assert rate(TRACE, pages) > 1.2 * found / total
