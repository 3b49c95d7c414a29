"""Events of L1 and L2: whoever hears them all knows which pages the device and the host have."""

from __future__ import annotations

import random

import msgspec
import pytest

from rigs.caches.cache_rig import CacheRig, HiCacheSettings
from sglang.srt.disaggregation.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
    KVEventBatch,
)
from sglang.srt.mem_cache.tree import kv_events
from sglang.srt.mem_cache.tree.radix_key import RadixKey
from sglang.srt.mem_cache.tree.tree_node import TreeNode
from sglang.srt.mem_cache.utils import get_hash_str, hash_str_to_int64
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")


class Listener:
    """Blocks that a tier of a cache has, as its events tell."""

    def __init__(self, medium: str = "GPU") -> None:
        self.medium = medium
        self.tokens: dict[int, tuple[int, ...]] = {}
        """Tokens of blocks, by hash."""
        self.parents: dict[int, int | None] = {}

    def hear(self, events: list[KVCacheEvent]) -> None:
        for event in events:
            if isinstance(event, BlockStored | BlockRemoved) and event.medium != self.medium:
                continue
            if isinstance(event, BlockStored):
                parent, size = event.parent_block_hash, event.block_size
                assert event.lora_id is None
                if self.medium == "GPU":  # Copies to the host may end in any order.
                    assert parent is None or parent in self.tokens, "parents come first"
                for index, block in enumerate(event.block_hashes):
                    assert block not in self.tokens, "stored twice"
                    self.tokens[block] = tuple(event.token_ids[index * size : (index + 1) * size])
                    self.parents[block] = parent
                    parent = block
            elif isinstance(event, BlockRemoved):
                for block in event.block_hashes:
                    del self.tokens[block], self.parents[block]
            else:
                assert isinstance(event, AllBlocksCleared)
                self.tokens.clear()
                self.parents.clear()


def on_device(rig: CacheRig) -> set[int]:
    """Numbers of the pages that the tree has on the device."""
    return numbers(rig, [node for node in rig.tree.nodes() if node.value is not None])


def numbers(rig: CacheRig, nodes: list[TreeNode]) -> set[int]:
    return {hash_str_to_int64(page) for node in nodes for page in node.page_hashes(rig.page_size)}


def test_a_prompt_is_stored_and_its_eviction_removes_it() -> None:
    rig = CacheRig(l1_pages=4, page_size=2, kv_events=True)
    rig.run([1, 2, 3, 4, 5])
    first = get_hash_str([1, 2])
    second = get_hash_str([3, 4], first)
    stored = rig.tree.take_events()
    assert stored == [
        BlockStored(
            block_hashes=[hash_str_to_int64(first), hash_str_to_int64(second)],
            parent_block_hash=None,
            token_ids=[1, 2, 3, 4],
            block_size=2,
            lora_id=None,
            medium="GPU",
        )
    ]
    assert rig.tree.take_events() == []
    rig.run([1, 2, 9, 9])
    (branch,) = rig.tree.take_events()
    assert isinstance(branch, BlockStored)
    assert branch.parent_block_hash == hash_str_to_int64(first)
    rig.tree.reset()
    assert rig.tree.take_events() == [AllBlocksCleared()]


@pytest.mark.parametrize("tiers", [1, 2])
def test_a_listener_knows_the_tree_of_a_random_run(tiers: int) -> None:
    rng = random.Random(tiers)
    settings = HiCacheSettings() if tiers == 2 else None
    rig = CacheRig(l1_pages=12, settings=settings, kv_events=True)
    device, host = Listener(), Listener("CPU_PINNED")
    have_been: set[int] = set()
    for _ in range(150):
        prompt = [rng.randrange(3) for _ in range(rng.randrange(1, 30))]
        rig.run(prompt, extra_key=rng.choice([None, None, "a"]))
        events = rig.tree.take_events()
        device.hear(events)
        host.hear(events)
        assert set(device.tokens) == on_device(rig)
        on_host = [node for node in rig.tree.nodes() if node.host_value is not None]
        assert set(host.tokens) == numbers(rig, on_host)
        have_been |= set(host.tokens)
    assert device.tokens and bool(have_been) == (tiers == 2)
    assert tiers == 1 or have_been - set(host.tokens), "some left the host"
    rig.settle()


def test_nobody_pays_for_events_that_nobody_wants() -> None:
    rig = CacheRig(page_size=2)
    rig.run(range(8))
    assert rig.tree.take_events() == []
    assert all(node.hash_value is None for node in rig.tree.nodes())


def test_events_that_nobody_takes_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "_MAX_EVENTS", 10)
    rig = CacheRig(l1_pages=200, page_size=1, kv_events=True)
    for start in range(0, 100, 4):
        rig.run(range(start * 10, start * 10 + 3))
    events = rig.tree.take_events()
    assert 0 < len(events) <= 10
    assert events[0] == AllBlocksCleared()
    assert all(isinstance(event, BlockStored) for event in events[1:])


def test_events_are_maps_with_a_type() -> None:
    event = BlockRemoved(block_hashes=[-5], medium="GPU")
    raw = msgspec.msgpack.encode(KVEventBatch(1.5, [event, AllBlocksCleared()]))
    assert msgspec.msgpack.decode(raw) == [
        1.5,
        [
            {"type": "BlockRemoved", "block_hashes": [-5], "medium": "GPU"},
            {"type": "AllBlocksCleared"},
        ],
        None,
    ]
    assert msgspec.msgpack.decode(raw, type=KVEventBatch).events == [event, AllBlocksCleared()]


def test_bigrams_have_hashes_of_their_own() -> None:
    tokens = RadixKey([1, 2, 3, 4])
    assert tokens.page_hashes(1)[0] == get_hash_str([1])
    assert RadixKey([1, 2, 3], is_bigram=True).page_hashes(1)[0] == get_hash_str([(1, 2)])


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
