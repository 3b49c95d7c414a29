"""Copies between a pool on CUDA and the host, issued without a device, to count what they cost the
thread that issues them.

Device memory is host memory. Tensors on the device say that they are not on the CPU, and the
driver's copies are made by memmove. Kernels run if Triton interprets them; otherwise they are only
counted, and no bytes move.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rigs.call_counts import uncounted
from sglang.srt.constants import KIB, MIB
from sglang.srt.hardware_backend import device_runtime as runtimes
from sglang.srt.hardware_backend.cuda.runtime import CudaRuntime
from sglang.srt.mem_cache.device import page_digests
from sglang.srt.mem_cache.host import host_copy_cuda, page_copier, staged_copy
from sglang.srt.mem_cache.host.copy_runs import CopyGrids, CopyRuns
from sglang.srt.mem_cache.host.staged_copy import LoadTuning

SHRINK = 32
"""Lengths that decide how pages are copied are this many times shorter than on a GPU."""
_STEP_BYTES = 10**6
_STATE_BYTES = 64 * KIB
"""Lengths of loads of states, which are shorter still."""


class OnDevice(torch.Tensor):
    """A tensor that says it is not on the CPU; so does what is computed from it."""

    is_cpu = False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return uncounted(super().__torch_function__)(func, types, args, kwargs)

    def record_stream(self, stream: object) -> None:
        pass


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of `tensor` on the device."""
    return tensor.clone().as_subclass(OnDevice)


def _on_cpu(value: Any) -> Any:
    return value.as_subclass(torch.Tensor) if isinstance(value, OnDevice) else value


class IssuedWork(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts while it is entered: operations of torch, kernels, uploads, downloads, allocations of
    page-locked memory, copies by copy engines, records of events, waits for them, changes of the
    stream."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()
        self.is_reached = True
        """False: no event has been reached."""
        self._is_inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A view of a tensor as another class is the rig's.
        if not self._is_inside and func is not torch.ops.aten.detach.default:
            self.counts["torch"] += 1
        return func(*args, **(kwargs or {}))

    @contextmanager
    def one(self, kind: str) -> Iterator[None]:
        """Count what is done inside as one of `kind`."""
        self.counts[kind] += 1
        before, self._is_inside = self._is_inside, True
        yield
        self._is_inside = before


class _Event:
    def __init__(self, work: IssuedWork) -> None:
        self._work = work

    def record(self, stream: object = None) -> None:
        self._work.counts["record"] += 1

    def query(self) -> bool:
        return self._work.is_reached

    def synchronize(self) -> None:
        pass


class _Stream:
    cuda_stream = 1

    def __init__(self, work: IssuedWork) -> None:
        self._work = work

    def wait_event(self, event: object) -> None:
        self._work.counts["wait"] += 1

    wait_stream = wait_event

    def synchronize(self) -> None:
        pass


class _Runtime(CudaRuntime):
    def __init__(self, work: IssuedWork) -> None:
        stream = _Stream(work)

        def set_stream(stream: object) -> None:
            work.counts["stream"] += 1

        api = SimpleNamespace(
            Event=lambda: _Event(work),
            Stream=lambda *_, **__: _Stream(work),
            current_stream=lambda _: stream,
            set_stream=set_stream,
            empty_cache=lambda: None,
            mem_get_info=lambda _: (0, 0),
            is_available=lambda: False,
        )
        super().__init__("cpu:0", api)
        self._work = work

    @uncounted
    def stage_to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_cpu:
            return tensor
        with self._work.one("upload"):
            return on_device(tensor)

    @uncounted
    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        with self._work.one("download"):
            copy: torch.Tensor = _on_cpu(tensor).clone()
            return copy

    @uncounted
    def empty_on_host(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        with self._work.one("pin"):
            return torch.empty(size, dtype=dtype)


class _Engine:
    def __init__(self, work: IssuedWork) -> None:
        self._work = work

    @uncounted
    def copy(self, runs: CopyRuns, stream: int) -> None:
        self._work.counts["engine"] += 1
        for to, source, size in zip(
            runs.destinations.tolist(), runs.sources.tolist(), runs.sizes.tolist(), strict=True
        ):
            ctypes.memmove(to, source, size)

    @uncounted
    def copy_grids(self, grids: CopyGrids, stream: int) -> None:
        self._work.counts["engine"] += len(grids.sources)
        for source, to in zip(grids.sources.tolist(), grids.destinations.tolist(), strict=True):
            for run in range(grids.runs):
                begin = source + run * grids.source_stride
                ctypes.memmove(to + run * grids.destination_stride, begin, grids.run_bytes)


def use_counted_cuda(patch: pytest.MonkeyPatch) -> IssuedWork:
    """Let pools that are made from now on be copied and hashed as on CUDA, and count the work."""
    from triton import knobs

    from sglang.srt.hardware_backend.cuda.bound_kernel import BoundKernel

    work = IssuedWork()
    runtime = _Runtime(work)
    patch.setitem(runtimes._REGISTERED, "cpu", lambda _: runtime)
    runtimes.device_runtime.cache_clear()
    patch.setitem(page_copier._COPIERS, "cpu", page_copier._COPIERS["cuda"])
    patch.setitem(page_digests._HASHERS, "cpu", page_digests._HASHERS["cuda"])
    patch.setattr(host_copy_cuda, "CopyEngine", lambda: _Engine(work))
    for name in ("_LONG_RUN_BYTES", "_GRID_RUN_BYTES"):
        patch.setattr(host_copy_cuda, name, getattr(host_copy_cuda, name) // SHRINK)
    tuning = LoadTuning()
    shrunk = LoadTuning(
        step_bytes=_STEP_BYTES,
        run_bytes=tuning.run_bytes // SHRINK,
        state_bytes=_STATE_BYTES,
    )
    patch.setattr(host_copy_cuda, "LoadTuning", lambda: shrunk)
    patch.setattr(staged_copy, "_MIN_BUFFER_BYTES", 4 * MIB)
    launch = BoundKernel.__call__

    @uncounted
    def launched(kernel: BoundKernel, grid: tuple[int, int, int], *arguments: int) -> None:
        with work.one("kernel"):
            if knobs.runtime.interpret:
                launch(kernel, grid, *arguments)

    patch.setattr(BoundKernel, "__call__", launched)
    return work
