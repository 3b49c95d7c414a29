"""Base of the runtimes of devices with streams.

`torch.cuda` and `torch.npu` have the same names, so one class serves both, and a test can record
its calls without a device.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from sglang.srt.hardware_backend.device_runtime import (
    CopyStream,
    DeviceRuntime,
    Event,
    HostCopies,
    SideStream,
)

_URGENT = -1
"""Stream priority above that of the caller's stream: its kernels run first."""


class AcceleratorRuntime(DeviceRuntime):
    """A device with streams.

    Args:
        device: The device, in the form of `api`; None: the current one.
        api: `torch.cuda`, or a module with the same names.
    """

    def __init__(self, device: torch.device | int | None, api: Any) -> None:
        self._device = device
        self._fixed_index = device.index if isinstance(device, torch.device) else device
        self._api = api

    def prepare(self) -> None:
        """Make the device current. Libraries of this process use the current device, and NPUs have
        no context without one."""
        self.enter_thread()

    def enter_thread(self) -> None:
        self.set_device(self._index)

    @property
    def _index(self) -> int:
        index = self._fixed_index
        return int(self._api.current_device()) if index is None else index

    def current_stream(self) -> Any:
        """The library's stream object. Named by number: without one torch looks for an available
        kind of device, which takes longer than all the rest, and a load asks a hundred times."""
        return self._api.current_stream(self._index)

    @abstractmethod
    def handle_of(self, stream: Any) -> int:
        """The driver's handle of the library's stream object."""

    def set_device(self, index: int) -> None:
        self._api.set_device(index)

    def make_event(self) -> Event:
        return _StreamEvent(self, self._api.Event())

    def make_copy_stream(self, name: str, *, is_urgent: bool = True) -> CopyStream:
        return self._make_stream(is_urgent=is_urgent)

    def make_side_stream(self, *, is_urgent: bool = True) -> SideStream:
        return self._make_stream(is_urgent=is_urgent)

    def here(self) -> SideStream:
        return _DeviceStream(self, self._api, self.current_stream())

    def _make_stream(self, *, is_urgent: bool) -> _DeviceStream:
        priority = _URGENT if is_urgent else 0
        return _DeviceStream(self, self._api, self._api.Stream(self._device, priority=priority))

    def synchronize(self) -> None:
        self._api.synchronize(self._device)

    def keep_for_current_stream(self, tensor: torch.Tensor) -> None:
        if not tensor.is_cpu:
            tensor.record_stream(self.current_stream())

    def stage_all(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """One copy for all of them: each costs the calling thread 30 us."""
        here = [tensor for tensor in tensors if tensor.is_cpu]
        if not here:
            return list(tensors)
        joined = torch.cat(here) if len(here) > 1 else here[0]
        staged = iter(torch.split(self.stage_to_device(joined), [len(tensor) for tensor in here]))
        return [next(staged) if tensor.is_cpu else tensor for tensor in tensors]

    def empty_on_host(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, pin_memory=True)

    def copy_to_host(self, tensors: Sequence[torch.Tensor | None]) -> HostCopies:
        copies: list[torch.Tensor | None] = []
        copied: Event | None = None
        for tensor in tensors:
            if tensor is None or tensor.is_cpu:
                copies.append(tensor)
                continue
            copies.append(self.download(tensor))
            copied = copied or self.make_event()
        if copied is not None:
            copied.record()
        return HostCopies(copies, copied)

    def memory(self) -> tuple[int, int]:
        self._api.empty_cache()
        free, total = self._api.mem_get_info(self._device)
        return free, total

    def device_name(self) -> str:
        return str(self._api.get_device_name(self._device))

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor on the device to page-locked memory, in order with the current stream. The
        copy holds the values once the stream has reached it."""
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return copy.copy_(tensor, non_blocking=True)


class _StreamEvent:
    def __init__(self, runtime: AcceleratorRuntime, event: Any) -> None:
        self._runtime = runtime
        self._event = event
        self._recorded = False

    def record(self) -> None:
        self.record_on(self._runtime.current_stream())

    def record_on(self, stream: Any) -> None:
        self._event.record(stream)
        self._recorded = True

    def query(self) -> bool:
        return self._recorded and bool(self._event.query())

    def synchronize(self) -> None:
        self._event.synchronize()

    def wait(self) -> None:
        self.wait_on(self._runtime.current_stream())

    def wait_on(self, stream: Any) -> None:
        stream.wait_event(self._event)


class _DeviceStream(CopyStream, SideStream):
    """A stream of the device. The caller itself queues the work on it."""

    def __init__(self, runtime: AcceleratorRuntime, api: Any, stream: Any) -> None:
        self._runtime = runtime
        self._api = api
        self._stream = stream

    @property
    def handle(self) -> int:
        return self._runtime.handle_of(self._stream)

    def submit(self, work: Callable[[], None], *, follows_caller: bool = True) -> None:
        before = self._runtime.current_stream()
        if follows_caller:
            self._stream.wait_stream(before)
        self._api.set_stream(self._stream)
        try:
            work()
        finally:
            self._api.set_stream(before)

    def close(self) -> None:
        self._stream.synchronize()

    def follow(self, other: SideStream | None = None) -> None:
        if other is None:
            self._stream.wait_stream(self._runtime.current_stream())
            return
        assert isinstance(other, _DeviceStream), "streams of one device"
        self._stream.wait_stream(other._stream)

    def wait(self, event: Event) -> None:
        assert isinstance(event, _StreamEvent), "an event of this device"
        event.wait_on(self._stream)

    def record(self, event: Event) -> None:
        assert isinstance(event, _StreamEvent), "an event of this device"
        event.record_on(self._stream)

    @contextmanager
    def use(self) -> Iterator[None]:
        before = self._runtime.current_stream()
        self._api.set_stream(self._stream)
        try:
            yield
        finally:
            self._api.set_stream(before)

    def join(self) -> None:
        self._runtime.current_stream().wait_stream(self._stream)
