"""Ranks that start together: where one has no memory, none of them serves (row C15)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from sglang.srt.environ import envs
from sglang.srt.mem_cache.host import host_memory
from sglang.srt.mem_cache.host.host_memory import HostTensorAllocator
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
from sglang.test.cache_rig import CacheRig, HiCacheSettings
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.hanging_store import wait_for
from sglang.test.memory_ranks import MemoryExchange

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

Check: TypeAlias = Callable[[], None]
RANKS = 3
SHORT = 1
"""The rank without memory, by the name of its thread."""
L2_BYTES = 24576
"""32 pages of the rig."""


@pytest.fixture(autouse=True)
def quick(tmp_path: Path) -> Iterator[None]:
    with (
        envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.override(str(tmp_path)),
        envs.HICACHE_HOST_MEMORY_RESERVE_BYTES.override(0),
    ):
        yield


def start(backend: str | None = None) -> list[CacheRig | Exception]:
    """What each rank becomes, or what it raises."""
    exchange = MemoryExchange(RANKS, deadline_s=20.0)
    started: dict[int, CacheRig | Exception] = {}

    def on(rank: int) -> None:
        try:
            started[rank] = CacheRig(
                group=exchange.group(rank, most_delay_s=0.002),
                settings=HiCacheSettings(hicache_ratio=2.0, hicache_storage_backend=backend),
            )
        except Exception as error:  # noqa: BLE001 - it is the result
            started[rank] = error

    threads = [threading.Thread(target=on, args=(n,), name=f"rank {n}") for n in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [started[rank] for rank in range(RANKS)]


def failing_on_the_short_rank(call: Callable[..., Any], error: Exception) -> Callable[..., Any]:
    def call_or_fail(*args: Any, **kwargs: Any) -> Any:
        if threading.current_thread().name == f"rank {SHORT}":
            raise error
        return call(*args, **kwargs)

    return call_or_fail


@pytest.fixture(name="no_threads_left")
def make_no_threads_left() -> Check:
    """Waits until the threads that a test has started have ended."""
    before = set(threading.enumerate())
    return lambda: wait_for(lambda: set(threading.enumerate()) <= before)


def test_all_start_where_all_have_memory(no_threads_left: Check) -> None:
    for rig in start("file"):
        assert isinstance(rig, CacheRig)
        rig.close()
    no_threads_left()


def test_no_rank_starts_where_one_has_no_memory_for_l2(
    monkeypatch: pytest.MonkeyPatch, no_threads_left: Check
) -> None:
    allocate = failing_on_the_short_rank(HostTensorAllocator.allocate, MemoryError("no pages"))
    monkeypatch.setattr(HostTensorAllocator, "allocate", allocate)
    first, own, last = start()
    assert isinstance(own, ValueError) and "host pool kv: no memory for" in str(own)
    assert "lower --hicache-size or --hicache-ratio" in str(own)
    for other in (first, last):
        assert isinstance(other, ValueError) and str(other) == f"rank {SHORT}: {own}"
    no_threads_left()


def test_no_rank_starts_where_one_has_no_memory_for_l3(
    monkeypatch: pytest.MonkeyPatch, no_threads_left: Check
) -> None:
    create = StorageBackendFactory.create_backend
    error = MemoryError("Mooncake could not allocate 64 bytes of host memory")
    monkeypatch.setattr(
        StorageBackendFactory, "create_backend", failing_on_the_short_rank(create, error)
    )
    first, own, last = start("file")
    assert own is error
    assert str(first) == str(last) == f"rank {SHORT}: {error}"
    no_threads_left()


def test_ranks_of_one_machine_count_each_others_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for available, fits in ((RANKS * L2_BYTES, True), (RANKS * L2_BYTES - 1, False)):
        monkeypatch.setattr(host_memory, "available_host_bytes", lambda size=available: size)
        for started in start():
            if fits:
                assert isinstance(started, CacheRig)
                started.close()
                continue
            assert f"pool kv {L2_BYTES} bytes, on each of {RANKS} ranks of this machine" in str(
                started
            )


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
