"""Limits of the `file` backend's folder: what goes, what stays, and what the servers beside see."""

from __future__ import annotations

import dataclasses
import errno
import os
import threading
from collections.abc import Iterator
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
from sglang.srt.mem_cache.storage.file_room import FileLimits, FileRoom
from sglang.srt.mem_cache.storage.object_files import ObjectFiles
from sglang.srt.mem_cache.storage.page_trailer import TRAILER_BYTES
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="base-a-test-cpu")

NS = "a" * 32
SIZE = 1000
"""Bytes of an object of `Folder`."""
DAY = 1_800_000_000
"""Seconds since the epoch; a whole minute."""


class Folder:
    """A folder with objects of known ages, and rooms of servers on it with one clock."""

    def __init__(self, root: Path) -> None:
        self.files = ObjectFiles(root)
        self.now = float(DAY)
        self.rooms: list[FileRoom] = []

    def room(self, **limits: float) -> FileRoom:
        """A server's room after its first sum."""
        room = FileRoom(
            self.files,
            "ns",
            FileLimits(**limits),  # type: ignore[arg-type]
            clock=lambda: self.now,
            now_ns=lambda: int(self.now * 1e9),
        )
        self.rooms.append(room)
        self.settle(room)
        return room

    def settle(self, room: FileRoom) -> None:
        assert room._work is not None
        assert room._work.wait(30)
        assert room._work.error is None

    def later(self, room: FileRoom) -> None:
        """Let the pause after a sum pass, and wait for the sum that a write starts now."""
        self.now += 100
        room.admits(SIZE)
        self.settle(room)

    def put(self, names: range, *, age: float = 0.0, size: int = SIZE, namespace: str = NS) -> None:
        """Write objects; each is a second older than the one before it."""
        for name in names:
            stamp = int((self.now - age - name) * 1e9)
            path = self.files.path(namespace, f"{name:04}")
            self.files.write(path, [memoryview(bytes(size))], stamp)

    def left(self, namespace: str = NS) -> list[int]:
        return sorted(int(path.name) for path in self.files.root.glob(f"{namespace}/??/*"))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    made = Folder(tmp_path / "root")
    yield made
    for room in made.rooms:
        room.close()


# -- what goes and what stays ----------------------------------------------------------------------


def test_the_oldest_objects_of_all_namespaces_go_down_to_the_ratio(folder: Folder) -> None:
    folder.put(range(0, 60, 2))
    folder.put(range(1, 60, 2), namespace="b" * 32)
    room = folder.room(max_size=50 * SIZE, eviction_ratio=0.8)
    assert folder.left() == list(range(0, 40, 2))
    assert folder.left("b" * 32) == list(range(1, 40, 2))
    used, total, count, removed = room.usage() or (0, 0, 0, 0)
    assert (used, total, count, removed) == (40 * SIZE, 50 * SIZE, 40, 20)


@pytest.mark.parametrize(("count", "left"), [(45, 45), (46, 40)])
def test_nothing_goes_before_the_middle_of_ratio_and_limit(
    folder: Folder, count: int, left: int
) -> None:
    folder.put(range(count))
    folder.room(max_size=50 * SIZE, eviction_ratio=0.8)
    assert len(folder.left()) == left


def test_writes_are_refused_at_the_limit_and_admitted_after_a_removal(folder: Folder) -> None:
    folder.put(range(40))
    room = folder.room(max_size=50 * SIZE, eviction_ratio=0.8)
    written = 0
    while room.admits(SIZE):
        written += 1
        folder.put(range(100 + written, 101 + written))
        room.wrote(SIZE)
    # No time has passed since the first sum, so nothing could be removed.
    assert written == 10
    folder.later(room)
    assert room.admits(SIZE)
    assert len(folder.left()) == 40


@pytest.mark.parametrize("ratio", [0.0, 0.95, 1.0])
def test_no_ratio_ends_the_writes(folder: Folder, ratio: float) -> None:
    room = folder.room(max_size=10 * SIZE, eviction_ratio=ratio)
    for name in range(30):
        if not room.admits(SIZE):
            folder.later(room)
            assert room.admits(SIZE)
        folder.put(range(name, name + 1))
        room.wrote(SIZE)
        assert len(folder.left()) <= 10
        folder.later(room)


def test_an_object_of_more_than_half_of_the_limit_is_refused_and_removes_nothing(
    folder: Folder,
) -> None:
    folder.put(range(4))
    room = folder.room(max_size=10 * SIZE)
    folder.now += 100
    assert not room.admits(5 * SIZE + 1)
    folder.settle(room)
    assert len(folder.left()) == 4
    assert room.admits(5 * SIZE)


def test_free_space_is_kept(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    others = 0

    def statvfs(path: object) -> os.statvfs_result:
        taken = others + SIZE * len(folder.left())
        free = 100 * SIZE - taken
        return os.statvfs_result((1, 1, 100 * SIZE, free, free, 0, 0, 0, 0, 255))

    monkeypatch.setattr(os, "statvfs", statvfs)
    folder.put(range(50))
    room = folder.room(min_free_space=20 * SIZE, eviction_ratio=0.5)
    assert room.usage() == (50 * SIZE, 80 * SIZE, 50, 0)
    assert room.admits(SIZE)
    others = 31 * SIZE
    assert not room.admits(SIZE)
    folder.later(room)
    # 30 objects' worth stay free: the limit, and half of it; two for the next writes are in that.
    assert len(folder.left()) == 39
    assert room.admits(SIZE)
    others = 100 * SIZE
    folder.later(room)
    assert folder.left() == []
    assert not room.admits(SIZE)


def test_foreign_and_half_written_files_do_not_count_and_stay(folder: Folder) -> None:
    folder.put(range(10))
    spread = folder.files.path(NS, "0001").parent
    outside = folder.files.root.parent / "outside"
    (outside / "aa").mkdir(parents=True)
    (folder.files.root / ("c" * 32)).symlink_to(outside, target_is_directory=True)
    kept = [
        spread / "notes.txt",
        spread / ".nfs0001",
        spread.parent / "0001",
        folder.files.root / ".tmp" / "1-2-half",
        folder.files.root / "lost+found" / "aa" / "0001",
        outside / "aa" / "0001",
    ]
    for path in kept:
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_bytes(bytes(20 * SIZE))
        os.utime(path, (DAY - 500, DAY - 500))
    (spread / "0007x").symlink_to(kept[0])
    (spread / "0008x").mkdir()
    # Young temporaries stay whatever their size; those of dead writers go after an hour.
    os.utime(kept[3])
    room = folder.room(max_size=11 * SIZE, eviction_ratio=0.5)
    assert (room.usage() or ())[2] == 5
    assert all(path.exists() for path in (*kept, spread / "0007x", spread / "0008x"))


def test_empty_folders_go(folder: Folder) -> None:
    folder.put(range(20), namespace="b" * 32, age=1000)
    folder.put(range(20))
    folder.room(max_size=20 * SIZE, eviction_ratio=1.0)
    assert folder.files.namespaces() == {NS}


# -- several servers -------------------------------------------------------------------------------


def test_servers_that_remove_at_once_remove_no_more_than_one(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    rooms = [folder.room(max_size=100 * SIZE, eviction_ratio=0.5) for _ in range(4)]
    folder.put(range(150))
    meeting = threading.Barrier(4)
    real = file_room._newest_to_go

    def meet(*args: object) -> int:
        meeting.wait(30)  # All have summed up, none has removed.
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(file_room, "_newest_to_go", meet)
    for room in rooms:
        room.sum_up_again()
    for room in rooms:
        folder.settle(room)
    assert folder.left() == list(range(50))
    assert sum((room.usage() or (0, 0, 0, 0))[3] for room in rooms) == 100


def test_objects_that_others_use_or_remove_meanwhile(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = folder.room(max_size=100 * SIZE, eviction_ratio=0.5)
    folder.put(range(110))
    real = file_room._newest_to_go

    def meanwhile(*args: object) -> int:
        last = real(*args)  # type: ignore[arg-type]
        os.utime(folder.files.path(NS, "0109"), (DAY, DAY))
        folder.files.remove(folder.files.path(NS, "0108"))
        return last

    monkeypatch.setattr(file_room, "_newest_to_go", meanwhile)
    room.sum_up_again()
    folder.settle(room)
    assert folder.left() == [*range(50), 109]


def test_another_server_s_writes_are_noticed_by_the_free_space(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def statvfs(path: object) -> os.statvfs_result:
        free = SIZE * (1000 - len(folder.left()))
        return os.statvfs_result((1, 1, 10**6, free, free, 0, 0, 0, 0, 255))

    monkeypatch.setattr(os, "statvfs", statvfs)
    room = folder.room(max_size=100 * SIZE, eviction_ratio=0.5)
    folder.put(range(90))
    folder.later(room)
    assert len(folder.left()) == 50
    assert (room.usage() or ())[0] == 50 * SIZE


def test_a_folder_that_goes_while_a_file_is_moved_into_it(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder.files.path(NS, "0001")
    real, goes = Path.mkdir, [path.parent, path.parent, path.parent.parent]

    def mkdir(self: Path, *args: object, **kwargs: object) -> None:
        real(self, *args, **kwargs)  # type: ignore[arg-type]
        if self in goes:
            goes.remove(self)
            os.rmdir(self)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    folder.put(range(1, 2))
    assert folder.left() == [1]
    assert goes == []


def test_objects_that_cannot_be_removed_are_one_warning(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: object) -> NoReturn:
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "unlink", refuse)
    folder.put(range(20))
    room = folder.room(max_size=10 * SIZE)
    assert f"objects in {folder.files.root} cannot be removed: Permission denied" in caplog.text
    first = room._work
    folder.now += 29
    assert not room.admits(SIZE)
    assert room._work is first
    folder.now += 1
    assert not room.admits(SIZE)
    assert room._work is not first


# -- uses ------------------------------------------------------------------------------------------


def test_a_use_is_noted_once_in_a_minute_and_the_beginning_stays_longest(folder: Folder) -> None:
    room = folder.room(max_size=100 * SIZE)
    folder.put(range(4), age=600)
    paths = [folder.files.path(NS, f"{name:04}") for name in range(4)]
    folder.now += 59
    for depth, path in reversed(list(enumerate(paths))):
        room.renew(path, folder.files.modified(path) or 0, depth)
    times = [folder.files.modified(path) or 0 for path in paths]
    assert times == [DAY * 10**9 - 1000 * depth for depth in range(4)]
    room.renew(paths[3], times[3], 0)
    assert folder.files.modified(paths[3]) == times[3]
    folder.now += 1
    room.renew(paths[3], times[3], 3)
    assert folder.files.modified(paths[3]) == (DAY + 60) * 10**9 - 3000


def test_pages_before_are_returned_once_in_a_minute(folder: Folder) -> None:
    room = folder.room(max_size=100 * SIZE)
    assert room.not_renewed(["a", "b"]) == [(0, "a"), (1, "b")]
    assert room.not_renewed(["a", "b", "c"]) == [(2, "c")]
    folder.now += 60
    assert room.not_renewed(["b"]) == [(0, "b")]


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


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
