"""Triton kernels that are launched without a look at their arguments.

`kernel[grid](...)` finds the binary for its arguments anew at each launch: their types, whether
they are 1, whether 16 divides them. The look takes the calling thread 40 to 70 us. A kernel that is
`unspecialized` has one binary for its constants, which `BoundKernel` calls as Triton's tutorial on
fused softmax does.

Importing this module needs triton.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final

import torch
import triton

_TYPES: Final = ("tl.int32", "tl.int64")
_CONSTANT: Final = "tl.constexpr"


def unspecialized(function: Callable[..., None]) -> Any:
    """`triton.jit` for a kernel that `BoundKernel` launches.

    Parameters come first, then constants. Each has its type in its annotation: `tl.int32`,
    `tl.int64` (an address or a number) or `tl.constexpr`.

    Raises:
        TypeError: A parameter has another type, or none, or comes after a constant.
    """
    types = {name: one.annotation for name, one in inspect.signature(function).parameters.items()}
    names = [name for name, kind in types.items() if kind != _CONSTANT]
    if names != list(types)[: len(names)]:
        raise TypeError(f"{function.__name__}: constants come after all parameters")
    for name in names:
        if types[name] not in _TYPES:
            raise TypeError(f"{function.__name__}: {name} needs one of the types {_TYPES}")
    return triton.jit(do_not_specialize=names)(function)


class BoundKernel:
    """An `unspecialized` kernel with its constants. Any thread.

    Args:
        kernel: The kernel.
        constants: Values of its constants, and Triton's options, such as `num_warps`.

    Raises:
        TypeError: A constant has no value.
    """

    def __init__(self, kernel: Any, **constants: Any) -> None:
        self._kernel = kernel
        self._constants = constants
        parameters = inspect.signature(kernel.fn).parameters.values()
        names = [one.name for one in parameters if one.annotation == _CONSTANT]
        missing = [name for name in names if name not in constants]
        if missing:
            raise TypeError(f"{kernel.__name__}: constants {missing} have no value")
        self._num_parameters = len(parameters) - len(names)
        self._values = tuple(constants[name] for name in names)
        self._compiled: dict[int, Any] = {}
        """The binary for each device. Stays empty where kernels are interpreted."""

    def __call__(self, grid: tuple[int, int, int], *arguments: int) -> None:
        """Launch the kernel on the current stream of the current device.

        Args:
            arguments: Values of all parameters, in order.

        Raises:
            TypeError: There are more or fewer of them.
        """
        if len(arguments) != self._num_parameters:
            raise TypeError(
                f"{self._kernel.__name__}: {len(arguments)} arguments for "
                f"{self._num_parameters} parameters"
            )
        compiled = self._compiled.get(torch.cuda.current_device()) if self._compiled else None
        if compiled is not None:
            compiled[grid](*arguments, *self._values)
            return
        launched = self._kernel[grid](*arguments, **self._constants)
        if launched is not None:
            self._compiled[torch.cuda.current_device()] = launched
