"""Pages from L2 to L3: what is written when, what waits, and what a failed write leaves."""

from __future__ import annotations

from pathlib import Path

from rigs.caches.cache_rig import CacheRig, Reused
from rigs.caches.memory_ranks import EchoGroup
from rigs.caches.storage_rigs import counts
from rigs.caches.tier_rigs import FlakyStorage, three_tiers, wait_for
from sglang.srt.mem_cache.base_prefix_cache import (
    EvictParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.hicache_storage import CacheOutcome
from sglang.srt.mem_cache.l3 import storage_backup
from sglang.srt.mem_cache.tree.radix_key import RadixKey
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=4, suite="base-a-test-cpu")
register_cuda_ci(est_time=10, suite="base-b-test-1-gpu-large")


def test_a_node_split_under_a_backup_settles_all_its_parts() -> None:
    rig = three_tiers()
    rig.run(range(16))
    rig.until(lambda: "backups" in rig.tree.is_busy())
    rig.tree.match_prefix(MatchPrefixParams(RadixKey([*range(8), *[99] * 8])))
    rig.settle()
    assert all(node.storage_epoch == rig.hi.store.epoch for node in rig.hi.nodes())


def test_writes_that_find_no_room_wait_for_it_and_are_made() -> None:
    """L2 of 16 pages: 8 may be on their way to L3 at once, and a prompt of 12 comes."""
    rig = three_tiers(16, hicache_ratio=1.0)
    rig.run(range(24))
    rig.run(range(48))
    rig.settle()
    assert all(node.storage_epoch == rig.hi.store.epoch for node in rig.hi.nodes())
    rig.flush()
    assert rig.run(range(48)).storage == 44, "another read follows the first"
    rig.settle()


def test_a_node_larger_than_the_share_of_writes_is_written_and_leaves_nobody_busy() -> None:
    """L2 of 16 pages: 8 may be on their way to L3 at once, and one node has 12."""
    rig = three_tiers(16, prefetch_threshold=1000, hicache_ratio=1.0)
    rig.run(range(48))
    rig.settle()
    assert all(node.storage_epoch == rig.hi.store.epoch for node in rig.hi.nodes())


def test_write_back_stores_a_whole_branch_once_what_it_hangs_on_has_landed() -> None:
    rig = three_tiers(16, hicache_write_policy="write_back")
    for length in (8, 16, 24):
        rig.run(range(length))
        rig.settle()
    for _ in range(3):
        # Leaves leave first; L3 takes no page whose ancestors it does not have.
        rig.tree.evict(EvictParams(num_tokens=1))
        rig.settle()
    assert [node.storage_epoch for node in rig.hi.nodes()] == [rig.hi.store.epoch] * 3


def test_a_postponed_write_whose_pages_leave_is_counted() -> None:
    rig = three_tiers(16, prefetch_threshold=1000, hicache_ratio=1.0)
    node = rig.hi.tree.add_leaf(RadixKey(list(range(4))), rig.hi.root_node)
    rig.hi.storage_backup.postponed[node.id] = node
    rig.hi.tree.prune(node)
    rig.hi.storage_backup._resume_postponed()
    assert not rig.hi.is_busy()
    assert rig.hi.metrics.backup_outcomes.labels("evicted")._value.get() == 1


def test_what_was_read_or_written_before_the_store_came_back_counts_as_lost() -> None:
    """A restart of a store loses its objects. Pages that were under way then are written again."""
    rig = three_tiers()
    rig.run(range(16))
    rig.until(lambda: "backups" in rig.tree.is_busy())
    rig.hi.store.epoch += 1
    rig.settle()
    assert [node.storage_epoch for node in rig.hi.nodes()] == [0]
    rig.run(range(16))
    rig.settle()
    assert {node.storage_epoch for node in rig.hi.nodes()} == {1}


def test_pages_that_l3_has_lost_are_written_again_while_they_are_used(storage_dir: Path) -> None:
    """One use in 61 asks L3 for its pages. The next use writes the pages that L3 lacks."""
    rig = three_tiers()
    flaky = FlakyStorage(rig)
    rig.run(range(16))
    rig.settle()
    files = list(storage_dir.glob("*/??/*"))
    assert len(files) == 4
    lost = sorted(files)[2]
    lost.unlink()
    asked = len(flaky.calls)
    for _ in range(storage_backup._CHECK_EVERY - 1):
        assert rig.run(range(16)) == Reused(device=12)
    assert len(flaky.calls) == asked, "uses cost no question"
    rig.run(range(16))
    rig.settle()
    assert flaky.calls[asked:] == ["prompts_exist"]
    assert not lost.exists()
    rig.run(range(16))
    rig.settle()
    assert lost.exists()
    assert all(node.storage_epoch == rig.hi.store.epoch for node in rig.hi.nodes())
    rig.close()


def child_below_a_node_that_l2_lacks() -> CacheRig:
    """16 tokens in L1 and L3 but not in L2, and 8 below them in L1 alone."""
    rig = three_tiers(hicache_write_policy="write_back")
    rig.run(range(16))
    rig.tree.evict(EvictParams(num_tokens=16))
    rig.flush()
    assert rig.run(range(17)) == Reused(storage=16)
    rig.settle()
    rig.hi.evict_host(16)
    rig.run([*range(16), *range(50, 58)])
    return rig


def test_a_write_that_hangs_keeps_nothing_in_l1() -> None:
    """Pages that L2 has no room for must be able to leave L1, whatever hangs below them."""
    rig = child_below_a_node_that_l2_lacks()
    flaky = FlakyStorage(rig)
    flaky.mode = "hangs"
    assert rig.tree.evict(EvictParams(num_tokens=8)).num_tokens_evicted == 8
    rig.tick()
    held = rig.hi.host_pool.alloc(rig.hi.host_pool.available_size())
    assert held is not None
    rig.tree.evict(EvictParams(num_tokens=32))
    assert rig.allocator.available_size() == 32, "L1 is empty"
    rig.hi.host_pool.free(held)
    flaky.goes_on.set()
    rig.settle()
    rig.close()


def test_what_had_to_wait_for_its_prefix_to_reach_l2_is_written_after_it() -> None:
    rig = child_below_a_node_that_l2_lacks()
    for tokens in (8, 16):
        rig.tree.evict(EvictParams(num_tokens=tokens))
        rig.settle()
    rig.flush()
    assert rig.run([*range(16), *range(50, 58), 7]) == Reused(storage=24)
    rig.settle()
    rig.close()


def test_what_follows_a_page_that_was_not_written_is_not_written() -> None:
    rig = three_tiers()
    flaky = FlakyStorage(rig)
    flaky.mode = "full"
    rig.run(range(16))
    rig.settle()
    flaky.mode = "ok"
    rig.run([*range(16), *range(50, 58)])
    rig.settle()
    # The first node failed, was written again at its second use, and then its child went.
    assert all(node.storage_epoch == rig.hi.store.epoch for node in rig.hi.nodes())
    rig.flush()
    assert rig.run([*range(16), *range(50, 59)]).storage == 24


def test_what_waits_for_room_is_given_up_with_what_it_follows() -> None:
    """Else a failed write is made again for the sake of its followers, at once and each tick."""
    rig = three_tiers(16, prefetch_threshold=1000, hicache_ratio=1.0)
    flaky = FlakyStorage(rig)
    flaky.mode = "hangs"
    rig.run(range(24))
    rig.run(range(48))
    flaky.mode = "full"
    flaky.goes_on.set()
    rig.settle()
    assert counts(rig.hi.metrics.backup_outcomes) == {"failed": 1, "short": 1}
    assert len([call for call in flaky.calls if call.startswith("batch_set")]) == 1
    flaky.mode = "ok"
    rig.run(range(48))
    rig.settle()
    assert all(node.storage_epoch == rig.hi.store.epoch for node in rig.hi.nodes())


def test_what_waits_below_the_upper_part_of_a_refused_write_is_given_up() -> None:
    """The second prompt leaves the first in its middle, while that is being written."""
    rig = three_tiers(16, prefetch_threshold=1000, hicache_ratio=1.0)
    flaky = FlakyStorage(rig)
    flaky.mode = "hangs"
    rig.run(range(24))
    rig.until(lambda: bool(rig.hi.storage_backup.under_way))
    rig.run([*range(8), *range(100, 124)])
    rig.until(lambda: bool(rig.hi.storage_backup.postponed))
    flaky.mode = "full"
    flaky.goes_on.set()
    rig.settle()
    assert counts(rig.hi.metrics.backup_outcomes) == {"failed": 1, "short": 1}
    assert len([call for call in flaky.calls if call.startswith("batch_set")]) == 1
    rig.close()


def test_all_writes_that_have_ended_are_settled_in_one_tick_though_they_failed() -> None:
    """Else a store that fails keeps the pages of one write a tick free, and the rest of L2."""
    rig = three_tiers(l1_pages=32, prefetch_threshold=400)
    rig.hi._group = EchoGroup()  # One rank that votes like several.
    flaky = FlakyStorage(rig)
    flaky.mode = "hangs"
    for number in range(5):
        rig.run(range(100 * number, 100 * number + 16))
    rig.until(lambda: rig.tree.is_busy() == {"backups": 5})
    operations = list(rig.hi.storage_backup.under_way)
    flaky.mode = "full"
    flaky.goes_on.set()
    wait_for(lambda: all(one.outcome is not None for one in operations))
    assert {one.outcome for one in operations} == {CacheOutcome.FAILED}
    assert {node.host_ref_counter for node in rig.hi.nodes()} == {1}
    rig.tick()
    assert not rig.tree.is_busy()
    assert {node.host_ref_counter for node in rig.hi.nodes()} == {0}
    rig.close()


def test_pages_of_a_write_that_failed_are_not_stored_and_go_with_their_next_use(
    storage_dir: Path,
) -> None:
    rig = three_tiers()
    flaky = FlakyStorage(rig)
    flaky.mode = "refuses"
    rig.run(range(16))
    rig.settle()
    (node,) = rig.hi.nodes()
    assert node.backuped and not rig.hi.storage_backup.has_stored(node)
    assert not list(storage_dir.glob("*/??/*"))
    flaky.mode = "ok"
    rig.run(range(16))
    rig.settle()
    assert rig.hi.storage_backup.has_stored(node)
    assert len(list(storage_dir.glob("*/??/*"))) == 4
    rig.close()
