"""Calls of the CUDA and NPU runtimes to their libraries, in order. Needs no device."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from collections.abc import Iterator

import pytest
import torch

from rigs.models.recorded_calls import RecordedCalls, fake_torch_npu
from sglang.srt.hardware_backend.accelerator import AcceleratorRuntime
from sglang.srt.hardware_backend.cuda.runtime import CudaRuntime
from sglang.srt.hardware_backend.device_runtime import device_runtime
from sglang.srt.hardware_backend.npu import runtime as npu_runtime
from sglang.srt.observability.engine_metrics import SchedulerLoad, SchedulerMetrics
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

ANSWERS = {
    "Event().query()": True,
    "is_available()": True,
    "mem_get_info(1)": (3, 10),
    "mem_get_info(cuda:1)": (3, 10),
    "current_stream(1)": types.SimpleNamespace(npu_stream=77),
    "cudart().cudaHostRegister(4096, 8192, 0)": 0,
    "cudart().cudaHostRegister(4096, 1, 0)": 2,
    "get_device_name(1)": "Ascend910",
}


@pytest.fixture
def log() -> list[str]:
    return []


@pytest.fixture(params=["cuda", "npu"])
def runtime(
    request: pytest.FixtureRequest, log: list[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[AcceleratorRuntime]:
    """The second device of either kind; the log writes it as `N`."""
    answers = {k: v for k, v in ANSWERS.items() if k != "current_stream(1)"}
    if request.param == "cuda":
        yield CudaRuntime("cuda:1", RecordedCalls(log, answers))
        return
    monkeypatch.setitem(sys.modules, "torch_npu", fake_torch_npu(log, answers))
    yield npu_runtime.NpuRuntime("npu:1")


def written(log: list[str]) -> list[str]:
    """The log with the device as `N`, and empty again."""
    lines = [line.replace("cuda:1", "N").replace("(1", "(N") for line in log]
    log.clear()
    return lines


def test_a_copy_stream_follows_its_caller_unless_told_otherwise(
    runtime: AcceleratorRuntime, log: list[str]
) -> None:
    stream = runtime.make_copy_stream("copies")
    stream.submit(lambda: log.append("work"))
    assert written(log) == [
        "Stream(N, priority=-1)",
        "current_stream(N)",
        "Stream(N, priority=-1).wait_stream(current_stream(N))",
        "set_stream(Stream(N, priority=-1))",
        "work",
        "set_stream(current_stream(N))",
    ]
    stream.submit(lambda: log.append("work"), follows_caller=False)
    stream.close()
    assert written(log) == [
        "current_stream(N)",
        "set_stream(Stream(N, priority=-1))",
        "work",
        "set_stream(current_stream(N))",
        "Stream(N, priority=-1).synchronize()",
    ]
    runtime.make_copy_stream("writes", is_urgent=False)
    assert written(log) == ["Stream(N, priority=0)"]


def test_an_event_is_not_reached_before_it_is_recorded(
    runtime: AcceleratorRuntime, log: list[str]
) -> None:
    event = runtime.make_event()
    assert not event.query()
    assert written(log) == ["Event()"]
    event.record()
    assert event.query()
    event.wait()
    event.synchronize()
    assert written(log) == [
        "current_stream(N)",
        "Event().record(current_stream(N))",
        "Event().query()",
        "current_stream(N)",
        "current_stream(N).wait_event(Event())",
        "Event().synchronize()",
    ]


def test_a_side_stream_forks_and_joins(runtime: AcceleratorRuntime, log: list[str]) -> None:
    side = runtime.make_side_stream()
    side.follow()
    with side.use():
        log.append("work")
    side.join()
    assert written(log) == [
        "Stream(N, priority=-1)",
        "current_stream(N)",
        "Stream(N, priority=-1).wait_stream(current_stream(N))",
        "current_stream(N)",
        "set_stream(Stream(N, priority=-1))",
        "work",
        "set_stream(current_stream(N))",
        "current_stream(N)",
        "current_stream(N).wait_stream(Stream(N, priority=-1))",
    ]


def test_a_stream_that_is_looked_up_once_takes_events_and_follows_others(
    runtime: AcceleratorRuntime, log: list[str]
) -> None:
    side, event = runtime.make_side_stream(), runtime.make_event()
    written(log)
    here = runtime.here()
    side.follow(here)
    side.wait(event)
    side.record(event)
    here.follow(side)
    assert event.query()
    assert written(log) == [
        "current_stream(N)",
        "Stream(N, priority=-1).wait_stream(current_stream(N))",
        "Stream(N, priority=-1).wait_event(Event())",
        "Event().record(Stream(N, priority=-1))",
        "current_stream(N).wait_stream(Stream(N, priority=-1))",
        "Event().query()",
    ]


def test_sizes_are_asked_after_unused_memory_went_back(
    runtime: AcceleratorRuntime, log: list[str]
) -> None:
    assert runtime.memory() == (3, 10)
    runtime.synchronize()
    runtime.set_device(3)
    assert runtime.why_absent() is None
    assert written(log) == [
        "empty_cache()",
        "mem_get_info(N)",
        "synchronize(N)",
        "set_device(3)",
        "is_available()",
    ]


@pytest.mark.parametrize(
    ("capability", "wanted"), [((8, 9), False), ((9, 0), True), ((12, 0), True)]
)
def test_kernels_start_early_from_hopper_on(capability: tuple[int, int], wanted: bool) -> None:
    api = types.SimpleNamespace(get_device_capability=lambda device: capability)
    assert CudaRuntime("cuda:1", api).starts_kernels_early is wanted
    assert not device_runtime("cpu").starts_kernels_early


def test_kernels_of_a_gpu_divide_its_shared_memory() -> None:
    asked = []

    def properties(device: torch.device) -> types.SimpleNamespace:
        asked.append(device)
        return types.SimpleNamespace(shared_memory_per_multiprocessor=102_400)

    api = types.SimpleNamespace(get_device_properties=properties)
    assert CudaRuntime("cuda:1", api).shared_memory == 102_400
    assert asked == [torch.device("cuda:1")]


class FakeTensor:
    """A tensor on a device, as far as a runtime looks at it."""

    is_cpu = False
    is_cuda = True
    device = "1"

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def record_stream(self, stream: object) -> None:
        self._log.append(f"record_stream({stream})")

    def pin_memory(self) -> FakeTensor:
        self._log.append("pin_memory()")
        return self

    def to(self, device: object, *, non_blocking: bool) -> FakeTensor:
        self._log.append(f"to({device}, {non_blocking})")
        return self


def test_host_copies_are_begun_at_once_and_waited_for_alone(
    runtime: AcceleratorRuntime, log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = torch.arange(2), FakeTensor(log)

    def download(tensor: object) -> torch.Tensor:
        assert tensor is there
        log.append("download")
        return torch.arange(9)

    monkeypatch.setattr(runtime, "download", download)
    copies = runtime.copy_to_host([here, there, None, there])  # type: ignore[list-item]
    assert written(log) == [
        "download",
        "Event()",
        "download",
        "current_stream(N)",
        "Event().record(current_stream(N))",
    ]
    assert copies.is_done
    got = copies.wait()
    assert written(log) == ["Event().query()", "Event().synchronize()"]
    assert [None if tensor is None else len(tensor) for tensor in got] == [2, 9, None, 9]
    nothing = runtime.copy_to_host([here])
    assert nothing.is_done
    assert nothing.wait() == [here]
    assert not log


def test_a_tensor_of_another_stream_is_kept(runtime: AcceleratorRuntime, log: list[str]) -> None:
    runtime.keep_for_current_stream(FakeTensor(log))  # type: ignore[arg-type]
    assert written(log) == ["current_stream(N)", "record_stream(current_stream(N))"]
    runtime.keep_for_current_stream(torch.arange(2))
    assert not log


def test_cuda_locks_host_memory_in_place(log: list[str]) -> None:
    runtime = CudaRuntime("cuda", RecordedCalls(log, ANSWERS))
    assert runtime.pins_memory
    runtime.register_host_memory(4096, 8192)
    runtime.unregister_host_memory(4096)
    assert log[1:] == [
        "cudart()",
        "cudart().cudaHostRegister(4096, 8192, 0)",
        "cudart()",
        "cudart().cudaHostUnregister(4096)",
    ]
    with pytest.raises(MemoryError, match="of 1 bytes failed with CUDA error 2"):
        runtime.register_host_memory(4096, 1)


def test_cuda_names_whole_allocations(log: list[str]) -> None:
    """Three tensors in one segment, one in none, one that only begins in one."""
    memory = torch.zeros(100, dtype=torch.uint8)
    other, beyond = torch.zeros(10, dtype=torch.uint8), torch.zeros(50, dtype=torch.uint8)
    base, edge = memory.data_ptr(), beyond.data_ptr()
    segments = [{"address": base - 512, "total_size": 1024}, {"address": edge, "total_size": 20}]
    runtime = CudaRuntime("cuda", RecordedCalls(log, {"memory_snapshot()": segments[::-1]}))
    found = runtime.allocations_of([memory[:30], memory[30:], memory.view(10, 10), beyond, other])
    assert log == ["memory_snapshot()"], "asked once"
    inside = base - 512 <= other.data_ptr() and other.data_ptr() + 10 <= base + 512
    assert found == {base - 512: 1024, edge: 50} | ({} if inside else {other.data_ptr(): 10})


def test_on_a_cpu_an_allocation_is_a_storage() -> None:
    memory, other = torch.zeros(100), torch.zeros(3)
    found = device_runtime("cpu").allocations_of([memory[10:20], memory[30:], other])
    assert found == {memory.data_ptr(): 400, other.data_ptr(): 12}


def test_cuda_says_why_it_is_absent(log: list[str]) -> None:
    runtime = CudaRuntime("cuda", RecordedCalls(log, {"is_available()": False}))
    assert runtime.why_absent() == "torch sees no CUDA device here"
    assert not runtime.pins_memory


@pytest.fixture
def npu(log: list[str], monkeypatch: pytest.MonkeyPatch) -> npu_runtime.NpuRuntime:
    monkeypatch.setitem(sys.modules, "torch_npu", fake_torch_npu(log, ANSWERS))
    return npu_runtime.NpuRuntime("npu:1")


def test_an_npu_is_made_current_before_anything_else(
    npu: npu_runtime.NpuRuntime, log: list[str]
) -> None:
    npu.prepare()
    assert npu.device_name() == "Ascend910"
    assert npu.here().handle == 77
    assert log == ["set_device(1)", "get_device_name(1)", "current_stream(1)"]


def test_an_npu_without_an_index_is_the_current_one(
    log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks set their own device, and ask for the runtime of `npu`."""
    answers = {
        "current_device()": 3,
        "mem_get_info(None)": (3, 10),
        "current_stream(3)": types.SimpleNamespace(npu_stream=77),
    }
    monkeypatch.setitem(sys.modules, "torch_npu", fake_torch_npu(log, answers))
    runtime = npu_runtime.NpuRuntime("npu")
    runtime.prepare()
    assert log == ["current_device()", "set_device(3)"]
    log.clear()
    assert runtime.memory() == (3, 10)
    assert runtime.here().handle == 77
    runtime.make_copy_stream("copies")
    there = FakeTensor(log)
    there.is_cpu = True
    runtime.stage_to_device(there)  # type: ignore[arg-type]
    assert log == [
        "empty_cache()",
        "mem_get_info(None)",
        "current_device()",
        "current_stream(3)",
        "Stream(None, priority=-1)",
        "pin_memory()",
        "to(npu, True)",
    ]


def test_an_npu_stages_through_locked_memory(npu: npu_runtime.NpuRuntime, log: list[str]) -> None:
    there = FakeTensor(log)
    assert npu.stage_to_device(there) is there  # type: ignore[arg-type, comparison-overlap]
    assert not log
    there.is_cpu = True
    npu.stage_to_device(there)  # type: ignore[arg-type]
    assert log == ["pin_memory()", "to(npu:1, True)"]
    assert not npu.pins_memory


def test_without_torch_npu_an_npu_is_refused_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    with pytest.raises(ValueError, match="torch_npu is not installed; install CANN and the torch"):
        device_runtime("npu")
    broken = fake_torch_npu([], {})
    del broken.npu
    monkeypatch.setitem(sys.modules, "torch_npu", broken)
    with pytest.raises(ValueError, match=r"torch_npu does not load \(.*'npu'\); install CANN"):
        device_runtime("npu")


def test_an_npu_that_is_not_there_says_so(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    fake = fake_torch_npu(log, {"is_available()": False})
    monkeypatch.setitem(sys.modules, "torch_npu", fake)
    assert npu_runtime.NpuRuntime("npu").why_absent() == "torch_npu sees no NPU here"


def test_compiled_kernels_are_counted_and_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Triton calls its hook with keyword arguments, and more of them in newer releases."""
    knobs = types.SimpleNamespace(runtime=types.SimpleNamespace(jit_post_compile_hook=None))
    triton = types.ModuleType("triton")
    triton.__spec__ = importlib.machinery.ModuleSpec("triton", None)
    monkeypatch.setattr(triton, "knobs", knobs, raising=False)
    monkeypatch.setitem(sys.modules, "triton", triton)
    metrics = SchedulerMetrics()
    idle = SchedulerLoad(
        num_running=0, num_queued=0, pool_tokens=1, free_tokens=1, evictable_tokens=0
    )
    CudaRuntime("cuda:1", RecordedCalls([], ANSWERS)).on_kernel_compiled(metrics.on_kernel_compiled)
    for name in ("_rule_kernel", "_latent_kernel"):
        knobs.runtime.jit_post_compile_hook(key="k", fn=types.SimpleNamespace(name=name))
    text = metrics.render(idle)
    assert "sglang:kernel_compilations_total 2.0" in text
    assert "_latent_kernel was compiled in service" in caplog.text


def test_nothing_is_compiled_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    CudaRuntime("cuda:1", RecordedCalls([], ANSWERS)).on_kernel_compiled(pytest.fail)
