"""Directories that belong to a process: kept while the owner lives, removed after it was killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from sglang.srt.utils.owned_directory import OwnedDirectory, remove_orphans
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=6, suite="base-a-test-cpu")

PREFIX = "owned-test-"
RACE_SECONDS = 1.5
OWNER = (
    "import sys; from sglang.srt.utils.owned_directory import OwnedDirectory as D;"
    f"print(D('{PREFIX}').path, flush=True); sys.stdin.read()"
)


@pytest.fixture(autouse=True)
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A private temporary directory for this process and its children."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def start_owner() -> tuple[subprocess.Popen[str], Path]:
    """A process that creates a directory and keeps it until its input ends."""
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    return owner, Path(owner.stdout.readline().strip())


def test_a_directory_is_private_until_it_is_removed(parent: Path) -> None:
    mine = OwnedDirectory(PREFIX)
    Path(mine.path, "socket").touch()
    assert Path(mine.path).parent == parent
    assert stat.S_IMODE(os.stat(mine.path).st_mode) == 0o700
    mine.remove()
    mine.remove()
    assert list(parent.iterdir()) == []


def test_only_a_killed_owner_leaves_an_orphan() -> None:
    killed, orphan = start_owner()
    living, kept = start_owner()
    mine = OwnedDirectory(PREFIX)
    try:
        assert remove_orphans(PREFIX) == []
        (orphan / "socket").touch()
        killed.send_signal(signal.SIGKILL)
        killed.communicate(timeout=10)
        assert orphan.exists()
        assert remove_orphans("another-") == []
        assert remove_orphans(PREFIX) == [str(orphan)]
        assert not orphan.exists()
        assert kept.exists()
        assert Path(mine.path).exists()
    finally:
        mine.remove()
        living.communicate(timeout=10)
    assert remove_orphans(PREFIX) == [str(kept)]


def test_a_forked_child_keeps_the_directory() -> None:
    mine = OwnedDirectory(PREFIX)
    path = Path(mine.path)
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    child.start()
    try:
        os.close(mine._locks.pop())  # as the kernel does when the parent is killed
        assert remove_orphans(PREFIX) == []
    finally:
        child.kill()
        child.join()
    assert remove_orphans(PREFIX) == [str(path)]


def test_only_directories_of_the_right_name_are_touched(parent: Path) -> None:
    target = parent / "elsewhere"
    target.mkdir()
    (target / "file").touch()
    (parent / f"{PREFIX}1-abcdefgh").symlink_to(target)  # a link to what is not ours
    (parent / f"{PREFIX}2-abcdefgh").touch()  # no directory
    (parent / f"{PREFIX}abcdefgh").mkdir()  # no process id
    (parent / f"{PREFIX}3-abcdefgh.bak").mkdir()
    before = sorted(parent.rglob("*"))
    assert remove_orphans(PREFIX) == []
    assert sorted(parent.rglob("*")) == before


def test_directories_of_another_user_stay(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    orphan = parent / f"{PREFIX}1-abcdefgh"
    orphan.mkdir()
    me = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: me + 1)
    assert remove_orphans(PREFIX) == []
    monkeypatch.undo()
    monkeypatch.setattr(tempfile, "tempdir", str(parent))
    assert remove_orphans(PREFIX) == [str(orphan)]


def test_an_unreadable_temporary_directory_is_ignored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nonexistent")
    assert remove_orphans(PREFIX) == []


def _make_and_remove(until: float, results: Connection) -> None:
    """Create and remove directories as servers do; none may vanish while it is owned."""
    made = lost = 0
    while time.monotonic() < until:
        remove_orphans(PREFIX)
        mine = OwnedDirectory(PREFIX)
        made += 1
        for _ in range(3):
            remove_orphans(PREFIX)
            lost += not os.path.exists(mine.path)
        mine.remove()
    results.send((made, lost))


def test_concurrent_starts_never_remove_each_others_directories(parent: Path) -> None:
    context = multiprocessing.get_context("fork")
    until = time.monotonic() + RACE_SECONDS
    ends, processes = [], []
    for _ in range(6):
        reader, writer = context.Pipe(duplex=False)
        process = context.Process(target=_make_and_remove, args=(until, writer))
        process.start()
        writer.close()
        ends.append(reader)
        processes.append(process)
    results = [reader.recv() for reader in ends]
    for process in processes:
        process.join()
    assert sum(made for made, _ in results) > 100
    assert sum(lost for _, lost in results) == 0
    assert list(parent.iterdir()) == []
