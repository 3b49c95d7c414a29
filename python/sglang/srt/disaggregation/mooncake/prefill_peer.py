"""Polls a prefill server about rooms whose requests have no slots on this decode server yet.

A request gets slots once its prefill server has confirmed that it has the room. A prefill server
that is stuck or away, and a room that no server knows, therefore hold no slots. One thread for each
prefill server, `disagg-peer`, finds the ranks that this rank reads from, and polls the first of
them about all rooms at once, over one connection. It ends when there is nothing to ask for a while.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Final

import msgspec

from sglang.srt.disaggregation.base.bootstrap_route import BootstrapError, Route, WrongSecret
from sglang.srt.disaggregation.common.transfer_context import TransferContext
from sglang.srt.disaggregation.control.control_client import (
    POLL_S,
    ControlClient,
    NotAnswered,
    Replaced,
    RoomFailed,
    Waker,
    incompatible,
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

if TYPE_CHECKING:
    from sglang.srt.disaggregation.mooncake.receiver import MooncakeKVReceiver

logger = logging.getLogger(__name__)

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


@dataclass(slots=True)
class _Declined:
    reason: str
    since: float
    serial: int | None = None
    """First question that said so; None: there was none."""


class PrefillPeer:
    """One prefill server. The scheduler's thread calls, except for `_run` and what it calls."""

    def __init__(
        self, host: str, port: int, context: TransferContext, threads: CallThreads
    ) -> None:
        self._host, self._port = host, port
        self._where = base_url(host, port).removeprefix("http://")
        self._context = context
        self._threads = threads
        self._receivers: dict[int, MooncakeKVReceiver] = {}
        self._declined: dict[int, _Declined] = {}
        self.has_thread = False
        self._closes_at: float | None = None
        """Time at which the thread ends at the latest; None: it is not closing."""
        self._lock = threading.Lock()
        """Guards all of the above, not the receivers themselves."""
        self._log = RateLimitedLogger(logger)
        self._waker = Waker()
        # Of the thread alone:
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
            return not (self._receivers or self._declined)

    def ask(self, receiver: MooncakeKVReceiver) -> None:
        """Begin to ask about a room. `receiver` gets its sources, or fails."""
        with self._lock:
            self._receivers[receiver.bootstrap_room] = receiver
        self._wake_or_start()

    def leave(self, receiver: MooncakeKVReceiver) -> None:
        """Ask no more about a room. Idempotent."""
        with self._lock:
            if self._receivers.get(receiver.bootstrap_room) is receiver:
                del self._receivers[receiver.bootstrap_room]

    def decline(self, room: int, reason: str) -> None:
        with self._lock:
            self._declined[room] = _Declined(reason[:MAX_REASON_CHARS], time.monotonic())
            num_surplus = max(0, len(self._declined) - _MAX_DECLINED_WAITING)
            surplus = dict(islice(self._declined.items(), num_surplus))
        self._drop_declined(surplus, "too many wait")
        self._wake_or_start()

    def close(self) -> None:
        """End the thread, which first declines what it can within `CLOSE_S`. Idempotent."""
        with self._lock:
            if self._closes_at is None:
                self._closes_at = time.monotonic() + CLOSE_S
            self._receivers.clear()
            if not self.has_thread:
                self._waker.close()
        self._waker.wake()

    def _wake_or_start(self) -> None:
        with self._lock:
            is_new, self.has_thread = not self.has_thread, True
        if not is_new:
            self._waker.wake()
            return
        try:
            self._threads.submit(self._run)
        except RuntimeError as error:
            self._fail_all(f"no thread for the prefill server at {self._where}: {error}")
            with self._lock:
                self.has_thread = False

    # -- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        """Ask as long as there is anything to ask. Never raises."""
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
                self._fail_receivers(str(error), only_known=True)
            except NotAnswered as error:
                # The bootstrap server may have said more.
                self._routes, self._silence = (), self._silence or str(error)
            except RoomFailed as error:
                self._routes = ()
                self._fail_all(str(error))
            except Exception as error:
                logger.exception("the prefill server at %s could not be asked", self._where)
                self._fail_all(f"asking the prefill server failed: {type(error).__name__}: {error}")
            self._fail_overdue()
            self._context.sessions.probe()
            self._pause()

    def _has_work(self) -> bool:
        with self._lock:
            if self._is_over() or not (self._receivers or self._declined):
                self.has_thread = False
                if self._closes_at is not None:
                    self._waker.close()
            return self.has_thread

    def _poll_rooms(self) -> None:
        """Find the prefill server if it is not known yet, and ask it until there is nothing to ask
        for a while.

        Raises:
            BootstrapError: It is not found.
            RoomFailed: It does not answer, or its answer is wrong.
        """
        context = self._context
        if not self._routes:
            self._routes = self._find()
        first = self._routes[0]
        connection = ControlClient(
            first.endpoint,
            context.secret,
            context.timeouts,
            first.instance_id,
            waker=self._waker,
        )
        try:
            why = context.geometry.incompatibility(self._greet(connection))
            refusal = None if why is None else str(incompatible(self._where, why))
            while self._poll_until_idle(connection, refusal):
                pass
        finally:
            connection.drop()

    def _find(self) -> tuple[Route, ...]:
        first = self._look_up(0)
        sources = self._context.sources_of(first, self._where)
        return tuple(self._look_up(rank) if rank else first for rank in sources)

    def _look_up(self, rank: int) -> Route:
        self._looked_up = time.monotonic()
        return self._context.find_rank(self._host, self._port, rank)

    def _greet(self, connection: ControlClient) -> KVLayout:
        self._asked = time.monotonic()
        connection.begin(Hello())
        while (layout := connection.keep_alive(Hello(), KVLayout, POLL_S)) is None:
            if self._is_over():
                raise NotAnswered("this server is shutting down")
            self._fail_overdue()
            self._check_instance()
        self._heard, self._silence = time.monotonic(), ""
        return layout

    def _poll_until_idle(self, connection: ControlClient, refusal: str | None) -> bool:
        """Ask until nothing is left to ask, then wait for more. False: there was nothing to ask for
        `IDLE_S`, or the thread has to end.

        Args:
            refusal: Reason for which no prompt of this server can be read. It only learns which
                rooms are not wanted.
        """
        if refusal is not None:
            self._fail_receivers(refusal)
        question = self._question(None)
        if question is not None:
            self._asked = time.monotonic()
            connection.begin(question)
        while question is not None:
            answer = connection.keep_alive(question, RoomsStatus, POLL_S)
            if answer is not None:
                self._heard, self._silence = time.monotonic(), ""
                self._take(answer)
            if refusal is not None:
                self._fail_receivers(refusal)
            self._fail_overdue()
            self._check_instance()
            if (following := self._question(question)) is not question or answer is not None:
                now = time.monotonic()
                self._due = max(self._due + PACE_S, now - BURST_S)
                time.sleep(max(0.0, self._due - now))
                following = self._question(following)
                if following is not None:
                    connection.advance(following)
            question = following
        until = time.monotonic() + IDLE_S
        while self.is_idle:
            if self._closes_at is not None or time.monotonic() >= until:
                return False
            connection.receive_answer(until - time.monotonic())
        return not self._is_over()

    def _is_over(self) -> bool:
        return self._closes_at is not None and time.monotonic() >= self._closes_at

    def _question(self, before: RoomsPoll | None) -> RoomsPoll | None:
        """The question to ask now: `before` if it is the same, None if there is nothing to ask."""
        if self._is_over():
            return None
        with self._lock:
            receivers = list(self._receivers.values())
            declined = dict(islice(self._declined.items(), MAX_DECLINED))
        unknown = [one for one in receivers if not one.sources][:MAX_POLLED_ROOMS]
        known = [one for one in receivers if one.sources][:MAX_POLLED_ROOMS]
        if not (unknown or known or declined):
            return None
        question = RoomsPoll(
            self._serial,
            [one.bootstrap_room for one in unknown],
            [one.bootstrap_room for one in known],
            {room: one.reason for room, one in declined.items()},
        )
        # A request may have the room of an earlier one.
        asked: list[MooncakeKVReceiver | _Declined] = [*unknown, *declined.values()]
        new = [one for one in asked if one.serial is None]
        if question == before and not new:
            return before
        self._serial += 1
        for one in new:
            one.serial = self._serial
        return msgspec.structs.replace(question, serial=self._serial)

    def _take(self, answer: RoomsStatus) -> None:
        with self._lock:
            receivers = list(self._receivers.values())
            self._declined = {
                room: one
                for room, one in self._declined.items()
                if one.serial is None or one.serial > answer.serial
            }
        known = set(answer.known)
        for receiver in receivers:
            if receiver.serial is None or receiver.serial > answer.serial:
                continue  # The answer is about an earlier request of its room.
            room = receiver.bootstrap_room
            if (why := answer.ended.get(room)) is not None:
                self._fail(receiver, f"the prefill server ended the request: {why}")
            elif room in known:
                receiver.sources = self._routes
            else:
                receiver.unknown_since = receiver.unknown_since or self._heard

    # -- failures --------------------------------------------------------------------------------

    def _fail(self, receiver: MooncakeKVReceiver, why: str) -> None:
        receiver.fail(why)
        self.leave(receiver)

    def _fail_receivers(self, why: str, *, only_known: bool = False) -> None:
        with self._lock:
            receivers = [one for one in self._receivers.values() if one.sources or not only_known]
        for receiver in receivers:
            self._fail(receiver, why)

    def _fail_all(self, why: str, until: float = math.inf) -> None:
        """Fail the rooms that are asked about or declined since `until` or longer."""
        with self._lock:
            receivers = [one for one in self._receivers.values() if one.since <= until]
            declined = {room: one for room, one in self._declined.items() if one.since <= until}
        for receiver in receivers:
            self._fail(receiver, why)
        self._drop_declined(declined, why)

    def _fail_overdue(self) -> None:
        """Fail the rooms whose time is over: nothing was heard, or the prefill server does not know
        them."""
        now, timeouts = time.monotonic(), self._context.timeouts
        latest = now - timeouts.silence
        if self._heard <= latest:
            endpoint = self._routes[0].endpoint if self._routes else self._where
            silence = (
                f"the prefill server at {endpoint} has not answered for {timeouts.silence:g} s"
            )
            self._fail_all(self._silence or silence, latest)
        with self._lock:
            receivers = list(self._receivers.values())
        for one in receivers:
            since = one.unknown_since
            if not one.sources and since is not None and now - since >= timeouts.unknown_room:
                self._fail(one, "the prefill server does not know the request in time")

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
            self._where,
            why,
        )

    def _check_instance(self) -> None:
        """If the prefill server is silent, look up whether another instance has replaced it. Raises
        Replaced if one has."""
        now, repeat = time.monotonic(), self._context.timeouts.repeat
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
        end = time.monotonic() + self._context.timeouts.repeat
        while time.monotonic() < end and self._closes_at is None and not self.is_idle:
            time.sleep(min(POLL_S, max(0.0, end - time.monotonic())))


def _not_found(error: BootstrapError) -> str:
    return f"the prefill server is not found: {error}"
