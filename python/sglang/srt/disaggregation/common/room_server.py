"""Answers decode servers about the rooms of a prefill server.

The pages of a room belong to it until its decode server confirms that it has read them, gives the
room up, or asks no more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import msgspec

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.base.deployment_secret import DeploymentSecret
from sglang.srt.disaggregation.common.packing import Packer
from sglang.srt.disaggregation.control.control_listener import ControlListener, ControlPeer
from sglang.srt.disaggregation.control.protocol import (
    ASKED_DECODER,
    MAX_POLLED_ROOMS,
    MAX_REASON_CHARS,
    Answer,
    Answered,
    GiveUp,
    Hello,
    KVLayout,
    Pack,
    Packed,
    Poll,
    Question,
    Released,
    RoomsPoll,
    RoomsStatus,
    RoomStatus,
    Waitable,
)
from sglang.srt.messages.first_token import FirstToken
from sglang.srt.utils.bad_messages import MALFORMED, BadMessages

logger = logging.getLogger(__name__)

LONG_POLL_S: Final = 0.5
"""Seconds for which a question waits for a change, fewer than the asker's time limit."""
MAX_QUESTIONS: Final = 32
TURN_S: Final = 0.002
"""Seconds of a turn after which more questions wait. They leave the interpreter to the scheduler
meanwhile, however many there are."""
_POLL_S: Final = 0.1
"""Seconds within which a question is answered that has waited for `LONG_POLL_S`."""
_SILENT_LOOK_S: Final = 0.5
_MAX_UNWANTED: Final = 65_536
"""Most rooms that are remembered as given up before their requests came."""
_LAST_LOOK_S: Final = 0.2
"""`close` answers questions until this many seconds after the last failure of a room: a decode
server that has just heard of the room asks again."""
_NOT_HEARD: Final = "the decode server has not been heard of for"
_LINGER_S: Final = 1.0


@dataclass(slots=True)
class Room:
    """One request whose prompt a decode server reads. Under the lock of its `RoomServer`; times are
    in seconds of its clock."""

    number: int
    opened: float
    named: float | None = None
    """Time at which a decode server last named the room; None: none has."""
    pages: list[int] = field(default_factory=list)
    checksums: list[list[bytes]] = field(default_factory=list)
    """Checksums of `pages`; see `RoomStatus`."""
    state_checksums: list[bytes] = field(default_factory=list)
    metadata: FirstToken | None = None
    row: int | None = None
    """Index of the row of `MetadataBuffers` that has the metadata too."""
    is_complete: bool = False
    failure: str | None = None
    reader: str | None = None
    """The reader that asked first; None: none has."""
    reading: dict[int, float] = field(default_factory=dict)
    """Time of the last question of each part of the reader that has not received all."""
    received: set[int] = field(default_factory=set)
    has_ended: bool = False
    """True if the pages were let go of."""

    @property
    def was_received(self) -> bool:
        return bool(self.received) and not self.reading


class RoomServer:
    """Rooms by number. The scheduler's thread opens, ends and forgets them; one thread,
    `disagg-rooms`, answers decode servers. Questions about an ended room are answered until it is
    forgotten, since the last answer may be lost.

    Args:
        layout: The memory that decode servers read.
        host: Address to listen on, at a free port.
        unwanted_s: Seconds for which a room given up before its request came is remembered.
        silent_s: Seconds without a question after which the decode server counts as gone.
        unknown_s: Seconds for which a room waits until a decode server names it; inf: it may wait
            for ever.
        secret: The secret that decode servers have to prove; None: all who connect are answered.
        packer: Packs pages for readers that ask for it; it is started and closed here.

    Attributes:
        lock: Guards all rooms.
    """

    def __init__(
        self,
        layout: KVLayout,
        host: str,
        *,
        unwanted_s: float,
        silent_s: float,
        unknown_s: float = math.inf,
        secret: DeploymentSecret | None = None,
        packer: Packer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises ValueError if the host is not an address of this machine."""
        self.instance_id = layout.instance_id
        self._layout = layout
        self._unwanted_s = unwanted_s
        self._silent_s = silent_s
        self._unknown_s = unknown_s
        self._packer = packer
        self._clock = clock
        self._rooms: dict[int, Room] = {}
        self._unwanted: OrderedDict[int, tuple[float, str]] = OrderedDict()
        """Rooms that were given up before their requests came, with time and reason."""
        self._named_all = -math.inf
        """Time at which a decode server last named the maximum number of rooms."""
        self._waiting: dict[ControlPeer, tuple[int, Waitable, float]] = {}
        """The last question of each decode server that has no answer yet: its number, itself, and
        the time until which it waits."""
        self.lock = threading.Lock()
        self._wakes = asyncio.Event()
        self._listener = ControlListener(
            host, secret=secret, silent_s=silent_s, on_frames=self._wakes.set
        )
        self.port = self._listener.port
        self._loop = asyncio.new_event_loop()
        self._has_changes = False
        self._last_failure = -math.inf
        self._silent_look_at = -math.inf
        self._closing = False
        self._defect: Exception | None = None
        self._bad = BadMessages(logger, "message of a decode server")
        self._thread = threading.Thread(target=self._serve, name="disagg-rooms", daemon=True)
        self._thread.start()
        if packer is not None:
            packer.start(self.wake)

    # -- the scheduler's side --------------------------------------------------------------------

    def open_room(self, number: int) -> Room:
        """Open the room of a request that has arrived. No other request has it; the room of an
        earlier one was forgotten."""
        with self.lock:
            assert number not in self._rooms, f"room {number} is open, or has just been"
            room = self._rooms[number] = Room(number, self._clock())
            if number in self._unwanted:
                room.failure = self._unwanted.pop(number)[1]
        self.wake()
        return room

    def end_room(self, room: Room, failure: str) -> None:
        """End a room; its pages may be overwritten from then on. Idempotent.

        Args:
            failure: Reason, if the decode server has not received all.
        """
        with self.lock:
            if not room.has_ended:
                room.has_ended = True
                if room.was_received:
                    room.failure = "a decode server has read it already"
                else:
                    room.failure = room.failure or failure
                    self._last_failure = time.monotonic()
                room.pages, room.checksums, room.metadata, room.row = [], [], None, None
                if self._packer is not None:
                    self._packer.end(room.number)
        self.wake()

    def forget_room(self, room: Room) -> None:
        """Forget an ended room, about which no more questions are answered."""
        with self.lock:
            assert room.has_ended, f"room {room.number} is open"
            del self._rooms[room.number]

    def poll(self, room: Room) -> KVPoll:
        """Progress of a room; see `BaseKVSender`. Raises RuntimeError if the thread that answers
        decode servers has failed."""
        if self._defect is not None:
            raise RuntimeError("decode servers are no longer answered") from self._defect
        if room.was_received:
            return KVPoll.Success
        if room.failure is not None:
            return KVPoll.Failed
        if room.reader is None:
            return KVPoll.Bootstrapping
        return KVPoll.Transferring if room.is_complete else KVPoll.WaitingForInput

    def close(self) -> None:
        """Answer the waiting questions whose rooms have changed, and end the thread. Idempotent."""
        if not self._closing:
            self._closing = True
            if self._packer is not None:
                self._packer.close()
            self._has_changes = False
            self.wake()
            self._thread.join()

    def wake(self) -> None:
        """Let the thread look for changes of rooms. Any thread."""
        if not self._has_changes:
            self._has_changes = True
            with contextlib.suppress(RuntimeError):  # The thread has ended.
                self._loop.call_soon_threadsafe(self._wakes.set)

    # -- the thread ------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._answer_all())
        except Exception as error:
            logger.exception("the thread that answers decode servers has failed")
            self._defect = error

    async def _answer_all(self) -> None:
        listener = self._listener
        listener.start()
        last_look = 0.0
        while not self._closing or (
            listener.peers and self._loop.time() < self._last_failure + _LAST_LOOK_S
        ):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_POLL_S):
                    await self._wakes.wait()
            self._wakes.clear()
            for _ in range(min(MAX_QUESTIONS, len(listener.ready))):
                peer = listener.ready.popleft()
                if (raw := peer.take()) is not None:
                    self._read(peer, raw)
            if self._has_changes or self._loop.time() >= last_look + _POLL_S:
                self._has_changes = False
                last_look = self._loop.time()
                self._answer_waiting()
            if listener.ready:
                await asyncio.sleep(TURN_S)
                self._wakes.set()
        self._answer_waiting()
        await listener.close(_LINGER_S)

    def _read(self, sender: ControlPeer, raw: bytes) -> None:
        try:
            asked = ASKED_DECODER.decode(raw)
        except MALFORMED as error:
            self._bad.add(error)
            return
        question = asked.question
        answer = self._answer(question)
        if isinstance(answer, RoomsStatus):
            has_named_a_room = bool(answer.known or answer.ended)
        else:
            has_named_a_room = getattr(question, "room", None) in self._rooms
        waits = False
        if isinstance(question, Waitable) and getattr(question, "may_wait", True):
            number, _, until = self._waiting.pop(sender, (None, None, 0.0))
            waits = not _has_changes(answer, question)
            if waits:
                if number != asked.number:  # A repeated one has waited since it first came.
                    until = self._clock() + LONG_POLL_S
                self._waiting[sender] = asked.number, question, until
        if has_named_a_room:
            sender.keep()  # Rooms cannot be guessed.
        if not waits:
            sender.send(msgspec.msgpack.encode(Answered(asked.number, self.instance_id, answer)))

    def _answer(self, question: Question) -> Answer:
        if isinstance(question, Hello):
            return self._layout
        now = self._clock()
        with self.lock:
            if isinstance(question, RoomsPoll):
                rooms = (*question.rooms, *question.known)
                if len(rooms) >= MAX_POLLED_ROOMS:
                    self._named_all = now
                for room in rooms:
                    if (named := self._rooms.get(room)) is not None:
                        named.named = now
                for room, reason in question.declined.items():
                    self._on_give_up(GiveUp(room, "", reason), self._rooms.get(room), now)
            if isinstance(question, Waitable):
                return self._state_of(question, now)
            one = self._rooms.get(question.room)
            if isinstance(question, GiveUp):
                self._on_give_up(question, one, now)
                return Released(question.room, was_held=False)
            if one is None or one.reader != question.reader:
                return Released(question.room, was_held=False)
            if one.failure is None and one.is_complete and question.part in one.reading:
                del one.reading[question.part]
                one.received.add(question.part)
                if self._packer is not None:
                    self._packer.note_read(one.number, question.part, len(one.pages))
            return Released(question.room, was_held=question.part in one.received)

    def _on_give_up(self, question: GiveUp, one: Room | None, now: float) -> None:
        reason = f"the decode server gave it up: {question.reason[:MAX_REASON_CHARS]}"
        if one is None:
            self._unwanted[question.room] = now, reason
            self._unwanted.move_to_end(question.room)
            while len(self._unwanted) > _MAX_UNWANTED:
                self._unwanted.popitem(last=False)
        elif one.reader in (None, question.reader) and not one.was_received:
            one.failure = one.failure or reason

    def _fail_silent(self, now: float) -> None:
        """Fail rooms that no decode server names or reads any more. No room counts as unnamed while
        a decode server has more rooms than it can name."""
        may_miss = now - self._named_all > self._unknown_s
        for room in self._rooms.values():
            if room.failure is not None or room.was_received:
                continue
            if room.reader is None:
                if may_miss and now - (room.named or room.opened) > self._unknown_s:
                    never, gone = "no decode server has asked for it within", _NOT_HEARD
                    why = never if room.named is None else gone
                    room.failure = f"{why} {self._unknown_s:.0f} s"
            elif room.is_complete and now - min(room.reading.values()) > self._silent_s:
                room.failure = f"{_NOT_HEARD} {self._silent_s:.0f} s"

    def _answer_waiting(self) -> None:
        now = self._clock()
        answers: list[tuple[ControlPeer, int, Answer]] = []
        answer: Answer
        with self.lock:
            unwanted = self._unwanted
            while unwanted and now - next(iter(unwanted.values()))[0] > self._unwanted_s:
                unwanted.popitem(last=False)  # The room's request never came.
            if self._loop.time() >= self._silent_look_at:
                self._silent_look_at = self._loop.time() + _SILENT_LOOK_S
                self._fail_silent(now)
            for sender, (number, question, until) in self._waiting.items():
                answer = self._state_of(question, now)
                if now >= until or _has_changes(answer, question):
                    answers.append((sender, number, answer))
        for sender, number, answer in answers:
            del self._waiting[sender]
            # If the answer is lost, it will be asked for again.
            sender.send(msgspec.msgpack.encode(Answered(number, self.instance_id, answer)))

    def _state_of(self, question: Waitable, now: float) -> RoomsStatus | RoomStatus | Packed:
        if isinstance(question, Poll):
            return self._status_of(question, now)
        if isinstance(question, Pack):
            return self._packed_of(question, now)
        there = {
            number: one
            for number in (*question.rooms, *question.known)
            if (one := self._rooms.get(number)) is not None
        }
        ended = {number: one.failure for number, one in there.items() if one.failure is not None}
        known = [room for room in question.rooms if room in there and room not in ended]
        return RoomsStatus(question.serial, known, ended)

    def _packed_of(self, ask: Pack, now: float) -> Packed:
        """Answer to a packing question. Notes that the reader is alive."""
        one = self._rooms.get(ask.room)
        failure = None
        if one is None or one.reader != ask.reader or ask.part not in one.reading:
            failure = "pages were to be packed of a room that is not being read"
        elif one.failure is not None:
            failure = one.failure
        if one is None or failure is not None or self._packer is None:
            return Packed(ask.room, ask.number, failure=failure or "it packs no pages")
        one.reading[ask.part] = now
        pages = one.pages[ask.first_page : ask.first_page + ask.num_pages]
        return self._packer.ask(ask, pages)

    def _status_of(self, ask: Poll, now: float) -> RoomStatus:
        """Answer to a question about a room. Notes that the reader is alive."""
        one = self._rooms.get(ask.room)
        if one is None:
            return RoomStatus(ask.room, is_known=False)
        if one.reader is None:
            one.reader = ask.reader
            one.reading = dict.fromkeys(range(ask.num_parts), now)
        if one.reader != ask.reader:
            failure = "the room belongs to another reader: draw one for each request"
            return RoomStatus(ask.room, is_known=True, failure=failure)
        if ask.part in one.reading:
            one.reading[ask.part] = now
            if self._packer is not None:
                self._packer.note_read(one.number, ask.part, ask.have_pages)
        if one.failure is not None:
            return RoomStatus(ask.room, is_known=True, failure=one.failure)
        first = max(ask.have_pages, 0)
        is_inline = ask.wants_inline or one.row is None
        return RoomStatus(
            ask.room,
            is_known=True,
            first_page=first,
            pages=one.pages[first:],
            checksums=one.checksums[first:],
            state_checksums=one.state_checksums,
            first_token=one.metadata if is_inline else None,
            row=None if is_inline else one.row,
        )


def _has_changes(answer: Answer, question: Waitable) -> bool:
    """True if the answer has anything that the asker does not know yet."""
    assert isinstance(answer, RoomsStatus | RoomStatus | Packed), "an answer to such a question"
    if isinstance(answer, RoomsStatus):
        assert isinstance(question, RoomsPoll)
        return bool(answer.known or answer.ended or question.declined)
    if answer.failure is not None:
        return True
    if isinstance(answer, Packed):
        assert isinstance(question, Pack)
        return answer.first + len(answer.places) > max(question.known, question.done)
    assert isinstance(question, Poll)
    return bool(answer.pages) or (
        not question.has_token and (answer.first_token is not None or answer.row is not None)
    )
