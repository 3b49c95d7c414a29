"""Counts of the calls that a piece of work makes: a cost that does not depend on the machine."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


@dataclass
class CallCounts:
    """Context manager: counts the calls of this thread until its end. No garbage is collected
    meanwhile, because finalizers would count too."""

    python: int = 0
    """Calls of functions in Python; each turn of a generator is one."""
    c: int = 0
    """Calls of functions in C."""

    @property
    def total(self) -> int:
        return self.python + self.c

    def __enter__(self) -> CallCounts:
        gc.disable()
        sys.setprofile(self._note)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.setprofile(None)
        gc.enable()

    def _note(self, frame: FrameType, event: str, arg: object) -> None:
        self.python += event == "call"
        self.c += event == "c_call"


def uncounted(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, whose inner calls no `CallCounts` counts."""

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        counting = sys.getprofile()
        sys.setprofile(None)
        try:
            return function(*args, **kwargs)
        finally:
            sys.setprofile(counting)

    return call
