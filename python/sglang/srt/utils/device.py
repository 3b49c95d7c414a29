"""Streams, events and pinned memory for every device, with the CPU as a first-class one.

The one place that knows `torch.cuda`. On an accelerator a `CopyStream` is a stream of the
device. On a CPU it is a worker thread with a FIFO queue: copies really are asynchronous there
too (torch releases the GIL while it copies), so whatever holds for copies in flight is exercised
on every machine and not only where there is a GPU.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import numpy.typing as npt
import psutil
import torch

from sglang.srt.utils.threads import leave_cores_to_model

logger = logging.getLogger(__name__)

_PCI_DEVICES = Path("/sys/bus/pci/devices")


class Event(Protocol):
    """A point in a `CopyStream`. `record` is called inside the stream's work."""

    def record(self) -> None:
        """Mark the point: everything submitted to the stream before it comes first."""

    def query(self) -> bool:
        """True once the point has been reached. Never blocks."""

    def synchronize(self) -> None:
        """Block the calling thread until the point has been reached."""

    def wait(self) -> None:
        """Order the current stream (on a CPU: the calling thread) after the point."""


class _CpuEvent:
    def __init__(self) -> None:
        self._reached = threading.Event()

    def record(self) -> None:
        self._reached.set()

    def query(self) -> bool:
        return self._reached.is_set()

    def synchronize(self) -> None:
        self._reached.wait()

    wait = synchronize


class _CudaEvent:
    def __init__(self) -> None:
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._recorded = False

    def record(self) -> None:
        self._event.record(torch.cuda.current_stream())
        self._recorded = True

    def query(self) -> bool:
        return self._recorded and bool(self._event.query())  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        self._event.synchronize()

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)


class CopyStream:
    """Runs copy functions one after the other, beside the caller.

    Threads: `submit` may be called from any one thread (the scheduler's). On a CPU the work
    runs in a daemon thread that this object owns and `close` ends; on CUDA it is issued by the
    caller into a stream of its own, which first waits for the caller's current stream.

    A copy that raises is a bug of ours that would leave wrong bytes in a cache: the process
    ends with the cause (`os._exit`), since nobody may go on reading those pages.
    """

    def __init__(self, device: torch.device | str, name: str, *, is_urgent: bool = True) -> None:
        """Args:
        device: Of the copies' device side.
        name: Of the thread.
        is_urgent: On CUDA its kernels go before those of the caller's stream: a forward waits.
        """
        self._device = torch.device(device)
        self._name = name
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stream: torch.cuda.Stream | None = None
        if self._device.type == "cuda":
            self._stream = torch.cuda.Stream(  # type: ignore[no-untyped-call]
                self._device, priority=-1 if is_urgent else 0
            )
        else:
            self._thread = threading.Thread(target=self._work, name=name, daemon=True)
            self._thread.start()

    def submit(self, work: Callable[[], None], *, follows_caller: bool = True) -> None:
        """Queue `work` behind what was submitted before. It records its own events.

        Args:
            follows_caller: On CUDA, behind what the caller's stream has queued as well.
        """
        if self._stream is None:
            self._queue.put(work)
            return
        if follows_caller:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            work()

    def close(self) -> None:
        """End the worker after the work already queued. Idempotent."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None
        elif self._stream is not None:
            self._stream.synchronize()

    def _work(self) -> None:
        leave_cores_to_model()
        while (work := self._queue.get()) is not None:
            try:
                work()
            except Exception:
                logger.critical("copy stream %s failed; its pages are unusable", self._name)
                logger.exception("the cause")
                logging.shutdown()
                os._exit(70)


def make_event(device: torch.device | str) -> Event:
    """An event for work on `device`; not reached until it has been recorded and passed."""
    return _CudaEvent() if torch.device(device).type == "cuda" else _CpuEvent()


def detect_device() -> str:
    """`cuda` where torch sees one, `npu` where torch_npu is installed, else `cpu`."""
    if torch.cuda.is_available():
        return "cuda"
    if hasattr(torch, "npu") and torch.npu.is_available():
        return "npu"
    return "cpu"


def can_pin_memory(device: torch.device | str) -> bool:
    """True where copies to `device` gain from page-locked host memory."""
    return torch.device(device).type == "cuda" and torch.cuda.is_available()


def device_memory(device: torch.device | str) -> tuple[int, int]:
    """Bytes of memory on `device` that are free, and that there are.

    On a CPU what the system says is available without swapping.
    """
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        return free, total
    memory = psutil.virtual_memory()
    return memory.available, memory.total


def synchronize(device: torch.device | str) -> None:
    """Wait until `device` has done what was queued; a CPU has."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def device_name(device: torch.device | str) -> str:
    """What the vendor calls the device; `cpu` for a CPU."""
    device = torch.device(device)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


class SideStream:
    """A CUDA stream beside the current one, for work that it forks and joins again."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._stream: torch.cuda.Stream = torch.cuda.Stream(  # type: ignore[no-untyped-call]
            self._device, priority=-1
        )

    def follow(self) -> None:
        """Order this stream after what the current one has queued until now."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def use(self) -> AbstractContextManager[Any]:
        """Make this stream the current one."""
        return torch.cuda.stream(self._stream)

    def join(self) -> None:
        """Order the current stream after what this one has queued until now."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


def keep_for_current_stream(tensor: torch.Tensor) -> None:
    """Let `tensor`'s memory be reused only after what the current stream has queued until now.

    For a tensor made on another stream, whose last reference may go while this one reads it.
    """
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


def stage_to_device(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """A copy of a CPU tensor on `device`, in order with the current stream and without waiting.

    A tensor that is there already is returned as it is.
    """
    device = torch.device(device)
    if tensor.device.type == device.type:
        return tensor
    if device.type == "cuda":
        from sglang.srt.utils import small_copies

        if small_copies.suits(tensor):
            return small_copies.upload(tensor, device)
    # The page-locked copy belongs to torch's cache, which reuses it only after the transfer.
    return tensor.pin_memory().to(device, non_blocking=True)


def on_device(
    values: Sequence[int] | Sequence[float] | npt.NDArray[Any],
    device: torch.device | str,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """`torch.tensor(values)` on `device`, without waiting for what runs there."""
    return stage_to_device(torch.tensor(values, dtype=dtype), device)


class HostCopies:
    """Copies of tensors on their way to the CPU, begun when this is made.

    They are made in order with the current stream, so that what overwrites a tensor later does
    not hurt, and `wait` waits for them alone and not for what was queued after them.
    """

    def __init__(self, tensors: Sequence[torch.Tensor | None]) -> None:
        self._event: _CudaEvent | None = None
        self._copies: list[torch.Tensor | None] = []
        for tensor in tensors:
            if tensor is None or not tensor.is_cuda:
                self._copies.append(tensor)
                continue
            self._copies.append(_to_pinned(tensor))
            self._event = self._event or _CudaEvent()
        if self._event is not None:
            self._event.record()

    @property
    def is_done(self) -> bool:
        """Whether `wait` would return at once. Never blocks."""
        return self._event is None or self._event.query()

    def wait(self) -> list[torch.Tensor | None]:
        """The tensors on the CPU, in their order. Blocks until they are there."""
        if self._event is not None:
            self._event.synchronize()
        return self._copies


def _to_pinned(tensor: torch.Tensor) -> torch.Tensor:
    """A page-locked copy of a CUDA tensor, made in order with the current stream."""
    from sglang.srt.utils import small_copies

    if small_copies.suits(tensor):
        return small_copies.download(tensor)
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)


def current_stream_handle(device: torch.device | str) -> int:
    """The `cudaStream_t` of the current stream; 0 is the default stream."""
    return int(torch.cuda.current_stream(torch.device(device)).cuda_stream)


def register_host_memory(address: int, size: int) -> None:
    """Page-lock `size` bytes at `address` for every CUDA device. Releases the GIL.

    Raises:
        MemoryError: The driver refused.
    """
    code = torch.cuda.cudart().cudaHostRegister(address, size, 0)  # type: ignore[no-untyped-call]
    if int(code):
        raise MemoryError(f"cudaHostRegister of {size} bytes failed with CUDA error {int(code)}")


def unregister_host_memory(address: int) -> None:
    """Undo `register_host_memory`. Errors are ignored: the context may be gone already."""
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


def host_cpus_near_device() -> frozenset[int]:
    """CPUs of the NUMA node that the current CUDA device hangs on; empty where unknown."""
    # torch's type stubs do not know all of the properties.
    gpu: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    try:
        address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
        ranges = (_PCI_DEVICES / address / "local_cpulist").read_text().strip()
        return frozenset(
            cpu
            for first, _, last in (part.partition("-") for part in ranges.split(","))
            for cpu in range(int(first), int(last or first) + 1)
        )
    except (OSError, ValueError, AttributeError):
        return frozenset()
