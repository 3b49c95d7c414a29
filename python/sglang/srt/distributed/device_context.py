"""Whether this process has set its device: what libraries that look for a device context wait for.

Mooncake's transports take the device that is current when they start. One that starts too early
meets none, or the first one of the machine instead of its rank's.
"""

from __future__ import annotations

import threading

from sglang.srt.hardware_backend.device_kinds import device_kind


class DeviceContext:
    """The device of one process, once it is set. Any thread."""

    def __init__(self) -> None:
        self._device: str | None = None
        self._lock = threading.Lock()

    def mark(self, device: str) -> None:
        """Say that `device` (`cpu`, `cuda:1`, ...) is current from now on. Idempotent.

        A CPU has no context: it takes none away, and a device that comes later adds one.

        Raises:
            RuntimeError: Another device was set before; what was started since uses that one.
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

    def require(self, user: str) -> str:
        """The device.

        Raises:
            RuntimeError: None is set yet; names `user`, which came too early.
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
"""Marked only where the device is set."""


def mark_device_set(device: str) -> None:
    """See `DeviceContext.mark`; for this process."""
    _process.mark(device)


def require_device_set(user: str) -> str:
    """See `DeviceContext.require`; for this process."""
    return _process.require(user)
