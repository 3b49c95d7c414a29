"""Triton's interpreter without work that it repeats: for processes that only interpret kernels."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, Final

_POLL_S: Final = 5e-4


def quicken_interpreter() -> None:
    """Let this process patch the language once, and sleep while a kernel polls.

    The interpreter inspects all of `triton.language` each time that a kernel or a function in it is
    called. This takes a fifth of its time. A rank that polls would take a core from the rank that
    it waits for.
    """
    from triton.runtime import interpreter

    interpreter._patch_lang = _once(interpreter._patch_lang, interpreter._LangPatchScope)
    builder = interpreter.InterpreterBuilder
    add, load = builder.create_atomic_rmw, builder.create_masked_load

    def add_or_poll(self: Any, operation: Any, place: Any, value: Any, *rest: Any) -> Any:
        found = add(self, operation, place, value, *rest)
        if not value.data.any():
            time.sleep(_POLL_S)
        return found

    def load_or_poll(self: Any, *arguments: Any, **named: Any) -> Any:
        # The last is `is_volatile`; versions differ in those before it.
        if named.get("is_volatile", arguments[-1]):
            time.sleep(_POLL_S)
        return load(self, *arguments, **named)

    builder.create_atomic_rmw, builder.create_masked_load = add_or_poll, load_or_poll


def _once(patch: Callable[[Any], Any], scope: Callable[[], Any]) -> Callable[[Any], Any]:
    """`patch`, for each function the first time alone, and without an end."""
    patch_first = functools.cache(patch)

    def patch_once(function: Any) -> Any:
        patch_first(function)
        return scope()

    return patch_once
