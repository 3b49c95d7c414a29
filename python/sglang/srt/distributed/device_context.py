"""Records that this process has set its device, for libraries that need a device context.

Mooncake's transports use the device that is current when they start. A transport that starts too
early finds no device, or the machine's first device instead of its rank's.
"""

from __future__ import annotations

import threading

from sglang.srt.hardware_backend.device_kinds import CPU, device_kind
from sglang.srt.hardware_backend.device_runtime import detect_device


class DeviceContext:
    """The device of one process, after it was set. Any thread."""

    def __init__(self) -> None:
        self._device: str | None = None
        self._lock = threading.Lock()

    def mark(self, device: str) -> None:
        """Record that `device` (`cpu`, `cuda:1`, ...) is the current device. Idempotent.

        A CPU has no context: it never replaces a device, and a device may replace it.

        Raises:
            RuntimeError: Another device was set before, and libraries may use it.
            ValueError: There is no such kind of device.
        """
        has_context = device_kind(device).has_own_memory
        with self._lock:
            if self._device is None or not device_kind(self._device).has_own_memory:
                self._device = device
            elif has_context and self._device != device:
                raise RuntimeError(
                    f"the device of this process is {self._device} already; it cannot become "
                    f"{device}"
                )

    @property
    def is_marked(self) -> bool:
        """True if a device is set."""
        return self._device is not None

    def require(self, user: str) -> str:
        """The device of this process.

        Raises:
            RuntimeError: No device is set yet; names the `user` that started too early.
        """
        with self._lock:
            if self._device is None:
                raise RuntimeError(
                    f"{user} was started before a device was set, and would find no device context "
                    "(on Ascend: aclrtGetDevice failed, ret: 107002): set the device first "
                    "(ModelRunner.init_torch_distributed does)"
                )
            return self._device


_process = DeviceContext()
"""Context of this process. Only the code that sets the device marks it."""


def mark_device_set(device: str) -> None:
    """`DeviceContext.mark` for this process."""
    _process.mark(device)


def require_device_set(user: str) -> str:
    """`DeviceContext.require` for this process. On a host with only a CPU, no device has to be set,
    because there is no context."""
    if not _process.is_marked and detect_device() == CPU.name:
        return CPU.name
    return _process.require(user)
