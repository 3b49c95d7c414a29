"""Facts about each kind of device, known without torch: names, defaults, limits, needed packages.

The one source for the flags that depend on the device. Plain values, any process, any thread.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Final

_KV_CACHE_DTYPES: Final = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceKind:
    """One kind of device. Its name is torch's type of the device: `cuda` of `cuda:1`."""

    name: str
    title: str
    """Name with an article, for messages: "a GPU"."""
    runtime: str
    """Path of the `DeviceRuntime` class: module and name, with a dot between them."""
    attention_backends: tuple[str, ...]
    """Those that run on it, the default first."""
    process_group: str
    """Backend of torch.distributed between devices of this kind."""
    kv_cache_dtypes: tuple[str, ...] = _KV_CACHE_DTYPES
    """Choices of `--kv-cache-dtype`."""
    prefill_chunk_tokens: int
    """Default of `--chunked-prefill-size`."""
    overlaps_steps: bool = True
    """The device computes while the CPU launches what comes next. On a CPU nothing would overlap,
    and what interrupts the CPU interrupts the model."""
    has_own_memory: bool = True
    """Its memory is apart from the host's; otherwise L1 takes a small part of what all share."""
    warms_up: bool = True
    """Kernels are compiled, and memory is taken, where something is done for the first time."""
    has_symmetric_memory: bool = False
    """Devices of one machine can read each other's memory inside a kernel."""
    captures_graphs: bool = False
    """Steps can be captured as graphs."""
    package: str | None = None
    """Python package that torch needs for it."""
    package_flags: tuple[tuple[str, str], ...] = ()
    """Fields of the server's arguments, and the values of them that need the package."""
    package_remedy: str = ""
    """Packages to install."""

    def missing_package(self) -> str | None:
        """Why the kind cannot be used here, and what to install; None: its package is there.

        Looks for the package without importing it.
        """
        if self.package is None or importlib.util.find_spec(self.package) is not None:
            return None
        return f"{self.package} is not installed; {self.package_remedy}"


CPU: Final = DeviceKind(
    name="cpu",
    title="a CPU",
    runtime="sglang.srt.hardware_backend.cpu.runtime.CpuRuntime",
    attention_backends=("torch_native",),
    process_group="gloo",
    prefill_chunk_tokens=2048,
    overlaps_steps=False,
    has_own_memory=False,
    warms_up=False,
)
CUDA: Final = DeviceKind(
    name="cuda",
    title="a GPU",
    runtime="sglang.srt.hardware_backend.cuda.runtime.CudaRuntime",
    attention_backends=("triton", "flashinfer", "torch_native"),
    process_group="nccl",
    kv_cache_dtypes=(*_KV_CACHE_DTYPES, "fp8_e4m3"),
    prefill_chunk_tokens=8192,
    has_symmetric_memory=True,
    captures_graphs=True,
)
NPU: Final = DeviceKind(
    name="npu",
    title="an NPU",
    runtime="sglang.srt.hardware_backend.npu.runtime.NpuRuntime",
    # The default needs no kernel of its own; `ascend` asks for whole pages of 16 tokens.
    attention_backends=("torch_native", "ascend"),
    process_group="hccl",
    prefill_chunk_tokens=8192,
    package="torch_npu",
    package_flags=(
        ("device", "npu"),
        ("attention_backend", "ascend"),
        ("hicache_io_backend", "kernel_ascend"),
    ),
    package_remedy="install CANN and the torch-npu release that fits this torch, or leave the "
    "flag out",
)

# In the order in which `--device auto` takes them.
DEVICE_KINDS: Final = {kind.name: kind for kind in (CUDA, NPU, CPU)}


def device_kind(device: str) -> DeviceKind:
    """The kind of a device such as `cuda` or `cuda:1`.

    Raises:
        ValueError: There is none of that name; lists those that there are.
    """
    kind = DEVICE_KINDS.get(device.partition(":")[0])
    if kind is None:
        raise ValueError(f"device {device!r} is not supported; use {' or '.join(DEVICE_KINDS)}")
    return kind
