"""Records that this process has set its device, for libraries that need a device context.

Mooncake's transports use the device that is current when they start. A transport that starts too
early finds no device, or the machine's first device instead of its rank's.
"""

from __future__ import annotations

import threading

from sglang.srt.hardware_backend.device_kinds import CPU, device_kind

_device: str | None = None
"""The device of this process, once it is set. Only the code that sets the device marks it."""
_lock = threading.Lock()


def mark_device_set(device: str) -> None:
    """Record that `device` (`cpu`, `cuda:1`, ...) is the current device. Idempotent. Any thread.

    A CPU has no context: it never replaces a device, and a device may replace it.

    Raises:
        RuntimeError: Another device was set before, and libraries may use it.
        ValueError: There is no such kind of device.
    """
    global _device
    has_context = device_kind(device).has_own_memory
    with _lock:
        if _device is None or not device_kind(_device).has_own_memory:
            _device = device
        elif has_context and _device != device:
            raise RuntimeError(
                f"the device of this process is {_device} already; it cannot become {device}"
            )


def require_device_set(user: str) -> str:
    """The device of this process. On a host with only a CPU, no device has to be set, because there
    is no context. Any thread. Raises RuntimeError if no device is set yet; names the `user` that
    started too early."""
    if _device is not None:
        return _device
    # Imported here, because it imports torch. Processes without tensors mark a CPU.
    from sglang.srt.hardware_backend.device_runtime import detect_device

    if detect_device() == CPU.name:
        return CPU.name
    raise RuntimeError(
        f"{user} was started before a device was set, and would find no device context "
        "(on Ascend: aclrtGetDevice failed, ret: 107002): set the device first "
        "(ModelRunner.init_torch_distributed does)"
    )
