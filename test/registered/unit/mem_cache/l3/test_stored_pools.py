"""Parts of pages: what each pool moves for a run of pages, and which prefix can be used."""

from __future__ import annotations

import pytest
import torch

from sglang.srt.mem_cache.hicache_storage import (
    CacheOutcome,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.l3.stored_pools import (
    PoolShards,
    StoredObject,
    StoredPools,
    combined_outcomes,
    num_keys,
    usable_pages,
)
from sglang.srt.mem_cache.tree.radix_key import PageHash
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")

LANDED, MISS, SHORT, DAMAGED, FAILED = (
    CacheOutcome.LANDED, CacheOutcome.MISS, CacheOutcome.SHORT, CacheOutcome.DAMAGED,
    CacheOutcome.FAILED,
)  # fmt: skip
HASHES = [PageHash(page) for page in "abcde"]
KV = PoolTransfer(PoolName.KV, torch.arange(10))
"""Pages of two tokens."""
INDEXER = PoolTransfer(PoolName.INDEXER, torch.arange(5) + 100)
"""Pages of one slot."""


def states(count: int, keys: list[str] | None = None) -> PoolTransfer:
    slots = torch.arange(count) + 50
    return PoolTransfer(PoolName.MAMBA, slots, keys=keys, hit_policy=PoolHitPolicy.TRAILING_PAGES)


def parts_of_pages(
    transfers: list[PoolTransfer], hashes: list[PageHash], begin: int, end: int, **last: int
) -> list[PoolTransfer]:
    """The parts that pages have in pools, with the hashes of the pages as keys."""
    objects = StoredPools().objects(transfers, hashes, begin, end, **last)
    for one in objects:
        one.keys = [key.removeprefix("/") for key in one.keys or ()]
    return objects


def shown(parts: list[PoolTransfer]) -> dict[str, tuple[list[int], list[str] | None]]:
    """Host slots and keys by pool."""
    shown_parts = {}
    for part in parts:
        assert part.host_indices is not None
        shown_parts[str(part.name)] = (part.host_indices.tolist(), part.keys)
    return shown_parts


def test_pools_with_a_page_for_each_key_are_cut_alike() -> None:
    assert shown(parts_of_pages([KV, INDEXER], HASHES, 1, 3)) == {
        "kv": ([2, 3, 4, 5], ["b", "c"]),
        "indexer": ([101, 102], ["b", "c"]),
    }


def test_a_state_goes_with_the_page_that_it_stands_behind() -> None:
    behind_b_and_e = states(2, ["b", "e"])
    assert shown(parts_of_pages([KV, behind_b_and_e], HASHES, 0, 2))["mamba"] == ([50], ["b"])
    assert "mamba" not in shown(parts_of_pages([KV, behind_b_and_e], HASHES, 2, 4))
    assert shown(parts_of_pages([KV, behind_b_and_e], HASHES, 4, 5))["mamba"] == ([51], ["e"])


def test_a_state_without_keys_stands_behind_the_last_page_that_moves() -> None:
    assert shown(parts_of_pages([KV, states(1)], HASHES, 0, 5))["mamba"] == ([50], ["e"])
    assert shown(parts_of_pages([KV, states(1)], HASHES, 0, 3, last=3))["mamba"] == ([50], ["c"])
    assert "mamba" not in shown(parts_of_pages([KV, states(1)], HASHES, 0, 2, last=3))


def test_a_page_has_landed_when_all_its_parts_have() -> None:
    parts = parts_of_pages([KV, INDEXER, states(1, ["d"])], HASHES, 0, 5)
    whole = [LANDED] * 5
    missing = [LANDED, MISS, SHORT, SHORT, SHORT]
    assert combined_outcomes(HASHES, parts, [whole, whole, [LANDED]]) == whole
    assert combined_outcomes(HASHES, parts[:1], [missing]) == missing
    damaged = [LANDED, LANDED, DAMAGED, SHORT, SHORT]
    assert combined_outcomes(HASHES, parts, [whole, damaged, [LANDED]]) == damaged
    assert combined_outcomes(HASHES, parts, [whole, whole, [MISS]]) == [LANDED] * 3 + [MISS, LANDED]
    first = combined_outcomes(HASHES, parts, [missing, damaged, [FAILED]])
    assert first == missing, "the primary pool's first"


@pytest.mark.parametrize(
    ("landed", "keys", "usable"),
    [
        (5, ["e"], 5), (4, ["e"], 0), (4, ["b", "e"], 2), (1, ["b"], 0), (2, ["b"], 2),
        (0, ["a"], 0), (5, None, 5), (4, None, 0),
    ],
)  # fmt: skip
def test_a_prefix_ends_where_it_has_a_state(
    landed: int, keys: list[str] | None, usable: int
) -> None:
    with_states = [KV, INDEXER, states(len(keys) if keys else 1, keys)]
    assert usable_pages(landed, with_states, HASHES, 5) == usable
    assert usable_pages(landed, [KV, INDEXER], HASHES, 5) == landed


# -- pages as objects ----------------------------------------------------------------------------


def cut_in_two(pool: str, **args: int) -> PoolShards:
    names = (pool, f"{pool}/h1-1.2")
    return PoolShards(
        tuple(StoredObject(name, f"{pool}/h{head}-{head}.2") for head, name in enumerate(names)),
        **args,
    )


def test_a_pool_whose_heads_are_cut_is_several_pools_to_a_backend() -> None:
    stored = StoredPools(
        "ns",
        queries=[PoolTransfer(PoolName.INDEXER), states(0)],
        shards={"kv": cut_in_two("kv"), "mamba": cut_in_two("mamba")},
    )
    asked = [(one.name, one.hit_policy) for one in stored.questions]
    pages, trailing = PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES
    assert asked == [
        ("kv/h1-1.2", pages),
        ("indexer", pages),
        ("mamba", trailing),
        ("mamba/h1-1.2", trailing),
    ]
    moved = shown(stored.objects([KV, states(1, ["c"])], HASHES, 2, 4))
    assert moved["kv"] == moved["kv/h1-1.2"] == ([4, 5, 6, 7], ["ns/c", "ns/d"])
    assert moved["mamba"] == moved["mamba/h1-1.2"] == ([50], ["ns/c"])


def test_without_shards_pages_are_as_they_come() -> None:
    stored = StoredPools("ns")
    objects = stored.objects([KV, INDEXER], HASHES)
    assert [shown(objects)[pool][0] for pool in ("kv", "indexer")] == [
        list(range(10)),
        list(range(100, 105)),
    ]
    assert [one.keys for one in objects] == [[f"ns/{page}" for page in HASHES]] * 2
    assert stored.questions == []
    assert stored.to_write(objects) == objects


def test_ranks_with_equal_bytes_divide_the_keys_of_each_object_among_them() -> None:
    hashes = [PageHash(f"{page:064x}") for page in range(100)]
    names = [f"ns/{page}" for page in hashes]
    ranks = [
        StoredPools("ns", shards={"kv": cut_in_two("kv", num_writers=2, writer=rank)})
        for rank in (0, 1)
    ]
    objects = ranks[0].objects([PoolTransfer("kv", torch.arange(200))], hashes)
    written = [rank.to_write(objects) for rank in ranks]
    by_object = []
    for first, second in zip(*written, strict=True):
        assert first.keys and second.keys and sorted([*first.keys, *second.keys]) == names
        for part in (first, second):
            assert part.host_indices is not None and part.keys is not None
            pages = [names.index(key) for key in part.keys]
            assert part.host_indices.view(-1, 2)[:, 0].tolist() == [2 * page for page in pages]
        by_object.append(first.keys)
    assert by_object[0] != by_object[1], "each object has a hash of its own"
    shares = [num_keys(own) for own in written]
    assert sum(shares) == num_keys(objects) == 200 and all(shares)
