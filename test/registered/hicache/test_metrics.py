"""`/metrics` of a server with all tiers, after requests that used each of them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from rigs.servers.engine_server import EngineServer
from rigs.servers.forked_servers import ForkedServer
from sglang.srt.environ import envs
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-b-test-cpu")

PAGE: Final = 64
PROMPT: Final = [300 + i % 1000 for i in range(8 * PAGE)]
REUSED: Final = 8 * PAGE - 1
"""Tokens of a repeated `PROMPT` that are reused: all but the last, which is computed."""

SERVING: Final = (
    "num_running_reqs", "num_queue_reqs", "num_used_tokens", "token_usage", "gen_throughput",
    "cache_hit_rate", "prompt_tokens_total", "generation_tokens_total", "cached_tokens_total",
    "time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds",
    "queue_time_seconds",
)  # fmt: skip
HICACHE: Final = (
    "hicache_host_used_tokens", "hicache_host_total_tokens", "hicache_host_stuck_tokens",
    "evicted_tokens_total",
    "load_back_tokens_total", "load_back_duration_seconds", "prefetched_tokens_total",
    "backuped_tokens_total", "prefetch_bandwidth", "backup_bandwidth", "hicache_hit_tokens_total",
    "hicache_miss_tokens_total", "hicache_prefetch_total", "hicache_backup_total",
    "hicache_storage_pages_total", "hicache_queue_length", "hicache_transfer_seconds",
    "hicache_breaker_open", "max_total_num_tokens", "kv_evictable_tokens", "kv_available_tokens",
    "hicache_host_evictable_tokens", "hicache_host_written_tokens_total", "cache_miss_tokens_total",
    "hicache_storage_info", "hicache_storage_used_bytes", "hicache_storage_total_bytes",
    "hicache_storage_objects", "hicache_storage_evicted_objects", "per_stage_req_latency_seconds",
)  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    folder: Path = tmp_path_factory.mktemp("store")
    with ForkedServer(
        "--enable-metrics", "--hicache-storage-backend", "file",
        "--hicache-storage-prefetch-policy", "wait_complete", "--page-size", str(PAGE),
        "--max-total-tokens", str(16 * PAGE), "--hicache-ratio", "4",
        env={envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.name: str(folder)},
    ) as running:  # fmt: skip
        yield running


def test_every_metric_is_present_with_the_right_value(server: EngineServer) -> None:
    lookups = [server.generate(PROMPT, max_new_tokens=2).cached]
    server.flush()
    lookups.append(server.generate(PROMPT, max_new_tokens=2).cached)  # from the store
    lookups.append(server.generate(PROMPT, max_new_tokens=2).cached)  # from the device
    others = [[1300 + 40 * n + i % 700 for i in range(8 * PAGE)] for n in range(3)]
    lookups += [server.generate(other, max_new_tokens=2).cached for other in others]
    lookups.append(server.generate(PROMPT, max_new_tokens=2).cached)  # from the host
    tiers = ("device", "host", "storage")
    assert [[found[tier] for tier in tiers] for found in lookups] == [
        [0, 0, 0], [0, 0, REUSED], [REUSED, 0, 0], *[[0, 0, 0]] * 3, [0, REUSED, 0],
    ]  # fmt: skip

    samples = server.metrics()
    names = {re.sub(r"_(bucket|sum|count)$", "", name.partition("{")[0]) for name in samples}
    assert {f"sglang:{name}" for name in (*SERVING, *HICACHE)} <= names

    asked = len(PROMPT) * len(lookups)
    hits = [samples[f'sglang:hicache_hit_tokens_total{{tier="{tier}"}}'] for tier in tiers]
    misses = [samples[f'sglang:hicache_miss_tokens_total{{tier="{tier}"}}'] for tier in tiers]
    assert hits == [REUSED] * 3
    assert misses == [asked - REUSED, asked - 2 * REUSED, asked - 3 * REUSED]
    for kind in ("write", "backup", "prefetch"):
        assert samples[f'sglang:hicache_transfer_seconds_count{{kind="{kind}"}}'] > 0, kind
    assert samples["sglang:load_back_duration_seconds_count"] == 2
    assert samples["sglang:hicache_host_used_tokens"] >= 8 * PAGE
    assert samples["sglang:max_total_num_tokens"] == 16 * PAGE
    l1 = [samples[f"sglang:{name}_tokens"] for name in ("kv_evictable", "kv_available", "num_used")]
    assert sum(l1) == 16 * PAGE
    assert l1[0] >= 8 * PAGE
    assert samples["sglang:hicache_host_written_tokens_total"] >= 4 * 8 * PAGE

    missed = {
        reason: samples[f'sglang:cache_miss_tokens_total{{reason="{reason}"}}']
        for reason in ("evicted", "no_state", "logprobs", "new")
    }
    assert sum(missed.values()) == asked - 3 * REUSED
    assert missed == {"evicted": 0, "no_state": 0, "logprobs": 0, "new": asked - 3 * REUSED}
    (info,) = (name for name in samples if name.startswith("sglang:hicache_storage_info"))
    assert 'backend="file"' in info
    assert re.search(r'namespace="[0-9a-f]{32}"', info)
    for stage in ("match", "prefill", "first_decode"):
        name = f'sglang:per_stage_req_latency_seconds_count{{stage="{stage}"}}'
        assert samples[name] == len(lookups), stage

    server.flush()
    samples = server.metrics()
    assert samples["sglang:hicache_host_used_tokens"] == 0
    for queue in ("writes", "loads", "prefetches", "backups"):
        assert samples[f'sglang:hicache_queue_length{{queue="{queue}"}}'] == 0, queue
    # The first scrape asked the store.
    assert samples["sglang:hicache_storage_used_bytes"] > 0
    assert (
        samples["sglang:hicache_storage_used_bytes"]
        < (samples["sglang:hicache_storage_total_bytes"])
    )
    assert math.isnan(samples["sglang:hicache_storage_objects"]), "nobody counts files"


def test_tokens_that_were_here_before_count_as_evicted(server: EngineServer) -> None:
    reply = server.request("POST", "/hicache/storage-backend/clear", admin=True)
    assert reply.status == 200, reply
    prompt = [200 + i % 900 for i in range(5 * PAGE)]
    server.generate(prompt, max_new_tokens=1)
    server.flush()
    server.request("POST", "/hicache/storage-backend/clear", admin=True)
    name = 'sglang:cache_miss_tokens_total{{reason="{}"}}'.format
    before = server.metrics()
    answer = server.generate([*prompt, *range(2000, 2000 + PAGE)], max_new_tokens=1)
    assert answer.meta_info["cached_tokens"] == 0
    after = server.metrics()
    assert after[name("evicted")] - before[name("evicted")] == 5 * PAGE
    assert after[name("new")] - before[name("new")] == PAGE
