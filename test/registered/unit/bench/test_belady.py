"""Belady's choice among leaf pages: small traces by hand, and comparison with all choices."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rigs.bench.belady import belady_hits, unlimited_hits
from rigs.bench.page_trace import PageTrace, make_page_trace
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")


def paths(*requests: str) -> PageTrace:
    """A trace whose pages are letters; all pages of a request may hit."""
    return make_page_trace([([ord(letter) for letter in one], len(one)) for one in requests])


def test_a_page_is_identified_by_its_label_and_those_before_it() -> None:
    trace = paths("ab", "ac", "b")
    assert trace.parents == [-1, 0, 0, -1]
    assert [request.pages for request in trace.requests] == [(0, 1), (0, 2), (3,)]
    assert (trace.num_pages, trace.longest_pages) == (4, 2)


def test_the_page_with_the_farthest_use_is_evicted() -> None:
    # At c, of a (used in 3 steps) and b (used next), a goes: 1 hit. LRU would drop a too; at the
    # second b, it is c or b, of which neither comes again.
    assert belady_hits(paths("a", "b", "c", "b", "a"), 2).hit_pages == 1
    # LRU in two pages hits nothing of this loop; knowing the future, a and then c stay.
    assert belady_hits(paths("a", "b", "c", "a", "b", "c"), 2).hit_pages == 2


def test_only_leaves_are_evicted() -> None:
    # ab is held; c needs a page: b goes, not its parent a, although both are used at the end.
    got = belady_hits(paths("ab", "c", "ab"), 2)
    assert (got.hit_pages, got.evicted_pages) == (1, 2)


def test_a_request_in_service_keeps_its_own_pages() -> None:
    # abc extends ab at full capacity: only d may go.
    got = belady_hits(paths("ab", "d", "abc", "d"), 3)
    assert (got.hit_pages, got.evicted_pages) == (2, 2)


def test_the_last_prompt_token_is_computed() -> None:
    # One page that a prompt just fills is never a hit of the same prompt ...
    same = make_page_trace([([1], 0), ([1], 0)])
    assert unlimited_hits(same).hit_pages == belady_hits(same, 1).hit_pages == 0
    # ... but of a longer one.
    longer = make_page_trace([([1], 0), ([1, 2], 2)])
    assert unlimited_hits(longer).hit_pages == belady_hits(longer, 2).hit_pages == 1


def test_a_request_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="longest request has 3"):
        belady_hits(paths("abc"), 2)


def best_hits(trace: PageTrace, capacity: int) -> int:
    """The most hits of any choice of leaves, found by trying all."""

    @cache
    def best(index: int, held: frozenset[int]) -> int:
        if index == len(trace.requests):
            return 0
        request = trace.requests[index]
        hits = 0
        while hits < request.usable and request.pages[hits] in held:
            hits += 1
        full = held | set(request.pages)
        return hits + max(best(index + 1, left) for left in shrunk(full, request.pages))

    def shrunk(held: frozenset[int], kept: Sequence[int]) -> set[frozenset[int]]:
        """Every prefix-closed subset of `capacity` pages that has the request's own."""
        done, frontier = set(), {held}
        while frontier:
            one = frontier.pop()
            if len(one) <= capacity:
                done.add(one)
                continue
            parents = {trace.parents[page] for page in one}
            frontier |= {one - {page} for page in one if page not in parents and page not in kept}
        return done

    return best(0, frozenset())


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(st.text("abc", min_size=1, max_size=3), min_size=1, max_size=8),
    spare=st.integers(0, 2),
)
def test_no_other_choice_hits_more(requests: list[str], spare: int) -> None:
    trace = paths(*requests)
    capacity = trace.longest_pages + spare
    got = belady_hits(trace, capacity).hit_pages
    assert got == best_hits(trace, capacity)
    assert belady_hits(trace, trace.num_pages).hit_pages == unlimited_hits(trace).hit_pages
