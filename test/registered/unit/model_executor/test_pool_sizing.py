"""Pool sizes: which rule decides, in hard numbers."""

from __future__ import annotations

from typing import Any

import pytest

from sglang.srt.constants import GIB
from sglang.srt.model_executor.pool_sizing import size_kv_pool, size_running_requests
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")

BASE = {
    "has_own_memory": False,
    "kv_bytes_per_token": 1024,
    "page_size": 64,
    "total_bytes": 24 * GIB,
    "available_bytes": 20 * GIB,
}


@pytest.mark.parametrize(
    ("fields", "tokens", "reason"),
    [
        ({}, (1 << 20) - 64, "1 GiB, the default"),
        ({"total_bytes": 5 * GIB}, 524288 - 64, "10% of 5.0 GiB"),
        ({"max_total_tokens": 1000}, 960, "--max-total-tokens 1000"),
        ({"mem_fraction_static": 0.5, "weight_bytes": 11 * GIB}, (1 << 20) - 64, "0.5 of 24.0"),
        ({"mem_fraction_static": 0.5, "max_total_tokens": 128}, 128, "--max-total-tokens 128"),
        ({"mem_fraction_static": 0.05, "max_total_tokens": 1 << 40}, 1258176, "0.05 of"),
        ({"page_size": 1, "max_total_tokens": 7}, 7, "--max-total-tokens 7"),
    ],
)
def test_tokens(fields: dict[str, Any], tokens: int, reason: str) -> None:
    got = size_kv_pool(**{**BASE, **fields})
    assert got.amount == tokens
    assert reason in got.reason


GPU = BASE | {"has_own_memory": True, "total_bytes": 100 * GIB, "available_bytes": 80 * GIB}


@pytest.mark.parametrize(
    ("fields", "gib", "reason"),
    [
        ({"weight_bytes": 19 * GIB}, 68, "80.00 GiB free, less a reserve of 12.00 GiB"),
        ({"weight_bytes": 40 * GIB}, 48, "0.88 of 100.0 GiB, less 40.00 GiB of weights"),
        ({"weight_bytes": 40 * GIB, "graph_bytes": GIB}, 47, "and 1.00 GiB for CUDA graphs"),
        ({"available_bytes": 20 * GIB}, 8, "20.00 GiB free"),
        ({"context_len": 16384}, 4, "256 contexts of 16384 tokens"),
        ({"context_len": 16384, "mem_fraction_static": 0.5}, 50, "--mem-fraction-static 0.5"),
        ({"context_len": 1 << 20}, 68, "80.00 GiB free"),
        ({"mem_fraction_static": 0.5, "graph_bytes": GIB}, 50, "--mem-fraction-static 0.5"),
        ({"max_total_tokens": GIB // 1024 - 64, "graph_bytes": GIB}, 1, "--max-total-tokens"),
    ],
)
def test_tokens_on_a_gpu(fields: dict[str, Any], gib: int, reason: str) -> None:
    got = size_kv_pool(**{**GPU, **fields})
    assert abs((got.amount + 64) * 1024 - gib * GIB) <= 64 * 1024
    assert reason in got.reason


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_total_tokens": 63}, "less than one page of 64"),
        ({"page_size": 1, "max_total_tokens": 1}, "1 tokens .* a prompt and its output, 2: raise"),
        ({"mem_fraction_static": 0.1, "weight_bytes": 3 * GIB}, "holds?|hold 0 tokens"),
        ({"available_bytes": GIB // 2}, "lower --max-total-tokens"),
        ({"mem_fraction_static": 1.5}, "between 0 and 1"),
    ],
)
def test_what_cannot_work_is_said_with_the_flag(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        size_kv_pool(**{**BASE, **fields})


@pytest.mark.parametrize(
    ("fields", "requests"),
    [
        ({"pool_tokens": 1 << 20, "context_len": 8192}, 256),
        ({"pool_tokens": 640, "context_len": 8192}, 10),
        ({"pool_tokens": 1, "context_len": 8192}, 1),
        ({"pool_tokens": 1 << 20, "context_len": 1 << 20}, 64),
        ({"pool_tokens": 1, "context_len": 8, "max_running_requests": 7}, 7),
    ],
)
def test_running_requests(fields: dict[str, int], requests: int) -> None:
    assert size_running_requests(**fields).amount == requests


def test_no_requests_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="--max-running-requests 0"):
        size_running_requests(pool_tokens=1, context_len=1, max_running_requests=0)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
