"""Pages without recurrent states, for requests whose state another server gives."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest

from rigs.caches.cache_rig import HiCacheSettings
from rigs.caches.state_rig import StateRequest, StateRig
from rigs.caches.storage_rigs import StorageRigs, attached_store_of
from sglang.srt.mem_cache.base_prefix_cache import (
    EvictParams,
    InitLoadBackParams,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.l3 import storage_backup
from sglang.srt.mem_cache.l3.prefetch_table import PrefetchOperation
from sglang.srt.mem_cache.tree.radix_key import RadixKey
from sglang.srt.utils.network import wait_until
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")


def rig_of(**fields: object) -> StateRig:
    return StateRig(page_size=4, alignment=8, pages_alone=True, **fields)  # type: ignore[arg-type]


def alone(rig: StateRig, ids: Sequence[int]) -> MatchResult:
    return rig.tree.match_prefix(MatchPrefixParams(RadixKey(list(ids)), needs_state=False))


def found(rig: StateRig, ids: Sequence[int]) -> tuple[int, int]:
    """Tokens of `ids` in L1 that a request without a state uses, and one with a state."""
    return len(rig.match(ids).device_indices), len(alone(rig, ids).device_indices)


def start(rig: StateRig, length: int, snapshot: int | None) -> StateRequest:
    """A request whose tokens after its first page are computed at once, with a snapshot."""
    request, _ = rig.start(range(4))
    assert isinstance(request, StateRequest)
    rig.tree.cache_unfinished_req(request)
    rig.compute(request, range(length), snapshot=snapshot)
    return request


@pytest.mark.parametrize("goes_on", [False, True])
def test_all_whole_pages_go_into_the_tree_and_the_snapshot_between_them(goes_on: bool) -> None:
    rig = rig_of()
    request = start(rig, 23, 16)
    if goes_on:
        rig.tree.cache_unfinished_req(request)
        assert (request.cache_protected_len, request.mamba_track_slot) == (20, None)
        assert request.last_node.depth == 20
        rig.check([request])
    rig.finish(request)
    assert found(rig, range(30)) == (16, 20)
    rig.settle()
    rig.check()


def test_doubles_are_freed_beside_a_snapshot_between_them() -> None:
    rig = rig_of()
    requests = [start(rig, 23, 16), start(rig, 23, 8)]
    for request in requests:
        rig.tree.cache_unfinished_req(request)
        rig.check(requests)
    assert rig.tree.total_size() == 20
    for request in requests:
        rig.finish(request)
    assert found(rig, range(16)) == (8, 12)
    rig.settle()
    rig.check()


@pytest.mark.parametrize("has_slot", [False, True])
@pytest.mark.parametrize("goes_on", [False, True])
def test_a_request_without_a_snapshot_leaves_its_pages(has_slot: bool, goes_on: bool) -> None:
    rig = rig_of()
    request = start(rig, 23, None)
    if has_slot:
        request.mamba_track_slot = rig.state_slot()
    if goes_on:
        rig.tree.cache_unfinished_req(request)
        assert (request.mamba_track_slot is not None) == has_slot
        rig.check([request])
    rig.finish(request)
    assert found(rig, range(30)) == (0, 20)
    rig.settle()
    assert rig.mamba.available_size() == rig.num_states


def test_a_state_behind_pages_that_the_tree_has_stays_when_its_request_ends() -> None:
    rig = rig_of()
    request = start(rig, 24, 16)
    rig.tree.cache_unfinished_req(request)
    rig.compute(request, range(26), snapshot=24)
    rig.finish(request)
    assert found(rig, range(30)) == (24, 24)
    rig.settle()
    rig.check()


def test_the_last_token_is_never_part_of_a_match() -> None:
    rig = rig_of()
    rig.run(range(24))
    assert found(rig, range(24)) == (0, 20)
    assert found(rig, range(25)) == (24, 24)
    assert found(rig, [7]) == (0, 0)
    rig.check()


def test_pages_stay_without_the_state_and_leave_with_it() -> None:
    rig = rig_of()
    rig.run(range(24))
    assert rig.tree.evict(EvictParams(mamba_num=1)).num_tokens_evicted == 0
    assert found(rig, range(30)) == (0, 24)
    rig.run([90, *range(24)])
    assert rig.tree.evict(EvictParams(num_tokens=64)).mamba_num_evicted == 1
    assert list(rig.tree.nodes()) == []
    rig.check()


def test_pages_are_loaded_without_states() -> None:
    rig = rig_of(settings=HiCacheSettings(hicache_ratio=4.0))
    rig.run(range(24))
    rig.settle()
    rig.tree.evict(EvictParams(num_tokens=64, mamba_num=12))
    match = alone(rig, range(30))
    assert (len(match.device_indices), match.host_hit_length) == (0, 24)
    assert match.mamba_host_hit_length == 0
    params = InitLoadBackParams(match.best_match_node, 24, needs_state=False)
    slots, node = rig.tree.init_load_back(params)
    assert len(slots) == node.depth == 24 and params.refusal is None
    assert [state.value for state in node.states] == [None]
    rig.tree.ready_to_load_host_cache()
    rig.settle()
    assert found(rig, range(30)) == (24, 24), "the state is in L2"
    rig.check()


# -- L3 ------------------------------------------------------------------------------------------


def stored(rigs: StorageRigs) -> StateRig:
    """A rig whose L3 has ten pages and the state behind them."""
    rig = rigs.make("file", kind=partial(StateRig, pages_alone=True))
    assert isinstance(rig, StateRig)
    rig.run([*range(40), 7])
    rig.settle()
    return rig


def test_l3_is_asked_and_read_for_pages_alone(rigs: StorageRigs, storage_dir: Path) -> None:
    """A read may end anywhere, and takes no slot of a state."""
    rig = stored(rigs)
    (state,) = storage_dir.glob("*/??/*mamba*")
    state.unlink()
    rig.flush()
    free = rig.states.host.pool.available_size()
    rig.arrive("r", [*range(28), 300, 301])
    (read,) = rig.hi.storage_prefetch.table.new
    assert (read.has_states, rig.states.host.pool.available_size()) == (False, free)
    assert wait_until(lambda: landed(rig, read), 10)
    rig.tree.note_scheduled("r")
    assert alone(rig, range(30)).host_hit_length == 28
    rig.settle()
    rig.check()


def landed(rig: StateRig, read: PrefetchOperation) -> bool:
    """True if all ranks know that a read has ended."""
    rig.tree.check_hicache_events()
    return read.progress.ended


def test_a_check_names_the_page_that_l3_has_lost(
    rigs: StorageRigs, storage_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_backup, "_CHECK_EVERY", 1)
    rig = stored(rigs)
    page_hash = RadixKey(list(range(20))).page_hashes(4)[-1]
    (page,) = storage_dir.glob(f"*/??/{page_hash}%2Fkv")
    page.unlink()
    lost = Mock()
    monkeypatch.setattr(rig.hi.store, "note_lost", lost)
    attached_store_of(rig).reads._check_at = 0.0
    rig.run([*range(40), 7])
    rig.settle()
    assert lost.call_args.args[0] == page_hash
