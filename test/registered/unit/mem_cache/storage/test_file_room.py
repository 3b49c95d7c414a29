"""Limits of the `file` backend's folder: what goes, what stays, and what the servers beside see."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from sglang.srt.mem_cache.storage import file_room
from sglang.srt.mem_cache.storage.file_room import FileLimits, FileRoom
from sglang.srt.mem_cache.storage.object_files import ObjectFiles
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


def usage(room: FileRoom) -> tuple[int, int, int, int]:
    known = room.usage()
    assert known is not None
    return known


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
    assert usage(room) == (40 * SIZE, 50 * SIZE, 40, 20)


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
    while written < 20 and room.admits(SIZE):
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
    assert usage(room)[2] == 5
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
    assert sum(usage(room)[3] for room in rooms) == 100


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
    assert usage(room)[0] == 50 * SIZE


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
