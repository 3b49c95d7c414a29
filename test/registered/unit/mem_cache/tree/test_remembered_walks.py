"""A second walk along a key: it compares no tokens, and gives what a first one would give."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from rigs.caches.cache_rig import CacheRig, HiCacheSettings
from sglang.srt.environ import envs
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams, MatchResult
from sglang.srt.mem_cache.tree.radix_key import RadixKey
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

PAGE = 4
PROMPT = list(range(24))
"""Six pages of four tokens."""
LONGER = list(range(28))


def match(rig: CacheRig, key: RadixKey) -> MatchResult:
    return rig.tree.match_prefix(MatchPrefixParams(key))


def lengths(rig: CacheRig, key: RadixKey) -> list[int]:
    """Lengths of the nodes along `key`."""
    return [len(node.key) for node in rig.tree.tree.walk(key)]


def test_a_second_walk_compares_no_tokens_and_touches_its_nodes() -> None:
    rig = CacheRig(page_size=PAGE)
    rig.run(PROMPT[:13])
    rig.run(PROMPT)
    key = RadixKey(PROMPT)
    first = match(rig, key)
    assert lengths(rig, key) == [12, 12]
    match(rig, RadixKey(PROMPT[:12]))
    with mock.patch.object(RadixKey, "match", side_effect=AssertionError("compared")):
        second = match(rig, key)
        with pytest.raises(AssertionError, match="compared"):
            match(rig, RadixKey(PROMPT))
    assert second.device_indices.tolist() == first.device_indices.tolist()
    assert second.last_device_node is first.last_device_node
    above, below = rig.tree.nodes()
    assert above.last_access_time == below.last_access_time > 0, "used by the last walk, not before"
    rig.settle()


def _evict(rig: CacheRig) -> None:
    rig.tree.evict(EvictParams(num_tokens=PAGE))


def _go_on(rig: CacheRig) -> None:
    rig.run(LONGER)


def _diverge(rig: CacheRig) -> None:
    rig.run([*PROMPT[:10], *range(90, 99)])


def _split(rig: CacheRig) -> None:
    match(rig, RadixKey([*PROMPT[:10], 90, 91, 92, 93]))


def _reset(rig: CacheRig) -> None:
    rig.flush()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (_evict, [12]),
        (_go_on, [12, 12, 4]),
        (_diverge, [8, 4, 12]),
        (_split, [8, 4, 12]),
        (_reset, []),
    ],
    ids=["eviction", "insertion", "divergence", "split", "reset"],
)
def test_a_walk_is_forgotten_when_the_nodes_are_others(
    change: Callable[[CacheRig], None], expected: list[int]
) -> None:
    rig = CacheRig(page_size=PAGE)
    rig.run(PROMPT[:13])
    rig.run(PROMPT)
    key = RadixKey(LONGER)
    assert lengths(rig, key) == [12, 12]
    change(rig)
    assert lengths(rig, key) == lengths(rig, RadixKey(LONGER)) == expected
    slots = match(rig, key).device_indices.tolist()
    assert len(slots) == sum(expected)
    held = {
        slot for node in rig.tree.nodes() if node.value is not None for slot in node.value.tolist()
    }
    assert set(slots) <= held, "slots that the tree has given back"
    rig.settle()


def test_what_a_caller_does_to_its_path_is_not_remembered() -> None:
    rig = CacheRig(page_size=PAGE)
    rig.run(PROMPT)
    key = RadixKey(PROMPT)
    rig.tree.tree.walk(key).clear()
    assert lengths(rig, key) == [24]
    rig.settle()


def test_a_walk_that_would_be_wrong_is_found_by_the_check() -> None:
    rig = CacheRig(page_size=PAGE)
    rig.run(PROMPT)
    key = RadixKey(PROMPT)
    rig.tree.tree.walk(key)
    rig.tree.tree._walks[key].clear()
    with pytest.raises(AssertionError, match="another walk"):
        rig.tree.check_integrity()


def test_pages_that_leave_the_device_between_two_walks_are_found_on_the_host() -> None:
    rig = CacheRig(page_size=PAGE, settings=HiCacheSettings())
    rig.run(PROMPT)
    rig.settle()
    key = RadixKey(PROMPT)
    before = match(rig, key)
    assert (len(before.device_indices), before.host_hit_length) == (24, 0)
    rig.tree.evict(EvictParams(num_tokens=24))
    after = match(rig, key)
    assert (len(after.device_indices), after.host_hit_length) == (0, 24)
    assert after.last_device_node is rig.tree.root_node
    rig.close()


def test_pages_that_come_from_l3_between_arrival_and_admission_are_used(tmp_path: Path) -> None:
    settings = HiCacheSettings(
        hicache_storage_backend="file",
        hicache_storage_backend_extra_config=json.dumps({"prefetch_threshold": PAGE}),
    )
    with envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.override(str(tmp_path)):
        rig = CacheRig(page_size=PAGE, settings=settings)
        rig.run(PROMPT)
        rig.settle()
        rig.flush()
        key = RadixKey(PROMPT)
        on_arrival = match(rig, key)
        assert len(on_arrival.device_indices) + on_arrival.host_hit_length == 0
        rig.tree.note_waiting("r", 0, on_arrival.last_host_node)
        rig.hi.prefetch_from_storage("r", on_arrival.last_host_node, PROMPT)
        rig.until(lambda: rig.tree.check_prefetch_progress("r"))
        assert match(rig, key).host_hit_length == 24
        rig.tree.release_aborted_request("r")
        rig.close()
