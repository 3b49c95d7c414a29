"""Events of L3: what it got, and what it was found to have lost; it outlives L1 and L2."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rigs.caches.cache_rig import CacheRig, HiCacheSettings, Reused
from rigs.caches.event_listener import TierListeners
from rigs.caches.memory_ranks import run_on_ranks
from rigs.caches.sharded_rig import ShardedRig
from rigs.caches.state_rig import StateRig
from rigs.caches.storage_rigs import attached_store_of
from sglang.srt.disaggregation.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
)
from sglang.srt.distributed.rank_group import RankGroup
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.l3 import storage_backup
from sglang.srt.mem_cache.tree import kv_events
from sglang.srt.mem_cache.tree.kv_events import KVEventLog, StorageMedium
from sglang.srt.mem_cache.tree.radix_key import PageHash, RadixKey, hash_str_to_int64
from sglang.srt.mem_cache.tree.tree_node import TreeNode
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=8, suite="base-a-test-cpu")

PAGE = 4
PROMPT = [*range(24), 7]
"""Six pages and a token."""
BLOCKS = [hash_str_to_int64(page) for page in RadixKey(PROMPT[:-1]).page_hashes(PAGE)]


def make(kind: Callable[..., CacheRig] = CacheRig, **more: Any) -> CacheRig:
    return kind(
        settings=HiCacheSettings(
            hicache_storage_backend="file",
            hicache_storage_backend_extra_config=json.dumps({"prefetch_threshold": PAGE}),
        ),
        l1_pages=32,
        kv_events=True,
        **more,
    )


def run(rig: CacheRig, prompt: list[int] = PROMPT) -> list[KVCacheEvent]:
    """Run a prompt until all tiers have it; returns what was said about L3."""
    rig.run(prompt)
    rig.settle()
    return of_store(rig)


def of_store(rig: CacheRig) -> list[KVCacheEvent]:
    return [
        event
        for event in rig.tree.take_events()
        if isinstance(event, BlockStored | BlockRemoved) and event.medium == "DISK"
    ]


def stored(first: int, last: int) -> BlockStored:
    """Pages `first` to `last` of the prompt came to L3."""
    return BlockStored(
        block_hashes=BLOCKS[first : last + 1],
        parent_block_hash=BLOCKS[first - 1] if first else None,
        token_ids=PROMPT[first * PAGE : (last + 1) * PAGE],
        block_size=PAGE,
        lora_id=None,
        medium="DISK",
    )


def removed(*pages: int) -> BlockRemoved:
    return BlockRemoved(block_hashes=[BLOCKS[page] for page in pages], medium="DISK")


def object_of(folder: Path, page: int, pool: str = "kv") -> Path:
    (found,) = folder.glob(f"*/??/{RadixKey(PROMPT[:-1]).page_hashes(PAGE)[page]}%2F{pool}*")
    return found


def test_the_writer_tells_and_so_does_a_reader(storage_dir: Path) -> None:
    writer, reader = make(), make()
    assert run(writer) == [stored(0, 5)]
    assert run(writer) == [], "it was told"
    assert run(reader) == [stored(0, 5)]
    assert reader.run(PROMPT) == Reused(device=24)
    writer.close()
    reader.close()


def test_l3_keeps_its_blocks_when_the_other_tiers_lose_theirs(storage_dir: Path) -> None:
    rig = make()
    told = TierListeners(rig)
    rig.run(PROMPT)
    rig.settle()
    told.hear()
    rig.hi.evict(EvictParams(num_tokens=1000))
    rig.hi.evict_host(1000)
    told.hear()
    assert (len(told.device.tokens), len(told.host.tokens), list(told.store.tokens)) == (
        0, 0, BLOCKS,
    )  # fmt: skip
    run(rig, [*range(100, 110)])
    rig.flush()
    events = rig.tree.take_events()
    assert sorted(type(event).__name__ for event in events) == ["BlockRemoved", "BlockRemoved"]
    assert run(rig) == [], "it was told before the flush"
    rig.close()


def test_a_page_that_the_store_evicted_is_gone_once_a_read_asks_for_it(storage_dir: Path) -> None:
    rig = make()
    run(rig)
    rig.flush()
    object_of(storage_dir, 2).unlink()
    assert of_store(rig) == []
    assert run(rig) == [removed(2), stored(2, 2)], "and it is written again"
    rig.close()


def test_a_damaged_page_is_gone_until_it_is_written_again(storage_dir: Path) -> None:
    rig = make()
    run(rig)
    rig.flush()
    with object_of(storage_dir, 3).open("r+b") as file:
        file.write(b"?")
    assert run(rig) == [removed(3), stored(3, 3)]
    rig.close()


def test_a_check_of_cached_prompts_tells_what_is_gone(
    storage_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_backup, "_CHECK_EVERY", 1)
    rig = make()
    run(rig)
    object_of(storage_dir, 4).unlink()
    attached_store_of(rig).reads._check_at = 0.0
    assert run(rig) == [removed(4)]
    assert run(rig) == [stored(4, 4)]
    rig.close()


def test_a_lost_state_takes_the_block_before_it_along(
    storage_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block of a model with recurrent states is in L3 only if the state at its end is too."""
    monkeypatch.setattr(storage_backup, "_CHECK_EVERY", 1)
    rig = make(StateRig)
    assert run(rig) == [stored(0, 5)]
    object_of(storage_dir, 5, "mamba").unlink()
    attached_store_of(rig).reads._check_at = 0.0
    assert run(rig) == [removed(5)]
    assert run(rig) == [stored(5, 5)]
    rig.flush()
    with object_of(storage_dir, 5, "mamba").open("r+b") as file:
        file.write(b"?")
    assert run(rig) == [removed(5), stored(5, 5)]
    rig.close()


def test_a_cleared_or_detached_store_has_nothing(storage_dir: Path) -> None:
    rig = make()
    run(rig)
    assert rig.hi.clear_storage_backend().done
    assert of_store(rig) == [removed(*range(6))]
    assert run(rig) == [stored(0, 5)]
    assert rig.hi.detach_storage_backend().done
    assert of_store(rig) == [removed(*range(6))]
    assert run(rig) == []
    assert rig.hi.attach_storage_backend("file", None).done
    assert run(rig) == [stored(0, 5)], "it is found there"
    rig.close()


def test_what_one_rank_has_lost_no_rank_has(storage_dir: Path) -> None:
    """A page is there if the objects of all ranks are. Each rank could tell, and one does."""

    def work(group: RankGroup) -> list[list[KVCacheEvent]]:
        rig = make(ShardedRig, group=group)
        told = [run(rig)]
        rig.flush()
        if group.rank == 1:
            object_of(storage_dir, 1, "kv%2Fh2-3").unlink()
        told.append(run(rig))
        rig.close()
        return told

    first, second = run_on_ranks(2, work)
    assert first == second == [[stored(0, 5)], [removed(1), stored(1, 1)]]


# -- the log -------------------------------------------------------------------------------------


def node_of(tokens: list[int]) -> TreeNode:
    node = TreeNode(1, RadixKey(tokens))
    node.attach(TreeNode(0, RadixKey([])), PAGE)
    return node


def first_page(node: TreeNode) -> PageHash:
    return node.page_hashes(PAGE)[0]


def test_a_page_that_came_after_the_question_stays() -> None:
    log, node = KVEventLog(PAGE), node_of([1, 2, 3, 4])
    asked_at = log.now
    log.in_store(node, StorageMedium.EXTERNAL)
    log.not_in_store(first_page(node), asked_at)
    assert [type(event) for event in log.take()] == [BlockStored]
    log.not_in_store(first_page(node), log.now)
    log.not_in_store(first_page(node), log.now)
    (gone,) = log.take()
    assert isinstance(gone, BlockRemoved) and gone.medium == "EXTERNAL"


def test_the_memory_of_blocks_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "_MOST_STORED", 3)
    log = KVEventLog(PAGE)
    nodes = [node_of([start, 2, 3, 4]) for start in range(5)]
    for node in (*nodes[:3], nodes[0], *nodes[3:]):
        log.in_store(node, StorageMedium.DISK)
    gone = [event for event in log.take() if isinstance(event, BlockRemoved)]
    assert [event.block_hashes for event in gone] == [
        [hash_str_to_int64(first_page(nodes[index]))] for index in (1, 2)
    ]


def test_a_log_that_was_dropped_remembers_no_blocks_of_l3(monkeypatch: pytest.MonkeyPatch) -> None:
    """Listeners have forgotten them with all others, and are told of them once more."""
    log, node, other = KVEventLog(PAGE), node_of([1, 2, 3, 4]), node_of([9, 2, 3, 4])
    log.in_store(node, StorageMedium.DISK)
    assert len(log.take()) == 1
    monkeypatch.setattr(kv_events, "_MOST_NUMBERS", 5)
    for _ in range(2):
        log.stored(other, StorageMedium.GPU)
    assert [type(event) for event in log.take()] == [AllBlocksCleared, BlockStored]
    log.not_in_store(first_page(node), log.now)
    assert log.take() == [], "they do not know it"
    log.in_store(node, StorageMedium.DISK)
    assert [type(event) for event in log.take()] == [BlockStored]
