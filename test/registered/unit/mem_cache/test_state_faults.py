"""Recurrent states under faults: a prefix that lacks a state is not served, and heals.

The store loses, damages or holds back only states here; it has all pages.
"""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rigs.caches.cache_rig import CacheRig, Reused
from rigs.caches.random_runs import end_at_any_point
from rigs.caches.state_rig import StateRig
from rigs.caches.storage_rigs import PAGE, StorageRigs, attached_store_of, counts, object_file
from rigs.caches.two_states_rig import TwoStatesRig
from rigs.stores.losing_store import LosingStore
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.hicache_storage import (
    CacheOutcome,
    HiCacheStorageExtraInfo,
    PoolTransfer,
)
from sglang.srt.mem_cache.tree.radix_key import RadixKey
from sglang.srt.mem_cache.tree.tree_node import TreeNode
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

SHARED = list(range(12))
SHORT = [*SHARED, 7]
PROMPT = [*range(40), 7]
"""Ten pages and a token. The first three pages are those of `SHORT`."""
WHOLE = Reused(storage=40)
KINDS = ((StateRig, "mamba"), (TwoStatesRig, "mamba"), (TwoStatesRig, "indexer"))
"""Rigs, and the state that fails."""

of_every_state = pytest.mark.parametrize(("kind", "pool"), KINDS)


def make(
    rigs: StorageRigs, backend: Any = "file", kind: type[StateRig] = StateRig, **arguments: Any
) -> StateRig:
    rig = rigs.make(backend, kind=kind, **arguments)
    assert isinstance(rig, StateRig)
    return rig


def write(rigs: StorageRigs, kind: type[StateRig] = StateRig) -> None:
    """Store the pages of `PROMPT`, and states behind three and behind ten of them."""
    writer = make(rigs, kind=kind)
    writer.run(SHORT)
    writer.run(PROMPT)
    writer.settle()


def contents(root: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in root.glob("*/??/*")}


def read(rig: CacheRig, rid: str, prompt: list[int]) -> None:
    """Arrive, and wait until the read from L3 has ended."""
    rig.arrive(rid, prompt)
    rig.until(lambda: rig.tree.check_prefetch_progress(rid))


# -- rows C1 and C2: late, and gone --------------------------------------------------------------


class Odd(LosingStore):
    """A store that can also be slow with states."""

    gate: ClassVar[threading.Event]
    """States are read when this is set; pages are read at once."""

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[CacheOutcome]]:
        pages = super().batch_get_v2(transfers[:1], extra_info)
        if any(transfer.keys for transfer in transfers[1:]):
            assert self.gate.wait(30)
        return pages | super().batch_get_v2(transfers[1:], extra_info)


@pytest.fixture(autouse=True)
def odd(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(Odd, "gate", threading.Event(), raising=False)
    Odd.gate.set()
    yield
    Odd.gate.set()


@of_every_state
@pytest.mark.parametrize("policy", ["wait_complete", "best_effort"])
def test_pages_that_are_there_are_invisible_until_their_state_is(
    rigs: StorageRigs, kind: type[StateRig], pool: str, policy: str
) -> None:
    write(rigs, kind)
    reader = make(rigs, Odd, kind, hicache_storage_prefetch_policy=policy)
    attached_store_of(reader).pages_per_read = 4
    Odd.gate.clear()
    reader.arrive("slow", PROMPT)
    (operation,) = reader.hi.storage_prefetch.table.operations
    reader.until(lambda: operation.handed_pages == 10)
    may_go_on = policy == "best_effort"
    for _ in range(3):
        reader.tick()
        assert operation.landed_pages == 0
        assert reader.tree.check_prefetch_progress("slow") == may_go_on
        assert list(reader.hi.nodes()) == []
    if not may_go_on:
        Odd.gate.set()
        reader.until(lambda: reader.tree.check_prefetch_progress("slow"))
    request, reused = reader.admit("slow", PROMPT)
    assert reused == (Reused() if may_go_on else WHOLE)
    Odd.gate.set()
    reader.finish(request)
    reader.settle()


@of_every_state
@pytest.mark.parametrize("known", [[], SHORT], ids=["alone", "after an earlier state"])
def test_a_state_lost_between_the_question_and_the_read_is_computed_and_written_again(
    rigs: StorageRigs,
    storage_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[StateRig],
    pool: str,
    known: list[int],
) -> None:
    write(rigs, kind)
    before = contents(storage_dir)
    reader = make(rigs, Odd, kind)
    if known:
        reader.run(known)
        reader.settle()
    lengths = [len(node.key) for node in reader.hi.nodes()]
    lost = object_file(storage_dir, PROMPT, pool)
    monkeypatch.setattr(Odd, "doomed", lost)
    read(reader, "torn", PROMPT)
    assert not lost.exists()
    assert [len(node.key) for node in reader.hi.nodes()] == lengths, "pages without a state"
    request, reused = reader.admit("torn", PROMPT)
    assert reused == Reused(device=len(known) // PAGE * PAGE)
    reader.finish(request)
    reader.settle()
    assert contents(storage_dir) == before
    assert make(rigs, kind=kind).run(PROMPT) == WHOLE


@of_every_state
def test_a_lost_state_of_pages_that_the_tree_kept_is_written_again(
    rigs: StorageRigs,
    storage_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[StateRig],
    pool: str,
) -> None:
    """The tree has stored pages, whose state left it. It may not hold the next one for stored."""
    write(rigs, kind)
    before = contents(storage_dir)
    rig = make(rigs, Odd, kind)
    for prompt in (SHORT, PROMPT):
        rig.run(prompt)
        rig.settle()
    host = rig.states.host
    rig.tree.evict(EvictParams(mamba_num=1))
    host.evict(1)
    (upper,) = (node for node in rig.hi.nodes() if node.children)
    assert not upper.states[0].is_on_any_tier
    assert upper.storage_epoch == rig.hi.store.epoch
    lost = object_file(storage_dir, SHARED, pool)
    monkeypatch.setattr(Odd, "doomed", lost)
    read(rig, "torn", SHORT)
    assert not lost.exists()
    assert not upper.states[0].is_on_any_tier
    request, reused = rig.admit("torn", SHORT)
    assert reused == Reused()
    rig.finish(request)
    rig.settle()
    assert contents(storage_dir) == before
    assert make(rigs, kind=kind).run(SHORT) == Reused(storage=12)


# -- row C3: damage ------------------------------------------------------------------------------


def flip(root: Path, pool: str) -> None:
    file = object_file(root, PROMPT, pool)
    raw = bytearray(file.read_bytes())
    raw[7] ^= 1
    file.write_bytes(raw)


def truncate(root: Path, pool: str) -> None:
    file = object_file(root, PROMPT, pool)
    file.write_bytes(file.read_bytes()[:-1])


def exchange(root: Path, pool: str) -> None:
    """Whole objects under the keys of other states: only what they say of themselves is wrong."""
    one, other = object_file(root, PROMPT, pool), object_file(root, SHARED, pool)
    ours, theirs = one.read_bytes(), other.read_bytes()
    assert len(ours) == len(theirs)
    one.write_bytes(theirs)
    other.write_bytes(ours)


def give_page(root: Path, pool: str) -> None:
    shutil.copyfile(object_file(root, PROMPT, "kv"), object_file(root, PROMPT, pool))


@of_every_state
@pytest.mark.parametrize("damage", [flip, truncate, exchange, give_page])
def test_a_damaged_state_is_detected_counted_and_healed(
    rigs: StorageRigs,
    storage_dir: Path,
    damage: Callable[[Path, str], None],
    kind: type[StateRig],
    pool: str,
) -> None:
    write(rigs, kind)
    before = contents(storage_dir)
    damage(storage_dir, pool)
    reader = make(rigs, kind=kind)
    assert reader.run(PROMPT) == Reused()
    reader.settle()
    assert counts(reader.hi.metrics.pages)["get/damaged"] == 1
    # An exchanged object behind the third page was not read, and is damaged still.
    again = make(rigs, kind=kind)
    assert again.run(SHORT) == (Reused() if damage is exchange else Reused(storage=12))
    again.settle()
    assert contents(storage_dir) == before
    assert make(rigs, kind=kind).run(PROMPT) == WHOLE


# -- rows C11 to C13: aborts, small tiers, L3 alone ----------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_aborts_at_any_point_lose_no_page(rigs: StorageRigs, seed: int) -> None:
    """`settle` checks the host."""
    rig = make(rigs, l1_pages=24, hicache_ratio=1.5)
    end_at_any_point(rig, seed, steps=50)
    rig.run(PROMPT)
    rig.settle()
    # No flush, which would free what has no owner.
    rig.tree.evict(EvictParams(num_tokens=24 * PAGE, mamba_num=rig.num_states))
    rig.hi.evict_host(rig.hi.host_pool.size)
    assert list(rig.hi.nodes()) == []
    host = rig.states.host
    assert rig.allocator.available_size() == 24 * PAGE
    assert rig.slots.available_size() == rig.num_states
    assert rig.hi.host_pool.available_size() == rig.hi.host_pool.size
    assert host.pool.available_size() == host.pool.size
    assert rig.rows.available_size() == rig.rows.size


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_tiers_far_smaller_than_the_prompts_store_states_behind_whole_prefixes(
    rigs: StorageRigs, storage_dir: Path, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    rng = random.Random(policy)
    rig = make(rigs, l1_pages=14, hicache_ratio=10 / 14, hicache_write_policy=policy)
    gained = gains(rig, monkeypatch)
    prompts = []
    for step in range(40):
        first = 1000 * rng.randrange(8)
        prompts.append([*range(first, first + rng.randrange(6, 44)), step % 3])
        rig.run(prompts[-1])
        if step % 3 == 0:
            rig.settle()
    rig.settle()
    pages, states = (
        {file.name.split("%2F")[0] for file in storage_dir.glob(f"*/??/*%2F{pool}")}
        for pool in ("kv", "mamba")
    )
    assert states <= pages, "no state without its last page"
    for prompt in prompts:
        there = [page in pages for page in RadixKey(prompt).page_hashes(PAGE)]
        assert there == sorted(there, reverse=True), "no page without the pages before it"
    left = counts(rig.states.metrics.evicted)
    nodes = list(rig.hi.nodes())
    kept = {
        "device": sum(node.states[0].value is not None for node in nodes),
        "host": sum(node.states[0].host_value is not None for node in nodes),
    }
    assert {tier: kept[tier] + left[tier] for tier in kept} == gained, "left without a count"
    reader = make(rigs)
    reused = 0
    for prompt in rng.sample(prompts, 10):
        reused += reader.run(prompt).storage
        reader.flush()
    assert reused > 10 * PAGE


def gains(rig: StateRig, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often nodes of the tree gain a state, by tier; counts from now on."""
    gained = {"device": 0, "host": 0}

    def count(tier: str, owner: Any, method: str, value: str) -> None:
        put = getattr(owner, method)

        def counted(node: TreeNode, *args: Any, **settings: Any) -> Any:
            gained[tier] += getattr(node.states[0], value) is None
            return put(node, *args, **settings)

        monkeypatch.setattr(owner, method, counted)

    count("device", rig.states.device, "put", "value")
    count("host", rig.states.host, "put", "host_value")
    return gained


def test_a_flushed_prompt_comes_from_storage_or_has_a_counted_reason(rigs: StorageRigs) -> None:
    rig = make(rigs)
    rig.run(PROMPT)
    for _ in range(2):
        rig.flush()
        assert rig.run(PROMPT) == WHOLE
    rig.flush()
    before = counts(rig.hi.metrics.prefetch_outcomes)
    assert rig.run(PROMPT[:25]) == Reused(), "its pages are there, without a state"
    rig.flush()
    assert rig.run(PROMPT[:25]) == Reused(storage=24)
    rig.flush()
    assert rig.run(PROMPT[:3]) == Reused()
    after = counts(rig.hi.metrics.prefetch_outcomes)
    changes = {name: after[name] - before.get(name, 0) for name in after}
    assert {name: change for name, change in changes.items() if change} == {
        "landed": 1,
        "no_state": 1,
        "too_short": 1,
    }
