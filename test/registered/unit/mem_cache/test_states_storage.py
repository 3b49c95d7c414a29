"""Recurrent states in L3: each hangs on the page that it stands behind, and comes with it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest
import torch

from rigs.caches.cache_rig import CacheRig, HeldReads, Reused
from rigs.caches.state_rig import StateRig, depth
from rigs.caches.stepped_rig import SteppedStateRig
from rigs.caches.storage_rigs import (
    PAGE,
    StorageRigs,
    assert_one_question_for_all_prompts,
    attached_store_of,
    counts,
    object_file,
)
from sglang.srt.environ import envs
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.hicache_storage import (
    CacheOutcome,
    HiCacheFile,
    HiCacheStorageExtraInfo,
    PoolTransfer,
)
from sglang.srt.mem_cache.l3 import storage_backup
from sglang.srt.mem_cache.l3.prefetch_table import PrefetchOperation, PrefetchTable
from sglang.srt.mem_cache.l3.storage_reads import StorageReads
from sglang.srt.mem_cache.tree.host_tier import HostTier
from sglang.srt.mem_cache.tree.radix_key import PageHash, RadixKey
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=8, suite="base-a-test-cpu")

SHARED = list(range(12))
PROMPT = [*range(40), 7]
"""Ten pages and a token."""


def state_files(root: Path) -> int:
    return len(list(root.glob("*/??/*mamba*")))


def forget_l1_and_l2(rig: CacheRig) -> None:
    rig.settle()
    rig.flush()


def host_states_in_use(rig: CacheRig) -> int:
    pool = rig.hi.tree.components[0].host.pool
    return pool.size - pool.available_size()


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_a_state_goes_to_a_file_with_its_pages_and_comes_back(
    rigs: StorageRigs, storage_dir: Path, layout: str
) -> None:
    writer, reader = (rigs.make("file", kind=StateRig, hicache_mem_layout=layout) for _ in range(2))
    writer.run(PROMPT)
    writer.settle()
    assert object_file(storage_dir, PROMPT, "mamba").is_file()
    names = [path.name for path in storage_dir.glob("*/??/*")]
    assert sorted(name.partition("%2F")[2] for name in names) == ["kv"] * 10 + ["mamba"], (
        "each key has one pool part"
    )
    assert reader.run(PROMPT) == Reused(storage=40)
    reader.settle()
    assert not counts(reader.hi.metrics.backup_outcomes), "read, not written again"


@pytest.mark.parametrize(
    ("lost", "reused"), [((40, "mamba"), 12), ((28, "kv"), 12), ((8, "kv"), 0), ((12, "mamba"), 40)]
)
def test_a_read_ends_at_the_last_state_whose_pages_are_all_there(
    rigs: StorageRigs, storage_dir: Path, lost: tuple[int, str], reused: int
) -> None:
    writer, reader = (rigs.make("file", kind=StateRig) for _ in range(2))
    writer.run(PROMPT[:13])
    writer.run(PROMPT)
    writer.settle()
    assert state_files(storage_dir) == 2
    object_file(storage_dir, PROMPT[: lost[0]], lost[1]).unlink()
    assert reader.run(PROMPT) == Reused(storage=reused)
    reader.settle()


def test_a_state_that_has_seen_the_last_token_is_not_read(rigs: StorageRigs) -> None:
    writer, reader = (rigs.make("file", kind=StateRig) for _ in range(2))
    writer.run(PROMPT[:37])
    writer.run(PROMPT)
    writer.settle()
    assert reader.run(PROMPT[:40]) == Reused(storage=36)
    reader.settle()


def test_the_prompts_of_a_tick_share_one_question_for_pages_and_states(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert_one_question_for_all_prompts(monkeypatch, StateRig, "mamba", 2)


@pytest.mark.parametrize("trouble", ["damaged", "truncated"])
def test_a_damaged_state_makes_its_read_worthless_and_is_healed(
    rigs: StorageRigs, storage_dir: Path, trouble: str
) -> None:
    writer, reader, third = (rigs.make("file", kind=StateRig) for _ in range(3))
    writer.run(PROMPT)
    writer.settle()
    file = object_file(storage_dir, PROMPT, "mamba")
    raw = file.read_bytes()
    file.write_bytes(raw[:-1] if trouble == "truncated" else bytes([raw[0] ^ 1]) + raw[1:])
    assert reader.run(PROMPT) == Reused()
    reader.settle()
    assert file.read_bytes() == raw
    assert third.run(PROMPT) == Reused(storage=40)
    third.settle()


def test_a_state_that_comes_after_its_pages_were_stored_is_stored_too(
    rigs: StorageRigs, storage_dir: Path
) -> None:
    writer, reader = (rigs.make("file", kind=StateRig) for _ in range(2))
    writer.run([*SHARED, *range(100, 109)])
    writer.settle()
    assert state_files(storage_dir) == 1
    writer.run([*SHARED, *range(200, 209)])
    writer.settle()
    assert state_files(storage_dir) == 3
    assert reader.run([*SHARED, 300]) == Reused(storage=12)
    reader.settle()


def test_a_state_that_comes_while_its_pages_are_written_is_stored_after_them(
    rigs: StorageRigs, storage_dir: Path
) -> None:
    writer = rigs.make("file", kind=StateRig)
    writer.run([*SHARED, *range(100, 109)])
    writer.until(lambda: writer.tree.is_busy().get("backups") == 1)
    writer.run([*SHARED, *range(200, 209)])
    writer.settle()
    assert state_files(storage_dir) == 3


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_pages_that_the_tree_has_without_a_state_get_one_from_l3(
    rigs: StorageRigs, policy: str
) -> None:
    """Under `write_back` the pages are on the device alone."""
    writer = rigs.make("file", kind=StateRig)
    reader = rigs.make("file", kind=StateRig, hicache_write_policy=policy)
    reader.run([*SHARED, *range(100, 109)])
    reader.match([*SHARED, 90, 91, 92, 93])  # type: ignore[attr-defined]
    reader.settle()
    writer.run([*SHARED, 300])
    writer.settle()
    request, reused = reader.start([*SHARED, 400])
    assert reused == Reused(device=12), "the pages stay where they are, and get the state"
    reader.finish(request)
    reader.settle()


def test_a_state_lost_after_its_read_is_stored_again(rigs: StorageRigs, storage_dir: Path) -> None:
    writer, reader = (rigs.make("file", kind=StateRig) for _ in range(2))
    reader.run([*SHARED, *range(100, 109)])
    reader.match([*SHARED, 90])  # type: ignore[attr-defined]
    reader.settle()
    writer.run([*SHARED, 300])
    writer.settle()
    reader.arrive("r", [*SHARED, 400])
    (read,) = reader.hi.storage_prefetch.table.reads
    reader.until(lambda: read.outcome is CacheOutcome.LANDED)
    (node,) = reader.hi.tree.walk(RadixKey(SHARED))
    (file := object_file(storage_dir, SHARED, "mamba")).unlink()
    reader.hi.store.forget_stored()
    reader.hi.storage_backup.on_insert([node])
    reader.until(lambda: reader.hi.storage_backup.has_stored(node))
    assert node.states[0].host_value is None
    assert reader.tree.check_prefetch_progress("r")
    request, reused = reader.admit("r", [*SHARED, 400])
    assert reused == Reused(device=12)
    reader.finish(request)
    reader.settle()
    assert file.is_file()


class Picky(HiCacheFile):
    """A file store that refuses states."""

    refuses: ClassVar[bool] = False

    def __init__(self, storage_config: Any, **_: Any) -> None:
        super().__init__(storage_config, envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.get())

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[CacheOutcome]]:
        if not self.refuses or len(transfers) == 1:
            return super().batch_set_v2(transfers, extra_info)
        keys = transfers[1].keys
        assert keys is not None
        refused = {"mamba": [CacheOutcome.FAILED] * len(keys)}
        return super().batch_set_v2(transfers[:1], extra_info) | refused


def test_a_node_whose_state_is_refused_counts_as_not_written_and_so_does_what_follows(
    rigs: StorageRigs, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, reader = rigs.make(Picky, kind=StateRig), rigs.make("file", kind=StateRig)
    monkeypatch.setattr(Picky, "refuses", True)
    writer.run(PROMPT[:13])
    writer.run(PROMPT)
    writer.settle()
    assert {node.storage_epoch for node in writer.hi.nodes()} == {-1}
    assert set(counts(writer.hi.metrics.backup_outcomes)) == {"failed", "short"}
    assert reader.run(PROMPT) == Reused()
    reader.settle()
    monkeypatch.setattr(Picky, "refuses", False)
    writer.run(PROMPT)
    writer.settle()
    forget_l1_and_l2(reader)
    assert reader.run(PROMPT) == Reused(storage=40)
    reader.settle()


# -- reads under way -----------------------------------------------------------------------------


@pytest.mark.parametrize("calls", [0, 1])
def test_a_read_that_is_cut_gives_everything_back(rigs: StorageRigs, calls: int) -> None:
    writer, reader = (rigs.make("file", kind=StateRig) for _ in range(2))
    writer.run(PROMPT)
    writer.settle()
    with HeldReads(reader.hi, pages_per_call=2, calls=calls) as held:
        reader.arrive("gone", PROMPT)
        (operation,) = reader.hi.storage_prefetch.table.operations
        reader.until(lambda: operation.handed_pages == 2 * (calls + 1))
        reader.tree.release_aborted_request("gone")
        for _ in range(3):
            reader.tick()
            reader.tree.check_integrity()
        assert host_states_in_use(reader) == 1, "the call under way may write to it"
        held.open()
        reader.settle()
    assert host_states_in_use(reader) == 0
    assert list(reader.hi.nodes()) == []


def test_nothing_of_a_read_is_visible_before_its_state_is_there(rigs: StorageRigs) -> None:
    writer, reader = (rigs.make("file", kind=StateRig) for _ in range(2))
    writer.run(PROMPT)
    writer.settle()
    with HeldReads(reader.hi, pages_per_call=2, calls=4) as held:
        reader.arrive("slow", PROMPT)
        reader.until(lambda: held.pages == 8)
        assert not reader.tree.check_prefetch_progress("slow")
        assert list(reader.hi.nodes()) == []
        held.open()
        reader.until(lambda: reader.tree.check_prefetch_progress("slow"))
    request, reused = reader.admit("slow", PROMPT)
    assert reused == Reused(storage=40)
    reader.finish(request)
    reader.settle()


def test_pages_whose_state_the_tree_has_taken_alone_are_not_published(
    rigs: StorageRigs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tree had the pages and took the state; then both left it, before the read ended. Pages
    without a state behind them would be useless."""
    writer = rigs.make("file", kind=StateRig)
    reader = rigs.make("file", kind=SteppedStateRig, hicache_storage_prefetch_policy="best_effort")
    assert isinstance(reader, SteppedStateRig)
    reader.run([*SHARED, *range(100, 109)])
    reader.match([*SHARED, 90])
    reader.settle()
    writer.run([*SHARED, 300])
    writer.settle()
    longer = [*SHARED, *range(400, 409)]
    for rid in ("first", "second"):
        reader.arrive(rid, longer)
    (read,) = reader.hi.storage_prefetch.table.reads
    monkeypatch.setattr(StorageReads, "_end", lambda *_: None)
    for _ in range(3):
        reader.prefetches(None)
        reader.tick()
    assert (read.progress.landed, read.progress.ended) == (3, False)
    assert reader.tree.check_prefetch_progress("first")
    shared = reader.match([*SHARED, 90]).best_match_node
    assert depth(shared) == 12 and shared.states[0].host_value is not None
    assert sorted(read.needs) == ["first", "second"] and read.owned_tokens
    reader.hi.evict(EvictParams(num_tokens=1000))
    reader.hi.evict_host(1000)
    assert list(reader.hi.nodes()) == []
    assert reader.tree.check_prefetch_progress("second")
    assert list(reader.hi.nodes()) == []
    monkeypatch.undo()
    for rid in ("first", "second"):
        reader.tree.release_aborted_request(rid)
    read.outcome = CacheOutcome.LATE
    reader.settle()


def test_a_request_waits_for_a_read_only_if_its_state_is_one_that_it_can_use(
    rigs: StorageRigs,
) -> None:
    writer, reader = (rigs.make("file", kind=StateRig) for _ in range(2))
    writer.run([*SHARED, 300])
    writer.run(PROMPT)
    writer.settle()
    with HeldReads(reader.hi, pages_per_call=2, calls=0) as held:
        for rid, prompt in (("a", PROMPT), ("same", PROMPT), ("short", [*SHARED, 300])):
            reader.arrive(rid, prompt)
        reads = reader.hi.storage_prefetch.table.reads
        assert [sorted(read.needs) for read in reads] == [["a", "same"], ["short"]]
        held.open()
        for rid in ("a", "same", "short"):
            reader.until(lambda rid=rid: reader.tree.check_prefetch_progress(rid))  # type: ignore[misc]
    wanted = {"a": (PROMPT, 40), "same": (PROMPT, 40), "short": ([*SHARED, 300], 12)}
    for rid, (prompt, tokens) in wanted.items():
        request, reused = reader.admit(rid, prompt)
        assert reused.total == tokens
        reader.finish(request)
    reader.settle()


@pytest.mark.parametrize("is_answered", [True, False])
def test_a_longer_prompt_gets_its_own_state_though_a_shorter_one_is_being_read(
    rigs: StorageRigs, is_answered: bool
) -> None:
    """The read of the shorter prompt ends at that prompt's last state, not where L3 ends."""
    writer, reader = (rigs.make("file", kind=StateRig) for _ in range(2))
    longer, shorter = [*range(60), 7], [*range(40), 9]
    writer.run([*SHARED, 300])
    writer.run(longer)
    writer.settle()
    with HeldReads(reader.hi, pages_per_call=1, calls=0) as held:
        reader.arrive("shorter", shorter)
        (read,) = reader.hi.storage_prefetch.table.reads
        if is_answered:
            reader.until(lambda: read.progress.hit == 3)
        reader.arrive("longer", longer)
        assert sorted(read.needs) == (["longer", "shorter"] if is_answered else ["shorter"])
        held.open()
        for rid in ("shorter", "longer"):
            reader.until(lambda rid=rid: reader.tree.check_prefetch_progress(rid))  # type: ignore[misc]
    for rid, prompt, tokens in (("shorter", shorter, 12), ("longer", longer, 60)):
        request, reused = reader.admit(rid, prompt)
        assert reused.total == tokens
        reader.finish(request)
    reader.settle()


def test_nothing_is_read_where_the_host_has_no_room_for_the_state(rigs: StorageRigs) -> None:
    writer, reader = (rigs.make("file", kind=StateRig) for _ in range(2))
    writer.run(PROMPT)
    writer.settle()
    host = reader.hi.tree.components[0].host
    taken = host.pool.alloc(host.pool.available_size())
    assert taken is not None
    reader.arrive("r", PROMPT)
    assert counts(reader.hi.metrics.prefetch_outcomes) == {"no_host_memory": 1}
    assert reader.hi.host_pool.available_size() == reader.hi.host_pool.size
    host.pool.free(taken)
    reader.settle()


def test_reads_hold_half_of_the_states_of_l2(rigs: StorageRigs) -> None:
    """L2 has eight states, and pages for all prompts."""

    def kind(**args: Any) -> StateRig:
        return StateRig(num_states=32, **args)

    writer, reader = (
        rigs.make("file", kind=kind, l1_pages=512, hicache_ratio=0.25) for _ in range(2)
    )
    prompts = [list(range(100 * number, 100 * number + 9)) for number in range(6)]
    for prompt in prompts:
        writer.run(prompt)
        writer.settle()
    assert reader.hi.tree.components[0].host.pool.size == 8
    with HeldReads(reader.hi, calls=0) as held:
        for number, prompt in enumerate(prompts):
            reader.arrive(f"r{number}", prompt)
        table = reader.hi.storage_prefetch.table
        assert [bool(table.reads_of(number)) for number in ("r0", "r3", "r4", "r5")] == [
            True,
            True,
            False,
            False,
        ]
        assert host_states_in_use(reader) == 4
        assert counts(reader.hi.metrics.prefetch_outcomes) == {"no_host_memory": 2}
        held.open()
        for number in range(6):
            rid = f"r{number}"
            reader.until(lambda rid=rid: reader.tree.check_prefetch_progress(rid))  # type: ignore[misc]
    for number, prompt in enumerate(prompts):
        request, reused = reader.admit(f"r{number}", prompt)
        assert reused == Reused(storage=8), "the later ones are read when the others have landed"
        reader.finish(request)
    reader.settle()


def one_read() -> tuple[PrefetchTable, PrefetchOperation]:
    """A read of three pages and a state, under way."""
    slot, tier = torch.tensor([5]), Mock(spec=HostTier)
    operation = PrefetchOperation(
        request_id="r",
        key=RadixKey(range(12)),
        start=0,
        host_indices=torch.arange(12),
        hashes=[PageHash(f"{page:064x}") for page in range(3)],
        prefix_hashes=[],
        deadline=time.monotonic() + 60,
        epoch=0,
        extra_transfers=[PoolTransfer("mamba", slot)],
        states={tier: slot},
    )
    table = PrefetchTable(PAGE)
    table.start(operation)
    return table, operation


@pytest.mark.parametrize(("agreed_hit", "landed"), [(3, 3), (2, 0)])
def test_a_read_counts_as_landed_where_the_ranks_agree_on_the_page_of_its_state(
    agreed_hit: int, landed: int
) -> None:
    """On a rank whose store has more, the state that was read stands behind another page."""
    table, operation = one_read()
    operation.hit_pages = operation.landed_pages = operation.handed_pages = 3
    operation.outcome = CacheOutcome.LANDED
    (first,) = table.report(awaits_answers=False)
    assert (first.hit, first.landed, first.ended) == (3, 0, False)
    table.agree([first._replace(hit=agreed_hit)])
    (second,) = table.report(awaits_answers=False)
    assert (second.landed, second.ended) == (landed, True)
    freed, states = table.agree([second])
    assert (sum(map(len, freed)), len(states)) == ((0, 0) if landed else (12, 1))


def test_a_miss_ends_at_once() -> None:
    table, operation = one_read()
    operation.hit_pages = 0
    operation.outcome = CacheOutcome.MISS
    (progress,) = table.report(awaits_answers=False)
    assert (progress.hit, progress.landed, progress.ended) == (0, 0, True)


# -- checks --------------------------------------------------------------------------------------


def test_a_check_asks_up_to_a_state_that_l3_is_known_to_have(
    rigs: StorageRigs, storage_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_backup, "_CHECK_EVERY", 1)
    rig = rigs.make("file", kind=StateRig)
    rig.run([*SHARED, *range(100, 109)])
    rig.settle()
    epoch = rig.hi.store.epoch
    host = rig.hi.tree.components[0].host
    taken = host.pool.alloc(host.pool.available_size())
    assert taken is not None
    with_state = [node for node in rig.hi.nodes() if node.states[0].is_on_any_tier]
    for node in with_state:
        rig.hi.tree.host.pin(node)
    attached_store_of(rig).reads._check_at = 0.0
    rig.run([*SHARED, 300])
    host.pool.free(taken)
    for node in with_state:
        rig.hi.tree.host.unpin(node)
    rig.settle()
    assert rig.hi.store.epoch == epoch, "its pages are stored, its state was not"
    rig.run(PROMPT)
    rig.settle()
    object_file(storage_dir, PROMPT, "mamba").unlink()
    attached_store_of(rig).reads._check_at = 0.0
    rig.run(PROMPT)
    rig.settle()
    assert rig.hi.store.epoch == epoch + 1, "it was lost"
    rig.run(PROMPT)
    rig.settle()
    assert object_file(storage_dir, PROMPT, "mamba").is_file()
