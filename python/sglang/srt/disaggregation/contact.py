"""What a rank of a decode server knows of one room of a prefill server, before it has slots."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from sglang.srt.disaggregation.common.bootstrap_route import Route
from sglang.srt.managers.messages.io_struct import Bootstrap


class Peer(Protocol):
    """Interface of `PrefillPeer` to its contacts."""

    def leave(self, contact: Contact, reason: str | None) -> None:
        """See `Contact.leave`."""


class Standing(NamedTuple):
    """Progress of a `Contact`."""

    failure: str | None = None
    """Reason why the prompt will not come; final."""
    sources: Sequence[Route] = ()
    """Ranks of the prefill server to read from, once it has said that it has the room."""


class Contact:
    """A room that a prefill server is asked about. The thread of the peer writes, the scheduler's
    thread reads.

    Args:
        meeting: The bootstrap server, and the room.
        peer: The prefill server; None: it is not asked.
        news: Gets the contact whenever `standing` has changed.

    Attributes:
        standing: The progress; one value, so that a reader needs no lock.
    """

    def __init__(self, meeting: Bootstrap, peer: Peer | None, news: deque[Contact]) -> None:
        self.meeting = meeting
        self.standing = Standing()
        self._peer = peer
        self._news = news
        self.since = time.monotonic()
        """Time at which asking began."""
        self.serial: int | None = None
        """First question with the room; None: there was none."""
        self.unknown_since: float | None = None
        """Time of the first answer that the room is not known; None: there was none."""

    def fail(self, why: str) -> None:
        """Note that the prompt will not come."""
        self._change(Standing(failure=why))

    def know(self, sources: Sequence[Route]) -> None:
        """Note that the prefill server has the room.

        Args:
            sources: Its ranks to read from.
        """
        self._change(Standing(sources=sources))

    def _change(self, standing: Standing) -> None:
        self.standing = standing
        self._news.append(self)

    def leave(self, reason: str | None = None) -> None:
        """Ask no more.

        Args:
            reason: Reason for which the room is declined; None: its prompt is going to be read.
        """
        if self._peer is not None:
            self._peer.leave(self, reason)
