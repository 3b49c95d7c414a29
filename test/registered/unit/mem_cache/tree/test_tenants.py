"""Use of the cache by tenants: labels, counts, evictions, and what random salts can do to them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from rigs.caches.cache_rig import CacheRig, HiCacheSettings
from rigs.schedulers.scheduler_rig import SchedulerRig, greedy
from rigs.schedulers.scheduler_rig import prompt as words
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.cache_view import cache_view
from sglang.srt.mem_cache.tree import tenants
from sglang.srt.mem_cache.tree.tenants import MAX_LABELS, NO_KEY, OTHERS, Evictor, TenantUse
from sglang.srt.messages.cache_key import combine_extra_key
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

PAGE = 4
SECRET = b"k" * 32


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(name="clock")
def make_clock() -> Clock:
    return Clock()


@pytest.fixture(name="use")
def make_use(clock: Clock) -> TenantUse:
    return TenantUse(key=SECRET, clock=clock)


def ask(use: TenantUse, salt: str | None, count: int = 1, device: int = 0) -> None:
    for _ in range(count):
        use.count(combine_extra_key(None, salt), 10, (device, 0, 0))


def labels(use: TenantUse) -> set[str]:
    return {one["tenant"] for one in use.latest()}


def label_of(salt: str) -> str:
    alone = TenantUse(key=SECRET)
    ask(alone, salt)
    (label,) = labels(alone) - {NO_KEY}
    return label


def row_of(use: TenantUse, label: str) -> dict[str, Any]:
    (row,) = (one for one in use.latest() if one["tenant"] == label)
    return row


def prompt(seed: int, pages: int) -> list[int]:
    return random.Random(seed).choices(range(1000), k=pages * PAGE)


# ---- labels ------------------------------------------------------------------------------------


def test_a_tenant_is_a_salt_or_else_an_extra_key(use: TenantUse) -> None:
    for extra_key, salt in (("lora", "acme"), (None, "acme"), ("lora", None), (None, None)):
        use.count(combine_extra_key(extra_key, salt), 10, (4, 2, 1))
    assert {one["requests"] for one in use.latest()} == {2, 1}
    acme = row_of(use, label_of("acme"))
    assert (acme["requests"], acme["hits"]) == (2, 2), "two extra keys, one salt"
    assert acme["tokens"] == {"device": 8, "host": 4, "storage": 2, "computed": 6}
    assert row_of(use, NO_KEY)["requests"] == 1
    ask(use, "acme")
    acme = row_of(use, label_of("acme"))
    assert (acme["requests"], acme["hits"]) == (3, 2), "it reused nothing"


def test_labels_of_other_servers_differ_unless_they_have_the_secret() -> None:
    made = []
    for key in (None, None, SECRET, SECRET):
        one = TenantUse(key=key)
        ask(one, "acme")
        made.append(labels(one) - {NO_KEY})
    assert made[0] != made[1]
    assert made[2] == made[3] != made[0]
    assert all("acme" not in label for each in made for label in each)


def test_a_flood_of_salts_has_bounds_and_real_tenants_stay(use: TenantUse, clock: Clock) -> None:
    for number in range(5):
        ask(use, f"real {number}", count=20)
    real = {label_of(f"real {number}") for number in range(5)}
    seen: set[str] = set()
    for number in range(5000):
        clock.now += 0.1
        ask(use, f"random {number}")
        if number % 200 == 0:
            for one in range(5):
                ask(use, f"real {one}")
        seen |= labels(use)
    assert real <= labels(use)
    assert len(labels(use)) <= MAX_LABELS
    assert len(use._remembered) <= tenants._MAX_REMEMBERED
    # A salt that comes once has no more requests than what it would replace.
    assert len(seen) <= MAX_LABELS
    assert row_of(use, OTHERS)["requests"] >= 4900
    assert sum(one["requests"] for one in use.latest()) == 100 + 5000 + 125


def test_a_real_tenant_takes_the_label_of_one_that_came_once(use: TenantUse, clock: Clock) -> None:
    for number in range(100):
        ask(use, f"random {number}")
    ask(use, "late", count=2)
    assert label_of("late") not in labels(use), "two are not far more than one"
    ask(use, "late")
    assert label_of("late") in labels(use)
    before = labels(use)
    ask(use, "later", count=50)
    assert labels(use) == before, "a label has passed on within ten seconds"
    clock.now += tenants._CHANGE_S
    ask(use, "later")
    assert label_of("later") in labels(use)
    assert len(labels(use)) == MAX_LABELS
    assert sum(one["requests"] for one in use.latest()) == 100 + 3 + 51, "none is lost"


def test_tenants_of_the_past_make_room(use: TenantUse, clock: Clock) -> None:
    for number in range(40):
        ask(use, f"old {number}", count=50)
    clock.now += 6 * tenants._HALF_LIFE_S
    ask(use, "new", count=3)
    assert label_of("new") in labels(use), "50 requests an hour ago weigh less than one"


# ---- what tenants hold and evict ---------------------------------------------------------------


def rig_of_tenants(**settings: Any) -> CacheRig:
    return CacheRig(l1_pages=8, page_size=PAGE, settings=HiCacheSettings(**settings))


def test_held_tokens_follow_copies_evictions_splits_and_resets() -> None:
    rig = rig_of_tenants(hicache_ratio=2.0)
    tree = rig.tree.tree
    rig.run(prompt(1, 4), "a")
    rig.run(prompt(1, 2), "b")
    rig.settle()
    assert tree.device.held == tree.host.held == {"a": 4 * PAGE, "b": 2 * PAGE}
    rig.run([*prompt(1, 3), 5, 6, 7, 8], "a")
    rig.settle()
    assert tree.device.held["a"] == 5 * PAGE, "a split node counts once"
    rig.tree.evict(EvictParams(num_tokens=8 * PAGE))
    assert tree.device.held == {}
    assert tree.host.held == {"a": 5 * PAGE, "b": 2 * PAGE}
    rig.tree.check_integrity()
    tree.host.held["a"] += PAGE
    with pytest.raises(AssertionError, match="tokens of a tenant are miscounted"):
        rig.tree.check_integrity()
    rig.tree.reset()
    assert tree.host.held == {}


def test_a_newcomer_is_remembered_longer_than_those_before_it(use: TenantUse) -> None:
    for number in range(MAX_LABELS):
        ask(use, f"old {number}")
    for number in range(tenants._MAX_REMEMBERED):
        ask(use, f"came once {number}")
    ask(use, "new", 3)
    assert label_of("new") in labels(use)


def test_an_eviction_names_the_request_and_whose_pages_went() -> None:
    rig = rig_of_tenants(hicache_ratio=4.0)
    use = rig.tree.tree.tenants
    for tenant in ("a", "b"):
        ask_key(use, tenant)
        rig.run(prompt(1, 4), tenant)
    rig.settle()
    rig.tree.evict(EvictParams(num_tokens=6 * PAGE, by=Evictor("r-7" * 100, "b")))
    entry = rig.tree.metrics.decisions.latest()[0]
    names = {tenant: known(use, tenant) for tenant in ("a", "b")}
    assert (entry["what"], entry["why"]) == ("evicted from L1", "room for a prompt")
    assert entry["request"] == ("r-7" * 100)[:48]
    assert (entry["tenant"], set(entry["of"])) == (names["b"], set(names.values()))
    assert row_of(use, names["b"])["evicted_others"] == 4 * PAGE
    assert row_of(use, names["a"])["lost"] == 4 * PAGE
    assert row_of(use, names["b"])["lost"] == 0, "its own pages are no loss to others"
    assert all(tier.victims is None for tier in use._tiers.values()), "nobody wants more of them"
    rig.run(prompt(2, 2), "a")
    rig.settle()
    rig.tree.evict(EvictParams(num_tokens=2 * PAGE))
    entry = rig.tree.metrics.decisions.latest()[0]
    assert (entry["why"], entry["request"]) == ("room for running requests", None)


def ask_key(use: TenantUse, key: str) -> None:
    use.count(key, 1, (0, 0, 0))


def known(use: TenantUse, tenant: str) -> str:
    return use._labelled[tenant].label


def test_l2_names_those_whose_copies_need_room() -> None:
    rig = rig_of_tenants(hicache_ratio=1.5)
    for seed, tenant in enumerate(("a", "b", "c", "d")):
        ask_key(rig.tree.tree.tenants, tenant)
        rig.run(prompt(seed, 6), tenant)
        rig.settle()
    use = rig.tree.tree.tenants
    (entry, *_) = (
        one for one in rig.tree.metrics.decisions.latest() if one["what"] == "evicted from L2"
    )
    assert (entry["why"], entry["request"]) == ("room for copies of L1", None)
    assert entry["tenant"] in {known(use, one) for one in "cd"}
    assert entry["of"] == [known(use, "a" if entry["tenant"] == known(use, "c") else "b")]


# ---- views -------------------------------------------------------------------------------------


def test_metrics_and_view_have_no_salt_and_at_most_32_labels() -> None:
    registry = CollectorRegistry()
    use = TenantUse(registry, bytes_per_token=100)
    for number in range(200):
        ask(use, f"secret-{number}", device=4)
    use.read_metrics()
    use.read_metrics()
    text = generate_latest(registry).decode()
    assert "secret" not in text
    requests = [line for line in text.splitlines() if line.startswith("sglang:tenant_requests_to")]
    assert len(requests) == MAX_LABELS
    assert sum(float(line.split()[-1]) for line in requests) == 200, "reading twice counts once"


def test_a_schedulers_view_tells_tenants_and_evictors(model: Path) -> None:
    rig = SchedulerRig(model, page_size=16, pool_tokens=256)
    for number, salt in enumerate(("a", "b", "a")):
        key = combine_extra_key(None, salt)
        rig.step(rig.request(f"r{number}", words(number, 200), greedy(2), extra_key=key))
        rig.settle()
    seen = cache_view(rig.tree)
    rows = {one["tenant"]: one for one in seen["tenants"]}
    assert sorted(one["requests"] for one in rows.values()) == [0, 1, 2]
    entry = next(one for one in seen["decisions"] if one["what"] == "evicted from L1")
    assert entry["request"] == "r2"
    assert rows[entry["tenant"]]["requests"] == 2
    (victim,) = entry["of"]
    assert rows[victim]["requests"] == 1
    assert rows[entry["tenant"]]["evicted_others"] > 0
    assert rows[entry["tenant"]]["lost"] > 0, "the other one has evicted, too"
