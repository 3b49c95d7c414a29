"""Copies to L2 that find no room: they wait in L1, and begin when there is some.

`test_tiers_stateful.py` has the same in any order of operations.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from rigs.caches.cache_rig import HiCacheSettings, Reused
from rigs.caches.stepped_rig import SteppedRig, SteppedStateRig
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.tree.radix_key import RadixKey
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

PAGE = 2
L1_PAGES = 32


def settings(l2_pages: int, *, l3: bool = False, **more: Any) -> HiCacheSettings:
    if l3:
        more |= {
            "hicache_storage_backend": "file",
            "hicache_storage_backend_extra_config": json.dumps({"prefetch_threshold": PAGE}),
        }
    return HiCacheSettings(hicache_ratio=l2_pages / L1_PAGES, **more)


def make_rig(l2_pages: int, eviction_policy: str = "lru", **more: Any) -> SteppedRig:
    return SteppedRig(
        l1_pages=L1_PAGES,
        page_size=PAGE,
        eviction_policy=eviction_policy,
        settings=settings(l2_pages, **more),
    )


def prompt(family: int, pages: int) -> list[int]:
    """A prompt whose `pages` first pages can be reused."""
    return [100 * family + at for at in range(PAGE * pages + 1)]


def pages_on(rig: SteppedRig, ids: list[int], tier: str) -> int:
    """Pages of a prompt that L2, or else L3, has."""
    stored = rig.hi.storage_backup.has_stored
    path = rig.hi.tree.walk(RadixKey(ids[: len(ids) // PAGE * PAGE]))
    found = [len(one.key) for one in path if (one.backuped if tier == "L2" else stored(one))]
    return sum(found) // PAGE


def land(rig: SteppedRig) -> None:
    """Let the copies to L2 that were begun end."""
    rig.tick()
    rig.writes.run()
    rig.tick()


def compute(rig: SteppedRig, ids: list[int]) -> None:
    """Run a request without a read from L3, so that nothing lands meanwhile."""
    request, _ = rig.admit("computes", ids)
    rig.finish(request)


def rest(rig: SteppedRig) -> None:
    """Let all that is under way end."""
    rig.until(lambda: not rig.hi.is_busy())


def end(rig: SteppedRig) -> None:
    rig.settle()
    rig.close()


def take_all(rig: SteppedRig) -> torch.Tensor:
    """All slots of L2, which something else holds until the test frees them."""
    taken = rig.hi.host_pool.alloc(rig.hi.host_pool.size)
    assert taken is not None
    return taken


def rig_that_owes(prompts: Iterable[list[int]], l2_pages: int, **more: Any) -> SteppedRig:
    """A rig with an empty L2 that owes copies of whole prompts, in their order."""
    rig = make_rig(l2_pages, **more)
    taken = take_all(rig)
    for ids in prompts:
        rig.run(ids)
    rest(rig)
    rig.hi.host_pool.free(taken)
    return rig


def test_a_copy_begins_when_a_write_to_l3_has_landed() -> None:
    """L2 of 8 pages: 6 are written to L3, so 2 of the next 4 wait."""
    rig = make_rig(8, l3=True)
    first, second = prompt(1, 6), prompt(2, 4)
    compute(rig, first)
    land(rig)
    compute(rig, second)
    land(rig)
    assert pages_on(rig, second, "L2") == 2 and len(rig.hi.host_backup.owed.nodes) == 1
    rig.backups(1)
    rig.tick()
    land(rig)
    assert pages_on(rig, second, "L2") == 4 and not rig.hi.host_backup.owed.nodes
    rest(rig)
    assert pages_on(rig, second, "L3") == 4, "though nobody used the prompt again"
    assert pages_on(rig, first, "L3") == 6
    end(rig)


def test_a_copy_begins_when_a_load_has_ended() -> None:
    rig = make_rig(4)
    first, second = prompt(1, 4), prompt(2, 3)
    rig.run(first)
    rest(rig)
    rig.hi.evict(EvictParams(num_tokens=100))
    match = rig.hi.match_prefix(MatchPrefixParams(RadixKey(first[:-1])))
    request, _ = rig.start(first)
    # The load has landed, but no tick has seen that.
    assert rig.hi.host_load.loading and match.host_hit_length == 4 * PAGE
    rig.run(second)
    assert len(rig.hi.host_backup.owed.nodes) == 1 and pages_on(rig, second, "L2") == 0
    rig.tick()
    land(rig)
    assert pages_on(rig, second, "L2") == 3
    rig.finish(request)
    end(rig)


def test_a_copy_begins_when_a_read_has_ended() -> None:
    """L2 of 8 pages. A read for 4 pages, of which L3 has 2, holds 4."""
    rig = make_rig(8, l3=True)
    rig.run(prompt(1, 2))
    rest(rig)
    rig.flush()
    rig.arrive("reads", prompt(1, 4))
    compute(rig, prompt(2, 4))
    compute(rig, prompt(3, 1))
    assert len(rig.hi.host_backup.owed.nodes) == 1
    rig.prefetches(None)
    rig.tick()
    rig.tick()
    land(rig)
    assert not rig.hi.host_backup.owed.nodes and pages_on(rig, prompt(3, 1), "L2") == 1
    rig.hi.release_aborted_request("reads")
    end(rig)


def test_nothing_is_tried_while_nothing_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = rig_that_owes([prompt(1, 2)], 4)
    tried: list[None] = []
    monkeypatch.setattr(rig.hi.host_backup, "resume", lambda: tried.append(None))
    assert not rig.hi.is_busy() and not rig.hi.needs_tick
    rig.tick()
    rig.run(prompt(2, 1))
    rig.tick()
    assert not tried, "a copy is under way"
    rig.writes.run()
    rig.tick()
    assert len(tried) == 1
    monkeypatch.undo()
    end(rig)


def test_pages_that_were_used_since_stay() -> None:
    """L2 of 4 pages has a prompt that was used after the one that waits."""
    old, new = prompt(1, 2), prompt(2, 4)
    rig = rig_that_owes([old], 4)
    rig.run(new)
    rest(rig)
    assert (pages_on(rig, new, "L2"), len(rig.hi.host_backup.owed.nodes)) == (4, 1)
    assert rig.run(old) == Reused(device=2 * PAGE)
    rest(rig)
    assert pages_on(rig, old, "L2") == 2 and not rig.hi.host_backup.owed.nodes
    end(rig)


def test_the_first_pages_of_a_prompt_longer_than_l2_stay() -> None:
    rig = make_rig(4)
    for pages in (2, 4, 6, 8):
        rig.run(prompt(1, pages))
        rest(rig)
    copied = rig.hi.metrics.host_written._value.get()
    assert copied == 4 * PAGE == PAGE * pages_on(rig, prompt(1, 4), "L2")
    assert len(rig.hi.host_backup.owed.nodes) == 2, "two ends of it"
    rig.hi.host_backup.resume()
    rest(rig)
    assert rig.hi.metrics.host_written._value.get() == copied
    end(rig)


def test_the_prompt_used_last_comes_first() -> None:
    prompts = [prompt(1, 3), prompt(2, 3), prompt(3, 3)]
    rig = rig_that_owes(prompts, 4)
    taken = take_all(rig)
    rig.run(prompts[0])
    rig.hi.host_pool.free(taken)
    rig.hi.host_backup.resume()
    rest(rig)
    assert [pages_on(rig, ids, "L2") for ids in prompts] == [3, 0, 1]
    end(rig)


def test_what_waits_is_not_locked_and_leaves_the_queue_with_the_tree() -> None:
    rig = rig_that_owes([prompt(1, 2), prompt(2, 2)], 4)
    owed = rig.hi.host_backup.owed.nodes
    assert (len(owed), rig.hi.protected_size()) == (2, 0)
    rig.hi.evict(EvictParams(num_tokens=2 * PAGE))
    assert len(owed) == 1
    (node,) = rig.hi.tree.walk(RadixKey(prompt(2, 2)[:-1]))
    rig.hi.tree.condemn(node, PAGE)
    assert not owed
    end(rig)
    rig = rig_that_owes([prompt(1, 2)], 4)
    rig.flush()
    assert not rig.hi.host_backup.owed.nodes
    end(rig)


def test_all_parts_of_a_node_that_was_split_meanwhile_are_copied() -> None:
    ids = prompt(1, 4)
    rig = rig_that_owes([ids], 8)
    rig.hi.match_prefix(MatchPrefixParams(RadixKey([*ids[: 2 * PAGE], 7, 7])))
    rig.hi.match_prefix(MatchPrefixParams(RadixKey([*ids[: 3 * PAGE], 7, 7])))
    rig.hi.host_backup.resume()
    rest(rig)
    assert pages_on(rig, ids, "L2") == 4 and not rig.hi.host_backup.owed.nodes
    end(rig)


def test_pages_whose_copy_is_under_way_are_not_copied_again() -> None:
    rig = make_rig(8)
    rig.run(prompt(1, 2))
    taken = rig.hi.host_pool.alloc(rig.hi.host_pool.available_size())
    assert taken is not None
    rig.run(prompt(1, 4))
    assert len(rig.hi.host_backup.owed.nodes) == 1
    rig.hi.host_pool.free(taken)
    rig.hi.host_backup.resume()
    rest(rig)
    assert rig.hi.metrics.host_written._value.get() == 4 * PAGE
    assert pages_on(rig, prompt(1, 4), "L2") == 4
    end(rig)


def test_selective_copies_wait_too_and_no_page_that_is_not_due() -> None:
    rig = make_rig(8, hicache_write_policy="write_through_selective")
    taken = take_all(rig)
    rig.run(prompt(1, 2))
    assert not rig.hi.host_backup.owed.nodes
    rig.run(prompt(1, 4))
    rig.hi.host_pool.free(taken)
    rig.hi.host_backup.resume()
    rest(rig)
    assert pages_on(rig, prompt(1, 4), "L2") == 2, "the others were used once"
    end(rig)


def make_state_rig(l2_pages: int, num_states: int) -> SteppedStateRig:
    return SteppedStateRig(
        l1_pages=L1_PAGES, page_size=PAGE, settings=settings(l2_pages), num_states=num_states
    )


@pytest.mark.parametrize("full", ["pages", "states"])
def test_a_node_with_a_state_waits_whole(full: str) -> None:
    rig = make_state_rig(16, 8)
    states = rig.states.host.pool
    pool = states if full == "states" else rig.hi.host_pool
    taken = pool.alloc(pool.size - (PAGE if full == "pages" else 0))
    assert taken is not None
    rig.run(prompt(1, 3))
    rest(rig)
    assert len(rig.hi.host_backup.owed.nodes) == 1 and pages_on(rig, prompt(1, 3), "L2") == 0
    pool.free(taken)
    rig.hi.host_backup.resume()
    rest(rig)
    (node,) = rig.hi.tree.walk(RadixKey(prompt(1, 3)[:-1]))
    assert node.backuped and not node.has_unsaved_state
    end(rig)


def test_a_state_waits_alone_if_l2_has_its_pages() -> None:
    """A prompt is cut in the middle of what L2 has, and leaves a state there."""
    rig = make_state_rig(16, 8)
    states = rig.states.host.pool
    rig.run(prompt(1, 4))
    rest(rig)
    rig.states.host.evict(1)
    taken = states.alloc(states.size)
    assert taken is not None
    rig.run([*prompt(1, 2)[:-1], 7, 8, 9])
    rest(rig)
    upper = rig.hi.tree.walk(RadixKey(prompt(1, 2)[:-1]))[0]
    assert upper.backuped and upper.has_unsaved_state
    assert len(rig.hi.host_backup.owed.nodes) == 2, "and the pages after it"
    states.free(taken)
    rig.hi.host_backup.resume()
    rest(rig)
    assert not upper.has_unsaved_state and not rig.hi.host_backup.owed.nodes
    end(rig)


def test_a_state_that_waits_evicts_no_state_that_was_used_since() -> None:
    rig = make_state_rig(16, 8)
    states = rig.states.host.pool
    taken = states.alloc(states.size)
    assert taken is not None
    rig.run(prompt(1, 2))
    rest(rig)
    states.free(taken[:1])
    rig.run(prompt(2, 2))
    rest(rig)
    assert (pages_on(rig, prompt(2, 2), "L2"), len(rig.hi.host_backup.owed.nodes)) == (2, 1)
    rig.run(prompt(3, 2))
    rest(rig)
    found = [pages_on(rig, prompt(family, 2), "L2") for family in (1, 2, 3)]
    assert (found, len(rig.hi.host_backup.owed.nodes)) == ([0, 2, 2], 1), (
        "a new prompt may evict it"
    )
    (old,) = rig.hi.tree.walk(RadixKey(prompt(2, 2)[:-1]))
    assert old.has_unsaved_state
    states.free(taken[1:])
    end(rig)


# ---- pages of waiting requests -------------------------------------------------------------


def rig_with_a_waiting_request(policy: str = "lru", **more: Any) -> SteppedRig:
    """L2 of 4 pages has the prompt of a waiting request, which L1 lacks."""
    rig = make_rig(4, policy, **more)
    rig.run(prompt(1, 4))
    rest(rig)
    rig.hi.evict(EvictParams(num_tokens=100))
    rig.arrive("waits", prompt(1, 4))
    return rig


def test_copies_evict_no_page_of_a_waiting_request() -> None:
    rig = rig_with_a_waiting_request()
    rig.run(prompt(2, 3))
    rest(rig)
    assert (pages_on(rig, prompt(1, 4), "L2"), pages_on(rig, prompt(2, 3), "L2")) == (4, 0)
    request, reused = rig.admit("waits", prompt(1, 4))
    assert reused == Reused(host=4 * PAGE)
    rig.finish(request)
    rest(rig)
    rig.run(prompt(3, 3))
    rest(rig)
    assert pages_on(rig, prompt(3, 3), "L2") == 3, "it waits no longer"
    end(rig)


def test_copies_for_an_earlier_waiting_request_do() -> None:
    """Its request was retracted, say: it came before the other."""
    rig = make_rig(4)
    rig.arrive("earlier", prompt(2, 3))
    rig.run(prompt(1, 4))
    rest(rig)
    rig.hi.evict(EvictParams(num_tokens=100))
    rig.arrive("waits", prompt(1, 4))
    request, _ = rig.start(prompt(2, 3))
    rig.finish(request)
    rig.hi.note_waiting("earlier", 0, rig.hi.tree.walk(RadixKey(prompt(2, 3)[:-1]))[-1])
    rig.run(prompt(2, 3))
    rest(rig)
    assert pages_on(rig, prompt(2, 3), "L2") == 3
    end(rig)


def test_a_priority_weighs_more_than_the_queue() -> None:
    rig = rig_with_a_waiting_request("priority")
    rig.run(prompt(2, 3))
    assert pages_on(rig, prompt(1, 4), "L2") == 4
    (node,) = rig.hi.tree.walk(RadixKey(prompt(2, 3)[:-1]))
    node.priority = 1
    rig.run(prompt(2, 3))
    rest(rig)
    assert pages_on(rig, prompt(2, 3), "L2") == 3
    end(rig)


@pytest.mark.parametrize("arrival", [0, 2])
def test_a_read_evicts_no_page_of_an_earlier_request(arrival: int) -> None:
    """L2 of 6 pages has 4 of request 1; another one reads 3."""
    rig = make_rig(6, l3=True)
    rig.run(prompt(2, 3))
    rest(rig)
    rig.flush()
    rig.run(prompt(1, 4))
    rest(rig)
    rig.hi.evict(EvictParams(num_tokens=100))
    rig._arrivals = 1
    rig.arrive("waits", prompt(1, 4))
    rig.hi.note_waiting("reads", arrival, rig.hi.root_node)
    rig.hi.prefetch_from_storage("reads", rig.hi.root_node, prompt(2, 3)[:-1])
    (read,) = rig.hi.storage_prefetch.table.reads_of("reads")
    kept = pages_on(rig, prompt(1, 4), "L2")
    assert (kept, len(read.hashes)) == ((4, 2) if arrival else (0, 3))
    for rid in ("waits", "reads"):
        rig.hi.release_aborted_request(rid)
    end(rig)
