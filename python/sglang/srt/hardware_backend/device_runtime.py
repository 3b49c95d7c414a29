"""One interface to all devices: streams, events, host memory, sizes; and the registry of runtimes.

Code that works with a device calls `device_runtime` once and keeps the result. No other code
compares names of devices: each difference between them is a method or a field here.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch.profiler import ProfilerActivity

from sglang.srt.hardware_backend.device_kinds import DEVICE_KINDS, DeviceKind
from sglang.srt.hardware_backend.leaf_hash import host_digests, pieces_of

logger = logging.getLogger(__name__)


class Event(Protocol):
    """A point in a `CopyStream`; the stream's work calls `record`."""

    def record(self) -> None:
        """Mark the point, after everything submitted to the stream before."""

    def query(self) -> bool:
        """True once the point has been reached. Never blocks."""

    def synchronize(self) -> None:
        """Block the calling thread until the point has been reached."""

    def wait(self) -> None:
        """Make the current stream (on a CPU, the calling thread) wait for the point."""


class CopyStream(ABC):
    """Runs copy functions one after another, concurrently with the caller.

    Threads: `submit` may be called from any one thread (the scheduler's).
    """

    @abstractmethod
    def submit(self, work: Callable[[], None], *, follows_caller: bool = True) -> None:
        """Queue `work` after earlier submissions. It records its own events.

        Args:
            follows_caller: If true, `work` also comes after what the caller's stream has queued. A
                CPU has no such stream: the caller's work is done.
        """

    @abstractmethod
    def close(self) -> None:
        """Wait for the queued work, and end the thread, if there is one. Idempotent."""


class SideStream:
    """A stream that a thread names instead of the current one: a second one, for work that forks
    from the current stream and joins it again, or the current one itself (`DeviceRuntime.here`).

    This class is the calling thread itself, in which everything is in order.
    """

    @property
    def handle(self) -> int:
        """The driver's handle; on CUDA 0 is the default stream. Raises ValueError if the kind of
        device has none."""
        raise ValueError("a CPU has no handles of streams")

    def follow(self, other: SideStream | None = None) -> None:
        """Order this stream after the work that `other` has queued so far; None: the current
        one."""

    def wait(self, event: Event) -> None:
        """Make this stream wait for the point of `event`, if it was ever recorded."""
        event.wait()

    def record(self, event: Event) -> None:
        """Mark the point of `event` in this stream."""
        event.record()

    def use(self) -> AbstractContextManager[Any]:
        """Make this stream the current one."""
        return contextlib.nullcontext()

    def join(self) -> None:
        """Order the current stream after the work that this one has queued so far."""


class MemPool(Protocol):
    """Device memory from an allocator other than torch's. It lives as long as tensors in it."""

    def use(self) -> AbstractContextManager[Any]:
        """Context manager: this thread's device allocations come from this pool."""


@dataclass(slots=True, eq=False)
class HostCopies:
    """Copies of tensors to the CPU.

    They run in order with the current stream, so a tensor may be overwritten later. `wait` waits
    only for them, not for work queued after them.
    """

    _tensors: list[torch.Tensor | None]
    """The tensors on the CPU."""
    _copied: Event | None = None
    """Reached when the copies are complete; None: they are."""

    @property
    def is_done(self) -> bool:
        """True if `wait` would return at once. Never blocks."""
        return self._copied is None or self._copied.query()

    def wait(self) -> list[torch.Tensor | None]:
        """The tensors on the CPU, in order. Blocks until the copies are complete."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._tensors


class DeviceRuntime(ABC):
    """One device, or the current device of its kind if no index is given.

    Any thread may use it. Current streams are those of the calling thread.
    """

    kind: ClassVar[DeviceKind]

    @abstractmethod
    def why_absent(self) -> str | None:
        """Reason why the device cannot be used on this machine; None: it can."""

    def prepare(self) -> None:
        """Prepare the process for the device. Called once, before anything is created on it."""

    @abstractmethod
    def set_device(self, index: int) -> None:
        """Make the device with this index the calling thread's current one. No effect on a CPU."""

    def enter_thread(self) -> None:
        """Make this device the calling thread's current one. A new thread's current device is the
        first one, not that of the thread that started it. No effect on a CPU."""

    # -- order ------------------------------------------------------------------------------------

    @abstractmethod
    def make_event(self) -> Event:
        """An event for work on the device. It is reached once it was recorded and passed."""

    @abstractmethod
    def make_copy_stream(self, name: str, *, is_urgent: bool = True) -> CopyStream:
        """A new stream for copies.

        Args:
            name: Name of its thread, if it has one.
            is_urgent: True if a forward waits for its copies; others have lower priority.
        """

    @abstractmethod
    def make_side_stream(self, *, is_urgent: bool = True) -> SideStream:
        """A new stream in addition to the current one.

        Args:
            is_urgent: True if a forward waits for its work; work of others never overtakes
                forwards.
        """

    @contextlib.contextmanager
    def waiting_for(self, stream: SideStream) -> Iterator[None]:
        """Run the work queued inside on `stream`, and wait for that work at the end."""
        with stream.use():
            yield
            event = self.make_event()
            event.record()
        event.synchronize()

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device has completed all queued work."""

    def here(self) -> SideStream:
        """The calling thread's current stream. Looking it up takes 3 us on a GPU, so who needs it
        several times keeps the result."""
        return SideStream()

    @abstractmethod
    def keep_for_current_stream(self, tensor: torch.Tensor) -> None:
        """Allow reuse of `tensor`'s memory only after the work queued so far on the current stream.

        For a tensor from another stream whose last reference may go while this stream reads it. No
        effect on host memory.
        """

    # -- between host and device ------------------------------------------------------------------

    @abstractmethod
    def stage_to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a CPU tensor to the device, in order with the current stream, without waiting.

        A tensor on the device is returned as it is.
        """

    def stage_all(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Like `stage_to_device`, for several tensors of one dimension and one dtype."""
        return [self.stage_to_device(tensor) for tensor in tensors]

    @abstractmethod
    def empty_on_host(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Host memory `[size]` that kernels of the device may write. The caller keeps it until they
        have ended."""

    @abstractmethod
    def copy_to_host(self, tensors: Sequence[torch.Tensor | None]) -> HostCopies:
        """Begin to copy tensors to the CPU. Tensors on the CPU are taken as they are."""

    def leaf_digests(self, matrices: Sequence[torch.Tensor]) -> list[bytes]:
        """Digests of the leaves (`leaf_hash`) of each matrix, row by row. They are computed
        concurrently with the device's other work, after the work queued on the current stream.

        Args:
            matrices: uint8 `[rows, bytes]` on the device, with any distance between rows.
        """
        self._hash_stream.follow()
        with self._hash_stream.use():
            return [host_digests(self._on_host(pieces_of(matrix))) for matrix in matrices]

    @functools.cached_property
    def _hash_stream(self) -> SideStream:
        """The stream of `leaf_digests`: one for all calls, because allocators keep memory per
        stream."""
        return self.make_side_stream(is_urgent=False)

    def _on_host(self, pieces: Iterable[torch.Tensor]) -> Iterator[npt.NDArray[np.uint8]]:
        for piece in pieces:
            (copy,) = self.copy_to_host([piece]).wait()
            assert copy is not None
            yield copy.numpy()

    # -- memory -----------------------------------------------------------------------------------

    @abstractmethod
    def memory(self) -> tuple[int, int]:
        """Free and total bytes of the device's memory. On a CPU, free memory is what the system has
        available without swapping."""

    @property
    def starts_kernels_early(self) -> bool:
        """True if a kernel may be placed on the device before the previous one has ended."""
        return False

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory of a multiprocessor, which the programs there divide. A program
        takes 1 KiB more than it asks for. Interpreted kernels have as much as on Hopper."""
        return 228 << 10

    @property
    def profiled_activity(self) -> ProfilerActivity | None:
        """The device's part of a profile by torch; None: torch profiles none."""
        return None

    def on_kernel_compiled(self, report: Callable[[str], None]) -> None:
        """Call `report` with the name of each kernel that Triton compiles, or reads from its cache
        on the disk, from now on: either delays the caller. It replaces an earlier `report`."""

    def can_read(self, index: int) -> bool:
        """True if kernels of this device can read the memory of this machine's device `index`."""
        return False

    def allocations_of(self, tensors: Iterable[torch.Tensor]) -> dict[int, int]:
        """The driver's allocations that contain tensors: address to bytes. On a CPU, their
        storages."""
        storages = (tensor.untyped_storage() for tensor in tensors)
        return {storage.data_ptr(): storage.nbytes() for storage in storages}

    def make_mem_pool(self, allocator: object) -> MemPool:
        """A pool of memory from `allocator`, an object of the device's kind that torch accepts.

        Raises:
            ValueError: The kind has no such pools.
        """
        raise ValueError(f"{self.kind.title} has no pools of other allocators")

    @property
    def pins_memory(self) -> bool:
        """True if host memory that `register_host_memory` locks makes copies to the device
        faster."""
        return False

    def register_host_memory(self, address: int, size: int) -> None:
        """Page-lock `size` bytes at `address` for every device of the kind.

        Raises:
            MemoryError: The driver refused.
            ValueError: The kind does not `pins_memory`.
        """
        raise ValueError(f"{self.kind.title} does not lock host memory in place")

    def unregister_host_memory(self, address: int) -> None:
        """Undo `register_host_memory`. Errors are ignored, because the context may be gone."""

    def host_cpus_near_device(self) -> frozenset[int]:
        """CPUs of the device's NUMA node; empty: unknown."""
        return frozenset()

    @abstractmethod
    def device_name(self) -> str:
        """The vendor's name of the device; `cpu` for a CPU."""


RuntimeFactory: TypeAlias = Callable[[str], DeviceRuntime]
"""Takes a device with or without an index, such as `cuda:1`. Raises ValueError if the device cannot
be used here."""

_REGISTERED: Final[dict[str, RuntimeFactory]] = {}


def register_device_runtime(kind: str, factory: RuntimeFactory) -> None:
    """Register `factory`, which makes the runtimes of devices of type `kind`."""
    _REGISTERED[kind] = factory
    device_runtime.cache_clear()


# Cached in C, because every step looks it up.
@functools.cache
def device_runtime(device: torch.device | str) -> DeviceRuntime:
    """The runtime of `device`; the same object for every call. Any thread.

    Raises:
        ValueError: The kind of device is unknown (the message lists the known ones), or a package
            that it needs is not installed (the message names it).
    """
    name = str(device)
    kind = name.partition(":")[0]
    return _factory(kind)(name)


def _factory(kind: str) -> RuntimeFactory:
    if kind in _REGISTERED:
        return _REGISTERED[kind]
    if kind not in DEVICE_KINDS:
        known = dict.fromkeys((*DEVICE_KINDS, *_REGISTERED))
        raise ValueError(f"no runtime for devices of type {kind!r}; there are: {', '.join(known)}")
    module, _, name = DEVICE_KINDS[kind].runtime.rpartition(".")
    factory: RuntimeFactory = getattr(importlib.import_module(module), name)
    return factory


def detect_device() -> str:
    """The kind of device that `auto` means here: the first of `DEVICE_KINDS` that exists."""
    for kind in DEVICE_KINDS.values():
        if kind.missing_package() is not None:
            continue
        try:
            if device_runtime(kind.name).why_absent() is None:
                return kind.name
        except ValueError as error:
            logger.warning("%s is skipped: %s", kind.title, error)
    raise AssertionError("there is always a CPU")


def on_device(
    values: Sequence[int] | Sequence[float] | npt.NDArray[Any],
    device: torch.device | str,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """`torch.tensor(values)` on `device`, without waiting for the device's work."""
    return device_runtime(device).stage_to_device(torch.tensor(values, dtype=dtype))
