"""The simulator of recurrent states: snapshots, evictions and hits counted by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rigs.bench.cache_simulation import (
    Arrangement,
    CacheSizes,
    ReplayResult,
    TracePrompts,
    replay,
)
from rigs.bench.state_simulation import SimulatedStateCache, StateSettings, divide_memory
from sglang.benchmark.workload import TraceRequest, TraceScale, read_trace
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")

EXCERPT = Path(__file__).parents[4] / "benchmark/data/mooncake_synthetic_excerpt.jsonl"
SCALE = TraceScale(length=4 / 512)
"""A block is 4 tokens, which is a page below."""
PAGE = 4


def request(*blocks: int) -> TraceRequest:
    """A prompt of whole blocks and half a block, so that all whole blocks may hit."""
    return TraceRequest(0, len(blocks) * 512 + 256, 1, (*blocks, 10_000 + blocks[-1]))


def make_cache(
    num_states: int | None,
    *,
    pages: int = 100,
    l2_pages: int = 0,
    chunk: int = 400,
    alignment: int = PAGE,
    interval: int = 0,
) -> SimulatedStateCache:
    states = None
    if num_states is not None:
        states = StateSettings(num_states=num_states, alignment=alignment, track_interval=interval)
    return SimulatedStateCache(
        CacheSizes(l1_pages=pages, l2_pages=l2_pages),
        states,
        page_size=PAGE,
        arrangement=Arrangement.WRITE_THROUGH if l2_pages else Arrangement.ONE_TIER,
        max_tokens=2000,
        chunk_tokens=chunk,
    )


def run(trace: list[TraceRequest], cache: SimulatedStateCache) -> ReplayResult:
    result = ReplayResult()
    for so_far in replay(cache, TracePrompts(trace, SCALE, PAGE)):
        result = so_far
    cache.close()
    return result


def test_a_shared_start_hits_when_a_second_request_has_left_a_snapshot_there() -> None:
    trace = [request(1, 2), request(1, 3), request(1, 4)]
    cache = make_cache(20)
    got = run(trace, cache)
    assert (got.device_tokens, got.page_tokens) == (PAGE, 6 * PAGE)
    # The ends of three prompts, and the end of what they share.
    assert cache.snapshots_kept == cache.states_in_l1 == 4
    assert run(trace, make_cache(None)).device_tokens == 2 * PAGE


@pytest.mark.parametrize(("num_states", "hits"), [(4, PAGE), (3, 0)])
def test_few_states_lose_prefixes_whose_pages_would_fit(num_states: int, hits: int) -> None:
    # While the third request runs on a state, two or three are left for snapshots.
    trace = [request(1), request(2), request(3), request(1)]
    assert run(trace, make_cache(num_states)).hit_tokens == hits


def test_few_pages_lose_prefixes_whose_states_would_fit() -> None:
    trace = [request(1), request(2), request(3), request(1)]
    # Two pages of a request's own, and one for each that stays.
    assert run(trace, make_cache(20, pages=4)).hit_tokens == PAGE
    assert run(trace, make_cache(20, pages=3)).hit_tokens == 0


@pytest.mark.parametrize(("chunk", "hits"), [(2 * PAGE, 2 * PAGE), (100 * PAGE, 0)])
def test_chunks_leave_snapshots_on_the_way(chunk: int, hits: int) -> None:
    trace = [request(1, 2, 3, 4), request(1, 2, 5, 6)]
    assert run(trace, make_cache(20, chunk=chunk)).hit_tokens == hits


def test_a_coarse_alignment_ends_hits_earlier() -> None:
    trace = [request(1, 2, 3), request(1, 2, 3)]
    assert run(trace, make_cache(20)).hit_tokens == 3 * PAGE
    assert run(trace, make_cache(20, alignment=2 * PAGE)).hit_tokens == 2 * PAGE


@pytest.mark.parametrize(
    ("num_states", "interval", "hits", "snapshots"),
    [(20, PAGE, 12, 2), (20, 2 * PAGE, 8, 2), (20, 0, 4, 1), (None, 0, 12, 0)],
)
def test_an_answer_adds_its_last_snapshot(
    num_states: int | None, interval: int, hits: int, snapshots: int
) -> None:
    cache = make_cache(num_states, interval=interval)
    ids = np.arange(100, 120, dtype=np.uint32)
    # 6 tokens and an answer of 10, whose last is not computed: 15 tokens, three whole pages.
    assert cache.serve_with_answer(ids[:6], ids[6:16]) == (0, 0)
    assert cache.snapshots_kept == snapshots, "one of the prompt, the last of the answer"
    assert cache.serve(ids) == (hits, 0)
    cache.close()


def test_states_come_back_from_l2() -> None:
    trace = [request(1), request(2), request(3), request(1)]
    got = run(trace, make_cache(3, pages=3, l2_pages=9))
    assert (got.device_tokens, got.host_tokens) == (0, PAGE)


def test_the_excerpt_never_hits_more_than_without_states() -> None:
    trace = read_trace(EXCERPT, 120)
    dense = run(trace, make_cache(None, pages=3000)).hit_tokens
    many, few = (run(trace, make_cache(n, pages=3000)).hit_tokens for n in (500, 20))
    assert 0 < few < many < dense


def test_memory_is_divided_into_pages_and_states() -> None:
    def divide(total: int, longest: int) -> tuple[int, int] | None:
        return divide_memory(total, ratio=0.25, state_pages=5, longest_pages=longest)

    assert divide(125, 100) == (100, 5)
    assert divide(125, 101) is None
    assert divide(50, 10) is None  # 10 pages are 2 states: fewer than a request needs
    with pytest.raises(ValueError, match="2 states: a request needs 3"):
        StateSettings(num_states=2, alignment=PAGE)
