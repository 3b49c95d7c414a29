"""The last decisions of a cache with their reasons, for operators.

Threads: any; a lock guards the log.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

_MAX_DECISIONS: Final = 64
_SAME_S: Final = 1.0
"""Equal decisions within this time are one entry."""


class Decision(StrEnum):
    """A kind of decision."""

    NO_READ = "no read from L3"
    READ_ENDED = "L3 brought less"
    NO_WRITE = "no write to L3"
    EVICTED_DEVICE = "evicted from L1"
    EVICTED_HOST = "evicted from L2"
    DROPPED = "dropped from all tiers"
    NOT_REUSED = "prefix not reused"


@dataclass(slots=True)
class _Entry:
    what: Decision
    why: str
    began: float
    """`time.monotonic()` seconds of the first one."""
    tokens: int = 0
    count: int = 0


class DecisionLog:
    """The last 64 decisions. Equal ones within a second are counted together."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._entries: deque[_Entry] = deque(maxlen=_MAX_DECISIONS)
        self._last: dict[tuple[Decision, str], _Entry] = {}
        """The last entry of each kind and reason, which are few."""

    def note(self, what: Decision, why: str, tokens: int) -> None:
        """Note a decision about `tokens` tokens; does nothing for 0 tokens. `why` is one of a few
        texts, without names or numbers."""
        if not tokens:
            return
        now = self._clock()
        with self._lock:
            entry = self._last.get((what, why))
            if entry is None or now - entry.began >= _SAME_S:
                entry = self._last[what, why] = _Entry(what, why, now)
                self._entries.append(entry)
            entry.tokens += tokens
            entry.count += 1

    def latest(self) -> list[dict[str, Any]]:
        """The entries, newest first: `what`, `why`, `tokens`, `count`, `age_s` in seconds."""
        now = self._clock()
        with self._lock:
            return [
                {
                    "what": entry.what.value,
                    "why": entry.why,
                    "tokens": entry.tokens,
                    "count": entry.count,
                    "age_s": round(now - entry.began, 1),
                }
                for entry in reversed(self._entries)
            ]
