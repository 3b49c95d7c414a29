"""The only import of `torch_npu`, with an error if it does not load."""

from __future__ import annotations

import importlib
from typing import Any

from sglang.srt.hardware_backend.device_kinds import NPU


def load_torch_npu(user: str = f"--device {NPU.name}") -> Any:
    """The module `torch_npu`, which adds `npu` to torch's devices when it is imported.

    Args:
        user: The flag that needs it, for the message.

    Raises:
        ValueError: It is not installed, or does not load; with the cause and what to install.
    """
    missing = NPU.missing_package()
    if missing is not None:
        raise ValueError(f"{user}: {missing}")
    try:
        module = importlib.import_module("torch_npu")
        _ = module.npu
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        raise ValueError(
            f"{user}: torch_npu does not load ({error}); {NPU.package_remedy}"
        ) from error
    return module
