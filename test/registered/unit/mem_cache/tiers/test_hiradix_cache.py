"""Three tiers, one tree: every path of a page, its books at every step. L3 is the file backend."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang.srt.environ import envs
from sglang.srt.mem_cache.hicache_storage import CacheOutcome, StorageUnavailable
from sglang.srt.mem_cache.l3 import hicache_prefetch
from sglang.srt.mem_cache.tiers import hiradix_cache
from sglang.srt.mem_cache.tree.base_prefix_cache import (
    EvictParams,
    InitLoadBackParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.tree.radix_key import RadixKey
from sglang.test.cache_rig import RIG_LAYOUTS, CacheRig, HiCacheSettings, Reused
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.memory_ranks import EchoGroup

register_cpu_ci(est_time=10, suite="base-a-test-cpu")
register_cuda_ci(est_time=20, suite="base-b-test-1-gpu-large")

POLICIES = ("write_through", "write_through_selective", "write_back")


@pytest.fixture(autouse=True)
def storage_dir(tmp_path: Path) -> Iterator[Path]:
    with envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.override(str(tmp_path)):
        yield tmp_path


def two_tiers(l1_pages: int = 8, **settings: Any) -> CacheRig:
    return CacheRig(l1_pages=l1_pages, settings=HiCacheSettings(**settings))


def three_tiers(l1_pages: int = 8, prefetch_threshold: int = 4, **settings: Any) -> CacheRig:
    extra = {"prefetch_threshold": prefetch_threshold}
    return two_tiers(
        l1_pages,
        hicache_storage_backend="file",
        hicache_storage_backend_extra_config=json.dumps(extra),
        **settings,
    )


def other_prompts(rig: CacheRig, count: int = 3) -> None:
    """Push everything else out of L1."""
    for index in range(count):
        rig.run(range(1000 * (index + 1), 1000 * (index + 1) + 16))
        rig.settle()


@pytest.mark.parametrize("layout", RIG_LAYOUTS)
def test_evicted_pages_come_back_from_the_host(layout: str) -> None:
    rig = two_tiers(hicache_mem_layout=layout)
    rig.run(range(16))
    rig.settle()
    other_prompts(rig)
    assert rig.run(range(17)) == Reused(host=16)
    rig.settle()
    assert rig.run(range(17)) == Reused(device=16)


@pytest.mark.parametrize("layout", RIG_LAYOUTS)
def test_flushed_pages_come_back_from_storage(layout: str) -> None:
    rig = three_tiers(hicache_mem_layout=layout)
    rig.run(range(16))
    rig.flush()
    assert rig.run(range(17)) == Reused(storage=16)
    rig.settle()


def test_another_engine_reads_what_the_first_wrote() -> None:
    first, second = three_tiers(), three_tiers()
    first.run(range(16))
    first.settle()
    assert second.run(range(17)) == Reused(storage=16)
    second.settle()


def test_layouts_with_equal_page_bytes_share_and_others_do_not() -> None:
    writer = three_tiers(hicache_mem_layout="layer_first")
    writer.run(range(16))
    writer.settle()
    alike = "page_first_kv_split" if "page_first_kv_split" in RIG_LAYOUTS else "page_first_direct"
    assert three_tiers(hicache_mem_layout=alike).run(range(17)).storage == 16
    assert three_tiers(hicache_mem_layout="page_first").run(range(17)).storage == 0


def test_engines_that_differ_share_nothing() -> None:
    rig = three_tiers()
    rig.run(range(32))
    rig.settle()
    changes: list[dict[str, Any]] = [
        {"weights_identity": "other"},
        {"dtype": torch.float16},
        {"page_size": 2},
    ]
    for change in changes:
        other = CacheRig(**{"l1_pages": 32, "settings": rig.hi_settings(), **change})
        assert other.run(range(33)) == Reused(), change
        other.settle()


def test_prefix_comes_from_three_tiers_at_once() -> None:
    writer = three_tiers(l1_pages=16)
    writer.run(range(24))
    writer.settle()
    rig = three_tiers(l1_pages=6)
    rig.run(range(8))
    rig.settle()
    rig.run(range(500, 516))
    rig.settle()
    rig.run(range(4))
    rig.tree.evict(EvictParams(num_tokens=24))
    request, reused = rig.start(range(5))
    assert reused == Reused(host=4)
    rig.finish(request)
    rig.settle()
    assert rig.run(range(21)) == Reused(device=4, host=4, storage=12)
    rig.settle()


@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_loses_a_page_or_a_byte_under_pressure(policy: str) -> None:
    """Working set 120 pages, L2 32, L1 12: random prompts that share prefixes."""
    rng = random.Random(policy)
    rig = three_tiers(12, hicache_write_policy=policy, hicache_ratio=32 / 12)
    for step in range(150):
        family = rng.randrange(10)
        length = rng.randrange(5, 40)
        rig.run([family * 100 + i // 12 * 7 for i in range(length)])
        rig.tick()
        if step % 10 == 0:
            rig.settle()
    rig.settle()
    rig.close()


def test_write_back_writes_when_l1_is_left_and_not_before() -> None:
    rig = two_tiers(hicache_write_policy="write_back")
    rig.run(range(16))
    rig.settle()
    assert rig.hi.host_pool.available_size() == rig.hi.host_pool.size
    other_prompts(rig)
    assert rig.run(range(17)) == Reused(host=16)


def test_one_eviction_frees_all_that_can_go_also_where_l2_is_smaller_than_a_node() -> None:
    """L2 of 4 pages: the leaf is written back, its parent of 8 pages finds no room and is lost."""
    rig = two_tiers(16, hicache_write_policy="write_back", hicache_ratio=0.25)
    rig.run(range(32))
    rig.run([*range(32), *range(100, 108)])
    rig.settle()
    assert rig.tree.evict(EvictParams(num_tokens=1000)).num_tokens_evicted == 40
    rig.settle()


def test_write_through_selective_writes_at_the_second_hit() -> None:
    rig = two_tiers(hicache_write_policy="write_through_selective")
    for expected_used in (0, 16):
        rig.run(range(16))
        rig.settle()
        assert rig.hi.host_pool.size - rig.hi.host_pool.available_size() == expected_used


def test_l2_smaller_than_l1_keeps_the_books_and_the_newest() -> None:
    rig = three_tiers(16, hicache_ratio=0.5)
    for base in range(0, 600, 100):
        rig.run(range(base, base + 16))
        rig.settle()
    assert rig.run(range(500, 517)) == Reused(device=16)
    rig.settle()


def test_a_node_split_under_a_write_publishes_all_its_parts() -> None:
    for cut in (4, 8, 12):
        rig = two_tiers()
        rig.run(range(16))
        # Queued, not yet acknowledged: split the node now.
        rig.tree.match_prefix(MatchPrefixParams(RadixKey([*range(cut), *[99] * 8])))
        rig.settle()
        other_prompts(rig)
        assert rig.run(range(17)) == Reused(host=16)
        rig.settle()


def test_a_node_split_under_a_load_releases_all_its_parts() -> None:
    rig = two_tiers()
    rig.run(range(16))
    rig.settle()
    rig.tree.evict(EvictParams(num_tokens=32))
    match = rig.tree.match_prefix(MatchPrefixParams(RadixKey(list(range(16)))))
    rig.tree.init_load_back(InitLoadBackParams(match.best_match_node, 16))
    rig.tree.match_prefix(MatchPrefixParams(RadixKey([*range(8), *[99] * 8])))
    rig.tree.ready_to_load_host_cache()
    rig.settle()
    assert rig.tree.protected_size() == 0
    assert rig.run(range(17)) == Reused(device=16)


def test_a_node_split_under_a_backup_settles_all_its_parts() -> None:
    rig = three_tiers()
    rig.run(range(16))
    rig.until(lambda: "backups" in rig.tree.is_busy())
    rig.tree.match_prefix(MatchPrefixParams(RadixKey([*range(8), *[99] * 8])))
    rig.settle()
    assert all(node.storage_epoch == rig.hi._storage_epoch for node in rig.hi.nodes())


def test_a_load_takes_what_fits_the_quota() -> None:
    rig = two_tiers()
    rig.run(range(8))
    rig.run(range(16))
    rig.settle()
    rig.tree.evict(EvictParams(num_tokens=32))
    match = rig.tree.match_prefix(MatchPrefixParams(RadixKey(list(range(16)))))
    assert match.host_hit_length == 16
    loaded, _ = rig.tree.init_load_back(InitLoadBackParams(match.best_match_node, 16, mem_quota=8))
    assert len(loaded) == 8
    rig.tree.ready_to_load_host_cache()
    rig.settle()


def test_a_load_does_not_evict_what_it_hangs_on() -> None:
    """L1 of 8 pages, full: 2 of the prefix, which is not locked, and 6 that were used later."""
    rig = two_tiers()
    for length in (8, 16):
        rig.run(range(length))
    rig.settle()
    rig.tree.evict(EvictParams(num_tokens=8))
    rig.run(range(100, 124))
    rig.settle()
    assert rig.allocator.available_size() == 0
    match = rig.tree.match_prefix(MatchPrefixParams(RadixKey(list(range(16)))))
    assert (len(match.device_indices), match.host_hit_length) == (8, 8)
    rig.tree.match_prefix(MatchPrefixParams(RadixKey(list(range(100, 124)))))
    loaded, _ = rig.tree.init_load_back(InitLoadBackParams(match.best_match_node, 8))
    assert len(loaded) == 8
    rig.tree.check_integrity()
    rig.tree.ready_to_load_host_cache()
    rig.settle()
    assert rig.run(range(17)) == Reused(device=16)


def test_an_aborted_request_gives_its_pages_back() -> None:
    rig = three_tiers()
    rig.run(range(16))
    rig.flush()
    rig.arrive("gone", list(range(17)))
    rig.tree.release_aborted_request("gone")
    rig.settle()
    assert rig.tree.pop_prefetch_loaded_tokens("gone") == 0


def test_best_effort_never_waits() -> None:
    rig = three_tiers(hicache_storage_prefetch_policy="best_effort")
    rig.run(range(16))
    rig.flush()
    rig.arrive("r", list(range(17)))
    assert rig.tree.check_prefetch_progress("r")
    rig.tree.note_scheduled("r")
    rig.settle()


def test_two_requests_for_the_same_pages_publish_them_once() -> None:
    rig = three_tiers()
    rig.run(range(16))
    rig.flush()
    for rid in ("a", "b"):
        rig.arrive(rid, list(range(17)))
    for rid in ("a", "b"):
        rig.until(lambda rid=rid: rig.tree.check_prefetch_progress(rid))  # type: ignore[misc]
    assert rig.tree.pop_prefetch_loaded_tokens("a") == 16
    assert rig.tree.pop_prefetch_loaded_tokens("b") == 0
    rig.settle()


def test_writes_that_find_no_room_wait_for_it_and_are_made() -> None:
    """L2 of 16 pages: 8 may be on their way to L3 at once, and a prompt of 12 comes."""
    rig = three_tiers(16, hicache_ratio=1.0)
    rig.run(range(24))
    rig.run(range(48))
    rig.settle()
    assert all(node.storage_epoch == rig.hi._storage_epoch for node in rig.hi.nodes())
    rig.flush()
    assert rig.run(range(48)).storage == 32, "reads have a share of L2 as well"
    rig.settle()


def test_a_node_larger_than_the_share_of_writes_is_written_and_leaves_nobody_busy() -> None:
    """L2 of 16 pages: 8 may be on their way to L3 at once, and one node has 12."""
    rig = three_tiers(16, prefetch_threshold=1000, hicache_ratio=1.0)
    rig.run(range(48))
    rig.settle()
    assert all(node.storage_epoch == rig.hi._storage_epoch for node in rig.hi.nodes())


def test_write_back_stores_a_whole_branch_once_what_it_hangs_on_has_landed() -> None:
    rig = three_tiers(16, hicache_write_policy="write_back")
    for length in (8, 16, 24):
        rig.run(range(length))
        rig.settle()
    for _ in range(3):
        # Leaves leave first; L3 takes no page whose ancestors it does not have.
        rig.tree.evict(EvictParams(num_tokens=1))
        rig.settle()
    assert [node.storage_epoch for node in rig.hi.nodes()] == [rig.hi._storage_epoch] * 3


def test_a_postponed_write_whose_pages_leave_is_counted() -> None:
    rig = three_tiers(16, prefetch_threshold=1000, hicache_ratio=1.0)
    node = rig.hi._new_node(RadixKey(list(range(4))), rig.hi.root_node)
    rig.hi._postponed[node.id] = node
    rig.hi._delete_node(node)
    rig.hi._resume_postponed()
    assert not rig.hi.is_busy()
    assert rig.hi.metrics.backup_outcomes.labels("evicted")._value.get() == 1


def test_what_was_read_or_written_before_the_store_came_back_counts_as_lost() -> None:
    """Who restarts a store loses its objects: what was under way then is written again."""
    rig = three_tiers()
    rig.run(range(16))
    rig.until(lambda: "backups" in rig.tree.is_busy())
    rig.hi._storage_epoch += 1
    rig.settle()
    assert [node.storage_epoch for node in rig.hi.nodes()] == [0]
    rig.run(range(16))
    rig.settle()
    assert {node.storage_epoch for node in rig.hi.nodes()} == {1}


def test_pages_that_l3_has_lost_are_written_again_while_they_are_used(storage_dir: Path) -> None:
    """It is asked of one use in 61, and what it lacks goes with the next use."""
    rig = three_tiers()
    flaky = FlakyStorage(rig)
    rig.run(range(16))
    rig.settle()
    files = [path for path in storage_dir.rglob("*") if path.is_file()]
    assert len(files) == 4
    lost = sorted(files)[2]
    lost.unlink()
    asked = len(flaky.calls)
    for _ in range(hiradix_cache._CHECK_EVERY - 1):
        assert rig.run(range(16)) == Reused(device=12)
    assert len(flaky.calls) == asked, "uses cost no question"
    rig.run(range(16))
    rig.settle()
    assert flaky.calls[asked:] == ["prompts_exist"]
    assert not lost.exists()
    rig.run(range(16))
    rig.settle()
    assert lost.exists()
    assert all(node.storage_epoch == rig.hi._storage_epoch for node in rig.hi.nodes())
    rig.close()


def wait_for(condition: Callable[[], bool]) -> None:
    """Until `condition` holds, without a tick."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class FlakyStorage:
    """Wraps the real backend of a rig; `mode` says how calls behave."""

    def __init__(self, rig: CacheRig) -> None:
        storage_io = rig.hi.cache_controller.storage_io
        assert storage_io is not None
        assert storage_io.storage is not None
        self.real = storage_io.storage
        self.mode = "ok"
        self.calls: list[str] = []
        self.goes_on = threading.Event()
        storage_io.storage = self  # type: ignore[assignment]

    def __getattr__(self, name: str) -> object:
        call = getattr(self.real, name)

        def wrapped(*args: object, **kwargs: object) -> object:
            self.calls.append(name)
            if self.mode == "down" and name.startswith(("batch", "probe", "prompts")):
                raise StorageUnavailable("the store is down")
            if self.mode == "hangs" and name.startswith(("prompts_exist", "batch_set")):
                assert self.goes_on.wait(30)
            if self.mode == "refuses" and name.startswith("batch_set"):
                return {"kv": [CacheOutcome.FAILED] * len(args[0][0].keys)}  # type: ignore[index]
            result = call(*args, **kwargs)
            if self.mode == "hole" and name.startswith("batch_get"):
                result["kv"][2] = CacheOutcome.DAMAGED
            if self.mode == "terse" and name.startswith("batch_get"):
                # A hole, about which it says nothing: three results for four pages.
                self.real.pool("kv").scatter_pages(
                    args[0][0].host_indices[4:8],  # type: ignore[index]
                    torch.zeros((1, self.real.pool("kv").page_bytes), dtype=torch.uint8),
                )
                del result["kv"][1]
            if self.mode == "full" and name.startswith("batch_set"):
                result["kv"][1] = CacheOutcome.FAILED
            return result

        return wrapped


def test_a_damaged_page_shortens_the_prefix() -> None:
    rig = three_tiers()
    rig.run(range(16))
    rig.flush()
    FlakyStorage(rig).mode = "hole"
    assert rig.run(range(17)) == Reused(storage=8)
    rig.settle()


def test_a_backend_that_answers_for_fewer_pages_than_it_was_asked_brings_none() -> None:
    rig = three_tiers()
    rig.run(range(16))
    rig.flush()
    flaky = FlakyStorage(rig)
    flaky.mode = "terse"
    assert rig.run(range(17)) == Reused()
    rig.settle()
    rig.close()


def test_a_prompt_of_which_the_store_has_nothing_waits_for_no_tick(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hicache_prefetch, "_ANSWER_S", 30.0)
    rig = three_tiers()
    rig.arrive("new", list(range(17)))
    rig.tree.check_hicache_events()
    assert rig.tree.check_prefetch_progress("new")
    rig.settle()
    rig.close()


def test_prompts_that_come_in_one_tick_are_one_question() -> None:
    rig = three_tiers()
    flaky = FlakyStorage(rig)
    for number in range(3):
        rig.arrive(f"new-{number}", list(range(20 * number, 20 * number + 17)))
    rig.until(lambda: all(rig.tree.check_prefetch_progress(f"new-{n}") for n in range(3)))
    assert flaky.calls.count("prompts_exist") == 1
    rig.settle()
    rig.close()


@pytest.mark.parametrize("policy", ["timeout", "best_effort"])
def test_a_tick_waits_a_moment_for_the_store_and_no_longer(
    monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    # With best_effort it does not wait at all, or this would take half a minute.
    monkeypatch.setattr(hicache_prefetch, "_ANSWER_S", 0.001 if policy == "timeout" else 30.0)
    rig = three_tiers(hicache_storage_prefetch_policy=policy)
    flaky = FlakyStorage(rig)
    flaky.mode = "hangs"
    rig.arrive("new", list(range(17)))
    began = time.monotonic()
    for _ in range(3):
        rig.tree.check_hicache_events()
    assert time.monotonic() - began < 15
    assert rig.tree.check_prefetch_progress("new") is (policy == "best_effort")
    flaky.goes_on.set()
    rig.until(lambda: rig.tree.check_prefetch_progress("new"))
    rig.settle()
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


def test_a_store_that_is_down_costs_no_request_and_is_left_alone() -> None:
    rig = three_tiers()
    flaky = FlakyStorage(rig)
    flaky.mode = "down"
    for _ in range(5):
        assert rig.run(range(16)) == Reused()
        rig.flush()
    asked = [name for name in flaky.calls if name.startswith(("batch", "prompts"))]
    assert len(asked) == 1, "the breaker lets one failure through"
    flaky.mode = "ok"
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
    assert all(node.storage_epoch == rig.hi._storage_epoch for node in rig.hi.nodes())
    rig.flush()
    assert rig.run([*range(16), *range(50, 59)]).storage == 24


def test_all_writes_that_have_ended_are_settled_in_one_tick_though_they_failed() -> None:
    """Else a store that fails keeps the pages of one write a tick free, and the rest of L2."""
    rig = three_tiers(l1_pages=32, prefetch_threshold=400)
    rig.hi._group = EchoGroup()  # One rank that votes like several.
    flaky = FlakyStorage(rig)
    flaky.mode = "hangs"
    for number in range(5):
        rig.run(range(100 * number, 100 * number + 16))
    rig.until(lambda: rig.tree.is_busy() == {"backups": 5})
    operations = list(rig.hi._backups)
    flaky.mode = "full"
    flaky.goes_on.set()
    wait_for(lambda: all(one.ended for one in operations))
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
    assert node.backuped and not rig.hi._is_stored(node)
    assert not [path for path in storage_dir.rglob("*") if path.is_file()]
    flaky.mode = "ok"
    rig.run(range(16))
    rig.settle()
    assert rig.hi._is_stored(node)
    assert len([path for path in storage_dir.rglob("*") if path.is_file()]) == 4
    rig.close()


def test_what_was_read_before_the_store_came_back_is_written_again(storage_dir: Path) -> None:
    """A read that was begun before a store was lost says nothing of what the new one has."""
    rig = three_tiers()
    rig.run(range(16))
    rig.flush()
    rig.arrive("reads", list(range(17)))
    rig.tick()
    begun_in = rig.hi._storage_epoch
    (operation,) = rig.hi._board.operations()
    wait_for(lambda: operation.ended)
    rig.hi._storage_epoch += 1  # It came back, empty.
    for path in storage_dir.rglob("*"):
        path.unlink() if path.is_file() else None
    rig.until(lambda: rig.tree.check_prefetch_progress("reads"))
    (node,) = rig.hi.nodes()
    assert (node.storage_epoch, rig.hi._is_stored(node)) == (begun_in, False)
    assert rig.run(range(17)) == Reused(host=16)
    rig.settle()
    assert rig.hi._is_stored(node)
    assert len([path for path in storage_dir.rglob("*") if path.is_file()]) == 4
    rig.close()


def test_runtime_attach_update_detach_clear(storage_dir: Path) -> None:
    rig = two_tiers()
    rig.run(range(16))
    rig.settle()
    extra = json.dumps({"prefetch_threshold": 4})
    assert rig.hi.attach_storage_backend("file", extra) == (True, "attached file")
    assert not rig.hi.attach_storage_backend("mooncake")[0]
    rig.hi.detach_storage_backend()
    waits = json.dumps({"prefetch_threshold": 4, "on_unreachable": "wait"})
    done, why = rig.hi.attach_storage_backend("file", waits)
    assert not done and "on_unreachable" in why, "a running server must not stand still"
    assert rig.hi.attach_storage_backend("file", extra)[0]
    done, _ = rig.hi.attach_storage_backend("file", hicache_storage_prefetch_policy="best_effort")
    assert done
    assert rig.hi.storage_state()["hicache_storage_prefetch_policy"] == "best_effort"
    assert not rig.hi.attach_storage_backend("file", hicache_write_policy="sometimes")[0]
    # Used again, the old pages go to the new L3.
    rig.run(range(16))
    rig.settle()
    assert list(storage_dir.rglob("*")), "written"
    assert rig.hi.detach_storage_backend() == (True, "detached file")
    assert rig.hi.detach_storage_backend() == (True, "no storage backend is attached")
    assert rig.hi.storage_state()["hicache_storage_backend"] is None
    assert [path for path in storage_dir.rglob("*") if path.is_file()], "detaching deletes nothing"
    rig.hi.attach_storage_backend("file", extra)
    assert rig.hi.clear_storage_backend()[0]
    assert not [path for path in storage_dir.rglob("*") if path.is_file()]
    rig.flush()
    assert rig.run(range(17)) == Reused()
    rig.close()


def test_administration_is_refused_while_busy() -> None:
    rig = three_tiers()
    rig.run(range(16))
    for done, why in (
        rig.hi.detach_storage_backend(),
        rig.hi.clear_storage_backend(),
        rig.hi.attach_storage_backend("file", hicache_write_policy="write_back"),
        rig.hi.attach_storage_backend("file", hicache_write_policy="write_through"),
    ):
        assert not done
        assert "writes" in why
    rig.settle()


def test_short_prompts_are_not_fetched() -> None:
    rig = three_tiers(prefetch_threshold=12)
    rig.run(range(16))
    rig.flush()
    assert rig.run(range(11)) == Reused()
    assert rig.run(range(17)) == Reused(device=8, storage=0)
    rig.settle()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"hicache_mem_layout": "diagonal"}, "hicache-mem-layout"),
        (
            {"hicache_io_backend": "kernel", "hicache_mem_layout": RIG_LAYOUTS[-1]},
            "hicache-io-backend",
        ),
        ({"hicache_size": 10**6}, "--hicache-size"),
        ({"hicache_storage_prefetch_policy": "never"}, "prefetch_policy"),
    ],
)
def test_what_cannot_work_is_refused_at_start(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        two_tiers(**settings)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
