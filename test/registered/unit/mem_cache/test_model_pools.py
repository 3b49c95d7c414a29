"""Two kinds of state in one tree: their pages move together through L1, L2 and L3, or not at all.

The second kind has layers of its own and shares the slots of the first: a mark a page beside keys
and values, or indexer keys beside latent rows. The rigs check every one that they reuse.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from rigs.caches.cache_rig import RIG_LAYOUTS, CacheRig, HiCacheSettings, Reused
from rigs.caches.marks_rig import MarksRig
from rigs.caches.mla_rig import MLARig
from rigs.caches.random_runs import run_over_moods
from rigs.caches.storage_rigs import (
    PAGE,
    StorageRigs,
    assert_one_question_for_all_prompts,
    attached_store_of,
    counts,
)
from rigs.stores.fake_mooncake import FakeMooncake, FakeMooncakes
from rigs.stores.object_store import IN_PLACE, PLAIN
from sglang.srt.environ import envs
from sglang.srt.mem_cache.hicache_storage import (
    CacheOutcome,
    HiCacheFile,
    HiCacheStorage,
    HiCacheStorageExtraInfo,
    PageResult,
    PoolTransfer,
    StorageUnavailable,
)
from sglang.srt.mem_cache.host.host_pool import HostKVCache
from sglang.srt.mem_cache.l2 import cache_controller
from sglang.srt.mem_cache.storage.mooncake_store import mooncake_store
from sglang.srt.mem_cache.storage.types import StoragePool
from sglang.srt.mem_cache.tree.radix_key import RadixKey
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=8, suite="base-a-test-cpu")

PROMPT = [*range(40), 7]
"""Ten pages and a token."""


Kind = type[MarksRig] | type[MLARig]


@pytest.fixture(params=[MarksRig, MLARig])
def kind(request: pytest.FixtureRequest) -> Kind:
    """The rig of a model with two kinds of state."""
    found: Kind = request.param
    return found


def second_part(root: Path, page: int) -> Path:
    """File of the mark, or of the indexer keys, of a page of `PROMPT`."""
    page_hash = RadixKey(PROMPT[:40]).page_hashes(PAGE)[page]
    (found,) = root.glob(f"*/??/{page_hash}%2Findexer")
    return found


# -- L2 ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_pieces", [False, True])
@pytest.mark.parametrize("policy", ["write_through", "write_back"])
@pytest.mark.parametrize("layout", RIG_LAYOUTS)
def test_both_kinds_go_to_the_host_and_come_back(
    monkeypatch: pytest.MonkeyPatch, kind: Kind, layout: str, policy: str, in_pieces: bool
) -> None:
    monkeypatch.setattr(HostKVCache, "prefers_cpu_slots", lambda *_: in_pieces)
    monkeypatch.setattr(cache_controller, "_PAGES_AT_ONCE", 3)
    settings = HiCacheSettings(hicache_mem_layout=layout, hicache_write_policy=policy)
    rig = kind(l1_pages=12, settings=settings)
    rig.run(PROMPT)
    rig.settle()
    for first in (1000, 2000):
        rig.run(range(first, first + 40))
        rig.settle()
    rig.spoil()
    assert rig.run(PROMPT).host == 40
    rig.settle()
    rig.close()


def test_a_load_signals_the_layers_of_the_model() -> None:
    rig = MarksRig(settings=HiCacheSettings())
    counter = rig.hi.cache_controller.layer_done_counter
    assert rig.hi.cache_controller.mem_pool_host.num_layers == 5
    assert rig.pool.layer_transfer_counter is rig.marks.layer_transfer_counter is counter
    rig.close()


# -- L3 ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", RIG_LAYOUTS)
def test_both_kinds_go_to_files_and_come_back(rigs: StorageRigs, kind: Kind, layout: str) -> None:
    writer, reader = (rigs.make("file", kind=kind, hicache_mem_layout=layout) for _ in range(2))
    writer.run(PROMPT)
    writer.settle()
    assert reader.run(PROMPT) == Reused(storage=40)
    reader.settle()


@pytest.mark.skipif("page_first_kv_split" not in RIG_LAYOUTS, reason="the device has no such copy")
def test_rows_cut_in_two_are_read_where_rows_are_cut_alone(rigs: StorageRigs) -> None:
    """Their bytes have an order of their own; those of keys and values have not."""

    def reads(of: type[CacheRig], layout: str, prompt: list[int]) -> int:
        rig = rigs.make("file", kind=of, hicache_mem_layout=layout)
        found = rig.run(prompt).storage
        rig.settle()
        return found

    cut, whole = "page_first_kv_split", "page_first_direct"
    for of, shared in ((MLARig, 0), (MarksRig, 40)):
        other = [*range(100, 140), 7]
        assert (reads(of, cut, PROMPT), reads(of, whole, other)) == (0, 0)
        assert reads(of, whole, PROMPT) == shared, of
        assert reads(of, cut, other) == shared, of
        assert reads(of, cut, PROMPT) == 40, of


def test_both_kinds_go_to_mooncake_and_come_back_with_one_question_for_all_prompts(
    monkeypatch: pytest.MonkeyPatch, kind: Kind
) -> None:
    assert_one_question_for_all_prompts(monkeypatch, kind, "indexer", 15)


@pytest.mark.parametrize("trouble", ["missing", "damaged", "truncated"])
def test_a_page_without_its_second_part_counts_as_missing_and_is_healed_whole(
    rigs: StorageRigs, storage_dir: Path, kind: Kind, trouble: str
) -> None:
    writer, reader, third = (rigs.make("file", kind=kind) for _ in range(3))
    writer.run(PROMPT)
    writer.settle()
    file = second_part(storage_dir, 6)
    raw = file.read_bytes()
    if trouble == "missing":
        file.unlink()
    else:
        file.write_bytes(raw[:-1] if trouble == "truncated" else bytes([raw[0] ^ 1]) + raw[1:])
    assert reader.run(PROMPT) == Reused(storage=24), "six pages of ten"
    reader.settle()
    assert file.read_bytes() == raw
    assert third.run(PROMPT) == Reused(storage=40)
    third.settle()


class Picky(HiCacheFile):
    """A file store that misbehaves, as a test says, with the second kind of state alone."""

    fails_at: ClassVar[int | None] = None
    """Its pages from this one of a call on are refused."""
    is_down: ClassVar[bool] = False
    gate: ClassVar[threading.Event]
    """The second kind is read when this is set, a moment after the first kind."""

    def __init__(self, storage_config: Any, **_: Any) -> None:
        root = envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.get()
        super().__init__(storage_config, root)

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[CacheOutcome]]:
        results = super().batch_get_v2(transfers[:1], extra_info)
        assert self.gate.wait(30)
        if self.is_down:
            raise StorageUnavailable("not today")
        return results | super().batch_get_v2(transfers[1:], extra_info)

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[CacheOutcome]]:
        if self.fails_at is None:
            return super().batch_set_v2(transfers, extra_info)
        results = super().batch_set_v2(transfers[:1], extra_info)
        (second,) = transfers[1:]
        assert second.keys is not None and second.host_indices is not None
        kept, refused = second.keys[: self.fails_at], second.keys[self.fails_at :]
        slots = second.host_indices[: len(kept) * PAGE]
        some = PoolTransfer(second.name, slots, keys=kept)
        written = super().batch_set_v2([some], extra_info)["indexer"]
        return results | {"indexer": [*written, *[CacheOutcome.FAILED] * len(refused)]}


@pytest.fixture(autouse=True)
def picky(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(Picky, "gate", threading.Event(), raising=False)
    Picky.gate.set()
    yield
    Picky.gate.set()


def test_nothing_of_a_read_is_visible_before_both_kinds_are_there(
    rigs: StorageRigs, kind: Kind
) -> None:
    writer = rigs.make("file", kind=kind)
    reader = rigs.make(Picky, kind=kind, extra={"prefetch_timeout_max": 20})
    writer.run(PROMPT)
    writer.settle()
    Picky.gate.clear()
    reader.arrive("slow", PROMPT)
    (operation,) = reader.hi.storage_prefetch.table.take_new()
    attached_store_of(reader).reads.queue.put([operation])
    reader.until(lambda: operation.handed_pages == 10)
    assert operation.landed_pages == 0
    assert not reader.tree.check_prefetch_progress("slow")
    Picky.gate.set()
    reader.until(lambda: reader.tree.check_prefetch_progress("slow"))
    request, reused = reader.admit("slow", PROMPT)
    assert reused == Reused(storage=40)
    reader.finish(request)
    reader.settle()


def test_a_store_that_fails_for_one_kind_gives_nothing(
    rigs: StorageRigs, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, reader = rigs.make("file", kind=kind), rigs.make(Picky, kind=kind)
    writer.run(PROMPT)
    writer.settle()
    monkeypatch.setattr(Picky, "is_down", True)
    assert reader.run(PROMPT) == Reused()
    assert attached_store_of(reader).breaker.is_open
    reader.settle()
    assert reader.hi.host_pool.available_size() == reader.hi.host_pool.size - 40, "its own copy"


def test_nothing_is_written_behind_a_page_whose_second_part_was_refused(
    rigs: StorageRigs, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, reader = rigs.make(Picky, kind=kind), rigs.make("file", kind=kind)
    monkeypatch.setattr(Picky, "fails_at", 3)
    writer.run(PROMPT)
    writer.run([*PROMPT[:40], *range(100, 108), 7])
    writer.settle()
    ends = counts(writer.hi.metrics.backup_outcomes)
    # The second write may wait already when the store refuses the page before it.
    assert ends in ({"failed": 1, "short": 1}, {"failed": 1, "orphan": 1})
    assert reader.run(PROMPT) == Reused(storage=12)
    reader.settle()


@pytest.mark.parametrize("backend", [PLAIN, IN_PLACE])
@pytest.mark.parametrize("seed", range(3))
def test_both_kinds_are_right_whatever_the_store_does(backend: str, seed: int, kind: Kind) -> None:
    run_over_moods(kind, backend, seed, RIG_LAYOUTS, l1_pages=12)


# -- who may serve such a model ------------------------------------------------------------------


class OfOnePool(HiCacheStorage):
    """A backend of the v1 interface."""

    def __init__(self, storage_config: Any, **_: Any) -> None:
        self.storage_config = storage_config

    def batch_get_v1(self, *args: Any, **kwargs: Any) -> list[PageResult]:
        return []

    batch_set_v1 = batch_get_v1

    def get(self, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        return None

    def set(self, *args: Any, **kwargs: Any) -> bool:
        return False

    def exists(self, key: str) -> bool:
        return False


class OldQuestion(OfOnePool):
    """Asks about prompts without pools."""

    batch_get_v2 = batch_set_v2 = OfOnePool.batch_get_v1  # type: ignore[assignment]

    def prompts_exist(self, prompts: Any, extra_infos: Any) -> Any:  # type: ignore[override]
        return []


@pytest.mark.parametrize("backend", [OfOnePool, OldQuestion])
def test_a_backend_of_one_pool_is_refused_by_name(
    rigs: StorageRigs, backend: type[HiCacheStorage]
) -> None:
    with pytest.raises(ValueError, match=rf"{backend.__name__} knows one pool.*'indexer'"):
        rigs.make(backend, kind=MarksRig)
    rigs.make(backend, kind=CacheRig)
    with pytest.raises(ValueError, match=rf"{backend.__name__} knows one pool.*'kv/h1-1.2'"):
        rigs.make(backend, kind=CacheRig, extra={"tp_lcm_size": 2})


@pytest.mark.parametrize("extra", [None, {"on_unreachable": "degrade"}])
@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (ValueError("it is odd"), ValueError),
        (StorageUnavailable("it is full"), StorageUnavailable),
        (KeyError("odd"), ValueError),
    ],
)
def test_a_pool_that_a_backend_cannot_register_is_named_with_its_bytes(
    rigs: StorageRigs,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    raised: type[Exception],
    extra: dict[str, str] | None,
) -> None:
    """A server that may start without a store fails too: this store is there, and refuses."""
    closed: list[bool] = []

    def register(self: HiCacheFile, pool: StoragePool, name: str) -> None:
        if name == "indexer":
            raise error

    monkeypatch.setattr(HiCacheFile, "register_mem_host_pool_v2", register)
    monkeypatch.setattr(HiCacheFile, "close", lambda _: closed.append(True))
    pages = 4 * 128  # as `hicache_ratio` says of as many on the device
    message = rf"host pool indexer of {16 * pages} bytes cannot be registered: .*{error}"
    with pytest.raises(raised, match=message):
        rigs.make("file", kind=MarksRig, extra=extra)
    assert closed == [True]


def test_memory_that_mooncake_does_not_take_is_told_with_what_it_has(
    rigs: StorageRigs, monkeypatch: pytest.MonkeyPatch
) -> None:
    fakes = FakeMooncakes(monkeypatch)
    monkeypatch.setattr(mooncake_store, "is_reachable", lambda config: True)
    register = FakeMooncake.register_buffer

    def two_buffers(self: FakeMooncake, address: int, size: int) -> int:
        return -600 if len(self.memory) == 2 else register(self, address, size)

    monkeypatch.setattr(FakeMooncake, "register_buffer", two_buffers)
    with (
        StorageRigs(master_server_address="127.0.0.1:1", protocol="tcp") as over_mooncake,
        pytest.raises(
            StorageUnavailable,
            match=r"host pool indexer of 8192 bytes .* refused to register 8192 bytes .*code -600"
            r".* beside \d{5,} that it has; this process may lock .*lower --hicache-size",
        ),
    ):
        over_mooncake.make(kind=MarksRig)
    assert fakes[-1].is_closed


def test_engines_with_other_pools_share_nothing(rigs: StorageRigs) -> None:
    with_marks, without = rigs.make("file", kind=MarksRig), rigs.make("file")
    with_marks.run(PROMPT)
    with_marks.settle()
    assert without.run(PROMPT) == Reused()
    without.settle()


def test_the_start_line_counts_the_bytes_of_all_pools() -> None:
    rigs = (
        MarksRig(l1_pages=8, settings=HiCacheSettings()),
        CacheRig(l1_pages=8, settings=HiCacheSettings()),
    )
    sizes = [rig.hi.cache_controller.mem_pool_host.nbytes for rig in rigs]
    assert sizes[0] == sizes[1] + 32 * 16
    for rig in rigs:
        rig.close()
