"""The handle of a grammar that may still be compiling, held by a queued request."""

from __future__ import annotations

import threading
from enum import Enum
from typing import TYPE_CHECKING

from sglang.srt.constrained.constraint import Constraint

if TYPE_CHECKING:
    from sglang.srt.constrained.base_grammar_backend import Grammar


class TicketState(str, Enum):
    """State of a compilation. It leaves COMPILING once and never returns."""

    COMPILING = "compiling"
    READY = "ready"
    FAILED = "failed"


class GrammarError(ValueError):
    """A constraint that cannot be enforced. The message is one line and names the field."""


class GrammarTicket:
    """The outcome of one compilation, shared by all requests with the same constraint.

    Any thread may read it. With several ranks, one rank reads it and tells the others, because
    compilations end at different times on different ranks.
    """

    def __init__(self, constraint: Constraint) -> None:
        self.constraint = constraint
        self._done = threading.Event()
        self._grammar: Grammar | None = None
        self._message = ""

    @property
    def state(self) -> TicketState:
        """The current state. Never blocks."""
        if not self._done.is_set():
            return TicketState.COMPILING
        return TicketState.FAILED if self._grammar is None else TicketState.READY

    @property
    def message(self) -> str:
        """Why the compilation failed: one line for the client. Empty in the other states."""
        return self._message

    @property
    def grammar(self) -> Grammar:
        """The compiled grammar.

        Raises:
            GrammarError: The compilation failed.
            RuntimeError: The grammar is still compiling.
        """
        if not self._done.is_set():
            raise RuntimeError("the grammar is still compiling: look at `state` first")
        if self._grammar is None:
            raise GrammarError(self._message)
        return self._grammar

    def wait(self, timeout: float | None = None) -> bool:
        """Block up to `timeout` seconds. Returns whether the compilation has ended."""
        return self._done.wait(timeout)

    def resolve(self, grammar: Grammar) -> None:
        """Set the compiled grammar. For the backend."""
        assert not self._done.is_set()
        self._grammar = grammar
        self._done.set()

    def fail(self, message: str) -> None:
        """Set the reason of a failure. For the backend."""
        assert not self._done.is_set()
        self._message = message
        self._done.set()
