"""The servers that share a namespace of a store: each renews a note there, and watches the others'.

No clock is compared with another's, and no server is believed to live because it was there once: it
counts while its note changes. Notes have a fixed number of names, so dead servers and strangers
fill a bounded place, which later servers take over.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from sglang.srt.mem_cache.storage.base import HiCacheStorage
from sglang.srt.mem_cache.storage.types import NOTE_BYTES, StorageUnavailable

logger = logging.getLogger(__name__)

SEATS: Final = 128
"""Most servers of a namespace that are counted."""
_PAUSE_S: Final = 30.0
"""Seconds between two looks."""
_ALIVE_LOOKS: Final = 4
"""A server whose note did not change within so many looks is dead. After as many looks all are
known."""
_ID_BYTES: Final = 16
_NAMES: Final = [str(seat) for seat in range(SEATS)]


@dataclass(slots=True)
class _Seat:
    note: bytes | None = None
    unchanged: int = _ALIVE_LOOKS
    """Looks since the note changed. A note that was there at the first look may be a dead one's."""

    def see(self, note: bytes | None, *, is_first: bool) -> None:
        if note is None or note == self.note or is_first:
            self.unchanged += 1
        else:
            self.unchanged = 0
        self.note = note or self.note


class StorePresence:
    """Counts the servers of one namespace. Threads: one looks, any may read `servers`.

    Attributes:
        servers: Servers that share the namespace, with this one, at most `SEATS`; None: unknown,
            because the store was not watched long enough, fails, or has no notes.
    """

    def __init__(self) -> None:
        self.servers: int | None = None
        self._id = secrets.token_bytes(_ID_BYTES)
        self._seats = [_Seat() for _ in range(SEATS)]
        self._own: int | None = None
        self._looks = 0
        self._has_failed = False

    def run(self, client: Callable[[], HiCacheStorage | None], ends: threading.Event) -> None:
        """Look now and then until `ends`.

        Args:
            client: The store; None: leave it alone now.
        """
        while True:
            try:
                has_notes = self._look_at(client())
            except Exception:
                logger.exception("L3 does not tell which servers share it")
                return
            if not has_notes or ends.wait(_PAUSE_S):
                return

    def _look_at(self, client: HiCacheStorage | None) -> bool:
        """`look`, without an error; False: the store has no notes."""
        if client is None:
            self.servers = None
            return True
        try:
            has_notes = self.look(client)
        except StorageUnavailable as error:
            self.servers = None
            if not self._has_failed:
                logger.warning("L3 does not tell which servers share it: %s", error)
            self._has_failed = True
            return True
        self._has_failed = False
        return has_notes

    def look(self, client: HiCacheStorage) -> bool:
        """Read all notes, and renew the own one. False: the store has no notes.

        Raises:
            StorageUnavailable: It failed.
        """
        notes = client.get_notes(_NAMES)
        if notes is None:
            return False
        for seat, note in zip(self._seats, notes, strict=True):
            is_whole = note is not None and len(note) == NOTE_BYTES
            seat.see(note if is_whole else None, is_first=not self._looks)
        self._looks += 1
        if self._own is not None and not self._is_mine(self._own):
            self._own = None
        if self._own is None:
            self._own = self._vacant(notes)
        others = sum(
            seat.unchanged < _ALIVE_LOOKS
            for place, seat in enumerate(self._seats)
            if place != self._own and not self._is_mine(place)
        )
        if self._own is not None:
            note = self._id + self._looks.to_bytes(NOTE_BYTES - _ID_BYTES)
            client.set_note(_NAMES[self._own], note)
            self._seats[self._own].note = note
        if self._looks >= _ALIVE_LOOKS:
            self.servers = min(1 + others, SEATS)
        return True

    def _is_mine(self, place: int) -> bool:
        note = self._seats[place].note
        return note is not None and note.startswith(self._id)

    def _vacant(self, notes: Sequence[bytes | None]) -> int | None:
        """A place that nobody has, or, once all are known, a dead server's. Two servers that take
        the same one at once notice it at their next look."""
        free = [place for place, note in enumerate(notes) if note is None]
        if not free and self._looks >= _ALIVE_LOOKS:
            free = [
                place for place, seat in enumerate(self._seats) if seat.unchanged >= _ALIVE_LOOKS
            ]
        return secrets.choice(free) if free else None
