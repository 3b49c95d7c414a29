"""A prefill server with DP groups, asked about rooms as one server.

The prefill server chooses the group of a request by its own balance. All groups are asked about a
room until one has it. A `PrefillServer` with a thread of its own asks each group, so a group that
does not answer delays no request of another one.
"""

from __future__ import annotations

import functools
import threading
from typing import Final, NamedTuple

from sglang.srt.disaggregation.base.bootstrap_route import Route
from sglang.srt.disaggregation.common.asked_room import UNKNOWN, AskedRoom
from sglang.srt.disaggregation.common.prefill_server import DecodeRank, PrefillServer
from sglang.srt.utils.background_call import CallThreads

_REPLACED: Final = "the prefill server was replaced by one with fewer DP groups"


class Asked(NamedTuple):
    """A group, and what it says of a room."""

    group: PrefillServer
    room: AskedRoom


class PrefillGroups:
    """The groups of a prefill server; one, before its first route is known.

    The first group is asked about every room, by its `ask`. The scheduler's thread calls, except
    for `_on_route`, which the groups' threads call.

    Attributes:
        groups: The first one stays.
        sought: What several groups are asked about, by the room of the first one; the group that
            has it is not known yet.
    """

    def __init__(self, host: str, port: int, rank: DecodeRank, threads: CallThreads) -> None:
        self._make = functools.partial(
            PrefillServer, host, port, rank, threads, on_route=self._on_route
        )
        self.sought: dict[AskedRoom, tuple[Asked, ...]] = {}
        self._is_closed = False
        self._lock = threading.Lock()
        """Guards all of the above and `groups`. One step may read them without it."""
        self.groups: tuple[PrefillServer, ...] = (self._make(),)

    @property
    def is_idle(self) -> bool:
        return all(group.is_idle for group in self.groups)

    @property
    def has_thread(self) -> bool:
        return any(group.has_thread for group in self.groups)

    def seek(self, room: AskedRoom) -> None:
        """Ask the other groups about a room that the first one is asked about. Idempotent."""
        with self._lock:
            self._ask_all(room)

    def pick(self, room: AskedRoom) -> Asked:
        """The group whose word on a sought room counts: the one that has it, or had it, else one
        that may still get it, else one that tells why the prompt cannot be read. If a group has the
        room, no other one is asked any more."""
        asked = self.sought[room]
        for one in asked:
            if one.room.sources:
                with self._lock:
                    for other in self.sought.pop(room):
                        if other is not one:
                            other.group.leave(other.room)
                return one
        return min(asked, key=_weight)

    def leave(self, room: AskedRoom) -> None:
        """Ask no more about a room. Idempotent."""
        with self._lock:
            self.groups[0].leave(room)
            for group, asked in self.sought.pop(room, ()):
                group.leave(asked)

    def decline(self, room: int, reason: str, found: PrefillServer | None = None) -> None:
        """Say that a room is not wanted, to the group that has it; to all, if that is not known."""
        with self._lock:
            for group in self.groups if found is None else (found,):
                group.decline(room, reason)

    def close(self) -> None:
        """See `PrefillServer.close`."""
        with self._lock:
            self._is_closed = True
            for group in self.groups:
                group.close()

    def _on_route(self, route: Route) -> str | None:
        """A group's thread has found its group's first rank, whose route tells the number of
        groups. The first group's counts. Returns why a group cannot be asked now, or None."""
        size = route.dp_size
        with self._lock:
            if route.dp_rank:
                if size == len(self.groups):
                    return None
                return (
                    f"dp_rank {route.dp_rank} is one of {size} DP groups, and dp_rank 0 one of "
                    f"{len(self.groups)}: start all with the same --attn-dp-size"
                )
            if size == len(self.groups) or self._is_closed:
                return None
            gone = self.groups[size:]
            new = tuple(self._make(dp_rank) for dp_rank in range(len(self.groups), size))
            self.groups = (*self.groups[:size], *new)
            for group in gone:
                for asked in group.asked():
                    asked.failure = asked.failure or _REPLACED
                group.close()
            unsought = [room for room in self.groups[0].asked() if room not in self.sought]
            for room in [*self.sought, *unsought]:
                if not room.sources:
                    self._ask_all(room)
            for room_declined, reason in self.groups[0].declined().items():
                for group in new:
                    group.decline(room_declined, reason)
        return None

    def _ask_all(self, room: AskedRoom) -> None:
        asked = self.sought.get(room, (Asked(self.groups[0], room),))
        before = {group for group, _ in asked}
        missing = [group for group in self.groups if group not in before]
        new = [Asked(group, AskedRoom(room.number)) for group in missing]
        self.sought[room] = (*asked, *new)
        for one in new:
            one.group.ask(one.room)


def _weight(one: Asked) -> tuple[bool, bool, bool]:
    """The word of the group with the least weight counts, if none has the room."""
    room = one.room
    return not room.has_ended, room.failure is not None, room.failure == UNKNOWN
