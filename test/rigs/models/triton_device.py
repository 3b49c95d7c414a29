"""The device for tests of Triton kernels: a GPU, or the CPU if Triton's interpreter is on.

`TRITON_INTERPRET=1 pytest test/registered/unit/layers/test_triton_ops.py` runs them on a CPU,
slowly.
"""

from __future__ import annotations

import importlib.util

import pytest

from sglang.srt.hardware_backend.device_runtime import detect_device


def triton_device() -> str:
    """`cuda`, or `cpu` if kernels are interpreted. Otherwise skips the calling module."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed", allow_module_level=True)
    if detect_device() == "cuda":
        return "cuda"
    from triton import knobs

    if not knobs.runtime.interpret:
        pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)
    return "cpu"
