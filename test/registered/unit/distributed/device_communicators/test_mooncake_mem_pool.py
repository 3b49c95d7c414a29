"""Memory that SGLANG_MOONCAKE_CUSTOM_MEM_POOL names: from the wheel's allocators, or refused."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from sglang.srt.distributed.device_communicators.mooncake_mem_pool import (
    CustomMemPool,
    check_mooncake_custom_mem_pool_enabled,
    init_mooncake_custom_mem_pool,
)
from sglang.srt.environ import envs
from sglang.srt.hardware_backend.cuda.runtime import CudaRuntime
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")


class Allocators:
    """A wheel's module of allocators, and torch's pools."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, torch.device]] = []
        self.pools: list[object] = []
        self.used: list[tuple[object, torch.device | None]] = []

    def module(self, *names: str) -> ModuleType:
        module = ModuleType("mooncake.allocator")
        for name in names:

            def get_allocator(device: torch.device, name: str = name) -> Any:
                self.asked.append((name, device))
                return SimpleNamespace(allocator=lambda: name)

            setattr(module, name, SimpleNamespace(get_allocator=get_allocator))
        return module

    def MemPool(self, allocator: object) -> object:
        self.pools.append(allocator)
        return f"pool of {allocator}"

    def use_mem_pool(self, pool: object, device: torch.device | None) -> Any:
        self.used.append((pool, device))
        return nullcontext()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Allocators:
    """Recorded allocators; `cuda:1` has a runtime that records too."""
    made = Allocators()
    monkeypatch.setattr(
        "sglang.srt.hardware_backend.device_runtime.device_runtime",
        lambda device: CudaRuntime(device, made),
    )
    return made


def test_none_is_named() -> None:
    with envs.SGLANG_MOONCAKE_CUSTOM_MEM_POOL.override(None):
        assert check_mooncake_custom_mem_pool_enabled() is None
        assert init_mooncake_custom_mem_pool("cuda:1") is None


@pytest.mark.parametrize(
    ("name", "allocator"), [("NVLINK", "NVLinkAllocator"), ("BAREX", "BarexAllocator")]
)
@pytest.mark.parametrize("device", ["cuda:1", "cuda"])
def test_tensors_are_made_in_the_pool_of_the_wheels_allocator(
    monkeypatch: pytest.MonkeyPatch, made: Allocators, name: str, allocator: str, device: str
) -> None:
    module = made.module("NVLinkAllocator", "BarexAllocator")
    monkeypatch.setitem(sys.modules, "mooncake.allocator", module)
    with envs.SGLANG_MOONCAKE_CUSTOM_MEM_POOL.override(name):
        pool = init_mooncake_custom_mem_pool(device)
    assert pool is not None
    with pool.use():
        pass
    assert made.asked == [(allocator, torch.device(device))] and made.pools == [allocator]
    current = None if device == "cuda" else torch.device(device)
    assert made.used == [(f"pool of {allocator}", current)]


def test_plain_memory_is_what_nvlink_within_a_node_exports(made: Allocators) -> None:
    with envs.SGLANG_MOONCAKE_CUSTOM_MEM_POOL.override("INTRA_NODE_NVLINK"):
        for device in ("cuda:1", "cpu"):
            assert init_mooncake_custom_mem_pool(device) is None
    assert made.asked == []


@pytest.mark.parametrize("name", ["NVLINK", "BAREX"])
def test_a_cpu_has_no_such_memory(name: str) -> None:
    with (
        envs.SGLANG_MOONCAKE_CUSTOM_MEM_POOL.override(name),
        pytest.raises(ValueError, match=f"{name} is memory of CUDA devices, and this is cpu: uns"),
    ):
        init_mooncake_custom_mem_pool("cpu")


def no_library(device: torch.device) -> Any:
    raise ImportError("libaccl_barex.so is not there")


@pytest.mark.parametrize(
    ("has", "cause"),
    [
        (None, "mooncake.allocator"),
        ({}, "BarexAllocator"),
        ({"BarexAllocator": SimpleNamespace(get_allocator=no_library)}, "libaccl_barex.so"),
    ],
    ids=["no module", "no class", "no library"],
)
def test_a_wheel_without_the_allocator_is_refused(
    monkeypatch: pytest.MonkeyPatch, made: Allocators, has: dict[str, Any] | None, cause: str
) -> None:
    module = None if has is None else made.module()
    for name, value in (has or {}).items():
        setattr(module, name, value)
    monkeypatch.setitem(sys.modules, "mooncake.allocator", module)
    with (
        envs.SGLANG_MOONCAKE_CUSTOM_MEM_POOL.override(CustomMemPool.BAREX),
        pytest.raises(ValueError, match=f"BAREX: the installed mooncake wheel .*{cause}.*install"),
    ):
        init_mooncake_custom_mem_pool("cuda:1")
