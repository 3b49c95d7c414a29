"""Counts of the calls that a piece of work makes: a cost that does not depend on the machine."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import FrameType


@dataclass
class CallCounts:
    """Context manager: counts the calls of this thread until its end."""

    python: int = 0
    """Calls of functions in Python; each turn of a generator is one."""
    c: int = 0
    """Calls of functions in C."""

    @property
    def total(self) -> int:
        return self.python + self.c

    def __enter__(self) -> CallCounts:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, arg: object) -> None:
        self.python += event == "call"
        self.c += event == "c_call"
