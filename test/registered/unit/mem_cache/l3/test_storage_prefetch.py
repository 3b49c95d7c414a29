"""Reads from L3 and those who wait for them: one read of shared pages, room for it, what becomes
of it when requests come and go. L3 is the file backend."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rigs.caches.cache_rig import CacheRig, HeldReads, HiCacheSettings, Reused
from rigs.caches.storage_rigs import counts
from sglang.srt.environ import envs
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.tree.radix_key import RadixKey
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=4, suite="base-a-test-cpu")
register_cuda_ci(est_time=20, suite="base-b-test-1-gpu-large")

SHARED = list(range(24))
"""Six pages of four tokens."""
FIRST = [*SHARED, *range(100, 109)]
SECOND = [*SHARED, *range(200, 213)]
"""Two and three pages more, and a token."""


@pytest.fixture(name="make")
def make_rigs(tmp_path: Path) -> Iterator[Callable[..., CacheRig]]:
    """Makes rigs with an L3; they are closed afterwards."""
    rigs = []

    def make(l1_pages: int = 32, threshold: int = 4, **settings: Any) -> CacheRig:
        extra = {"prefetch_threshold": threshold}
        rig = CacheRig(
            l1_pages=l1_pages,
            settings=HiCacheSettings(
                hicache_storage_backend="file",
                hicache_storage_backend_extra_config=json.dumps(extra),
                **settings,
            ),
        )
        rigs.append(rig)
        return rig

    with envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.override(str(tmp_path)):
        yield make
    for rig in rigs:
        rig.close()


def stored(rig: CacheRig, *prompts: list[int]) -> None:
    """L3 has the prompts, and no other tier."""
    for ids in prompts:
        rig.run(ids)
        rig.settle()
    rig.flush()


def serve(rig: CacheRig, rid: str, ids: list[int]) -> Reused:
    """Let a request that has come run to its end."""
    rig.until(lambda: rig.tree.check_prefetch_progress(rid))
    request, reused = rig.admit(rid, ids)
    rig.finish(request)
    return reused


def outcomes(rig: CacheRig, reason: str) -> float:
    return counts(rig.hi.metrics.prefetch_outcomes).get(reason, 0.0)


def on_host(rig: CacheRig, ids: list[int]) -> int:
    """Tokens of a prompt that L2 alone has."""
    return rig.hi.match_prefix(MatchPrefixParams(RadixKey(ids))).host_hit_length


# -- what another server is about to write -----------------------------------------------------


@pytest.mark.parametrize("attempts", [None, 1000])
def test_a_request_waits_for_pages_that_are_about_to_be_committed(
    make: Callable[..., CacheRig], attempts: int | None
) -> None:
    reader = make(
        hicache_storage_prefetch_retry_max_attempts=attempts,
        hicache_storage_prefetch_retry_poll_interval=None if attempts is None else 1,
    )
    page = SHARED[:5]
    reader.arrive("early", page)
    (read,) = reader.hi.storage_prefetch.table.operations
    reader.tick()
    reader.until(lambda: read.misses > 1 or reader.tree.check_prefetch_progress("early"))
    stored(make(), page)
    assert serve(reader, "early", page) == Reused(storage=4 if attempts else 0)
    reader.settle()


def test_a_read_has_half_of_l2_and_the_log_says_so(
    make: Callable[..., CacheRig], caplog: pytest.LogCaptureFixture
) -> None:
    """L2 of 16 pages and a prompt of 15."""
    rig = make(hicache_ratio=0.5)
    ids = list(range(61))
    stored(rig, ids)
    with caplog.at_level("INFO"):
        rig.arrive("long", ids)
    assert "an L3 read brings at most 32 of 60 tokens: queue_full" in caplog.text
    assert serve(rig, "long", ids) == Reused(storage=60), "another read brings the rest"
    rig.settle()
    assert "reads from L3 hold at most 32 tokens" in rig.hi.tiers()[0]


# -- one read of what is shared --------------------------------------------------------------------


def test_prompts_that_share_a_prefix_read_it_once(make: Callable[..., CacheRig]) -> None:
    rig = make()
    stored(rig, FIRST, SECOND)
    with HeldReads(rig.hi) as reads:
        rig.arrive("first", FIRST)
        rig.arrive("second", SECOND)
        # The second request no longer reads the pages that the first brought to L1.
        assert serve(rig, "first", FIRST) == Reused(storage=32)
        assert serve(rig, "second", SECOND) == Reused(device=24, storage=12)
    assert reads.pages == 6 + 2 + 3
    rig.settle()


def test_who_joins_waits_for_the_shared_pages_and_no_longer(make: Callable[..., CacheRig]) -> None:
    rig = make()
    stored(rig, FIRST)
    with HeldReads(rig.hi, pages_per_call=3, calls=1) as reads:
        rig.arrive("first", FIRST)
        rig.tick()
        rig.arrive("shared", [*SHARED, 7])
        rig.until(lambda: rig.hi.storage_prefetch.table.reads_of("first")[0].progress.landed == 3)
        assert not rig.tree.check_prefetch_progress("shared")
        reads.let(1)
        # The read goes on for the first: its third call hangs.
        assert serve(rig, "shared", [*SHARED, 7]) == Reused(storage=24)
        assert not rig.tree.check_prefetch_progress("first")
        reads.let(1)
        assert serve(rig, "first", FIRST) == Reused(device=24, storage=8)
    assert reads.pages == 8
    assert outcomes(rig, "joined") == 1
    rig.settle()


@pytest.mark.parametrize("leave", ["aborted", "scheduled"])
def test_a_read_goes_on_for_who_still_waits_and_no_further(
    make: Callable[..., CacheRig], leave: str
) -> None:
    rig = make()
    stored(rig, FIRST, SECOND)
    with HeldReads(rig.hi, pages_per_call=2, calls=1) as reads:
        rig.arrive("first", FIRST)
        rig.arrive("second", SECOND)
        rig.until(lambda: rig.hi.storage_prefetch.table.reads_of("first")[0].progress.landed == 2)
        if leave == "aborted":
            rig.tree.release_aborted_request("first")
        else:
            rig.tree.note_scheduled("first")
        rig.tree.check_integrity()
        reads.open()
        assert serve(rig, "second", SECOND) == Reused(storage=36)
    # Six shared, none of the first's own, three of the second's own.
    assert reads.pages == 9
    rig.settle()
    assert rig.hi.host_pool.available_size() == rig.hi.host_pool.size - 36


def test_a_read_that_goes_on_for_fewer_pages_is_joined_for_these(
    make: Callable[..., CacheRig],
) -> None:
    rig = make()
    stored(rig, FIRST)
    with HeldReads(rig.hi, pages_per_call=2, calls=0) as reads:
        rig.arrive("first", FIRST)
        rig.arrive("shared", [*SHARED, 7])
        rig.tree.release_aborted_request("first")
        rig.arrive("third", FIRST)
        assert [read.needs for read in rig.hi.storage_prefetch.table.reads] == [
            {"shared": 6, "third": 6},
            {"third": 2},
        ]
        reads.open()
        assert serve(rig, "third", FIRST) == Reused(storage=32)
        rig.tree.release_aborted_request("shared")
    assert reads.pages == 8
    rig.settle()


def test_a_prompt_joins_several_reads_one_after_the_other(make: Callable[..., CacheRig]) -> None:
    rig = make()
    third = [*SECOND[:-1], *range(300, 309)]
    stored(rig, FIRST, third)
    with HeldReads(rig.hi) as reads:
        for rid, ids in (("a", FIRST), ("b", SECOND), ("c", third), ("d", third)):
            rig.arrive(rid, ids)
        assert [len(rig.hi.storage_prefetch.table.reads_of(rid)) for rid in "abcd"] == [1, 2, 3, 3]
        # In another order than they came: each takes what is there, and counts what no tier has.
        assert serve(rig, "d", third) == Reused(storage=44)
        assert serve(rig, "c", third) == Reused(device=44)
        assert serve(rig, "b", SECOND) == Reused(device=36)
        assert serve(rig, "a", FIRST) == Reused(device=24, storage=8)
    assert reads.pages == 6 + 2 + 3 + 2
    rig.settle()


def test_of_a_prompt_whose_pages_the_store_lacks_nothing_is_asked_twice(
    make: Callable[..., CacheRig],
) -> None:
    rig = make()
    stored(rig, SHARED)
    with HeldReads(rig.hi, calls=0) as reads:
        rig.arrive("first", FIRST)
        rig.until(lambda: rig.hi.storage_prefetch.table.reads_of("first")[0].progress.hit == 6)
        rig.arrive("second", FIRST)
        (read,) = rig.hi.storage_prefetch.table.reads
        assert read.needs == {"first": 8, "second": 6}
        reads.open()
        rig.until(lambda: read.progress.ended)
        # The read has ended, and its pages have not been taken yet.
        rig.arrive("third", FIRST)
        assert read.needs == {"first": 8, "second": 6, "third": 6}
        rig.tree.release_aborted_request("third")
        assert serve(rig, "first", FIRST) == Reused(storage=24)
        assert serve(rig, "second", FIRST) == Reused(device=32)
    rig.settle()


def test_few_shared_pages_are_not_waited_for_by_who_reads_nothing_else(
    make: Callable[..., CacheRig],
) -> None:
    rig = make(threshold=12)
    stored(rig, FIRST)
    with HeldReads(rig.hi, calls=0):
        rig.arrive("first", FIRST)
        rig.arrive("second", [*SHARED[:8], *range(300, 305)])
        rig.arrive("third", [*SHARED[:12], 9])
        assert rig.tree.check_prefetch_progress("second")
        assert not rig.tree.check_prefetch_progress("third")
    for rid in ("first", "second", "third"):
        rig.tree.release_aborted_request(rid)
    rig.settle()


def test_a_sample_reads_nothing_itself_and_outlives_its_sibling(
    make: Callable[..., CacheRig],
) -> None:
    rig = make()
    stored(rig, FIRST)
    with HeldReads(rig.hi, calls=0) as reads:
        rig.arrive("first", FIRST)
        rig.arrive("first-1", FIRST, only_join=True)
        rig.arrive("else-1", SECOND[24:], only_join=True)
        assert len(rig.hi.storage_prefetch.table.operations) == 1
        assert rig.tree.check_prefetch_progress("else-1")
        rig.tree.release_aborted_request("first")
        rig.tree.release_aborted_request("else-1")
        reads.open()
        assert serve(rig, "first-1", FIRST) == Reused(storage=32)
    assert reads.pages == 8
    rig.settle()


def test_a_read_ends_when_the_tree_has_its_pages(make: Callable[..., CacheRig]) -> None:
    rig = make()
    stored(rig, FIRST, SECOND)
    with HeldReads(rig.hi, pages_per_call=1, calls=1) as reads:
        rig.arrive("a", FIRST)
        rig.arrive("b", SECOND)
        rig.until(lambda: rig.hi.storage_prefetch.table.reads_of("a")[0].progress.landed == 1)
        # A third request computes all pages of `FIRST`, and with them those that both wait for.
        request, _ = rig.admit("computes", FIRST)
        rig.finish(request)
        rig.tick()
        assert rig.tree.check_prefetch_progress("a")
        assert [read.needs for read in rig.hi.storage_prefetch.table.reads] == [{"b": 3}]
        reads.open()
        assert serve(rig, "b", SECOND) == Reused(device=24, storage=12)
        assert serve(rig, "a", FIRST) == Reused(device=32)
    # The read that ended makes no further call after the one under way.
    assert reads.pages <= 2 + 3
    rig.settle()
    assert outcomes(rig, "overtaken") == 1


# -- room for a read -------------------------------------------------------------------------------


def test_a_read_makes_room_in_l2(make: Callable[..., CacheRig]) -> None:
    """L2 of 16 pages, full of what no request waits for."""
    rig = make(16, hicache_ratio=1.0)
    stored(rig, FIRST)
    for number in (1, 2):
        rig.run(range(1000 * number, 1000 * number + 32))
        rig.settle()
    assert rig.hi.host_pool.available_size() == 0
    assert rig.run(FIRST) == Reused(storage=32)
    rig.settle()


def test_a_read_does_not_evict_what_it_continues(make: Callable[..., CacheRig]) -> None:
    """L2 of 16 pages: 8 are the read's share, 6 hold its prefix, 10 are in use."""
    rig = make(16, hicache_ratio=1.0)
    stored(rig, FIRST)
    assert rig.run([*SHARED, 7]) == Reused(storage=24)
    rig.settle()
    rig.tree.evict(EvictParams(num_tokens=1000))
    assert on_host(rig, SHARED) == 24
    held = rig.hi.host_pool.alloc(rig.hi.host_pool.available_size())
    assert held is not None
    rig.arrive("r", FIRST)
    assert on_host(rig, SHARED) == 24
    assert outcomes(rig, "no_host_memory") == 1
    rig.hi.host_pool.free(held)
    rig.hi.check_integrity()
    rig.tree.release_aborted_request("r")


def test_what_has_left_the_tree_is_not_its_root(make: Callable[..., CacheRig]) -> None:
    rig = make()
    # The suffix is a prompt of its own, too.
    suffix = list(range(100, 109))
    stored(rig, FIRST, suffix)
    rig.run([*SHARED, 7])
    rig.settle()
    node = rig.hi.match_prefix(MatchPrefixParams(RadixKey(SHARED))).last_host_node
    rig.flush()
    node.parent = None
    rig.hi.prefetch_from_storage("r", node, suffix)
    assert len(rig.hi.storage_prefetch.table.operations) == 0
    assert outcomes(rig, "orphan") == 1


# -- what was read is kept -------------------------------------------------------------------------


@pytest.mark.parametrize("waiting", [["first"], ["first", "joined"]])
def test_what_was_read_for_who_still_waits_outlives_what_nobody_waits_for(
    make: Callable[..., CacheRig], waiting: list[str]
) -> None:
    """The pages have been published, but their request could not run yet."""
    rig = make()
    stored(rig, FIRST)
    for rid in waiting:
        rig.arrive(rid, FIRST)
    rig.until(lambda: rig.tree.check_prefetch_progress(waiting[-1]))
    other = [*range(500, 533)]
    rig.run(other)
    rig.settle()
    rig.tree.evict(EvictParams(num_tokens=1000))
    assert (on_host(rig, FIRST), on_host(rig, other)) == (32, 32)
    rig.hi.evict_host(32)
    assert (on_host(rig, FIRST), on_host(rig, other)) == (32, 0)
    if len(waiting) > 1:
        rig.tree.release_aborted_request("joined")
        rig.run(other)
        rig.settle()
        rig.tree.evict(EvictParams(num_tokens=1000))
        rig.hi.evict_host(32)
        assert (on_host(rig, FIRST), on_host(rig, other)) == (32, 0), "of the first"
    rig.tree.release_aborted_request("first")
    rig.tree.check_integrity()
    assert rig.hi.evict_host(32) == 32, "who has left keeps nothing"
    rig.settle()


def test_what_was_published_and_evicted_since_is_not_published_again(
    make: Callable[..., CacheRig],
) -> None:
    rig = make(hicache_storage_prefetch_policy="best_effort")
    stored(rig, FIRST)
    with HeldReads(rig.hi, pages_per_call=4, calls=1) as reads:
        rig.arrive("r", FIRST)
        rig.until(lambda: rig.hi.storage_prefetch.table.reads_of("r")[0].progress.landed == 4)
        assert rig.tree.check_prefetch_progress("r")
        assert on_host(rig, FIRST) == 16
        assert all(node.wanted_by for node in rig.hi.nodes()), "though the read goes on"
        rig.hi.evict_host(1000)
        rig.arrive("reads itself", FIRST)
        reads.open()
        reads_of = rig.hi.storage_prefetch.table.reads_of
        for rid in ("r", "reads itself"):
            rig.until(lambda rid=rid: reads_of(rid)[0].progress.landed == 8)  # type: ignore[misc]
        assert rig.tree.check_prefetch_progress("r")
        assert on_host(rig, FIRST) == 0
        assert serve(rig, "reads itself", FIRST) == Reused(storage=32)
        assert serve(rig, "r", FIRST) == Reused(device=32)
    rig.settle()
