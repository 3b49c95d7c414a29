"""How many servers share a namespace: counted by notes that change, within bounds."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sglang.srt.mem_cache.hicache_storage import (
    HiCacheFile,
    HiCacheStorage,
    HiCacheStorageConfig,
    StorageUnavailable,
)
from sglang.srt.mem_cache.l3 import store_presence
from sglang.srt.mem_cache.l3.store_presence import SEATS, StorePresence
from sglang.srt.mem_cache.storage import object_files
from sglang.srt.mem_cache.storage.types import NOTE_BYTES
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")

KNOWN_AFTER = store_presence._ALIVE_LOOKS


class Notes(HiCacheStorage):
    """A store of notes alone."""

    def __init__(self) -> None:
        self.notes: dict[str, bytes] = {}
        self.fails = False

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:
        raise NotImplementedError

    def set(self, key: str, *values: Any, **more: Any) -> bool:
        raise NotImplementedError

    def exists(self, key: str) -> bool:
        raise NotImplementedError

    def get_notes(self, names: Sequence[str]) -> Sequence[bytes | None] | None:
        if self.fails:
            raise StorageUnavailable("is gone")
        return [self.notes.get(name) for name in names]

    def set_note(self, name: str, value: bytes) -> None:
        self.notes[name] = value


def look(client: HiCacheStorage, *servers: StorePresence, times: int = 1) -> list[int | None]:
    for _ in range(times):
        for one in servers:
            assert one.look(client)
    return [one.servers for one in servers]


def storage_config(namespace: str) -> HiCacheStorageConfig:
    return HiCacheStorageConfig(
        tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1,
        is_mla_model=False, enable_storage_metrics=False, is_page_first_layout=True,
        model_name=None, namespace=namespace,
    )  # fmt: skip


def test_servers_count_each_other_once_all_are_known() -> None:
    store, servers = Notes(), [StorePresence() for _ in range(3)]
    assert look(store, *servers, times=KNOWN_AFTER - 1) == [None] * 3
    assert look(store, *servers) == [3, 3, 3]
    assert len(store.notes) == 3
    assert {len(note) for note in store.notes.values()} == {NOTE_BYTES}
    fresh = StorePresence()
    assert look(store, *servers, fresh, times=2)[:3] == [4, 4, 4]


def test_a_server_alone_sees_no_dead_ones() -> None:
    """Notes that were there at the first look, and do not change, are those of the dead."""
    store = Notes()
    store.notes = {str(seat): bytes([seat]) * NOTE_BYTES for seat in range(5)}
    assert look(store, alone := StorePresence(), times=KNOWN_AFTER) == [1]
    assert look(store, alone, times=10) == [1]
    assert len(store.notes) == 6, "an empty seat is taken first"


def test_a_server_that_ends_is_counted_for_four_looks_more() -> None:
    store, stays, ends = Notes(), StorePresence(), StorePresence()
    assert look(store, stays, ends, times=KNOWN_AFTER) == [2, 2]
    # Its last note came after the last look.
    assert [look(store, stays) for _ in range(6)] == [[2], [2], [2], [2], [1], [1]]
    # After a pause it is there again.
    look(store, ends)
    assert look(store, stays) == [2]


def test_seats_are_bounded_and_a_dead_servers_is_taken_over() -> None:
    store = Notes()
    store.notes = {str(seat): bytes([seat]) * NOTE_BYTES for seat in range(SEATS)}
    late = StorePresence()
    before = dict(store.notes)
    assert look(store, late, times=KNOWN_AFTER - 1) == [None]
    assert store.notes == before, "each of them may live"
    assert look(store, late) == [1]
    assert len(before.items() - store.notes.items()) == 1
    assert len(store.notes) == SEATS


def test_one_more_than_there_are_seats_takes_nobodys() -> None:
    store, servers = Notes(), [StorePresence() for _ in range(SEATS)]
    look(store, *servers, times=KNOWN_AFTER)
    late = StorePresence()
    counts = look(store, *servers, late, times=KNOWN_AFTER)
    assert counts == [SEATS] * (SEATS + 1)
    assert late._own is None


def test_two_that_take_one_seat_part_at_the_next_look(monkeypatch: pytest.MonkeyPatch) -> None:
    store, one, other = Notes(), StorePresence(), StorePresence()
    monkeypatch.setattr(secrets, "choice", min)
    empty = Notes()
    one.look(empty)
    other.look(store)
    store.notes |= empty.notes
    assert list(store.notes) == ["0"]
    assert look(store, other, one, times=KNOWN_AFTER) == [2, 2]
    assert sorted(store.notes) == ["0", "1"]


def test_lost_notes_come_back_and_foreign_bytes_do_not_count() -> None:
    store, one, other = Notes(), StorePresence(), StorePresence()
    look(store, one, other, times=KNOWN_AFTER)
    store.notes.clear()
    assert look(store, one, other, times=2) == [2, 2]
    for size in (0, 1, NOTE_BYTES - 1, NOTE_BYTES + 1):
        free = next(seat for seat in range(SEATS) if str(seat) not in store.notes)
        for turn in range(3):
            store.notes[str(free)] = bytes([turn]) * size
            assert look(store, one, other) == [2, 2]
        del store.notes[str(free)]


def test_a_store_that_fails_makes_it_unknown_and_is_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store, one = Notes(), StorePresence()
    look(store, one, times=KNOWN_AFTER)
    store.fails = True
    for _ in range(3):
        assert one._look_at(store)
        assert one.servers is None
    (line,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert line.getMessage() == "L3 does not tell which servers share it: is gone"
    store.fails = False
    assert one._look_at(store)
    assert one.servers == 1
    # While the store is left alone nobody asks it.
    assert one._look_at(None)
    assert one.servers is None


def test_the_thread_ends_with_its_store_and_where_there_are_no_notes(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Plain(Notes):
        def get_notes(self, names: Sequence[str]) -> None:
            return None

    class Broken(Notes):
        def get_notes(self, names: Sequence[str]) -> list[bytes | None]:
            raise TypeError("a third party's")

    one, ends = StorePresence(), threading.Event()
    one.run(lambda: Plain(), ends)
    assert not caplog.records
    one.run(lambda: Broken(), ends)
    assert "L3 does not tell which servers share it" in caplog.text
    monkeypatch.setattr(store_presence, "_PAUSE_S", 0.0)
    store, seen = Notes(), threading.Event()

    def client() -> Notes:
        if one.servers == 1:
            seen.set()
            ends.set()
        return store

    one = StorePresence()
    thread = threading.Thread(target=one.run, args=(client, ends))
    thread.start()
    assert seen.wait(30)
    thread.join(30)
    assert not thread.is_alive()


def test_files_have_notes_beside_the_objects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores = [HiCacheFile(storage_config("a" * 32), str(tmp_path)) for _ in range(2)]
    other = HiCacheFile(storage_config("b" * 32), str(tmp_path))
    servers = [StorePresence() for _ in range(3)]
    for _ in range(KNOWN_AFTER + 1):
        for client, one in zip([*stores, other], servers, strict=True):
            assert one.look(client)
    assert [one.servers for one in servers] == [2, 2, 1]
    assert stores[0].get_usage().num_other_namespaces == 0, "notes are no objects"
    stores[0].clear()
    assert look(stores[0], servers[0]) == [2]
    # A start removes notes of dead servers after an hour.
    notes = list((tmp_path / ".notes").iterdir())
    assert len(notes) == 3
    monkeypatch.setattr(object_files, "_STALE_SECONDS", -10.0)
    HiCacheFile(storage_config("a" * 32), str(tmp_path))
    assert not list((tmp_path / ".notes").iterdir())
    (tmp_path / ".notes").rmdir()
    (tmp_path / ".notes").write_text("in the way")
    with pytest.raises(StorageUnavailable, match=r"Not a directory|File exists"):
        look(stores[0], servers[0])
