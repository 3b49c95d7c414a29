"""The handle of a grammar that may still be compiling, held by a queued request."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING

from sglang.srt.constrained.constraint import Constraint

if TYPE_CHECKING:
    pass


class GrammarError(ValueError):
    """A constraint that cannot be enforced. The message is one line and names the field."""


class GrammarTicket(Future["Grammar"]):
    """The grammar of one constraint, shared by all requests with it. Raises `GrammarError`.

    Any thread may read it. With several ranks, one rank reads it and tells the others, because
    compilations end at different times on different ranks.
    """

    def __init__(self, constraint: Constraint) -> None:
        super().__init__()
        self.constraint = constraint

    def fail(self, message: str) -> None:
        """Set the reason of a failure: one line for the client. For the backend."""
        self.set_exception(GrammarError(message))
