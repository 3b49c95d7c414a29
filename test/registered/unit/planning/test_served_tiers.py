"""The tiers of a simulated server: flows between them, one at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sglang.planning.page_tiers import Page
from sglang.planning.served_costs import WHOLE_UNIT, Clock, CopyThread, Costs, ServerSizes
from sglang.planning.served_tiers import GATHER_S, PIECES_OF_GET, WRITE_SHARE, Read, ServedTiers
from sglang.srt.layers.attention import dense_attention
from sglang.srt.mem_cache.l3 import storage_backup, storage_writes
from sglang.srt.mem_cache.storage.mooncake_store import mooncake_store
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")

WITH_L3 = Costs(linear=1.0, by_pair=0.0, step=0.5, by_context=0.0, read=0.1, write=0.2)
TIERS = ServerSizes(page_size=10, l1=10_000, l2=1_000, chunk=1_000, threshold=10)


def tiers_with_a_read() -> tuple[Clock, ServedTiers, Read]:
    """L3 has the pages "abcdefgh", L1 the first of them, and the others are read."""
    clock = Clock()
    store: set[Page] = set("abcdefgh")
    tiers = ServedTiers(clock, WITH_L3, TIERS, CopyThread(clock), store, lambda: None)
    tiers.l1.pages.add("a")
    tiers.uses.use("a")
    read = tiers.begin_read("abcdefgh", 1, 0, 0, 1e9)
    assert read is not None
    return clock, tiers, read


@pytest.mark.parametrize("is_in_l1", [True, False])
def test_what_left_l1_is_not_copied_when_l2_has_room(is_in_l1: bool) -> None:
    clock = Clock()
    copier, store = CopyThread(clock), set[Page]("abcd")
    tiers = ServedTiers(clock, WITH_L3, replace(TIERS, l2=140), copier, store, lambda: None)
    tiers.l2.pages.update("1234567")
    tiers.l2.pin("1234567")
    assert tiers.begin_read("abcdefgh", 0, 0, 0, 1e9) is not None
    tiers.l1.pages.update("xy")
    tiers.uses.use("xy")
    tiers.copy("xy")
    assert "x" not in tiers.l2.pages  # The read holds the other seven, and needs four.
    if not is_in_l1:
        tiers.l1.pages.clear()
    clock.run()
    assert ("y" in tiers.l2.pages) is is_in_l1


def test_read_pages_need_those_before_them() -> None:
    clock, tiers, read = tiers_with_a_read()
    clock.run()
    assert tiers.publish(read) == 7 and tiers.l2.pages == set("bcdefgh")
    clock, tiers, read = tiers_with_a_read()
    tiers.l1.pages.clear()
    clock.run()
    assert tiers.publish(read) == 0 and not tiers.l2.pages


def test_a_read_holds_nothing_after_its_end() -> None:
    for ends_first in (True, False):
        clock, tiers, read = tiers_with_a_read()
        assert tiers.l2.held == 7
        if ends_first:
            clock.run()
        tiers.publish(read)
        clock.run()
        assert tiers.l2.held == 0


def test_what_was_read_is_not_written() -> None:
    clock, tiers, read = tiers_with_a_read()
    clock.run()
    tiers.publish(read)
    tiers.copy("abcdefgh")
    assert (len(tiers.l2.pages), tiers.l2.evictable) == (8, 7)  # "a" is being written.
    tiers.uses.use("abcdefghi")
    tiers.copy("abcdefghi")
    # The pages before one that is written stay.
    assert (len(tiers.l2.pages), tiers.l2.evictable) == (9, 0)


def test_nothing_is_written_after_a_page_that_l2_lacks() -> None:
    clock, store = Clock(), set[Page]()
    tiers = ServedTiers(
        clock, WITH_L3, replace(TIERS, l2=40), CopyThread(clock), store, lambda: None
    )
    tiers.l2.pages.update("123b")
    tiers.l2.pin("123b")
    tiers.uses.use("ab")
    tiers.copy("ab")
    clock.run()
    assert not store


def test_a_read_does_not_evict_the_pages_that_it_continues() -> None:
    clock = Clock()
    sizes = replace(TIERS, l2=40)
    tiers = ServedTiers(clock, WITH_L3, sizes, CopyThread(clock), set("abcd"), lambda: None)
    tiers.l2.pages.update("abyz")
    tiers.uses.use("ab")
    tiers.uses.use("yz")
    assert tiers.begin_read("abcd", 2, 0, 0, 1e9) is not None
    assert tiers.l2.pages == set("ab")


def test_a_read_too_short_to_make_evicts_nothing() -> None:
    sizes = replace(TIERS, l2=40, threshold=30)
    clock = Clock()
    tiers = ServedTiers(clock, WITH_L3, sizes, CopyThread(clock), set("abc"), lambda: None)
    tiers.l2.pages.update("wxyz")
    tiers.uses.use("wxyz")
    assert tiers.begin_read("abc", 0, 0, 0, 1e9) is None
    assert tiers.l2.pages == set("wxyz")


def test_a_read_that_found_no_room_is_tried_again() -> None:
    clock, tiers, read = tiers_with_a_read()
    tiers.l2.held += 93
    assert tiers.begin_read("klmn", 0, 1, 0, 1e9) is None and tiers.is_full
    clock.run()
    assert read.has_ended and not tiers.is_full


def test_numbers_are_those_of_the_engine() -> None:
    assert WRITE_SHARE == storage_backup._BACKUP_SHARE
    assert GATHER_S == storage_writes._GATHER_S
    assert PIECES_OF_GET == mooncake_store._CONCURRENT_GETS
    assert WHOLE_UNIT == dense_attention.UNIT
