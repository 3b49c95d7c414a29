"""Kernels as Triton compiles them for Hopper, which needs no GPU."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any, Final, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

_HOPPER: Final = GPUTarget("cuda", 90, 32)


class Usage(NamedTuple):
    """What a program takes."""

    registers: int
    """Of a thread."""
    spilled: int
    """Bytes of a thread's registers that are kept in memory."""
    shared: int
    """Bytes of shared memory."""


def compile_kernel(
    kernel: Any,
    constants: dict[str, Any],
    type_of: Callable[[str], str | tuple[str, ...]],
    *,
    aligned: Container[str],
    warps: int = 4,
    stages: int = 3,
) -> Any:
    """The compiled kernel of Triton.

    Args:
        constants: Values of constexpr arguments, and None for pointers that are not given, or a
            tuple of None. Other names have no effect.
        type_of: Triton's name for the type of each other argument, or those of a tuple's elements.
        aligned: Arguments that are multiples of 16, in bytes or in number.
    """
    names: list[str] = kernel.arg_names
    own = {name: value for name, value in constants.items() if name in names}
    types = {name: "constexpr" if name in own else type_of(name) for name in names}
    places: list[tuple[int, ...]] = []
    for index, name in enumerate(names):
        if name in aligned and name not in own:
            kind = types[name]
            elements = [()] if isinstance(kind, str) else [(nth,) for nth in range(len(kind))]
            places += [(index, *element) for element in elements]
    return triton.compile(
        ASTSource(
            kernel,
            types,
            constexprs={(names.index(name),): value for name, value in own.items()},
            attrs={place: [["tt.divisibility", 16]] for place in places},
        ),
        target=_HOPPER,
        options={"num_warps": warps, "num_stages": stages},
    )


def usage_of(compiled: Any) -> Usage:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    used = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", text))
    spilled = int(used["STACK"]) + int(used["LOCAL"])
    return Usage(int(used["REG"]), spilled, int(compiled.metadata.shared))
