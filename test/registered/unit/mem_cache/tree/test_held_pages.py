"""The server process knows which pages a DP group's tree has, from the group's reports."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from types import FrameType

import pytest

from rigs.caches.cache_rig import CacheRig, HiCacheSettings
from sglang.srt.managers.tokenizer.group_prefixes import GroupPrefixes
from sglang.srt.mem_cache.tree import held_pages
from sglang.srt.mem_cache.tree.held_pages import HeldPages
from sglang.srt.mem_cache.tree.radix_key import hash_str_to_int64, token_array
from sglang.srt.messages.cache_key import combine_extra_key
from sglang.srt.messages.io_struct import SERVER_DECODER, encode
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

PAGE = 4
KEYS = [None, None, combine_extra_key("a", None), combine_extra_key(None, "a")]


class Told:
    """The server's side of a rig, which is group 1 of 2."""

    def __init__(self, tiers: int) -> None:
        self.notes = HeldPages(PAGE, dp_rank=1)
        settings = HiCacheSettings() if tiers > 1 else None
        self.rig = CacheRig(l1_pages=12, page_size=PAGE, settings=settings, held_pages=self.notes)
        self.prefixes = GroupPrefixes(2, PAGE)
        self.num_reports = 0

    def hear(self) -> None:
        """Apply the report of a tick, and assert that the server knows the pages of both tiers."""
        report = self.notes.take()
        if report is not None:
            self.num_reports += 1
            message = SERVER_DECODER.decode(encode(report))
            assert message == report
            self.prefixes.apply(report)
        nodes = [one for one in self.rig.tree.tree.nodes() if not one.evicted or one.backuped]
        pages = {hash_str_to_int64(page) for node in nodes for page in node.page_hashes(PAGE)}
        assert self.prefixes._held == [set(), pages]

    def length(self, prompt: list[int], key: str | None = None) -> int:
        """The prompt's prefix in the group."""
        other, own = self.prefixes.lengths(token_array(prompt), key)
        assert other == 0
        return own


@pytest.mark.parametrize(("tiers", "seed"), [(1, 0), (2, 1), (2, 2)])
def test_reports_tell_what_both_tiers_have(tiers: int, seed: int) -> None:
    rng = random.Random(seed)
    told = Told(tiers)
    rig, left, condemned = told.rig, 0, 0
    before: set[int] = set()
    for _ in range(200):
        pages = [rng.choice(((0, 1, 2, 0), (1, 1, 0, 2))) for _ in range(rng.randrange(8))]
        prompt = [token for page in pages for token in page] + [3] * rng.randrange(1, 4)
        key = rng.choice(KEYS)
        told.hear()
        found = told.length(prompt, key)
        reused = rig.run(prompt, extra_key=key).total
        # A prefix on the host is not loaded while the device has no room.
        assert reused == found or (tiers > 1 and reused < found)
        if rng.random() < 0.03:
            rig.flush()
            told.hear()
            assert told.prefixes._held[1] == set()
        if rng.random() < 0.05 and (nodes := list(rig.tree.tree.nodes())):
            rig.settle()
            rig.tree.tree.condemn(rng.choice(nodes), 0)
            condemned += 1
        told.hear()
        left += len(before - told.prefixes._held[1])
        before = set(told.prefixes._held[1])
    assert left > 50 and condemned
    rig.settle()
    assert told.num_reports > 100
    rig.tree.shutdown()


def test_a_page_that_leaves_one_of_two_tiers_is_no_news() -> None:
    told = Told(2)
    told.rig.run([*range(8), 9])
    told.rig.settle()
    told.hear()
    node = next(iter(told.rig.tree.tree.nodes()))
    assert node.backuped and not node.evicted
    told.rig.tree.tree.device.drop(node)
    assert told.notes.take() is None
    told.hear()
    assert told.length([*range(8), 9]) == 8
    told.rig.tree.tree.host.drop(node)
    report = told.notes.take()
    assert report is not None and len(report.removed) == 2 * 8 and not report.stored
    told.rig.tree.shutdown()


def test_a_page_that_comes_back_in_the_same_tick_is_there() -> None:
    told = Told(1)
    told.rig.run([*range(4), 9])
    told.hear()
    told.rig.tree.tree.device.evict(PAGE)
    told.rig.run([*range(4), 9])
    report = told.notes.take()
    assert report is not None and len(report.stored) == 8 and not report.removed
    told.rig.tree.shutdown()


def test_nobody_pays_for_reports_that_nobody_wants(tmp_path: Path) -> None:
    rig = CacheRig(l1_pages=12, page_size=PAGE)
    ran: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename == held_pages.__file__:
            ran.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        for start in range(0, 200, 20):
            rig.run([*range(start, start + 20), 7])
    finally:
        sys.setprofile(None)
    assert ran == []
    assert all(node.hash_value is None for node in rig.tree.tree.nodes())
    rig.tree.shutdown()
