"""Faults that schedulers of this process have: each makes the alert of its name fire, and without
it the alert does not. Real servers are in `hicache/views/test_named_faults.py`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rigs.caches.host_damage import flip, host_pages, pool_of
from rigs.disaggregation.decode_rig import DecodeRig
from rigs.schedulers.scheduler_rig import SchedulerRig, greedy, prompt
from rigs.views.alert_rules import firing, scrape_of
from sglang.srt.environ import envs
from sglang.srt.mem_cache.hiradix_cache import HiRadixCache
from sglang.srt.messages.cache_key import combine_extra_key
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=8, suite="base-a-test-cpu")

PAGE = 16


def text_of(rig: SchedulerRig) -> str:
    state = rig.scheduler.state
    state.tree.read_metrics()
    return state.metrics.render(state.load())


def alerts(rig: SchedulerRig, work: Callable[[], object]) -> dict[str, list[dict[str, str]]]:
    """The alerts that fire if what `work` does goes on."""
    before = scrape_of({"a": text_of(rig)}, 0.0)
    work()
    return firing(before, scrape_of({"a": text_of(rig)}, 1.0))


def ask(rig: SchedulerRig, rid: str, ids: list[int], salt: str | None = None) -> None:
    rig.step(rig.request(rid, ids, greedy(1), extra_key=combine_extra_key(None, salt)))
    rig.settle()


def test_a_tenant_that_evicts(model: Path) -> None:
    rig = SchedulerRig(model, page_size=PAGE, pool_tokens=512)
    numbers = iter(range(10, 1000))

    def turns(of_b: int) -> None:
        for _ in range(4):
            ask(rig, f"a{next(numbers)}", prompt(1, 200), "a")
            for _ in range(of_b):
                seed = next(numbers)
                ask(rig, f"b{seed}", prompt(seed, 200), "b")

    assert "TenantEvicts" not in alerts(rig, lambda: turns(0))
    (found,) = alerts(rig, lambda: turns(3))["TenantEvicts"]
    rows = {one["tenant"]: one for one in rig.tree.tree.tenants.latest()}
    assert rows[found["tenant"]]["requests"] == 12
    assert rows[found["tenant"]]["evicted_others"] >= 4 * 192


def tiered(model: Path, **args: Any) -> tuple[SchedulerRig, HiRadixCache]:
    settings = {"enable_hierarchical_cache": True, "page_size": PAGE, "hicache_ratio": 4.0}
    with envs.SGLANG_HICACHE_CHECKED_SHARE.override(1.0):
        rig = SchedulerRig(model, **{**settings, **args})
    assert isinstance(rig.tree, HiRadixCache)
    return rig, rig.tree


def test_a_damaged_page(model: Path) -> None:
    rig, cache = tiered(model, pool_tokens=256)
    with contextlib.closing(rig):

        def again() -> None:
            for seed in (10, 11, 1):
                ask(rig, f"{seed}-{rig.scheduler.state.counters.ticks}", prompt(seed, 200))

        ask(rig, "first", prompt(1, 200))
        assert "DamagedPages" not in alerts(rig, again)
        ask(rig, "other", prompt(12, 200))
        flip(pool_of(cache), int(host_pages(cache, prompt(1, 200))[0]))
        (found,) = alerts(rig, again)["DamagedPages"]
        assert found["tier"] == "host"


def test_a_full_disk(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig, cache = tiered(model, hicache_storage_backend="file")
    with contextlib.closing(rig):
        assert "WritesFail" not in alerts(rig, lambda: ask(rig, "fits", prompt(1, 100)))
        attached = cache.store.attached
        assert attached is not None and attached.client is not None

        def full(*args: Any, **more: Any) -> Any:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(attached.client, "batch_set_v2", full)
        assert "WritesFail" in alerts(rig, lambda: ask(rig, "full", prompt(2, 100)))


def test_a_namespace_that_nobody_shares(model: Path) -> None:
    rig, cache = tiered(model, hicache_storage_backend="file")
    with contextlib.closing(rig):
        attached = cache.store.attached
        assert attached is not None
        presence = attached.presence
        assert presence is not None

        def text_of_one_of(servers: int | None) -> str:
            presence.servers = servers
            return text_of(rig)

        two, alone = text_of_one_of(2), text_of_one_of(1)
        unknown = text_of_one_of(None)
    for quiet in ({"a": two, "b": two}, {"a": alone}, {"a": two, "b": unknown}):
        now = scrape_of(quiet, 0.0)
        assert "NamespaceAlone" not in firing(now, now)
    three = scrape_of({"a": two, "b": two, "c": alone}, 0.0)
    (found,) = firing(three, three)["NamespaceAlone"]
    assert found["instance"] == "c"


def test_a_thrashing_state_pool(tiny_model: Callable[..., Path]) -> None:
    path, seeds = tiny_model("qwen3_next", eos_token_id=None), range(6)
    for num_states, is_named in ((40, False), (6, True)):
        rig = SchedulerRig(path, page_size=PAGE, pool_tokens=4096, num_states=num_states)

        def turn(rig: SchedulerRig = rig) -> None:
            for seed in seeds:
                ask(rig, f"{seed}-{rig.scheduler.state.counters.ticks}", prompt(seed, 200))

        turn()
        found = alerts(rig, turn)
        assert ("StatesThrash" in found) is is_named, (num_states, sorted(found))


def test_a_stuck_prefill_server(model: Path) -> None:
    ids = prompt(1, 20)
    rig = DecodeRig(model)
    assert "PrefillServerStuck" not in alerts(rig, lambda: None)
    rig.step(rig.ask("a", ids, 1))
    assert "PrefillServerStuck" in alerts(rig, lambda: rig.step(rig.abort("a"))), "it keeps slots"
    rig.servers.begun[0].is_settled = True
    assert "PrefillServerStuck" not in alerts(rig, rig.step)
