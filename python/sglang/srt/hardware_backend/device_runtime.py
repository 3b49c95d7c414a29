"""One interface to every device: streams, events, host memory, sizes. Runtimes by registry.

What works with a device asks `device_runtime` once, when it is made, and keeps the answer. No other
code compares names of devices: what differs between them is a method or a field here.
"""

from __future__ import annotations

import functools
import importlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Final, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from sglang.srt.hardware_backend.device_kinds import DEVICE_KINDS, DeviceKind
from sglang.srt.hardware_backend.leaf_hash import host_digests, pieces_of

logger = logging.getLogger(__name__)


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


class CopyStream(ABC):
    """Runs copy functions one after the other, beside the caller.

    Threads: `submit` may be called from any one thread (the scheduler's).
    """

    @abstractmethod
    def submit(self, work: Callable[[], None], *, follows_caller: bool = True) -> None:
        """Queue `work` behind what was submitted before. It records its own events.

        Args:
            follows_caller: Behind what the caller's stream has queued as well. A CPU has no such
                stream: what the caller did is done.
        """

    @abstractmethod
    def close(self) -> None:
        """Wait for the work already queued, and end the thread, if there is one. Idempotent."""


class SideStream(ABC):
    """A stream beside the current one, for work that it forks and joins again."""

    @abstractmethod
    def follow(self) -> None:
        """Order this stream after what the current one has queued until now."""

    @abstractmethod
    def use(self) -> AbstractContextManager[Any]:
        """Make this stream the current one."""

    @abstractmethod
    def join(self) -> None:
        """Order the current stream after what this one has queued until now."""


class MemPool(Protocol):
    """Memory of the device that another allocator than torch's gives. Kept as long as tensors in it
    live."""

    def use(self) -> AbstractContextManager[Any]:
        """Inside, new tensors of the calling thread on the device are made in it."""


class HostCopies(ABC):
    """Copies of tensors on their way to the CPU, begun when this is made.

    They are made in order with the current stream, so that what overwrites a tensor later does
    not hurt, and `wait` waits for them alone and not for what was queued after them.
    """

    @property
    @abstractmethod
    def is_done(self) -> bool:
        """Whether `wait` would return at once. Never blocks."""

    @abstractmethod
    def wait(self) -> list[torch.Tensor | None]:
        """The tensors on the CPU, in their order. Blocks until they are there."""


class DeviceRuntime(ABC):
    """One device, or the current one of its kind where no index is named.

    Any thread may use it; streams are those of the calling thread.
    """

    kind: ClassVar[DeviceKind]

    @abstractmethod
    def why_absent(self) -> str | None:
        """Why the device cannot be used on this machine; None: it can."""

    def prepare(self) -> None:
        """Make the process ready for the device. Called once, before anything is made on it."""

    @abstractmethod
    def set_device(self, index: int) -> None:
        """Make the device of this index the calling thread's current one. A CPU is one device."""

    def enter_thread(self) -> None:
        """Make the device the calling thread's current one. Threads begin with the first device,
        whatever is current in the thread that starts them. A CPU is one device."""

    # -- order ------------------------------------------------------------------------------------

    @abstractmethod
    def make_event(self) -> Event:
        """An event for work on the device; not reached until it has been recorded and passed."""

    @abstractmethod
    def make_copy_stream(self, name: str, *, is_urgent: bool = True) -> CopyStream:
        """A new stream for copies.

        Args:
            name: Name of its thread, if it has one.
            is_urgent: A forward waits for its copies. Others give way.
        """

    @abstractmethod
    def make_side_stream(self, *, is_urgent: bool = True) -> SideStream:
        """A new stream beside the current one.

        Args:
            is_urgent: A forward waits for its work. That of others does not overtake forwards.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device has done what was queued."""

    def current_stream_handle(self) -> int:
        """The driver's handle of the current stream. Raises ValueError where there are none."""
        raise ValueError(f"{self.kind.title} has no handles of streams")

    @abstractmethod
    def keep_for_current_stream(self, tensor: torch.Tensor) -> None:
        """Let `tensor`'s memory be reused only after what the current stream has queued until now.

        For a tensor made on another stream, whose last reference may go while this one reads it.
        One in host memory needs nothing.
        """

    # -- between host and device ------------------------------------------------------------------

    @abstractmethod
    def stage_to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a CPU tensor on the device, in order with the current stream, without waiting.

        A tensor that is there already is returned as it is.
        """

    @abstractmethod
    def copy_to_host(self, tensors: Sequence[torch.Tensor | None]) -> HostCopies:
        """Begin to copy tensors to the CPU. Those that are there already are taken as they are."""

    def leaf_digests(self, matrices: Sequence[torch.Tensor]) -> list[bytes]:
        """Digests of the leaves (`leaf_hash`) of each matrix, row by row.

        It runs beside the device's computations, once what the current stream has queued is done.

        Args:
            matrices: uint8 `[rows, bytes]` on the device, with any distance between rows.
        """
        self._hash_stream.follow()
        with self._hash_stream.use():
            return [host_digests(self._on_host(pieces_of(matrix))) for matrix in matrices]

    @functools.cached_property
    def _hash_stream(self) -> SideStream:
        """The stream of `leaf_digests`: one for all calls, since allocators keep memory for each
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
        """Bytes of memory on the device that are free, and that there are.

        On a CPU what the system says is available without swapping.
        """

    @property
    def starts_kernels_early(self) -> bool:
        """Whether a kernel may be placed on the device before the one before it has ended."""
        return False

    def can_read(self, index: int) -> bool:
        """Whether kernels of this device can read the memory of this machine's device `index`."""
        return False

    def allocations_of(self, tensors: Iterable[torch.Tensor]) -> dict[int, int]:
        """The driver's allocations that tensors lie in: address to bytes.

        On a CPU their storages.
        """
        storages = (tensor.untyped_storage() for tensor in tensors)
        return {storage.data_ptr(): storage.nbytes() for storage in storages}

    def make_mem_pool(self, allocator: object) -> MemPool:
        """A pool of what `allocator` gives: the device's own kind of object, as torch takes it.

        Raises:
            ValueError: The kind has no such pools.
        """
        raise ValueError(f"{self.kind.title} has no pools of other allocators")

    @property
    def pins_memory(self) -> bool:
        """Whether copies to the device gain from host memory that `register_host_memory` locks."""
        return False

    def register_host_memory(self, address: int, size: int) -> None:
        """Page-lock `size` bytes at `address` for every device of the kind.

        Raises:
            MemoryError: The driver refused.
            ValueError: The kind does not `pins_memory`.
        """
        raise ValueError(f"{self.kind.title} does not lock host memory in place")

    def unregister_host_memory(self, address: int) -> None:
        """Undo `register_host_memory`. Errors are ignored: the context may be gone already."""

    def host_cpus_near_device(self) -> frozenset[int]:
        """CPUs of the NUMA node that the device hangs on; empty where unknown."""
        return frozenset()

    @abstractmethod
    def device_name(self) -> str:
        """The vendor's name of the device; `cpu` for a CPU."""


RuntimeFactory: TypeAlias = Callable[[str], DeviceRuntime]
"""Takes a device with or without an index, `cuda:1`. Raises ValueError: it cannot be used here."""

_REGISTERED: Final[dict[str, RuntimeFactory]] = {}


def register_device_runtime(kind: str, factory: RuntimeFactory) -> None:
    """Let `factory` make the runtimes of devices whose type is `kind`, from now on."""
    _REGISTERED[kind] = factory
    device_runtime.cache_clear()


# Cached in C: a look-up on the way of every step costs no Python call.
@functools.cache
def device_runtime(device: torch.device | str) -> DeviceRuntime:
    """The runtime of `device`, the same one for each call. Any thread.

    Raises:
        ValueError: No runtime knows this kind of device (lists those that are known), or what it
            needs is not installed (says what).
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
    """The kind of device that `auto` means here: the first of `DEVICE_KINDS` that is there."""
    for kind in DEVICE_KINDS.values():
        if kind.missing_package() is not None:
            continue
        try:
            if device_runtime(kind.name).why_absent() is None:
                return kind.name
        except ValueError as error:
            logger.warning("%s is passed over: %s", kind.title, error)
    raise AssertionError("a CPU is always there")


def on_device(
    values: Sequence[int] | Sequence[float] | npt.NDArray[Any],
    device: torch.device | str,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """`torch.tensor(values)` on `device`, without waiting for what runs there."""
    return device_runtime(device).stage_to_device(torch.tensor(values, dtype=dtype))
