"""Launches of Triton kernels on a CPU that pretends to be a GPU: they compute nothing, and are
recorded as what selects a compiled kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final
from unittest import mock

import torch
import torch.nn.functional as F
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction, create_function_from_signature

from sglang.srt.hardware_backend import device_kinds, device_runtime
from sglang.srt.hardware_backend.cpu.runtime import CpuRuntime
from sglang.srt.hardware_backend.device_kinds import CPU, CUDA
from sglang.srt.layers import fused_kernels
from sglang.srt.layers.attention import attention_registry
from sglang.srt.layers.triton_ops import early_start
from sglang.srt.model_executor import cuda_graph_runner, extend_graph_runner
from sglang.srt.speculative import verify_graphs

_HOPPER: Final = GPUTarget("cuda", 90, 32)
_KIND: Final = replace(
    CPU,
    attention_backends=CUDA.attention_backends,
    reads_fp8_heads=True,
    warms_up=True,
    captures_graphs=True,
)
_EMPTY: Final = torch.empty

Key = tuple[Any, ...]
"""A kernel's name and parameters: types, alignment and constants; and options of its launch."""


class RecordedKernels:
    """Counts launches.

    Attributes:
        keys: Launches of each compiled kernel, in the order of the first.
    """

    def __init__(self) -> None:
        self.keys: dict[Key, int] = {}
        self._backend = make_backend(_HOPPER)

    def run(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        """In place of the launch of `kernel`."""
        bound, specialization, options = _binder(kernel, self._backend)(*args, **named)
        parts = [
            (name, value if kind == "constexpr" else (kind, value))
            for name, (kind, value) in zip(bound, specialization, strict=True)
        ]
        key = (kernel.__name__, *parts, *sorted(options.items()))
        self.keys[key] = self.keys.get(key, 0) + 1


@functools.cache
def _binder(kernel: Any, backend: Any) -> Callable[..., Any]:
    """Triton's own function from arguments to what it specializes a kernel for."""
    if isinstance(kernel, interpreter.InterpretedFunction):
        kernel = JITFunction(kernel.fn, **kernel.kwargs)
    made: Callable[..., Any] = create_function_from_signature(
        kernel.signature, kernel.params, backend
    )
    return made


class _PretendedGpu(CpuRuntime):
    kind = _KIND
    starts_kernels_early = True

    def stage_to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


class _Stream:
    stream_id = 0


class _Graph:
    def replay(self) -> None:
        """The results stay as they are."""


class _Capture:
    """In place of `GraphCapture`. It runs once what it captures, and so records the launches."""

    def __init__(self, *, show_progress: bool = False) -> None:
        del show_progress

    def capture_sizes(self, what: str, sizes: Any, capture: Callable[[Any], Any]) -> Any:
        return {size: capture(size) for size in sizes}

    def capture(self, run: Callable[[], Any]) -> Any:
        return _Graph(), run()

    def capture_pieces(self, run: Callable[[Callable[[], None]], Any]) -> Any:
        """All of it is one piece."""
        return [_Graph()], run(lambda: None)


def _attend_by_cudnn(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: Any, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """In place of cuDNN."""
    return q.new_zeros((*q.shape[:3], v.shape[-1])), torch.zeros((*q.shape[:3], 1))


def _multiply(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """In place of `torch.mm`."""
    shape = len(x), weight.shape[1]
    return torch.zeros(shape, dtype=out_dtype or x.dtype) if out is None else out


def _multiply_scaled(
    x: torch.Tensor, weight: torch.Tensor, *, output_dtype: torch.dtype, **_: Any
) -> torch.Tensor:
    """In place of `F.scaled_mm`."""
    return torch.zeros((len(x), weight.shape[1]), dtype=output_dtype)


def _project(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """In place of `F.linear`."""
    return x.new_zeros((*x.shape[:-1], len(weight)))


def _zeros(*shape: Any, device: Any = None, **named: Any) -> torch.Tensor:
    """In place of `torch.empty`."""
    make = _EMPTY if str(device) == "meta" else torch.zeros
    return make(*shape, device=device, **named)


@contextmanager
def recorded_kernels() -> Iterator[RecordedKernels]:
    """Inside, `cpu` is a GPU whose kernels are recorded. New memory is zeros, since kernels leave
    it as it is."""
    recorded = RecordedKernels()

    def run(kernel: Any, *args: Any, **named: Any) -> None:
        recorded.run(kernel, *args, **named)

    def new_zeros(like: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
        return like.new_zeros(*args, **named)

    patches: list[Any] = [
        mock.patch.object(JITFunction, "run", run),
        mock.patch.object(interpreter.InterpretedFunction, "run", run),
        mock.patch.object(torch, "empty", _zeros),
        mock.patch.object(torch, "empty_like", torch.zeros_like),
        mock.patch.object(torch.Tensor, "new_empty", new_zeros),
        mock.patch.object(torch.accelerator, "current_stream", return_value=_Stream),
        mock.patch.object(torch.Tensor, "is_cuda", True),
        mock.patch.object(torch.Tensor, "is_cpu", False),
        mock.patch.object(torch, "mm", _multiply),
        mock.patch.object(F, "scaled_mm", _multiply_scaled),
        mock.patch.object(F, "linear", _project),
        mock.patch.object(torch.ops.aten, "_scaled_dot_product_cudnn_attention", _attend_by_cudnn),
        mock.patch.dict(device_kinds.DEVICE_KINDS, {"cpu": _KIND}),
        mock.patch.dict(device_runtime._REGISTERED, {"cpu": _PretendedGpu}),
        mock.patch.dict(fused_kernels._MODULES, {"cpu": fused_kernels._MODULES["cuda"]}),
    ]
    for module in (cuda_graph_runner, extend_graph_runner, verify_graphs):
        patches.append(mock.patch.object(module, "GraphCapture", _Capture))
    own = {
        (kind, name, CPU.name): make
        for (kind, name, device), make in attention_registry._BACKENDS.items()
        if device == CUDA.name
    }
    there = {key: make for key, make in attention_registry._BACKENDS.items() if key[2] != CPU.name}
    takers = attention_registry._TAKE_SINKS | {
        key for key in own if (*key[:2], CUDA.name) in attention_registry._TAKE_SINKS
    }
    patches += [
        mock.patch.dict(attention_registry._BACKENDS, own | there, clear=True),
        mock.patch.object(attention_registry, "_TAKE_SINKS", takers),
    ]
    caches = (device_runtime.device_runtime, fused_kernels.fused_kernels, early_start._starts_early)
    for patch in patches:
        patch.start()
    for cache in caches:
        cache.cache_clear()
    try:
        yield recorded
    finally:
        for patch in reversed(patches):
            patch.stop()
        for cache in caches:
            cache.cache_clear()
