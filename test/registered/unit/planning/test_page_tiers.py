"""The order in which pages of a simulated tier leave."""

from __future__ import annotations

from sglang.planning.page_tiers import PageTier, PageUses, front
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")


def tier_of(*prompts: str, size: int = 6) -> tuple[PageTier, PageUses]:
    """A tier with the pages of `prompts`, a letter each, used in this order."""
    uses = PageUses()
    tier = PageTier(size, uses)
    for prompt in prompts:
        tier.pages.update(prompt)
        uses.use(prompt)
    return tier, uses


def test_the_longest_unused_leave_first_and_of_these_the_last() -> None:
    tier, _ = tier_of("abc", "def")
    assert tier.make_room(2) == 2
    assert tier.pages == set("adef")


def test_pinned_and_held_pages_stay() -> None:
    tier, _ = tier_of("abc", "d")
    tier.pin("abc")
    tier.pin("a")
    tier.unpin("abc")
    tier.held = 2
    assert (tier.free, tier.evictable) == (0, 3)
    assert tier.make_room(4) == 3
    assert tier.pages == {"a"}


def test_wanted_pages_leave_last_and_the_one_needed_last_first() -> None:
    tier, uses = tier_of("abc", "def")
    uses.want("ab", 1)
    uses.want("ac", 2)
    assert tier.make_room(4) == 4
    assert tier.pages == {"a", "b"}
    uses.unwant("ab", 1)
    assert uses.wanted_by("b") is None and uses.wanted_by("a") == 2


def test_pages_of_earlier_requests_are_spared() -> None:
    tier, uses = tier_of("abc", "def")
    uses.want("abc", 1)
    uses.want("def", 2)
    assert tier.make_room(6, spares=2) == 3
    assert tier.pages == set("abc")


def test_pages_used_since_stay() -> None:
    tier, _ = tier_of("abc", "de", "f")
    assert tier.make_room(6, used_since=2) == 3
    assert tier.pages == set("def")


def test_the_front_of_a_prompt_may_be_on_two_tiers() -> None:
    one, _ = tier_of("ab")
    two, _ = tier_of("bce")
    assert front("abcde", one) == 2
    assert front("abcde", one, two) == 3
    assert front("abcde", two, begin=1) == 3 and front("abcde", two, begin=3) == 3
