"""A grammar that may still be compiling: the handle a queued request holds."""

from __future__ import annotations

import threading
from enum import Enum
from typing import TYPE_CHECKING

from sglang.srt.constrained.constraint import Constraint

if TYPE_CHECKING:
    from sglang.srt.constrained.base_grammar_backend import Grammar


class TicketState(str, Enum):
    """Where a compilation stands; it leaves COMPILING once, for good."""

    COMPILING = "compiling"
    READY = "ready"
    FAILED = "failed"


class GrammarError(ValueError):
    """A constraint that cannot be enforced. The message is one line and names the field."""


class GrammarTicket:
    """One compilation's outcome, shared by every request with the same constraint.

    Any thread may read it. With several ranks, one of them reads and tells the others: when a
    compilation ends is nothing that ranks agree on by themselves.
    """

    def __init__(self, constraint: Constraint) -> None:
        self.constraint = constraint
        self._done = threading.Event()
        self._grammar: Grammar | None = None
        self._message = ""

    @property
    def state(self) -> TicketState:
        """Never blocks."""
        if not self._done.is_set():
            return TicketState.COMPILING
        return TicketState.FAILED if self._grammar is None else TicketState.READY

    @property
    def message(self) -> str:
        """Why it failed, one line for the client; empty in the other states."""
        return self._message

    @property
    def grammar(self) -> Grammar:
        """The compiled grammar.

        Raises:
            GrammarError: It failed.
            RuntimeError: It is still compiling.
        """
        if not self._done.is_set():
            raise RuntimeError("the grammar is still compiling: look at `state` first")
        if self._grammar is None:
            raise GrammarError(self._message)
        return self._grammar

    def wait(self, timeout: float | None = None) -> bool:
        """Block up to `timeout` seconds; whether it is no longer compiling."""
        return self._done.wait(timeout)

    def resolve(self, grammar: Grammar) -> None:
        """For the backend: it compiled."""
        assert not self._done.is_set()
        self._grammar = grammar
        self._done.set()

    def fail(self, message: str) -> None:
        """For the backend: it did not."""
        assert not self._done.is_set()
        self._message = message
        self._done.set()
