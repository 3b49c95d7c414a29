"""Tickets by constraint: all whose grammar compiles, and the most recently used of the others."""

from __future__ import annotations

from collections import OrderedDict

from sglang.srt.constrained.base_grammar_backend import GrammarTicket
from sglang.srt.constrained.constraint import Constraint


class GrammarCache:
    """Evicts the least recently used tickets, by number and by bytes; never one whose grammar
    compiles.

    Failed tickets are kept too, so that an expensive constraint is refused at once the next time.
    No lock of its own; the owner's lock guards it.

    Args:
        max_tickets: Most done tickets.
        max_bytes: Most bytes of their grammars together. A single grammar may be larger.
    """

    def __init__(self, max_tickets: int, max_bytes: int) -> None:
        self._max_tickets = max_tickets
        self._max_bytes = max_bytes
        self._compiling: dict[Constraint, GrammarTicket] = {}
        self._done: OrderedDict[Constraint, GrammarTicket] = OrderedDict()

    @property
    def num_compiling(self) -> int:
        """Tickets that are not done."""
        return len(self._compiling)

    @property
    def num_done(self) -> int:
        """Tickets that are done, failed ones included."""
        return len(self._done)

    @property
    def num_bytes(self) -> int:
        """Bytes of the cached grammars."""
        return sum(map(_size_of, self._done.values()))

    def find(self, constraint: Constraint) -> GrammarTicket | None:
        """The ticket of a constraint, which becomes the most recently used one."""
        if constraint in self._done:
            self._done.move_to_end(constraint)
            return self._done[constraint]
        return self._compiling.get(constraint)

    def add_compiling(self, ticket: GrammarTicket) -> None:
        """Add a new ticket."""
        self._compiling[ticket.constraint] = ticket

    def finish(self, ticket: GrammarTicket, *, keep: bool) -> None:
        """Note that a ticket is done. `keep` False forgets it, so that the next request retries."""
        del self._compiling[ticket.constraint]
        if not keep:
            return
        self._done[ticket.constraint] = ticket
        while len(self._done) > self._max_tickets or (
            len(self._done) > 1 and self.num_bytes > self._max_bytes
        ):
            self._done.popitem(last=False)


def _size_of(ticket: GrammarTicket) -> int:
    # A failed ticket holds only its text, which is the key.
    has_failed = ticket.exception() is not None
    return len(ticket.constraint.text) if has_failed else ticket.result().size_bytes
