"""Facts about each kind of device that need no torch: names, defaults, limits, packages.

The single source for flags that depend on the device. Plain values, any process, any thread.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Final

_KV_CACHE_DTYPES: Final = ("auto", "float32", "bfloat16", "float16")
_FP8: Final = "fp8_e4m3"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceKind:
    """One kind of device. Its name is torch's type of the device, such as `cuda` for `cuda:1`."""

    name: str
    title: str
    """Name with an article, for messages: "a GPU"."""
    runtime: str
    """Dotted path of the `DeviceRuntime` class."""
    attention_backends: tuple[str, ...]
    """Attention backends that run on it, the default first."""
    process_group: str
    """Backend of torch.distributed for this kind."""
    kv_cache_dtypes: tuple[str, ...] = _KV_CACHE_DTYPES
    """Choices of `--kv-cache-dtype`."""
    reads_fp8_heads: bool = False
    """True if attention reads keys and values per head in fp8; otherwise latent rows alone may be
    in fp8."""
    prefill_chunk_tokens: int
    """Default of `--chunked-prefill-size`."""
    overlaps_steps: bool = True
    """True if the device computes a step while the CPU prepares the next one. On a CPU nothing
    would overlap, and interrupting the CPU interrupts the model."""
    has_own_memory: bool = True
    """True if it has its own memory; otherwise L1 takes a small part of the shared host memory."""
    warms_up: bool = True
    """True if kernels are compiled, and memory is taken, on first use."""
    has_symmetric_memory: bool = False
    """True if kernels can read the memory of other devices of the machine."""
    captures_graphs: bool = False
    """True if graphs can capture steps."""
    package: str | None = None
    """Python package that torch needs for it."""
    package_flags: tuple[tuple[str, str], ...] = ()
    """Fields of the server's arguments, with the values that need the package."""
    package_remedy: str = ""
    """Packages to install."""

    def missing_package(self) -> str | None:
        """Reason why the kind cannot be used here, with the packages to install; None: the package
        is installed. Does not import it."""
        if self.package is None or importlib.util.find_spec(self.package) is not None:
            return None
        return f"{self.package} is not installed; {self.package_remedy}"


CPU: Final = DeviceKind(
    name="cpu",
    title="a CPU",
    runtime="sglang.srt.hardware_backend.cpu.runtime.CpuRuntime",
    attention_backends=("torch_native",),
    process_group="gloo",
    kv_cache_dtypes=(*_KV_CACHE_DTYPES, _FP8),
    prefill_chunk_tokens=2048,
    overlaps_steps=False,
    has_own_memory=False,
    warms_up=False,
)
CUDA: Final = DeviceKind(
    name="cuda",
    title="a GPU",
    runtime="sglang.srt.hardware_backend.cuda.runtime.CudaRuntime",
    attention_backends=("triton", "flashinfer", "flashmla", "torch_native"),
    process_group="nccl",
    kv_cache_dtypes=(*_KV_CACHE_DTYPES, _FP8),
    reads_fp8_heads=True,
    prefill_chunk_tokens=8192,
    has_symmetric_memory=True,
    captures_graphs=True,
)
NPU: Final = DeviceKind(
    name="npu",
    title="an NPU",
    runtime="sglang.srt.hardware_backend.npu.runtime.NpuRuntime",
    # The default needs no special kernel; `ascend` needs pages of a multiple of 16 tokens.
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

# In the order of preference of `--device auto`.
DEVICE_KINDS: Final = {kind.name: kind for kind in (CUDA, NPU, CPU)}


def device_kind(device: str) -> DeviceKind:
    """The kind of a device such as `cuda` or `cuda:1`.

    Raises:
        ValueError: There is no such kind; the message lists the kinds.
    """
    kind = DEVICE_KINDS.get(device.partition(":")[0])
    if kind is None:
        raise ValueError(f"device {device!r} is not supported; use {' or '.join(DEVICE_KINDS)}")
    return kind
