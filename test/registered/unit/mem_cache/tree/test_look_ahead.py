"""Eviction heeds the queue: what waiting requests will use goes last, by the order of the queue."""

from __future__ import annotations

import pytest

from rigs.caches.cache_rig import CacheRig
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.tree.radix_key import RadixKey
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="base-a-test-cpu")

PAGE = 4


def prompt(number: int, pages: int = 2) -> list[int]:
    """Whole pages of its own, and a token."""
    return list(range(100 * number, 100 * number + pages * PAGE + 1))


def held(rig: CacheRig, number: int) -> int:
    """Pages of a prompt that L1 has. Looks without touching."""
    node, pages = rig.tree.root_node, 0
    key = RadixKey(prompt(number)[:-1])
    while (child := node.children.get(key[pages * PAGE :].child_key(PAGE))) is not None:
        pages += len(child.key) // PAGE if child.value is not None else 0
        node = child
    return pages


def rig_of(count: int, policy: str = "lru") -> CacheRig:
    """L1 with prompts 0, 1, ... in it, the oldest first."""
    rig = CacheRig(l1_pages=3 * count, page_size=PAGE, eviction_policy=policy)
    for number in range(count):
        rig.run(prompt(number))
    return rig


def evict(rig: CacheRig, pages: int) -> None:
    rig.tree.evict(EvictParams(num_tokens=pages * PAGE))


def test_what_waits_outlives_what_was_used_later() -> None:
    rig = rig_of(3)
    rig.arrive("a", prompt(0))
    rig.run(prompt(1))
    rig.run(prompt(2))
    evict(rig, 4)
    assert [held(rig, number) for number in range(3)] == [2, 0, 0]
    rig.tree.check_integrity()


def test_of_what_waits_the_last_in_the_queue_goes_first() -> None:
    rig = rig_of(3)
    # Clients in turn: the least recently used is needed next.
    for number in range(3):
        rig.arrive(f"w{number}", prompt(number))
    evict(rig, 2)
    assert [held(rig, number) for number in range(3)] == [2, 2, 0]
    evict(rig, 2)
    assert [held(rig, number) for number in range(3)] == [2, 0, 0]


@pytest.mark.parametrize("leave", ["scheduled", "aborted"])
def test_who_has_left_the_queue_keeps_nothing(leave: str) -> None:
    rig = rig_of(3)
    rig.arrive("a", prompt(0))
    evict(rig, 2)
    assert held(rig, 1) == 0
    if leave == "scheduled":
        rig.tree.note_scheduled("a")
    else:
        rig.tree.release_aborted_request("a")
    rig.run(prompt(2))
    evict(rig, 2)
    assert [held(rig, number) for number in range(3)] == [0, 0, 2]


def test_a_shared_prefix_is_kept_for_the_first_who_needs_it() -> None:
    rig = CacheRig(l1_pages=12, page_size=PAGE)
    shared = list(range(8))
    rig.run([*shared, *range(50, 55)])
    rig.run([*shared, *range(60, 65)])
    rig.run(prompt(3))
    rig.arrive("first", [*shared, 70])
    rig.arrive("second", prompt(3))
    rig.arrive("third", [*shared, *range(50, 55)])
    rig.tree.check_integrity()
    match = rig.tree.match_prefix(MatchPrefixParams(RadixKey(shared)))
    assert match.last_device_node.wanted_by == [0 + 3, 2 + 3]  # three have run before
    evict(rig, 1)  # no request waits for it
    evict(rig, 1)  # what only the third needs
    evict(rig, 2)
    assert held(rig, 3) == 0
    assert len(rig.tree.match_prefix(MatchPrefixParams(RadixKey(shared))).device_indices) == 8


def test_who_came_first_is_first_at_pages_that_come_later() -> None:
    rig = CacheRig(l1_pages=12, page_size=PAGE)
    rig.arrive("first", prompt(1))
    rig.run(prompt(1))
    rig.arrive("second", prompt(1))
    node = rig.tree.match_prefix(MatchPrefixParams(RadixKey(prompt(1)[:-1]))).last_device_node
    (second,) = node.wanted_by
    rig.tree.tree.look_ahead.extend("first", node)
    assert node.wanted_by == [0, second]
    rig.tree.check_integrity()


def test_a_split_and_a_deletion_move_the_mark() -> None:
    rig = rig_of(1)
    rig.arrive("a", prompt(0))
    rig.tree.match_prefix(MatchPrefixParams(RadixKey([*prompt(0)[:PAGE], 999, 998, 997, 996])))
    assert [node.wanted_by for node in rig.tree.nodes()] == [[1], [1]]
    evict(rig, 1)
    rig.tree.check_integrity()
    assert [node.wanted_by for node in rig.tree.nodes()] == [[1]]
    rig.tree.note_scheduled("a")
    assert [node.wanted_by for node in rig.tree.nodes()] == [[]]
    evict(rig, 1)
    rig.tree.check_integrity()


def test_priorities_weigh_more_than_the_queue() -> None:
    rig = rig_of(2, policy="priority")
    first, second = rig.tree.root_node.children.values()
    first.priority, second.priority = 0, 1
    rig.arrive("a", prompt(0))
    evict(rig, 2)
    assert [held(rig, number) for number in range(2)] == [0, 2]


def test_marks_that_come_and_go_leave_no_trace_in_the_heap() -> None:
    rig = rig_of(4)
    for turn in range(1000):
        rig.arrive(f"w{turn}", prompt(turn % 4))
        rig.tree.note_scheduled(f"w{turn}")
    assert len(rig.tree.tree.device.heap) == 4
    evict(rig, 2)
    assert [held(rig, number) for number in range(4)] == [0, 2, 2, 2]


def test_conversations_in_turn_reuse_what_memory_holds() -> None:
    """Six conversations of two pages take turns in an L1 of eleven pages. LRU would hit nothing."""
    reused = {}
    for waits in (False, True):
        rig = CacheRig(l1_pages=11, page_size=PAGE)
        hits = 0
        for turn in range(6):
            for number in range(6):
                if waits:
                    for ahead in range(number, 6):
                        rig.arrive(f"{turn}-{ahead}", prompt(ahead))
                hits += rig.run(prompt(number)).device
                rig.tree.note_scheduled(f"{turn}-{number}")
        rig.settle()
        reused[waits] = hits // PAGE
    assert reused[False] == 0
    # Each round all but what the cache lacks: four of six prompts, at least.
    assert reused[True] >= 5 * 4 * 2
