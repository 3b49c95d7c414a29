"""A machine as the planner sees it: memory and rates, each with its source."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch

from sglang.benchmark.one_batch import measure_limits
from sglang.srt.constants import GB, MIB
from sglang.srt.hardware_backend.device_kinds import DeviceKind, device_kind
from sglang.srt.hardware_backend.device_runtime import detect_device, device_runtime
from sglang.srt.layers.linear import apply_linear
from sglang.srt.utils.process import host_memory

HOST_BYTES_PER_GPU: Final = 128 * GB
"""Host memory of a machine that is only named, for each GPU."""
MOONCAKE_TCP: Final = 2 * GB
"""Bytes per second that Mooncake moves over TCP; see docs/hicache.md, "Mooncake on one host"."""
_LINK_BYTES: Final = 256 * MIB
_WIDTH: Final = 1024
"""Tokens, inputs and outputs of the layer that a CPU's rate is measured with."""
_RUNS: Final = 3

MEASURED: Final = "measured"
GIVEN: Final = "given"
NAMED: Final = "data sheet"
ASSUMED: Final = "assumed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """A number and where it comes from."""

    value: float
    source: str
    """`MEASURED`, `GIVEN`, `NAMED` or `ASSUMED`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One machine. Rates are those of one rank; sizes of host memory are of the machine."""

    name: str
    kind: DeviceKind
    device_bytes: Quantity
    device_free_bytes: float
    """Bytes that are free before the weights are loaded."""
    host_bytes: Quantity
    """Host memory that is free for the engine."""
    l2_bytes_per_s: Quantity
    """Rate of copies from host memory to the device."""
    l3_bytes_per_s: Quantity
    """Rate of reads from the store."""
    flop_per_s: Quantity
    """Rate of a large product in the model's dtype."""


@dataclass(frozen=True, slots=True)
class _Named:
    device_bytes: int
    link_bytes_per_s: float
    flop_per_s: float


MACHINES: Final[Mapping[str, _Named]] = MappingProxyType(
    {
        # Memory, dense bf16 products: NVIDIA's data sheets. Links: 55 GB/s measured over PCIe 5
        # (benchmark/results/2026-11-21-hicache-transfer.md), and half of it for PCIe 4.
        "a100": _Named(80 * GB, 27.5 * GB, 312e12),
        "h100": _Named(80 * GB, 55 * GB, 989e12),
        "h200": _Named(141 * GB, 55 * GB, 989e12),
        "b200": _Named(180 * GB, 55 * GB, 2250e12),
    }
)
HERE: Final = "here"


def find_machine(name: str, dtype: torch.dtype, *, device: str, num_ranks: int) -> Machine:
    """The machine called `name`, of `MACHINES`, or this one (`HERE`), whose rates are measured.

    Args:
        dtype: Dtype of the products.
        device: `--device`; `auto`: the best one of this machine. It matters for this one alone.
        num_ranks: Ranks on the machine.

    Raises:
        ValueError: The name is unknown, or the device is not there; with the remedy.
    """
    l3 = Quantity(value=MOONCAKE_TCP, source=ASSUMED)
    if name == HERE:
        return _this_machine(dtype, detect_device() if device == "auto" else device, l3)
    if name not in MACHINES:
        raise ValueError(f"--machine {name}: use {HERE} or one of {', '.join(MACHINES)}")
    named = MACHINES[name]
    return Machine(
        name=name,
        kind=device_kind("cuda"),
        device_bytes=Quantity(value=named.device_bytes, source=NAMED),
        device_free_bytes=named.device_bytes,
        host_bytes=Quantity(value=num_ranks * HOST_BYTES_PER_GPU, source=ASSUMED),
        l2_bytes_per_s=Quantity(value=named.link_bytes_per_s, source=MEASURED),
        l3_bytes_per_s=l3,
        flop_per_s=Quantity(value=named.flop_per_s, source=NAMED),
    )


def _this_machine(dtype: torch.dtype, device: str, l3: Quantity) -> Machine:
    runtime = device_runtime(device)
    absent = runtime.why_absent()
    if absent is not None:
        raise ValueError(f"--device {device}: {absent}")
    runtime.prepare()
    free, total = runtime.memory()
    link = _measure_link(device)
    if runtime.kind.has_own_memory:
        product = measure_limits(device, dtype).product_flop_per_s
    else:
        # A CPU without 16-bit products emulates them, faster in a layer than in a plain product.
        product = _measure_layer(device, dtype)
    return Machine(
        name=runtime.device_name(),
        kind=runtime.kind,
        device_bytes=Quantity(value=total, source=MEASURED),
        device_free_bytes=free,
        host_bytes=Quantity(value=host_memory()[0], source=MEASURED),
        l2_bytes_per_s=Quantity(value=link, source=MEASURED),
        l3_bytes_per_s=l3,
        flop_per_s=Quantity(value=product, source=MEASURED),
    )


def _measure_layer(device: str, dtype: torch.dtype) -> float:
    """Floating-point operations per second of the engine's own linear layer."""
    x, weight = (torch.randn(_WIDTH, _WIDTH, device=device).to(dtype) for _ in range(2))
    seconds = []
    for _ in range(_RUNS):
        started = time.perf_counter()
        apply_linear(x, weight)
        seconds.append(time.perf_counter() - started)
    return 2 * _WIDTH**3 / min(seconds)


def _measure_link(device: str) -> float:
    """Bytes per second of one large copy from host memory, page-locked where that matters, to the
    device."""
    runtime = device_runtime(device)
    is_locked = runtime.kind.has_own_memory
    source = torch.zeros(_LINK_BYTES, dtype=torch.uint8, pin_memory=is_locked)
    target = torch.empty(_LINK_BYTES, dtype=torch.uint8, device=device)
    seconds = []
    for _ in range(_RUNS):
        runtime.synchronize()
        started = time.perf_counter()
        target.copy_(source, non_blocking=True)
        runtime.synchronize()
        seconds.append(time.perf_counter() - started)
    return _LINK_BYTES / min(seconds)


def with_given(machine: Machine, **given: float | None) -> Machine:
    """The machine with the quantities that the user gave, by field, in bytes and bytes per second.
    None leaves a field as it is."""
    values = {
        name: Quantity(value=value, source=GIVEN)
        for name, value in given.items()
        if value is not None
    }
    changed = dataclasses.replace(machine, **values)  # type: ignore[arg-type]
    if "device_bytes" in values:
        changed = dataclasses.replace(changed, device_free_bytes=changed.device_bytes.value)
    return changed
