"""Each fault of a cache makes the alert of its name fire, and no other one: real servers with a
file store.

Tests first do the same without the fault, when nothing may fire. `rigs/views/alert_rules.py`
evaluates docs/monitoring/alerts.yml on two scrapes.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from rigs.models.tiny_models import save_tiny_checkpoint
from rigs.servers.engine_server import ADMIN_KEY, EngineServer
from rigs.servers.forked_servers import ForkedServer
from rigs.views import planted_faults
from rigs.views.alert_rules import firing, scrape
from rigs.views.planted_faults import switched
from sglang import hicache_top
from sglang.srt.constants import BUILTIN_HYBRID_MODEL_DIR, BUILTIN_MODEL_DIR
from sglang.srt.environ import envs
from sglang.srt.utils.network import wait_until
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-b-test-cpu")

PAGE: Final = 64
PAGES: Final = 8
L1_PAGES: Final = 24
SETTINGS: Final = {
    "prefetch_threshold": PAGE, "prefetch_timeout_base": 0.0, "prefetch_timeout_max": 0.8,
}  # fmt: skip


def prompt(seed: int, pages: int = PAGES) -> list[int]:
    return [300 + (seed * 37 + i * 11) % 1000 for i in range(pages * PAGE)]


def flags(*more: str) -> list[str]:
    return [
        "--enable-metrics", "--hicache-storage-backend", "file", "--page-size", str(PAGE),
        "--max-total-tokens", str(L1_PAGES * PAGE), "--hicache-ratio", "2",
        "--hicache-storage-backend-extra-config", json.dumps(SETTINGS), *more,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def switches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("switches")
    return path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, switches: Path) -> Iterator[EngineServer]:
    """One request runs at a time."""
    with ForkedServer(
        *flags("--max-running-requests", "1", "--hicache-storage-prefetch-policy", "wait_complete"),
        env={envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.name: str(tmp_path_factory.mktemp("l3"))},
        in_rank=partial(planted_faults.slow_files, str(switches)),
    ) as running:  # fmt: skip
        yield running


def ask(server: EngineServer, *seeds: int) -> None:
    for seed in seeds:
        server.generate(prompt(seed), max_new_tokens=1)


def alerts(server: EngineServer, work: Callable[[], object]) -> set[str]:
    """The alerts that fire after `work`, and after the writes to L2 and L3 that it leaves."""
    before = scrape(server)
    work()
    found: set[str] = set()

    def is_settled() -> bool:
        found.clear()
        found.update(firing(before, scrape(server)))
        return "HostMemoryInUse" not in found

    assert wait_until(is_settled, 60)
    return found


def fires(server: EngineServer, name: str, work: Callable[[], object]) -> bool:
    """True if the alert fires after `work`. Reads and writes of the store end by themselves, and
    gauges follow a step later."""
    before = scrape(server)
    work()
    return wait_until(lambda: name in firing(before, scrape(server)), 30)


def shows(server: EngineServer, what: Callable[[Mapping[str, Any]], bool]) -> bool:
    """True if the JSON of `/hicache`, which is a second old at most, soon is as `what` says."""
    return wait_until(lambda: what(hicache_top.ask(server.url, ADMIN_KEY)), 30)


def has_one(server: EngineServer, name: str) -> bool:
    return server.metrics()[name] == 1


def test_prompts_without_shared_prefixes_raise_an_alert(server: EngineServer) -> None:
    ask(server, 1)
    assert alerts(server, lambda: ask(server, 1, 1, 1)) == set()
    assert alerts(server, lambda: ask(server, 2, 3, 4)) == {"PromptsDoNotRepeat"}


def test_a_thrashing_l1_raises_its_alert(server: EngineServer) -> None:
    two, four = (1, 2), (1, 2, 3, 4)
    assert len(two) * PAGES < L1_PAGES < len(four) * PAGES
    ask(server, *two)
    assert alerts(server, lambda: ask(server, *two, *two)) == set()
    ask(server, *four)
    assert "DeviceCacheThrashes" in alerts(server, lambda: ask(server, *four, *four))
    assert shows(
        server, lambda seen: "evicted from L1" in {one["what"] for one in seen["decisions"]}
    )


def test_a_starved_prefill_queue(server: EngineServer) -> None:
    long = {"max_new_tokens": 900, "ignore_eos": True}
    answers = [
        threading.Thread(
            target=server.request,
            args=("POST", "/generate", {"input_ids": [7] * 9, "rid": rid, "sampling_params": long}),
        )
        for rid in ("runs", "waits")
    ]
    ask(server, 1)
    assert alerts(server, lambda: ask(server, 1)) == set()
    with ExitStack() as stack:
        for number, thread in enumerate(answers):
            thread.start()
            stack.callback(thread.join)
            name = ("sglang:num_running_reqs", "sglang:num_queue_reqs")[number]
            assert wait_until(partial(has_one, server, name), 60)
        body = {"abort_all": True}
        stack.callback(server.request, "POST", "/abort_request", body, admin=True)
        before = scrape(server)
        name, begun = "sglang:generation_tokens_total", server.metrics()
        assert wait_until(lambda: server.metrics()[name] > begun[name] + 5, 60)
        assert "PrefillStarved" in firing(before, scrape(server))
        assert shows(server, lambda seen: seen["queues"]["waiting"] == 1)


def test_a_slow_store_raises_its_alert(server: EngineServer, switches: Path) -> None:
    prompts = (11, 12)
    ask(server, *prompts)
    server.flush()
    assert "ReadsTooSlow" not in alerts(server, lambda: ask(server, *prompts, *prompts))
    assert shows(server, lambda seen: seen["store"]["reads"].get("landed", 0) >= len(prompts))
    server.flush()
    with switched(switches, planted_faults.SLOW_READS):
        # Others may fire beside it: what comes late counts as evicted, and hangs on a slow machine.
        assert fires(server, "ReadsTooSlow", lambda: ask(server, *prompts))
    assert shows(server, lambda seen: seen["store"]["reads"].get("late", 0) >= 1)
    server.flush()


def test_a_full_l2_raises_its_alert(server: EngineServer, switches: Path) -> None:
    """Most of L2 is pinned by a write: those of a slow store pile up like this."""

    def ask_twice(seed: int) -> None:
        for _ in range(2):
            server.generate(prompt(seed, L1_PAGES - 4), max_new_tokens=1)

    def is_pinned(seen: Mapping[str, Any]) -> bool:
        (l2,) = (tier for tier in seen["tiers"] if tier["name"] == "L2")
        is_low = l2["parts"]["evictable"] < 0.6 * l2["total"]
        return bool(is_low and seen["queues"].get("backups"))

    assert "HostMemoryInUse" not in alerts(server, lambda: ask_twice(31))
    server.flush()
    with switched(switches, planted_faults.SLOW_WRITES):
        assert fires(server, "HostMemoryInUse", lambda: ask_twice(32))
        assert shows(server, is_pinned)
    server.flush()
    assert "HostMemoryInUse" not in alerts(server, lambda: None)


def test_missing_states_and_differing_models_raise_their_alerts(
    server: EngineServer, tmp_path: Path
) -> None:
    prompts = (1, 2, 3)
    with ForkedServer(
        *flags("--hicache-storage-prefetch-policy", "wait_complete"),
        *("--max-mamba-cache-size", "256"),
        env={envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.name: str(tmp_path)},
        model=str(BUILTIN_HYBRID_MODEL_DIR),
    ) as hybrid:
        ask(hybrid, *prompts)
        hybrid.flush()
        assert alerts(hybrid, lambda: ask(hybrid, *prompts)) == set()
        hybrid.flush()
        states = list(tmp_path.rglob("*mamba*"))
        assert len(states) >= len(prompts)
        for file in states:
            file.unlink()
        # The flush has taken them from L1 and L2.
        found = alerts(hybrid, lambda: ask(hybrid, *prompts))
        assert found == {"StatesMissing", "CacheTooSmall"}
        assert shows(hybrid, lambda seen: seen["store"]["reads"].get("no_state") == len(prompts))
        report = hybrid.generate([*prompt(1)[:-1], 5], 1, return_cache_report=True).meta_info
        assert report["cache_report"] is not None
        both = scrape(server, hybrid)
        assert "ModelsDiffer" in firing(both, both)


def test_a_lagging_rank_raises_its_alert(tmp_path: Path, switches: Path) -> None:
    save_tiny_checkpoint(
        tmp_path / "model", "qwen3", num_attention_heads=8, vocab_size=2176, eos_token_id=2
    )
    with ForkedServer(
        "--tp-size", "2", "--device", "cpu", "--tokenizer-path", str(BUILTIN_MODEL_DIR),
        "--enable-metrics", "--enable-hierarchical-cache", "--page-size", "16",
        "--max-total-tokens", "2048", model=str(tmp_path / "model"),
        in_rank=partial(planted_faults.lagging_rank, str(switches)),
    ) as ranks:  # fmt: skip

        def work(seed: int) -> None:
            for number in range(5):
                ranks.generate([1 + (seed + number * 3 + i * 7) % 2000 for i in range(100)], 2)

        before = scrape(ranks)
        work(0)
        assert "RankLags" not in firing(before, scrape(ranks))
        with switched(switches, planted_faults.LAGGING_RANK):
            before = scrape(ranks)
            work(500)
            (found,) = firing(before, scrape(ranks))["RankLags"]
        assert found["rank"] == str(planted_faults.LAGGARD)
