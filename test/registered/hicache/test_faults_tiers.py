"""Rows C10, C12 and C18: a store that times out, tiers that are too small, disks that refuse."""

from __future__ import annotations

import os
import random
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rigs.caches.cache_rig import CacheRig, Reused
from rigs.caches.storage_rigs import PAGE, StorageRigs, attached_store_of, counts
from rigs.running_clock import RunningClock
from rigs.stores.mooncake_cluster import MooncakeCluster
from sglang.srt.environ import envs
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageExtraInfo,
    PoolTransfer,
    StorageUnavailable,
)
from sglang.srt.mem_cache.l3 import store_calls
from sglang.srt.mem_cache.l3.storage_backup import NoWrite
from sglang.srt.mem_cache.storage.mooncake_store.mooncake_store import MooncakeStore
from sglang.srt.mem_cache.tree.radix_key import RadixKey
from sglang.srt.mem_cache.tree.tree_node import TreeNode
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=13, suite="base-b-test-cpu")

PROMPT = [*range(160), 7]


# -- row C10 ---------------------------------------------------------------------------------------


class TimesOut(MooncakeStore):
    """While `is_sick`, finds objects but times out on every get; probes fail then too."""

    is_sick: ClassVar[bool] = False
    asked: ClassVar[list[str]] = []

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> Any:
        if not type(self).is_sick:
            return super().batch_get_v2(transfers, extra_info)
        type(self).asked.extend(transfers[0].keys or [])
        time.sleep(0.5)
        raise StorageUnavailable("timed out")

    def probe(self) -> bool:
        return not type(self).is_sick and super().probe()


def test_c10_a_store_that_keeps_timing_out(
    cluster: MooncakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a second replaces the minute of a real timeout."""
    monkeypatch.setattr(TimesOut, "asked", [])
    with StorageRigs.on(cluster, prefetch_timeout_max=1.0) as rigs:
        writer, reader = rigs.make(), rigs.make(TimesOut)
        writer.run(PROMPT)
        writer.settle()
        monkeypatch.setattr(store_calls, "_STUCK_AFTER_S", 0.3)
        monkeypatch.setattr(TimesOut, "is_sick", True)
        rounds = 0
        with RunningClock() as clock:
            while clock() < 4.0:
                reader.run(PROMPT)
                reader.flush()
                rounds += 1
        assert rounds > 10, "an unavailable store costs no time: a timeout each would be 8 rounds"
        assert len(TimesOut.asked) == len(set(TimesOut.asked)), "a key timed out twice"
        assert attached_store_of(reader).breaker.is_open
        assert reader.hi.metrics.breaker_open._value.get() == 1
        # A successful probe closes the breaker; the pages that timed out stay blocked for longer.
        monkeypatch.setattr(TimesOut, "is_sick", False)
        monkeypatch.setattr(store_calls, "_STUCK_AFTER_S", 60.0)
        other = [*range(1000, 1160), 7]
        writer.run(other)
        writer.settle()

        def healed() -> bool:
            reader.flush()
            return reader.run(other) == Reused(storage=160)

        reader.until(healed)
        assert not attached_store_of(reader).breaker.is_open
        assert reader.hi.metrics.breaker_open._value.get() == 0


# -- row C12 ---------------------------------------------------------------------------------------


class Losses:
    """Records the pages that a rig counts as lost: dropped from L1, or refused for L3."""

    def __init__(self, rig: CacheRig) -> None:
        self._tree = tree = rig.hi
        self._dropped: set[str] = set()
        self._refused: set[str] = set()
        eviction = tree.eviction
        self._drop, self._write = eviction._drop, tree.storage_backup.write
        eviction._drop = self._on_drop  # type: ignore[method-assign]
        tree.storage_backup.write = self._on_write  # type: ignore[method-assign]

    def _on_drop(self, node: TreeNode) -> bool:
        below = [node]
        for at in below:
            below.extend(at.children.values())
        pages = {page for at in below for page in at.page_hashes(PAGE)}
        before = self._counted("dropped")
        freed = self._drop(node)
        if freed:
            assert self._counted("dropped") - before == len(pages) * PAGE
            self._dropped |= pages
        return freed

    def _on_write(self, node: TreeNode) -> NoWrite | None:
        reason = self._write(node)
        if reason is not None:
            self._refused.update(node.page_hashes(PAGE))
        return reason

    def _counted(self, name: str) -> float:
        return sum(counts(getattr(self._tree.metrics, name)).values())

    def pages(self) -> set[str]:
        """The pages that may be missing according to the counters."""
        refusals = counts(self._tree.metrics.backup_outcomes)
        refusals.pop("landed", None)
        return self._dropped | (self._refused if refusals else set())


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_c12_tiers_far_smaller_than_the_working_set(cluster: MooncakeCluster, policy: str) -> None:
    """L1 of 14 pages, L2 of 10, a working set of about 300: nothing is lost without a count."""
    rng = random.Random(policy)
    settings: dict[str, Any] = {"hicache_write_policy": policy, "hicache_ratio": 10 / 14}
    with StorageRigs.on(cluster) as rigs:
        rig = rigs.make(l1_pages=14, **settings)
        losses = Losses(rig)
        prompts = []
        for step in range(120):
            family, length = rng.randrange(12), rng.randrange(6, 44)
            prompt = [family * 1000 + i // 16 * (1 + step % 3) * 16 + i for i in range(length)]
            prompts.append(prompt)
            rig.run(prompt)
            if step % 3 == 0:
                rig.settle()
        rig.settle()
        promised = {page for prompt in prompts for page in RadixKey(prompt).page_hashes(PAGE)}
        in_tree = {page for node in rig.hi.nodes() for page in node.page_hashes(PAGE)}
        in_store = check_no_orphans(rig, prompts)
        assert promised - in_tree - in_store <= losses.pages(), "lost without a count"
        # Half of the pages with write_through; a quarter with write_back, because a page that L2
        # could not take keeps its descendants out of L3.
        assert len(in_store) > 0.2 * len(promised)
        # A reader finds prefixes with the right bytes, which the rig compares.
        reader = rigs.make()
        for prompt in rng.sample(prompts, 20):
            reader.run(prompt)
            reader.flush()


def check_no_orphans(rig: CacheRig, prompts: list[list[int]]) -> set[str]:
    """Assert that all stored pages have their ancestors in the store; return their hashes."""
    io = attached_store_of(rig)
    assert isinstance(io.client, MooncakeStore)
    found: set[str] = set()
    for prompt in prompts:
        pages = RadixKey(prompt).page_hashes(PAGE)
        there = io.client._exist(io.client.object_keys(io.pools.keys(pages), "kv"))
        reach = there.index(False) if False in there else len(there)
        assert not any(there[reach:]), "a page was written whose ancestors are not there"
        found.update(pages[:reach])
    return found


# -- row C18 ---------------------------------------------------------------------------------------


@contextmanager
def file_rigs(root: Path) -> Iterator[StorageRigs]:
    with envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.override(str(root)), StorageRigs() as rigs:
        yield rigs


@contextmanager
def tiny_disk(folder: Path, size: str) -> Iterator[Path]:
    """A separate small file system. Skips the test if mounting is not allowed."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_c18_a_full_disk_refuses_writes_and_costs_no_request(tmp_path: Path) -> None:
    with tiny_disk(tmp_path / "disk", "128k") as disk, file_rigs(disk) as rigs:
        rig = rigs.make("file")
        for family in range(6):
            assert rig.run([*range(family * 1000, family * 1000 + 80), 7]) == Reused()
        rig.settle()
        outcomes = counts(rig.hi.metrics.backup_outcomes)
        assert outcomes["landed"] >= 1 and outcomes["failed"] >= 1, outcomes
        assert not attached_store_of(rig).breaker.is_open, "a full disk can be read"
        rig.flush()
        assert rig.run([*range(80), 7]) == Reused(storage=80)
        assert rig.run([*range(5000, 5080), 7]).storage < 80
        rig.settle()
        assert not list((disk / ".tmp").iterdir()), "no torn files"
        # The disk has room again: the next prompt in use is written.
        rig.hi.clear_storage_backend()
        rig.flush()
        rig.run([*range(5000, 5080), 7])
        rig.flush()
        assert rig.run([*range(5000, 5080), 7]) == Reused(storage=80)


def test_c18_a_read_only_directory_is_read(tmp_path: Path) -> None:
    with tiny_disk(tmp_path / "disk", "4m") as disk, file_rigs(disk) as rigs:
        writer = rigs.make("file")
        writer.run(PROMPT)
        writer.settle()
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        reader = rigs.make("file")
        assert reader.run(PROMPT) == Reused(storage=160)
        assert reader.run([*range(9000, 9160), 7]) == Reused()
        reader.settle()
        assert counts(reader.hi.metrics.backup_outcomes)["failed"] == 1
        # A damaged file cannot be removed here, but it is still a miss.
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
        victim = sorted(path for path in disk.glob("*/??/*") if path.is_file())[0]
        victim.write_bytes(b"\0" * victim.stat().st_size)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        for _ in range(2):
            reader.flush()
            assert reader.run(PROMPT).storage < 160
        reader.settle()


def test_c18_foreign_files_under_our_names_are_misses(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(os.urandom(5000))
    root = tmp_path / "root"
    with file_rigs(root) as rigs:
        writer = rigs.make("file")
        writer.run(PROMPT)
        writer.settle()
        names = sorted(path for path in root.glob("*/??/*") if path.is_file())
        assert len(names) == 160 // PAGE
        for index, path in enumerate(names):
            path.unlink()
            match index % 5:
                case 0:
                    path.mkdir()
                case 1:
                    os.mkfifo(path)
                case 2:
                    path.symlink_to(secret)
                case 3:
                    path.write_text("not an object")
                case 4:
                    path.symlink_to(path)
        (root / "notes.txt").write_text("x")
        reader = rigs.make("file")
        before = secret.read_bytes()
        for _ in range(2):
            assert reader.run(PROMPT) == Reused()
            reader.flush()
        assert secret.read_bytes() == before
        assert (root / "notes.txt").exists()


@pytest.mark.parametrize("key", ["../../../etc/passwd", "..", "a/b", "\0", "x" * 4000, "\ud800"])
def test_c18_hostile_extra_keys_stay_inside_the_root(tmp_path: Path, key: str) -> None:
    root = tmp_path / "a" / "root"
    with file_rigs(root) as rigs:
        rig = rigs.make("file")
        rig.run(PROMPT, key)
        rig.flush()
        assert rig.run(PROMPT, key) == Reused(storage=160)
        assert rig.run(PROMPT, key + "x") == Reused()
        rig.settle()
    assert [entry.name for entry in (tmp_path / "a").iterdir()] == ["root"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]
