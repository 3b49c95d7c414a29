"""HiCacheFile: bit-exact pages in a directory, and results for every fault of the directory."""

from __future__ import annotations

import dataclasses
import errno
import os
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rigs.caches.mamba_pools import STATE_DTYPES, mamba_spec, recurrent_states
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
    HiCacheFile,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.host.host_layout import HostLayout
from sglang.srt.mem_cache.memory_pool_host import MambaPoolHost
from sglang.srt.mem_cache.storage.object_files import ObjectFiles, escape
from sglang.srt.mem_cache.storage.page_trailer import TRAILER_BYTES
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

LANDED, MISS, SHORT = CacheOutcome.LANDED, CacheOutcome.MISS, CacheOutcome.SHORT
DAMAGED, FAILED = CacheOutcome.DAMAGED, CacheOutcome.FAILED


class Bench:
    """A store with pages 0 to 2 written, and the pool that they came from."""

    def __init__(self, root: Path, *, verify_checksum: bool = True, count: int = 3) -> None:
        self.root = root
        self.storage = HiCacheFile(storage_config(verify_checksum=verify_checksum), str(root))
        self.device = make_device_pool()
        self.host = make_host_pool(self.device, "page_first_direct")
        self.storage.register_mem_pool_host(self.host)
        self.keys = page_keys(count)
        self.slots = copy_to_host(self.device, self.host, list(range(count)))
        self.pages = [bytes(b"".join(views)) for views in self.host.get_page_views(self.slots)]

    @property
    def move(self) -> PoolTransfer:
        return PoolTransfer(PoolName.KV, host_indices=self.slots, keys=self.keys)

    def put(self) -> list[CacheOutcome]:
        return self.storage.batch_set_v2([self.move])["kv"]

    def get(self) -> list[CacheOutcome]:
        for views in self.host.get_page_views(self.slots):
            for view in views:
                view[:] = bytes(len(view))
        return self.storage.batch_get_v2([self.move])["kv"]

    def landed_pages(self) -> list[bytes]:
        return [bytes(b"".join(views)) for views in self.host.get_page_views(self.slots)]

    def file(self, index: int) -> Path:
        (path,) = self.root.glob(f"ns/??/{index:064x}%2Fkv")
        return path


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    made = Bench(tmp_path)
    assert made.put() == [LANDED] * 3
    return made


@pytest.mark.parametrize("layout", list(HostLayout))
@pytest.mark.parametrize("pages", [[5, 2, 9], [3, 4, 5]])
def test_round_trip_is_bit_exact(tmp_path: Path, layout: str, pages: list[int]) -> None:
    round_trip(HiCacheFile(storage_config(), str(tmp_path)), layout, page_keys(3), pages)


@pytest.mark.parametrize("layout", MambaPoolHost.LAYOUTS)
@pytest.mark.parametrize("dtypes", STATE_DTYPES)
def test_recurrent_states_come_back_bit_for_bit(
    tmp_path: Path, dtypes: tuple[torch.dtype, torch.dtype], layout: str
) -> None:
    states = recurrent_states(mamba_spec(dtypes))
    storage = HiCacheFile(storage_config(), str(tmp_path))
    round_trip(storage, layout, page_keys(3), [5, 2, 9], kind=states)


def test_all_layouts_of_states_share_objects(tmp_path: Path) -> None:
    storage = HiCacheFile(storage_config(), str(tmp_path))
    for layout in MambaPoolHost.LAYOUTS:
        round_trip(storage, layout, page_keys(3), [5, 2, 9], kind=recurrent_states(mamba_spec()))
    assert storage.get_stats()["set_present_pages"] == 6
    assert storage.get_stats()["get_pages"] == 9


def test_layouts_of_one_byte_order_share_objects(tmp_path: Path) -> None:
    storage = HiCacheFile(storage_config(), str(tmp_path))
    for layout in ("layer_first", "page_first_direct", "page_first_kv_split"):
        round_trip(storage, layout, page_keys(3), [5, 2, 9])
    assert storage.get_stats()["set_present_pages"] == 6
    assert storage.get_stats()["get_pages"] == 9


def test_an_object_is_the_page_and_its_trailer(bench: Bench) -> None:
    raw = bench.file(1).read_bytes()
    assert raw[:-TRAILER_BYTES] == bench.pages[1]
    assert bench.get() == [LANDED] * 3
    assert bench.landed_pages() == bench.pages
    # Atomic writes leave no temporary files.
    assert list((bench.root / ".tmp").iterdir()) == []


def test_another_namespace_or_shard_sees_nothing(bench: Bench) -> None:
    for config, keys in (
        (storage_config("other"), page_keys(3, "other")),
        (storage_config(tp_rank=0, tp_size=2), bench.keys),
    ):
        stranger = HiCacheFile(config, str(bench.root))
        assert stranger.batch_exists_v2(keys).kv_hit_pages == 0


# -- damage --------------------------------------------------------------------------------------


def flip(path: Path, offset: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 0x10
    path.write_bytes(raw)


def swap(first: Path, second: Path) -> None:
    one, other = first.read_bytes(), second.read_bytes()
    first.write_bytes(other)
    second.write_bytes(one)


@pytest.mark.parametrize("offset", [0, 100, -40, -20, -1])
def test_a_flipped_byte_is_damage_and_heals(bench: Bench, offset: int) -> None:
    flip(bench.file(1), offset)
    assert bench.get() == [LANDED, DAMAGED, SHORT]
    assert bench.storage.get_stats()["get_damaged_pages"] == 1
    # The object was removed, so the next writer stores a good one.
    assert bench.storage.batch_exists_v2(bench.keys).kv_hit_pages == 1
    again = Bench(bench.root)
    assert again.put() == [LANDED] * 3
    assert again.get() == [LANDED] * 3
    assert again.landed_pages() == bench.pages


@pytest.mark.parametrize("size", [0, 10, -1, -TRAILER_BYTES])
def test_a_truncated_object_is_damage(bench: Bench, size: int) -> None:
    path = bench.file(0)
    path.write_bytes(path.read_bytes()[:size])
    assert bench.get() == [DAMAGED, SHORT, SHORT]


def test_a_longer_object_is_damage(bench: Bench) -> None:
    path = bench.file(0)
    path.write_bytes(path.read_bytes() + b"x")
    assert bench.get()[0] is DAMAGED


@pytest.mark.parametrize("verify", [True, False])
def test_swapped_objects_are_damage_with_or_without_checksums(tmp_path: Path, verify: bool) -> None:
    bench = Bench(tmp_path, verify_checksum=verify)
    bench.put()
    swap(bench.file(1), bench.file(2))
    assert bench.get() == [LANDED, DAMAGED, SHORT]


@pytest.mark.parametrize("writer_verifies", [True, False])
def test_a_reader_without_checksums_accepts_every_object(
    tmp_path: Path, writer_verifies: bool
) -> None:
    assert Bench(tmp_path, verify_checksum=writer_verifies).put() == [LANDED] * 3
    reader = Bench(tmp_path, verify_checksum=False)
    assert reader.get() == [LANDED] * 3
    assert reader.landed_pages() == reader.pages


def test_an_object_without_a_checksum_is_damage_to_a_verifying_reader(
    tmp_path: Path,
) -> None:
    trusting = Bench(tmp_path, verify_checksum=False)
    trusting.put()
    verifying = Bench(tmp_path, verify_checksum=True)
    assert verifying.get() == [DAMAGED, SHORT, SHORT]
    assert verifying.put() == [LANDED] * 3
    assert verifying.get() == [LANDED, DAMAGED, SHORT]
    assert trusting.get()[0] is LANDED


def test_a_missing_page_ends_the_prefix(bench: Bench) -> None:
    bench.file(1).unlink()
    assert bench.get() == [LANDED, MISS, SHORT]
    assert bench.storage.batch_exists_v2(bench.keys).kv_hit_pages == 1


# -- extra pools ---------------------------------------------------------------------------------


def test_pages_of_an_extra_pool_may_be_missing(bench: Bench) -> None:
    indexer = make_host_pool(make_device_pool(head_dim=2), "layer_first")
    bench.storage.register_mem_host_pool_v2(indexer, PoolName.INDEXER)
    both = [bench.move, PoolTransfer(PoolName.INDEXER, bench.slots, keys=bench.keys)]
    assert bench.storage.batch_set_v2(both)["indexer"] == [LANDED] * 3
    assert bench.storage.batch_exists_v2(bench.keys, both[1:]).kv_hit_pages == 3
    (path,) = bench.root.glob(f"ns/??/{2:064x}%2Findexer")
    path.unlink()
    result = bench.storage.batch_exists_v2(bench.keys, both[1:])
    assert (result.kv_hit_pages, result.extra_pool_hit_pages) == (2, {"indexer": 2})
    got = bench.storage.batch_get_v2(both)
    assert got == {"kv": [LANDED] * 3, "indexer": [LANDED, LANDED, MISS]}


def test_states_are_independent_of_each_other(bench: Bench) -> None:
    states = make_device_pool(page_size=1)
    host = make_host_pool(states, "page_first_direct")
    bench.storage.register_mem_host_pool_v2(host, PoolName.MAMBA)
    slots = copy_to_host(states, host, [6, 1])
    trailing = PoolHitPolicy.TRAILING_PAGES
    move = PoolTransfer(PoolName.MAMBA, slots, keys=bench.keys[1:], hit_policy=trailing)
    assert bench.storage.batch_set_v2([move]) == {"mamba": [LANDED, LANDED]}
    (path,) = bench.root.glob(f"ns/??/{1:064x}%2Fmamba")
    path.unlink()
    wanted = PoolTransfer(PoolName.MAMBA, hit_policy=trailing)
    assert bench.storage.batch_exists_v2(bench.keys, [wanted]).kv_hit_pages == 3
    assert bench.storage.batch_exists_v2(bench.keys[:2], [wanted]).kv_hit_pages == 0
    assert bench.storage.batch_get_v2([move]) == {"mamba": [MISS, LANDED]}


# -- a hostile directory -------------------------------------------------------------------------


def test_a_full_disk_refuses_writes_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(tmp_path)
    real, calls = os.writev, []

    def full(fd: int, buffers: list[memoryview]) -> int:
        calls.append(fd)
        if len(calls) == 2:
            return real(fd, [buffers[0][:7]])
        if len(calls) > 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, buffers)

    monkeypatch.setattr(os, "writev", full)
    assert bench.put() == [LANDED, FAILED, SHORT]
    assert list((tmp_path / ".tmp").iterdir()) == []
    assert f"L3 object cannot be written in {tmp_path}: No space left on device" in caplog.text
    monkeypatch.undo()
    assert bench.get() == [LANDED, MISS, SHORT]
    assert bench.storage.get_stats()["set_failed_pages"] == 1


def test_short_writes_and_reads_are_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path)
    write, read = os.writev, os.preadv
    monkeypatch.setattr(os, "writev", lambda fd, parts: write(fd, [parts[0][:50]]))
    assert bench.put() == [LANDED] * 3
    monkeypatch.setattr(os, "preadv", lambda fd, parts, at: read(fd, [parts[0][:31]], at))
    assert bench.get() == [LANDED] * 3
    assert bench.landed_pages() == bench.pages


def test_a_read_only_directory_still_serves(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> NoReturn:
        raise OSError(errno.EROFS, "Read-only file system")

    real = os.open

    def open_read_only(path: Path, flags: int, mode: int = 0o777) -> int:
        return refuse() if flags & os.O_CREAT else real(path, flags, mode)

    monkeypatch.setattr(os, "open", open_read_only)
    monkeypatch.setattr(os, "rename", refuse)
    monkeypatch.setattr(os, "unlink", refuse)
    assert bench.get() == [LANDED] * 3
    bench.keys = page_keys(4)[1:]
    assert bench.put() == [LANDED, LANDED, FAILED]
    flip(bench.file(1), 3)
    assert bench.get() == [DAMAGED, SHORT, SHORT]


@pytest.mark.parametrize("kind", ["directory", "pipe", "link", "text"])
def test_foreign_files_are_damage_or_failure(bench: Bench, kind: str) -> None:
    path = bench.file(1)
    path.unlink()
    secret = bench.root / "secret"
    secret.write_bytes(bytes(len(bench.pages[0]) + TRAILER_BYTES))
    match kind:
        case "directory":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "link":
            path.symlink_to(secret)
        case "text":
            path.write_text("hello")
    first, second, third = bench.get()
    assert (first, third) == (LANDED, SHORT)
    assert second in (DAMAGED, FAILED)
    assert bench.put()[1] in (LANDED, FAILED)
    assert secret.read_bytes().count(0) == len(secret.read_bytes())


def test_a_root_that_is_a_file_is_one_line_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"):
        HiCacheFile(storage_config(), str(tmp_path / "file"))


@given(st.text(max_size=300), st.text(max_size=300))
def test_names_are_injective_and_harmless(first: str, second: str) -> None:
    names = escape(first), escape(second)
    assert (names[0] == names[1]) == (first == second)
    for name in names:
        assert 0 < len(name) <= 200
        assert not set(name) & {"/", "\0", "."}


@pytest.mark.parametrize(
    "key",
    [
        "../../escape/kv",
        "/etc/passwd",
        "ns/../../x",
        "..",
        "",
        "/",
        "ns/",
        "ns/\0nul",
        "ns/" + "x" * 5000,
        "ns//double",
        "a\nb/c",
        "ns/\udcff",
        ".tmp/x",
    ],
)
def test_hostile_keys_stay_inside_the_root(tmp_path: Path, key: str) -> None:
    root = tmp_path / "a" / "root"
    storage = HiCacheFile(storage_config(), str(root))
    value = torch.arange(10, dtype=torch.uint8)
    assert not storage.exists(key)
    assert storage.set(key, value)
    assert storage.exists(key)
    got = storage.get(key, torch.zeros(10, dtype=torch.uint8))
    assert got is not None
    assert torch.equal(got, value)
    assert [entry.name for entry in (tmp_path / "a").iterdir()] == ["root"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]
    assert not any(entry.is_symlink() for entry in root.rglob("*"))


def test_bounds_are_checked_before_a_file_is_opened(bench: Bench) -> None:
    outside = PoolTransfer(PoolName.KV, page_slots([32]), keys=bench.keys[:1])
    with pytest.raises(ValueError, match="leave the pool"):
        bench.storage.batch_get_v2([outside])
    with pytest.raises(ValueError, match="target_location"):
        bench.storage.get("ns/x")


# -- life ----------------------------------------------------------------------------------------


def test_clear_removes_this_namespace_only(bench: Bench) -> None:
    other = HiCacheFile(storage_config("other"), str(bench.root))
    assert other.set("other/x", torch.zeros(4))
    bench.storage.clear()
    bench.storage.clear()
    assert bench.storage.batch_exists_v2(bench.keys).kv_hit_pages == 0
    assert other.exists("other/x")
    assert not (bench.root / "ns").exists()
    assert bench.put() == [LANDED] * 3
    with pytest.raises(ValueError, match="namespace"):
        HiCacheFile(storage_config(""), str(bench.root)).clear()
    bench.storage.close()
    bench.storage.close()


def test_temporary_files_of_dead_writers_are_removed_after_an_hour(tmp_path: Path) -> None:
    folder = tmp_path / ".tmp"
    folder.mkdir()
    for name, age in (("old", 7200), ("new", 60)):
        (folder / name).write_bytes(b"torn")
        stamp = (folder / name).stat().st_mtime - age
        os.utime(folder / name, (stamp, stamp))
    HiCacheFile(storage_config(), str(tmp_path))
    assert [entry.name for entry in folder.iterdir()] == ["new"]


def test_pages_bytes_and_objects_are_counted(bench: Bench) -> None:
    bench.get()
    bench.put()
    page = bench.host.page_bytes
    assert bench.storage.get_stats() == {
        "set_pages": 6,
        "set_bytes": 6 * page,
        "set_present_pages": 3,
        "set_objects": 3,
        "get_pages": 3,
        "get_bytes": 3 * page,
    }
    assert page == 2 * PAGE * 2 * 4 * 3 * 2


def test_clear_meets_a_foreign_file_in_the_folder(tmp_path: Path) -> None:
    files = ObjectFiles(tmp_path)
    (tmp_path / "ns").mkdir()
    (tmp_path / "ns" / "notes.txt").write_text("x")
    assert files.clear("ns") == 0
    assert (tmp_path / "ns" / "notes.txt").exists()


@pytest.mark.parametrize(("mode", "warns"), [(0o755, False), (0o777, True), (0o1777, True)])
def test_a_directory_that_others_may_write_causes_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, warns: bool
) -> None:
    tmp_path.chmod(mode)
    HiCacheFile(storage_config(), str(tmp_path))
    assert (f"other users may write in {tmp_path}" in caplog.text) == warns


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a directory to another user")
def test_a_directory_of_another_user_causes_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    os.chown(tmp_path, 12345, -1)
    HiCacheFile(storage_config(), str(tmp_path))
    assert "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR" in caplog.text


def test_other_namespaces_are_counted_and_other_folders_are_not(tmp_path: Path) -> None:
    own, other, empty = "a" * 32, "0123456789abcdef" * 2, "lost+found"
    config = dataclasses.replace(storage_config(), namespace=own)
    storage = HiCacheFile(config, str(tmp_path))
    assert storage.get_usage().num_other_namespaces == 0
    for folder in (own, other, empty):
        (tmp_path / folder).mkdir()
    assert storage.get_usage().num_other_namespaces == 1
