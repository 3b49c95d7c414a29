"""A DP group of a prefill server, asked about rooms whose requests have no slots on this decode
server yet. Most prefill servers have one.

A request gets slots once its prefill server has confirmed that it has the room. A prefill server
that is stuck or away, and a room that no server knows, therefore hold no slots. One thread for each
group, `disagg-peer`, finds the ranks that this rank reads from, and polls the first of
them about all rooms at once, over one connection. It ends when there is nothing to ask for a while.
"""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Final, TypeAlias

import msgspec

from sglang.srt.disaggregation.base.bootstrap_route import BootstrapError, Route, WrongSecret
from sglang.srt.disaggregation.base.deployment_secret import DeploymentSecret
from sglang.srt.disaggregation.common.asked_room import UNKNOWN, AskedRoom
from sglang.srt.disaggregation.common.geometry import PoolGeometry, RankPlace
from sglang.srt.disaggregation.common.shard_read import SharedReads
from sglang.srt.disaggregation.control.control_client import (
    POLL_S,
    ClientPool,
    ControlClient,
    NotAnswered,
    Replaced,
    RoomFailed,
    incompatible,
    repeat_s,
)
from sglang.srt.disaggregation.control.protocol import (
    MAX_DECLINED,
    MAX_POLLED_ROOMS,
    MAX_REASON_CHARS,
    Hello,
    KVLayout,
    RoomsPoll,
    RoomsStatus,
)
from sglang.srt.utils.background_call import CallThreads
from sglang.srt.utils.logging_utils import RateLimitedLogger
from sglang.srt.utils.network import base_url

logger = logging.getLogger(__name__)

MAX_SOURCES: Final = 64
"""Most ranks that one rank reads from. Each costs a thread and a connection for each prompt."""
FindRank: TypeAlias = Callable[[str, int, int, int], Route]
"""Finds the route of a rank of a prefill server; arguments: host and port of its bootstrap server,
rank, DP group. Asks once and may take time; raises BootstrapError."""
IDLE_S: Final = 10.0
"""Seconds without a room after which the connection is closed; the default of the prefill server is
the same."""
PACE_S: Final = 0.005
"""Least mean seconds between two questions; the prefill server takes 256 of them a second."""
BURST_S: Final = 0.1
"""Questions that were not asked in this many seconds may be made up for, all at once."""
CLOSE_S: Final = 1.0
"""Most seconds after `close` in which rooms are still declined."""
_MAX_DECLINED_WAITING: Final = 4096
"""Most rooms that wait to be declined; the oldest beyond that are forgotten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRank:
    """A decode rank as it asks prefill servers, and reads from them. Any thread.

    Attributes:
        place: Place of this rank among those of the decode server.
        geometry: Pools of this rank.
    """

    place: RankPlace
    geometry: PoolGeometry
    reads: SharedReads
    find_rank: FindRank
    secret: DeploymentSecret | None = None

    def sources_of(self, route: Route, where: str) -> list[int]:
        """The ranks of a prefill server that this rank reads from. Raises RoomFailed if this model
        cannot have such ranks, or they are too many."""
        num_ranks, attn_tp_size = route.num_ranks, route.attn_tp_size
        why = self.geometry.why_no_split(attn_tp_size)
        if num_ranks % attn_tp_size:
            why = f"its {num_ranks} ranks are no multiple of the {attn_tp_size} that split heads"
        if why is None:
            sources = self.place.partners(RankPlace(0, num_ranks, attn_tp_size))
            if len(sources) <= MAX_SOURCES:
                return sources
            why = (
                f"this rank would read from {len(sources)} of its ranks; the limit is {MAX_SOURCES}"
            )
        raise incompatible(where, why)


@dataclass(slots=True)
class _Declined:
    reason: str
    since: float
    serial: int | None = None
    """First question that said so; None: there was none."""


class PrefillServer:
    """One DP group of a prefill server, with all that is known of rooms without slots. The
    scheduler's thread calls, except for `_run` and what it calls.

    Args:
        on_route: Gets the route of the group's first rank whenever it is looked up; returns why the
            group cannot be asked now, or None. In the thread that asks.
    """

    def __init__(
        self,
        host: str,
        port: int,
        rank: DecodeRank,
        threads: CallThreads,
        dp_rank: int = 0,
        on_route: Callable[[Route], str | None] = lambda route: None,
    ) -> None:
        self._host, self._port, self._dp_rank = host, port, dp_rank
        self.where = base_url(host, port).removeprefix("http://")
        if dp_rank:
            self.where += f", dp_rank {dp_rank},"
        self._on_route = on_route
        self._rank = rank
        self._threads = threads
        self._rooms: dict[int, AskedRoom] = {}
        self._declined: dict[int, _Declined] = {}
        self.has_thread = False
        self._closes_at: float | None = None
        """Time at which the thread ends at the latest; None: it is not closing."""
        self._lock = threading.Lock()
        """Guards all of the above, not the rooms themselves."""
        self._repeat_s = repeat_s(rank.reads.timeouts)
        self.clients = ClientPool(rank.secret, rank.reads.timeouts)
        """For prompts; kept open while there is a thread."""
        self._log = RateLimitedLogger(logger)
        self._waker, self._woken = socket.socketpair()
        """A byte to the first ends the thread's wait, which is for the second too."""
        self._waker.setblocking(False)
        self._woken.setblocking(False)
        # Only the thread uses these:
        self._routes: tuple[Route, ...] = ()
        """The ranks to read from; (): they have to be looked up."""
        self._heard = 0.0
        self._serial = 0
        self._silence = ""
        """Why nothing is heard; "": the reason is not known."""
        self._asked = 0.0
        """Time of the first question since the last answer, or later."""
        self._looked_up = 0.0
        self._due = 0.0
        """Time before which no further question is asked."""

    # -- the scheduler's side --------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        with self._lock:
            return not (self._rooms or self._declined)

    def ask(self, room: AskedRoom) -> None:
        """Begin to ask about a room."""
        with self._lock:
            self._rooms[room.number] = room
        self._wake_or_start()

    def leave(self, room: AskedRoom) -> None:
        """Ask no more about a room. Idempotent."""
        with self._lock:
            if self._rooms.get(room.number) is room:
                del self._rooms[room.number]

    def decline(self, room: int, reason: str) -> None:
        with self._lock:
            self._declined[room] = _Declined(reason[:MAX_REASON_CHARS], time.monotonic())
            num_surplus = max(0, len(self._declined) - _MAX_DECLINED_WAITING)
            surplus = dict(islice(self._declined.items(), num_surplus))
        self._drop_declined(surplus, "too many wait")
        self._wake_or_start()

    def declined(self) -> dict[int, str]:
        """Rooms that the group was not told yet that they are not wanted, with the reasons. Any
        thread."""
        with self._lock:
            return {room: one.reason for room, one in self._declined.items()}

    def asked(self) -> list[AskedRoom]:
        """Rooms that the group is asked about. Any thread."""
        with self._lock:
            return list(self._rooms.values())

    def close(self) -> None:
        """End the thread, which first declines what it can within `CLOSE_S`. Idempotent. Any
        thread."""
        with self._lock:
            if self._closes_at is None:
                self._closes_at = time.monotonic() + CLOSE_S
            self._rooms.clear()
            if not self.has_thread:
                self._close_waker()
        self._wake()

    def _wake_or_start(self) -> None:
        with self._lock:
            is_new, self.has_thread = not self.has_thread, True
        if not is_new:
            self._wake()
            return
        try:
            self._threads.submit(self._run)
        except RuntimeError as error:
            self._fail_all(f"no thread for the prefill server at {self.where}: {error}")
            with self._lock:
                self.has_thread = False

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # The socket is full, which wakes too, or closed.
            self._waker.send(b"\0")

    def _close_waker(self) -> None:
        self._waker.close()
        self._woken.close()

    # -- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        """Ask as long as there is anything to ask. Never raises."""
        self.clients.open()
        while self._has_work():
            try:
                self._poll_rooms()
                continue
            except WrongSecret as error:
                self._fail_all(_not_found(error))
            except BootstrapError as error:
                self._routes, self._silence = (), _not_found(error)
            except Replaced as error:
                self._routes, self._silence = (), str(error)
                self._fail_rooms(str(error), only_known=True)
            except NotAnswered as error:
                # The bootstrap server may have said more.
                self._routes, self._silence = (), self._silence or str(error)
            except RoomFailed as error:
                self._routes = ()
                self._fail_all(str(error))
            except Exception as error:
                logger.exception("the prefill server at %s could not be asked", self.where)
                self._fail_all(f"asking the prefill server failed: {type(error).__name__}: {error}")
            self._fail_overdue()
            self._rank.reads.sessions.probe()
            self._pause()

    def _has_work(self) -> bool:
        with self._lock:
            if self._is_over() or not (self._rooms or self._declined):
                self.has_thread = False
                self.clients.close()
                if self._closes_at is not None:
                    self._close_waker()
            return self.has_thread

    def _poll_rooms(self) -> None:
        """Find the prefill server if it is not known yet, and ask it until there is nothing to ask
        for a while.

        Raises:
            BootstrapError: It is not found.
            RoomFailed: It does not answer, or its answer is wrong.
        """
        if not self._routes:
            self._routes = self._find()
        first = self._routes[0]
        client = ControlClient(
            first.endpoint,
            first.instance_id,
            self._rank.secret,
            self._rank.reads.timeouts,
            waker=self._woken,
        )
        try:
            why = self._rank.geometry.incompatibility(self._greet(client))
            refusal = None if why is None else str(incompatible(self.where, why))
            while self._poll_until_idle(client, refusal):
                pass
        finally:
            client.drop()

    def _find(self) -> tuple[Route, ...]:
        first = self._look_up(0)
        if (why := self._on_route(first)) is not None:
            raise BootstrapError(f"the bootstrap server at {self._host}:{self._port}: {why}")
        sources = self._rank.sources_of(first, self.where)
        return tuple(self._look_up(rank) if rank else first for rank in sources)

    def _look_up(self, rank: int) -> Route:
        self._looked_up = time.monotonic()
        return self._rank.find_rank(self._host, self._port, rank, self._dp_rank)

    def _greet(self, client: ControlClient) -> KVLayout:
        self._asked = time.monotonic()
        client.begin(Hello())
        while (layout := client.keep_alive(Hello(), KVLayout, POLL_S)) is None:
            if self._is_over():
                raise NotAnswered("this server is shutting down")
            self._fail_overdue()
            self._check_instance()
        self._heard, self._silence = time.monotonic(), ""
        return layout

    def _poll_until_idle(self, client: ControlClient, refusal: str | None) -> bool:
        """Ask until nothing is left to ask, then wait for more. False: there was nothing to ask for
        `IDLE_S`, or the thread has to end.

        Args:
            refusal: Reason for which no prompt of this server can be read. It only learns which
                rooms are not wanted.
        """
        if refusal is not None:
            self._fail_rooms(refusal)
        question = self._question(None)
        if question is not None:
            self._asked = time.monotonic()
            client.begin(question)
        while question is not None:
            answer = client.keep_alive(question, RoomsStatus, POLL_S)
            if answer is not None:
                self._heard, self._silence = time.monotonic(), ""
                self._take(answer)
            if refusal is not None:
                self._fail_rooms(refusal)
            self._fail_overdue()
            self._check_instance()
            if (following := self._question(question)) is not question or answer is not None:
                now = time.monotonic()
                self._due = max(self._due + PACE_S, now - BURST_S)
                time.sleep(max(0.0, self._due - now))
                following = self._question(following)
                if following is not None:
                    client.advance(following)
            question = following
        until = time.monotonic() + IDLE_S
        while self.is_idle:
            if self._closes_at is not None or time.monotonic() >= until:
                return False
            client.receive_answer(until - time.monotonic())
        return not self._is_over()

    def _is_over(self) -> bool:
        return self._closes_at is not None and time.monotonic() >= self._closes_at

    def _question(self, before: RoomsPoll | None) -> RoomsPoll | None:
        """The question to ask now: `before` if it is the same, None if there is nothing to ask."""
        if self._is_over():
            return None
        with self._lock:
            rooms = list(self._rooms.items())
            declined = dict(islice(self._declined.items(), MAX_DECLINED))
        unknown = dict([(room, one) for room, one in rooms if not one.sources][:MAX_POLLED_ROOMS])
        known = [room for room, one in rooms if one.sources][:MAX_POLLED_ROOMS]
        if not (unknown or known or declined):
            return None
        question = RoomsPoll(
            self._serial,
            list(unknown),
            known,
            {room: one.reason for room, one in declined.items()},
        )
        # A request may have the room of an earlier one.
        asked: list[AskedRoom | _Declined] = [*unknown.values(), *declined.values()]
        new = [one for one in asked if one.serial is None]
        if question == before and not new:
            return before
        self._serial += 1
        for one in new:
            one.serial = self._serial
        return msgspec.structs.replace(question, serial=self._serial)

    def _take(self, answer: RoomsStatus) -> None:
        with self._lock:
            rooms = list(self._rooms.items())
            self._declined = {
                room: one
                for room, one in self._declined.items()
                if one.serial is None or one.serial > answer.serial
            }
        known = set(answer.known)
        for room, one in rooms:
            if one.serial is None or one.serial > answer.serial:
                continue  # The answer is about an earlier request of its room.
            if (why := answer.ended.get(room)) is not None:
                one.has_ended = True
                self._fail(one, f"the prefill server ended the request: {why}")
            elif room in known:
                one.sources = self._routes
            else:
                one.unknown_since = one.unknown_since or self._heard

    # -- failures --------------------------------------------------------------------------------

    def _fail(self, room: AskedRoom, why: str) -> None:
        room.failure = room.failure or why
        self.leave(room)

    def _fail_rooms(self, why: str, *, only_known: bool = False) -> None:
        with self._lock:
            rooms = [one for one in self._rooms.values() if one.sources or not only_known]
        for one in rooms:
            self._fail(one, why)

    def _fail_all(self, why: str, until: float = math.inf) -> None:
        """Fail the rooms that are asked about or declined since `until` or longer."""
        with self._lock:
            rooms = [one for one in self._rooms.values() if one.since <= until]
            declined = {room: one for room, one in self._declined.items() if one.since <= until}
        for one in rooms:
            self._fail(one, why)
        self._drop_declined(declined, why)

    def _fail_overdue(self) -> None:
        """Fail the rooms whose time is over: nothing was heard, or the prefill server does not know
        them."""
        now, timeouts = time.monotonic(), self._rank.reads.timeouts
        latest = now - timeouts.silence
        if self._heard <= latest:
            endpoint = self._routes[0].endpoint if self._routes else self.where
            silence = (
                f"the prefill server at {endpoint} has not answered for {timeouts.silence:g} s"
            )
            self._fail_all(self._silence or silence, latest)
        with self._lock:
            rooms = list(self._rooms.values())
        for one in rooms:
            since = one.unknown_since
            if not one.sources and since is not None and now - since >= timeouts.unknown_room:
                self._fail(one, UNKNOWN)

    def _drop_declined(self, declined: Mapping[int, _Declined], why: str) -> None:
        if not declined:
            return
        with self._lock:
            for room, one in declined.items():
                if self._declined.get(room) is one:
                    del self._declined[room]
        self._log.warning(
            "dropped",
            "%d rooms of the prefill server at %s could not be declined: %s",
            len(declined),
            self.where,
            why,
        )

    def _check_instance(self) -> None:
        """If the prefill server is silent, look up whether another instance has replaced it. Raises
        Replaced if one has."""
        now, repeat = time.monotonic(), self._repeat_s
        if now - max(self._heard, self._asked, self._looked_up) < 2 * repeat:
            return
        first = self._routes[0]
        try:
            found = self._look_up(first.rank)
        except BootstrapError as error:
            self._silence = _not_found(error)
            return
        self._silence = ""
        if found.instance_id != first.instance_id:
            raise Replaced("the prefill server was replaced by another instance")

    def _pause(self) -> None:
        end = time.monotonic() + self._repeat_s
        while time.monotonic() < end and self._closes_at is None and not self.is_idle:
            time.sleep(min(POLL_S, max(0.0, end - time.monotonic())))


def _not_found(error: BootstrapError) -> str:
    return f"the prefill server is not found: {error}"
