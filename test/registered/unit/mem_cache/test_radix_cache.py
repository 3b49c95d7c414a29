"""The tree of one tier: match, split, insert, lock, evict, and page ownership."""

from __future__ import annotations

import random

import pytest
import torch

from rigs.caches.cache_rig import CacheRig, Reused, RigRequest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.tree.radix_key import RadixKey, chain_seed, page_hash
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")
register_cuda_ci(est_time=15, suite="base-b-test-1-gpu-large")


@pytest.mark.parametrize("page_size", [1, 2, 4, 64])
def test_a_prompt_is_reused_up_to_its_last_whole_page(page_size: int) -> None:
    rig = CacheRig(l1_pages=256 // page_size, page_size=page_size)
    prompt = list(range(128))
    assert rig.run(prompt) == Reused()
    # Exactly whole pages long: all but the page of the last token comes back.
    assert rig.run(prompt).device >= 128 - page_size
    assert rig.run([*prompt[:100], 999, 1000]).device == 100 // page_size * page_size
    rig.settle()


def test_match_stops_at_a_page_boundary_and_splits_there() -> None:
    rig = CacheRig(page_size=4)
    rig.run(range(12))
    match = rig.tree.match_prefix(MatchPrefixParams(RadixKey([0, 1, 2, 3, 4, 5, 99, 7])))
    assert len(match.device_indices) == 4
    assert [len(node.key) for node in rig.tree.nodes()] == [4, 8]
    rig.settle()


def test_tokens_become_an_array_once() -> None:
    key = RadixKey([0, 5, 2**32 - 1])
    assert key.ids.tolist() == list(key) == [0, 5, 2**32 - 1]
    assert RadixKey(key.token_ids).ids is key.ids
    assert len(RadixKey([])) == 0
    for wrong in (-1, 2**32):
        with pytest.raises(OverflowError):
            RadixKey([1, wrong])


def test_extra_keys_share_nothing() -> None:
    rig = CacheRig(l1_pages=64, page_size=1)
    rig.run(range(10), extra_key="a")
    assert rig.run(range(10), extra_key="b") == Reused()
    assert rig.run(range(10)) == Reused()
    assert rig.run(range(10), extra_key="a") == Reused(device=9)


def test_pages_inserted_twice_are_freed_once() -> None:
    rig = CacheRig(page_size=4)
    first, _ = rig.start(range(12))
    second, reused = rig.start(range(12))
    assert reused == Reused()
    rig.finish(first)
    rig.finish(second)
    assert rig.tree.total_size() == 12
    rig.settle()


def test_an_unfinished_request_goes_on_with_the_trees_slots() -> None:
    rig = CacheRig(page_size=4)
    first, _ = rig.start(range(10))
    second, _ = rig.start(range(10))
    rig.tree.cache_unfinished_req(first)
    rig.tree.cache_unfinished_req(second)
    assert first.cache_protected_len == second.cache_protected_len == 8
    assert torch.equal(first.prefix_indices[:8], second.prefix_indices[:8])
    assert not torch.equal(first.prefix_indices[8:], second.prefix_indices[8:])
    row = rig.rows.req_to_token[second.req_pool_idx, :10]
    assert torch.equal(row.long(), second.prefix_indices)
    rig.tree.check_integrity([first.prefix_indices[8:], second.prefix_indices[8:]])
    rig.finish(first)
    rig.finish(second, is_insert=False)
    rig.settle()


def test_a_tick_leaves_no_uses_for_an_eviction_to_note() -> None:
    rig = CacheRig(page_size=4)
    rig.run(range(12))
    assert rig.run(range(12)) == Reused(device=8)
    assert rig.tree.tree._touched
    rig.tree.begin_tick(1.0)
    assert not rig.tree.tree._touched


def test_locked_pages_are_not_evicted() -> None:
    rig = CacheRig(l1_pages=8, page_size=4)
    held, _ = rig.start(range(12))
    rig.tree.cache_unfinished_req(held)
    rig.run(range(100, 112))
    assert rig.tree.evictable_size() == 12
    assert rig.tree.protected_size() == 12
    assert rig.tree.evict(EvictParams(num_tokens=1000)).num_tokens_evicted == 12
    assert rig.run(range(13)).device == 12
    rig.finish(held)
    rig.settle()


@pytest.mark.parametrize(
    ("policy", "survivor"),
    [("lru", 0), ("lfu", 0), ("fifo", 2), ("mru", 1), ("filo", 0), ("slru", 0)],
)
def test_policies_choose_their_victims(policy: str, survivor: int) -> None:
    """Prompts 0, 1, 2 in this order, then 0 again twice: who is left when two must go?"""
    rig = CacheRig(l1_pages=12, page_size=4, eviction_policy=policy)
    prompts = [range(100 * i, 100 * i + 9) for i in range(3)]
    for index in (0, 1, 2, 0, 0):
        rig.run(prompts[index])
    rig.tree.evict(EvictParams(num_tokens=16))
    left = [
        i for i in range(3)
        if len(rig.tree.match_prefix(MatchPrefixParams(RadixKey(list(prompts[i])))).device_indices)
    ]  # fmt: skip
    assert left == [survivor]


def test_priority_policy_keeps_the_important() -> None:
    rig = CacheRig(l1_pages=8, page_size=4, eviction_policy="priority")
    for base, priority in ((0, 5), (100, 1)):
        request, _ = rig.start(range(base, base + 8))
        request.priority = priority
        rig.finish(request)
    rig.tree.evict(EvictParams(num_tokens=8))
    assert rig.run(range(9)).device == 8


def test_unknown_policy_is_refused_with_the_names() -> None:
    with pytest.raises(ValueError, match="lru, lfu"):
        CacheRig(eviction_policy="random")


def test_insert_needs_key_and_value_of_one_length() -> None:
    rig = CacheRig()
    with pytest.raises(ValueError, match="same length"):
        rig.tree.insert(InsertParams(key=RadixKey([1, 2]), value=torch.tensor([4])))


def test_integrity_names_a_lost_page() -> None:
    rig = CacheRig(l1_pages=4, page_size=4)
    rig.allocator.alloc(4)
    with pytest.raises(AssertionError, match="1 of 4 pages have no owner"):
        rig.tree.check_integrity()


def test_integrity_names_a_page_with_two_owners() -> None:
    rig = CacheRig(l1_pages=4, page_size=4)
    rig.run(range(8))
    node = next(iter(rig.tree.nodes()))
    with pytest.raises(AssertionError, match="is owned by"):
        rig.tree.check_integrity([node.value[:4] if node.value is not None else torch.empty(0)])


def test_hash_chain_is_the_documented_one() -> None:
    import hashlib

    tokens = RadixKey([1, 2, 3, 4])
    first = hashlib.sha256(bytes([1, 0, 0, 0, 2, 0, 0, 0])).hexdigest()
    second = hashlib.sha256(bytes.fromhex(first) + bytes([3, 0, 0, 0, 4, 0, 0, 0])).hexdigest()
    assert tokens.page_hashes(2) == [first, second]
    assert tokens.hash_page(0, 2) == first
    assert page_hash(tokens.ids[2:], tokens.hash_page(0, 2)) == second


def test_no_extra_key_collides_with_another() -> None:
    keys = [None, "", "a", "ab", "b", "\0", "0" * 64]
    assert len({chain_seed(key) for key in keys}) == len(keys)
    hashes = {RadixKey([97, 98], key).page_hashes(1)[-1] for key in keys}
    assert len(hashes) == len(keys)


def test_nodes_hash_as_their_whole_prefix_after_splits() -> None:
    rig = CacheRig(page_size=2)
    rig.run(range(12))
    rig.run([*range(6), 50, 51, 52, 53])
    whole = RadixKey(list(range(12))).page_hashes(2)
    leaf = rig.tree.match_prefix(MatchPrefixParams(RadixKey(list(range(12))))).last_device_node
    assert [*leaf.get_prefix_hash_values(2), *leaf.page_hashes(2)] == whole


@pytest.mark.parametrize("seed", range(3))
def test_random_requests_lose_no_page(seed: int) -> None:
    rng = random.Random(seed)
    rig = CacheRig(l1_pages=24, page_size=2, eviction_policy=rng.choice(["lru", "lfu", "slru"]))
    running: list[RigRequest] = []
    for _ in range(300):
        prompt = [rng.randrange(3) for _ in range(rng.randrange(1, 10))]
        if len(running) < 2:
            running.append(rig.start(prompt)[0])
        elif rng.random() < 0.3:
            rig.tree.cache_unfinished_req(rng.choice(running))
        else:
            rig.finish(running.pop(rng.randrange(2)), is_insert=rng.random() < 0.9)
        rig.tree.check_integrity(
            r.prefix_indices[:0]
            if r.req_pool_idx is None
            else rig.rows.req_to_token[
                r.req_pool_idx, r.cache_protected_len : len(r.kv_committed_ids)
            ].long()
            for r in running
        )
