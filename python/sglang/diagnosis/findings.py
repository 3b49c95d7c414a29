"""One fact about a machine, and whether a server would start with it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """Meaning of a fact for a server."""

    OK = "ok"
    ABSENT = "absent"
    """Not there, and not needed by what is asked for."""
    REFUSED = "refused"
    """A server that is started here, with these flags and this environment, ends with an error or
    runs without what the machine has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One fact."""

    section: str
    name: str
    value: str
    state: State = State.OK
    remedy: str = ""
    """The remedy, unless the state is `OK`."""
