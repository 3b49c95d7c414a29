"""The storage interface: outcomes, keys, hits over several pools, trailers, third parties."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rigs.stores.host_pools import (
    PAGE,
    copy_to_host,
    make_device_pool,
    make_host_pool,
    page_keys,
    page_slots,
    round_trip,
    storage_config,
)
from sglang.srt.mem_cache.hicache_storage import (
    CacheOutcome,
    HiCacheStorage,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PrefetchTimeoutConfig,
    StorageUnavailable,
)
from sglang.srt.mem_cache.host.host_layout import HostLayout
from sglang.srt.mem_cache.storage.base import combine_hits
from sglang.srt.mem_cache.storage.page_trailer import TRAILER_BYTES, is_intact, seal
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="base-a-test-cpu")


class DictStorage(HiCacheStorage):
    """The smallest possible third-party backend."""

    def __init__(self) -> None:
        self.storage_config = storage_config(tp_rank=1, tp_size=2)
        self.objects: dict[str, torch.Tensor] = {}

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        return self.objects.get(key)

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        self.objects.setdefault(key, value)
        return True

    def exists(self, key: str) -> bool:
        return key in self.objects


class V1Storage(DictStorage):
    """A third-party backend with v1 calls for the primary pool that return bools."""

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        return [key in self.objects for key in keys]

    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        for key, slots in zip(keys, host_indices.view(len(keys), -1), strict=True):
            self.objects[key] = slots
        return [True] * len(keys)


# -- outcomes ------------------------------------------------------------------------------------


def test_only_landed_is_true() -> None:
    assert [outcome for outcome in CacheOutcome if outcome] == [CacheOutcome.LANDED]
    assert CacheOutcome("damaged") is CacheOutcome.DAMAGED


def test_object_keys_name_pool_and_shard() -> None:
    assert storage_config().object_key("ns/ab", PoolName.KV) == "ns/ab/kv"
    by_hand = storage_config(tp_rank=1, tp_size=4)
    assert by_hand.object_key("ns/ab", "mamba") == "ns/ab/mamba/1_4", "no other rank's"
    split = replace(by_hand, object_names={"mamba": "mamba/h2-3.8", "indexer": "indexer"})
    assert split.object_key("ns/ab", "mamba") == "ns/ab/mamba/h2-3.8"
    assert split.object_key("ns/ab", "indexer") == "ns/ab/indexer"


def test_timeout_grows_and_is_capped() -> None:
    bound = PrefetchTimeoutConfig()
    assert bound.seconds_for(10_240) == pytest.approx(3.0)
    assert bound.seconds_for(10**9) == 30.0


# -- hits ----------------------------------------------------------------------------------------

KEYS = list("abcdef")


def hits(stored: dict[str, str], *transfers: PoolTransfer) -> tuple[int, dict[str, int]]:
    def exists(pool: str, keys: Sequence[str]) -> list[bool]:
        return [key in stored.get(pool, "") for key in keys]

    result = combine_hits(KEYS, transfers, exists, "kv")
    assert result.primary_pages == combine_hits(KEYS, None, exists, "kv").kv_hit_pages
    return result.kv_hit_pages, {str(k): v for k, v in result.extra_pool_hit_pages.items()}


INDEXER = PoolTransfer(PoolName.INDEXER)
MAMBA = PoolTransfer(PoolName.MAMBA, hit_policy=PoolHitPolicy.TRAILING_PAGES)


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        pytest.param({"kv": "abcd"}, (4, {}), id="leading-run"),
        pytest.param({"kv": "bcd"}, (0, {}), id="hole-at-the-root"),
        pytest.param({"kv": "abdef"}, (2, {}), id="hole"),
        pytest.param({}, (0, {}), id="empty"),
    ],
)
def test_hits_are_leading(stored: dict[str, str], expected: tuple[int, dict[str, int]]) -> None:
    assert hits(stored) == expected


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        ({"kv": "abcd", "indexer": "abcdef"}, (4, {"indexer": 4})),
        ({"kv": "abcd", "indexer": "abd"}, (2, {"indexer": 2})),
        ({"kv": "abcd"}, (0, {"indexer": 0})),
    ],
)
def test_all_pages_pool_is_a_minimum(
    stored: dict[str, str], expected: tuple[int, dict[str, int]]
) -> None:
    assert hits(stored, INDEXER) == expected


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        ({"kv": "abcd", "mamba": "bd"}, (4, {"mamba": 4})),
        ({"kv": "abcd", "mamba": "bf"}, (2, {"mamba": 2})),
        ({"kv": "abcd", "mamba": "e"}, (0, {"mamba": 0})),
    ],
)
def test_trailing_pool_sets_the_boundary(
    stored: dict[str, str], expected: tuple[int, dict[str, int]]
) -> None:
    assert hits(stored, MAMBA) == expected


def test_pools_must_agree_on_one_boundary() -> None:
    stored = {"kv": "abcdef", "indexer": "abcd", "mamba": "bcf"}
    assert hits(stored, INDEXER, MAMBA) == (3, {"indexer": 4, "mamba": 6})


def test_a_transfer_may_name_the_pages_that_have_a_state() -> None:
    sparse = PoolTransfer(PoolName.MAMBA, keys=["b", "e"], hit_policy=MAMBA.hit_policy)
    assert hits({"kv": "abcdef", "mamba": "bcef"}, sparse) == (5, {"mamba": 5})


# -- trailers ------------------------------------------------------------------------------------


@given(st.binary(max_size=64), st.binary(max_size=64), st.text(max_size=20))
def test_trailer_covers_the_bytes_and_the_key(k: bytes, v: bytes, key: str) -> None:
    trailer = seal([k, v], key)
    assert len(trailer) == TRAILER_BYTES
    assert is_intact(trailer, [k + v], key, verify_checksum=True)
    assert not is_intact(trailer, [k, v + b"x"], key, verify_checksum=True)
    assert not is_intact(trailer[:-1], [k, v], key, verify_checksum=True)
    for verify in (True, False):
        assert not is_intact(trailer, [k, v], key + "x", verify_checksum=verify)
    # Without verification only the page's hash is skipped.
    assert is_intact(trailer, [k, v + b"x"], key, verify_checksum=False)


def test_every_flipped_bit_is_noticed() -> None:
    page, key = bytearray(range(64)), "ns/ab/kv"
    trailer = bytearray(seal([page], key))
    for data in (page, trailer):
        for bit in range(len(data) * 8):
            data[bit // 8] ^= 1 << bit % 8
            assert not is_intact(trailer, [page], key, verify_checksum=True)
            data[bit // 8] ^= 1 << bit % 8
    assert is_intact(trailer, [page], key, verify_checksum=True)


def test_a_trailer_without_a_checksum_only_checks_the_key() -> None:
    page, key = bytes(range(64)), "ns/ab/kv"
    trailer = seal([page], key, with_checksum=False)
    assert len(trailer) == TRAILER_BYTES
    assert is_intact(trailer, [], key, verify_checksum=False)
    assert not is_intact(trailer, [], "ns/cd/kv", verify_checksum=False)
    assert not is_intact(trailer, [page], key, verify_checksum=True)


def test_verify_checksum_must_be_a_bool() -> None:
    assert storage_config().verify_checksum
    assert not storage_config(verify_checksum=False).verify_checksum
    with pytest.raises(ValueError, match="verify_checksum"):
        _ = storage_config(verify_checksum="no").verify_checksum


# -- third parties -------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", list(HostLayout))
def test_three_plain_calls_make_a_backend(layout: str) -> None:
    storage = DictStorage()
    round_trip(storage, layout, page_keys(3), [5, 2, 9])
    assert set(storage.objects) == {f"{key}/kv/1_2" for key in page_keys(3)}
    assert storage.probe()
    with pytest.raises(ValueError, match="DictStorage cannot clear"):
        storage.clear()


def filled() -> tuple[DictStorage, torch.Tensor, list[str]]:
    storage, device = DictStorage(), make_device_pool()
    host = make_host_pool(device, "page_first")
    storage.register_mem_pool_host(host)
    slots = copy_to_host(device, host, [3, 4, 5])
    keys = page_keys(3)
    storage.batch_set_v2([PoolTransfer(PoolName.KV, host_indices=slots, keys=keys)])
    return storage, slots, keys


def test_a_page_that_another_wrote_is_not_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    storage, slots, keys = filled()
    first = next(iter(storage.objects))
    del storage.objects[first]
    sent: list[str] = []
    put = storage.set

    def noted(key: str, value: Any | None = None, *rest: Any) -> bool:
        sent.append(key)
        return put(key, value, *rest)

    monkeypatch.setattr(storage, "set", noted)
    move = PoolTransfer(PoolName.KV, host_indices=slots, keys=keys)
    assert storage.batch_set_v2([move])[PoolName.KV] == [CacheOutcome.LANDED] * 3
    assert sent == [first]


def test_third_party_values_are_checked_too() -> None:
    storage, slots, keys = filled()
    first, second, third = storage.objects
    storage.objects[first][5] ^= 1
    storage.objects[second] = storage.objects[second][:-1]
    del storage.objects[third]
    got = storage.batch_get_v2([PoolTransfer(PoolName.KV, host_indices=slots, keys=keys)])
    assert got[PoolName.KV] == [CacheOutcome.DAMAGED, CacheOutcome.DAMAGED, CacheOutcome.MISS]


def test_a_plain_backend_keeps_pages_of_extra_pools() -> None:
    storage, _, keys = filled()
    states = make_device_pool(page_size=1)
    host = make_host_pool(states, "layer_first")
    storage.register_mem_host_pool_v2(host, PoolName.MAMBA)
    slot = copy_to_host(states, host, [6])
    move = PoolTransfer(PoolName.MAMBA, slot, keys=keys[1:2], hit_policy=MAMBA.hit_policy)
    assert storage.batch_set_v2([move]) == {"mamba": [CacheOutcome.LANDED]}
    wanted = [PoolTransfer(PoolName.MAMBA, hit_policy=MAMBA.hit_policy)]
    assert storage.batch_exists_v2(keys, wanted).kv_hit_pages == 2
    before = host.get_data_page(int(slot))
    host.set_from_flat_data_page(int(slot), host.get_dummy_flat_data_page())
    assert storage.batch_get_v2([move]) == {"mamba": [CacheOutcome.LANDED]}
    assert torch.equal(host.get_data_page(int(slot)).view(torch.int16), before.view(torch.int16))


class NotedStorage(DictStorage):
    """A backend that notes the arguments of its plain calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []

    def get(self, *args: Any) -> Any:
        self.calls.append(args)

    def set(self, *args: Any) -> bool:
        self.calls.append(args)
        return True


def test_plain_batches_pass_every_argument_on() -> None:
    storage, keys = NotedStorage(), ["a", "b"]
    storage.batch_get(keys)
    storage.batch_get(keys, [1, 2], [3, 4])
    assert storage.batch_set(keys, target_locations=[5, 6], target_sizes=[7, 8])
    assert storage.calls == [
        ("a", None, None), ("b", None, None), ("a", 1, 3), ("b", 2, 4),
        ("a", None, 5, 7), ("b", None, 6, 8),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="shorter"):
        storage.batch_set(keys, [1])


def test_v1_calls_are_used_for_the_anchor() -> None:
    storage = V1Storage()
    storage.register_mem_pool_host(make_host_pool(make_device_pool(), "page_first"))
    move = PoolTransfer(PoolName.KV, host_indices=page_slots([2, 0]), keys=page_keys(2))
    assert storage.batch_get_v2([move]) == {"kv": [False, False]}
    assert storage.batch_set_v2([move]) == {"kv": [True, True]}
    assert storage.objects["ns/" + "0" * 64 + "/kv/1_2"].tolist() == [8, 9, 10, 11]
    assert storage.batch_get_v2([move]) == {"kv": [True, True]}


class Scripted(DictStorage):
    """A third-party backend whose answers a test sets."""

    def __init__(self, **answers: object) -> None:
        super().__init__()
        self.register_mem_pool_host(make_host_pool(make_device_pool(), "page_first"))
        for name, answer in answers.items():
            setattr(self, name, lambda *args, _answer=answer, **kwargs: _answer)


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ({"exists": 1}, "Scripted.exists answered 1 where True or False is due"),
        ({"exists": None}, "Scripted.exists answered None"),
        ({"batch_exists": 4}, "Scripted.batch_exists answered 4 pages, having been asked about 3"),
        ({"batch_exists": -1}, "Scripted.batch_exists answered -1 pages"),
        ({"batch_exists": True}, "Scripted.batch_exists answered True where a number"),
        ({"batch_exists": [True] * 3}, "of type list where a number"),
        ({"get": b"bytes"}, "Scripted.batch_get answered a value of type bytes"),
        ({"get": True}, "Scripted.batch_get answered True where a tensor or None is due"),
        ({"batch_get": [None, None]}, "Scripted.batch_get answered 2 results for 3 keys"),
        ({"batch_get": None}, "Scripted.batch_get answered None where a list is due"),
        ({"set": None}, "Scripted.set answered None where True or False is due"),
        ({"set": 0}, "Scripted.set answered 0 where True or False is due"),
    ],
)
def test_answers_of_a_wrong_type_or_length_are_refused(
    answers: dict[str, object], words: str
) -> None:
    storage, keys = Scripted(**answers), page_keys(3)
    move = PoolTransfer(PoolName.KV, host_indices=page_slots([2, 0, 1]), keys=keys)
    calls: dict[str, Callable[[], object]] = {
        "exists": lambda: storage.batch_exists_v2(keys),
        "get": lambda: storage.batch_get_v2([move]),
        "set": lambda: storage.batch_set_v2([move]),
    }
    (name,) = answers
    with pytest.raises(StorageUnavailable, match=re.escape(words)):
        calls[name.removeprefix("batch_")]()


def test_malformed_transfers_name_the_field() -> None:
    storage, slots, keys = filled()
    with pytest.raises(ValueError, match=f"3 keys of {PAGE} tokens need 12 host_indices, got 8"):
        storage.batch_get_v2([PoolTransfer(PoolName.KV, slots[:8], keys=keys)])
    with pytest.raises(ValueError, match="keys and host_indices"):
        storage.batch_set_v2([PoolTransfer(PoolName.KV, keys=keys)])
    with pytest.raises(ValueError, match="kv: nodes_to_load has no effect"):
        PoolTransfer(PoolName.KV, nodes_to_load=[])
    with pytest.raises(ValueError, match="'indexer' was not registered"):
        storage.batch_get_v2([PoolTransfer(PoolName.INDEXER, slots, keys=keys)])
