"""A decode server with tiers: it loads what L2 has, and asks only for what all its tiers lack."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from rigs.caches.cache_rig import HeldReads
from rigs.caches.host_damage import flip, host_pages, pool_of
from rigs.disaggregation.decode_rig import PAGE, DecodeRig
from rigs.schedulers.random_checks import assert_unpinned
from rigs.schedulers.scheduler_rig import SchedulerRig, greedy, prompt, stored_in_files
from sglang.srt.environ import envs
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.hiradix_cache import HiRadixCache
from sglang.srt.mem_cache.l3 import store_calls
from sglang.srt.mem_cache.tree.tree_node import TreeNode
from sglang.srt.messages.io_struct import FlushCacheReqInput
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

IDS: Final = prompt(1, 42)
"""Ten whole pages, and two tokens."""
NEW: Final = 8
POOL: Final = 128


@contextlib.contextmanager
def rig_of(model: Path, **args: Any) -> Iterator[tuple[DecodeRig, HiRadixCache]]:
    settings = {
        "enable_hierarchical_cache": True,
        "hicache_ratio": 8.0,
        "pool_tokens": POOL,
        **args,
    }
    with envs.SGLANG_HICACHE_CHECKED_SHARE.override(1.0):
        rig = DecodeRig(model, **settings)
    assert isinstance(rig.tree, HiRadixCache)
    with contextlib.closing(rig):
        yield rig, rig.tree


def leave_to_l2(rig: DecodeRig) -> None:
    """Push all prompts out of L1, by prompts that are computed here."""
    for seed in range(10, 14):
        rig.run(rig.request(f"fills {seed}", prompt(seed, 100)))
        rig.settle()


def words(model: Path, ids: list[int]) -> list[int]:
    (said,) = SchedulerRig(model, disable_radix_cache=True).generate([ids], NEW)
    return said


def seed_l2(rig: DecodeRig) -> list[int]:
    """Leave `IDS` and its answer in L2 alone. Returns the answer."""
    rig.run(rig.request("seed", IDS, greedy(NEW)))
    rig.settle()
    leave_to_l2(rig)
    return rig.results["seed"].output_ids


def hold_loads(cache: HiRadixCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no load settle until `monkeypatch.undo`."""
    monkeypatch.setattr(cache.host_load, "settle", lambda num_ended: None)


def test_what_l2_has_is_loaded_and_not_asked_for(model: Path) -> None:
    with rig_of(model) as (rig, cache):
        answer = seed_l2(rig)
        turn = [*IDS, *answer, *prompt(2, 9)]
        computed = rig.scheduler.state.counters.prefill_tokens
        loads = cache.newest_load
        rig.step(rig.ask("turn", turn, 1, greedy(NEW)))
        (coming,) = rig.servers.begun
        # The last token of an answer is never computed.
        known = (len(IDS) + NEW - 1) // PAGE
        assert (coming.first_page, len(coming.pages)) == (known, -(-len(turn) // PAGE) - known)
        assert cache.newest_load == loads + 1
        # The loaded pages are right: a request that is computed here uses them.
        rig.run_until_ended(rig.request("beside", [*IDS, *answer], greedy(NEW)))
        assert rig.results["beside"].output_ids == words(model, [*IDS, *answer])
        computed = rig.scheduler.state.counters.prefill_tokens - computed
        assert computed < 2 * PAGE
        coming.come(turn)
        rig.run()
        rig.settle()
        details = rig.scheduler.state.recent
        assert details.host >= known * PAGE
        rig.assert_idle()
        assert_unpinned(cache)


def test_a_request_decodes_only_once_its_load_has_settled(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rig_of(model) as (rig, cache):
        answer = seed_l2(rig)
        hold_loads(cache, monkeypatch)
        rig.step(rig.ask("first", [*IDS, *answer], 1, greedy(NEW)))
        # The tree shows the pages that are being loaded: another request uses them as well.
        rig.step(rig.ask("second", [*IDS, *answer, 3], 2, greedy(NEW)))
        assert [one.first_page for one in rig.servers.begun] == [12, 12]
        rig.prompt(1).come([*IDS, *answer])
        rig.prompt(2).come([*IDS, *answer, 3])
        for _ in range(20):
            rig.step()
        assert rig.scheduler.state.counters.decode_steps == 5 * (NEW - 1)
        assert len(rig.scheduler.state.queues.held) == 2
        monkeypatch.undo()
        rig.run()
        assert [len(rig.results[rid].output_ids) for rid in ("first", "second")] == [NEW, NEW]
        rig.settle()
        rig.assert_idle()


def test_a_request_decodes_only_once_others_have_loaded_the_pages_that_it_has_read(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tree keeps the pages that are being loaded, in place of those that were read."""
    with rig_of(model, pool_tokens=2 * POOL) as (rig, cache):
        rig.step(rig.ask("early", [*IDS, 5], 1, greedy(NEW)))
        rig.run_until_ended(rig.request("seed", IDS, greedy(1)))
        rig.run_until(lambda: not cache.is_busy())
        cache.evict(EvictParams(num_tokens=2 * POOL))
        hold_loads(cache, monkeypatch)
        rig.step(rig.ask("other", [*IDS, 3], 2, greedy(NEW)))
        assert [one.first_page for one in rig.servers.begun] == [0, 10]
        rig.prompt(1).come([*IDS, 5])
        for _ in range(20):
            rig.step()
        assert {req.rid for req in rig.scheduler.state.queues.held} == {"early", "other"}
        monkeypatch.undo()
        rig.prompt(2).come([*IDS, 3])
        rig.run()
        assert [len(rig.results[rid].output_ids) for rid in ("early", "other")] == [NEW, NEW]
        rig.settle()
        rig.assert_idle()


@pytest.mark.parametrize("wanted", [NEW, 1])
def test_a_request_with_a_damaged_page_is_computed_here(
    model: Path, caplog: pytest.LogCaptureFixture, wanted: int
) -> None:
    with rig_of(model) as (rig, cache):
        answer = seed_l2(rig)
        turn = [*IDS, *answer]
        flip(pool_of(cache), host_pages(cache, turn)[2])
        (first, *rest) = words(model, turn)
        caplog.set_level(logging.WARNING)
        rig.step(rig.ask("turn", turn, 1, greedy(wanted)))
        rig.prompt(1).come(turn, token_id=first)
        rig.run()
        assert rig.results["turn"].output_ids == [first, *rest][:wanted]
        is_again = wanted > 1
        assert ("request turn is computed here" in caplog.text) == is_again
        assert rig.scheduler.state.counters.redone == is_again
        rig.settle()
        rig.assert_idle()
        assert_unpinned(cache)


@pytest.mark.parametrize("when", ["before the load", "before the read", "after both"])
@pytest.mark.parametrize("how", ["abort", "failure"])
def test_an_end_at_any_time_frees_the_prefix(
    model: Path, when: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rig_of(model) as (rig, cache):
        answer = seed_l2(rig)
        if when == "before the load":
            hold_loads(cache, monkeypatch)
        rig.step(rig.ask("turn", [*IDS, *answer], 1))
        coming = rig.prompt(1)
        if when == "before the read":
            rig.run_until(lambda: cache.has_settled(cache.newest_load))
        if how == "failure":
            coming.failure = "prefill is gone"
        elif when == "after both":
            coming.come([*IDS, *answer])
        rig.step(*[rig.abort("turn")] if how == "abort" else [])
        assert rig.end("turn").status_code == (499 if how == "abort" else 503)
        rig.check()
        monkeypatch.undo()
        coming.is_settled = True
        rig.step()
        rig.settle()
        rig.assert_idle()
        assert_unpinned(cache)
        # The pages are still of use.
        rig.step(rig.ask("again", [*IDS, *answer], 2))
        assert rig.prompt(2).first_page == 12
        rig.prompt(2).come([*IDS, *answer])
        rig.run()


def marks(cache: HiRadixCache) -> list[TreeNode]:
    """Nodes that waiting requests want."""
    return [node for node in cache.nodes() if node.wanted_by]


@pytest.mark.parametrize("end", ["abort", "failure", "slots"])
def test_a_waiting_request_pins_nothing(model: Path, end: str) -> None:
    """Its pages just leave last, and only while it waits."""
    with rig_of(model) as (rig, cache):
        answer = seed_l2(rig)
        turn = [*IDS, *answer]
        rig.servers.unknown = {1}
        rig.step(rig.ask("turn", turn, 1))
        rig.step()
        assert marks(cache)
        assert_unpinned(cache)
        if end == "abort":
            rig.step(rig.abort("turn"))
        elif end == "failure":
            rig.servers.receiver(1).failure = "prefill is gone"
            rig.step()
        else:
            rig.servers.receiver(1).is_known = True
            rig.step()
        assert not marks(cache)
        if end == "slots":
            rig.prompt(1).come(turn)
            rig.run()
        rig.settle()
        rig.assert_idle()


def test_loaded_pages_count_for_the_share_of_a_prefill_server(model: Path) -> None:
    """A server that never sends the rest of its prompts leaves slots to others. Each prompt takes
    44 slots, of which 40 are loaded, and 4 for its answer."""
    with rig_of(model, pool_tokens=264) as (rig, cache):
        seeds = [prompt(30 + n, 41) for n in range(5)]
        for n, ids in enumerate(seeds):
            rig.run(rig.request(f"seed {n}", ids, greedy(1)))
        rig.settle()
        leave_to_l2(rig)
        rig.step(*(rig.ask(f"r{n}", [*ids, 1], n, greedy(1)) for n, ids in enumerate(seeds)))
        for _ in range(3):
            rig.step()
        assert [(one.bootstrap_room, one.first_page) for one in rig.servers.begun] == [
            (n, 10) for n in range(4)
        ]
        # The last one would have room: 72 slots are left, and it needs 48.
        assert rig.scheduler.state.free_tokens() == 264 - 4 * 44
        for n in range(4):
            rig.prompt(n).come([*seeds[n], 1])
        rig.run_until(lambda: len(rig.servers.begun) == 5)
        rig.prompt(4).come([*seeds[4], 1])
        rig.run()
        rig.settle()
        assert_unpinned(cache)


# ---- L3 ----------------------------------------------------------------------------------------

L3: Final = stored_in_files(PAGE)


def test_what_l3_has_is_read_while_the_request_waits(model: Path, tmp_path: Path) -> None:
    with (
        envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.override(str(tmp_path)),
        rig_of(model, **L3) as (rig, cache),
    ):
        answer = seed_l2(rig)
        rig.settle()
        rig.step(FlushCacheReqInput(req_id="flush"))
        turn = [*IDS, *answer, 5]
        rig.step(rig.ask("turn", turn, 1, greedy(NEW)))
        for _ in range(10_000):
            if rig.servers.begun:
                break
            rig.wait_a_tick()
        known = (len(IDS) + NEW - 1) // PAGE
        assert rig.prompt(1).first_page == known
        rig.prompt(1).come(turn)
        rig.run()
        rig.settle()
        assert rig.scheduler.state.metrics.num_cached["storage"] == known * PAGE
        rig.assert_idle()
        assert_unpinned(cache)


def test_a_store_that_does_not_answer_is_not_waited_for(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prefill server sends the pages, though a decode server that computes nothing does not
    know how long that takes."""
    with (
        envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.override(str(tmp_path)),
        rig_of(model, **L3) as (rig, cache),
    ):
        answer = seed_l2(rig)
        rig.settle()
        rig.step(FlushCacheReqInput(req_id="flush"))
        turn = [*IDS, *answer, 5]
        attached = cache.store.attached
        assert attached is not None
        monkeypatch.setattr(attached.prefill_rate, "samples", 0)
        monkeypatch.setattr(store_calls, "_SILENT_AFTER_S", 0.0)
        monkeypatch.setattr(store_calls, "_FIRST_GET_S", 0.0)
        with HeldReads(cache, calls=0):
            rig.step(rig.ask("turn", turn, 1, greedy(NEW)))
            rig.run_until(lambda: bool(rig.servers.begun))
            assert rig.prompt(1).first_page == 0
            rig.prompt(1).come(turn)
            rig.run_until(lambda: "turn" in rig.results)
            rig.run_until(lambda: len(rig.results["turn"].output_ids) == NEW)
        rig.settle()
        rig.assert_idle()
        assert_unpinned(cache)
