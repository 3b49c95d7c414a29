"""Names for third parties in `mem_cache.utils` and `mem_cache.registry`; keys of bigrams."""

from __future__ import annotations

import hashlib

import pytest
import torch

from rigs.caches.cache_rig import CacheRig
from sglang.srt.mem_cache import registry
from sglang.srt.mem_cache.base_prefix_cache import (
    InsertParams,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.evict_policy import LFUStrategy
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from sglang.srt.mem_cache.registry import (
    TreeCacheBuildContext,
    create_tree_cache,
    default_radix_cache_factory,
    get_radix_cache_factory,
    register_radix_cache_backend,
    registered_radix_cache_backends,
)
from sglang.srt.mem_cache.utils import (
    compute_node_hash_values,
    get_eviction_strategy,
    get_hash_str,
    hash_str_to_int64,
    maybe_init_custom_mem_pool,
    split_node_hash_value,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")


# -- hashes --------------------------------------------------------------------------------------


def test_a_hash_is_sha256_of_the_hash_before_and_the_tokens() -> None:
    first = hashlib.sha256((1).to_bytes(4, "little") + (2).to_bytes(4, "little"))
    assert get_hash_str([1, 2]) == first.hexdigest()
    second = hashlib.sha256(first.digest() + (2**32 - 1).to_bytes(4, "little"))
    assert get_hash_str([2**32 - 1], first.hexdigest()) == second.hexdigest()
    assert get_hash_str([(1, 2)]) == get_hash_str([1, 2]), "a bigram is two tokens"
    assert get_hash_str(RadixKey([1, 2], "salt")) == get_hash_str([1, 2])
    with pytest.raises(OverflowError):
        get_hash_str([2**32])
    with pytest.raises(ValueError):
        get_hash_str([1], "no hash")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("00" * 32, 0),
        ("7f" + "ff" * 31, 2**63 - 1),
        ("80" + "00" * 31, -(2**63)),
        ("ff" * 32, -1),
        ("0000000000000001" + "ff" * 24, 1),
    ],
)
def test_the_first_64_bits_are_a_signed_number(text: str, number: int) -> None:
    assert hash_str_to_int64(text) == number


def test_hashes_of_nodes_are_chained_and_split_with_them() -> None:
    rig = CacheRig(page_size=2)
    rig.run(range(9))
    (node,) = rig.tree.nodes()
    hashes = compute_node_hash_values(node, 2)
    assert hashes[1] == get_hash_str([2, 3], get_hash_str([0, 1]))
    assert split_node_hash_value(hashes, 4, 2) == (hashes[:2], hashes[2:])
    assert split_node_hash_value(None, 4, 2) == (None, None)
    rig.run([0, 1, 2, 3, 99, 99, 99])
    upper, *lower = rig.tree.nodes()
    assert compute_node_hash_values(upper, 2) == hashes[:2]
    assert hashes[2:] in [compute_node_hash_values(one, 2) for one in lower]


def test_the_other_names_are_there_too() -> None:
    assert isinstance(get_eviction_strategy("lfu"), LFUStrategy)
    with pytest.raises(ValueError, match="slru"):
        get_eviction_strategy("best")
    assert maybe_init_custom_mem_pool("cpu") is None


# -- bigrams -------------------------------------------------------------------------------------


def test_a_key_of_bigrams_is_one_shorter_and_slices_like_its_tokens() -> None:
    key = RadixKey([1, 2, 3, 4, 5], "x", is_bigram=True)
    assert (len(key), key.is_bigram, key.extra_key) == (4, True, "x")
    assert key.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert key[1:3].token_ids.tolist() == [2, 3, 4]
    assert key.page_aligned(3).token_ids.tolist() == [1, 2, 3, 4]
    assert [len(RadixKey(list(range(n)), is_bigram=True)) for n in (0, 1, 2)] == [0, 0, 1]


def test_bigrams_match_where_both_tokens_do() -> None:
    key = RadixKey([1, 2, 3, 4, 5, 6, 7], is_bigram=True)
    assert key.match(RadixKey([1, 2, 3, 4, 9, 6, 7], is_bigram=True)) == 3
    assert key.match(RadixKey([1, 2, 3, 4, 9, 6, 7], is_bigram=True), 2) == 2
    assert key.match(RadixKey([1, 2, 3, 4, 5, 6, 7])) == 0, "tokens are no bigrams"
    assert key.child_key(1) != RadixKey([1, 9], is_bigram=True).child_key(1)
    assert key.hash_page(0, 2) == get_hash_str([(1, 2), (2, 3)])
    assert key.page_hashes(2)[1] == get_hash_str([(3, 4), (4, 5)], key.hash_page(0, 2))


def test_the_view_takes_as_many_slots() -> None:
    key, slots = RadixKey([1, 2, 3]), torch.arange(3)
    assert key.maybe_to_bigram_view(False, slots) == (key, slots)
    pairs, fewer = key.maybe_to_bigram_view(True, slots)
    assert pairs.is_bigram and fewer is not None and fewer.tolist() == [0, 1]
    assert pairs.maybe_to_bigram_view(True)[0] is pairs


def test_a_tree_holds_bigrams() -> None:
    rig = CacheRig(l1_pages=32, page_size=2)
    key = RadixKey([1, 2, 3, 4, 5], is_bigram=True)
    slots = rig.allocator.alloc(4)
    assert slots is not None
    rig.tree.insert(InsertParams(key=key, value=slots))
    longer = RadixKey([1, 2, 3, 4, 6], is_bigram=True)
    match = rig.tree.match_prefix(MatchPrefixParams(longer))
    assert torch.equal(match.device_indices, slots[:2])
    tokens = rig.tree.match_prefix(MatchPrefixParams(RadixKey([1, 2, 3, 4, 5])))
    assert len(tokens.device_indices) == 0
    rig.settle()


# -- caches of third parties ----------------------------------------------------------------------


class CountingCache(RadixCache):
    """A cache that counts its matches."""

    matches = 0

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        self.matches += 1
        return super().match_prefix(params)


def make_counting(ctx: TreeCacheBuildContext) -> RadixCache:
    return CountingCache(ctx.params)


@pytest.fixture(autouse=True)
def other_factories(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_factories", {})


def test_a_registered_cache_serves_requests() -> None:
    register_radix_cache_backend("counting", make_counting)
    register_radix_cache_backend("counting", make_counting)
    assert registered_radix_cache_backends() == ["counting"]
    assert get_radix_cache_factory("counting") is make_counting
    rig = CacheRig(radix_cache_backend="counting")
    rig.run(range(12))
    assert rig.run(range(12)).device == 8
    assert isinstance(rig.tree, CountingCache) and rig.tree.matches
    rig.settle()


def test_names_that_cannot_be_are_refused() -> None:
    register_radix_cache_backend("counting", make_counting)
    for name in ("", "counting"):
        with pytest.raises(ValueError, match="empty or taken"):
            register_radix_cache_backend(name, default_radix_cache_factory)
    with pytest.raises(ValueError, match=r"'other' is not registered; registered: counting\."):
        CacheRig(radix_cache_backend="other")


def test_what_is_no_cache_is_refused() -> None:
    register_radix_cache_backend("wrong", lambda ctx: ctx)  # type: ignore[arg-type, return-value]
    with pytest.raises(ValueError, match="made an object of type TreeCacheBuildContext"):
        CacheRig(radix_cache_backend="wrong")


def test_the_default_is_the_engine_s_own() -> None:
    assert type(CacheRig().tree) is RadixCache
    assert create_tree_cache.__module__ == registry.__name__
