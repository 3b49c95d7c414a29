"""Calls of the Mooncake backend to Mooncake, and their order, when calls fail or hang.

Mooncake is a fake: the real one cannot be made to hang within a second. `test_mooncake_late_writes`
has the same with a real one.
"""

from __future__ import annotations

import dataclasses
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from rigs.stores.fake_mooncake import FakeMooncakes
from rigs.stores.host_pools import (
    copy_to_host,
    make_device_pool,
    make_host_pool,
    page_keys,
    storage_config,
)
from sglang.srt.mem_cache.hicache_storage import (
    CacheOutcome,
    HiCacheStorageExtraInfo,
    PoolName,
    PoolTransfer,
    StorageUnavailable,
)
from sglang.srt.mem_cache.storage.mooncake_store import client, mooncake_store
from sglang.srt.mem_cache.storage.mooncake_store.mooncake_store import MooncakeStore
from sglang.srt.utils.network import get_free_port, wait_until
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")

LANDED, DAMAGED, FAILED = CacheOutcome.LANDED, CacheOutcome.DAMAGED, CacheOutcome.FAILED
BROKEN, NO_MASTER = -800, -900
PAGES = 5


class Bench:
    """A store on fakes, with a host pool of pages."""

    def __init__(self, patch: pytest.MonkeyPatch, **config: str | bool) -> None:
        self.fakes = FakeMooncakes(patch)
        patch.setattr(mooncake_store, "is_reachable", lambda config: True)
        known: dict[str, Any] = {"master_server_address": "127.0.0.1:1", "protocol": "tcp"}
        self.store = MooncakeStore(storage_config(**(known | config)))
        device = make_device_pool()
        kind = self.store.config.host_allocator_type
        self.host = make_host_pool(device, "page_first_direct", allocator_type=kind)
        self.store.register_mem_host_pool_v2(self.host, PoolName.KV)
        slots = copy_to_host(device, self.host, list(range(PAGES)))
        self.move = PoolTransfer(PoolName.KV, host_indices=slots, keys=page_keys(PAGES))

    def put(self) -> list[CacheOutcome]:
        return self.store.batch_set_v2([self.move])["kv"]

    def get(self) -> list[CacheOutcome]:
        return self.store.batch_get_v2([self.move])["kv"]

    def keep(self, keys: list[str], *, but: str) -> list[int]:
        """Store something under `keys`, except for one. Returns the codes of a put."""
        self.fakes[-1].objects.update({key: b"x" for key in keys if key != but})
        return [0] * len(keys)

    def key(self, page: int) -> str:
        return self.store.object_keys(page_keys(PAGES), "kv")[page]

    def answer(self, **answers: Callable[..., Any]) -> None:
        self.fakes[-1].answers.update(answers)

    def asked(self, name: str) -> int:
        return self.fakes[-1].calls.count(name)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


def failed(code: int) -> Callable[[list[str]], list[int]]:
    return lambda keys: [code] * len(keys)


# -- transfers that outlive their call -------------------------------------------------------------


@pytest.mark.parametrize("way", ["get", "put", "probe"])
def test_a_transfer_that_lasted_a_minute_closes_its_client(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Mooncake returns after 60 s, but its transfers continue."""
    if way == "get":
        assert bench.put() == [LANDED] * PAGES
    call = {
        "get": "batch_get_into_multi_buffers",
        "put": "batch_put_from_multi_buffers",
        "probe": "put",
    }[way]
    first = bench.fakes[0]
    bench.answer(batch_get_into_multi_buffers=failed(BROKEN), put=lambda *_: BROKEN)
    bench.answer(batch_put_from_multi_buffers=failed(BROKEN))
    with monkeypatch.context() as slow:
        slow.setattr(client, "_UNFINISHED_AFTER_S", -1.0)
        if way == "probe":
            assert not bench.store.probe()
        else:
            with pytest.raises(StorageUnavailable, match="a store node hangs"):
                getattr(bench, way)()
    assert first.calls[-2:] == [call, "close"], "closed before its pages are released"
    for use in (bench.get, bench.put):
        with pytest.raises(StorageUnavailable, match="given up"):
            use()
    assert bench.store.probe()
    _, second = bench.fakes
    assert second.memory == first.memory
    assert bench.put() == bench.get() == [LANDED] * PAGES
    assert first.calls.count("close") == 1


def test_pages_are_released_only_after_the_client_was_closed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A get and a put give up the same client: one closes it, and both wait for the close."""
    assert bench.put() == [LANDED] * PAGES
    closing, may_close = threading.Event(), threading.Event()

    def close() -> int:
        closing.set()
        assert may_close.wait(30)
        return 0

    bench.answer(close=close)
    ended: list[str] = []

    def give_up(name: str) -> None:
        bench.store._client.give_up()
        ended.append(name)

    first = threading.Thread(target=give_up, args=("first",))
    second = threading.Thread(target=give_up, args=("second",))
    first.start()
    assert closing.wait(30)
    second.start()
    second.join(0.1)
    assert ended == []
    may_close.set()
    for thread in (first, second):
        thread.join(30)
    assert sorted(ended) == ["first", "second"]
    assert bench.asked("close") == 1


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


@pytest.mark.parametrize("way", ["get", "put"])
def test_pages_are_kept_until_an_unresponsive_stand_alone_client_has_ended(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    listener: socket.socket,
    way: str,
) -> None:
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    bench = Bench(monkeypatch, client_server_address=address)
    bench.answer(batch_get_into_multi_buffers=failed(NO_MASTER))
    bench.answer(batch_put_from_multi_buffers=failed(NO_MASTER))
    ended = threading.Event()

    def call() -> None:
        with pytest.raises(StorageUnavailable, match="did not answer"):
            getattr(bench, way)()
        ended.set()

    with monkeypatch.context() as slow, caplog.at_level(logging.WARNING):
        slow.setattr(client, "_UNANSWERED_AFTER_S", -1.0)
        thread = threading.Thread(target=call)
        thread.start()
        process, _ = listener.accept()
        assert wait_until(lambda: "until that process has ended" in caplog.text, 30)
        assert not ended.wait(0.1)
        process.close()
        assert ended.wait(30)
        thread.join(30)
    assert not bench.fakes[0].is_closed
    # No transfer is left, so that no further call waits.
    with pytest.raises(StorageUnavailable, match="Mooncake failed a"):
        getattr(bench, way)()


def test_there_is_no_wait_for_a_client_that_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(monkeypatch, client_server_address=f"127.0.0.1:{get_free_port()}")
    bench.answer(batch_put_from_multi_buffers=failed(NO_MASTER))
    with monkeypatch.context() as slow:
        slow.setattr(client, "_UNANSWERED_AFTER_S", -1.0)
        with pytest.raises(StorageUnavailable, match="did not answer"):
            bench.put()


# -- calls that take seconds -----------------------------------------------------------------------


def test_the_first_failed_call_without_a_master_decides_for_all_pages(bench: Bench) -> None:
    """Each call takes 4.4 s, so that 64 pages would block L3 for five minutes."""
    assert bench.put() == [LANDED] * PAGES
    bench.answer(batch_get_into_multi_buffers=failed(BROKEN), get_size=lambda key: NO_MASTER)
    bench.store._client.has_read = True
    with pytest.raises(StorageUnavailable, match=f"get of {PAGES} pages: {BROKEN}"):
        bench.get()
    assert bench.asked("get_size") == 1


def test_with_a_master_the_size_of_each_failed_page_is_queried(bench: Bench) -> None:
    assert bench.put() == [LANDED] * PAGES
    objects = bench.fakes[0].objects
    objects[bench.key(2)] = objects[bench.key(2)][:-1]
    del objects[bench.key(3)]
    sizes = [len(objects.get(bench.key(page), b"")) for page in range(PAGES)]
    codes = [sizes[0], BROKEN, BROKEN, BROKEN, sizes[4]]
    bench.answer(batch_get_into_multi_buffers=lambda keys: codes[-len(keys) :])
    bench.store._client.has_read = True
    outcomes = bench.get()
    assert outcomes[1:4] == [FAILED, DAMAGED, CacheOutcome.MISS]
    assert bench.asked("get_size") == 3


def test_damaged_objects_are_removed_while_the_master_answers(bench: Bench) -> None:
    assert bench.put() == [LANDED] * PAGES
    objects = bench.fakes[0].objects
    for key in objects:
        objects[key] = bytes(len(objects[key]))
    bench.answer(remove=lambda key: NO_MASTER)
    assert bench.get()[0] is DAMAGED
    assert bench.asked("remove") == 1
    del bench.fakes[0].answers["remove"]
    bench.get()
    assert not objects


# -- puts that store nothing -----------------------------------------------------------------------


def test_a_put_that_stored_nothing_is_a_miss_and_ends_the_prefix(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """Mooncake answers 0 to all, for example if another client has begun to put page 2."""
    unfinished = bench.key(2)
    bench.answer(
        batch_is_exist=lambda keys: [int(key in bench.fakes[0].objects) for key in keys],
        batch_put_from_multi_buffers=lambda keys: bench.keep(keys, but=unfinished),
    )
    miss, short = CacheOutcome.MISS, CacheOutcome.SHORT
    assert bench.put() == [LANDED, LANDED, miss, short, short]
    assert "took 1 objects of 5, but does not have them" in caplog.text
    assert bench.store.get_stats()["set_unfinished_pages"] == 1
    assert bench.put() == [LANDED, LANDED, miss, short, short]
    del bench.fakes[0].answers["batch_put_from_multi_buffers"]
    assert bench.put() == [LANDED] * PAGES


def test_a_put_of_another_client_that_ends_soon_loses_nothing(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    pending, fake = bench.key(2), bench.fakes[0]
    ends: list[str] = []

    def answer(keys: list[str]) -> list[int]:
        there = [int(key in fake.objects) for key in keys]
        if pending in keys and bench.asked("batch_put_from_multi_buffers"):
            fake.objects[pending] = b"theirs"
            ends.append(pending)
        return there

    bench.answer(
        batch_is_exist=answer,
        batch_put_from_multi_buffers=lambda keys: bench.keep(keys, but=pending),
    )
    assert bench.put() == [LANDED] * PAGES
    assert ends and "does not have them" not in caplog.text


def test_a_single_object_that_was_not_stored_is_no_success(bench: Bench) -> None:
    value = torch.zeros(8, dtype=torch.uint8)
    bench.answer(put=lambda *_: 0)
    assert not bench.store.set("a", value)
    del bench.fakes[0].answers["put"]
    assert bench.store.set("a", value)


def test_one_question_confirms_all_pools_and_renews_the_pages_before(bench: Bench) -> None:
    """No question where nothing was put: the one before the put renewed these pages."""
    asked: list[list[str]] = []

    def answer(keys: list[str]) -> list[int]:
        asked.append(keys)
        return [int(key in bench.fakes[0].objects) for key in keys]

    bench.answer(batch_is_exist=answer)
    bench.store.register_mem_host_pool_v2(bench.host, "indexer")
    moves = [bench.move, dataclasses.replace(bench.move, name="indexer")]
    before = HiCacheStorageExtraInfo(prefix_keys=["ns/root", "ns/next"])
    landed = [LANDED] * PAGES
    assert bench.store.batch_set_v2(moves, before) == {"kv": landed, "indexer": landed}
    by_pool = [bench.store.object_keys(page_keys(PAGES), pool) for pool in ("kv", "indexer")]
    assert asked == [*by_pool, [*by_pool[0], *by_pool[1], "ns/root/kv", "ns/next/kv"]]
    del asked[:]
    bench.store.batch_set_v2(moves, before)
    assert asked == by_pool


def test_without_groups_all_objects_of_the_pages_before_are_renewed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench, asked = Bench(monkeypatch, enable_group_semantics=False), []

    def answer(keys: list[str]) -> list[int]:
        asked.append(keys)
        return [int(key in bench.fakes[0].objects) for key in keys]

    bench.answer(batch_is_exist=answer)
    bench.store.register_mem_host_pool_v2(bench.host, "indexer")
    moves = [bench.move, dataclasses.replace(bench.move, name="indexer")]
    bench.store.batch_set_v2(moves, HiCacheStorageExtraInfo(prefix_keys=["ns/root"]))
    assert bench.fakes[-1].groups == {}
    assert asked[-1][-2:] == ["ns/root/kv", "ns/root/indexer"]


@pytest.mark.parametrize(
    ("pools", "heads", "groups"),
    [
        pytest.param(["kv"], "kv", {}, id="one-object"),
        pytest.param(["kv"], "kv/h0-3.8", {"kv/h0-3.8"}, id="other-ranks"),
        pytest.param(["kv", "indexer"], "kv", {"kv", "indexer"}, id="two-pools"),
    ],
)
def test_objects_of_one_page_are_a_group(
    bench: Bench, pools: list[str], heads: str, groups: set[str]
) -> None:
    config = dataclasses.replace(bench.store.storage_config, object_names={"kv": heads})
    store = MooncakeStore(config)
    for pool in pools:
        store.register_mem_host_pool_v2(bench.host, pool)
    store.batch_set_v2([dataclasses.replace(bench.move, name=pool) for pool in pools])
    assert bench.fakes[-1].groups == {
        f"{page}/{name}": page for page in page_keys(PAGES) for name in groups
    }


def test_a_probe_ends_after_a_failed_put(bench: Bench) -> None:
    bench.answer(put=lambda *_: NO_MASTER)
    assert not bench.store._moves_bytes()
    assert bench.fakes[0].calls == ["put"]


def test_notes_that_mooncake_does_not_keep_or_tell_are_failures(bench: Bench) -> None:
    bench.answer(upsert=lambda key, value: NO_MASTER)
    with pytest.raises(StorageUnavailable, match="did not store a note: -900"):
        bench.store.set_note("0", bytes(24))
    bench.answer(get_batch=lambda keys: [])
    with pytest.raises(StorageUnavailable, match="0 notes to 2"):
        bench.store.get_notes(["0", "1"])
