"""Hints of sessions: an agent that comes back finds its prefix, and a stranger is bounded."""

from __future__ import annotations

import random
from itertools import product
from pathlib import Path

import pytest

from rigs.caches.cache_rig import SESSION_TTL, CacheRig, HiCacheSettings
from rigs.caches.state_rig import StateRig
from rigs.schedulers.scheduler_rig import SchedulerRig
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.tree.radix_key import RadixKey
from sglang.srt.mem_cache.tree.session_hints import MAX_SESSIONS, Session
from sglang.srt.messages.cache_key import combine_extra_key
from sglang.srt.messages.io_struct import SessionReqInput
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

PAGE = 4
AGENT = list(range(1, 10))
"""Two pages and a token, of which requests reuse the pages."""


def prompt(number: int) -> list[int]:
    """Two pages of its own, and a token."""
    return list(range(1000 + 100 * number, 1000 + 100 * number + 2 * PAGE + 1))


def rig_of(
    l1_pages: int,
    *,
    share: float = 0.5,
    ratio: float = 0.0,
    policy: str = "lru",
    write: str = "",
    kind: type[CacheRig] = CacheRig,
) -> CacheRig:
    """A rig whose tiers below L1 have `ratio` times its pages."""
    settings = None
    if ratio:
        # Half a page more, so that rounding gives whole pages.
        settings = HiCacheSettings(
            hicache_ratio=ratio + 0.5 / l1_pages, hicache_write_policy=write or "write_through"
        )
    return kind(
        l1_pages=l1_pages,
        page_size=PAGE,
        settings=settings,
        session_share=share,
        eviction_policy=policy,
    )


def burst(rig: CacheRig, count: int, first: int = 0, session: str = "") -> None:
    """Other prompts; with `session`, each is of another session of a stranger."""
    for number in range(first, first + count):
        rig.run(prompt(number), session=f"{session}{number}" if session else None)
        rig.settle()


@pytest.mark.parametrize("policy", ["lru", "lfu", "fifo", "slru", "mru"])
def test_an_agent_that_comes_back_after_a_burst_hits(policy: str) -> None:
    for session, found in (("agent", 2 * PAGE), (None, 0)):
        rig = rig_of(12, policy=policy)
        rig.run(AGENT, session=session)
        # Most recently used pages leave first: the agent's must not be the next to leave.
        burst(rig, 12)
        if policy == "mru" and session is None:
            continue
        assert rig.run(AGENT).total == found
        rig.tree.check_integrity()


@pytest.mark.parametrize("write", ["write_through", "write_through_selective", "write_back"])
def test_l2_keeps_what_l1_evicts(write: str) -> None:
    for session, found in (("agent", 2 * PAGE), (None, 0)):
        # A quarter of the budget of L1 is a page: too little for the prefix.
        rig = rig_of(8, ratio=2, write=write)
        rig.run(AGENT, session=session)
        rig.settle()
        burst(rig, 16)
        back = rig.run(AGENT)
        assert (back.device, back.host) == (0, found)
        rig.settle()
        rig.close()


def test_a_short_prefix_stays_in_l1_too() -> None:
    rig = rig_of(16, ratio=2)
    rig.run(AGENT, session="agent")
    burst(rig, 16)
    assert rig.run(AGENT).device == 2 * PAGE
    rig.close()


def test_the_last_prefix_of_a_session_replaces_the_one_before() -> None:
    rig = rig_of(12)
    rig.run(AGENT, session="agent")
    rig.run(prompt(50), session="agent")
    burst(rig, 12)
    assert rig.run(prompt(50)).total == 2 * PAGE
    assert rig.run(AGENT).total == 0
    rig.run(AGENT[:5])  # Splits, and a longer prefix than the last.
    rig.run([*prompt(50), *range(8)], session="agent")
    rig.tree.check_integrity()


def test_a_hint_ends_after_its_time() -> None:
    rig = rig_of(12)
    rig.tree.begin_tick(1000.0)
    rig.run(AGENT, session="agent")
    rig.tree.begin_tick(1000.0 + SESSION_TTL - 1)
    burst(rig, 12)
    rig.tree.begin_tick(1000.0 + SESSION_TTL)
    assert rig.tree.tree.sessions.tiers[0].tokens == 0
    burst(rig, 6, first=20)
    assert rig.run(AGENT).total == 0


def test_many_hints_end_in_several_ticks() -> None:
    rig = rig_of(400)
    rig.tree.begin_tick(0.0)
    for number in range(40):
        rig.run(prompt(number), session=f"s{number}")
    left = []
    for tick in range(4):
        rig.tree.begin_tick(SESSION_TTL + tick)
        left.append(rig.tree.tree.sessions.tiers[0].tokens // (2 * PAGE))
        rig.tree.check_integrity()
    assert left == [24, 8, 0, 0]


def test_a_hint_is_no_lock() -> None:
    rig = rig_of(12)
    rig.run(AGENT, session="agent")
    rig.tree.evict(EvictParams(num_tokens=12 * PAGE))
    assert rig.allocator.available_size() == 12 * PAGE
    assert rig.tree.tree.sessions.tiers[0].tokens == 0
    rig.tree.check_integrity()


def test_sessions_of_other_keys_are_other_sessions() -> None:
    rig = rig_of(12)
    rig.run(AGENT, "tenant", session="agent")
    rig.run(prompt(50), "stranger", session="agent")
    burst(rig, 12)
    assert rig.run(AGENT, "tenant").total == 2 * PAGE


def test_ten_thousand_sessions_take_their_share_and_no_more() -> None:
    rig = rig_of(40, share=0.25)
    hints = rig.tree.tree.sessions.tiers[0]
    assert hints.budget == 10 * PAGE
    for number in range(100):
        ids = [number, *range(PAGE)]
        rig.run(ids, session=f"s{number}")
        end = rig.tree.match_prefix(MatchPrefixParams(RadixKey(ids))).last_device_node
        for other in range(100):
            rig.tree.tree.sessions.keep(Session(None, None, f"s{number}-{other}"), end)
            assert hints.tokens <= hints.budget
    rig.tree.check_integrity()
    # Others have the rest: fourteen prompts of two pages are there after the last.
    burst(rig, 14)
    assert sum(rig.run(prompt(number)).total for number in range(14)) == 14 * 2 * PAGE


def test_the_number_of_sessions_is_bounded() -> None:
    rig = rig_of(12)
    for number in range(MAX_SESSIONS + 10):
        rig.tree.tree.sessions.keep(Session(None, None, f"s{number}"), rig.tree.root_node)
    rig.run(AGENT, session="agent")
    [end] = [node for node in rig.tree.nodes() if not node.children]
    for number in range(MAX_SESSIONS + 10):
        rig.tree.tree.sessions.keep(Session(None, None, f"s{number}"), end)
    # One tenant has at most four fifths.
    assert end.kept_on_device == MAX_SESSIONS * 4 // 5
    rig.tree.check_integrity()


def test_without_a_share_there_are_no_hints() -> None:
    rig = rig_of(12, share=0.0)
    rig.run(AGENT, session="agent")
    assert not any(node.kept_on_device for node in rig.tree.nodes())


def test_a_tenant_ends_only_its_own_marks() -> None:
    """A stranger's many short sessions leave the agent's prefix marked and cached."""
    rig = rig_of(40, share=0.5)
    rig.run(AGENT, "tenant", session="agent")
    hints = rig.tree.tree.sessions.tiers[0]
    for number in range(240):
        rig.run([number] * (PAGE + 1), "stranger", session=f"s{number}")
        # 14 of the 18 pages that the agent leaves are no more than four times the rest.
        assert hints.tokens <= (2 + 14) * PAGE
    assert hints.tokens == 16 * PAGE
    assert rig.run(AGENT, "tenant").total == 2 * PAGE
    rig.tree.check_integrity()


def test_a_tenants_newer_sessions_replace_its_older_ones() -> None:
    rig = rig_of(40, share=0.5)
    for number in range(9):
        rig.run(prompt(number), "tenant", session=f"s{number}")
    # Eight sessions of two pages are four fifths of the budget.
    burst(rig, 20, first=20)
    found = [rig.run(prompt(number), "tenant").total > 0 for number in range(9)]
    assert found == [False, *[True] * 8]


def test_a_long_prefix_may_take_what_is_free_but_no_more() -> None:
    """The prefix has the only session of its tenant. A prefix that does not fit costs nothing."""
    rig = rig_of(40, share=0.5)
    hints = rig.tree.tree.sessions.tiers[0]
    long = list(range(18 * PAGE + 1))
    rig.run(long, "tenant", session="long")
    assert hints.tokens == 18 * PAGE
    rig.run(AGENT, "second", session="agent")
    assert hints.tokens == hints.budget
    rig.run(prompt(1), "third", session="agent")
    rig.run(long[: 3 * PAGE + 1], "second", session="too long now")
    assert hints.tokens == hints.budget
    rig.tree.check_integrity()


def test_sessions_take_their_share_of_states_and_no_more() -> None:
    """Other prompts keep the rest of the states."""
    rig = StateRig(l1_pages=64, page_size=PAGE, session_share=0.5)
    pool = rig.tree.tree.components[0].device.pool
    for number in range(pool.size):
        rig.run(prompt(number), session=f"s{number}")
    kept = [node.states[0].kept_on_device for node in rig.tree.nodes()]
    assert 0 < sum(kept) <= pool.size // 2


@pytest.mark.parametrize(
    ("ours", "theirs", "is_same_tenant"),
    [
        (("a", "salt"), ("b", "salt"), True),
        (("a", "salt"), ("a", "other"), False),
        (("a", None), ("b", None), False),
        ((None, None), ("b", None), False),
        ((None, "salt"), ("a", "salt"), True),
    ],
)
def test_a_request_names_its_session_and_its_tenant(
    tmp_path: Path,
    ours: tuple[str | None, str | None],
    theirs: tuple[str | None, str | None],
    is_same_tenant: bool,
) -> None:
    """Equal names under different keys are different sessions, and a salt is one tenant."""
    rig = SchedulerRig(tmp_path, pool_tokens=64, page_size=PAGE, keep_session_share=0.5)
    hints = rig.tree.tree.sessions.tiers[0]
    for number, parts in enumerate((ours, theirs)):
        key = combine_extra_key(*parts)
        rig.run(rig.request(f"r{number}", [number] * 6, session_id="agent", extra_key=key))
        rig.settle()
    first, second = hints._ends
    assert (first.name, second.name) == ("agent", "agent") and first.key != second.key
    assert (first.tenant == second.tenant) == is_same_tenant
    assert len(hints._shares) == (1 if is_same_tenant else 2)


@pytest.mark.parametrize("kind", [CacheRig, StateRig])
@pytest.mark.parametrize("seed", range(2))
def test_marks_are_those_of_the_sessions_in_any_run(seed: int, kind: type[CacheRig]) -> None:
    rng = random.Random(seed)
    rig = rig_of(24, ratio=1.5, share=0.4, kind=kind)
    for tick in range(80):
        rig.tree.begin_tick(tick * SESSION_TTL / 20)
        shared = [rng.randrange(2) for _ in range(2 * PAGE)]
        ids = [*shared[: rng.randrange(2 * PAGE)], *range(rng.randrange(1, 12))]
        session = f"s{rng.randrange(6)}" if rng.random() < 0.6 else None
        rig.run([*ids, 99], rng.choice([None, "k"]), session=session)
        if rng.random() < 0.2:
            rig.tree.evict(EvictParams(num_tokens=rng.randrange(40)))
        rig.tree.check_integrity()
        for component, hints in product(rig.tree.tree.components, rig.tree.tree.sessions.tiers):
            kept = [component.of(node).kept_on_device for node in rig.tree.nodes()]
            assert sum(kept) <= 0.4 * component.device.pool.size
            assert len(hints._ends) <= 0.4 * component.host.pool.size
    rig.close()


def test_the_scheduler_keeps_the_prefix_of_a_session(tmp_path: Path) -> None:
    """Requests carry the session, ticks the time."""
    rig = SchedulerRig(tmp_path, pool_tokens=64, page_size=PAGE, keep_session_share=0.5)
    agent = list(range(1, 14))
    kept = rig.tree.tree.sessions.tiers[0]
    for session, found in (("agent", True), (None, False)):
        rig.run(rig.request(f"first {session}", agent, session_id=session))
        assert (kept.tokens > 0) == found
        for number in range(5):
            rig.run(rig.request(f"{session} {number}", [number] * 13))
        rig.run(rig.request(f"back {session}", agent))
        last = rig.results[f"back {session}"].last
        assert last is not None
        assert (last.cached_tokens_details.total >= 12) == found
        rig.now += rig.server_args.keep_session_seconds
        rig.step()
        assert kept.tokens == 0
        for number in range(5):
            rig.run(rig.request(f"after {session} {number}", [20 + number] * 13))
    rig.check()


def test_a_session_is_renewed_and_closed_under_its_own_key(tmp_path: Path) -> None:
    rig = SchedulerRig(tmp_path, pool_tokens=64, page_size=PAGE, keep_session_share=0.5)
    ttl = rig.server_args.keep_session_seconds
    kept = rig.tree.tree.sessions.tiers[0]

    def tell(key: str | None = None, *, is_closed: bool = False) -> None:
        rig.step(SessionReqInput(session_id="s", extra_key=key, is_closed=is_closed))

    tell()
    tell(is_closed=True)
    assert kept.tokens == 0, "an unknown one leaves nothing"
    rig.run(rig.request("a", AGENT, session_id="s"))
    marked = kept.tokens
    rig.now += ttl - 5
    tell("other")
    tell("other", is_closed=True)
    assert kept.tokens == marked > 0
    tell()
    rig.now += ttl - 5
    rig.step()
    assert kept.tokens == marked, "it was renewed"
    tell(is_closed=True)
    assert kept.tokens == 0 and not kept._ends and not kept._shares
    assert "closed" in rig.scheduler.state.metrics.render(rig.scheduler.state.load()), "why"
    rig.run(rig.request("b", AGENT, session_id="s"))
    assert kept.tokens == marked, "a later request marks it again"
    rig.check()


def test_a_renewed_session_is_not_the_next_to_make_room() -> None:
    rig = rig_of(16)
    hints = rig.tree.tree.sessions.tiers[0]
    for number in range(3):
        rig.run(prompt(number), session=f"s{number}")
    rig.tree.renew_session(Session(None, None, "s0"))
    rig.run(prompt(3), session="s3")
    assert [session.name for session in hints._ends] == ["s2", "s0", "s3"]
    rig.tree.check_integrity()


def test_a_state_is_kept_with_its_prefix() -> None:
    """A prefix of a model with recurrent states is of use only with the state at its end."""
    for session, found in (("agent", True), (None, False)):
        rig = StateRig(l1_pages=64, page_size=PAGE, session_share=0.5)
        rig.run(AGENT, session=session)
        pool = rig.tree.tree.components[0].device.pool
        burst(rig, 3 * pool.size)
        assert (rig.run(AGENT).total > 0) == found
        rig.tree.check_integrity()
