"""A room that a DP group of a prefill server is asked about."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from sglang.srt.disaggregation.base.bootstrap_route import Route

UNKNOWN: Final = "the prefill server does not know the request in time"


@dataclass(slots=True, eq=False)
class AskedRoom:
    """A room, and what a DP group of its prefill server says of it. The group writes it, mostly in
    the thread that asks; the room's receiver only reads it."""

    number: int
    sources: tuple[Route, ...] = ()
    """Ranks to read the prompt from, once the prefill server has the room; () until then."""
    failure: str | None = None
    """Why the prompt will not come."""
    since: float = field(default_factory=time.monotonic)
    """Time at which asking began, by `time.monotonic`."""
    serial: int | None = None
    """First question with the room; None: there was none."""
    unknown_since: float | None = None
    """Time of the first answer that the room is not known; None: there was none."""
    has_ended: bool = False
    """True if the group has said that the room has ended there."""
