"""Limits of the `file` backend: uses, refusals, servers side by side, and settings."""

from __future__ import annotations

import dataclasses
import os
import threading
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from rigs.stores.host_pools import PAGE, copy_to_host, make_device_pool, make_host_pool, page_keys
from rigs.stores.host_pools import storage_config as config_of
from sglang.srt.environ import envs
from sglang.srt.mem_cache.hicache_storage import (
    CacheOutcome,
    HiCacheFile,
    HiCacheStorageExtraInfo,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.storage import file_room
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
from sglang.srt.mem_cache.storage.file_room import FileLimits
from sglang.srt.mem_cache.storage.object_files import ObjectFiles
from sglang.srt.mem_cache.storage.page_trailer import TRAILER_BYTES
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="base-a-test-cpu")

NS = "a" * 32
DAY = 1_800_000_000
"""Seconds since the epoch; a whole minute."""


class Server:
    """A `file` backend with the pages 0 to 9 of a prompt in its host pool."""

    def __init__(self, root: Path, *, pages: float | None = None, namespace: str = NS) -> None:
        device = make_device_pool()
        self.host = make_host_pool(device, "page_first_direct")
        self.size = self.host.page_bytes + TRAILER_BYTES
        limits = None if pages is None else FileLimits(int(pages * self.size))
        self.storage = HiCacheFile(config_of(namespace), str(root), limits)
        self.storage.register_mem_pool_host(self.host)
        self.slots = copy_to_host(device, self.host, list(range(10))).view(10, PAGE)
        self.keys = page_keys(10, namespace)
        self.settle()

    def settle(self) -> None:
        if self.storage._room is not None and self.storage._room._work is not None:
            assert self.storage._room._work.wait(30)

    def move(self, *pages: int) -> list[PoolTransfer]:
        slots = self.slots[torch.tensor(pages)].reshape(-1)
        return [
            PoolTransfer(PoolName.KV, host_indices=slots, keys=[self.keys[page] for page in pages])
        ]

    def put(self, *pages: int, before: int = 0) -> list[CacheOutcome]:
        hints = HiCacheStorageExtraInfo(prefix_keys=self.keys[:before])
        return self.storage.batch_set_v2(self.move(*pages), hints)["kv"]

    def file(self, page: int) -> Path:
        return self.storage._path(f"{self.keys[page]}/kv")


def test_a_question_a_read_and_a_write_behind_them_use_pages(tmp_path: Path) -> None:
    server = Server(tmp_path, pages=100)
    assert server.storage.renews_prefixes
    assert all(server.put(*range(6)))
    old = DAY // 4
    for use in ("ask", "read", "write", "present"):
        for page in range(6):
            os.utime(server.file(page), (old, old))
        match use:
            case "ask":
                server.storage.batch_exists_v2(server.keys[:4])
            case "read":
                server.storage.batch_get_v2(server.move(0, 1, 2, 3))
            case "write":
                assert all(server.put(6, before=4))
            case "present":
                assert all(server.put(0, 1, 2, 3))
        times = [server.file(page).stat().st_mtime_ns for page in range(6)]
        assert times[4:] == [old * 10**9] * 2, use
        assert times[0] > times[1] > times[2] > times[3] > old * 10**9, use
        if use == "write":
            assert 0 <= times[3] - server.file(6).stat().st_mtime_ns <= 61 * 10**9


def test_a_full_folder_costs_a_page_and_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(tmp_path, pages=4.5)
    landed, failed, short = CacheOutcome.LANDED, CacheOutcome.FAILED, CacheOutcome.SHORT
    assert server.put(*range(6)) == [landed] * 4 + [failed, short]
    assert f"not written: {tmp_path} has no room for it within SGLANG_HICACHE_FILE" in caplog.text
    assert server.storage.get_stats()["set_no_room_pages"] == 1
    usage = server.storage.get_usage()
    assert usage.used_bytes == 4 * server.size
    assert usage.total_bytes == int(4.5 * server.size)
    server.settle()
    server.storage.close()
    server.storage.close()


def test_clear_and_time_bring_a_new_sum(tmp_path: Path) -> None:
    server = Server(tmp_path, pages=100)
    room = server.storage._room
    assert room is not None
    server.put(0, 1)
    server.storage.clear()
    server.settle()
    assert server.storage.get_usage()[:4:2] == (0, 0)
    Server(tmp_path, namespace="b" * 32).put(0, 1, 2)
    room._started -= 601
    room._not_before = 0
    server.storage.get_usage()
    server.settle()
    assert server.storage.get_usage()[:4:2] == (3 * server.size, 3)
    assert server.storage.get_usage().num_other_namespaces == 1


def test_reads_and_writes_beside_removals_are_hits_or_misses(tmp_path: Path) -> None:
    servers = [Server(tmp_path, pages=6), Server(tmp_path, pages=6)]
    seen: set[CacheOutcome] = set()
    failures: list[Exception] = []
    ends = threading.Event()

    def remove() -> None:
        while not ends.is_set():
            for server in servers:
                assert server.storage._room is not None
                server.storage._room.sum_up_again()
                server.settle()

    def use(server: Server) -> None:
        try:
            for turn in range(150):
                page = turn % 10
                seen.update(server.storage.batch_set_v2(server.move(page))["kv"])
                seen.update(server.storage.batch_get_v2(server.move((page + 3) % 10))["kv"])
        except Exception as error:  # noqa: BLE001 (told to the test's thread)
            failures.append(error)

    remover = threading.Thread(target=remove)
    users = [threading.Thread(target=use, args=(server,)) for server in servers]
    for thread in (remover, *users):
        thread.start()
    for thread in users:
        thread.join(60)
    ends.set()
    remover.join(60)
    assert failures == []
    assert seen <= {CacheOutcome.LANDED, CacheOutcome.MISS, CacheOutcome.FAILED}
    assert all(server.storage.get_stats().get("get_damaged_pages", 0) == 0 for server in servers)
    assert CacheOutcome.LANDED in seen


# -- no limits, and settings -----------------------------------------------------------------------


def test_without_limits_nothing_is_noted_summed_up_or_asked_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*args: object, **kwargs: object) -> NoReturn:
        raise AssertionError("a limit costs something though there is none")

    for name in ("utime", "statvfs", "scandir"):
        monkeypatch.setattr(os, name, forbidden)
    monkeypatch.setattr(file_room, "BackgroundCall", forbidden)
    with monkeypatch.context() as only:
        only.setattr(ObjectFiles, "remove_stale_temporaries", lambda self: 0)
        server = Server(tmp_path)
    assert not server.storage.renews_prefixes
    assert all(server.put(0, 1, before=1))
    assert all(server.put(0, 1, before=1))
    assert all(server.storage.batch_get_v2(server.move(0, 1))["kv"])
    assert server.storage.batch_exists_v2(server.keys).kv_hit_pages == 2


def test_the_environment_sets_the_limits_of_the_backend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path))
    host = make_host_pool(make_device_pool(), "page_first_direct")
    config = dataclasses.replace(config_of(NS))
    plain = StorageBackendFactory.create_backend("file", config, host)
    assert isinstance(plain, HiCacheFile) and plain._room is None
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_MAX_SIZE", "2gb")
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_EVICTION_RATIO", "0.75")
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_MIN_FREE_SPACE", "1mb")
    limited = StorageBackendFactory.create_backend("file", config, host)
    assert isinstance(limited, HiCacheFile) and limited._room is not None
    assert limited._room._limits == FileLimits(2 << 30, 0.75, 1 << 20)
    limited.close()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MAX_SIZE", "200"),
        ("MAX_SIZE", "-1"),
        ("MIN_FREE_SPACE", "10"),
        ("EVICTION_RATIO", "90"),
        ("EVICTION_RATIO", "nan"),
    ],
)
def test_malformed_limits_are_named_at_the_start(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(f"SGLANG_HICACHE_FILE_BACKEND_{name}", value)
    with pytest.raises(ValueError, match=f"SGLANG_HICACHE_FILE_BACKEND_{name}='{value}': expected"):
        envs.check_own()
