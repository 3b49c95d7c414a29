"""Base of the runtimes of devices with streams.

`torch.cuda` and `torch.npu` have the same names, so one class serves both, and a test can record
its calls without a device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
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
"""Priority of a stream whose kernels run before those of the caller's stream."""


class AcceleratorRuntime(DeviceRuntime):
    """A device with streams.

    Args:
        device: The device, in the form of `api`; None: the current one.
        api: `torch.cuda`, or a module with the same names.
    """

    def __init__(self, device: torch.device | int | None, api: Any) -> None:
        self._device = device
        self._api = api

    def prepare(self) -> None:
        """Make the device current. Libraries of this process use the current device, and NPUs have
        no context without one."""
        self.enter_thread()

    def enter_thread(self) -> None:
        device = self._device
        index = device.index if isinstance(device, torch.device) else device
        self.set_device(self._api.current_device() if index is None else index)

    def set_device(self, index: int) -> None:
        self._api.set_device(index)

    def make_event(self) -> Event:
        return _StreamEvent(self._api)

    def make_copy_stream(self, name: str, *, is_urgent: bool = True) -> CopyStream:
        return _DeviceStream(self._api, self._device, is_urgent=is_urgent)

    def make_side_stream(self, *, is_urgent: bool = True) -> SideStream:
        return _DeviceStream(self._api, self._device, is_urgent=is_urgent)

    def synchronize(self) -> None:
        self._api.synchronize(self._device)

    def keep_for_current_stream(self, tensor: torch.Tensor) -> None:
        if not tensor.is_cpu:
            tensor.record_stream(self._api.current_stream(tensor.device))

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
    def __init__(self, api: Any) -> None:
        self._api = api
        self._event = api.Event()
        self._recorded = False

    def record(self) -> None:
        self._event.record(self._api.current_stream())
        self._recorded = True

    def query(self) -> bool:
        return self._recorded and bool(self._event.query())

    def synchronize(self) -> None:
        self._event.synchronize()

    def wait(self) -> None:
        self._api.current_stream().wait_event(self._event)


class _DeviceStream(CopyStream, SideStream):
    """A stream of the device. The caller itself queues the work on it."""

    def __init__(self, api: Any, device: torch.device | int | None, *, is_urgent: bool) -> None:
        self._api = api
        self._device = device
        self._stream = api.Stream(device, priority=_URGENT if is_urgent else 0)

    def submit(self, work: Callable[[], None], *, follows_caller: bool = True) -> None:
        if follows_caller:
            self.follow()
        with self.use():
            work()

    def close(self) -> None:
        self._stream.synchronize()

    def follow(self) -> None:
        self._stream.wait_stream(self._api.current_stream(self._device))

    def use(self) -> AbstractContextManager[Any]:
        used: AbstractContextManager[Any] = self._api.stream(self._stream)
        return used

    def join(self) -> None:
        self._api.current_stream(self._device).wait_stream(self._stream)
