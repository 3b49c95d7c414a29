"""A prefill server with DP groups, asked about rooms as one server.

The prefill server chooses the group of a request by its own balance. All groups are asked about a
room until one has it. A `PrefillServer` with a thread of its own asks each group, so a group that
does not answer delays no request of another one.
"""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass
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


@dataclass(slots=True, eq=False)
class SoughtRoom:
    """A room that the groups of a prefill server are asked about. Scheduler's thread, but for
    `in_groups`.

    Attributes:
        in_groups: The groups that are asked.
        refusal: Why no group is asked; None: groups are, or were.
    """

    number: int
    in_groups: tuple[Asked, ...] = ()
    refusal: str | None = None

    @property
    def found(self) -> Asked | None:
        """The group that has the room; None: no group has said so."""
        for one in self.in_groups:
            if one.room.sources:
                return one
        return None

    @property
    def failure(self) -> str | None:
        """Why the room's prompt cannot be read; None: it can be, or a group may still have it."""
        why, may_come = self.refusal, False
        for _, room in self.in_groups:
            if room.failure is None:
                may_come = True
            elif room.has_ended or room.sources:
                return room.failure  # The group has, or had, the room, so no other one has it.
            elif why is None or why == UNKNOWN:
                why = room.failure
        return None if may_come else why


class PrefillGroups:
    """The groups of a prefill server; one, before its first route is known.

    The scheduler's thread calls, except for `_on_route`, which the groups' threads call.
    """

    def __init__(self, host: str, port: int, rank: DecodeRank, threads: CallThreads) -> None:
        self._make = functools.partial(
            PrefillServer, host, port, rank, threads, on_route=self._on_route
        )
        self._rooms: dict[int, SoughtRoom] = {}
        """Rooms that the groups are asked about, by number."""
        self._is_closed = False
        self._lock = threading.Lock()
        """Guards all of the above, `groups` and the `in_groups` of rooms."""
        self.groups: tuple[PrefillServer, ...] = (self._make(),)

    @property
    def is_idle(self) -> bool:
        return all(group.is_idle for group in self.groups)

    @property
    def has_thread(self) -> bool:
        return any(group.has_thread for group in self.groups)

    def ask(self, room: SoughtRoom) -> None:
        """Begin to ask about a room."""
        with self._lock:
            self._rooms[room.number] = room
            self._ask(room, self.groups)

    def leave(self, room: SoughtRoom) -> None:
        """Ask no more about a room. Idempotent."""
        with self._lock:
            if self._rooms.get(room.number) is room:
                del self._rooms[room.number]
        for group, asked in room.in_groups:
            group.leave(asked)

    def settle(self, room: SoughtRoom) -> None:
        """Ask no group about a room but the one that has it."""
        with self._lock:
            asked, found = room.in_groups, room.found
            room.in_groups = tuple(one for one in asked if one is found)
        for one in asked:
            if one is not found:
                one.group.leave(one.room)

    def decline(self, room: int, reason: str) -> None:
        """Say that a room is not wanted, to the group that has it; to all, if that is not known."""
        with self._lock:
            sought = self._rooms.get(room)
            found = None if sought is None else sought.found
            for group in self.groups if found is None else (found.group,):
                group.decline(room, reason)

    def close(self) -> None:
        """See `PrefillServer.close`."""
        with self._lock:
            self._is_closed = True
            self._rooms.clear()
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
                group.close()
            for room in self._rooms.values():
                for group, asked in room.in_groups:
                    if group in gone:
                        asked.failure = asked.failure or _REPLACED
                if room.found is None:
                    self._ask(room, new)
            for room_declined, reason in self.groups[0].declined().items():
                for group in new:
                    group.decline(room_declined, reason)
        return None

    def _ask(self, room: SoughtRoom, groups: tuple[PrefillServer, ...]) -> None:
        for group in groups:
            asked = AskedRoom(room.number)
            room.in_groups += (Asked(group, asked),)
            group.ask(asked)
