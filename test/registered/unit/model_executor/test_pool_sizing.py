"""Pool sizes: which rule decides, in hard numbers."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from typing import Any

import pytest
import torch

from sglang.srt.constants import GIB, MIB
from sglang.srt.mem_cache.device.state_spec import ItemKind, PoolName, StateBuffer, StateSpec
from sglang.srt.model_executor.pool_sizing import (
    DeviceMemory,
    Sizing,
    memory_parts,
    size_kv_pool,
    size_pools,
    size_request_states,
    size_running_requests,
    size_states,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")

BASE: dict[str, Any] = {
    "has_own_memory": False,
    "kv_bytes_per_token": 1024,
    "page_size": 64,
    "total_bytes": 24 * GIB,
    "available_bytes": 20 * GIB,
}
MEMORY = {field.name for field in dataclasses.fields(DeviceMemory)}


def size_of_pool(**fields: Any) -> Sizing:
    memory = DeviceMemory(**{name: fields.pop(name) for name in MEMORY & fields.keys()})
    return size_kv_pool(memory, **fields)


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
def test_tokens_are_bounded(fields: dict[str, Any], tokens: int, reason: str) -> None:
    got = size_of_pool(**{**BASE, **fields})
    assert got.amount == tokens
    assert reason in got.reason


def test_ranks_share_the_memory_of_a_cpu() -> None:
    """Otherwise two ranks with 0.8 each take 1.6 times what there is, and the kernel ends one."""
    two = {"mem_fraction_static": 0.8, "weight_bytes": GIB, "sharers": 2}
    got = size_of_pool(**{**BASE, **two})
    assert 2 * ((got.amount + 64) * 1024 + GIB) <= 0.8 * 24 * GIB
    assert "--mem-fraction-static 0.8 of 12.0 GiB for each of 2 ranks" in got.reason
    assert "10% of 3.0 GiB for each of 8 ranks" in size_of_pool(**{**BASE, "sharers": 8}).reason
    with pytest.raises(ValueError, match=r"needs 8\.\d+ GiB and 7\.50 GiB .* lower --max-total"):
        size_of_pool(**{**BASE, **two, "available_bytes": 15 * GIB})


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
        (
            {"weight_bytes": 40 * GIB, "graph_bytes": GIB, "exchange_bytes": 2 * GIB},
            45,
            "and 1.00 GiB for CUDA graphs, less 2.00 GiB that experts exchange",
        ),
        ({"mem_fraction_static": 0.5, "exchange_bytes": 50 * GIB}, 50, "--mem-fraction-static"),
        ({"max_total_tokens": GIB // 1024 - 64, "graph_bytes": GIB}, 1, "--max-total-tokens"),
    ],
)
def test_gpu_tokens_are_bounded(fields: dict[str, Any], gib: int, reason: str) -> None:
    got = size_of_pool(**{**GPU, **fields})
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
        (
            {"mem_fraction_static": 0.5, "exchange_bytes": 13 * GIB},
            "0.5 leaves 12.00 GiB, and experts exchange up to 13.00 GiB .* lower it, or --chunked-",
        ),
    ],
)
def test_what_cannot_work_is_said_with_the_flag(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        size_of_pool(**{**BASE, **fields})


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
def test_running_requests_are_bounded(fields: dict[str, int], requests: int) -> None:
    assert size_running_requests(**fields, available_bytes=GIB).amount == requests


def test_no_requests_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="--max-running-requests 0"):
        size_running_requests(
            pool_tokens=1, context_len=1, available_bytes=GIB, max_running_requests=0
        )


@pytest.mark.parametrize("requests", [1 << 18, 10**30])
def test_more_requests_than_their_table_has_memory_for_are_refused(requests: int) -> None:
    wish: dict[str, Any] = {
        "pool_tokens": 64, "context_len": 1024, "max_running_requests": requests
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"GiB of memory are left: lower --max-running-requests"):
        size_running_requests(**wish, available_bytes=GIB - 1)
    assert size_running_requests(**wish, available_bytes=requests * 4096).amount == requests
    assert size_running_requests(**wish, available_bytes=GIB, states=9).amount == 9


STATES = {"budget_bytes": 19 * GIB, "state_bytes": 64 * MIB, "keeps_snapshots": True}


@pytest.mark.parametrize(
    ("fields", "states", "reason"),
    [
        ({}, 9 * 16 - 1, "--mamba-full-memory-ratio 0.9"),
        ({"full_memory_ratio": 18.0}, 18 * 16 - 1, "--mamba-full-memory-ratio 18"),
        ({"keeps_snapshots": False}, 9 * 16 - 1, "--mamba-full-memory-ratio 0.9"),
        ({"keeps_snapshots": False, "max_running_requests": 5}, 5, "one for each of 5 requests"),
        ({"max_running_requests": 5}, 9 * 16 - 1, "--mamba-full-memory-ratio 0.9"),
        ({"max_states": 20}, 20, "--max-mamba-cache-size 20"),
        ({"max_states": 19 * 16 - 1}, 19 * 16 - 1, "--max-mamba-cache-size 303"),
        ({"max_states": 20, "keeps_snapshots": False, "max_running_requests": 8}, 8, "of 8 req"),
    ],
)
def test_states_are_bounded(fields: dict[str, Any], states: int, reason: str) -> None:
    got = size_states(**{**STATES, **fields})
    assert got.amount == states
    assert reason in got.reason


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"state_bytes": 10 * GIB}, "0 recurrent states of 10240.0 MiB .* raise --mem-fraction"),
        ({"max_states": 19 * 16}, r"304 .* \(--max-mamba-cache-size 304\).* into 19.00 GiB"),
    ],
)
def test_states_that_do_not_fit_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        size_states(**{**STATES, **fields})


def test_one_state_is_enough_only_without_a_prefix_cache() -> None:
    one: dict[str, Any] = {**STATES, "max_states": 1}
    assert size_states(**{**one, "keeps_snapshots": False}).amount == 1
    assert size_states(**{**one, "max_states": 2}).amount == 2
    with pytest.raises(ValueError, match=r"--max-mamba-cache-size 2 or more.*--disable-radix-c"):
        size_states(**one)


def test_states_come_first_and_tokens_get_the_rest() -> None:
    budget = DeviceMemory(
        has_own_memory=False, total_bytes=24 * GIB, available_bytes=20 * GIB
    ).pool_budget()
    assert budget.amount == GIB
    got = size_of_pool(**{**BASE, "state_bytes": GIB // 4})
    assert got.amount == 3 * (1 << 18) - 64
    assert "less 0.25 GiB of states" in got.reason
    with pytest.raises(ValueError, match=r"0.75 GiB and 0.50 GiB of memory are available"):
        size_of_pool(**{**BASE, "available_bytes": 3 * GIB // 4, "state_bytes": GIB // 4})


def test_no_more_requests_run_than_have_states() -> None:
    pool: dict[str, Any] = {"pool_tokens": 1 << 20, "context_len": 8192, "available_bytes": GIB}
    assert size_running_requests(**pool, states=300).amount == 256
    got = size_running_requests(**pool, states=9)
    assert (got.amount, got.reason) == (9, "one for each of 9 states")
    assert size_running_requests(**pool, max_running_requests=12, states=9).amount == 9


def test_tokens_may_cost_fractions_of_bytes() -> None:
    """An item of 1,000 bytes for 64 tokens, and 3 bytes for each token: 1,192 bytes a page."""
    each = Fraction(1000, 64) + 3
    got = size_of_pool(**{**BASE, "kv_bytes_per_token": each})
    assert got.amount == (GIB // 1192 - 1) * 64


@pytest.mark.parametrize(
    ("fields", "requests"),
    [({}, 15), ({"request_bytes": 1}, 256), ({"max_running_requests": 100}, 100)],
)
def test_states_of_requests_are_bounded(fields: dict[str, Any], requests: int) -> None:
    wish: dict[str, Any] = {"budget_bytes": GIB, "request_bytes": 8 * MIB}
    assert size_request_states(**{**wish, **fields}).amount == requests


def test_states_of_requests_that_do_not_fit_are_refused() -> None:
    wish: dict[str, Any] = {"budget_bytes": GIB, "request_bytes": 8 * MIB}
    with pytest.raises(ValueError, match=r"128 running requests .*--max-running-requests 128\), o"):
        size_request_states(**wish, max_running_requests=128)
    with pytest.raises(ValueError, match=r"states of 0 running .*12\.5% of the memory"):
        size_request_states(budget_bytes=GIB, request_bytes=GIB // 8)


def test_states_of_requests_come_before_states_and_tokens() -> None:
    memory = DeviceMemory(has_own_memory=False, total_bytes=24 * GIB, available_bytes=20 * GIB)
    wish: dict[str, Any] = {
        "kv_bytes_per_token": 1024,
        "state_bytes": MIB,
        "page_size": 64,
        "context_len": 4096,
        "keeps_snapshots": True,
        "max_states": 99,
    }
    got = size_pools(memory, **wish, request_bytes=8 * MIB)
    assert got.requests is not None and got.requests.amount == 15
    assert got.request_bytes == 16 * 8 * MIB
    assert got.tokens.amount == (GIB - 128 * MIB - 100 * MIB) // 1024 - 64
    rows = size_running_requests(
        pool_tokens=got.tokens.amount, context_len=4096, available_bytes=GIB, own_states=15
    )
    assert (rows.amount, rows.reason) == (15, "one for each of 15 states of requests")


def test_memory_by_pool_counts_items_and_rows() -> None:
    buffers = (StateBuffer("rows", (5,), torch.float32),)
    rows = StateSpec(name=PoolName.C128, layers=(0, 2), buffers=buffers, stride=16)
    own = StateSpec(name=PoolName.OPEN_GROUP, layers=(1,), buffers=buffers, item=ItemKind.REQUEST)
    parts = memory_parts(
        (rows, own), weight_bytes=0, tokens=128, states=0, page_size=64, graph_bytes=0,
        exchange_bytes=0, requests=3,
    )  # fmt: skip
    assert (parts["c128"], parts["open_group"]) == (192 // 16 * 40, 4 * 20)
