"""The registry of devices, and what the CPU's runtime does in order."""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections.abc import Iterator

import pytest
import torch

from sglang.srt.hardware_backend.cpu import runtime as cpu_runtime
from sglang.srt.hardware_backend.cpu.runtime import CpuRuntime
from sglang.srt.hardware_backend.cuda.runtime import CudaRuntime
from sglang.srt.hardware_backend.device_kinds import CUDA, DEVICE_KINDS, device_kind
from sglang.srt.hardware_backend.device_runtime import (
    detect_device,
    device_runtime,
    on_device,
    register_device_runtime,
)
from sglang.srt.layers.fused_kernels import fused_kernels
from sglang.srt.server_args import ServerArgs
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")


@pytest.fixture
def fresh_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forgets what a test registers."""
    monkeypatch.setattr("sglang.srt.hardware_backend.device_runtime._REGISTERED", {})
    device_runtime.cache_clear()
    yield
    device_runtime.cache_clear()


def test_a_device_is_known_by_its_type() -> None:
    for device in ("cpu", "cpu:0", torch.device("cpu")):
        assert isinstance(device_runtime(device), CpuRuntime)
    for device in ("cuda", "cuda:3", torch.device("cuda", 1)):
        assert isinstance(device_runtime(device), CudaRuntime)
    assert device_runtime("cuda:1") is device_runtime("cuda:1")


@pytest.mark.parametrize("device", ["mps", "xpu:0", torch.device("hpu")])
def test_an_unknown_device_is_refused_with_the_known_ones(device: torch.device | str) -> None:
    with pytest.raises(ValueError, match=r"no runtime for .*; there are: cuda, npu, cpu$"):
        device_runtime(device)
    with pytest.raises(ValueError, match="is not supported; use cuda or npu or cpu"):
        device_kind(str(device))
    with pytest.raises(ValueError, match="is not supported"):
        fused_kernels(device)


@pytest.mark.usefixtures("fresh_registry")
def test_a_runtime_can_be_registered_and_replaced() -> None:
    made: list[str] = []

    def factory(device: str) -> CpuRuntime:
        made.append(device)
        return CpuRuntime("cpu")

    before = device_runtime("cpu")
    register_device_runtime("xpu", factory)
    register_device_runtime("cpu", factory)
    assert device_runtime("xpu:2") is device_runtime("xpu:2")
    assert device_runtime("cpu") is not before
    assert made == ["xpu:2", "cpu"]
    with pytest.raises(ValueError, match=r"there are: cuda, npu, cpu, xpu$"):
        device_runtime("mps")


def test_auto_takes_the_first_kind_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    for reason, kind in ((None, "cuda"), ("none here", "cpu")):
        monkeypatch.setattr(CudaRuntime, "why_absent", lambda _, reason=reason: reason)
        assert detect_device() == kind


@pytest.mark.usefixtures("fresh_registry")
def test_a_kind_that_does_not_load_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(device: str) -> CpuRuntime:
        raise ValueError(f"{device} has no driver")

    register_device_runtime(CUDA.name, broken)
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    assert detect_device() == "cpu"
    assert "a GPU is skipped: cuda has no driver" in caplog.text


def test_kinds_are_listed_in_the_order_of_auto() -> None:
    assert list(DEVICE_KINDS) == ["cuda", "npu", "cpu"]
    assert all(name == kind.name for name, kind in DEVICE_KINDS.items())
    kind = device_runtime("cpu").kind
    assert (kind.overlaps_steps, kind.has_own_memory, kind.captures_graphs) == (False, False, False)


def test_what_a_kind_takes_is_what_flags_offer() -> None:
    choices = {field.name: field.metadata["choices"] for field in dataclasses.fields(ServerArgs)}
    for kind in DEVICE_KINDS.values():
        assert kind.name in choices["device"]
        assert set(kind.attention_backends) <= {*choices["attention_backend"]}
        assert set(kind.kv_cache_dtypes) <= {*choices["kv_cache_dtype"]}
        for field, value in kind.package_flags:
            assert value in choices[field]


def test_a_copy_thread_works_in_order_beside_the_caller() -> None:
    runtime = device_runtime("cpu")
    stream, event = runtime.make_copy_stream("copies"), runtime.make_event()
    hold = threading.Event()
    done: list[int] = []

    def work() -> None:
        hold.wait(30)
        done.append(1)
        event.record()

    stream.submit(work)
    stream.submit(lambda: done.append(2))
    assert not event.query()
    hold.set()
    event.wait()
    assert event.query()
    stream.close()
    stream.close()
    assert done == [1, 2]


def test_copies_that_nobody_waits_for_give_way(monkeypatch: pytest.MonkeyPatch) -> None:
    gave_way: list[str] = []
    monkeypatch.setattr(
        cpu_runtime, "lower_priority", lambda: gave_way.append(threading.current_thread().name)
    )
    for name, is_urgent in (("load", True), ("write", False)):
        device_runtime("cpu").make_copy_stream(name, is_urgent=is_urgent).close()
    assert gave_way == ["write"]


def test_a_cpu_stages_nothing_and_has_no_handles() -> None:
    runtime = device_runtime("cpu")
    tensor = torch.arange(3)
    assert runtime.stage_to_device(tensor) is tensor
    assert on_device([1, 2], "cpu", torch.int32).tolist() == [1, 2]
    copies = runtime.copy_to_host([tensor, None])
    assert copies.is_done
    assert copies.wait()[0] is tensor
    assert copies.wait()[1] is None
    side = runtime.make_side_stream()
    side.follow()
    with side.use():
        runtime.keep_for_current_stream(tensor)
    side.join()
    runtime.synchronize()
    runtime.set_device(1)
    free, total = runtime.memory()
    assert 0 < free <= total
    assert not runtime.pins_memory
    assert runtime.host_cpus_near_device() == frozenset()
    with pytest.raises(ValueError, match="a CPU has no handles of streams"):
        _ = runtime.here().handle
    with pytest.raises(ValueError, match="a CPU does not lock host memory in place"):
        runtime.register_host_memory(4096, 4096)


def test_devices_without_kernels_of_their_own_have_none() -> None:
    assert fused_kernels("cpu") is None
    assert fused_kernels("npu:1") is None


def test_cuda_devices_have_kernels() -> None:
    pytest.importorskip("triton")
    kernels = fused_kernels("cuda")
    assert kernels is fused_kernels(torch.device("cuda", 1))
    assert kernels is not None
    assert kernels.plan_gemv(8, 512) == (2, 512, 4)
