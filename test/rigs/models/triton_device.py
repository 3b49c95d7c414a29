"""The device for tests of Triton kernels: a GPU, or the CPU if Triton's interpreter is on.

`TRITON_INTERPRET=1 pytest test/registered/unit/layers/test_triton_ops.py` runs them on a CPU,
slowly.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any, Final

import numpy as np
import pytest
import torch

from sglang.srt.hardware_backend.device_runtime import detect_device

_OPTIONS: Final = {"num_warps", "num_stages", "num_ctas", "maxnreg", "launch_pdl"}
"""Named arguments of a launch that are no kernel's."""


def triton_device() -> str:
    """`cuda`, or `cpu` if kernels are interpreted. Otherwise skips the calling module."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed", allow_module_level=True)
    if detect_device() == "cuda":
        return "cuda"
    from triton import knobs

    if not knobs.runtime.interpret:
        pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)
    _refuse_unknown_names()
    return "cpu"


@functools.cache
def _refuse_unknown_names() -> None:
    """Let this process's interpreted launches fail where a compiled one does: the interpreter drops
    named arguments that a kernel does not have."""
    from triton.runtime import interpreter

    run = interpreter.InterpretedFunction.run

    def checked(self: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        unknown = named.keys() - set(self.arg_names) - _OPTIONS
        assert not unknown, f"{self.fn.__name__} has no {unknown}"
        return run(self, *args, grid=grid, warmup=warmup, **named)

    interpreter.InterpretedFunction.run = checked


def round_as_a_gpu(patch: pytest.MonkeyPatch) -> None:
    """Let the interpreter round fp32 to fp8 and bf16 to nearest, as a GPU does. Its own conversion
    cuts bits off, and loses carries."""
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float
    dtypes = {
        tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8),
        tl.bfloat16: (torch.bfloat16, torch.uint16),
    }

    def rounded(values: Any, source: Any, target: Any, mode: Any) -> Any:
        if source != tl.float32 or target not in dtypes:
            return convert(values, source, target, mode)
        dtype, bits = dtypes[target]
        return torch.from_numpy(np.ascontiguousarray(values)).to(dtype).view(bits).numpy()

    patch.setattr(interpreter, "_convert_float", rounded)
