"""Conversions to and from fp8 in Triton's interpreter, as a GPU makes them.

The interpreter of Triton 3.9 loses the carry when it rounds to fp8 (127.4 becomes 64 instead of
128), and makes a number of a NaN. Importing this module replaces the conversions of `float8e4nv`
by torch's, if kernels are interpreted.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton import knobs


def install() -> None:
    """Replace the interpreter's conversions of `float8e4nv`. Further calls do nothing."""
    from triton.runtime import interpreter

    if getattr(interpreter._convert_float, "__module__", "") == __name__:
        return
    convert = interpreter._convert_float

    def convert_float(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if target == tl.float8e4nv:
            assert source == tl.float32 and rounding != "rtz"
            rounded = torch.from_numpy(np.ascontiguousarray(data)).clamp(-448.0, 448.0)
            return rounded.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        if source == tl.float8e4nv:
            exact = torch.from_numpy(np.ascontiguousarray(data).view(np.uint8))
            kinds = {tl.float32: torch.float32, tl.float16: torch.float16}
            return exact.view(torch.float8_e4m3fn).to(kinds[target]).numpy()
        return convert(data, source, target, rounding)

    interpreter._convert_float = convert_float


if knobs.runtime.interpret:
    install()
